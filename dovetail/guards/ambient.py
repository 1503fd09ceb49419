"""The state of torch outside of the program: grad mode, autocast, defaults, switches for kernels, active modes.

>>> state = AmbientState.snapshot()
>>> state.matches(), state.refuses_capture
(True, None)
>>> with torch.no_grad():
...     state.differences()
['grad mode was on, is off']
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from dovetail.torch_private import autograd as private_autograd
from dovetail.torch_private import state as private_state
from dovetail.torch_private import tracing as private_tracing

#: The device types whose autocast state is watched.
AUTOCAST_DEVICES = tuple(
    name for name in ("cpu", "cuda", "xpu", "mps", "mtia", "hpu") if torch.amp.is_autocast_available(name)
)
# State that torch's C++ check of global state overlooks, such as the type that autocast will use once it is enabled; in the
# order in which :meth:`AmbientState.matcher` lists the expected values.
_READERS: tuple[Callable[[], Any], ...] = (
    torch.is_inference_mode_enabled,
    private_state.function_mode_count,
    private_state.dispatch_mode_count,
    private_state.functorch_level,
    private_state.forward_ad_level,
    private_state.is_jit_tracing,
    torch.compiler.is_compiling,
    torch.is_anomaly_enabled,
    torch.is_anomaly_check_nan_enabled,
    *(functools.partial(torch.get_autocast_dtype, name) for name in AUTOCAST_DEVICES),
)


def autocast_state() -> tuple[tuple[str, bool, torch.dtype], ...]:
    """For each device type whether autocast is on, and to which type."""
    return tuple((name, torch.is_autocast_enabled(name), torch.get_autocast_dtype(name)) for name in AUTOCAST_DEVICES)


@contextlib.contextmanager
def without_autocast() -> Iterator[None]:
    """No autocast in the block, on any device.

    >>> with torch.autocast("cpu"), without_autocast():
    ...     print(torch.is_autocast_enabled("cpu"))
    False
    """
    before = [name for name in AUTOCAST_DEVICES if torch.is_autocast_enabled(name)]
    for name in before:
        torch.set_autocast_enabled(name, False)
    try:
        yield
    finally:
        for name in before:
            torch.set_autocast_enabled(name, True)


@dataclass(frozen=True)
class AmbientState:
    """The state of torch on which a capture depends; the number of threads is not part of it.

    Taken inside of an open trace, it leaves out the modes and the compiling flag of the trace itself.
    """

    grad_mode: bool = field(metadata={"label": "grad mode"})
    inference_mode: bool = field(metadata={"label": "inference mode"})
    autocast: tuple[tuple[str, bool, torch.dtype], ...] = field(metadata={"label": "autocast"})
    autocast_cache: bool = field(metadata={"label": "autocast cache"})
    default_dtype: torch.dtype = field(metadata={"label": "default dtype"})
    default_device: torch.device | None = field(metadata={"label": "default device"})
    deterministic: tuple[bool, bool] = field(metadata={"label": "deterministic algorithms"})
    reduced_precision: tuple[Any, ...] = field(metadata={"label": "reduced-precision matmul"})
    kernel_flags: tuple[Any, ...] = field(metadata={"label": "kernel switches"})
    torch_function: tuple[bool, bool] = field(metadata={"label": "__torch_function__ dispatch"})
    function_modes: tuple[str, ...] = field(metadata={"label": "torch function modes"})
    dispatch_modes: tuple[str, ...] = field(metadata={"label": "torch dispatch modes"})
    functorch_level: int | None = field(metadata={"label": "functorch level"})
    forward_ad_level: int = field(metadata={"label": "forward-mode level"})
    saved_tensor_hooks: bool = field(metadata={"label": "saved-tensor hooks"})
    anomaly: tuple[bool, bool] = field(metadata={"label": "anomaly mode"})
    jit_tracing: bool = field(metadata={"label": "torch.jit.trace"})
    compiling: bool = field(metadata={"label": "torch.compiler.is_compiling()"})

    @staticmethod
    def snapshot() -> AmbientState:
        """The state now."""
        modes = private_state.dispatch_modes()
        in_trace = any(map(private_tracing.is_tracing_mode, modes))
        device: torch.device | None = None
        names = []
        for mode in private_state.function_modes():
            found = private_state.function_mode_device(mode)
            if found is not None:
                device = found
            names.append(type(mode).__qualname__)
        matmul = torch.backends.cuda.matmul
        return AmbientState(
            grad_mode=torch.is_grad_enabled(),
            inference_mode=torch.is_inference_mode_enabled(),
            autocast=autocast_state(),
            autocast_cache=torch.is_autocast_cache_enabled(),
            default_dtype=torch.get_default_dtype(),
            default_device=device,
            deterministic=(
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
            ),
            reduced_precision=(
                matmul.allow_tf32,
                matmul.allow_fp16_reduced_precision_reduction,
                matmul.allow_bf16_reduced_precision_reduction,
            ),
            kernel_flags=private_state.kernel_flags(),
            torch_function=private_state.torch_function_switches(),
            function_modes=tuple(names),
            dispatch_modes=tuple(
                type(mode).__qualname__ for mode in modes if not private_tracing.is_tracing_mode(mode)
            ),
            functorch_level=private_state.functorch_level(),
            forward_ad_level=private_state.forward_ad_level(),
            saved_tensor_hooks=private_autograd.saved_tensor_hooks() is not None,
            anomaly=(torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
            jit_tracing=private_state.is_jit_tracing(),
            compiling=not in_trace and torch.compiler.is_compiling(),
        )

    @property
    def refuses_capture(self) -> str | None:
        """Why nothing can be captured in this state; None where it can."""
        modes = [name for name in self.function_modes if name != "DeviceContext"]
        if modes:
            return f"a torch function mode is active ({', '.join(modes)})"
        if self.dispatch_modes:
            return f"a torch dispatch mode is active ({', '.join(self.dispatch_modes)})"
        if self.functorch_level is not None:
            return "a functorch transform (vmap, grad, jvp ...) is active"
        if self.forward_ad_level >= 0:
            return "forward-mode differentiation is active"
        if self.saved_tensor_hooks:
            return "hooks for saved tensors are active"
        if not self.torch_function[0] or self.torch_function[1]:
            return "__torch_function__ is disabled"
        if self.jit_tracing:
            return "torch.jit.trace is running"
        if self.compiling:
            return "another compiler is tracing this program"
        return None

    def matches(self) -> bool:
        """Whether the state now is this one."""
        return self == AmbientState.snapshot()

    def differences(self) -> list[str]:
        """Sentences on the parts of the state that differ now."""
        now = AmbientState.snapshot()
        sentences: list[str] = []
        for name in self.differing(now):
            sentences += self._sentences(name, getattr(self, name), getattr(now, name))
        return sentences

    def matcher(self) -> Callable[[], bool]:
        """A fast form of :meth:`matches`, for a check that runs at every call."""
        expected = [
            self.inference_mode,
            len(self.function_modes),
            len(self.dispatch_modes),
            self.functorch_level,
            self.forward_ad_level,
            self.jit_tracing,
            self.compiling,
            *self.anomaly,
            *(dtype for _, _, dtype in self.autocast),
        ]
        flags, has_hooks = self.kernel_flags, self.saved_tensor_hooks
        kernel_flags, saved_tensor_hooks = private_state.kernel_flags, private_autograd.saved_tensor_hooks
        readers, has_modes = _READERS, bool(self.function_modes)
        fast: Callable[[], bool] | None = None

        def matches() -> bool:
            nonlocal fast
            if (
                [read() for read in readers] != expected
                or kernel_flags() != flags
                or (saved_tensor_hooks() is not None) is not has_hooks
            ):
                return False
            if fast is not None and not has_modes and fast():
                return True
            # The C++ check also wants the same number of threads: what differs is found slowly, and the check is made anew.
            if not self.matches():
                return False
            fast = private_state.global_state_check()
            return True

        return matches

    def differing(self, other: AmbientState) -> list[str]:
        """The names of the fields that differ."""
        return [item.name for item in fields(self) if getattr(self, item.name) != getattr(other, item.name)]

    def _sentences(self, name: str, then: Any, now: Any) -> list[str]:
        if name == "autocast":
            sentences = []
            for (device, was_on, old), (_, is_on, new) in zip(then, now):
                if was_on is not is_on:
                    sentences.append(f"autocast on {device} was {_text(was_on)}, is {_text(is_on)}")
                elif old != new:
                    sentences.append(f"autocast dtype on {device} was {old}, is {new}")
            return sentences
        if name == "kernel_flags":
            labels = private_state.KERNEL_FLAG_NAMES
            return [
                f"{label} was {_text(old)}, is {_text(new)}" for label, old, new in zip(labels, then, now) if old != new
            ]
        label = next(item.metadata["label"] for item in fields(self) if item.name == name)
        return [f"{label} was {_text(then)}, is {_text(now)}"]


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return ", ".join(map(_text, value)) or "none"
    return str(value)
