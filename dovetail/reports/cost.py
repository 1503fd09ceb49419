"""What a call costs: arithmetic, memory traffic and the peak of memory, by module, from the graphs alone."""

from __future__ import annotations

import html
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from dovetail.aot.compiled_graph import CompiledGraph
from dovetail.aot.nodes import kept_anyway, memory_kept_by, memory_of
from dovetail.errors import StageError
from dovetail.reports.explanation import compiled_function
from dovetail.reports.table import Table
from dovetail.torch_private import sizes as private_sizes

_MOST_ROWS = 40


@dataclass
class ModuleCost:
    """The costs of one module with all modules in it; ``saved`` are bytes kept for the backward."""

    forward_flops: int = 0
    backward_flops: int = 0
    bytes: int = 0
    saved: int = 0

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
    """

    peak_memory: int
    modules: dict[str, ModuleCost] = field(default_factory=dict)

    @property
    def flops(self) -> int:
        """Of forward and backward."""
        whole = self.modules.get("", ModuleCost())
        return whole.forward_flops + whole.backward_flops

    @property
    def bytes(self) -> int:
        """Read and written by all operators."""
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
            )
            for name, cost in shown
        )
        return Table(("module", "forward FLOP", "backward FLOP", "bytes", "saved"), rows)

    def __repr__(self) -> str:
        return f"{self.table()}\npredicted peak of memory: {amount(self.peak_memory, 1024)}B"

    def _repr_html_(self) -> str:
        return f"{self.table().to_html()}<p>{html.escape(repr(self).splitlines()[-1])}</p>"


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


def cost(compiled: Any) -> Cost:
    """What one call of a compiled function or module costs, by the entry that was used last, and by those after a graph break.

    Raises :class:`StageError` where nothing has been compiled yet.

    >>> import torch, dovetail
    >>> model = dovetail.compile(torch.nn.Linear(4, 8), backend="aten")
    >>> result = model(torch.ones(2, 4))
    >>> model.cost().flops, model.cost().modules[""].forward_flops
    (256, 128)
    """
    function = compiled_function(compiled)
    entries = [part.entries[0] for part in (function, *function.continuations()) if part.entries]
    graphs = [entry.compiled for entry in entries if entry.compiled is not None]
    if not graphs:
        raise StageError("nothing has been compiled yet", advice="call the compiled function once before it is asked")
    modules: defaultdict[str, ModuleCost] = defaultdict(ModuleCost)
    for graph in graphs:
        for name, found in _by_module(graph):
            for path in _paths(name):
                modules[path].add(found)
    # Modules as they are first met, each with those in it.
    first = {path: number for number, path in enumerate(modules)}
    return Cost(
        max(map(_peak, graphs)),
        dict(sorted(modules.items(), key=lambda item: [first[path] for path in _paths(item[0])])),
    )


def _paths(module: str) -> list[str]:
    """A module's path and those of all that it is in; "" is the whole call."""
    parts = module.split(".") if module else []
    return ["", *(".".join(parts[: count + 1]) for count in range(len(parts)))]


def _by_module(graph: CompiledGraph) -> Iterable[tuple[str, ModuleCost]]:
    joint, parts = graph.joint, graph.partitioned
    for node in joint.graph.nodes:
        if node.op != "call_function":
            continue
        is_backward = node.meta.get("phase") == "backward"
        flops = _flops(node)
        moved = _bytes_moved(node)
        if flops or moved:
            yield _module_of(node), ModuleCost(0 if is_backward else flops, flops if is_backward else 0, moved)
    if parts is not None and parts.backward is not None:
        free, seen = kept_anyway(parts.forward.graph), set()
        for node in parts.backward.graph.find_nodes(op="placeholder")[: len(parts.saved)]:
            memory = memory_kept_by(node, free)
            if memory is not None and memory[0] not in seen:
                seen.add(memory[0])
                yield _module_of(node), ModuleCost(saved=memory[1])


def _module_of(node: torch.fx.Node) -> str:
    place = node.meta.get("user_line")
    return "" if place is None else str(place.module)


def _value(argument: Any) -> Any:
    return torch.fx.node.map_arg(argument, lambda node: node.meta.get("val"))


def _flops(node: torch.fx.Node) -> int:
    """The floating-point operations of a node, by torch's formulas; 0 where torch has none."""
    formula = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if formula is None:
        return 0
    return private_sizes.hint(formula(*_value(node.args), **_value(node.kwargs), out_val=node.meta.get("val")))


def _bytes_moved(node: torch.fx.Node) -> int:
    """What an operator reads and writes; a view moves nothing."""
    own = memory_of(node)
    if own is not None and any(memory_of(argument) == own for argument in node.all_input_nodes):
        return 0
    values = [*(argument.meta.get("val") for argument in node.all_input_nodes), node.meta.get("val")]
    if any(not isinstance(value, (torch.Tensor, tuple, list)) for value in values[-1:]) or _picks(node):
        return 0
    return sum(map(_bytes, values))


def _picks(node: torch.fx.Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem"


def _bytes(value: Any) -> int:
    if isinstance(value, (tuple, list)):
        return sum(map(_bytes, value))
    if not isinstance(value, torch.Tensor):
        return 0
    return private_sizes.hint(value.numel()) * value.element_size()


def _peak(graph: CompiledGraph) -> int:
    """The most memory that is alive at once in forward and backward."""
    parts = graph.partitioned
    if parts is None:
        return sum(_bytes(node.meta.get("val")) for node in graph.joint.primals)
    inputs = _memories(parts.forward.graph.find_nodes(op="placeholder"))
    forward = _peak_of(parts.forward.graph, inputs)
    if parts.backward is None:
        return forward
    return max(forward, _peak_of(parts.backward.graph, inputs))


def _memories(nodes: Iterable[torch.fx.Node]) -> dict[int, int]:
    """The memory that these nodes lie in, with its bytes."""
    found = (memory_kept_by(node, frozenset()) for node in nodes)
    return dict(item for item in found if item is not None)


def _peak_of(graph: torch.fx.Graph, kept: dict[int, int]) -> int:
    nodes: Sequence[torch.fx.Node] = list(graph.nodes)
    last: dict[int, int] = {}
    for index, node in enumerate(nodes):
        for argument in (node, *node.all_input_nodes):
            key = memory_of(argument)
            if key is not None:
                last[key] = index
    ends: defaultdict[int, list[int]] = defaultdict(list)
    for key, index in last.items():
        ends[index].append(key)
    alive = kept | _memories(graph.find_nodes(op="placeholder"))
    total = peak = sum(alive.values())
    for index, node in enumerate(nodes):
        for key, size in _memories([node]).items():
            if key not in alive:
                alive[key] = size
                total += size
        peak = max(peak, total)
        for key in ends[index]:
            if key in alive and key not in kept:
                total -= alive.pop(key)
    return peak
