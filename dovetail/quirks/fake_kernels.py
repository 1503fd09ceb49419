"""Fake kernels that are not what eager's kernels do, or that take no symbolic sizes.

Where a fake kernel keeps strides that the kernel does not keep, a view of the result would be recorded that no real tensor has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dovetail.quirks.registry import Example, quirk
from dovetail.torch_private import calls as private_calls
from dovetail.torch_private import kernels as private_kernels
from dovetail.torch_private import sizes as private_sizes
from dovetail.trace.overrides import FAKE, SYMBOLIC_FAKE, Run

_aten = torch.ops.aten
_functional = torch.nn.functional


def _image() -> torch.Tensor:
    return torch.arange(1.0, 121.0).sin().reshape(2, 4, 3, 5).transpose(1, 2)


def _strides(operator: Any, *arguments: Callable[[torch.Tensor], Any]) -> Callable[[], Example]:
    """The strides of an operator's result, as a number that only the fake kernel decides while tracing."""

    def program(x: torch.Tensor) -> torch.Tensor:
        found = operator(*[make(x) for make in arguments])
        first = found if isinstance(found, torch.Tensor) else found[0]
        return first * first.stride(1)

    return lambda: Example(program, [(_image(),)], order=0)


def _itself(x: torch.Tensor) -> torch.Tensor:
    return x


def _plain(x: torch.Tensor) -> torch.Tensor:
    return torch.ones(x.shape)


def _number(value: Any) -> Callable[[torch.Tensor], Any]:
    return lambda x: value


def _turned(x: torch.Tensor) -> torch.Tensor:
    return x.permute(3, 1, 2, 0)


def _statistics(x: torch.Tensor) -> torch.Tensor:
    return torch.ones(*_turned(x).shape[:-1], 1)


def _channels(x: torch.Tensor) -> torch.Tensor:
    return torch.ones(x.shape[1])


_TRAINING = (_number(True), _number(0.1), _number(1e-5))
_MASK = _number([True, False, False])
_NONE = _number(None)
_STATISTICS = (_channels, _channels)

# By the argument whose layout counts.
_BATCH_NORMS = {
    _aten._native_batch_norm_legit.default: 0,
    _aten._native_batch_norm_legit.no_stats: 0,
    _aten._native_batch_norm_legit_functional.default: 0,
    _aten._native_batch_norm_legit_no_training.default: 0,
    _aten.native_batch_norm.default: 0,
    _aten.native_batch_norm_backward.default: 1,
}


