"""Functions that kernels in the place of torch's own call, and the errors of torch's."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from dovetail.torch_private.operators import OpOverload
from dovetail.torch_private.recordings import storage_references
from dovetail.versions import parse

_PLAIN_SIZES = ("expected to contain only concrete integers", "Cannot call sizes() on tensor with symbolic sizes")


@contextlib.contextmanager
def above_autograd() -> Iterator[None]:
    """Enable autograd as for a user's call, from inside an operator's kernel; autocast stays as it is."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor", "ADInplaceOrView"):
        excluded = excluded.remove(getattr(torch._C.DispatchKey, key))
    included = torch._C._dispatch_tls_local_include_set().add(torch._C.DispatchKey.ADInplaceOrView)
    with torch._C._ForceDispatchKeyGuard(included, excluded):
        yield


@contextlib.contextmanager
def noting_views() -> Iterator[None]:
    """Have views note their base, from inside a dispatch mode: those of a leaf then require a gradient."""
    excluded = torch._C._dispatch_tls_local_exclude_set().remove(torch._C.DispatchKey.ADInplaceOrView)
    included = torch._C._dispatch_tls_local_include_set().add(torch._C.DispatchKey.ADInplaceOrView)
    with torch._C._ForceDispatchKeyGuard(included, excluded):
        yield


def one_by_one(
    function: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]], tensors: Sequence[torch.Tensor]
) -> list[Any]:
    """Call a function for each of the gradients that ``is_grads_batched`` hands over as one, from inside a kernel for that."""
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    key: Any = torch._C._parse_dispatch_key("Batched")
    batches = {
        place: torch._remove_batch_dim(value, level, 1, 0)  # type: ignore[attr-defined]
        for place, value in enumerate(tensors)
        if torch._C._dispatch_keys(value).has(key)
    }
    calls = []
    for values in zip(*batches.values(), strict=True):
        row = dict(zip(batches, values, strict=True))
        calls.append(function([row.get(place, value) for place, value in enumerate(tensors)]))
    columns = zip(*calls, strict=True)
    return [torch._add_batch_dim(torch.stack(column), 0, level) for column in columns]  # type: ignore[attr-defined]


_PARTS = torch._C.DispatchKey.CompositeImplicitAutograd


def kernel_of_parts(operator: Any) -> Callable[..., Any] | None:
    """The C++ kernel of an operator that calls others; None where there is none."""
    if not isinstance(operator, OpOverload):
        return None
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), _PARTS)
    return functools.partial(operator._op_dk, _PARTS) if has_kernel else None


def has_formula(operator: Any) -> bool:
    """Whether torch has a formula in Python for an operator, in the place of the kernel that calls others."""
    return isinstance(operator, OpOverload) and _PARTS in operator.py_kernels


@functools.cache
def functional_form(overload: OpOverload) -> OpOverload | None:
    """The operator that returns the value that this one writes to its first argument; None where there is none.

    >>> functional_form(torch.ops.aten.clamp_min_.default)
    <OpOverload(op='aten.clamp_min', overload='default')>
    """
    namespace, name = overload._schema.name.split("::")
    if not name.endswith("_") or name.endswith("__") or torch.Tag.inplace_view in overload.tags:
        return None
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
    if packet is None:
        return None
    # Overloads are not always called alike: ``pow_.Scalar`` writes what ``pow.Tensor_Scalar`` returns.
    found = [getattr(packet, item) for item in packet.overloads() if item != "out"]
    alike = [item for item in found if _argument_types(item) == _argument_types(overload)]
    namesake = [item for item in alike if item._overloadname == overload._overloadname]
    draws = torch.Tag.nondeterministic_seeded in overload.tags
    return next(iter(namesake if draws else [*namesake, *alike]), None)


def _argument_types(overload: OpOverload) -> list[str]:
    return [str(argument.type) for argument in overload._schema.arguments]


def suggested_memory_format(tensor: torch.Tensor) -> torch.memory_format:
    """Channels-last for a tensor whose strides are so, else contiguous, as the C++ function of the same name says (2.13)."""
    from torch._prims_common import suggest_memory_format

    return suggest_memory_format(tensor)  # type: ignore[arg-type]


def view_strides(tensor: torch.Tensor, shape: Sequence[Any]) -> tuple[Any, ...] | None:
    """The strides of ``tensor.view(shape)`` by torch's copy of the C++ function; None where there is none (2.13 has one)."""
    from torch._subclasses import fake_impls

    compute = getattr(fake_impls, "_compute_stride", None)
    found = None if compute is None else compute(tensor.shape, tensor.stride(), shape)
    return None if found is None else tuple(found)


def enlarge_memory(wrapper: torch.Tensor, size: int) -> None:
    """Give a functional tensor, whose own memory stands for no data, another one of ``size`` bytes on its device.

    Where ``resize_`` makes it larger, torch 2.13 takes it to ``meta``, which views of the tensor then refuse. Torch 2.15 asks for
    the Python object of the tensor's storage, which ``resize_`` then takes for a view: a tensor without views gets another storage.
    """
    from torch.utils._mode_utils import no_dispatch

    inner: Any = wrapper.elem  # type: ignore[attr-defined]
    with no_dispatch(), torch.no_grad():
        if parse(torch.__version__) >= (2, 15) and storage_references(inner) == 2:
            torch._functionalize_sync(inner)  # type: ignore[attr-defined]
            inner.data = torch._to_functional_tensor(torch._from_functional_tensor(inner))
        wrapper.data = torch.Tensor._make_wrapper_subclass(
            type(wrapper),
            wrapper.shape,
            wrapper.stride(),
            wrapper.storage_offset(),
            dtype=wrapper.dtype,
            device=wrapper.device,
            storage_size=size,
        )


def asks_for_plain_sizes(error: RuntimeError) -> bool:
    """Whether C++ has refused a tensor because its sizes are symbolic (the texts of torch 2.13)."""
    return any(text in str(error) for text in _PLAIN_SIZES)


def attention_fast_path() -> tuple[Any, Any, Any]:
    """How ``nn.MultiheadAttention`` asks whether it is traced, the kernel that it takes in evaluation where it is not, and how
    ``nn.TransformerEncoder`` asks whether padding is on the right alone.
    """
    from torch.nn.modules import activation

    return (
        activation._is_make_fx_tracing,
        torch._native_multi_head_attention,
        torch._nested_tensor_from_mask_left_aligned,
    )
