"""Torch's fused optimizers with numbers that may change from call to call.

The schemas of ``aten::_fused_adam`` and the like take a ``float``, for which torch asks a symbolic number for its value; and
where the learning rate is a tensor, they ask that for its value. The operators here have the same names and arguments in
Dovetail's own namespace, take a ``Scalar`` or the tensor as it is, and call torch's. They are defined when one is asked for:
ten milliseconds that most programs need not wait.

>>> updated, _, buffers = takes_symbols("_fused_sgd")(
...     [torch.ones(2)], [torch.ones(2)], [torch.ones(2)], weight_decay=0.0, momentum=0.5, lr=0.25, dampening=0.0,
...     nesterov=False, maximize=False, is_first_step=False)
>>> updated, buffers
([tensor([0.6250, 0.6250])], [tensor([1.5000, 1.5000])])
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch

_KNOWN = ("_fused_adam", "_fused_adamw", "_fused_sgd", "_fused_adagrad")
NAMES = tuple(name for name in _KNOWN if hasattr(torch.ops.aten, name))
"""The fused optimizers that this torch has."""


_LOCK = threading.Lock()


@functools.cache
def _library() -> torch.library.Library:
    return torch.library.Library("dovetail", "FRAGMENT")


@functools.cache
def _defined(name: str, overload: str) -> Any:
    library = _library()
    original = getattr(getattr(torch.ops.aten, name), overload)
    library.define(str(original._schema).removeprefix("aten::").replace("float ", "Scalar "))
    own = name if overload == "default" else f"{name}.{overload}"

    def kernel(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    library.impl(own, kernel, "CompositeExplicitAutograd")

    def example(*args: Any, **kwargs: Any) -> Any:
        written = [at for at, item in enumerate(original._schema.arguments) if str(item.type) == "List[Tensor]"]
        return tuple([torch.empty_like(item) for item in args[at]] for at in written[: len(original._schema.returns)])

    torch.library.register_fake(f"dovetail::{own}", example, lib=library)
    return getattr(getattr(torch.ops.dovetail, name), overload)


def takes_symbols(name: str, overload: str = "default") -> Any:
    """The operator of this name that takes symbolic numbers; of the overload ``tensor_lr``, the learning rate as a tensor.

    >>> takes_symbols("_fused_adam")
    <OpOverload(op='dovetail._fused_adam', overload='default')>
    """
    with _LOCK:
        return _defined(name, overload)
