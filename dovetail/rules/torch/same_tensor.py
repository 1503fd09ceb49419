"""Functions and attributes whose result says which tensor, or which class of tensor, they were given.

``torch.as_tensor`` returns a tensor of the right dtype and device itself, with its gradient and its memory. ``x.__class__`` is
the class that the program's tensor has, not the class of the tensor that is traced in its place.
"""

from __future__ import annotations

import torch

from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, Keywords, attribute_rule, rule
from dovetail.rules.sizes.number_tensors import make_tensor


@rule(torch.as_tensor)
def _as_tensor(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> object:
    data = args[0] if len(args) == 1 else kwargs.get("data")
    if not isinstance(data, torch.Tensor):
        return make_tensor(interpreter, torch.tensor, args, kwargs)
    wanted = {name: value for name, value in kwargs.items() if name != "data" and value is not None}
    if wanted.keys() - {"dtype", "device"} or len(args) > 1:
        return interpreter.call_native(torch.as_tensor, args, kwargs)
    if not wanted:
        return data
    # Tensor.to, too, returns the tensor itself where nothing changes.
    return interpreter.call_torch(torch.Tensor.to, (data,), wanted)


@attribute_rule("__class__")
def _class(interpreter: TracingInterpreter, target: torch.Tensor, name: str) -> object:
    return interpreter.call(type, (target,), {})
