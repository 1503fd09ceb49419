"""Results and writes of a captured function in terms of graph outputs: aliases, views and mutations.

Eager may return an input, a view of an input, or several views of one tensor, and may write to its inputs. A graph returns new
tensors only. :func:`describe_outputs` finds the tensors that the graph has to return, and says how the runtime makes the
function's results from them (:mod:`dovetail.runtime.spec`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.aot.capture_result import CaptureResult
from dovetail.aot.descriptors import AliasBase, Descriptor, MutatedInput, UserOutput
from dovetail.aot.tangents import overlaps_itself
from dovetail.aot.views import AutogradView, StridedView, reads_other_bits, view_of_custom_function, whole_view
from dovetail.errors import CaptureError
from dovetail.guards.generator import DISJOINT
from dovetail.runtime.spec import FreshOutput, InputOutput, Mutation, OutputTensor, ViewOutput
from dovetail.torch_private import sizes as private_sizes
from dovetail.torch_private import tensors as private_tensors
from dovetail.trace import Trace, TracedInput


@dataclass(frozen=True)
class DescribedOutputs:
    """The traced tensors that the graph returns, each with its descriptor, and the runtime's description of results and writes."""

    values: tuple[torch.Tensor, ...]
    descriptors: tuple[Descriptor, ...]
    outputs: tuple[OutputTensor, ...]
    mutations: tuple[Mutation, ...]


def describe_outputs(trace: Trace, result: CaptureResult) -> DescribedOutputs:
    """Relate the returned tensors to inputs and to each other, and find written inputs. Raises :class:`CaptureError`."""
    found = _Description(trace, result.outputs)
    outputs = tuple(found.relate(position, value) for position, value in enumerate(result.outputs))
    written = _written_inputs(trace)
    sharing: defaultdict[int, list[tuple[TracedInput, torch.Tensor]]] = defaultdict(list)
    for item in trace.inputs if written else ():
        for part in result.guards.memory(item.index, item.real):
            sharing[_memory(part)].append((item, part))
    for item in written:
        _check_mutation(trace, item, sharing[_memory(item.real)])
    mutations = tuple(found.mutation(item, result.input_descriptors[item.index]) for item in written)
    return DescribedOutputs(tuple(found.values), tuple(found.descriptors), outputs, mutations)


def is_new_leaf(value: torch.Tensor) -> bool:
    """Whether a returned tensor requires a gradient that goes no further: made so, or a view made without recording."""
    return value.requires_grad and value.grad_fn is None


def _memory(value: torch.Tensor) -> int:
    return int(value.untyped_storage()._cdata)


