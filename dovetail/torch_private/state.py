"""State of torch that a program sets around its calls: modes, transforms, autocast, random generators, switches of kernels."""

from __future__ import annotations

import contextlib
import functools
import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.torch_private.autograd import saved_tensor_hooks

_autograd: Any = torch._C._autograd


function_mode_count: Callable[[], int] = torch._C._len_torch_function_stack

dispatch_mode_count: Callable[[], int] = torch._C._len_torch_dispatch_stack

functorch_level: Callable[[], int | None] = torch._C._functorch.maybe_current_level

#: Whether ``torch.jit.trace`` is running.
is_jit_tracing: Callable[[], bool] = torch._C._is_tracing


def function_modes() -> list[Any]:
    """The active torch-function modes, outermost first."""
    return [torch._C._get_function_stack_at(index) for index in range(function_mode_count())]


def dispatch_modes() -> list[Any]:
    """The active torch-dispatch modes, those of tracing (fake, proxy, functional) included."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    return list(_get_current_dispatch_mode_stack())


def function_mode_device(mode: object) -> torch.device | None:
    """The device of the mode behind ``torch.set_default_device`` and ``with device:``; None for another mode."""
    from torch.utils._device import DeviceContext

    return mode.device if isinstance(mode, DeviceContext) else None


def has_default_device(function: Any) -> bool:
    """Whether the default device decides where a function's result is."""
    from torch.utils._device import _device_constructors

    return function in _device_constructors()


def torch_function_switches() -> tuple[bool, bool]:
    """Whether ``__torch_function__`` is enabled, and whether subclasses and modes are all disabled."""
    return torch._C._is_torch_function_enabled(), torch._C._is_torch_function_all_disabled()


def outside_of_transforms() -> contextlib.AbstractContextManager[Any]:
    """A block in which no transform of ``torch.func`` is active."""
    if functorch_level() is None:
        return contextlib.nullcontext()
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()


def forward_ad_level() -> int:
    """The level of forward-mode differentiation; -1 outside of it."""
    return torch.autograd.forward_ad._current_level


def is_any_autocast_on() -> bool:
    """Whether autocast is enabled for any device."""
    return bool(torch._C._is_any_autocast_enabled())


@contextlib.contextmanager
def frames_let_go() -> Iterator[None]:
    """A block whose exceptions leave it with empty frames, and with the dispatcher of torch as it is then.

    Frames of torch hold guards of the dispatcher (``Tensor.__repr__`` does): they would end with the exception, whenever that is.
    """
    try:
        yield
    except BaseException as error:
        chain: BaseException | None = error
        keys = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
        with torch._C._ForceDispatchKeyGuard(*keys):
            while chain is not None:
                traceback.clear_frames(chain.__traceback__)
                chain = chain.__cause__ or chain.__context__
        raise


