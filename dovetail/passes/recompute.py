"""The choice of values that the forward saves and of those that the backward computes again: hooks around the partition.

A backend that fuses operators gets the minimum cut. A bitwise one saves what eager saves: without fusion, computing twice costs
time and saves only memory. With a ``memory_budget`` below 1 as much is computed again as it takes to stay within it, whatever the
backend (:mod:`dovetail.passes.memory_budget`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, Literal

import torch

from dovetail.aot.backward_graphs import FlatCallable
from dovetail.aot.descriptors import BufferInput, ParamInput
from dovetail.aot.nodes import IN_BACKWARD, SAVE, memory_of, must_stay, saved_bytes, tensor_of
from dovetail.aot.partition import ChooseSaved, Saved, Split, as_saved, source_of
from dovetail.aot.steps import BackendGraph, Lowering, before_backend, choose_saved
from dovetail.passes.memory_budget import MemoryReport, choose_budget, collect_candidates, solve
from dovetail.passes.minimum_cut import minimum_cut
from dovetail.passes.saved_sizes import saving_sizes
from dovetail.rules.torch.set_data import replaced_inputs
from dovetail.whole_calls.operator import RANDOM_WHOLE_CALL, WHOLE_CALL, function_of

Strategy = Literal["minimum_cut", "save_all"]
# Twice the same operator may give two results, or two sizes of different names.
_ONCE = {torch.Tag.nondeterministic_bitwise, torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
_EXCHANGES = ("_c10d_functional", "c10d_functional", "dovetail_distributed")


def saved_by(
    strategy: Strategy, memory_budget: float | int | None = None, written: Collection[int] = ()
) -> ChooseSaved:
    """Save by a strategy, within a budget if there is one. ``"save_all"`` computes nothing twice without one.

    Nothing is computed again from the inputs ``written``, which after the call hold other values, nor from results, to which
    the program may write without autograd's knowledge. Without a budget, nothing is from buffers and data that eager does not
    keep: the program may write to those before the backward, as to a queue of keys.

    The choice raises :class:`OptionError` for a budget that cannot be kept.
    """

    def choose(split: Split) -> Saved:
        if not split.has_backward:
            return Saved((), None if memory_budget is None else lambda saved, again: MemoryReport(0, 0, 0, 0, 0))
        changing = {memory_of(split.primals[index]) for index in written} | split.handed_out
        if memory_budget is None and strategy == "minimum_cut":
            given = [node for node, gradient in zip(split.primals, split.gradients, strict=True) if gradient is None]
            data = [node for node in given if not isinstance(node.meta.get("desc"), ParamInput)]
            changing |= set(map(memory_of, data)) - _kept_by_eager(split)
        _save_what_reads(split, changing - {None})
        if strategy == "minimum_cut":
            _save_what_is_compared(split)
            if memory_budget is None:
                _save_what_tapes_hold(split)
        saved = as_saved(split.read if strategy == "save_all" else minimum_cut(split.read, reused=split.reused))
        if memory_budget is None:
            return Saved(saved)
        largest = saved_bytes(saved)
        candidates = collect_candidates(split.read, _never_again)
        least = as_saved(solve(candidates, None))
        smallest = saved_bytes(least)
        allowed = choose_budget(memory_budget, smallest, largest)
        if allowed < largest:
            saved = as_saved(solve(candidates, allowed)) if allowed > smallest else least

        def report(predicted: int, recomputed: int) -> MemoryReport:
            return MemoryReport(allowed, predicted, min(smallest, largest), largest, recomputed)

        return Saved(saved, report)

    return choose


def _kept_by_eager(split: Split) -> set[int | None]:
    """The memory that eager's backward reads, also in operators that were decomposed into some that need no tangent."""
    formulas = [node for node in split.nodes if node.meta.get("phase") == "backward" and not node.meta.get(IN_BACKWARD)]
    return {memory_of(node) for node in [*split.read, *(each for node in formulas for each in node.all_input_nodes)]}


