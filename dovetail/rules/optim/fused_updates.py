"""Torch's fused optimizers with numbers that may change from call to call.

The schemas of ``aten::_fused_adam`` and the like take a ``float``, for which torch asks a symbolic number for its value; and
where the learning rate is a tensor, they ask that for its value. The operators here have the same names and arguments in
Dovetail's own namespace, take a ``Scalar`` or the tensor as it is, and call torch's.

>>> updated, _, buffers = takes_symbols("_fused_sgd")(
...     [torch.ones(2)], [torch.ones(2)], [torch.ones(2)], weight_decay=0.0, momentum=0.5, lr=0.25, dampening=0.0,
...     nesterov=False, maximize=False, is_first_step=False)
>>> updated, buffers
([tensor([0.6250, 0.6250])], [tensor([1.5000, 1.5000])])
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from dovetail.rules.sizes.scalar_operators import takes_numbers

_KNOWN = ("_fused_adam", "_fused_adamw", "_fused_sgd", "_fused_adagrad")
NAMES = tuple(name for name in _KNOWN if hasattr(torch.ops.aten, name))
"""The fused optimizers that this torch has."""


def takes_symbols(name: str, overload: str = "default") -> Any:
    """The operator of this name that takes symbolic numbers; of the overload ``tensor_lr``, the learning rate as a tensor.

    >>> takes_symbols("_fused_adam")
    <OpOverload(op='dovetail._fused_adam', overload='default')>
    """
    original = getattr(getattr(torch.ops.aten, name), overload)
    return takes_numbers(original, _example(original))


@functools.cache
def _example(original: Any) -> Callable[..., Any]:
    written = [at for at, item in enumerate(original._schema.arguments) if str(item.type) == "List[Tensor]"]
    count = len(original._schema.returns)

    def example(*args: Any, **kwargs: Any) -> Any:
        return tuple([torch.empty_like(item) for item in args[at]] for at in written[:count])

    return example