@quirk(
    FAKE,
    *_BATCH_NORMS,
    example={
        "forward": _strides(
            _aten._native_batch_norm_legit_functional.default, _itself, _NONE, _NONE, *_STATISTICS, *_TRAINING
        ),
        "backward": _strides(
            _aten.native_batch_norm_backward.default,
            *(_itself, _itself, _NONE, _NONE, _NONE, *_STATISTICS, _number(True), _number(1e-5), _MASK),
        ),
    },
)
def batch_norm_layout(run: Run, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Give a batch norm's result the layout that the kernel gives on a CPU: channels-last is kept, nothing else is.

    Images of one pixel lie in both formats; the kernel takes them for contiguous.
    """
    result = run(operator, args, kwargs)
    image = args[_BATCH_NORMS[operator]]
    if image.device.type != "cpu":
        return result
    is_one_pixel = all(type(size) is int and size == 1 for size in image.shape[2:])
    return _laid_out(
        result, torch.contiguous_format if is_one_pixel else private_kernels.suggested_memory_format(image)
    )


@quirk(
    FAKE,
    _aten.mse_loss_backward.default,
    _aten.smooth_l1_loss_backward.default,
    _aten.huber_loss_backward.default,
    _aten.native_layer_norm_backward.default,
    example={
        "mse_loss": _strides(_aten.mse_loss_backward.default, lambda x: x.sum(), _itself, _plain, _number(1)),
        "smooth_l1_loss": _strides(
            _aten.smooth_l1_loss_backward.default, lambda x: x.sum(), _itself, _plain, _number(1), _number(1.0)
        ),
        "huber_loss": _strides(
            _aten.huber_loss_backward.default, lambda x: x.sum(), _itself, _plain, _number(1), _number(1.0)
        ),
        "layer_norm": _strides(
            _aten.native_layer_norm_backward.default,
            *(_turned, _turned, _number([2]), _statistics, _statistics, _NONE, _NONE, _MASK),
        ),
    },
)
def contiguous_gradient(run: Run, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Make the first gradient of these backwards contiguous, as their kernels do."""
    return _laid_out(run(operator, args, kwargs), torch.contiguous_format)


@quirk(FAKE, _aten.log_sigmoid_forward.default, example=_strides(_aten.log_sigmoid_forward.default, _itself))
def contiguous_log_sigmoid(run: Run, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Make the result contiguous on a CPU, as the kernel does."""
    result = run(operator, args, kwargs)
    return _laid_out(result, torch.contiguous_format) if args[0].device.type == "cpu" else result


# By the two arguments that are operands.
_SUMS = {
    _aten.elu_backward.default: (0, 5),
    _aten.hardswish_backward.default: (0, 1),
    _aten.softplus_backward.default: (0, 1),
}
_ELU = (_plain, _number(1.0), _number(1.0), _number(1.0), _number(False), _itself)


@quirk(
    FAKE,
    *_SUMS,
    example={
        "elu": _strides(_aten.elu_backward.default, *_ELU),
        "hardswish": _strides(_aten.hardswish_backward.default, _plain, _itself),
        "softplus": _strides(_aten.softplus_backward.default, _plain, _itself, _number(1), _number(20)),
    },
)
def strides_of_a_sum(run: Run, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Give these backwards the strides of a sum of their operands, as the iterator of their kernels does."""
    with private_calls.no_torch_function():
        return torch.add(*[args[position] for position in _SUMS[operator]])


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


def _has_sizes_of_one(*tensors: torch.Tensor) -> bool:
    """Whether some size is 1, and the first tensor is not contiguous: then the stride of such a size says nothing."""
    return any(type(size) is int and size == 1 for x in tensors for size in x.shape) and not tensors[0].is_contiguous()


@quirk(
    FAKE,
    *(_aten.view.default, _aten._unsafe_view.default),
    example=lambda: Example(
        lambda x: x * x.transpose(1, 2).view(1, 4, 3, 5).stride(0), [(torch.ones(1, 15, 4),)], order=0
    ),
)
def view_of_one(run: Run, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Give sizes of one the strides that eager's views give them."""
    result, source = run(operator, args, kwargs), args[0]
    if not _has_sizes_of_one(source, result):
        return result
    strides = private_kernels.view_strides(source, result.shape)
    if strides is None or strides == result.stride():
        return result
    return run(_aten.as_strided.default, (source, list(result.shape), strides, source.storage_offset()), {})


@quirk(
    FAKE,
    *(_aten.add.Tensor, _aten.sub.Tensor, _aten.mul.Tensor, _aten.div.Tensor),
    example=lambda: Example(
        lambda x: x * (x.transpose(1, 2).view(1, 4, 3, 5) / 2).stride(0), [(torch.ones(1, 15, 4),)], order=0
    ),
)
def image_with_a_number(run: Run, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Let a single image in channels-last that meets a number keep the order of its strides, as eager's iterator does.

    Torch's short cut gives it the strides of larger batches, and what asks for a memory format decides in another way then.
    """
    result, source = run(operator, args, kwargs), args[0]
    if result.dim() not in (4, 5) or not _has_sizes_of_one(result) or private_sizes.has_symbols(result):
        return result
    if (isinstance(args[1], torch.Tensor) and args[1].dim()) or source.shape != result.shape:
        return result
    strides = _iterator_strides(source.shape, source.stride())
    if strides == result.stride():
        return result
    return run(
        _aten.empty_strided.default, (list(result.shape), strides), {"dtype": result.dtype, "device": result.device}
    )


@quirk(
    FAKE,
    _aten._pack_padded_sequence.default,
    example=lambda: Example(
        lambda x: torch.nn.utils.rnn.pack_padded_sequence(x, torch.tensor([4, 2])).data * 2,
        [(torch.ones(4, 2, 3),)],
        order=0,
    ),
)
def packed_rows(run: Run, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Let a packed sequence have as many rows as the lengths say; torch's fake kernel gives it those of one sequence."""
    _, batch_sizes = run(operator, args, kwargs)
    padded = args[0]
    # A number of rows that only the data knows.
    places = run(_aten.nonzero.default, (padded.new_empty(padded.shape[:1], dtype=torch.bool),), {})
    return padded.new_empty((places.shape[0], *padded.shape[2:])), batch_sizes


def _iterator_strides(shape: Sequence[int], given: Sequence[int]) -> tuple[int, ...]:
    """The strides that eager's iterator gives a result of one operand: its dimensions sorted by their strides."""
    order = list(reversed(range(len(shape))))
    for end in range(1, len(order)):
        place = end
        for other in reversed(range(end)):
            left, right = order[other], order[place]
            if given[left] < given[right] and given[left]:
                break
            if given[right] and (given[left], shape[left]) > (given[right], shape[right]):
                order[other], order[place], place = right, left, other
    strides, size = [0] * len(shape), 1
    for dimension in order:
        strides[dimension], size = size, size * shape[dimension]
    return tuple(strides)


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
