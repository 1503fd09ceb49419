"""Results that lie in memory in another way than their fakes.

A view of such a fake would be recorded that no real tensor has, and the program would be told strides that are not eager's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from dovetail.quirks.registry import Example, quirk
from dovetail.torch_private import calls as private_calls
from dovetail.torch_private import kernels as private_kernels
from dovetail.torch_private import sizes as private_sizes
from dovetail.trace.overrides import FAKE, Run

_aten = torch.ops.aten


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


def _twos(x: torch.Tensor) -> torch.Tensor:
    return torch.full(x.shape, 2.0)


def _number(value: Any) -> Callable[[torch.Tensor], Any]:
    return lambda x: value


def _turned(x: torch.Tensor) -> torch.Tensor:
    return x.permute(3, 1, 2, 0)


def _channels_last(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def _half(x: torch.Tensor) -> torch.Tensor:
    return torch.ones(x.narrow(2, 0, 2).shape)


def _volume(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().permute(3, 0, 1, 2)


def _scalar(x: torch.Tensor) -> torch.Tensor:
    return x.sum()


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
    _aten._batch_norm_with_update.default: 0,
    _aten._batch_norm_with_update_functional.default: 0,
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
    """Give a batch norm's result the layout that the kernel gives on a CPU: channels-last is kept, nothing else is."""
    result = run(operator, args, kwargs)
    image = args[_BATCH_NORMS[operator]]
    if image.device.type != "cpu":
        return result
    last = torch.channels_last_3d if image.dim() == 5 else torch.channels_last
    if image.is_contiguous():
        kept = torch.contiguous_format
    elif image.dim() in (4, 5) and image.is_contiguous(memory_format=last):
        kept = last
    else:
        kept = private_kernels.suggested_memory_format(image)
    return _laid_out(result, kept)


