"""Where torch's fake kernels are not what eager's kernels do, or take no symbolic sizes (found on torch 2.13)."""

from __future__ import annotations

from typing import Any

import torch

from dovetail.quirks.clamped_slices import clamped_slice
from dovetail.torch_private import calls as private_calls
from dovetail.torch_private import sizes as private_sizes
from dovetail.torch_private import tracing as private_tracing

_aten = torch.ops.aten
# All of the next four tables: the fake kernel keeps strides that the kernel does not keep, and a view of such a result would
# be recorded that no real tensor has. These keep channels-last on a CPU and nothing else; by the argument that counts.
_CHANNELS_LAST = {
    _aten._native_batch_norm_legit.default: 0,
    _aten._native_batch_norm_legit.no_stats: 0,
    _aten._native_batch_norm_legit_functional.default: 0,
    _aten._native_batch_norm_legit_no_training.default: 0,
    _aten.native_batch_norm.default: 0,
    _aten.native_batch_norm_backward.default: 1,
}
# Their result is contiguous.
_CONTIGUOUS = frozenset(
    {
        _aten.mse_loss_backward.default,
        _aten.smooth_l1_loss_backward.default,
        _aten.huber_loss_backward.default,
        _aten.native_layer_norm_backward.default,
    }
)
_CONTIGUOUS_ON_CPU = frozenset({_aten.log_sigmoid_forward.default})
# Their result has the strides of a sum of these two arguments.
_LIKE_A_SUM = {
    _aten.elu_backward.default: (0, 5),
    _aten.hardswish_backward.default: (0, 1),
    _aten.softplus_backward.default: (0, 1),
}
# They take plain sizes only. The third argument is the size of the result.
_IMAGE_GRADIENTS = frozenset(
    getattr(_aten, f"upsample_{name}_backward").default
    for name in ("linear1d", "bilinear2d", "trilinear3d", "bicubic2d", "nearest1d", "nearest3d")
) | {
    _aten._upsample_bicubic2d_aa_backward.default,
    _aten._upsample_nearest_exact1d_backward.default,
    _aten._upsample_nearest_exact3d_backward.default,
}
# They have no fake kernel that takes symbolic sizes. Their result is that of a sum of the first two arguments, or contiguous
# and like the second.
_SYMBOLIC_SUMS = frozenset({_aten.hardshrink_backward.default, _aten.softshrink_backward.default})
_LIKE_THE_SECOND = frozenset({_aten.multi_margin_loss_backward.default, _aten.multilabel_margin_loss_backward.default})


class FakeMode(private_tracing.FakeTensorMode):
    """Fake tensors with the strides that eager's kernels give."""

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See the base class."""
        result = super().dispatch(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        if func in _CHANNELS_LAST:
            image = args[_CHANNELS_LAST[func]]
            return (
                _laid_out(result, private_sizes.suggested_memory_format(image))
                if image.device.type == "cpu"
                else result
            )
        if func in _CONTIGUOUS or (func in _CONTIGUOUS_ON_CPU and args[0].device.type == "cpu"):
            return _laid_out(result, torch.contiguous_format)
        if func in _LIKE_A_SUM:
            with private_calls.no_torch_function():
                return torch.add(*[args[position] for position in _LIKE_A_SUM[func]])
        return result


class SymbolicFakeMode(FakeMode):
    """Fake tensors with symbolic sizes: C++ operators made of others ask for plain sizes, their Python forms do not.

    Only here, below what is recorded: the recorded operators stay those of eager.
    """

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See the base class."""
        if func in _IMAGE_GRADIENTS:
            func, args, kwargs = _aten.new_empty.default, (args[0], args[2]), {}
        elif func in _SYMBOLIC_SUMS:
            func, args, kwargs = _aten.add.Tensor, args[:2], {}
        elif func in _LIKE_THE_SECOND:
            func, args, kwargs = _aten.empty_like.default, args[1:2], {"memory_format": torch.contiguous_format}
        if func is _aten.slice.Tensor:
            clamped = clamped_slice(*args, **(kwargs or {}))
            if clamped is not None:
                return clamped
        with private_tracing.enable_python_dispatcher():
            return super().dispatch(func, types, args, kwargs)


def _laid_out(result: Any, memory_format: torch.memory_format) -> Any:
    """A fake result, or a tuple whose first tensor it is, in a memory format."""
    first = result if isinstance(result, torch.Tensor) else result[0]
    if first is None:
        return result
    with private_calls.no_torch_function():
        expected = _aten.empty_like.default(first, memory_format=memory_format)
    if expected.stride() == first.stride():
        return result
    return expected if first is result else (expected, *result[1:])
