"""Fake kernels that are not what eager's kernels do, or that take no symbolic sizes; layouts have a file of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dovetail.quirks.registry import Example, quirk
from dovetail.trace.overrides import FAKE, SYMBOLIC_FAKE, Run

_aten = torch.ops.aten
_functional = torch.nn.functional


def _sizes(function: Callable[[torch.Tensor], torch.Tensor], *shape: int) -> Callable[[], Example]:
    """A function at three sizes, for which two graphs are enough: a plain one and a symbolic one."""
    return lambda: Example(
        function, [(torch.rand(*shape, size),) for size in (8, 10, 12)], graphs=2, options={"fullgraph": True}
    )


def _resized(mode: str, *scale: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: _functional.interpolate(x, size=tuple(int(4 * factor) for factor in scale), mode=mode)


_RESIZES = {
    "linear1d": _sizes(_resized("linear", 1), 2, 3),
    "bilinear2d": _sizes(_resized("bilinear", 1, 1), 1, 2, 6),
    "trilinear3d": _sizes(_resized("trilinear", 1, 1, 1), 1, 1, 4, 5),
    "bicubic2d": _sizes(_resized("bicubic", 1, 1), 1, 2, 6),
    "nearest1d": _sizes(_resized("nearest", 1), 2, 3),
    "nearest3d": _sizes(_resized("nearest", 1, 1, 1), 1, 1, 4, 5),
}


@quirk(
    SYMBOLIC_FAKE,
    *(getattr(_aten, f"upsample_{name}_backward").default for name in _RESIZES),
    _aten._upsample_bicubic2d_aa_backward.default,
    _aten._upsample_nearest_exact1d_backward.default,
    _aten._upsample_nearest_exact3d_backward.default,
    example=_RESIZES,
)
def resized_gradient(run: Run, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Give the gradient of a resized image the size that the third argument says; the fake kernel takes plain sizes only."""
    return run(_aten.new_empty.default, (args[0], args[2]), {})


def _drawn(kind: Callable[[torch.Tensor], torch.distributions.Distribution]) -> Callable[[], Example]:
    return lambda: Example(
        lambda x: kind(x).rsample(),
        [(torch.rand(size, 3).add_(1).requires_grad_(),) for size in (2, 3, 4)],
        graphs=2,
        options={"fullgraph": True},
    )


