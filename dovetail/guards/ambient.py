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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import torch

from dovetail.torch_private import autograd as private_autograd
from dovetail.torch_private import state as private_state
from dovetail.torch_private import tracing as private_tracing

#: The device types whose autocast state is watched.
AUTOCAST_DEVICES = tuple(
    name for name in ("cpu", "cuda", "xpu", "mps", "mtia", "hpu") if torch.amp.is_autocast_available(name)
)


class Watched(NamedTuple):
    """More state of torch's, of a rule: what it is now, why nothing can be captured in it, and the tables that alone say it."""

    read: Callable[[], Any]
    refusal: Callable[[], str | None]
    tables: Sequence[dict[str, Any]] = ()


WATCHED: list[Watched] = []
#: Faster forms of :meth:`AmbientState.matches`; the last one decides.
MATCHERS: list[Callable[[AmbientState], Callable[[], bool]]] = []


def autocast_state() -> tuple[tuple[str, bool, torch.dtype], ...]:
    """For each device type whether autocast is on, and to which type."""
    return tuple((name, torch.is_autocast_enabled(name), torch.get_autocast_dtype(name)) for name in AUTOCAST_DEVICES)


def set_autocast(state: Iterable[tuple[str, bool, torch.dtype]]) -> None:
    """Switch autocast to a state that :func:`autocast_state` has read."""
    for device, enabled, dtype in state:
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)


@contextlib.contextmanager
def without_autocast() -> Iterator[None]:
    """No autocast in the block, on any device."""
    before = [name for name in AUTOCAST_DEVICES if torch.is_autocast_enabled(name)]
    for name in before:
        torch.set_autocast_enabled(name, False)
    try:
        yield
    finally:
        for name in before:
            torch.set_autocast_enabled(name, True)


def _reduced_precision() -> tuple[Any, ...]:
    matmul = torch.backends.cuda.matmul
    reductions = matmul.allow_fp16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction
    return private_state.unless_mixed(lambda: matmul.allow_tf32), *reductions


def _default_device() -> torch.device | None:
    devices = map(private_state.function_mode_device, private_state.function_modes())
    return next((device for device in reversed([*devices]) if device is not None), None)


def _names(modes: Iterable[object]) -> tuple[str, ...]:
    return tuple(type(mode).__qualname__ for mode in modes)


def _is_compiling() -> bool:
    in_trace = any(map(private_tracing.is_tracing_mode, private_state.dispatch_modes()))
    return not in_trace and torch.compiler.is_compiling()


def _read(label: str, *readers: Callable[[], Any]) -> dict[str, Any]:
    """The metadata of a field: one function reads it, or several do as a tuple; ``label`` names it in sentences."""
    return {"label": label, "read": readers[0] if len(readers) == 1 else lambda: tuple([one() for one in readers])}


@dataclass(frozen=True)
class AmbientState:
    """The state of torch on which a capture depends; the number of threads is not part of it.

    Taken inside of an open trace, it leaves out the modes and the compiling flag of the trace itself.
    """

    grad_mode: bool = field(metadata=_read("grad mode", torch.is_grad_enabled))
    inference_mode: bool = field(metadata=_read("inference mode", torch.is_inference_mode_enabled))
    autocast: tuple[tuple[str, bool, torch.dtype], ...] = field(metadata=_read("autocast", autocast_state))
    autocast_cache: bool = field(metadata=_read("autocast cache", torch.is_autocast_cache_enabled))
    default_dtype: torch.dtype = field(metadata=_read("default dtype", torch.get_default_dtype))
    default_device: torch.device | None = field(metadata=_read("default device", _default_device))
    deterministic: tuple[bool, bool] = field(
        metadata=_read(
            "deterministic algorithms",
            torch.are_deterministic_algorithms_enabled,
            torch.is_deterministic_algorithms_warn_only_enabled,
        )
    )
    reduced_precision: tuple[Any, ...] = field(metadata=_read("reduced-precision matmul", _reduced_precision))
    kernel_flags: tuple[Any, ...] = field(metadata=_read("kernel switches", private_state.kernel_flags))
    torch_function: tuple[bool, bool] = field(
        metadata=_read("__torch_function__ dispatch", private_state.torch_function_switches)
    )
    function_modes: tuple[str, ...] = field(
        metadata=_read("torch function modes", lambda: _names(private_state.function_modes()))
    )
    dispatch_modes: tuple[str, ...] = field(
        metadata=_read(
            "torch dispatch modes",
            lambda: _names(
                mode for mode in private_state.dispatch_modes() if not private_tracing.is_tracing_mode(mode)
            ),
        )
    )
    functorch_level: int | None = field(metadata=_read("functorch level", private_state.functorch_level))
    forward_ad_level: int = field(metadata=_read("forward-mode level", private_state.forward_ad_level))
    saved_tensor_hooks: bool = field(metadata=_read("saved-tensor hooks", private_autograd.has_saved_tensor_hooks))
    anomaly: tuple[bool, bool] = field(
        metadata=_read("anomaly mode", torch.is_anomaly_enabled, torch.is_anomaly_check_nan_enabled)
    )
    other_switches: tuple[bool, ...] = field(
        metadata=_read("other switches", *[read for _, read, _ in private_state.OTHER_SWITCHES]), compare=False
    )
    watched: tuple[Any, ...] = field(metadata=_read("what is patched", lambda: tuple([one.read() for one in WATCHED])))
    jit_tracing: bool = field(metadata=_read("torch.jit.trace", private_state.is_jit_tracing))
    compiling: bool = field(metadata=_read("torch.compiler.is_compiling()", _is_compiling))

    @staticmethod
    def snapshot() -> AmbientState:
        """The state now."""
        return AmbientState(*[item.metadata["read"]() for item in fields(AmbientState)])

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
        return next(filter(None, (one.refusal() for one in WATCHED)), None)

    def matches(self) -> bool:
        """Whether the state now is this one."""
        return self == AmbientState.snapshot()

    def differences(self) -> list[str]:
        """Sentences on the parts of the state that differ now."""
        now = AmbientState.snapshot()
        found = (self._sentences(name, getattr(self, name), getattr(now, name)) for name in self.differing(now))
        return [sentence for sentences in found for sentence in sentences]

    def matcher(self) -> Callable[[], bool]:
        """A function that says what :meth:`matches` says, for a check that runs at every call."""
        return MATCHERS[-1](self) if MATCHERS else self.matches

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
            each = zip(private_state.KERNEL_FLAG_NAMES, then, now)
            return [f"{label} was {_text(old)}, is {_text(new)}" for label, old, new in each if old != new]
        label = next(item.metadata["label"] for item in fields(self) if item.name == name)
        return [f"{label} was {_text(then)}, is {_text(now)}"]


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return ", ".join(map(_text, value)) or "none"
    return str(value)
