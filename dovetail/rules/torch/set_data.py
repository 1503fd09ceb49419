"""Memory of a tensor that the program exchanges: ``p.data = value``, and ``x.resize_``.

The first is nothing where the value is the tensor's own memory, as in ``p.data -= update``. Else the traced tensor gets the
value's memory, as the real one does after the graph: what lies in the old memory keeps it. Whatever this cannot say breaks the
graph. Memory that is made of other memory does so too, ``torch.UntypedStorage(storage)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from dovetail.aot.joint_graph import JointGraph
from dovetail.aot.nodes import memory_of
from dovetail.errors import CaptureError
from dovetail.frontend.code.frame import Break
from dovetail.frontend.effects.journal import Effect
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, Keywords, end_rule, method_rule, rule, setter_rule
from dovetail.guards import CalleeSource
from dovetail.rules.gradients.flags import guard_no_view
from dovetail.rules.python.loops_with_breaks import is_in_loop
from dovetail.torch_private import autograd as private_autograd
from dovetail.torch_private import calls as private_calls
from dovetail.torch_private import replaced_data as private_data
from dovetail.torch_private import tensors as private_tensors
from dovetail.trace import TracedInput
from dovetail.trace.overrides import GRAPHS
from dovetail.trace.settings import RECOMPUTES

_REPLACED = "data_is_replaced"


@dataclass
class _Replaced:
    """An input with other memory: ``old`` stands for the memory of before, ``value`` is the tensor that the new memory is of.

    ``uncounted`` are writes to the new memory that no write-back of the old one counts.
    """

    item: TracedInput
    old: torch.Tensor
    value: torch.Tensor
    uncounted: int = 0


class ReplacedData:
    """The inputs of one trace whose ``.data`` was set."""

    def __init__(self, interpreter: TracingInterpreter) -> None:
        self._interpreter = interpreter
        self._replaced: dict[int, _Replaced] = {}
        interpreter.effects.defer(self._effects)

    def set(self, target: torch.Tensor, value: torch.Tensor) -> None:
        """``target.data = value``, of tensors that :func:`_can_be_set` has looked at."""
        trace = self._interpreter.trace
        trace.recorder.refuse_replay("it sets .data of a tensor")
        item = trace.input_of(target)
        if item is not None:
            if item.index not in self._replaced:
                guard_no_view(self._interpreter, item, "whose .data is set")
                self._interpreter.values.guards.add_leafness(item.index)
                self._replaced[item.index] = _Replaced(item, private_data.of_same_memory(target), value)
            self._replaced[item.index].value = value
        private_data.set_memory(target, value)

    def finish(self) -> None:
        """From here on an input stands for its memory of before, which writes went to until it was replaced."""
        for known in self._replaced.values():
            item = known.item
            if item.value.grad_fn is not None or private_autograd.has_hooks(item.value):
                raise Break(f".data of {item.name} is set, which gets a gradient by other ways", _ADVICE)
            writes = private_tensors.version_of(item.value) - item.original_version
            counted = writes if private_tensors.is_written(known.old) else 0
            known.uncounted = writes - counted
            known.old.requires_grad_(item.value.requires_grad)
            item.original_version = private_tensors.version_of(known.old) - counted
            self._interpreter.trace.replace_value(item, known.old)
            item.node.meta[_REPLACED] = True

    def _effects(self) -> list[Effect]:
        source_of = self._interpreter.values.guards.tensor_source
        replaced = self._replaced.values()
        effects = [Effect(source_of(known.item.index), "attribute", {"data": known.value}) for known in replaced]
        counted = [known.item.value for known in replaced for _ in range(known.uncounted)]
        count = [torch.autograd.graph.increment_version, [counted], {}]
        return [*effects, Effect(CalleeSource(), "call", count)] if counted else effects


_ADVICE = "set it outside of the compiled function"


@setter_rule("data")
def _set_data(interpreter: TracingInterpreter, target: torch.Tensor, value: Any) -> None:
    value = interpreter.values.wrap(value) if isinstance(value, torch.Tensor) else value
    with interpreter.trace.recorder.paused(), private_calls.no_torch_function():
        if isinstance(value, torch.Tensor) and _place(value) == _place(target):
            return
        if _can_be_set(interpreter, target, value):
            interpreter.state(ReplacedData).set(target, value.detach() if value.requires_grad else value)
            return
    stop = Break(".data of a tensor is set", _ADVICE)
    if len(interpreter.frames) > 1 and all(frame.direct for frame in interpreter.frames):
        frame = interpreter.frames[-1]
        # One break around an update of many weights, not one for each: the function is called for real.
        if is_in_loop(frame.code, frame.position) and "backward" not in frame.code.co_names:
            stop.steps = tuple(outer.step for outer in interpreter.frames[:-1])
    raise stop


def _can_be_set(interpreter: TracingInterpreter, target: torch.Tensor, value: Any) -> bool:
    """Whether the trace can follow: a plain leaf gets a plain tensor of its kind, in other memory."""
    trace = interpreter.trace
    item = trace.input_of(target)
    if interpreter.values.in_backward or not trace.settings.allows(RECOMPUTES) or (item and not item.real.is_leaf):
        return False
    if not (type(target) is type(value) is private_data.FunctionalTensor) or target.grad_fn or target._base is not None:
        return False
    is_alike = target.shape == value.shape and target.dtype == value.dtype and target.device == value.device
    flags = [(tensor.layout, tensor.is_inference(), tensor.is_conj(), tensor.is_neg()) for tensor in (target, value)]
    is_plain = all(flag == (torch.strided, False, False, False) for flag in flags)
    return is_alike and is_plain and target.untyped_storage()._cdata != value.untyped_storage()._cdata


@end_rule
def _finish(interpreter: TracingInterpreter) -> None:
    interpreter.state(ReplacedData).finish()


@GRAPHS.append
def _refuse_late_reads(graph: torch.fx.Graph) -> None:
    """Refuse a backward, outside of the graph, that reads the old memory of an input: the input itself would be saved for it."""
    inputs = [node for node in graph.find_nodes(op="placeholder") if _REPLACED in node.meta]
    old = {memory_of(node) for node in inputs}
    for node in graph.nodes if inputs else ():
        if node.meta.get("phase") == "backward" and any(memory_of(read) in old for read in node.all_input_nodes):
            raise CaptureError("a later backward reads what .data of a tensor was before it was set", advice=_ADVICE)


def replaced_inputs(joint: JointGraph) -> list[int]:
    """The inputs of a graph that have other memory after the call."""
    return [index for index, node in enumerate(joint.primals) if _REPLACED in node.meta]


@method_rule("resize_", "resize_as_")
def _resize(interpreter: TracingInterpreter, function: Any, args: Arguments, kwargs: Keywords) -> Any:
    """Eager raises at once where the memory is not the tensor's to resize: that of a numpy array, say."""
    owner = getattr(function, "__self__", None)
    traced = interpreter.trace.input_of(owner if isinstance(owner, torch.Tensor) else args[0])
    if traced is not None and traced.real.layout is torch.strided and not traced.real.untyped_storage().resizable():
        raise Break("a tensor whose memory is not its own is resized", "resize a clone of it")
    return NotImplemented


@rule(torch.UntypedStorage)
def _make_storage(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    _refuse_copy(args, kwargs)
    return interpreter.native(torch.UntypedStorage, args, kwargs)


@rule(torch.UntypedStorage.__new__)
def _make_storage_of_class(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    _refuse_copy(args, kwargs)
    return interpreter.native(torch.UntypedStorage.__new__, args, kwargs)


def _refuse_copy(args: Arguments, kwargs: Keywords) -> None:
    """Torch copies a storage by a write to a tensor in it, which is none of the trace's: the process would crash."""
    if any(isinstance(item, torch.UntypedStorage) for item in (*args, *kwargs.values())):
        raise Break("a storage is made of another one", "do it outside of the compiled function")


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    """A key of a strided tensor's memory and of the way it is read; a tensor of another kind never has the same key."""
    if tensor.layout != torch.strided:
        return (id(tensor),)
    shape = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
    return tensor.untyped_storage()._cdata, *shape, tensor.dtype, tensor.is_conj(), tensor.is_neg()