def _save_what_reads(split: Split, memories: Collection[int | None]) -> None:
    """Compute no value again that the forward computes from this memory; views of it are no values of their own."""
    for node in split.nodes if memories else ():
        read = {memory_of(argument) for argument in node.all_input_nodes}.intersection(memories)
        if read - {memory_of(node)} and node not in split.of_backward:
            node.meta[SAVE] = True


_EQUALS = (torch.ops.aten.eq, torch.ops.aten.ne)
_EXACT = (torch.ops.aten.abs, torch.ops.aten.neg)


def asked_for_equality(nodes: Iterable[torch.fx.Node]) -> list[torch.fx.Node]:
    """The computed floats that are compared for being equal, as each element is with the largest in the gradient of ``amax``."""
    found: dict[torch.fx.Node, None] = {}
    for node in nodes:
        for value in node.all_input_nodes if getattr(node.target, "overloadpacket", None) in _EQUALS else ():
            value = source_of(value)
            while getattr(value.target, "overloadpacket", None) in _EXACT:
                value = source_of(value.all_input_nodes[0])
            tensor = tensor_of(value)
            if value.op == "call_function" and tensor is not None and tensor.is_floating_point():
                found[value] = None
    return list(found)


def _save_what_is_compared(split: Split) -> None:
    """Compute no float again that is compared: a kernel that fuses it may round in another way, and nothing is equal."""
    for node in asked_for_equality(split.nodes):
        if node not in split.of_backward:
            node.meta[SAVE] = True


def _save_what_tapes_hold(split: Split) -> None:
    """Compute no argument of a whole call again whose graph is kept: it is a graph of this memory, and spares a second call."""
    for node in split.nodes:
        if node.target in (WHOLE_CALL, RANDOM_WHOLE_CALL) and function_of(node).keeps_graph:
            for argument in node.all_input_nodes:
                argument.meta[SAVE] = True


def exchanges_with_ranks(node: torch.fx.Node) -> bool:
    """Whether a node exchanges tensors with other processes, which would have to do it again as well."""
    return getattr(node.target, "namespace", "") in _EXCHANGES


def _never_again(node: torch.fx.Node) -> bool:
    """Whether a node may not be computed twice: its second result could be another one, or other ranks would wait for it."""
    if node.op != "call_function":
        return False
    if exchanges_with_ranks(node) or must_stay(node) or node.meta.get(SAVE):
        return True
    return not _ONCE.isdisjoint(getattr(node.target, "tags", ()))


@choose_saved
def _choose(lowering: Lowering) -> ChooseSaved:
    is_bitwise = lowering.backend.numerics == "bitwise"
    written = [item.input_index for item in lowering.joint.spec.mutations] + replaced_inputs(lowering.joint)
    choose = saved_by("save_all" if is_bitwise else "minimum_cut", lowering.settings.memory_budget, written)
    return choose if is_bitwise else saving_sizes(choose)


@before_backend
def _measure(lowering: Lowering, unit: BackendGraph) -> BackendGraph:
    """Note how many bytes each run of the forward keeps for the backward, where there is a budget."""
    if unit.kind == "backward" or lowering.parts is None or lowering.parts.memory is None:
        return unit
    joint, measured = lowering.joint, lowering.measured
    count = joint.num_forward_outputs
    places = [
        place for place, item in enumerate(joint.input_descriptors) if isinstance(item, (ParamInput, BufferInput))
    ]

    def measuring(forward: FlatCallable) -> FlatCallable:
        def run(values: list[Any]) -> list[Any]:
            free = [values[place] for place in places]
            results = forward(values)
            measured[:] = [measured_bytes(results[count:], free)]
            return results

        return run

    return unit.wrapped(measuring)


def measured_bytes(values: Sequence[Any], free: Iterable[Any]) -> int:
    """Bytes that real saved values keep alive, each storage once, without those of the tensors in ``free``."""
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    storages = {value.untyped_storage()._cdata: value.untyped_storage().nbytes() for value in tensors}
    for value in free:
        storages.pop(value.untyped_storage()._cdata, None)
    return sum(storages.values())
