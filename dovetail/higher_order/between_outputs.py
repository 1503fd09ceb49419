"""Gradients of outputs with respect to other results of the same call: features, an input's new value.

For autograd a graph is one node, so that no gradient arrives there. Where somebody asks for one, the program's calls run twice
again in eager: first as they are, then with the asked tensors held, as variables of their own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from dovetail.aot.joint_graph import JointGraph
from dovetail.higher_order.backward import agree
from dovetail.higher_order.eager_replay import replay
from dovetail.runtime.backward_reads import reads_of
from dovetail.runtime.derivatives import FREED, Gradients
from dovetail.runtime.output_dependencies import partial_gradient
from dovetail.runtime.spec import OutputDependency
from dovetail.torch_private import autograd as private_autograd
from dovetail.torch_private import autograd_nodes as private_autograd_nodes
from dovetail.trace.program import Program, Slot

_OF_TORCH = ("aten", "prims")


class _Rest:
    """Gradients that reach the inputs by other ways than the asked outputs, in one backward."""

    def __init__(self) -> None:
        self.number = private_autograd.current_backward()
        self.parts: list[tuple[int, torch.Tensor | None]] = []

    def __call__(self, gradients: Gradients) -> Gradients:
        found = list(gradients)
        # A backward that has not come to the inputs leaves its parts behind.
        for index, part in self.parts if self.number == private_autograd.current_backward() else ():
            whole = found[index]
            found[index] = part if whole is None else whole if part is None else whole + part
        return found


@dataclass(frozen=True, eq=False)
class BetweenOutputs:
    """Gradients between the outputs of a joint graph, if there is no ``obstacle``."""

    joint: JointGraph
    obstacle: str

    def __call__(self, run: Callable[..., Any], node: Any, dependent: Any, tangent: torch.Tensor) -> Gradients:
        """See :meth:`dovetail.runtime.derivatives.DifferentiableBackward.divide`; ``node`` is that of the call, and
        ``run(replay, primals)`` calls ``replay(primals)`` with the random numbers of the forward.
        """
        item: OutputDependency = dependent.item
        joint, program, call, graph = self.joint, self.joint.program, node.call, node.call.graph
        if program is None or self.obstacle or joint.order > 1:
            raise partial_gradient(self.obstacle or "they are gradients themselves")
        flags = joint.spec.output_differentiable
        defined = tuple([index == item.output for index, flag in enumerate(flags) if flag])
        edges = graph.from_edges(node.next_functions[-len(joint.spec.input_requires_grad) :])
        saved = graph.saved(node, call, defined)
        if call.kept is None:
            raise RuntimeError(FREED)
        call.kept.check_saved(edges, saved)
        primals = call.kept.unpack(edges, call.kept.by.needed.for_outputs(defined))
        wanted = private_autograd_nodes.wanted_edges(edges)
        new = {mutation.input_index: program.outputs[mutation.output_index] for mutation in joint.spec.mutations}
        returned = joint.capture.program.outputs
        numbers = [*(returned[position] for position in item.results), *(new[index] for index in item.inputs)]
        made: dict[int, tuple[torch.Tensor, int, int]] = {}

        def note(number: int, index: int, value: torch.Tensor) -> torch.Tensor:
            # A write gives a tensor another node of autograd, and so do writes to what shares its memory.
            if number not in made or made[number][1] != value._version:
                made[number] = value, value._version, index
            return value

        def hold(number: int, index: int, value: torch.Tensor) -> torch.Tensor:
            if index < made[number][2]:
                return value
            again.setdefault(number, value)
            return leaves[number]

        def replayed(look: Callable[..., torch.Tensor]) -> Any:
            return run(functools.partial(replay, joint, _after_calls(program, numbers, look)), primals)

        def is_as_captured(inputs: list[torch.Tensor], output: torch.Tensor) -> bool:
            found = torch.autograd.grad(output, [inputs[index] for index in wanted], tangent, allow_unused=True)
            with torch.no_grad():
                tangents = [tangent if index == item.output else None for index, flag in enumerate(flags) if flag]
                expected = graph.plain(call, saved, tangents, defined)
            return agree(found, [expected[index] for index in wanted])

        again: dict[int, torch.Tensor] = {}
        with torch.enable_grad(), reads_of(call.reads):
            inputs, outputs = replayed(note)
            value = outputs[item.output].detach().clone()
            if (doubt := _doubt(joint)) and not is_as_captured(inputs, outputs[item.output]):
                raise partial_gradient(doubt)
            leaves = {number: value.view_as(value) for number, (value, _, _) in made.items()}
            versions = [leaf._version for leaf in leaves.values()]
            inputs, outputs = replayed(hold)
        if versions != [leaf._version for leaf in leaves.values()]:
            raise partial_gradient("it was written to through another tensor")
        asked = [*(leaves[number] for number in numbers), *(inputs[index] for index in wanted)]
        root, twice = outputs[item.output], torch.is_grad_enabled()
        *sources, own = [source if _is_saved(source, saved) else None for source in dependent.sources]
        _write_again(own, value, [root])
        for number, source in zip(numbers, sources, strict=True):
            _write_again(source, made[number][0], [leaves[number], again[number]])
        found = torch.autograd.grad(root, asked, tangent, create_graph=twice, allow_unused=True)
        parts = found[: len(numbers)]
        if all(part is None for part in parts):
            return tangent, *parts
        call.is_partial = True
        if call.direct is None or call.direct.number != private_autograd.current_backward():
            call.direct = _Rest()
        call.direct.parts += zip(wanted, found[len(numbers) :], strict=True)
        return None, *parts


def has_custom_functions(joint: JointGraph) -> bool:
    """Whether the program calls a custom ``autograd.Function``."""
    calls = () if joint.program is None else joint.program.calls
    return any(private_autograd_nodes.is_function_apply(call.function) for call in calls)


def _doubt(joint: JointGraph) -> str:
    """Why a replay of the program's calls may have other gradients than its graph; an empty text where nothing says so."""
    if has_custom_functions(joint):
        return "a custom autograd.Function in it reads other values by now"
    custom = (node.target for node in joint.graph.nodes if getattr(node.target, "namespace", "aten") not in _OF_TORCH)
    found = next(custom, None)
    return "" if found is None else f"{found}, a custom operator, reads other values by now"


