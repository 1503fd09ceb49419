"""The stand-in for a sparse tensor in a captured program."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from dovetail.frontend.code.frame import Break
from dovetail.torch_private import tensors as private_tensors

SPARSE_TYPES = (torch.Tensor, torch.nn.Parameter, private_tensors.JaggedTensor)


class SparseValue:
    """A sparse tensor, or a jagged one: ``handle`` is the traced tensor that stands for it, ``example`` one like it.

    It is no tensor itself. Whatever reaches it but a call of torch breaks the graph.
    """

    handle: torch.Tensor
    example: torch.Tensor

    def __init__(self, handle: torch.Tensor, example: torch.Tensor) -> None:
        self.__dict__.update(handle=handle, example=example)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        name = getattr(function, "__name__", str(function))
        raise Break(f"{name} is given a sparse tensor inside of a function of torch", "call it with a dense tensor")

    def __setattr__(self, name: str, value: Any) -> None:
        raise Break(f".{name} of a sparse tensor is written", "write it outside of the function")

    def __delattr__(self, name: str) -> None:
        raise Break(f".{name} of a sparse tensor is written", "write it outside of the function")

    def _refuse(self, *others: Any) -> NoReturn:
        raise Break("a sparse tensor is an operand", "use a function of torch, such as torch.sparse.mm")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __matmul__ = __rmatmul__ = __pow__ = __rpow__ = __neg__ = __abs__ = __getitem__ = __iter__ = __len__ = _refuse
    __iadd__ = __isub__ = __imul__ = __itruediv__ = __setitem__ = __bool__ = __float__ = __int__ = __contains__ = (
        _refuse
    )
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse  # type: ignore[assignment]
    __hash__ = _refuse  # type: ignore[assignment]
    __repr__ = __str__ = __format__ = _refuse  # type: ignore[assignment]
    __copy__ = __deepcopy__ = __reduce_ex__ = __array__ = _refuse  # type: ignore[assignment]
