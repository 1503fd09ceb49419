"""Choose the values to save and those to compute again, so that saved values fit a budget and the least time is lost.

For every value that the backward may read there are two yes-or-no questions: is it saved, is it computed again. A value that
is computed again needs its arguments, saved or computed again; each storage is paid for once; the sum stays below the budget.
That is a mixed-integer linear programme, and scipy's solver (HiGHS) answers it. Among answers of the same time it takes the one
that saves least, so that more budget never means fewer bytes saved at more time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.aot.nodes import kept_anyway, memory_kept_by, memory_of
from dovetail.errors import BackendError, OptionError
from dovetail.options import check_budget
from dovetail.torch_private import operators as private_operators
from dovetail.torch_private import sizes as private_sizes

# Floating-point operations in the time in which one byte is read or written, and bytes in the time that one call takes. Both
# are those of a processor to within a factor of a few; only the order of candidates matters.
OPERATIONS_PER_BYTE = 8.0
BYTES_PER_CALL = 4096.0
SECONDS_TO_SOLVE = 20.0


def mebibytes(count: int) -> str:
    """A number of bytes as people write it.

    >>> mebibytes(3 << 19), mebibytes(700)
    ('1.50 MiB', '700 bytes')
    """
    return f"{count / 2**20:.2f} MiB" if count >= 10_000 else f"{count} bytes"


@dataclass(frozen=True)
class MemoryReport:
    """The outcome of a memory budget. All numbers are bytes, of the sizes at capture; parameters and buffers do not count.

    ``budget`` is what was allowed, ``predicted`` what the plan keeps for the backward, ``measured`` what the last run has kept
    (None before the first one). ``smallest`` and ``largest`` are what the budgets 0 and 1 come to. ``recomputed`` counts
    operators.
    """

    budget: int
    predicted: int
    smallest: int
    largest: int
    recomputed: int
    measured: int | None = None

    def __str__(self) -> str:
        measured = "not run yet" if self.measured is None else f"measured {mebibytes(self.measured)}"
        return (
            f"budget {mebibytes(self.budget)} of {mebibytes(self.smallest)} to {mebibytes(self.largest)}: "
            f"predicted {mebibytes(self.predicted)}, {measured}, {self.recomputed} operators computed again"
        )


def choose_budget(budget: float | int, smallest: int, largest: int) -> int:
    """The budget in bytes. A fraction lies between the smallest and the largest possible; the whole numbers 0 and 1 are both.

    Raises :class:`OptionError` for a number of bytes that is less than possible: a budget is obeyed or refused.
    """
    check_budget(budget)
    largest = max(smallest, largest)
    if isinstance(budget, float) or budget in (0, 1):
        return smallest + int((largest - smallest) * budget)
    if budget < smallest:
        raise OptionError(
            f"a memory_budget of {budget} bytes cannot be kept: at least {smallest} bytes are needed for the backward",
            advice=f"allow at least {smallest} bytes (random operators and inputs cannot be computed again)",
        )
    return budget


def estimate_cost(node: torch.fx.Node) -> float:
    """The cost of computing a node, in bytes that could be read or written in the same time."""
    result = node.meta.get("val")
    if node.op != "call_function" or not isinstance(node.target, private_operators.OpOverload):
        return 0.0
    if not isinstance(result, (torch.Tensor, tuple, list)):
        return 0.0
    memory = memory_of(node)
    if memory is not None and memory in map(memory_of, node.all_input_nodes):
        # A view: no data is touched.
        return 1.0
    values = [item.meta.get("val") for item in node.all_input_nodes]
    values += list(result) if isinstance(result, (tuple, list)) else [result]
    traffic = sum(
        private_sizes.hint(item.numel()) * item.element_size() for item in values if isinstance(item, torch.Tensor)
    )
    return BYTES_PER_CALL + traffic + _operations(node) / OPERATIONS_PER_BYTE


def _operations(node: torch.fx.Node) -> float:
    from torch.utils.flop_counter import flop_registry

    formula: Any = flop_registry.get(node.target._overloadpacket)  # type: ignore[union-attr]
    if formula is None:
        return 0.0
    args = torch.fx.node.map_arg(node.args, lambda item: _plain(item.meta.get("val")))
    kwargs = torch.fx.node.map_arg(node.kwargs, lambda item: _plain(item.meta.get("val")))
    try:
        return float(formula(*args, **kwargs, out_val=_plain(node.meta.get("val"))))
    except (AssertionError, ValueError, TypeError, IndexError, AttributeError, NotImplementedError):
        # The formulas know the usual arguments only; the traffic is a fair guess for the rest.
        return 0.0


def _plain(value: Any) -> Any:
    """A value with plain sizes, so that a formula guards nothing."""
    if isinstance(value, torch.Tensor):
        return torch.empty([private_sizes.hint(size) for size in value.shape], dtype=value.dtype, device="meta")
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(item) for item in value)
    return private_sizes.hint(value) if private_sizes.is_symbolic(value) and isinstance(value, torch.SymInt) else value


@dataclass(frozen=True)
class Candidates:
    """The nodes that the backward may read, in the graph's order, with what may be done with each.

    ``read`` must be there in the backward. A node of ``fixed`` is never computed again; one of ``unsavable`` is never saved.
    """

    nodes: tuple[torch.fx.Node, ...]
    read: frozenset[torch.fx.Node]
    fixed: frozenset[torch.fx.Node]
    unsavable: frozenset[torch.fx.Node]


def collect_candidates(read: Iterable[torch.fx.Node], is_fixed: Callable[[torch.fx.Node], bool]) -> Candidates:
    """All that may be saved or computed again, so that ``read`` can be had in the backward."""
    wanted = set(read)
    seen: dict[torch.fx.Node, None] = {}
    stack = list(wanted)
    fixed = set()
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen[node] = None
        if node.op == "placeholder" or is_fixed(node):
            fixed.add(node)
        # A fixed tuple is had through the parts that are saved of it.
        else:
            stack += node.all_input_nodes
    unsavable = {node for node in seen if isinstance(node.meta.get("val"), (tuple, list))}
    for node in seen:
        if node in unsavable and node in fixed:
            fixed.update(user for user in node.users if user in seen)
    order = sorted(seen, key=lambda node: node._sort_key)
    return Candidates(tuple(order), frozenset(wanted), frozenset(fixed), frozenset(unsavable))


class _Programme:
    """The constraints of the linear programme, row by row.

    Variables: node ``i`` is saved (``i``), node ``i`` is computed again (``count + i``), a storage is kept (the rest).
    """

    def __init__(self, candidates: Candidates) -> None:
        nodes = candidates.nodes
        self.candidates = candidates
        self.count = len(nodes)
        self.number = {node: position for position, node in enumerate(nodes)}
        free = kept_anyway(nodes[0].graph)
        self.kept_by = [memory_kept_by(node, free) for node in nodes]
        self.sizes: dict[int, int] = {}
        for entry in self.kept_by:
            if entry is not None:
                self.sizes[entry[0]] = max(self.sizes.get(entry[0], 0), entry[1])
        self.storages = {key: 2 * self.count + position for position, key in enumerate(self.sizes)}
        self.total = 2 * self.count + len(self.storages)
        self.rows: list[int] = []
        self.columns: list[int] = []
        self.entries: list[float] = []
        self.lower: list[float] = []
        self.upper: list[float] = []
        self.scale = float(max(1, sum(self.sizes.values())))
        #: The share of each storage in all of them.
        self.weights = {column: self.sizes[key] / self.scale for key, column in self.storages.items()}
        self._add_dependencies()

    def constrain(self, terms: Iterable[tuple[int, float]], low: float, high: float) -> None:
        """A weighted sum of variables lies between two numbers."""
        for column, factor in terms:
            self.rows.append(len(self.lower))
            self.columns.append(column)
            self.entries.append(factor)
        self.lower.append(low)
        self.upper.append(high)

    def _add_dependencies(self) -> None:
        infinity, count, number = float("inf"), self.count, self.number
        for node, position in number.items():
            if node in self.candidates.read:
                self.constrain([(position, 1.0), (count + position, 1.0)], 1.0, infinity)
            if node not in self.candidates.fixed:
                for argument in node.all_input_nodes:
                    other = number[argument]
                    self.constrain([(other, 1.0), (count + other, 1.0), (count + position, -1.0)], 0.0, infinity)
            entry = self.kept_by[position]
            if entry is not None:
                self.constrain([(self.storages[entry[0]], 1.0), (position, -1.0)], 0.0, infinity)

    def costs(self, has_budget: bool) -> list[float]:
        """The costs to minimise: with a budget the time, else the bytes; a trifle of the other one decides between equals."""
        cost = [0.0] * self.total
        fixed = self.candidates.fixed
        times = [0.0 if node in fixed else estimate_cost(node) for node in self.candidates.nodes]
        whole = max(1.0, sum(times))
        for position, time in enumerate(times):
            # Saving costs a trifle even where it takes no room, so that nothing is saved for no reason.
            cost[position] = 1e-9
            cost[self.count + position] = time / whole * (1.0 if has_budget else 1e-4)
        for column, share in self.weights.items():
            cost[column] = share * (1e-4 if has_budget else 1.0)
        return cost

    def highest(self) -> list[float]:
        """Upper bounds of the variables: 0 for what cannot be."""
        nodes, unsavable, fixed = self.candidates.nodes, self.candidates.unsavable, self.candidates.fixed
        saved = [float(node not in unsavable) for node in nodes]
        return [*saved, *(float(node not in fixed) for node in nodes), *[1.0] * len(self.storages)]


def solve(candidates: Candidates, budget: int | None) -> list[torch.fx.Node]:
    """The nodes to save: the fastest plan within ``budget`` bytes, or, for None, the plan of the fewest bytes.

    Raises :class:`OptionError` where scipy is missing and :class:`BackendError` where its solver finds no plan.
    """
    optimize, sparse = _scipy()
    if not candidates.nodes:
        return []
    programme = _Programme(candidates)
    if budget is not None:
        programme.constrain(programme.weights.items(), 0.0, budget / programme.scale)
    matrix = sparse.csr_array(
        (programme.entries, (programme.rows, programme.columns)), shape=(len(programme.lower), programme.total)
    )
    result = optimize.milp(
        programme.costs(budget is not None),
        integrality=[1] * programme.total,
        bounds=optimize.Bounds(0.0, programme.highest()),
        constraints=optimize.LinearConstraint(matrix, programme.lower, programme.upper),
        options={"time_limit": SECONDS_TO_SOLVE, "mip_rel_gap": 0.0},
    )
    if result.x is None:
        raise BackendError(
            f"no plan for the memory budget was found: {result.message}", advice="leave memory_budget out"
        )
    kept = result.x[: programme.count]
    return _prune(candidates, [node for node, share in zip(candidates.nodes, kept, strict=True) if share > 0.5])


def _prune(candidates: Candidates, chosen: list[torch.fx.Node]) -> list[torch.fx.Node]:
    """The chosen nodes that are in fact read: the solver may save what costs nothing."""
    wanted = set(chosen)
    kept: dict[torch.fx.Node, None] = {}
    seen = set()
    stack = list(candidates.read)
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if node in wanted:
            kept[node] = None
        elif node in candidates.fixed:
            raise BackendError(f"the plan for the memory budget needs {node.name} and does not save it")
        else:
            stack += node.all_input_nodes
    return [node for node in chosen if node in kept]


def _scipy() -> tuple[Any, Any]:
    try:
        from scipy import optimize, sparse
    except ImportError as error:
        raise OptionError(
            "memory_budget needs scipy's solver, and scipy is not installed", advice="pip install 'dovetail[budget]'"
        ) from error
    return optimize, sparse
