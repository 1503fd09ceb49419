"""Objects of tensor subclasses that the program makes of its own tensors, and what takes them back.

The graph's tensors are of a class of the trace: no object of another class can be made of one. The graph ends there, and what
follows runs with the object itself.
"""

from __future__ import annotations

import torch

from dovetail.frontend.code.frame import Break
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, Keywords, method_rule, rule
from dovetail.torch_private import libraries as private_libraries

PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def _break(kind: object) -> Break:
    name = getattr(kind, "__name__", kind)
    return Break(f"an object of the tensor subclass {name} is made", "make it outside of the compiled function")


@rule(torch.Tensor.__new__)
def _new(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> object:
    if args and args[0] not in PLAIN:
        raise _break(args[0])
    return interpreter.native(torch.Tensor.__new__, args, kwargs)


@rule(private_libraries.make_subclass)
def _make_subclass(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> object:
    raise _break(args[0] if args else kwargs.get("cls"))


@method_rule("as_subclass")
def _as_subclass(interpreter: TracingInterpreter, function: object, args: Arguments, kwargs: Keywords) -> object:
    owner = getattr(function, "__self__", None)
    value, *rest = (owner, *args) if isinstance(owner, torch.Tensor) else args
    kind = rest[0] if rest else kwargs.get("cls")
    if kind is not torch.Tensor:
        raise _break(kind)
    return interpreter.call_torch(torch.ops.aten.alias.default, (value,), {})