@contextlib.contextmanager
def preserved_rng_state() -> Iterator[None]:
    """Put back the state of the default generators after the block, so that tracing draws no random numbers."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with contextlib.ExitStack() as stack:
        stack.callback(set_random_states, random_states(devices), devices)
        yield


def random_states(cuda_devices: Sequence[int]) -> list[torch.Tensor]:
    """The states of the default generators: of the CPU, and of these devices."""
    return [torch.default_generator.get_state(), *(torch.cuda.get_rng_state(device) for device in cuda_devices)]


def set_random_states(states: Sequence[torch.Tensor], cuda_devices: Sequence[int]) -> None:
    """Put the default generators back to states that :func:`random_states` read."""
    torch.default_generator.set_state(states[0])
    for device, state in zip(cuda_devices, states[1:], strict=True):
        torch.cuda.set_rng_state(state, device)


_Switch = tuple[str, Callable[[], Any], Callable[[Any], Any]]

#: The precision of float32 arithmetic for a backend and a kind of operator: torch's newer switches.
fp32_precision = torch._C._get_fp32_precision_getter
_PRECISIONS = [
    ("generic", "all"),
    *((name, part) for name in ("cuda", "mkldnn") for part in ("all", "matmul", "conv", "rnn")),
]


def unless_mixed(read: Callable[[], Any]) -> Any:
    """Read an older switch of precision; the newer ones where torch refuses to read the older one beside them."""
    try:
        return read()
    except RuntimeError:
        return every_precision()


def every_precision() -> tuple[str, ...]:
    """All of the newer switches."""
    return tuple([fp32_precision(*one) for one in _PRECISIONS])


def set_every_precision(precisions: Sequence[str]) -> None:
    """Put all of them back to what :func:`every_precision` read."""
    for one, precision in zip(_PRECISIONS, precisions, strict=True):
        torch._C._set_fp32_precision_setter(*one, precision)


def _put_back(write: Callable[[Any], Any], value: Any) -> None:
    (set_every_precision if isinstance(value, tuple) and type(value[0]) is str else write)(value)


#: The switches that choose kernels, by the names of reader and writer in C++ (one, where both have the same).
_IN_C = {
    "flash attention": "flash_sdp_enabled sdp_use_flash",
    "memory-efficient attention": "mem_efficient_sdp_enabled sdp_use_mem_efficient",
    "math attention": "math_sdp_enabled sdp_use_math",
    "cuDNN attention": "cudnn_sdp_enabled sdp_use_cudnn",
    "reductions of attention in reduced precision": "math_sdp_allow_fp16_bf16_reduction",
    "cuDNN": "cudnn_enabled",
    "cuDNN benchmark": "cudnn_benchmark",
    "cuDNN deterministic": "cudnn_deterministic",
    "cuDNN TF32": "cudnn_allow_tf32",
    "MKLDNN": "mkldnn_enabled",
    "MKLDNN deterministic": "mkldnn_deterministic",
    "float32 matmul precision": "float32_matmul_precision",
    "filling of uninitialized memory": "deterministic_fill_uninitialized_memory",
}
#: Name, reader, writer. Guards read them at each call, so most readers are the functions in C++.
_KERNEL_SWITCHES: tuple[_Switch, ...] = (
    *(
        (name, getattr(torch._C, f"_get_{both.split()[0]}"), getattr(torch._C, f"_set_{both.split()[-1]}"))
        for name, both in _IN_C.items()
    ),
    ("kernels of attention", lambda: (*torch._C._get_sdp_priority_order(),), torch._C._set_sdp_priority_order),
    (
        "float32 precision on CUDA",
        functools.partial(fp32_precision, "cuda", "all"),
        functools.partial(torch._C._set_fp32_precision_setter, "cuda", "all"),
    ),
)

KERNEL_FLAG_NAMES = tuple(name for name, _, _ in _KERNEL_SWITCHES)
KERNEL_READERS = tuple(read for _, read, _ in _KERNEL_SWITCHES)
_COVERED_SETTERS = re.compile(
    r"_set_(sdp|math_sdp|cudnn_(allow|bench|det|en)|mkldnn|float32|fp32|deterministic|default|cublas_allow_tf32)\w*"
    r"|_set_(grad_enabled|fwd_grad|multithreading|view_replay|conj|neg|tensor_metadata|generator)\w*"
    r"|\w*_set_(dispatch|torch_function|tracing_state|skip_next|only_lift|value_trace)\w*"
    r"|set_(autocast_(cache|cpu|gpu|dtype|enabled)|anomaly|grad|num_threads)\w*"
)
#: Torch's setters in C++ of what nothing else here covers: no switch, no other part of the state that guards hold.
OTHER_SETTERS = frozenset(
    name for name in dir(torch._C) if re.search("(^|_)set_", name) and not _COVERED_SETTERS.fullmatch(name)
)

#: Switches on which nothing in a graph depends.
OTHER_SWITCHES: tuple[_Switch, ...] = (
    ("multithreading", torch._C._is_multithreading_enabled, torch._C._set_multithreading_enabled),
    ("view replay", torch._C._is_view_replay_enabled, torch._C._set_view_replay_enabled),
    ("forward gradients", torch._C._is_fwd_grad_enabled, torch._C._set_fwd_grad_enabled),
)
#: All switches that a block of a program may change.
_SWITCHES: tuple[_Switch, ...] = (*_KERNEL_SWITCHES, *OTHER_SWITCHES)
_READERS = tuple(read for _, read, _ in _SWITCHES)


def kernel_flags(read: tuple[Callable[[], Any], ...] = KERNEL_READERS) -> tuple[Any, ...]:
    """The switches that choose kernels, in the order of :data:`KERNEL_FLAG_NAMES`."""
    try:
        return tuple([one() for one in read])
    except RuntimeError:
        return tuple(map(unless_mixed, read))


def set_kernel_flags(old: tuple[Any, ...], new: tuple[Any, ...]) -> None:
    """Set the switches that differ between two results of :func:`kernel_flags`."""
    for (_, _, write), before, after in zip(_KERNEL_SWITCHES, old, new, strict=True):
        if before != after:
            _put_back(write, after)


@dataclass(frozen=True)
class StateOfTorch:
    """Everything in torch that a ``with`` block of a program may change, as it is now; :meth:`restore` sets all of it back."""

    function_modes: int
    dispatch_modes: int
    hooks: Any
    hooks_refused: str | None
    forward_level: int
    anomaly: tuple[bool, bool]
    switches: tuple[Any, ...]

    @staticmethod
    def now() -> StateOfTorch:
        """The state now."""
        return StateOfTorch(
            function_mode_count(),
            dispatch_mode_count(),
            saved_tensor_hooks(),
            _autograd._saved_tensors_hooks_get_disabled_error_message(),
            forward_ad_level(),
            (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
            kernel_flags(_READERS),
        )

    def restore(self) -> None:
        """Leave every block that was entered since, and set every switch back."""
        from torch.utils._python_dispatch import _pop_mode

        while function_mode_count() > self.function_modes:
            torch._C._pop_torch_function_stack()
        while dispatch_mode_count() > self.dispatch_modes:
            _pop_mode()
        if _autograd._saved_tensors_hooks_get_disabled_error_message() != self.hooks_refused:
            # Where hooks are refused, the stack of them can still be popped.
            if self.hooks_refused is None:
                _autograd._saved_tensors_hooks_enable()
            else:
                _autograd._saved_tensors_hooks_disable(self.hooks_refused)
        while saved_tensor_hooks() not in (None, self.hooks):
            _autograd._pop_saved_tensors_default_hooks()
        while forward_ad_level() > self.forward_level:
            torch.autograd.forward_ad.exit_dual_level()
        if (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()) != self.anomaly:
            torch.autograd.set_detect_anomaly(*self.anomaly)
        for (_, read, write), value in zip(_SWITCHES, self.switches, strict=True):
            if unless_mixed(read) != value:
                _put_back(write, value)