@quirk(
    FAKE,
    _aten.mse_loss_backward.default,
    _aten.smooth_l1_loss_backward.default,
    _aten.huber_loss_backward.default,
    _aten.native_layer_norm_backward.default,
    _aten._log_softmax_backward_data.default,
    _aten.glu_backward.default,
    example={
        "glu": _strides(_aten.glu_backward.default, _half, _channels_last, _number(2)),
        "log_softmax": _strides(
            _aten._log_softmax_backward_data.default, _itself, _plain, _number(1), _number(torch.float32)
        ),
        "mse_loss": _strides(_aten.mse_loss_backward.default, _scalar, _itself, _plain, _number(1)),
        "smooth_l1_loss": _strides(
            _aten.smooth_l1_loss_backward.default, _scalar, _itself, _plain, _number(1), _number(1.0)
        ),
        "huber_loss": _strides(_aten.huber_loss_backward.default, _scalar, _itself, _plain, _number(1), _number(1.0)),
        "layer_norm": _strides(
            _aten.native_layer_norm_backward.default,
            *(_turned, _turned, _number([2]), _statistics, _statistics, _NONE, _NONE, _MASK),
        ),
    },
)
def contiguous_gradient(run: Run, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Make the first gradient of these backwards contiguous, as their kernels do."""
    return _laid_out(run(operator, args, kwargs), torch.contiguous_format)


_PADDING = _number([1, 1, 1, 1, 1, 1])
_PADDED = {
    _aten.reflection_pad3d_backward.default: 3,
    _aten.replication_pad3d_backward.default: 3,
    _aten.reflection_pad2d_backward.default: 2,
}
_IMAGES = {
    **dict.fromkeys((_aten.reflection_pad3d.default, _aten.replication_pad3d.default), (_PADDING,)),
    _aten.max_unpool2d.default: (lambda x: torch.zeros(x.shape, dtype=torch.long), _number([3, 5])),
    _aten.native_channel_shuffle.default: (_number(3),),
}


def _padded(count: int) -> tuple[Callable[[torch.Tensor], Any], ...]:
    """The gradient of an image that is padded in its last dimensions, the image, and the padding."""
    return lambda x: F.pad(torch.ones(x.shape), [1, 1] * count), _channels_last, _number([1, 1] * count)


@quirk(
    FAKE,
    *(*_IMAGES, _aten.channel_shuffle.default, *_PADDED),
    example={
        **{str(kind): _strides(kind, _channels_last, *rest) for kind, rest in _IMAGES.items()},
        **{str(kind): _strides(kind, *_padded(count)) for kind, count in _PADDED.items()},
    },
)
def image_layout(run: Run, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Keep channels-last on a CPU, as the kernels do."""
    result, image = run(operator, args, kwargs), args[operator in _PADDED]
    return _laid_out(result, private_kernels.suggested_memory_format(image)) if image.device.type == "cpu" else result


@quirk(
    FAKE,
    _aten.max_pool3d_with_indices.default,
    example=_strides(_aten.max_pool3d_with_indices.default, _volume, _number([1, 1, 1])),
)
def single_volume(run: Run, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Keep the channels-last of a volume without a batch, as the kernel does."""
    found = run(operator, args, kwargs)
    formats = {"memory_format": torch.channels_last_3d}
    if args[0].dim() != 4 or args[0].device.type != "cpu" or not args[0].unsqueeze(0).is_contiguous(**formats):
        return found
    batches = [run(_aten.empty_like.default, (item.unsqueeze(0),), formats) for item in found]
    return tuple(batch.squeeze(0) for batch in batches)


@quirk(FAKE, _aten.log_sigmoid_forward.default, example=_strides(_aten.log_sigmoid_forward.default, _itself))
def contiguous_log_sigmoid(run: Run, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Make the result contiguous on a CPU, as the kernel does."""
    result = run(operator, args, kwargs)
    return _laid_out(result, torch.contiguous_format) if args[0].device.type == "cpu" else result


@quirk(
    FAKE,
    _aten.roll.default,
    example={
        "one": _strides(_aten.roll.default, _channels_last, _number([1]), _number([0])),
        "two": _strides(_aten.roll.default, _channels_last, _number([1, 2]), _number([0, 2])),
    },
    issue="https://github.com/pytorch/pytorch/issues/174963",
)
def rolled_layout(run: Run, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Lay a rolled tensor out as its two parts behind each other, which it is on a CPU, one dimension after another."""
    value, shifts, dims = (*args, *kwargs.values(), ())[:3]
    numbers = (*value.shape, *shifts)
    if not dims or value.device.type != "cpu" or any(type(number) is not int for number in numbers) or 0 in value.shape:
        return run(operator, args, kwargs)
    for shift, dim in zip(shifts, dims, strict=True):
        size = value.shape[dim]
        start = -shift % size
        parts = [run(_aten.narrow.default, (value, dim, *part), {}) for part in ((start, size - start), (0, start))]
        value = run(_aten.cat.default, (parts, dim), {})
    return value


def _complex(x: torch.Tensor) -> torch.Tensor:
    return torch.complex(x, x)


@quirk(FAKE, _aten.angle.default, example=_strides(_aten.angle.default, _complex))
def contiguous_angle(run: Run, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Make the angles of complex numbers contiguous, as the kernel does."""
    result = run(operator, args, kwargs)
    return _laid_out(result, torch.contiguous_format) if args[0].is_complex() else result


# By the two arguments that are operands.
_SUMS = {
    _aten.elu_backward.default: (0, 5),
    _aten.hardswish_backward.default: (0, 1),
    _aten.hardtanh_backward.default: (0, 1),
    _aten.logit_backward.default: (0, 1),
    _aten.softplus_backward.default: (0, 1),
    _aten.native_dropout_backward.default: (0, 1),
}
_OPERATIONS = {
    **dict.fromkeys((_aten.logical_and.default, _aten.logical_or.default), (_scalar, _itself)),
    **dict.fromkeys((_aten.logaddexp.default, _aten.logaddexp2.default, _aten.heaviside.default), (_scalar, _itself)),
    **dict.fromkeys((_aten.xlogy.Tensor, _aten.special_xlog1py.default), (_itself, _twos)),
    **dict.fromkeys((_aten.copysign.Tensor, _aten.floor_divide.default), (_itself, _scalar)),
    _aten.logical_xor.default: (lambda x: torch.zeros(()), _itself),
}
_SUMS |= dict.fromkeys((*_OPERATIONS, _aten.div.Tensor_mode), (0, 1))
_ELU = (_plain, _number(1.0), _number(1.0), _number(1.0), _number(False), _itself)


def _rounded(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return _aten.div.Tensor_mode(x, other, rounding_mode="floor")


@quirk(
    FAKE,
    *_SUMS,
    example={
        "elu": _strides(_aten.elu_backward.default, *_ELU),
        "hardswish": _strides(_aten.hardswish_backward.default, _plain, _itself),
        "hardtanh": _strides(_aten.hardtanh_backward.default, _plain, _itself, _number(-1.0), _number(1.0)),
        "logit": _strides(_aten.logit_backward.default, _plain, lambda x: x / 4),
        "softplus": _strides(_aten.softplus_backward.default, _plain, _itself, _number(1), _number(20)),
        "dropout": _strides(_aten.native_dropout_backward.default, _itself, lambda x: x > 0, _number(2.0)),
        "div": _strides(_rounded, _itself, _scalar),
        **{str(item): _strides(item, *operands) for item, operands in _OPERATIONS.items()},
    },
)
def strides_of_a_sum(run: Run, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Give these the strides of a sum of their operands, as the iterator of their kernels does."""
    result = run(operator, args, kwargs)
    with private_calls.no_torch_function():
        like = torch.add(*[args[position] for position in _SUMS[operator]])
    return run(_aten.empty_like.default, (like,), {"dtype": result.dtype})


@quirk(FAKE, _aten.pow.Scalar, example=_strides(_aten.pow.Scalar, _number(2.0), _itself))
def contiguous_power(run: Run, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Make a power of a number contiguous, as the kernel does."""
    return _laid_out(run(operator, args, kwargs), torch.contiguous_format)


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
