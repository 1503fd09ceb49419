"""The cost of a call: arithmetic, memory traffic and the peak of memory, by module, from the graphs alone."""

from __future__ import annotations

import html
import operator
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from dovetail.aot.compiled_graph import CompiledGraph
from dovetail.aot.nodes import kept_anyway, memory_kept_by, memory_of
from dovetail.aot.partition import PartitionedGraph
from dovetail.errors import StageError
from dovetail.reports.explanation import compiled_function
from dovetail.reports.measured import Measured
from dovetail.reports.measured import measure as measure_entry
from dovetail.reports.table import Table
from dovetail.torch_private import sizes as private_sizes

_MOST_ROWS = 40


@dataclass
class ModuleCost:
    """The costs of one module with all modules in it; ``saved`` are bytes kept for the backward, ``seconds`` those measured."""

    forward_flops: int = 0
    backward_flops: int = 0
    bytes: int = 0
    saved: int = 0
    seconds: float = 0.0

    def add(self, other: ModuleCost) -> None:
        """Add the costs of another one."""
        for name in self.__dataclass_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass(frozen=True, repr=False)
class Cost:
    """The cost of one call.

    ``flops`` counts products of matrices, convolutions and attention, as torch's own counter does; ``bytes`` what the operators
    read and write when each runs by itself, which generated kernels lessen. ``peak_memory`` is the most that inputs, parameters,
    saved values and intermediate ones take together in forward and backward, if each value is freed after its last reader.
    ``modules`` has the same by module, "" for the whole call.

    With ``measure=True`` each module has the ``seconds`` that its operators take one by one, and ``measured`` says of each graph
    what the whole call takes, and its measured peak (:class:`dovetail.reports.measured.Measured`).
    """

    peak_memory: int
    modules: dict[str, ModuleCost] = field(default_factory=dict)
    measured: tuple[Measured, ...] = ()

    @property
    def flops(self) -> int:
        """Floating-point operations of forward and backward."""
        whole = self.modules.get("", ModuleCost())
        return whole.forward_flops + whole.backward_flops

    @property
    def bytes(self) -> int:
        """Bytes read and written by all operators."""
        return self.modules.get("", ModuleCost()).bytes

    @property
    def saved(self) -> int:
        """Bytes that are kept between forward and backward."""
        return self.modules.get("", ModuleCost()).saved

    def table(self) -> Table:
        """A row for each module, those deepest inside left out where there are many."""
        depth = 1
        while sum(name.count(".") <= depth for name in self.modules) <= _MOST_ROWS and depth < 20:
            depth += 1
        shown = [(name, cost) for name, cost in self.modules.items() if name.count(".") < depth][:_MOST_ROWS]
        rows = tuple(
            (
                f"{'  ' * name.count('.')}{name.rpartition('.')[2] or 'whole call'}",
                amount(cost.forward_flops, 1000),
                amount(cost.backward_flops, 1000),
                f"{amount(cost.bytes, 1024)}B",
                f"{amount(cost.saved, 1024)}B",
                *([f"{cost.seconds * 1e3:.3f} ms"] if self.measured else []),
            )
            for name, cost in shown
        )
        last = ("one by one",) if self.measured else ()
        return Table(("module", "forward FLOP", "backward FLOP", "bytes", "saved", *last), rows)

    def _sentences(self) -> list[str]:
        found = [f"predicted peak of memory: {amount(self.peak_memory, 1024)}B"]
        for item in self.measured:
            peak = "" if item.peak_memory is None else f", peak of memory {amount(item.peak_memory, 1024)}B"
            times = [
                f"{name} {value * 1e3:.3f} ms"
                for name, value in (("forward", item.forward), ("backward", item.backward))
                if value is not None
            ]
            found.append(f"measured as compiled: {', '.join(times) or f'nothing ({item.problem})'}{peak}")
        return found

    def __repr__(self) -> str:
        return "\n".join([str(self.table()), *self._sentences()])

    def _repr_html_(self) -> str:
        return f"{self.table().to_html()}<p>{'<br>'.join(map(html.escape, self._sentences()))}</p>"


