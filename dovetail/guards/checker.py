"""One generated Python function that checks all guards of an entry and fetches its input tensors.

Every object is fetched once: the sources form a tree, which the function walks with one local variable per depth. The
arguments come first, since they change most often; then the tensors that they lead to, in one C++ check; then the rest.

>>> guards = GuardSet()
>>> index = guards.add_tensor(ArgumentSource(0, "L['x']"), torch.zeros(8))
>>> checker = compile_checker(guards)
>>> [tuple(tensor.shape) for tensor in checker.check(None, (torch.ones(8),), {})]
[(8,)]
>>> print(checker.explain(None, (torch.ones(16),), {})[0])
`x.shape[0]` was 8, is 16
"""

from __future__ import annotations

import abc
import collections
import enum
import math
import operator
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dovetail.guards.ambient import AmbientState
from dovetail.guards.guard import FrozenGuards, Guard, GuardFailure, GuardSet, check_guard, is_argument
from dovetail.guards.predicate import (
    HOOK_TABLES,
    RELATIONS,
    ClassBody,
    DictKeys,
    Equals,
    HasNoKey,
    Identity,
    Leafness,
    Length,
    NoHooks,
    Predicate,
    SameObject,
    TensorMatch,
    TypeIs,
    Unbound,
)
from dovetail.guards.source import (
    FETCH_ERRORS,
    ArgumentSource,
    AttributeSource,
    CalleeSource,
    CellSource,
    ComputedSource,
    GradSource,
    InstanceDictSource,
    ItemSource,
    KeywordSource,
    PinnedSource,
    Source,
    TypeSource,
    class_dict,
    class_order,
    constant_key,
    instance_dict,
    read_entry,
    read_gradient,
    returns_itself,
)
from dovetail.rules.sparse.handles import TicketSource, is_ticket, parts_of_ticket
from dovetail.torch_private import guards as private_guards

_SIMPLE_TYPES = frozenset({int, str, bytes, torch.device})
_SINGLETON_TYPES = frozenset(
    {bool, type(None), type(Ellipsis), type(NotImplemented), torch.dtype, torch.layout, torch.memory_format}
)
_SIZED_TYPES = frozenset({list, tuple, dict, set, frozenset, str, bytes, range, collections.OrderedDict})
_PLAIN_TYPES = _SIZED_TYPES | _SIMPLE_TYPES | _SINGLETON_TYPES | {float, complex}
_FUNCTION_SLOTS = frozenset({"__code__", "__defaults__", "__kwdefaults__", "__closure__", "__globals__", "__dict__"})
_METHOD_SLOTS = frozenset({"__func__", "__self__"})
_INLINED_ITEMS = 8


