"""Kinds of tensors (fake, functional, wrapping others), views, shared memory, version counters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.nested._internal.nested_tensor import NestedTensor as JaggedTensor

__all__ = ["FakeTensor", "FunctionalTensor", "JaggedTensor"]

TensorBase = torch._C.TensorBase
_autograd: Any = torch._C._autograd


def is_fake(value: object) -> bool:
    """Whether a value is a fake tensor."""
    return isinstance(value, FakeTensor)


def is_functional(value: object) -> bool:
    """Whether a value is a functional wrapper, the outside of a traced tensor."""
    return isinstance(value, FunctionalTensor) or (
        isinstance(value, torch.Tensor) and torch._is_functional_tensor(value)
    )


def is_functorch_wrapped(value: torch.Tensor) -> bool:
    """Whether a tensor is one of functorch's wrappers (inside vmap, grad, jvp)."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(value))


def is_traced(value: torch.Tensor) -> bool:
    """Whether a tensor is made by a trace: a functional wrapper, or a functorch or subclass wrapper around one."""
    return isinstance(value, FunctionalTensor) or is_functorch_wrapped(value) or is_traced_wrapper(value)


def is_wrapper(value: object) -> bool:
    """Whether a tensor is of a subclass that wraps strided tensors and can be taken apart (``__tensor_flatten__``)."""
    return (
        # Asked of the class: an object may answer by code of the user's.
        isinstance(value, torch.Tensor)
        and hasattr(type(value), "__tensor_flatten__")
        and hasattr(type(value), "__tensor_unflatten__")
        and not isinstance(value, FunctionalTensor)
        and value.layout is torch.strided
    )


def is_traced_wrapper(value: object) -> bool:
    """Whether a wrapper holds traced tensors."""
    if type(value) is torch.Tensor or not is_wrapper(value):
        return False
    names, _ = value.__tensor_flatten__()
    try:
        inner = [getattr(value, name) for name in names]
    except AttributeError:
        # Its ``__new__`` is running, in the trace.
        return True
    return any(isinstance(item, torch.Tensor) and is_traced(item) for item in inner)


def dispatch_keys(tensor: torch.Tensor) -> str:
    """The dispatch keys of a tensor, as text."""
    return str(torch._C._dispatch_keys(tensor))


def is_written(value: torch.Tensor) -> bool:
    """Whether data of a functional tensor, or of a view of it, has been written to."""
    return torch._functionalize_has_data_mutation(value.elem)


def size_inside(value: torch.Tensor) -> torch.Size:
    """The size of the tensor inside a functional one; an operator that resizes its ``out=`` changes it, not the outer size."""
    return value.elem.shape


def is_tensor_view(value: torch.Tensor) -> bool:
    """Whether autograd treats this tensor as a differentiable view of another one."""
    return value._is_view()


def is_recorded_view(view: torch.Tensor) -> bool:
    """Whether a tensor is a view that was made with gradients enabled: a write to it is recorded on its base too."""
    return view._base is not None and bool(_autograd._get_creation_meta(view) == _autograd.CreationMeta.DEFAULT)


def is_view_of_custom_function(view: torch.Tensor) -> bool:
    """Whether a custom ``autograd.Function`` returned this view: its backward is not that of the view operators."""
    base = view._base
    node: Any = None if base is None else view.grad_fn
    while node is not None and base is not None and (node is view.grad_fn or node is not base.grad_fn):
        # Autograd's mark for it is that of unbind() too where the function returns several tensors.
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return True
        node = node.next_functions[0][0] if node.next_functions else None
    return False


def leads_past(view: torch.Tensor, base: torch.Tensor) -> bool:
    """Whether a view's gradient does not come to its base: between them is a view that was made without recording."""
    node, end = view.grad_fn, base.grad_fn
    while node is not None and node is not end:
        if not node.next_functions:
            return False
        node = node.next_functions[0][0]
    return node is None and view.grad_fn is not None


def mark_as_view_of_custom_function(view: torch.Tensor) -> None:
    """Mark a view as returned by a custom ``autograd.Function``: a write to it then raises autograd's error."""
    _autograd._set_creation_meta(view, _autograd.CreationMeta.IN_CUSTOM_FUNCTION)


def view_replay(view: torch.Tensor) -> Any:
    """The view operators between a tensor and its base, as a function of another base; a second argument may replace the sizes."""
    return view._view_func_unsafe


def share_memory(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether any two of these tensors lie in one storage (0.2 us for each)."""
    return len({tensor.untyped_storage()._cdata for tensor in tensors}) < len(tensors)


def version_of(tensor: torch.Tensor) -> int:
    """The number of writes that autograd has counted; inference tensors have no counter."""
    return 0 if tensor.is_inference() else tensor._version


def of_other_mode(base: torch.Tensor, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """All of a tensor as an inference tensor if it is none, as none if it is one."""
    with torch.inference_mode(not base.is_inference()), torch.no_grad():
        whole = base.new_empty(0).set_(base.untyped_storage(), base.storage_offset(), base.shape, base.stride())  # type: ignore[call-overload]
    torch._C._set_conj(whole, base.is_conj())
    torch._C._set_neg(whole, base.is_neg())
    return whole  # type: ignore[no-any-return]


def share_version_counter(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether autograd counts writes to two tensors together; the counters are left as they were."""
    if left.is_inference() or right.is_inference():
        return left.is_inference() is right.is_inference()
    before, other = left._version, right._version
    torch.autograd.graph.increment_version(left)
    try:
        return right._version != other
    finally:
        _autograd._unsafe_set_version_counter((left,), (before,))
