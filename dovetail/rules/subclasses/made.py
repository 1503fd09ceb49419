"""Objects of tensor subclasses that the program makes of its own tensors, and what takes them back.

Those that are plain tensors below ``__torch_function__`` have stand-ins. No object of another class can be made of the graph's
tensors, which are of a class of the trace: the graph ends there, and what follows runs with the object itself.
"""

from __future__ import annotations

import torch

from dovetail.frontend.code.frame import Break
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, Keywords, method_rule, rule
from dovetail.rules.subclasses.overrides import as_subclass
from dovetail.torch_private import libraries as private_libraries

PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def _check(kind: object) -> None:
    if not isinstance(kind, type) or not private_libraries.is_plain_inside(kind):
        name = getattr(kind, "__name__", kind)
        raise Break(f"an object of the tensor subclass {name} is made", "make it outside of the compiled function")


@rule(torch.Tensor.__new__)
def _new(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> object:
    if not args or args[0] in PLAIN:
        return interpreter.native(torch.Tensor.__new__, args, kwargs)
    kind, *data = args
    _check(kind)
    is_tensor = len(data) == 1 and isinstance(data[0], torch.Tensor) and not kwargs
    tensor = data[0] if is_tensor else interpreter.native(torch.Tensor.__new__, (torch.Tensor, *data), kwargs)
    return as_subclass(interpreter, tensor, kind)


@rule(private_libraries.make_subclass)
def _make_subclass(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> object:
    kind, data, *rest = args
    _check(kind)
    if rest or kwargs or not isinstance(data, torch.Tensor):
        raise Break(f"a {kind.__name__} is made with options", "make it outside of the compiled function")
    return as_subclass(interpreter, interpreter.call_torch(torch.Tensor.detach, (data,), {}), kind)


@method_rule("as_subclass")
def _as_subclass(interpreter: TracingInterpreter, function: object, args: Arguments, kwargs: Keywords) -> object:
    owner = getattr(function, "__self__", None)
    value, *rest = (owner, *args) if isinstance(owner, torch.Tensor) else args
    kind = rest[0] if rest else kwargs.get("cls")
    if kind is torch.Tensor:
        return interpreter.call_torch(torch.ops.aten.alias.default, (value,), {})
    _check(kind)
    return as_subclass(interpreter, value, kind)
