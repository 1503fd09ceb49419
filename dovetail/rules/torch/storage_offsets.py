"""The offset of an input in its storage: guarded only where the program depends on it, unlike sizes and strides.

``as_strided`` with an offset counts from the start of the storage, and may reach what lies beside the tensor: a graph that
somebody compiles for a tensor alone does not have that.
"""

from __future__ import annotations

from typing import Any

import torch

from dovetail.frontend.code.frame import Break
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, Keywords, method_rule
from dovetail.guards import ComputedSource, Equals
from dovetail.rules.sizes.number_tensors import number_of
from dovetail.torch_private import calls as private_calls
from dovetail.trace import TracedInput

_STRIDED = {"as_strided": 0, "as_strided_": 0, "as_strided_copy": 0, "as_strided_scatter": 1}
_TOLD = frozenset({"is_set_to", "is_shared", "share_memory_", "is_pinned", "_is_view", "_is_alias_of"})


@method_rule(*_STRIDED, *_TOLD, "storage_offset")
def _check_place(interpreter: TracingInterpreter, function: Any, args: Arguments, kwargs: Keywords) -> Any:
    """Guard the storage offset of the inputs that a call reads it of; :class:`Break` where it reads more than that."""
    _guard_place(interpreter, function, args, kwargs)
    return NotImplemented


def _guard_place(interpreter: TracingInterpreter, function: Any, args: Arguments, kwargs: Keywords) -> None:
    name = function.__name__
    owner = getattr(function, "__self__", None)
    given = (owner, *args) if isinstance(owner, torch.Tensor) else args
    tensor = given[0] if given else kwargs.get("self", kwargs.get("input"))
    if not isinstance(tensor, torch.Tensor):
        return
    if name in _TOLD:
        raise Break(f"{name} asks where a tensor lies in memory", "ask outside of the compiled function")
    inputs = _inputs_in_its_storage(interpreter, tensor)
    if name != "storage_offset":
        rest = given[1 + _STRIDED[name] :]
        size, stride, offset = (
            rest[place] if len(rest) > place else kwargs.get(key)
            for place, key in enumerate(("size", "stride", "storage_offset"))
        )
        size, stride = _plain(interpreter, size), _plain(interpreter, stride)
        if size is not None and stride is not None and len(size) == len(stride):
            for item in inputs:
                _check_reach(item, size, stride, tensor.storage_offset() if offset is None else offset)
        if offset is None:
            return
        if any(bool(item.leaf.storage_offset() != 0) for item in inputs):
            # Inductor's scatter puts the values elsewhere (torch 2.13).
            raise Break(
                "as_strided counts from the start of a storage in which an input lies further back",
                "leave the storage offset out, or hand over the tensor that holds it all",
            )
    for item in inputs:
        source = interpreter.values.guards.tensor_source(item.index)
        offset_source = ComputedSource(torch.Tensor.storage_offset, (source,), f"{source.name}.storage_offset()")
        interpreter.values.guard(offset_source, Equals(item.real.storage_offset()), "it was read")


def _inputs_in_its_storage(interpreter: TracingInterpreter, tensor: torch.Tensor) -> list[TracedInput]:
    with interpreter.trace.recorder.paused(), private_calls.no_torch_function():
        storage = tensor.untyped_storage()._cdata
        return [
            item
            for item in interpreter.trace.inputs
            if storage in (item.value.untyped_storage()._cdata, item.leaf.untyped_storage()._cdata)
        ]


def _plain(interpreter: TracingInterpreter, numbers: Any) -> tuple[Any, ...] | None:
    """Numbers with those that tensors hold in their place; None where one of them is not known."""
    if not isinstance(numbers, (tuple, list)):
        return None
    found = tuple(item if (number := number_of(interpreter, item)) is None else number for item in numbers)
    return found if all(type(item) in (int, torch.SymInt) for item in found) else None


def _check_reach(item: TracedInput, size: tuple[Any, ...], stride: tuple[Any, ...], offset: Any) -> None:
    """Raise :class:`Break` for a view of an input that reaches what is no element of the input."""
    if any(bool(number == 0) for number in size):
        return
    own, own_size, own_stride = item.leaf.storage_offset(), tuple(item.leaf.shape), item.leaf.stride()
    inside = bool(own <= offset) and bool(offset + _reach(size, stride) <= own + _reach(own_size, own_stride))
    is_dense = bool(_reach(own_size, own_stride) + 1 == item.leaf.numel())
    if not (inside and is_dense):
        raise Break(
            f"as_strided reaches what lies in memory beside the elements of {item.name}",
            "hand over the tensor that holds it all",
        )


def _reach(size: tuple[Any, ...], stride: tuple[Any, ...]) -> Any:
    return sum((number - 1) * step for number, step in zip(size, stride, strict=True))
