"""Write random small Python programs: ``program(seed)`` is the source text of one, always the same for a seed.

Tensors are kept broadcastable to (2, 3) as far as that goes, so that most programs run; those that raise are programs too.
Expressions and statements are drawn by kind: T tensor, I int, F float, B bool, S string, LT and LI lists of tensors and ints,
DT and DI dictionaries from strings to tensors and ints, O an object of the program's own class, C a function from tensor to tensor,
M a matrix of a program about memory (see :mod:`tests.fuzz.memory`).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

# What helpers and methods do not use, so that nothing recurses.
CALLABLES = (
    "helper",
    "thing(",
    "net",
    ".method",
    ".action",
    ".total",
    "counted",
    "other(",
    ")(",
    "build",
    "remember",
    "careful",
    "talker",
    "with_module_hook",
    "raising",
    "caught",
    "in_thread",
)
_KEYS = ("a", "b", "c", "d")


@dataclass
class Scope:
    """What a piece of code can see: expressions by kind, and which of them can be assigned to."""

    values: dict[str, list[str]] = field(default_factory=dict)
    assignable: dict[str, list[str]] = field(default_factory=dict)
    in_loop: bool = False
    returns: bool = True
    breaks: bool = False
    globals_written: set[str] = field(default_factory=set)

    def add(self, kind: str, expression: str, assignable: bool = True) -> None:
        """Make an expression known."""
        for table in (self.values, self.assignable) if assignable else (self.values,):
            names = table.setdefault(kind, [])
            if expression not in names:
                names.append(expression)

    def child(self, in_loop: bool | None = None) -> Scope:
        """A scope for a nested block: what it binds may be unbound afterwards, so the outer one does not see it."""
        return Scope(
            {kind: list(names) for kind, names in self.values.items()},
            {kind: list(names) for kind, names in self.assignable.items()},
            self.in_loop if in_loop is None else in_loop,
            self.returns,
            self.breaks,
            self.globals_written,
        )


class Writer:
    """Draws expressions and statements from one random stream."""

    def __init__(self, rng: random.Random, breaks: bool) -> None:
        self.rng = rng
        self.breaks = breaks
        self.plain = False
        #: How often an expression or a statement comes from a module that plugs in.
        self.share = 0.2
        self._names = 0

    def name(self, prefix: str) -> str:
        """A new variable name."""
        self._names += 1
        return f"{prefix}{self._names}"

    def chance(self, probability: float) -> bool:
        """True with this probability."""
        return self.rng.random() < probability

    def pick(self, *options: str) -> str:
        """One of the options."""
        return self.rng.choice(options)

    # Expressions.

    def expression(self, kind: str, scope: Scope, depth: int = 2) -> str:
        """An expression of a kind."""
        known = scope.values.get(kind, [])
        if known and (depth <= 0 or self.chance(0.4)):
            # What a matrix was computed from matters: the latest are drawn more often.
            return self.rng.choice(known[-4:] + known if kind == "M" else known)
        if depth <= 0:
            return self._literal(kind)
        draw: Callable[[Scope, int], str] = getattr(self, f"_expression_{kind}")
        for _ in range(8):
            text = (self.awkward(kind, scope, depth - 1) if self.chance(self.share) else None) or draw(scope, depth - 1)
            if not self.plain or not any(name in text for name in CALLABLES):
                return text
        return self._literal(kind)

    def awkward(self, kind: str, scope: Scope, depth: int) -> str | None:
        """An expression of :mod:`tests.fuzz.awkward`, where there are any."""
        return None

    def _literal(self, kind: str) -> str:
        literals = {
            "T": (
                "torch.ones(2, 3)",
                "torch.full((3,), 0.5)",
                "torch.arange(3.0)",
                "torch.tensor(1.5)",
                "torch.zeros(1, 3)",
            ),
            "I": ("0", "1", "2", "3", "-1"),
            "F": ("0.5", "1.0", "-2.0", "0.25", "3.0"),
            "B": ("True", "False"),
            "S": tuple(repr(key) for key in _KEYS),
            "LT": ("[]", "[torch.ones(3)]", "[torch.ones(3), torch.zeros(2, 3)]"),
            "LI": ("[]", "[1, 2]", "[3, 0, 1]"),
            "DT": ("{}", "{'a': torch.ones(3)}", "dict(b=torch.ones(3), a=torch.zeros(3))"),
            "DI": ("{}", "{'a': 1}", "dict(b=2, a=1)"),
            "C": ("torch.relu", "torch.sin", "(lambda t: t * 2)", "torch.nn.functional.gelu"),
            "O": ("thing",),
            "M": ("torch.ones(2, 3)",),
        }
        return self.pick(*literals[kind])

    def _expression_T(self, scope: Scope, depth: int) -> str:
        def sub(kind: str) -> str:
            return self.expression(kind, scope, depth)

        options: list[Callable[[], str]] = [
            lambda: f"({sub('T')} {self.pick('+', '-', '*')} {sub('T')})",
            lambda: f"({sub('T')} {self.pick('+', '-', '*')} {sub('F')})",
            lambda: f"({sub('I')} {self.pick('+', '-', '*')} {sub('T')})",
            lambda: f"{sub('T')}.{self.pick('sin', 'cos', 'tanh', 'relu', 'exp', 'abs', 'square', 'sigmoid', 'neg')}()",
            lambda: f"torch.{self.pick('sin', 'relu', 'tanh', 'atan')}({sub('T')})",
            lambda: f"{sub('C')}({sub('T')})",
            lambda: f"net({sub('T')})",
            lambda: f"({sub('T')}.expand(2, 3) @ square)",
            lambda: f"{sub('T')}.{self.pick('sum', 'mean', 'prod')}()",
            lambda: f"{sub('T')}.sum(-1, keepdim=True)",
            lambda: f"{sub('T')}.detach()",
            lambda: f"{sub('T')}.{self.pick('clone()', 'contiguous()', 'reshape(-1).sum()', 'unsqueeze(0)[0]', 'T.T')}",
            lambda: f"{sub('T')}[{self.pick('...', '..., :1', '..., 0:3', '..., None, :', 'None')}]",
            lambda: f"torch.stack([{sub('T')}.sum(), {sub('T')}.mean(), torch.tensor({sub('F')})])",
            lambda: f"torch.cat([{sub('T')}.reshape(-1), {sub('T')}.reshape(-1)]).sum()",
            lambda: f"torch.where({sub('T')} > {sub('F')}, {sub('T')}, {sub('T')})",
            lambda: f"({sub('T')} if {sub('B')} else {sub('T')})",
            lambda: f"sum({sub('LT')}, {sub('T')})",
            lambda: f"sum([t * {sub('F')} for t in {sub('LT')}], {sub('T')})",
            lambda: self._indexed(sub("LT"), sub("T"), sub("I")),
            lambda: f"{sub('DT')}.get({sub('S')}, {sub('T')})",
            lambda: f"{{'a': {sub('T')}, **{sub('DT')}}}['a']",
            lambda: self._looked_up(sub("DT"), sub("S"), sub("T")),
            lambda: f"{sub('O')}.method({sub('T')})",
            lambda: f"{sub('O')}.total",
            lambda: f"{sub('O')}({sub('T')})",
            lambda: f"helper({sub('T')}, {sub('I')})",
            lambda: f"helper({sub('T')}, count={sub('I')}, extra={sub('F')})",
            lambda: f"torch.tensor({sub('F')})",
            lambda: f"torch.full((3,), {sub('F')})",
            lambda: f"torch.randn(3) * {sub('T')}",
            lambda: f"torch.nn.functional.dropout({sub('T')}, 0.5)",
            lambda: f"max({sub('LT')} + [{sub('T')}], key=lambda t: t.dim())",
            lambda: f"({self.name('w')} := {sub('T')}).sum()",
            lambda: f"functools.reduce(operator.add, {sub('LT')}, {sub('T')})",
            lambda: f"next((t for t in {sub('LT')} if t.dim() == 1), {sub('T')})",
            lambda: f"torch.{self.pick('zeros_like', 'ones_like', 'rand_like')}({sub('T')})",
            lambda: f"[*{sub('LT')}, {sub('T')}][{self.pick('0', '-1')}]",
            lambda: f"(lambda a, b={sub('F')}: a * b)({sub('T')})",
            lambda: f"apply({sub('C')}, {sub('T')})",
            lambda: f"torch.unbind({sub('T')}, -1)[0]",
            lambda: f"{sub('T')}.to(torch.{self.pick('float32', 'float32', 'float64')})",
            lambda: f"torch.softmax({sub('T')}, -1)",
            lambda: f"nested[{sub('S')}[:1] or 'a'][0]" if self.chance(0.1) else "nested['a'][0]",
            lambda: f"Pair({sub('T')}, {sub('I')}).{self.pick('first', '_replace(second=2).first')}",
            lambda: f"sum(a * b for a in {sub('LT')}[:2] for b in {sub('LT')}[:2])",
            lambda: f"[u for t in {sub('LT')} for u in (t, t * 2) if u.dim()][:1] and {sub('T')}",
            lambda: f"next(stream({sub('LT')}, {sub('T')}))",
            lambda: f"[*stream({sub('LT')}, {sub('T')})][-1]",
            lambda: f"functools.partial(torch.mul, {sub('T')})({sub('F')})",
            lambda: f"{sub('T')}.{self.pick('min', 'max')}()",
            lambda: f"torch.zeros(3).index_add(0, torch.tensor([0, 2]), {sub('T')}.reshape(-1)[:1].expand(2))",
            lambda: f"{sub('T')}[..., [0]]",
            lambda: f"{sub('T')}[..., torch.tensor([True])]" if self.breaks else f"{sub('T')}.cumsum(-1)",
            lambda: f"torch.lerp({sub('T')}.expand(2, 3), {sub('T')}.expand(2, 3), 0.5)",
            lambda: f"getattr({sub('O')}, {self.pick(repr('weight'), repr('total'), repr('last'))}, {sub('T')})",
            lambda: f"torch.autograd.grad(({sub('T')} * 1.0).sum() + leaf_1.square().sum(), leaf_1)[0]",
        ]
        return self.rng.choice(options)()

    def _indexed(self, container: str, instead: str, index: str) -> str:
        """An item of a list, mostly one that is there."""
        if self.chance(0.1):
            return f"{container}[{index}]"
        return f"({container}[{self.pick('0', '-1')}] if {container} else {instead})"

    def _looked_up(self, table: str, key: str, instead: str) -> str:
        """An item of a dictionary, mostly one that is there."""
        if self.chance(0.1):
            return f"{table}[{key}]"
        return f"({table}[{key}] if {key} in {table} else {instead})"

    def _expression_I(self, scope: Scope, depth: int) -> str:
        def sub(kind: str) -> str:
            return self.expression(kind, scope, depth)

        options: list[Callable[[], str]] = [
            lambda: self._literal("I"),
            lambda: f"({sub('I')} {self.pick('+', '-', '*')} {sub('I')})",
            lambda: f"({sub('I')} % {self.pick('2', '3', '5')})",
            lambda: f"len({sub(self.pick('LT', 'LI', 'DT', 'DI', 'S'))})",
            lambda: f"{sub('T')}.{self.pick('dim()', 'numel()', 'shape[-1]', 'size(0)', 'ndim')}",
            lambda: f"sum({sub('LI')})",
            lambda: f"max({sub('LI')}, default={sub('I')})",
            lambda: f"{sub('DI')}.get({sub('S')}, {sub('I')})",
            lambda: self._indexed(sub("LI"), sub("I"), sub("I")),
            lambda: f"int({sub('F')})",
            lambda: f"({sub('I')} if {sub('B')} else {sub('I')})",
            lambda: f"len({{*{sub('LI')}, {sub('I')}}})",
            lambda: f"{sub('O')}.LIMIT",
            lambda: f"len({sub('O')})",
            lambda: f"sum(i * i for i in {sub('LI')} if i != {sub('I')})",
            lambda: f"{sub('LI')}.count({sub('I')})",
            lambda: f"abs({sub('I')})",
            lambda: f"{sub('O')}.bump({sub('I')})",
            lambda: f"len(tags | {{{sub('S')}}})",
            lambda: f"Mode({self.pick('1', '2')}).value",
            lambda: f"Pair(1, {sub('I')})[1]",
            lambda: f"divmod({sub('I')}, 3)[{self.pick('0', '1')}]",
            lambda: f"len([1 for a in {sub('LI')} for b in {sub('LI')} if a < b])",
            lambda: f"(lambda *a, k={sub('I')}, **o: len(a) + k + len(o))(*{sub('LI')}, **{sub('DI')})",
            lambda: f"min({sub('DI')}.values(), default={sub('I')})",
            lambda: (
                f"getattr({self.pick('Thing', 'Mode', 'helper', 'leaf_1', 'net.weight', 'net')}, 'late', {sub('I')})"
            ),
            lambda: f"late_or({sub('I')})",
        ]
        if self.breaks and self.chance(0.2):
            return f"int({sub('T')}.sum().item())"
        return self.rng.choice(options)()

    def _expression_F(self, scope: Scope, depth: int) -> str:
        def sub(kind: str) -> str:
            return self.expression(kind, scope, depth)

        options: list[Callable[[], str]] = [
            lambda: self._literal("F"),
            lambda: f"({sub('F')} {self.pick('+', '-', '*')} {sub('F')})",
            lambda: f"({sub('I')} / {self.pick('2', '4.0')})",
            lambda: f"float({sub('I')})",
            lambda: f"min({sub('F')}, {sub('F')})",
            lambda: f"math.{self.pick('sin', 'tanh', 'floor')}({sub('F')})",
            lambda: f"round({sub('F')}, 2)",
        ]
        if self.breaks and self.chance(0.2):
            return f"{sub('T')}.sum().item()"
        return self.rng.choice(options)()

    def _expression_B(self, scope: Scope, depth: int) -> str:
        def sub(kind: str) -> str:
            return self.expression(kind, scope, depth)

        options: list[Callable[[], str]] = [
            lambda: self._literal("B"),
            lambda: f"({sub('I')} {self.pick('<', '==', '>', '!=', '<=')} {sub('I')})",
            lambda: f"({sub('F')} {self.pick('<', '>')} {sub('F')})",
            lambda: f"({sub('B')} {self.pick('and', 'or')} {sub('B')})",
            lambda: f"(not {sub('B')})",
            lambda: f"({sub('S')} in {sub(self.pick('DT', 'DI', 'S'))})",
            lambda: f"({sub('I')} in {sub('LI')})",
            lambda: f"({sub('T')} is {sub('T')})",
            lambda: f"({sub('LT')} is {sub('LT')})",
            lambda: f"bool({sub(self.pick('LT', 'DT', 'S', 'LI'))})",
            lambda: f"{sub('T')}.requires_grad",
            lambda: "net.training",
            lambda: f"({sub('T')}.shape == {sub('T')}.shape)",
            lambda: f"isinstance({sub('O')}, {self.pick('Base', 'Thing')})",
            lambda: f"hasattr({sub('O')}, {self.pick(repr('late'), repr('weight'), repr('hidden'))})",
            lambda: f"any(i > {sub('I')} for i in {sub('LI')})",
            lambda: "torch.is_grad_enabled()",
            lambda: f"({sub('I')} < {sub('I')} <= {sub('I')})",
            lambda: f"({sub('LI')} == {sub('LI')})",
            lambda: f"({sub('T')}.dtype == torch.float32)",
            lambda: f"{sub('S')}.startswith({sub('S')})",
            lambda: f"({sub('S')} in tags)",
            lambda: f"(Mode({self.pick('1', '2')}) is Mode.ON)",
            lambda: f"all(t.dim() for t in {sub('LT')})",
            lambda: f"({sub('O')} is {sub('O')})",
            lambda: f"callable({sub('C')})",
            lambda: f"({sub('LI')} < {sub('LI')})",
            lambda: f"bool({sub('O')})",
            lambda: f"isinstance({sub(self.pick('O', 'LI'))}, Virtual)",
            lambda: f"({sub('O')} == {sub('O')})",
            lambda: f"({sub('I')} in {sub('O')})",
        ]
        if self.breaks and self.chance(0.2):
            return f"bool({sub('T')}.sum() > 0)"
        return self.rng.choice(options)()

    def _expression_S(self, scope: Scope, depth: int) -> str:
        def sub(kind: str) -> str:
            return self.expression(kind, scope, depth)

        options: list[Callable[[], str]] = [
            lambda: self._literal("S"),
            lambda: self._literal("S"),
            lambda: self._format_string(sub("I"), sub("S")),
            lambda: f"'{{}}:{{}}'.format({sub('I')}, {sub('F')})",
            lambda: f"str({sub('I')})",
            lambda: f"({sub('S')} + {sub('S')})",
            lambda: f"{sub('S')}.upper()",
            lambda: f"{sub('S')}[:2]",
            lambda: f"'-'.join(sorted({sub('DT')}))",
            lambda: f"{sub('O')}.label",
            lambda: f"type({sub('O')}).__name__",
            lambda: "'-'.join(sorted(tags))",
            lambda: f"next(iter({sub('DI')}), {sub('S')})",
            lambda: f"repr({sub('LI')})[:4]",
        ]
        return self.rng.choice(options)()

    def _format_string(self, number: str, text: str) -> str:
        """An f-string; before Python 3.12 its parts may not hold quotes of its own kind."""
        parts = [part if '"' not in part else "1" for part in (number, text)]
        return f'f"{{{parts[0]}}}-{{{parts[1]}!s:>3}}"'

    def _expression_LT(self, scope: Scope, depth: int) -> str:
        def sub(kind: str) -> str:
            return self.expression(kind, scope, depth)

        options: list[Callable[[], str]] = [
            lambda: f"[{sub('T')}, {sub('T')}]",
            lambda: f"[t * {sub('F')} for t in {sub('LT')}]",
            lambda: f"list({sub('DT')}.values())",
            lambda: f"{sub('LT')}[{self.pick('1:', ':2', '::-1', ':', '-2:')}]",
            lambda: f"({sub('LT')} + {sub('LT')})[:4]",
            lambda: f"[*{sub('LT')}, {sub('T')}][-4:]",
            lambda: f"[t for t in {sub('LT')} if t.dim() > {sub('I')}]",
            lambda: f"list(map({sub('C')}, {sub('LT')}))",
            lambda: f"list({sub('LT')})",
            lambda: f"list(pairs({sub('LT')}))",
            lambda: f"list({sub('T')}.{self.pick('unbind(-1)', 'chunk(3, -1)', 'split(1, -1)')})",
            lambda: f"[{sub('T')}] * {self.pick('0', '1', '2')}",
            lambda: f"[a * b for a, b in zip({sub('LT')}, {sub('LT')})]",
            lambda: f"[t + i for i, t in enumerate({sub('LT')})]",
            lambda: f"list({sub('O')})",
            lambda: f"sorted({sub('LT')}, key=lambda t: t.numel())",
        ]
        return self.rng.choice(options)()

    def _expression_LI(self, scope: Scope, depth: int) -> str:
        def sub(kind: str) -> str:
            return self.expression(kind, scope, depth)

        options: list[Callable[[], str]] = [
            lambda: f"[{sub('I')}, {sub('I')}]",
            lambda: f"list(range({sub('I')} % 4))",
            lambda: f"[i + {sub('I')} for i in {sub('LI')}]",
            lambda: f"sorted({sub('LI')})",
            lambda: f"list({sub('DI')}.values())",
            lambda: f"{sub('LI')}[{self.pick('1:', ':2', '::-1', ':')}]",
            lambda: f"list(reversed({sub('LI')}))",
            lambda: f"list(set({sub('LI')}))",
            lambda: f"[t.dim() for t in {sub('LT')}]",
            lambda: f"list({sub('T')}.shape)",
            lambda: f"list(itertools.chain({sub('LI')}, {sub('LI')}))[:4]",
        ]
        return self.rng.choice(options)()

    def _expression_DT(self, scope: Scope, depth: int) -> str:
        def sub(kind: str) -> str:
            return self.expression(kind, scope, depth)

        options: list[Callable[[], str]] = [
            lambda: f"{{{sub('S')}: {sub('T')}, 'a': {sub('T')}}}",
            lambda: f"{{k: v * {sub('F')} for k, v in {sub('DT')}.items()}}",
            lambda: f"dict({sub('DT')}, a={sub('T')})",
            lambda: f"{{**{sub('DT')}, 'b': {sub('T')}}}",
            lambda: f"dict(zip({sub('DT')}, {sub('LT')}))",
            lambda: f"({sub('DT')} | {sub('DT')})",
            lambda: f"dict({sub('DT')})",
            lambda: f"dict(sorted({sub('DT')}.items(), key=lambda item: item[0]))",
            lambda: f"{sub('DT')}.copy()",
        ]
        return self.rng.choice(options)()

    def _expression_DI(self, scope: Scope, depth: int) -> str:
        def sub(kind: str) -> str:
            return self.expression(kind, scope, depth)

        options: list[Callable[[], str]] = [
            lambda: f"{{{sub('S')}: {sub('I')}, 'a': {sub('I')}}}",
            lambda: f"{{k: v + 1 for k, v in {sub('DI')}.items()}}",
            lambda: f"{{**{sub('DI')}, 'b': {sub('I')}}}",
            lambda: f"{{k: v.dim() for k, v in {sub('DT')}.items()}}",
            lambda: f"dict({sub('DI')})",
            lambda: f"dict.fromkeys({sub('DT')}, {sub('I')})",
        ]
        return self.rng.choice(options)()

    def _expression_C(self, scope: Scope, depth: int) -> str:
        def sub(kind: str) -> str:
            return self.expression(kind, scope, depth)

        options: list[Callable[[], str]] = [
            lambda: self._literal("C"),
            lambda: f"(lambda t: t {self.pick('+', '*', '-')} {sub(self.pick('F', 'T', 'I'))})",
            lambda: f"functools.partial(helper, count={sub('I')})",
            lambda: f"{sub('O')}.method",
            lambda: f"{sub('O')}.action",
            lambda: "net",
            lambda: f"make_scaler({sub('F')})",
            lambda: f"functools.partial(apply, {sub('C')})",
            lambda: "counted",
            lambda: f"({sub('C')} if {sub('B')} else {sub('C')})",
        ]
        return self.rng.choice(options)()

    def _expression_O(self, scope: Scope, depth: int) -> str:
        options: list[Callable[[], str]] = [
            lambda: "thing",
            lambda: "thing",
            lambda: f"Thing({self.expression('T', scope, depth)}, {self.expression('I', scope, depth)})",
            lambda: "other",
        ]
        return self.rng.choice(options)()
