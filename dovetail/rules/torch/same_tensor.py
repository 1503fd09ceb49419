"""Functions and attributes whose result says which tensor, which memory, or which class of tensor, they were given.

``torch.as_tensor`` returns a tensor of the right dtype and device itself, with its gradient and its memory. ``x.__class__`` is
the class that the program's tensor has, not the class of the tensor that is traced in its place.
"""

from __future__ import annotations

import torch

from dovetail.frontend.code.frame import Break
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, Keywords, attribute_rule, method_rule, rule
from dovetail.rules.python.numpy_inputs import as_tensor
from dovetail.rules.python.numpy_numbers import ARRAY
from dovetail.rules.refusals import refuse
from dovetail.rules.sizes.number_tensors import make_tensor


@rule(torch.as_tensor)
def _as_tensor(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> object:
    data = args[0] if len(args) == 1 else kwargs.get("data")
    wanted = {name: value for name, value in kwargs.items() if name != "data" and value is not None}
    if isinstance(data, ARRAY) and not wanted.keys() - {"dtype", "device"}:
        return as_tensor(interpreter, data, wanted)
    if not isinstance(data, torch.Tensor):
        return make_tensor(interpreter, torch.tensor, args, kwargs)
    if wanted.keys() - {"dtype", "device"} or len(args) > 1:
        return interpreter.call_native(torch.as_tensor, args, kwargs)
    if not wanted:
        return data
    # Tensor.to, too, returns the tensor itself where nothing changes.
    return interpreter.call_torch(torch.Tensor.to, (data,), wanted)


@method_rule("dequantize")
def _dequantize(interpreter: TracingInterpreter, function: object, args: Arguments, kwargs: Keywords) -> object:
    given = [getattr(function, "__self__", None), *args, *kwargs.values()]
    value = next((item for item in given if isinstance(item, torch.Tensor)), None)
    if value is None or value.is_quantized or len(args) + len(kwargs) > 1:
        return NotImplemented
    if value.requires_grad and torch.is_grad_enabled():
        raise Break("dequantize of a tensor that requires a gradient makes it a result", "leave dequantize out")
    # The tensor itself, where it is of this type.
    return interpreter.call_torch(torch.Tensor.to, (value, torch.float32), {})


refuse(
    (torch.quantize_per_tensor, torch.quantize_per_tensor_dynamic, torch.quantize_per_channel),
    "no traced tensor is quantized",
    "quantize outside of the function, or use fake_quantize",
)


@method_rule("unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes")
def _pieces(interpreter: TracingInterpreter, function: object, args: Arguments, kwargs: Keywords) -> object:
    raise Break("unsafe pieces share memory with a tensor that their operator does not name", "use chunk or split")


@method_rule(*(name for name in dir(torch) if name.startswith("_foreach_") and name.endswith("_")))
def _list_in_place(interpreter: TracingInterpreter, function: object, args: Arguments, kwargs: Keywords) -> object:
    made = interpreter.native(function, args, kwargs)
    return args[0] if args and made is not None else made


@rule(torch.is_tensor)
def _is_tensor(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> object:
    if len(args) != 1 or kwargs:
        return interpreter.call_native(torch.is_tensor, args, kwargs)
    # Of an object it asks the class alone.
    return interpreter.call(isinstance, (args[0], torch.Tensor), {})


@attribute_rule("__class__")
def _class(interpreter: TracingInterpreter, target: torch.Tensor, name: str) -> object:
    return interpreter.call(type, (target,), {})
