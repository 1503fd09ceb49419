"""Memory of a tensor that the program exchanges: ``p.data = value``, and ``x.resize_``.

The first is nothing where the value is the tensor's own memory, as in ``p.data -= update``; else the graph breaks.
"""

from __future__ import annotations

from typing import Any

import torch

from dovetail.frontend.code.frame import Break
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, Keywords, method_rule, setter_rule
from dovetail.rules.python.loops_with_breaks import is_in_loop
from dovetail.torch_private import calls as private_calls


@setter_rule("data")
def _set_data(interpreter: TracingInterpreter, target: torch.Tensor, value: Any) -> None:
    with interpreter.trace.recorder.paused(), private_calls.no_torch_function():
        if isinstance(value, torch.Tensor) and _place(value) == _place(target):
            return
    stop = Break(".data of a tensor is set", "set it outside of the compiled function")
    if len(interpreter.frames) > 1 and all(frame.direct for frame in interpreter.frames):
        frame = interpreter.frames[-1]
        # One break around an update of many weights, not one for each: the function is called for real.
        if is_in_loop(frame.code, frame.position) and "backward" not in frame.code.co_names:
            stop.steps = tuple(outer.step for outer in interpreter.frames[:-1])
    raise stop


@method_rule("resize_", "resize_as_")
def _resize(interpreter: TracingInterpreter, function: Any, args: Arguments, kwargs: Keywords) -> Any:
    """Eager raises at once where the memory is not the tensor's to resize: that of a numpy array, say."""
    owner = getattr(function, "__self__", None)
    traced = interpreter.trace.input_of(owner if isinstance(owner, torch.Tensor) else args[0])
    if traced is not None and traced.real.layout is torch.strided and not traced.real.untyped_storage().resizable():
        raise Break("a tensor whose memory is not its own is resized", "resize a clone of it")
    return NotImplemented


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    """A key of a strided tensor's memory and of the way it is read; a tensor of another kind never has the same key."""
    if tensor.layout != torch.strided:
        return (id(tensor),)
    shape = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
    return tensor.untyped_storage()._cdata, *shape, tensor.dtype, tensor.is_conj(), tensor.is_neg()