class Checker:
    """The check of one entry. ``check`` is the generated function itself.

    ``check(callee, args, kwargs)`` gives the input tensors in index order, or None for a miss.
    """

    def __init__(
        self,
        frozen: FrozenGuards,
        ambient: AmbientState | None,
        check: Callable[[Any, tuple[Any, ...], Mapping[str, Any]], list[torch.Tensor] | None],
        source_code: str,
    ) -> None:
        self.guards = frozen
        self.ambient = ambient
        self.check = check
        self._source_code = source_code

    @property
    def source_code(self) -> str:
        """The generated function, to read."""
        return self._source_code

    def explain(self, callee: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[GuardFailure]:
        """Why ``check`` would say no: one failure per guard that does not hold, the call's shape and state first."""
        frozen = self.guards
        failures: list[GuardFailure] = []
        if self.ambient is not None:
            failures += [GuardFailure(sentence) for sentence in self.ambient.differences()]
        if frozen.positional is not None and len(args) != frozen.positional:
            failures.append(GuardFailure(f"the call had {frozen.positional} positional arguments, has {len(args)}"))
        if frozen.keywords is not None and tuple(kwargs) != frozen.keywords:
            then, now = ", ".join(frozen.keywords) or "none", ", ".join(kwargs) or "none"
            failures.append(GuardFailure(f"the names of the keyword arguments were {then}, are {now}"))
        for guard in frozen.guards:
            failures += check_guard(guard, frozen.tensors, callee, args, kwargs)
        if not failures:
            failures += self._explain_relations(callee, args, kwargs)
        if not failures and frozen.shapes is not None:
            tensors = [item.source.fetch(callee, args, kwargs) for item in frozen.tensors]
            failures += [GuardFailure(text, needed_at=place) for text, place in frozen.shapes.failures(tensors)]
        return failures

    def _explain_relations(self, callee: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[GuardFailure]:
        inputs = self.guards.tensors
        values = [item.source.fetch(callee, args, kwargs) for item in inputs]
        failures = []
        seen: dict[int, str] = {}
        for item, value in zip(inputs, values):
            first = seen.setdefault(id(value), item.source.name)
            if first != item.source.name:
                failures.append(GuardFailure(f"`{first}` and `{item.source.name}` were two tensors, and are one now"))
        if not failures:
            for index in self.guards.separate:
                memory = _memory(values[index])
                for other, value in enumerate(values):
                    if other != index and memory in {_memory(part) for part in parts_of_ticket(value)}:
                        failures.append(
                            GuardFailure(
                                f"`{inputs[index].source.name}`, which is written to, did not share its memory with "
                                f"`{inputs[other].source.name}`, and does now"
                            )
                        )
        return failures


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


_storage = torch.Tensor.untyped_storage
_address = torch.UntypedStorage.data_ptr


def _memory_is_separate(tensors: Sequence[torch.Tensor], indices: tuple[int, ...]) -> bool:
    memories = [*map(_address, map(_storage, tensors))]
    if len({*memories}) == len(memories):
        return True
    counts = collections.Counter(memories)
    # An empty tensor has no memory to share.
    return all(memories[index] == 0 or counts[memories[index]] == 1 for index in indices)


def _memory_is_separate_of_parts(tensors: Sequence[torch.Tensor], indices: tuple[int, ...]) -> bool:
    parts = [part for tensor in tensors if is_ticket(tensor) for part in parts_of_ticket(tensor)]
    return _memory_is_separate([*tensors, *parts], indices)


class Node:
    """One source of the tree, with its guards and the sources one step further."""

    __slots__ = ("children", "guards", "kept", "source")
    source: Source
    guards: list[Guard]
    children: dict[Source, Node]
    kept: str | None

    def __init__(self, source: Source) -> None:
        self.source = source
        self.guards = []
        self.children = {}
        self.kept = None

    def size(self) -> int:
        """How many guards there are here and below."""
        return len(self.guards) + sum(child.size() for child in self.children.values())


Group = tuple[tuple[Node, ...], bool]
"""Nodes, and whether their values are one object (else each is another one)."""


class Generator:
    """Writes the function for one set of guards."""

    def __init__(self, frozen: FrozenGuards, ambient: AmbientState | None, tree: Generator | None = None) -> None:
        self.frozen = frozen
        self.ambient = ambient
        self.lines: list[str] = []
        self.names: dict[str, Any] = {"MISSES": FETCH_ERRORS}
        self._constants: dict[int, tuple[str, Any]] = {}
        self.roots: dict[Source, Node] = {}
        self.nodes: dict[Source, Node] = {}
        self._groups: list[Group] = []
        self._slots: set[tuple[type, str]] = set()
        self._class_tables: dict[type, Any] = {}
        self._inherited: set[tuple[type, str]] = set()
        if tree is None:
            self._build_tree()
        else:
            self.roots, self.nodes, self._groups = tree.roots, tree.nodes, tree._groups

    # --- pieces -------------------------------------------------------------------------------------------------------

    def constant(self, value: Any, hint: str = "c") -> str:
        """The name under which the function sees an object."""
        known = self._constants.get(id(value))
        if known is None:
            name = f"{hint}{len(self._constants)}"
            known = self._constants[id(value)] = (name, value)
            self.names[name] = value
        return known[0]

    def literal(self, value: Any) -> str:
        """A string or small number as it is, everything else by name."""
        if type(value) is str or type(value) is int:
            return repr(value)
        if value is None or type(value) is bool:
            return repr(value)
        return self.constant(value)

    def require(self, condition: str) -> None:
        """Miss unless the condition is true."""
        self.lines.append(f"        if not ({condition}): return None")

    def node(self, source: Source) -> Node:
        """The tree's node for a source, made with all of its parents."""
        found = self.nodes.get(source)
        if found is None:
            found = self.nodes[source] = Node(source)
            parent = source.parent
            siblings = self.roots if parent is None else self.node(parent).children
            siblings[source] = found
        return found

    # --- the whole ----------------------------------------------------------------------------------------------------

    def _build_tree(self) -> None:
        for guard in self.frozen.guards:
            node = self.node(guard.source)
            node.guards.append(guard)
            if isinstance(guard.predicate, NoHooks):
                # The tables of hooks are in the dictionary that the module's other guards read as well.
                self.node(InstanceDictSource(guard.source))
            if isinstance(guard.predicate, RELATIONS):
                predicate = guard.predicate
                is_same = isinstance(predicate, SameObject)
                others = (predicate.other,) if isinstance(predicate, SameObject) else predicate.others
                group = (node, *map(self.node, others))
                for position, one in enumerate(group):
                    one.kept = one.kept or f"kept{len(self._groups)}_{position}"
                self._groups.append((group, is_same))

    def generate(self) -> str:
        """The text of the function."""
        frozen = self.frozen
        self._head()
        roots = list(self.roots.values())
        for node in roots:
            if is_argument(node.source):
                self.walk(node, 0)
        arguments = [index for index, item in enumerate(frozen.tensors) if is_argument(item.source)]
        if frozen.argument_bulk is not None:
            check = self.constant(frozen.argument_bulk, "check_arguments_")
            self.require(f"{check}({', '.join(f't{index}' for index in arguments)})")
        self.before_others()
        for node in roots:
            if not is_argument(node.source):
                self.walk(node, 0)
        self._tail()
        body = "\n".join(self.lines)
        return f"def check(callee, args, kwargs):\n    try:\n{body}\n    except MISSES:\n        return None\n"

    def _head(self) -> None:
        frozen = self.frozen
        if frozen.positional is not None:
            self.require(f"len(args) == {frozen.positional}")
        if frozen.keywords is not None:
            self.require(f"tuple(kwargs) == {frozen.keywords!r}" if frozen.keywords else "not kwargs")
        if self.ambient is not None:
            grad = self.constant(torch.is_grad_enabled, "is_grad_enabled_")
            self.require(f"{grad}() is {self.ambient.grad_mode}")
            self.require(f"{self.constant(self.ambient.matcher(), 'ambient_')}()")

    def _tail(self) -> None:
        frozen = self.frozen
        for group, is_same in self.open_groups():
            if len(group) == 2:
                self.require(f"{group[0].kept} is {'' if is_same else 'not '}{group[1].kept}")
            else:
                self.require(f"len({{*map(id, ({', '.join(str(node.kept) for node in group)}))}}) == {len(group)}")
        count = len(frozen.tensors)
        self.gather()
        names = self.tensors()
        if count:
            if frozen.bulk is not None:
                self.require(f"{self.constant(frozen.bulk, 'check_tensors_')}({names})")
            else:
                for index, item in enumerate(frozen.tensors):
                    differences = self.constant(item.facts.differences, "differences_")
                    self.require(f"not {differences}('', t{index})")
            if count > 1 and (frozen.bulk is None or not private_guards.bulk_check_sees_duplicates()):
                self.require(f"len({{*map(id, ({names},))}}) == {count}")
            if frozen.separate and count > 1:
                has_tickets = any(isinstance(item.source, TicketSource) for item in frozen.tensors)
                test = _memory_is_separate_of_parts if has_tickets else _memory_is_separate
                separate = self.constant(test, "memory_is_separate_")
                self.require(f"{separate}(({names},), {frozen.separate!r})")
        result = self.result()
        if frozen.shapes is not None:
            self.lines.append(f"        tensors = {result}")
            result = "tensors"
            self.require(f"{self.constant(frozen.shapes.holds, 'sizes_')}(tensors)")
        self.lines.append(f"        return {result}")

    def before_others(self) -> None:
        """Write what comes after the arguments and before everything else that is walked."""

    def guards_of(self, node: Node) -> list[Guard]:
        """The guards of a node that are to be asked where the tree is walked."""
        return node.guards

    def result(self) -> str:
        """The list of all input tensors."""
        return f"[{self.tensors()}]"

    def open_groups(self) -> list[Group]:
        """The groups of nodes whose values are kept in local variables, and must be one object or different ones."""
        return self._groups

    def is_kept(self, node: Node) -> bool:
        """Whether a node's value is to be compared with that of another node."""
        return node.kept is not None

    def gather(self) -> None:
        """Prepare what :meth:`tensors` names."""

    def tensors(self) -> str:
        """All input tensors, as the arguments of a call."""
        return ", ".join(f"t{index}" for index in range(len(self.frozen.tensors)))

    # --- the tree -----------------------------------------------------------------------------------------------------

    def walk(self, node: Node, depth: int) -> None:
        """Fetch a node's value, check it, and go on with its children."""
        source = node.source
        guards = [guard for guard in self.guards_of(node) if not isinstance(guard.predicate, RELATIONS)]
        unbound = [guard for guard in guards if isinstance(guard.predicate, Unbound)]
        if unbound and isinstance(source, CellSource):
            cell = self.constant(source.cell, "cell_")
            self.require(f"{self.constant(unbound[0].predicate.holds, 'holds_')}({cell}({self.variable(depth - 1)}))")
            guards = [guard for guard in guards if guard not in unbound]
            if not guards and not node.children and node.kept is None:
                return
        variable = self.variable(depth)
        self.lines.append(f"        {variable} = {self.fetch(source, self.variable(depth - 1))}")
        if isinstance(source, InstanceDictSource) and self.is_dict(source):
            self.require(f"type({variable}) is dict")
            if any(isinstance(guard.predicate, NoHooks) for guard in self.nodes[source.base].guards):
                self.require(" and ".join(f"not {variable}[{name!r}]" for name in HOOK_TABLES))
        for guard in sorted(guards, key=lambda guard: not isinstance(guard.predicate, (TypeIs, Identity))):
            if isinstance(guard.predicate, NoHooks) and self.is_dict(InstanceDictSource(source)):
                continue  # asked of the dictionary
            if isinstance(guard.predicate, TensorMatch):
                self.lines.append(f"        t{guard.predicate.index} = {variable}")
            elif not self.implied_by_tensors(node, guard.predicate):
                self.require(self.condition(source, guard.predicate, variable))
        if self.is_kept(node):
            self.lines.append(f"        {node.kept} = {variable}")
        for child in node.children.values():
            self.walk(child, depth + 1)

    def variable(self, depth: int) -> str:
        """The local variable of a depth: a node's value is in use until its children are done."""
        return f"v{depth}"

    def known_type(self, source: Source) -> type | None:
        """The type that a value is sure to have once its own guards have passed."""
        if isinstance(source, PinnedSource):
            return type(source.pinned.value)
        node = self.nodes.get(source)
        for guard in node.guards if node is not None else ():
            if isinstance(guard.predicate, TypeIs):
                return guard.predicate.cls
            if isinstance(guard.predicate, Identity):
                return type(guard.predicate.read())
        return None

    def is_dict(self, source: Source) -> bool:
        """Whether a source of an object's ``__dict__`` belongs to an object, not to a class."""
        base = source.parent
        kind = self.known_type(base) if base is not None else None
        return kind is not None and not issubclass(kind, type)

    def fetch(self, source: Source, base: str) -> str:
        """The expression that takes one step, in its cheapest form."""
        if isinstance(source, CalleeSource):
            return "callee"
        if isinstance(source, ArgumentSource):
            return f"args[{source.index}]"
        if isinstance(source, KeywordSource):
            return f"kwargs[{source.keyword!r}]"
        if isinstance(source, PinnedSource):
            return self.constant(source.pinned.value, "pinned_")
        if isinstance(source, ComputedSource):
            return f"{self.constant(source.fetch, 'compute_')}(callee, args, kwargs)"
        parent = source.parent
        assert parent is not None
        kind = self.known_type(parent)
        if isinstance(source, TypeSource):
            return f"type({base})"
        if isinstance(source, ItemSource):
            if (
                kind in (dict, list, tuple)
                or (isinstance(parent, InstanceDictSource) and self.is_dict(parent))
                or self.class_of_table(parent) is not None
            ):
                return f"{base}[{self.literal(source.key)}]"
            if kind is not None:
                for builtin in (dict, list, tuple):
                    if issubclass(kind, builtin):
                        return f"{builtin.__name__}_item({base}, {self.literal(source.key)})"
            elif isinstance(parent, AttributeSource) and parent.attribute == "__defaults__" and type(source.key) is int:
                return f"tuple_item({base}, {source.key})"
            elif type(source.key) is str and not isinstance(parent, InstanceDictSource):
                return f"dict_item({base}, {self.literal(source.key)})"
        if isinstance(source, AttributeSource):
            plain_function = kind is types.FunctionType and source.attribute in _FUNCTION_SLOTS
            if plain_function or (kind is types.MethodType and source.attribute in _METHOD_SLOTS):
                return f"{base}.{source.attribute}"
            of_class = self.known_class(parent)
            if of_class is not None and source.attribute == "__mro__":
                return f"{self.constant(class_order, 'read_order_')}({self.constant(of_class, 'class_')})"
            known = self.class_attribute(source, base)
            if known is not None:
                return known
            if isinstance(parent, PinnedSource) and kind is types.ModuleType:
                table = instance_dict(parent.pinned.value)
                if source.attribute in table:
                    return f"{self.constant(table, 'module_')}[{source.attribute!r}]"
        if isinstance(source, CellSource) and kind is types.FunctionType:
            return f"{base}.__closure__[{source.index}].cell_contents"
        if isinstance(source, InstanceDictSource) and kind is not None and not issubclass(kind, type):
            if kind.__getattribute__ is object.__getattribute__ and "__dict__" not in _own_names(kind):
                return f"{base}.__dict__"
            return f"own_attribute({base}, '__dict__')"
        owner = self.class_of_table(source)
        if owner is not None:
            return self.class_table(owner)
        if isinstance(source, GradSource):
            return f"read_gradient({base})"
        return f"{self.constant(source.read, 'read_')}({base})"  # type: ignore[attr-defined]

    def class_attribute(self, source: AttributeSource, base: str) -> str | None:
        """The expression for an attribute that stands in a class's own dictionary: of the class, or a slot of an instance.

        ``read_attribute`` takes 1 us for either. Where a class has the metaclass ``type``, nothing can come before its own
        dictionary; and the guards of the attribute itself are to refuse a value that would be bound or run code.
        """
        owner = self.known_class(source.base)
        if owner is not None:
            holder = self.holder(owner, source)
            return None if holder is None else self.inherited(owner, holder, source.attribute)
        kind = self.known_type(source.base)
        slot = class_dict(kind).get(source.attribute) if kind is not None else None
        if kind is None or type(slot) is not types.MemberDescriptorType:
            return None
        if (kind, source.attribute) not in self._slots:
            self._slots.add((kind, source.attribute))
            self.require(f"{self.class_table(kind)}[{source.attribute!r}] is {self.constant(slot, 'slot_')}")
        return f"{self.constant(slot.__get__, 'read_slot_')}({base})"

    def holder(self, owner: type, source: AttributeSource) -> type | None:
        """The class in whose own dictionary an attribute of a class stands, where that is all that reading it comes to."""
        name = source.attribute
        if type(owner) is not type and (type(owner) is not abc.ABCMeta or hasattr(abc.ABCMeta, name)):
            return None
        found = next((kind for kind in class_order(owner) if name in class_dict(kind)), None)
        return found if found is not None and self.accepts_only_plain(source, class_dict(found)[name]) else None

    def inherited(self, owner: type, holder: type, name: str) -> str:
        """The expression for an attribute of a class that stands in the dictionary of one of its bases."""
        if owner is not holder and (owner, name) not in self._inherited:
            self._inherited.add((owner, name))
            order = class_order(owner)
            read_order, constant = self.constant(class_order, "read_order_"), self.constant(order, "order_")
            self.require(f"{read_order}({self.constant(owner, 'class_')}) is {constant}")
            for nearer in order[: order.index(holder)]:
                self.require(f"{name!r} not in {self.class_table(nearer)}")
        return f"{self.class_table(holder)}[{name!r}]"

    def known_class(self, source: Source) -> type | None:
        """The class that a source is sure to give, once its guards have passed."""
        if isinstance(source, PinnedSource):
            return source.pinned.value if isinstance(source.pinned.value, type) else None
        node = self.nodes.get(source)
        for guard in node.guards if node is not None else ():
            if isinstance(guard.predicate, Identity) and isinstance(guard.predicate.read(), type):
                return guard.predicate.read()
        return None

    def class_of_table(self, source: Source) -> type | None:
        """The class whose own dictionary a source gives, if it is sure to."""
        if not isinstance(source, InstanceDictSource) and not (
            isinstance(source, AttributeSource) and source.attribute == "__dict__"
        ):
            return None
        owner = self.known_class(source.base)
        return owner if owner is not None and "__dict__" not in _own_names(type(owner)) else None

    def class_table(self, owner: type) -> str:
        """The name of a live view on a class's own dictionary."""
        if owner not in self._class_tables:
            self._class_tables[owner] = class_dict(owner)
        return self.constant(self._class_tables[owner], "class_")

    def accepts_only_plain(self, source: Source, own: Any) -> bool:
        """Whether the guards of a class attribute let only entries of the class's dictionary pass that reading the
        attribute gives as they are; the entry now is one.
        """
        if not returns_itself(own) and type(own) not in _PLAIN_TYPES and type(own) is not type:
            return False
        return any(
            isinstance(guard.predicate, Equals)
            or (isinstance(guard.predicate, Identity) and guard.predicate.read() is own)
            or (isinstance(guard.predicate, TypeIs) and guard.predicate.cls in _PLAIN_TYPES)
            for guard in self.nodes[source].guards
        )

    # --- predicates ---------------------------------------------------------------------------------------------------

    def implied_by_tensors(self, node: Node, predicate: Predicate) -> bool:
        """Whether the check of all tensors comes to the same: what requires no gradient is a leaf."""
        matches = [guard.predicate.index for guard in node.guards if isinstance(guard.predicate, TensorMatch)]
        return (
            isinstance(predicate, Leafness)
            and predicate.is_leaf
            and any(not self.frozen.tensors[index].facts.requires_grad for index in matches)
        )

    def condition(self, source: Source, predicate: Predicate, variable: str) -> str:
        """The expression that is true if the predicate holds, in its cheapest form."""
        kind = self.known_type(source)
        if isinstance(predicate, TypeIs):
            return f"type({variable}) is {self.constant(predicate.cls, 'type_')}"
        if isinstance(predicate, Identity):
            if predicate.is_weak:
                return f"{variable} is not None and {self.constant(predicate.read, 'object_')}() is {variable}"
            return f"{variable} is {self.literal_identity(predicate.read())}"
        if isinstance(predicate, Equals):
            return self.equals(predicate.value, variable)
        if isinstance(predicate, Length) and kind in _SIZED_TYPES:
            return f"len({variable}) == {predicate.length}"
        if isinstance(predicate, HasNoKey) and (
            kind in (dict, set, frozenset)
            or (isinstance(source, InstanceDictSource) and self.is_dict(source))
            or self.class_of_table(source) is not None
        ):
            return f"{self.literal(predicate.key)} not in {variable}"
        if isinstance(predicate, DictKeys) and not predicate.keys and kind is dict:
            return f"not {variable}"
        if isinstance(predicate, DictKeys) and kind is dict and {*map(type, predicate.keys)} == {str}:
            types = f"{{*map(type, {variable})}} == {self.constant({str}, 'strings_')}"
            return f"(*{variable},) == {self.constant(predicate.keys, 'keys_')} and {types}"
        if isinstance(predicate, ClassBody) and len(predicate.methods) > 1:
            take = self.constant(operator.itemgetter(*predicate.methods), "take_")
            values = self.constant(predicate.values, "methods_")
            same_names = f"(*{variable},) == {self.constant(predicate.names, 'names_')}"
            return f"{same_names} and all(map(is_object, {take}({variable}), {values}))"
        if isinstance(predicate, Leafness):
            return f"{variable}.is_leaf is {predicate.is_leaf}"
        return f"{self.constant(predicate.holds, 'holds_')}({variable})"

    def literal_identity(self, value: Any) -> str:
        """None, True and False as they are, every other object by name."""
        return repr(value) if value is None or type(value) is bool else self.constant(value, "object_")

    def equals(self, value: Any, variable: str) -> str:
        """A comparison of constants that runs no code but that of built-in types."""
        kind = type(value)
        if kind in _SINGLETON_TYPES or issubclass(kind, enum.Enum):
            return f"{variable} is {self.literal_identity(value)}"
        same_type = f"type({variable}) is {self.constant(kind, 'type_')}"
        if kind in _SIMPLE_TYPES:
            return f"{same_type} and {variable} == {self.literal(value)}"
        if kind is float:
            if math.isnan(value):
                return f"{same_type} and {variable} != {variable}"
            if value != 0.0:
                return f"{same_type} and {variable} == {self.constant(value)}"
        if (kind is tuple or kind is torch.Size) and len(value) <= _INLINED_ITEMS:
            items = [self.equals(item, f"{variable}[{position}]") for position, item in enumerate(value)]
            return " and ".join([same_type, f"len({variable}) == {len(value)}", *items])
        return f"is_equal({variable}, {self.constant(constant_key(value), 'key_')})"


def _own_names(kind: type) -> set[str]:
    # The entry that Python itself makes is a getset descriptor; a property of that name is the user's.
    return {
        name
        for owner in kind.__mro__
        for name, value in vars(owner).items()
        if name == "__dict__" and type(value) is not types.GetSetDescriptorType
    }


def _is_equal(value: Any, key: tuple[Any, ...]) -> bool:
    return constant_key(value) == key


def make_check(generator: Generator) -> tuple[Callable[..., list[torch.Tensor] | None], str]:
    """The function that a generator writes, and its text."""
    text = generator.generate()
    namespace: dict[str, Any] = {
        **generator.names,
        "dict_item": read_entry,
        "list_item": list.__getitem__,
        "tuple_item": tuple.__getitem__,
        "own_attribute": object.__getattribute__,
        "read_gradient": read_gradient,
        "is_equal": _is_equal,
        "is_object": operator.is_,
    }
    exec(compile(text, "<dovetail guards>", "exec"), namespace)
    # Not left in its own namespace: a cycle would keep what it remembers until the next garbage collection.
    return namespace.pop("check"), text


def compile_checker(guards: GuardSet | FrozenGuards, ambient: AmbientState | None = None) -> Checker:
    """Generate the check for a set of guards; ``ambient`` is the state of torch that must hold as well, if given."""
    from dovetail.guards.fast import remember_hits  # it writes functions of this file's kind

    frozen = guards.freeze() if isinstance(guards, GuardSet) else guards
    generator = Generator(frozen, ambient)
    full, text = make_check(generator)
    checker = Checker(frozen, ambient, full, text)
    remember_hits(checker, generator, full)
    return checker
