"""Operators that were decomposed before, in the same graph, are decomposed again by copying the nodes of the first time.

Torch takes milliseconds to trace one decomposition, and the layers of a model have the same ones. What is recorded follows from the
operator, its plain arguments and the facts of its tensors; so the nodes are copied onto the arguments of the next call, with fake
values made again. Symbolic sizes, random numbers, known data and whatever else is not such a plain case goes torch's way.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.torch_private import fast_capture as private
from dovetail.torch_private import operators as private_operators
from dovetail.torch_private.fast_capture import Pattern

_CONSTANTS = frozenset({int, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})
_NUMBER = re.compile(r"_\d+$")


class _UnknownError(Exception):
    """Not a plain case."""


@dataclass(frozen=True)
class _Place:
    """A tensor in a recorded argument or result: the number of an argument of the call, or of a node that the call has made."""

    number: int
    is_argument: bool


@dataclass(frozen=True)
class _Made:
    """One recorded node. ``values``: its fake tensors, and whether it has several."""

    target: Any
    args: Any
    kwargs: Any
    name: str
    values: tuple[Pattern, ...]
    several: type | None
    tensor_meta: Any


@dataclass(frozen=True)
class _Decomposition:
    """The nodes of one decomposition, and where its results are found, each with the pattern of the tensor that carries it on."""

    nodes: tuple[_Made, ...]
    results: tuple[tuple[_Place, Pattern | None] | None, ...]
    several: type | None


class Repeats:
    """The operators decomposed while one graph is traced. ``note`` is called with each node that is copied."""

    def __init__(self, tracer: Any, fake_mode: Any, note: Callable[[torch.fx.Node], None]) -> None:
        self._tracer, self._fake_mode, self._note = tracer, fake_mode, note
        self._known: dict[Any, _Decomposition | None] = {}

    def run(self, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call an operator under the modes that decompose and record, or copy what an equal call has recorded."""
        call = self._call(operator, args, kwargs)
        if call is None:
            return operator(*args, **kwargs)
        if call.key in self._known:
            known = self._known[call.key]
            return operator(*args, **kwargs) if known is None else self._copy(known, call)
        last = next(reversed(self._tracer.graph.nodes))
        result = operator(*args, **kwargs)
        try:
            self._known[call.key] = _learned(self, call, result, last)
        except _UnknownError:
            self._known[call.key] = None
        return result

    def _call(self, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Call | None:
        if not private.IS_KNOWN or not isinstance(operator, private_operators.OpOverload):
            return None
        if torch.Tag.nondeterministic_seeded in operator.tags or operator._schema.is_mutable:
            return None
        call = _Call(self, operator)
        try:
            call.add((tuple(args), dict(kwargs)))
            hash(call.key)
        except (_UnknownError, TypeError):  # a symbolic size cannot be hashed
            return None
        return call if call.fakes else None

    def node_of(self, fake: Any) -> torch.fx.Node:
        """The node that computes a plain fake tensor."""
        if not private.is_plain(fake, self._fake_mode):
            raise _UnknownError
        node = private.node_of_fake(self._tracer, fake)
        if node is None:
            raise _UnknownError
        return node

    def _copy(self, known: _Decomposition, call: _Call) -> Any:
        made: list[torch.fx.Node] = []
        values = list(call.fakes)

        def found(item: Any) -> Any:
            return (call.nodes if item.is_argument else made)[item.number]

        for node in known.nodes:
            args, kwargs = _with_places(node.args, found), _with_places(node.kwargs, found)
            new = private.add_node(self._tracer.graph, node.target, args, kwargs, node.name)
            self._note(new)
            own = [self._make(pattern, values) for pattern in node.values]
            values += own
            new.meta["val"] = own[0] if node.several is None else node.several(own)
            if node.tensor_meta is not None:
                new.meta["tensor_meta"] = node.tensor_meta
            made.append(new)
        results = [None if item is None else self._result(*item, call, made, values) for item in known.results]
        return results[0] if known.several is None else known.several(results)

    def _result(
        self, place: _Place, pattern: Pattern | None, call: _Call, made: list[torch.fx.Node], values: list[Any]
    ) -> Any:
        if pattern is None:
            return call.fakes[place.number]
        fake = self._make(pattern, values)
        private.track(self._tracer, fake, (call.nodes if place.is_argument else made)[place.number])
        return fake

    def _make(self, pattern: Pattern, values: list[Any]) -> Any:
        return pattern.make(self._fake_mode, values, 1)[0]


class _Call:
    """One call: its tensors in order, their nodes, and the key of what is recorded of it."""

    def __init__(self, repeats: Repeats, operator: Any) -> None:
        self._repeats = repeats
        self.fakes: list[Any] = []
        self.nodes: list[torch.fx.Node] = []
        self._storages: dict[int, int] = {}
        self._key: list[Any] = [operator, torch.get_default_dtype()]

    @property
    def key(self) -> tuple[Any, ...]:
        return tuple(self._key)

    def add(self, value: Any) -> None:
        """Add an argument to the key; raises :class:`_UnknownError` where nothing follows from it."""
        kind = type(value)
        if isinstance(value, torch.Tensor):
            self._add_tensor(value)
        elif kind in _CONSTANTS:
            self._key.append((kind, value))
        elif kind is float:
            self._key.append(value.hex())
        elif isinstance(value, list) or kind is tuple:
            # A graph's own lists (immutable ones) are a class of their own.
            self._key.append((kind is tuple, len(value)))
            for item in value:
                self.add(item)
        elif isinstance(value, dict):
            self._key.append(tuple(value))
            for item in value.values():
                self.add(item)
        else:
            raise _UnknownError

    def _add_tensor(self, fake: Any) -> None:
        node = self._repeats.node_of(fake)
        storage = self._storages.setdefault(fake.untyped_storage()._cdata, len(self._storages))
        first = next((number for number, other in enumerate(self.fakes) if other is fake), len(self.fakes))
        # By its number in the key: two arguments that are one tensor, or share memory, are another case than two.
        self._key.append((private.facts_of(fake), fake.requires_grad, storage, first))
        self.fakes.append(fake)
        self.nodes.append(node)


def _with_places(value: Any, found: Callable[[_Place], Any]) -> Any:
    """An argument of a recorded node with what ``found`` gives for its places."""
    if type(value) is _Place:
        return found(value)
    if type(value) in (list, tuple):
        return type(value)([_with_places(item, found) for item in value])
    return {name: _with_places(item, found) for name, item in value.items()} if type(value) is dict else value


def _learned(repeats: Repeats, call: _Call, result: Any, last: torch.fx.Node) -> _Decomposition:
    """The nodes recorded after the node ``last``; raises :class:`_UnknownError` where it cannot be made again."""
    places = {node: _Place(number, True) for number, node in reversed(list(enumerate(call.nodes)))}
    values, nodes = list(call.fakes), []
    node = last.next
    while node.op != "root":
        nodes.append(_node_learned(node, places, values))
        places[node] = _Place(len(nodes) - 1, False)
        node = node.next
    several = None if isinstance(result, torch.Tensor) else type(result)
    if several not in (None, list, tuple):
        raise _UnknownError
    results: list[tuple[_Place, Pattern | None] | None] = []
    for item in [result] if several is None else result:
        same = next((number for number, fake in enumerate(call.fakes) if fake is item), None)
        if item is None:
            results.append(None)
        elif same is not None:
            results.append((_Place(same, True), None))
        else:
            place = places.get(repeats.node_of(item))
            if place is None:
                raise _UnknownError
            results.append((place, _pattern(item, values)))
    return _Decomposition(tuple(nodes), tuple(results), several)


def _node_learned(node: torch.fx.Node, places: Mapping[torch.fx.Node, _Place], values: list[Any]) -> _Made:
    if node.op != "call_function" or "unbacked_bindings" in node.meta:
        raise _UnknownError
    value = node.meta.get("val")
    several = type(value) if type(value) in (list, tuple) else None
    own: Sequence[Any] = [value] if several is None else node.meta["val"]
    patterns = []
    for item in own:
        patterns.append(_pattern(item, values))
        values.append(item)
    args, kwargs = (torch.fx.map_arg(item, lambda other: _placed(other, places)) for item in (node.args, node.kwargs))
    name, tensor_meta = _NUMBER.sub("", node.name), node.meta.get("tensor_meta")
    return _Made(node.target, _plain(args), _plain(kwargs), name, tuple(patterns), several, tensor_meta)


def _placed(node: torch.fx.Node, places: Mapping[torch.fx.Node, _Place]) -> Any:
    if node not in places:
        raise _UnknownError
    return places[node]


def _plain(value: Any) -> Any:
    """The lists and dictionaries of a node's arguments as Python's own."""
    if isinstance(value, (list, tuple)):
        return (list if isinstance(value, list) else tuple)(_plain(item) for item in value)
    return {name: _plain(item) for name, item in value.items()} if isinstance(value, dict) else value


def _pattern(fake: Any, values: Sequence[Any]) -> Pattern:
    pattern = private.pattern_of(fake, values) if type(fake) is private.FakeTensor else None
    if pattern is None:
        raise _UnknownError
    return pattern
