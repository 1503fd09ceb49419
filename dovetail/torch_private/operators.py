"""Operators: overloads, their kernels and forms, and the dispatch keys that a call of one passes."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

__all__ = ["OpOverload", "OpOverloadPacket"]

#: In a block under this guard autograd records nothing, but views still share version counters. The class itself is offered because
#: a Python context manager around it costs 1 us more on every call.
#: How the names of the modules begin that operators are in.
NAMESPACES = ("torch._ops.", "torch.ops.")
BelowAutograd = torch._C._AutoDispatchBelowAutograd

#: In a block under this guard autocast casts nothing.
NoAutocast = torch._C._DisableAutocast


def operator_entry(overload: OpOverload) -> Any:
    """The bound C++ entry of an overload; calling it saves one Python frame per operator."""
    return overload._op


def is_view(target: Any) -> bool:
    """Whether an operator's result may lie in the memory of its first argument, to which it does not write."""
    if not isinstance(target, OpOverload) or not target._schema.arguments:
        return False
    first = target._schema.arguments[0].alias_info
    return first is not None and not first.is_write


def is_composite(overload: OpOverload) -> bool:
    """Whether the operator has a kernel made of other operators, whose results may be views that its schema does not show."""
    kinds = ("ImplicitAutograd", "ExplicitAutograd", "ExplicitAutogradNonFunctional")
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), f"Composite{kind}") for kind in kinds)