@quirk(
    SYMBOLIC_FAKE,
    *(_aten._standard_gamma.default, _aten._standard_gamma_grad.default),
    *(_aten._sample_dirichlet.default, _aten._dirichlet_grad.default),
    example={
        "gamma": _drawn(lambda x: torch.distributions.Gamma(x, x)),
        "dirichlet": _drawn(torch.distributions.Dirichlet),
    },
)
def symbolic_draw(run: Run, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Make these like their first argument; they have no fake kernel that takes symbolic sizes."""
    return run(_aten.empty_like.default, args[:1], {"memory_format": torch.contiguous_format})


@quirk(
    FAKE,
    _aten.normal.Tensor_Tensor,
    example=lambda: Example(
        torch.normal, [(torch.zeros(3, dtype=torch.float16), torch.ones(3))], order=0, options={"fullgraph": True}
    ),
    issue="https://github.com/pytorch/pytorch/issues/194547",
)
def drawn_as_the_mean(run: Run, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Draw numbers of the type of their means, as the kernel does, where the deviations have another."""
    mean, deviation, *rest = args
    return run(operator, (mean, deviation.to(mean.dtype), *rest), kwargs)


@quirk(
    FAKE,
    _aten._pack_padded_sequence.default,
    example=lambda: Example(
        lambda x, lengths: [item * 2 for item in torch.nn.utils.rnn.pack_padded_sequence(x, lengths)[:2]],
        [(torch.ones(4, 2, 3), torch.tensor(lengths)) for lengths in ([4, 2], [3, 3])],
        order=0,
    ),
)
def packed_rows(run: Run, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Let the lengths decide how many rows and steps a packed sequence has; torch's fake kernel gives it those of one sequence,
    and batch sizes of the type of the data.
    """
    padded, lengths, *batch_first = args

    def number(sizes: Sequence[Any]) -> Any:
        """A number that only the data knows, up to the product of ``sizes``."""
        return run(_aten.nonzero.default, (padded.new_empty(sizes, dtype=torch.bool),), {}).shape[0]

    steps = padded.shape[1 if True in batch_first else 0]
    return padded.new_empty((number(padded.shape[:2]), *padded.shape[2:])), lengths.new_empty((number((steps,)),))


def _paths() -> Example:
    lengths, labels = torch.tensor([3, 2]), torch.ones(2, 3, dtype=torch.int64)
    scores = torch.rand(4, 2, 3).log_softmax(-1).requires_grad_()
    return Example(lambda x: _functional.ctc_loss(x, labels, lengths, lengths - 1), [(scores,)], graphs=1)


@quirk(FAKE, _aten._ctc_loss.Tensor, example=_paths)
def sums_over_paths(run: Run, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Let the lengths of labels that are given as a tensor decide a size; there is no fake kernel."""
    scores = args[0]
    places = run(_aten.nonzero.default, (scores.new_empty(scores.shape[:1], dtype=torch.bool),), {})
    return scores.new_empty(scores.shape[1:2]), scores.new_empty((scores.shape[1], scores.shape[0], places.shape[0]))


@quirk(FAKE, _aten._ctc_loss_backward.Tensor, example=_paths)
def gradient_of_paths(run: Run, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Make the gradient like the scores; there is no fake kernel."""
    return run(_aten.empty_like.default, args[1:2], {"memory_format": torch.contiguous_format})


_ENDS = ("Tensor_Tensor", "Tensor_Scalar", "Scalar_Tensor")


def _from_complex(x: torch.Tensor) -> torch.Tensor:
    return torch.linspace(x, 1, 3) + torch.logspace(0, x, 3)


@quirk(
    FAKE,
    *(getattr(packet, name) for packet in (_aten.linspace, _aten.logspace) for name in _ENDS),
    example=lambda: Example(_from_complex, [(torch.tensor(1j),)], order=0, options={"fullgraph": True}),
)
def complex_ends(run: Run, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Make a row complex where a tensor among its ends is; the fake kernel asks numbers only."""
    is_complex = any(isinstance(end, complex) or (isinstance(end, torch.Tensor) and end.is_complex()) for end in args)
    dtype = torch.get_default_dtype().to_complex() if is_complex else None
    return run(operator, args, kwargs if kwargs.get("dtype") or dtype is None else {**kwargs, "dtype": dtype})


def _unique(function: Callable[..., torch.Tensor]) -> Callable[[], Example]:
    def program(x: torch.Tensor) -> torch.Tensor:
        found = function(x, dim=-1)
        return x * found.shape[0] * found.stride(1)

    return lambda: Example(program, [(torch.arange(18.0).reshape(3, 6),)], order=0, options={"fullgraph": True})


@quirk(
    FAKE,
    *(_aten.unique_consecutive.default, _aten.unique_dim.default),
    example={"consecutive": _unique(torch.unique_consecutive), "sorted": _unique(torch.unique)},
)
def unique_along_a_dimension(run: Run, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Count the dimension from the front, where the fake kernel mixes the sizes up. In memory it is the first, as in the kernel."""
    names = [item.name for item in operator._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if given.get("dim") is None:
        return run(operator, args, kwargs)
    dim = given.pop("dim") % max(args[0].dim(), 1)
    first, *rest = run(operator, (given.pop("self"),), {**given, "dim": dim})
    moved = run(_aten.movedim.int, (first, dim, 0), {}) if first.dim() else first
    moved = run(_aten.empty_like.default, (moved,), {"memory_format": torch.contiguous_format})
    return (run(_aten.movedim.int, (moved, 0, dim), {}) if first.dim() else moved, *rest)
