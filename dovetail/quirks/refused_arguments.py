"""Arguments that eager's kernels refuse and fake kernels take, so that a backend without these kernels would compute something."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dovetail.quirks.registry import Example, quirk
from dovetail.trace.overrides import FAKE, Run

_aten = torch.ops.aten


def _is_exact(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_floating_point() and not value.is_complex()


def _has_nothing(image: torch.Tensor, sizes: Sequence[Any]) -> bool:
    return any(type(size) is int and size == 0 for size in (*image.shape[2:], *sizes))


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


_Refuses = Callable[..., bool]
_REFUSED: dict[Any, _Refuses] = {
    _aten.argmax.default: lambda value, *rest: value.dtype == torch.bool,
    _aten.argmin.default: lambda value, *rest: value.dtype == torch.bool,
    _aten.linalg_cross.default: lambda one, other, *rest: one.dtype != other.dtype,
    _aten.celu.default: lambda value, alpha=1.0: _is_number(alpha) and alpha == 0,
    _aten.smooth_l1_loss.default: lambda one, other, reduction=1, beta=1.0: _is_number(beta) and beta < 0,
    _aten.logcumsumexp.default: lambda value, *rest: _is_exact(value),
    _aten.nll_loss_forward.default: lambda scores, labels, *rest: labels.dtype not in (torch.int64, torch.uint8),
}
_RESIZES = {
    operator: (lambda image, sizes, *rest: _has_nothing(image, sizes))
    for operator in (
        *(_aten.upsample_bilinear2d.default, _aten.upsample_bicubic2d.default, _aten.upsample_nearest2d.default),
        *(_aten.upsample_linear1d.default, _aten.upsample_nearest1d.default),
        *(_aten.upsample_trilinear3d.default, _aten.upsample_nearest3d.default),
    )
}


def _example(function: Callable[..., Any], *arguments: Any) -> Callable[[], Example]:
    return lambda: Example(function, [arguments], order=0, exact=False, options={"backend": "inductor"})


@quirk(
    FAKE,
    *_REFUSED,
    *_RESIZES,
    example={
        "argmax": _example(torch.argmax, torch.tensor([True, False])),
        "cross": _example(torch.linalg.cross, torch.ones(3), torch.ones(3, dtype=torch.float64)),
        "celu": _example(lambda x: torch.celu(x, 0.0), torch.ones(2)),
        "smooth_l1_loss": _example(
            lambda x, y: torch.nn.functional.smooth_l1_loss(x, y, beta=-1.0), torch.ones(2), torch.zeros(2)
        ),
        "logcumsumexp": _example(lambda x: torch.logcumsumexp(x, 0), torch.tensor(2)),
        "nll_loss": _example(torch.nn.functional.nll_loss, torch.ones(2, 3), torch.tensor([1, 2], dtype=torch.int32)),
        "bilinear": _example(
            lambda x: torch.nn.functional.interpolate(x, size=(2, 2), mode="bilinear"), torch.ones(1, 1, 0, 3)
        ),
    },
    issue="https://github.com/pytorch/pytorch/issues/197554",
)
def refused_by_kernels(run: Run, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Refuse what the kernel refuses: a fake kernel that takes it lets a backend with kernels of its own compute it."""
    names = [item.name for item in operator._schema.arguments]
    given = [*args, *(kwargs[name] for name in names[len(args) :] if name in kwargs)]
    refuses = _REFUSED.get(operator) or _RESIZES[operator]
    if refuses(*given):
        raise RuntimeError(f"{operator} has no kernel for these arguments")
    return run(operator, args, kwargs)
