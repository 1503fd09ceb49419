"""Random statements and whole programs (see :mod:`tests.fuzz.generator` for the expressions)."""

from __future__ import annotations

import random
from collections.abc import Callable

from tests.fuzz import awkward, effects, memory
from tests.fuzz.generator import CALLABLES, Scope, Writer

_KINDS = ("T", "T", "T", "I", "I", "F", "B", "S", "LT", "LI", "DT", "DI", "C")


class StatementWriter(Writer):
    """Draws statements: each is a list of lines, and tells the scope what it binds."""

    def __init__(self, rng: random.Random, breaks: bool, about_memory: bool = False) -> None:
        super().__init__(rng, breaks)
        self._budget = 0
        self.about_memory = about_memory
        self._modules = [awkward, effects, *([memory] * 10 if about_memory else ())]
        self.share = 0.75 if about_memory else 0.2

    def block(self, scope: Scope, size: int, depth: int) -> list[str]:
        """Some statements, never none."""
        lines: list[str] = []
        for _ in range(size):
            if self._budget <= 0:
                break
            self._budget -= 1
            lines += self.statement(scope, depth)
        return lines or ["pass"]

    def body(self, scope: Scope, budget: int, depth: int = 2, returned: str | None = None) -> list[str]:
        """The body of a function: statements and a return."""
        self._budget = budget
        lines = self.block(scope, budget, depth)
        if returned is not None:
            lines.append(f"return {self.result(scope) if returned == 'any' else self.expression(returned, scope)}")
        return lines

    def result(self, scope: Scope) -> str:
        """What a program returns: one value, or some in a container."""
        if self.chance(0.4):
            return self.expression("T", scope)
        kinds = ("M",) if self.about_memory else _KINDS
        parts = [self.expression(self.rng.choice(kinds), scope, 1) for _ in range(self.rng.randint(1, 3))]
        parts.insert(0, self.expression("T", scope))
        if self.chance(0.3):
            return "{" + ", ".join(f"{number}: {part}" for number, part in enumerate(parts)) + "}"
        return "(" + ", ".join(parts) + ",)" if self.chance(0.6) else "[" + ", ".join(parts) + "]"

    def awkward(self, kind: str, scope: Scope, depth: int) -> str | None:
        """An expression of a module that plugs in."""
        return self.rng.choice(self._modules).expression(self, kind, scope, depth)

    def _expression_M(self, scope: Scope, depth: int) -> str:
        return memory.matrix(self, scope, depth)

    def statement(self, scope: Scope, depth: int) -> list[str]:
        """One statement."""
        if self.chance(self.share):
            lines = self.rng.choice(self._modules).statement(self, scope)
            if not self.plain or not any(name in line for line in lines for name in CALLABLES):
                return lines
        simple: list[tuple[float, Callable[[Scope], list[str]]]] = [
            (4.0, self._assign_new),
            (2.0, self._assign_known),
            (1.5, self._augmented),
            (2.5, self._container_method),
            (1.5, self._item),
            (1.5, self._attribute),
            (1.0, self._in_place),
            (0.6, self._delete),
            (0.6, self._unpack),
            (0.5, self._global_write),
            (0.3, self._print),
            (0.4, self._nested_function),
            (0.3, self._alias),
            (0.15, self._raise),
            (0.2, self._assert),
            (0.4, self._set),
            (0.4, self._nested_container),
            (0.3, self._iterator),
            (0.15, self._delete_name),
            (0.15, self._nested_class),
        ]
        compound: list[tuple[float, Callable[[Scope, int], list[str]]]] = [
            (2.0, self._if),
            (1.5, self._for),
            (0.7, self._while),
            (1.0, self._try),
            (0.8, self._with),
            (0.4, self._match),
        ]
        if scope.in_loop and self.chance(0.08):
            return [f"if {self.expression('B', scope, 1)}:", "    " + self.pick("break", "continue")]
        if scope.returns and self.chance(0.03):
            return [f"if {self.expression('B', scope, 1)}:", f"    return {self.expression('T', scope, 1)}"]
        if depth > 0 and self.chance(0.35):
            weights = [weight for weight, _ in compound]
            return self.rng.choices([make for _, make in compound], weights)[0](scope, depth - 1)
        weights = [weight for weight, _ in simple]
        return self.rng.choices([make for _, make in simple], weights)[0](scope)

    def _known(self, scope: Scope, *kinds: str) -> tuple[str, str] | None:
        """An assignable expression of one of the kinds, with its kind."""
        found = [(kind, name) for kind in kinds for name in scope.assignable.get(kind, [])]
        return self.rng.choice(found) if found else None

    def _assign_new(self, scope: Scope) -> list[str]:
        kind = self.rng.choice(_KINDS)
        value = self.expression(kind, scope)
        name = self.name("v")
        scope.add(kind, name)
        return [f"{name} = {value}"]

    def _assign_known(self, scope: Scope) -> list[str]:
        known = self._known(scope, *_KINDS)
        if known is None:
            return self._assign_new(scope)
        return [f"{known[1]} = {self.expression(known[0], scope)}"]

    def _augmented(self, scope: Scope) -> list[str]:
        known = self._known(scope, "T", "I", "F", "S", "LT", "LI", "DT")
        if known is None:
            return self._assign_new(scope)
        kind, name = known
        if kind == "T" and self.chance(0.5):
            # Written like this, it is no write in place.
            return [f"{name} = {name} {self.pick('+', '-', '*')} {self.expression('T', scope, 1)}"]
        if kind in ("T", "I", "F"):
            return [
                f"{name} {self.pick('+=', '-=', '*=')} {self.expression('F' if kind == 'T' and self.chance(0.6) else kind, scope, 1)}"
            ]
        if kind == "DT":
            return [f"{name} |= {self.expression('DT', scope, 1)}"]
        if kind == "S":
            return [f"{name} = ({name} + {self.expression('S', scope, 1)})[:8]"]
        return [f"{name} += {self.expression(kind, scope, 1)}[:2]"]

    def _container_method(self, scope: Scope) -> list[str]:
        kind = self.pick("LT", "LI", "DT", "DI")
        container = self.expression(kind, scope, 0)
        element = self.expression("T" if kind.endswith("T") else "I", scope, 1)
        index = self.pick("0", "-1", "1")
        key = self.expression("S", scope, 1)
        if kind.startswith("L"):
            options = [
                f"{container}.append({element})",
                f"{container}.append({element})",
                f"{container}.insert({index}, {element})",
                f"{container}.extend([{element}, {element}])",
                f"if {container}: {container}.pop({self.pick('', index)})",
                f"{container}.reverse()",
                f"{container}.sort({'key=lambda t: t.dim()' if kind == 'LT' else ''})",
                f"{container}.clear()",
            ]
            if kind == "LI":
                options.append(f"if {element} in {container}: {container}.remove({element})")
            return (
                [self.rng.choice(options), f"del {container}[6:]"] if self.chance(0.7) else [self.rng.choice(options)]
            )
        return [
            self.pick(
                f"{container}.update({{{key}: {element}}})",
                f"{container}.update(b={element})",
                f"{container}.setdefault({key}, {element})",
                f"{container}.pop({key}, None)",
                f"{container}[{key}] = {container}.pop({key}, {element})",
                f"if {container}: {container}.popitem()",
                f"{container}.clear()",
            )
        ]

    def _item(self, scope: Scope) -> list[str]:
        kind = self.pick("LT", "LI", "DT", "DI")
        container = self.expression(kind, scope, 0)
        element = self.expression("T" if kind.endswith("T") else "I", scope, 1)
        if kind.startswith("L"):
            there = "" if self.chance(0.1) else f"if {container}: "
            return [
                there
                + self.pick(
                    f"{container}[:1] = [{element}]",
                    f"{container}[1:2] = []",
                    f"{container}[{self.pick('0', '-1')}] = {element}",
                    f"{container}[{self.pick('0', '-1')}] {self.pick('+=', '*=')} {self.expression('I', scope, 1)}",
                )
            ]
        key = self.expression("S", scope, 1)
        return [
            self.pick(
                f"{container}[{key}] = {element}", f"{container}['a'] = {element}", f"{container}[{key}] = {element}"
            )
        ]

    def _attribute(self, scope: Scope) -> list[str]:
        target = self.expression("O", scope, 0)
        attribute, kind = self.rng.choice(
            [
                ("weight", "T"),
                ("scale", "F"),
                ("count", "I"),
                ("items", "LT"),
                ("table", "DT"),
                ("label", "S"),
                ("level", "I"),
                ("late", "I"),
                ("action", "C"),
                ("last", "T"),
            ]
        )
        if self.chance(0.1):
            return [f"setattr({target}, {attribute!r}, {self.expression(kind, scope)})"]
        if self.chance(0.1):
            return [f"net.last = {self.expression('T', scope)}"]
        if self.chance(0.1):
            return [f"net.seen += {self.expression('I', scope, 1)}"]
        if self.chance(0.08):
            return [f"Thing.LIMIT = {self.expression('I', scope, 1)}"]
        return [f"{target}.{attribute} = {self.expression(kind, scope)}"]

    def _in_place(self, scope: Scope) -> list[str]:
        target = self.expression("T", scope, 0)
        if self.chance(0.3):
            target = self.pick("net.buffer", "net.running", "state")
        change = self.pick(
            f"{target}.add_({self.expression('F', scope, 1)})",
            f"{target}.mul_({self.expression('F', scope, 1)})",
            f"{target}.copy_({self.expression('T', scope, 1)})",
            f"{target}[..., 0] = {self.expression('F', scope, 1)}",
            f"{target}.zero_()",
            f"{target}.add_({self.expression('T', scope, 1)}.mean())",
            f"{target}.T.mul_(2.0)",
            f"{target}[..., :1] += 1.0",
            f"{target}.view(-1).sub_(1.0)",
        )
        if self.chance(0.85):
            return ["with torch.no_grad():", f"    {change}"]
        return [change]

    def _delete(self, scope: Scope) -> list[str]:
        container = self.expression(self.pick("LT", "LI"), scope, 0)
        table = self.expression(self.pick("DT", "DI"), scope, 0)
        key = self.expression("S", scope, 1)
        return [
            self.pick(
                f"if {container}: del {container}[{self.pick('0', '-1')}]",
                f"del {container}[1:]",
                f"if {key} in {table}: del {table}[{key}]",
                "if hasattr(thing, 'late'): del thing.late",
            )
        ]

    def _unpack(self, scope: Scope) -> list[str]:
        first, second = self.name("v"), self.name("v")
        choice = self.rng.randrange(4)
        if choice == 0:
            lines = [f"{first}, {second} = {self.expression('T', scope, 1)}, {self.expression('T', scope, 1)}"]
        elif choice == 1:
            lines = [f"{first}, *{second} = {self.expression('T', scope, 1)}, *{self.expression('LT', scope, 1)}"]
            scope.add("T", first)
            scope.add("LT", second)
            return lines
        elif choice == 2:
            lines = [f"{first} = {second} = {self.expression('T', scope, 1)}"]
        else:
            known = [self._known(scope, "T"), self._known(scope, "T")]
            if known[0] is None or known[1] is None:
                return self._assign_new(scope)
            return [f"{known[0][1]}, {known[1][1]} = {known[1][1]}, {known[0][1]}"]
        scope.add("T", first)
        scope.add("T", second)
        return lines

    def _global_write(self, scope: Scope) -> list[str]:
        name, kind = self.rng.choice(
            [("limit", "I"), ("state", "T"), ("mode", "S"), ("factor", "F"), ("history", "LT")]
        )
        scope.globals_written.add(name)
        return [f"{name} = {self.expression(kind, scope)}"]

    def _print(self, scope: Scope) -> list[str]:
        if not self.breaks:
            return self._assign_new(scope)
        return [f"print({self.expression(self.pick('I', 'S', 'F', 'LI', 'T'), scope)})"]

    def _nested_function(self, scope: Scope) -> list[str]:
        name, counter = self.name("inner"), self.name("n")
        inner = scope.child(in_loop=False)
        inner.assignable = {}
        inner.returns = False
        inner.add("T", "t")
        value = self.expression("I", scope, 1)
        inner.add("I", counter)
        lines = [
            f"{counter} = {value}",
            f"def {name}(t, times={self.expression('I', scope, 1)}):",
            f"    nonlocal {counter}",
        ]
        inner.add("I", "times")
        body = self.block(inner, self.rng.randint(1, 3), 0)
        lines += ["    " + line for line in body]
        lines.append(f"    return {self.expression('T', inner, 1)}")
        scope.add("I", counter)
        scope.add("C", name, assignable=False)
        return lines

    def _alias(self, scope: Scope) -> list[str]:
        kind = self.pick("LT", "DT", "T", "LI", "O")
        name = self.name("alias")
        value = self.expression(kind, scope, 0)
        scope.add(kind, name, assignable=kind != "O")
        return [f"{name} = {value}"]

    def _set(self, scope: Scope) -> list[str]:
        text = self.expression("S", scope, 1)
        return [
            self.pick(
                f"tags.add({text})",
                f"tags.discard({text})",
                f"tags.update({{{text}, 'z'}})",
                f"if {text} in tags: tags.remove({text})",
                "tags.clear()",
            )
        ]

    def _nested_container(self, scope: Scope) -> list[str]:
        tensor, key = self.expression("T", scope, 1), self.expression("S", scope, 0)
        return [
            self.pick(
                f"nested.setdefault({key}, []).append({tensor})",
                f"nested['a'] = [{tensor}, *nested['a']][:3]",
                f"nested['a'][0] = {tensor}",
                "nested['a'][-1] = nested['a'][0]",
                f"nested[{key}] = nested['a']",
                f"nested['a'].insert(0, {tensor})",
                f"nested['b'] = {self.expression('LT', scope, 0)}",
                f"for k, values in nested.items(): values.append({tensor}); del values[3:]",
            )
        ]

    def _iterator(self, scope: Scope) -> list[str]:
        name, first = self.name("it"), self.name("v")
        scope.add("T", first)
        source = self.expression("LT", scope, 1)
        made = self.pick(
            f"iter({source})", f"stream({source}, x0)", f"(t * 2 for t in {source})", f"map(torch.sin, {source})"
        )
        made = made.replace("x0", self.expression("T", scope, 0))
        return [
            f"{name} = {made}",
            f"{first} = next({name}, {self.expression('T', scope, 0)})",
            f"history[:2] = list({name})[:2]",
        ]

    def _delete_name(self, scope: Scope) -> list[str]:
        name = self.name("v")
        return [f"{name} = {self.expression('T', scope, 1)}", f"{name}_ = {name} * 2", f"del {name}"]

    def _nested_class(self, scope: Scope) -> list[str]:
        name, made = self.name("Local"), self.name("v")
        lines = [
            f"class {name}({self.pick('Base', 'object')}):",
            f"    amount = {self.expression('F', scope, 1)}",
            "    def __init__(self, t): self.t, self.count = t, 0",
            "    def value(self): return self.t * self.amount",
            f"{made} = {name}({self.expression('T', scope, 1)}).value()",
        ]
        scope.add("T", made)
        return lines

    def _raise(self, scope: Scope) -> list[str]:
        error = self.pick("ValueError", "KeyError", "Problem")
        return [
            f"if {self.expression('B', scope, 1)} and {self.expression('B', scope, 1)}:",
            f"    raise {error}({self.expression('S', scope, 1)})",
        ]

    def _assert(self, scope: Scope) -> list[str]:
        return [
            f"assert {self.expression('B', scope, 1)} or {self.expression('B', scope, 1)}, {self.expression('S', scope, 1)}"
        ]

    # Compound statements.

    def _inside(self, scope: Scope, depth: int, **more: bool | None) -> list[str]:
        return ["    " + line for line in self.block(scope.child(**more), self.rng.randint(1, 3), depth)]

    def _if(self, scope: Scope, depth: int) -> list[str]:
        lines = [f"if {self.expression('B', scope)}:", *self._inside(scope, depth)]
        if self.chance(0.25):
            lines += [f"elif {self.expression('B', scope)}:", *self._inside(scope, depth)]
        if self.chance(0.5):
            lines += ["else:", *self._inside(scope, depth)]
        return lines

    def _for(self, scope: Scope, depth: int) -> list[str]:
        inner = scope.child(in_loop=True)
        choice = self.rng.randrange(5)
        name, second = self.name("v"), self.name("v")
        if choice == 0:
            head = f"for {name} in range({self.expression('I', scope, 1)} % 4):"
            inner.add("I", name)
        elif choice == 1:
            head = f"for {name} in list({self.expression('LT', scope, 1)})[:4]:"
            inner.add("T", name)
        elif choice == 2:
            head = f"for {name}, {second} in list({self.expression('DT', scope, 1)}.items())[:4]:"
            inner.add("S", name)
            inner.add("T", second)
        elif choice == 3:
            head = f"for {name}, {second} in enumerate({self.expression('LI', scope, 1)}[:4]):"
            inner.add("I", name)
            inner.add("I", second)
        else:
            head = f"for {name} in pairs({self.expression('LT', scope, 1)}[:4]):"
            inner.add("T", name)
        lines = [head, *self._inside(inner, depth, in_loop=True)]
        if self.chance(0.2):
            lines += ["else:", *self._inside(scope, depth)]
        return lines

    def _while(self, scope: Scope, depth: int) -> list[str]:
        name = self.name("k")
        inner = scope.child(in_loop=True)
        inner.add("I", name, assignable=False)
        lines = [
            f"{name} = 0",
            f"while {name} < {self.pick('2', '3', self.expression('I', scope, 1) + ' % 4')}:",
            f"    {name} += 1",
            *self._inside(inner, depth, in_loop=True),
        ]
        if self.chance(0.2):
            lines += ["else:", *self._inside(scope, depth)]
        return lines

    def _try(self, scope: Scope, depth: int) -> list[str]:
        lines = ["try:", *self._inside(scope, depth)]
        if self.chance(0.5):
            lines.append(
                "    "
                + self.pick(
                    f"raise Problem({self.expression('S', scope, 1)})",
                    f"{self.expression('DT', scope, 0)}['missing']",
                    f"{self.expression('LI', scope, 0)}[17]",
                    f"int({self.expression('S', scope, 1)})",
                    f"{self.expression('I', scope, 1)} // {self.expression('I', scope, 1)}",
                    "thing.absent",
                )
            )
        handlers = False
        if self.chance(0.85):
            handlers = True
            error = self.pick("Problem", "Exception", "(KeyError, IndexError, ValueError)", "Exception")
            if self.chance(0.5):
                inner = scope.child()
                inner.add("S", "str(error)", assignable=False)
                inner.add("S", "type(error).__name__", assignable=False)
                lines += [f"except {error} as error:", *self._inside(inner, depth)]
            else:
                lines += [f"except {error}:", *self._inside(scope, depth)]
            if self.chance(0.3):
                lines += ["else:", *self._inside(scope, depth)]
        if not handlers or self.chance(0.3):
            inner = scope.child(in_loop=False)
            inner.returns = False
            lines += ["finally:", *self._inside(inner, depth)]
        return lines

    def _with(self, scope: Scope, depth: int) -> list[str]:
        head = self.pick(
            "with torch.no_grad():",
            "with torch.enable_grad():",
            "with contextlib.suppress(Exception):",
            f"with torch.set_grad_enabled({self.expression('B', scope, 1)}):",
            "with thing as held:",
            "with counting():",
            "with contextlib.nullcontext():",
        )
        heads = self.rng.choice(self._modules).head(self, scope) if self.chance(0.3) else [head]
        return [*heads, *self._inside(scope, depth)]

    def _match(self, scope: Scope, depth: int) -> list[str]:
        kind = self.pick("I", "S", "LI", "DI")
        inner = scope.child()
        name = self.name("v")
        inner.add(kind, name)
        pattern = {"I": "0 | 1", "S": "'a'", "LI": "[]", "DI": "{'a': 1}"}[kind]
        second = {"I": "2", "S": "str('b')", "LI": "[1, *_]", "DI": "{'b': int(_)}"}[kind]
        return [
            f"match {self.expression(kind, scope)}:",
            f"    case {pattern}:",
            *("    " + line for line in self._inside(scope, depth)),
            f"    case {second}:",
            *("    " + line for line in self._inside(scope, depth)),
            f"    case {name}:",
            *("    " + line for line in self._inside(inner, depth)),
        ]