def amount(number: float, base: int) -> str:
    """A number with a prefix.

    >>> amount(1234567, 1000), amount(2048, 1024), amount(12, 1000)
    ('1.23 M', '2.00 Ki', '12 ')
    """
    prefixes = ("", "K", "M", "G", "T", "P")
    power = 0
    while number >= base and power < len(prefixes) - 1:
        number /= base
        power += 1
    return f"{number:.2f} {prefixes[power]}{'i' if base == 1024 else ''}" if power else f"{number:.0f} "


def cost(compiled: Any, measure: bool = False) -> Cost:
    """The cost of one call of a compiled function or module, by the entry that was used last, and by those after a graph break.

    ``measure``: also what it takes on this machine, on made-up values (:mod:`dovetail.reports.measured`). Raises
    :class:`StageError` where nothing has been compiled yet.

    >>> import torch, dovetail
    >>> model = dovetail.compile(torch.nn.Linear(4, 8), backend="aten")
    >>> result = model(torch.ones(2, 4))
    >>> model.cost().flops, model.cost().modules[""].forward_flops
    (256, 128)
    """
    function = compiled_function(compiled)
    entries = [part.entries[0] for part in (function, *function.continuations()) if part.entries]
    entries = [entry for entry in entries if entry.compiled is not None]
    if not entries:
        raise StageError("nothing has been compiled yet", advice="call the compiled function once before it is asked")
    modules: defaultdict[str, ModuleCost] = defaultdict(ModuleCost)
    measured = tuple(map(measure_entry, entries)) if measure else ()
    for entry, times in zip(entries, measured or [Measured()] * len(entries), strict=True):
        for name, found in _by_module(entry.compiled, times.seconds):
            for path in _paths(name):
                modules[path].add(found)
    # Modules as they are first met, each with those in it.
    first = {path: number for number, path in enumerate(modules)}
    return Cost(
        max(memory_of_call(entry.compiled).peak for entry in entries),
        dict(sorted(modules.items(), key=lambda item: [first[path] for path in _paths(item[0])])),
        measured,
    )


def _paths(module: str) -> list[str]:
    """A module's path and those of all that it is in; "" is the whole call."""
    parts = module.split(".") if module else []
    return ["", *(".".join(parts[: count + 1]) for count in range(len(parts)))]


def _by_module(graph: CompiledGraph, seconds: Mapping[str, float]) -> Iterable[tuple[str, ModuleCost]]:
    joint, parts = graph.joint, graph.partitioned
    for node in joint.graph.nodes:
        if node.op != "call_function":
            continue
        is_backward = node.meta.get("phase") == "backward"
        flops, moved, took = flops_of(node), bytes_moved(node), seconds.get(node.name, 0.0)
        if flops or moved or took:
            own = (0, flops) if is_backward else (flops, 0)
            yield _module_of(node), ModuleCost(*own, moved, seconds=took)
    for node, size in saved_values(parts):
        yield _module_of(node), ModuleCost(saved=size)


def saved_values(parts: PartitionedGraph | None) -> list[tuple[torch.fx.Node, int]]:
    """The values that the forward keeps for the backward, each with the bytes of memory that none before it keeps."""
    if parts is None or parts.backward is None:
        return []
    free, seen = kept_anyway(parts.forward.graph), dict[int, int]()
    nodes = parts.backward.graph.find_nodes(op="placeholder")[: len(parts.saved)]
    found = [memory_kept_by(node, free) for node in nodes]
    return [
        (node, 0 if item is None or seen.setdefault(item[0], number) != number else item[1])
        for number, (node, item) in enumerate(zip(nodes, found, strict=True))
    ]


def _module_of(node: torch.fx.Node) -> str:
    place = node.meta.get("user_line")
    return "" if place is None else str(place.module)


def _value(argument: Any) -> Any:
    return torch.fx.node.map_arg(argument, lambda node: node.meta.get("val"))


def flops_of(node: torch.fx.Node) -> int:
    """The floating-point operations of a node, by torch's formulas; 0 where torch has none."""
    formula = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if formula is None:
        return 0
    return private_sizes.hint(formula(*_value(node.args), **_value(node.kwargs), out_val=node.meta.get("val")))


