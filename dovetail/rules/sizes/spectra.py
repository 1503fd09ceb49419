"""Short-time Fourier transforms of signals with symbolic sizes, as one call.

torch's C++ cuts a signal into a plain number of frames. Called whole (:mod:`dovetail.trace.sized`), one graph does for signals
of all lengths. Complex results without a separate dimension for the parts only; with plain sizes nothing changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import rule
from dovetail.rules.sizes.recurrent_networks import SizedFunction, call_sized
from dovetail.torch_private import sizes as private_sizes
from dovetail.torch_private import state as private_state


def _are_plain(*values: Any) -> bool:
    return all(type(value) in (int, bool, str, type(None)) for value in values)


def _signals(
    interpreter: TracingInterpreter, input: Any, window: Any, dimensions: tuple[int, int]
) -> list[torch.Tensor] | None:
    """The tensors of the call; None where torch's own function does it, or refuses it."""
    tensors = [item for item in map(interpreter.values.for_native, (input, window)) if item is not None]
    if not all(isinstance(item, torch.Tensor) and item.device == tensors[0].device for item in tensors):
        return None
    if not any(map(private_sizes.has_symbols, tensors)) or private_state.is_any_autocast_on():
        return None
    return tensors if tensors[0].dim() in dimensions else None


@rule(torch.stft, torch.Tensor.stft)
def _stft(interpreter: TracingInterpreter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = _transform(interpreter, *args, **kwargs)
    return interpreter.call_torch(torch.stft, args, kwargs) if result is None else result


def _transform(
    interpreter: TracingInterpreter,
    input: Any,
    n_fft: Any,
    hop_length: Any = None,
    win_length: Any = None,
    window: Any = None,
    center: Any = True,
    pad_mode: Any = "reflect",
    normalized: Any = False,
    onesided: Any = None,
    return_complex: Any = None,
    align_to_window: Any = None,
) -> Any:
    settings = (hop_length, win_length, center, pad_mode, normalized, onesided, align_to_window)
    if not _are_plain(n_fft, *settings) or return_complex is not True or align_to_window:
        return None
    tensors = _signals(interpreter, input, window, (1, 2))
    step = n_fft // 4 if hop_length is None else hop_length
    if tensors is None or not tensors[0].is_floating_point() or step <= 0 or n_fft <= 0:
        return None
    border = n_fft // 2 if center else 0
    if not tensors[0].shape[-1] > max(border, n_fft - 2 * border - 1):
        return None
    bins = n_fft if onesided is False else n_fft // 2 + 1

    def run(signal: torch.Tensor, *given: torch.Tensor) -> Sequence[torch.Tensor]:
        shape = (step, win_length, given[0] if given else None, center, pad_mode, normalized, onesided)
        return [torch.stft(signal, n_fft, *shape, return_complex=True).transpose(-1, -2)]

    def sizes(signal: torch.Tensor, *given: torch.Tensor) -> list[tuple[Sequence[Any], torch.dtype]]:
        frames = 1 + (signal.shape[-1] + 2 * border - n_fft) // step
        return [((*signal.shape[:-1], frames, bins), signal.dtype.to_complex())]

    (found,) = call_sized(interpreter, SizedFunction("stft", run, sizes), tensors)
    return interpreter.call_torch(torch.transpose, (found, -1, -2), {})


@rule(torch.istft, torch.Tensor.istft)
def _istft(interpreter: TracingInterpreter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = _inverse(interpreter, *args, **kwargs)
    return interpreter.call_torch(torch.istft, args, kwargs) if result is None else result


def _inverse(
    interpreter: TracingInterpreter,
    input: Any,
    n_fft: Any,
    hop_length: Any = None,
    win_length: Any = None,
    window: Any = None,
    center: Any = True,
    normalized: Any = False,
    onesided: Any = None,
    length: Any = None,
    return_complex: Any = False,
) -> Any:
    settings = (hop_length, win_length, center, normalized, onesided)
    if (
        not _are_plain(n_fft, *settings)
        or return_complex is not False
        or type(length) not in (type(None), int, torch.SymInt)
    ):
        return None
    tensors = _signals(interpreter, input, window, (2, 3))
    step = n_fft // 4 if hop_length is None else hop_length
    if tensors is None or not tensors[0].is_complex() or step <= 0 or private_sizes.is_data_number(length):
        return None
    has_length, has_window = length is not None, len(tensors) > 1
    if has_length:
        # Its size is all that is read of it.
        carrier = {"dtype": torch.bool, "device": tensors[0].device}
        tensors = [*tensors, interpreter.call_torch(torch.empty, ([length],), carrier)]

    def run(spectrum: torch.Tensor, *given: torch.Tensor) -> Sequence[torch.Tensor]:
        shape = (step, win_length, given[0] if has_window else None, center, normalized, onesided)
        return [torch.istft(spectrum, n_fft, *shape, given[-1].shape[0] if has_length else None)]

    def sizes(spectrum: torch.Tensor, *given: torch.Tensor) -> list[tuple[Sequence[Any], torch.dtype]]:
        whole = n_fft + step * (spectrum.shape[-1] - 1) - (2 * (n_fft // 2) if center else 0)
        reached = given[-1].shape[0] if has_length else whole
        return [((*spectrum.shape[:-2], reached), spectrum.dtype.to_real())]

    (found,) = call_sized(interpreter, SizedFunction("istft", run, sizes), tensors)
    return found