def _is_saved(source: tuple[Any, ...], saved: Sequence[Any]) -> bool:
    """Whether the memory in which the call has returned a result is kept for its backward."""
    tensors = [item for item in saved if isinstance(item, torch.Tensor) and item.layout is torch.strided]
    storages = [item.untyped_storage() for item in tensors]
    return any(0 <= source[-1] - storage.data_ptr() < storage.nbytes() for storage in storages)


def _write_again(source: tuple[Any, ...] | None, value: torch.Tensor, replayed: Sequence[torch.Tensor]) -> None:
    """Repeat the program's writes to a result past autograd since the call on the result's ``replayed`` twins.

    Nobody counts a write through ``.data``; a formula that has saved the tensor reads the new number. One that has saved its own
    result keeps that where the tensor is given other memory.
    """
    if source is None or (result := source[-2]()) is None:
        return
    if result.data_ptr() != source[-1]:
        replayed[0].data = result.data if len(replayed) > 1 else replayed[0].data
    elif not _holds(result, value):
        for twin in replayed:
            twin.data.copy_(result)


def _holds(result: Any, value: torch.Tensor) -> bool:
    """Whether a result has the value of its replay, or another shape. A value rounded otherwise by a backend counts as written: the
    program's formulas would have read it.
    """
    return result.shape != value.shape or bool(((result == value) | (result.isnan() & value.isnan())).all())


def _after_calls(program: Program, numbers: Sequence[int], look: Callable[..., torch.Tensor]) -> Program:
    """The program with ``look(number, index, value)`` for each of these tensors after each call; it may give another one."""
    calls, known = [], set(program.inputs)
    for index, call in enumerate(program.calls):
        calls.append(call)
        known.update(call.results)
        for number in known.intersection(numbers):
            calls.append(replace(call, function=look, args=(number, index, Slot(number)), kwargs={}, results=(number,)))
    return replace(program, calls=tuple(calls))