def bytes_moved(node: torch.fx.Node) -> int:
    """The bytes that an operator reads and writes; a view moves none."""
    own = memory_of(node)
    if own is not None and any(memory_of(argument) == own for argument in node.all_input_nodes):
        return 0
    values = [*(argument.meta.get("val") for argument in node.all_input_nodes), node.meta.get("val")]
    if (
        any(not isinstance(value, (torch.Tensor, tuple, list)) for value in values[-1:])
        or node.target is operator.getitem
    ):
        return 0
    return sum(map(bytes_of, values))


def bytes_of(value: Any) -> int:
    """The bytes of a tensor, or of all in a list or tuple, at the sizes of the capture."""
    if isinstance(value, (tuple, list)):
        return sum(map(bytes_of, value))
    if not isinstance(value, torch.Tensor):
        return 0
    return private_sizes.hint(value.numel()) * value.element_size()


@dataclass
class Memory:
    """The bytes alive after each operator of forward and backward; values are freed after their last reader.

    ``alive`` is all of it, ``saved`` what the forward keeps for the backward beside inputs and parameters, which are ``inputs``.
    ``nodes`` are the operators, the first ``forward`` of them those of the forward.
    """

    inputs: int
    forward: int = 0
    nodes: list[torch.fx.Node] = field(default_factory=list)
    alive: list[int] = field(default_factory=list)
    saved: list[int] = field(default_factory=list)

    @property
    def peak(self) -> int:
        """The most that is alive at once."""
        return max([self.inputs, *self.alive])


def memory_of_call(graph: CompiledGraph) -> Memory:
    """The memory that forward and backward take, from the graphs alone."""
    parts = graph.partitioned
    if parts is None:
        return Memory(sum(bytes_of(node.meta.get("val")) for node in graph.joint.primals))
    inputs = _memories(parts.forward.graph.find_nodes(op="placeholder"))
    found = Memory(sum(inputs.values()))
    backward = [] if parts.backward is None else parts.backward.graph.find_nodes(op="placeholder")[: len(parts.saved)]
    saved = _memories(backward).keys() - inputs.keys()
    _follow(parts.forward.graph, inputs, saved, found)
    found.forward = len(found.nodes)
    if parts.backward is not None:
        _follow(parts.backward.graph, inputs, saved, found)
    return found


def _awaits(node: torch.fx.Node) -> bool:
    return getattr(node.target, "_opname", "") == "wait_tensor"


def _read_until(node: torch.fx.Node) -> Iterable[torch.fx.Node]:
    """The values that an exchange awaited here reads meanwhile; a sum reads a copy."""
    if not _awaits(node):
        return ()
    begun = node.all_input_nodes[0]
    return () if "all_reduce" in str(begun.target) else begun.all_input_nodes


def _memories(nodes: Iterable[torch.fx.Node]) -> dict[int, int]:
    """The memory that these nodes lie in, with its bytes."""
    found = (memory_kept_by(node, frozenset()) for node in nodes)
    return dict(item for item in found if item is not None)


def _follow(graph: torch.fx.Graph, inputs: dict[int, int], saved: Set[int], found: Memory) -> None:
    nodes: Sequence[torch.fx.Node] = list(graph.nodes)
    # The result of an exchange has its memory from the beginning.
    awaited: dict[Any, Any] = {memory_of(node): memory_of(node.all_input_nodes[0]) for node in filter(_awaits, nodes)}
    last: dict[int, int] = {}
    for index, node in enumerate(nodes):
        for argument in (node, *node.all_input_nodes, *_read_until(node)):
            key = memory_of(argument)
            if key is not None:
                last[awaited.get(key, key)] = index
    ends: defaultdict[int, list[int]] = defaultdict(list)
    for key, index in last.items():
        ends[index].append(key)
    alive = inputs | _memories(graph.find_nodes(op="placeholder"))
    total, kept = sum(alive.values()), sum(alive[key] for key in alive.keys() & saved)
    for index, node in enumerate(nodes):
        for key, size in _memories([node]).items():
            if key not in alive and key not in awaited:
                alive[key] = size
                total += size
                kept += size * (key in saved)
        if node.op not in ("placeholder", "output"):
            found.nodes.append(node)
            found.alive.append(total)
            found.saved.append(kept)
        for key in ends[index]:
            if key in alive and key not in inputs:
                size = alive.pop(key)
                total -= size
                kept -= size * (key in saved)