class _Description:
    """The tensors that the graph returns so far, and the memory that returned tensors share."""

    def __init__(self, trace: Trace, returned: Sequence[torch.Tensor]) -> None:
        self.values: list[torch.Tensor] = []
        self.descriptors: list[Descriptor] = []
        self._trace = trace
        self._returned = returned
        self._dense = [value for value in returned if value.layout is torch.strided]
        self._positions: dict[int, int] = {}
        self._input_at = {_memory(item.value): item for item in trace.inputs}
        self._base_at: dict[int, int] = {}
        #: How many returned tensors lie in each memory.
        self._sharing = Counter(map(_memory, self._dense))

    def _add(self, value: torch.Tensor, descriptor: Descriptor) -> int:
        """The position of a tensor among the graph's outputs."""
        position = self._positions.get(id(value))
        if position is None:
            position = self._positions[id(value)] = len(self.values)
            self.values.append(value)
            self.descriptors.append(descriptor)
        return position

    def _fresh(self, index: int) -> FreshOutput:
        """The tensor at this position of the graph's outputs, as a result."""
        value = self.values[index]
        return FreshOutput(index, is_new_leaf(value), self._trace.is_freed(value))

    def relate(self, position: int, value: torch.Tensor) -> OutputTensor:
        """Relate the returned tensor at a position to an input or to an output of the graph."""
        if value.layout is not torch.strided:
            raise CaptureError(f"a tensor with the layout {value.layout} is returned", advice="return a dense tensor")
        if (traced := self._trace.input_of(value)) is not None:
            return InputOutput(traced.index)
        source = self._input_at.get(_memory(value))
        if source is not None:
            return self._view(value, source.value, InputOutput(source.index))
        is_alone = self._sharing[_memory(value)] == 1
        of_custom_function = private_tensors.is_view_of_custom_function(value)
        if is_alone and (value._base is None or is_new_leaf(value) or of_custom_function):
            return self._alone(position, value, of_custom_function)
        return self._sharing_memory(position, value)

    def _alone(self, position: int, value: torch.Tensor, of_custom_function: bool) -> OutputTensor:
        """A returned tensor that no other one shares memory with."""
        output = self._fresh(self._add(value, UserOutput(str(position))))
        if value.is_inference() is not torch.is_inference_mode_enabled():
            return ViewOutput(output, private_tensors.of_other_mode, False, value.requires_grad)
        if of_custom_function:
            return ViewOutput(output, view_of_custom_function, True, True)
        if output.is_leaf and value._base is not None:
            # A view made without recording of what requires a gradient says so too, and takes none; another one is a leaf.
            output = output if value._base.requires_grad else FreshOutput(output.index)
            return ViewOutput(output, whole_view, False, True)
        return output

    def _sharing_memory(self, position: int, value: torch.Tensor) -> OutputTensor:
        """One of several returned tensors in one memory, or a view of a tensor that is not returned."""
        memory = _memory(value)
        if memory not in self._base_at:
            base = self._root(memory)
            if base.is_inference() is not torch.is_inference_mode_enabled():
                raise CaptureError("results share memory of another inference mode", advice="return clones of them")
            is_returned = any(base is other for other in self._returned)
            descriptor = UserOutput(str(position)) if is_returned else AliasBase(len(self._base_at))
            self._base_at[memory] = self._add(base, descriptor)
        output = self._fresh(self._base_at[memory])
        base = self.values[output.index]
        return output if value is base else self._view(value, base, output)

    def _root(self, memory: int) -> torch.Tensor:
        """Among returned tensors of one memory and their bases: the tensor that the others are best made from."""
        members = [value for value in self._dense if _memory(value) == memory]
        candidates = [member if member._base is None else member._base for member in members]
        return max(candidates, key=lambda item: (item.requires_grad, private_sizes.has_symbols(item) or item.numel()))

    def _view(self, value: torch.Tensor, base: torch.Tensor, output: InputOutput | FreshOutput) -> ViewOutput:
        """A returned view of an input, or of another output."""
        self._refuse_unkeepable(value, base)
        recorded = value.grad_fn is not None or (not base.requires_grad and private_tensors.is_recorded_view(value))
        # A view made before its base was changed in place must not be made again by the same operators.
        is_changed = isinstance(output, InputOutput) and any(
            change.input_index == output.index for change in self._trace.metadata_changes
        )
        replay: Any = AutogradView(value, self._trace.bindings()) if value._base is base and not is_changed else None
        if replay is None or not replay.is_exact:
            if reads_other_bits(value, base):
                raise CaptureError(
                    "a returned tensor is a bit-cast or conjugate view of another tensor",
                    where=self._trace.locate(),
                    advice="return a clone of it",
                )
            replay = StridedView(value, base, self._trace.bindings())
        inherits = value._base is not None and value._base.requires_grad
        return ViewOutput(output, replay, recorded, None if inherits else value.requires_grad)

    def _refuse_unkeepable(self, value: torch.Tensor, base: torch.Tensor) -> None:
        """Raise :class:`CaptureError` for a view whose derivatives cannot be eager's."""
        if value.requires_grad and not base.requires_grad and not is_new_leaf(value):
            raise CaptureError(
                "a returned view requires a gradient but its base does not", advice="return a clone of it"
            )
        if private_tensors.is_view_of_custom_function(value):
            raise CaptureError(
                "a custom autograd.Function returns its input, or a view of it or of another result, which is returned too",
                where=self._trace.locate(),
                advice="return a clone of it",
            )
        if value._base is base and base.requires_grad and private_tensors.leads_past(value, base):
            raise CaptureError(
                "a view of a view that was made under torch.no_grad() is returned: its gradient goes to the latter",
                where=self._trace.locate(),
                advice="return a clone of it",
            )
        shares_history = value._base is not None and (value._base is base or value._base is base._base)
        if value.grad_fn is not None and not shares_history:
            raise CaptureError(
                "a detached tensor that was written to with what requires a gradient is returned beside the tensor that it "
                "was detached from: they share memory, and each has a derivative of its own",
                where=self._trace.locate(),
                advice="detach a clone of it",
            )

    def mutation(self, item: TracedInput, descriptor: Descriptor) -> Mutation:
        """The write-back of an input that was written to."""
        differentiable = item.value.requires_grad and item.is_written_differentiably
        base = item.real._base
        if differentiable and base is not None and base.is_leaf and base.requires_grad:
            raise CaptureError(
                f"{item.name} is a view of a leaf that requires a gradient, and it is written to",
                advice="write to a clone, or under torch.no_grad()",
            )
        index = self._add(item.value, MutatedInput(descriptor))
        counted_anyway = sum(change.input_index == item.index for change in self._trace.metadata_changes)
        counted = private_tensors.version_of(item.value) - item.original_version - counted_anyway
        return Mutation(item.index, index, differentiable, counted, differentiable and self._trace.is_freed(item.value))


def _written_inputs(trace: Trace) -> list[TracedInput]:
    """The inputs whose data was written to; a change of size or strides alone is no write."""
    changed = {change.input_index for change in trace.metadata_changes}
    return [
        item
        for item in trace.inputs
        if trace.node_of(item.value) is not item.node
        and (item.index not in changed or private_tensors.is_written(item.value))
    ]


def _check_mutation(trace: Trace, item: TracedInput, sharing: Sequence[tuple[TracedInput, torch.Tensor]]) -> None:
    """Raise :class:`CaptureError` for a write that cannot be written back; ``sharing`` are the inputs in the same memory."""
    value, real, fake = item.value, item.real, item.node.meta["val"]
    is_changed = any(change.input_index == item.index for change in trace.metadata_changes)
    if not is_changed and (
        value.shape != fake.shape
        or value.stride() != fake.stride()
        or value.dtype != real.dtype
        or private_tensors.size_inside(value) != fake.shape
    ):
        raise CaptureError(f"{item.name} changes its shape in place", advice="make a new tensor instead")
    is_plain = real.layout is torch.strided and not private_tensors.is_fake(real)
    if is_plain and real.numel() > 1 and overlaps_itself(real):
        raise CaptureError(
            f"{item.name} is written to, and several of its elements share one place in memory", advice="clone it first"
        )
    parts = [(other.name, part is other.real) for other, part in sharing if other is not item]
    inputs = [other.real for other in trace.inputs] if parts and is_plain and not value.requires_grad else []
    is_disjoint = bool(inputs) and any(rule(inputs, item.index) for rule in DISJOINT)
    for name, is_whole in parts:
        if not (is_disjoint and is_whole):
            advice = "clone one of them first"
            raise CaptureError(f"{item.name} is written to and shares memory with {name}", advice=advice)
