"""Eager's work around a pure graph: sizes changed in place, inputs written to, inputs and views as results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dovetail.runtime.derivatives import FREED
from dovetail.runtime.output_dependencies import depend_on
from dovetail.runtime.spec import FreshOutput, InputOutput, OutputDependency, OutputTensor, RuntimeSpec, ViewOutput
from dovetail.trace.trace import MetadataChange

Tensors = list[torch.Tensor]


def change_metadata(changes: Sequence[MetadataChange], inputs: Tensors) -> Tensors:
    """Change the inputs as the program does; returns views of them as they were, for the graph and for symbolic sizes.

    Before the graph runs: autograd would take a later change for a write to what the graph has saved.
    """
    geometries = {
        change.input_index: (value.shape, value.stride(), value.storage_offset())
        for change in changes
        for value in (inputs[change.input_index],)
    }
    for change in changes:
        with torch.set_grad_enabled(change.grad_enabled):
            change.operator(inputs[change.input_index], *change.arguments)
    before = list(inputs)
    for index, geometry in geometries.items():
        with torch.enable_grad():
            before[index] = inputs[index].as_strided(*geometry)
    return before


class _Freed(torch.autograd.Function):
    """A tensor whose graph was freed by a backward inside of the compiled function."""

    @staticmethod
    def forward(ctx: Any, holder: Tensors, *sources: torch.Tensor) -> torch.Tensor:
        if not holder:
            ctx.mark_dirty(sources[0])
        return (holder or sources)[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError(FREED)


def freed(value: torch.Tensor, inputs: Tensors, is_input: bool = False) -> torch.Tensor:
    """A result of the call as eager leaves it after a backward: it requires a gradient, and to ask for one is eager's error.

    ``is_input``: it is an input with the new value in it, which becomes such a tensor, and counts a write.
    """
    edges = [item for item in inputs if getattr(item, "requires_grad", False) and item is not value]
    given: list[Any] = [[], value] if is_input else [[value.detach()]]
    with torch.enable_grad():
        return _Freed.apply(*given, *(edges or [torch.empty((), requires_grad=True)]))  # type: ignore[no-any-return, no-untyped-call]


def is_inside(spec: RuntimeSpec, item: OutputDependency) -> bool:
    """Whether all that an output was computed from comes from the graph's own node of autograd."""
    differentiable = spec.output_differentiable
    return (
        not item.inputs
        and any(spec.input_requires_grad)
        and differentiable[item.output]
        and all(
            isinstance(output, FreshOutput)
            and differentiable[output.index]
            and not output.is_leaf
            and not output.is_freed
            for output in (spec.outputs[position] for position in item.results)
        )
    )


class Epilogue:
    """Does the work after the graph: write-backs, then inputs and views as results."""

    def __init__(self, spec: RuntimeSpec) -> None:
        self._mutations = {mutation.input_index: mutation for mutation in spec.mutations}
        self._counted_again = [item.input_index for item in spec.mutations for _ in range(item.counted - 1)]
        # Where nothing requires a gradient, no graph's node can tell.
        self._dependencies = [item for item in spec.dependencies if not is_inside(spec, item)]
        self._outputs = spec.outputs
        self._count = len(spec.outputs)
        #: Whether the graph's outputs are the results as they are.
        self._is_plain = (
            not spec.mutations
            and not self._dependencies
            and not spec.metadata_changes
            and spec.outputs == tuple(map(FreshOutput, range(self._count)))
        )

    def check(self, inputs: Tensors) -> None:
        """Raise eager's error for a write to a leaf that requires a gradient, before anything has run."""
        for mutation in self._mutations.values():
            value = inputs[mutation.input_index]
            if mutation.differentiable and value.requires_grad and value.is_leaf and torch.is_grad_enabled():
                raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")

    def __call__(self, inputs: Tensors, outputs: Tensors, before: Tensors) -> Tensors:
        """The results of the call; symbolic sizes are read from ``before``, the inputs before their sizes were changed."""
        if self._is_plain:
            del outputs[self._count :]
            return outputs
        made: dict[int, torch.Tensor] = {}
        written: set[int] = set()
        for item in self._dependencies:
            self._connect(item, inputs, outputs, before, made, written)
        counted = [inputs[index] for index in self._counted_again]
        for index, mutation in self._mutations.items():
            if index not in written and outputs[mutation.output_index] is inputs[index]:
                counted.append(inputs[index])
            else:
                self._write(index, inputs, outputs, written)
        if counted:
            # Autograd hears of one write for each copy, and of none that the backend has made.
            torch.autograd.graph.increment_version(counted)
        return [
            made[position] if position in made else self._result(output, inputs, outputs, before)
            for position, output in enumerate(self._outputs)
        ]

    def _connect(
        self,
        item: OutputDependency,
        inputs: Tensors,
        outputs: Tensors,
        before: Tensors,
        made: dict[int, torch.Tensor],
        written: set[int],
    ) -> None:
        """Make what an output was computed from, and lead the output's node there."""
        for index in item.inputs:
            self._write(index, inputs, outputs, written)
        for position in item.results:
            output = self._outputs[position]
            if isinstance(output, ViewOutput) and isinstance(output.base, InputOutput):
                self._write(output.base.index, inputs, outputs, written)
            if position not in made:
                made[position] = self._result(output, inputs, outputs, before)
        sources = [made[position] for position in item.results] + [inputs[index] for index in item.inputs]
        outputs[item.output] = depend_on(outputs[item.output], sources, item)

    def _write(self, index: int, inputs: Tensors, outputs: Tensors, written: set[int]) -> None:
        """Write an input's new value back, once."""
        mutation = self._mutations.get(index)
        if mutation is None or index in written:
            return
        written.add(index)
        target, value = inputs[index], outputs[mutation.output_index]
        if value is target:
            torch.autograd.graph.increment_version(target)
            return
        with torch.set_grad_enabled(mutation.differentiable):
            (target if mutation.counted and not mutation.is_freed else target.data).copy_(value)
        if mutation.is_freed:
            freed(target, inputs, is_input=True)

    def _result(self, output: OutputTensor, inputs: Tensors, outputs: Tensors, before: Tensors) -> torch.Tensor:
        if isinstance(output, FreshOutput):
            fresh = outputs[output.index]
            if output.is_freed:
                return freed(fresh, inputs)
            return fresh.requires_grad_() if output.is_leaf else fresh
        if isinstance(output, InputOutput):
            return inputs[output.index]
        base = self._result(output.base, inputs, outputs, before)
        with torch.set_grad_enabled(output.differentiable):
            view: torch.Tensor = output.replay(base, before)
        if output.requires_grad:
            return view if view.requires_grad else view.requires_grad_()
        is_apart = output.requires_grad is False and not output.differentiable
        return view.detach() if is_apart and view.requires_grad else view
