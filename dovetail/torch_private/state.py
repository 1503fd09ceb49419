"""The door to torch's private names for what a program may leave changed: modes, hooks, switches, and how to set them back.

Checked on torch 2.13 (CPU). What is private elsewhere comes through :mod:`dovetail.torch_private.tensors`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.torch_private.tensors import dispatch_mode_count, function_mode_count, saved_tensor_hooks

_autograd: Any = torch._C._autograd

# Each switch by what reads it and what sets it.
_SWITCHES: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch._C._get_flash_sdp_enabled, torch._C._set_sdp_use_flash),
    (torch._C._get_mem_efficient_sdp_enabled, torch._C._set_sdp_use_mem_efficient),
    (torch._C._get_math_sdp_enabled, torch._C._set_sdp_use_math),
    (torch._C._get_cudnn_sdp_enabled, torch._C._set_sdp_use_cudnn),
    (torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled),
    (torch._C._get_cudnn_benchmark, torch._C._set_cudnn_benchmark),
    (torch._C._get_cudnn_deterministic, torch._C._set_cudnn_deterministic),
    (torch._C._get_cudnn_allow_tf32, torch._C._set_cudnn_allow_tf32),
    (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
    (torch._C._get_float32_matmul_precision, torch._C._set_float32_matmul_precision),
    (
        torch._C._get_deterministic_fill_uninitialized_memory,
        torch._C._set_deterministic_fill_uninitialized_memory,
    ),
    (torch._C._is_multithreading_enabled, torch._C._set_multithreading_enabled),
    (torch._C._is_view_replay_enabled, torch._C._set_view_replay_enabled),
    (torch._C._is_fwd_grad_enabled, torch._C._set_fwd_grad_enabled),
)


@dataclass(frozen=True)
class StateOfTorch:
    """What a ``with`` block of torch's may change in torch, as it is now; :meth:`restore` sets all of it back.

    >>> state = StateOfTorch.now()
    >>> entered = torch.autograd.graph.save_on_cpu().__enter__()
    >>> entered = torch.backends.mkldnn.set_flags(False)
    >>> state.restore()
    >>> saved_tensor_hooks(), torch.backends.mkldnn.is_available() == torch._C._get_mkldnn_enabled()
    (None, True)
    """

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
            torch.autograd.forward_ad._current_level,
            (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
            tuple([read() for read, _ in _SWITCHES]),
        )

    def restore(self) -> None:
        """Leave what was entered since, and set every switch back."""
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
        while torch.autograd.forward_ad._current_level > self.forward_level:
            torch.autograd.forward_ad.exit_dual_level()
        if (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()) != self.anomaly:
            torch.autograd.set_detect_anomaly(*self.anomaly)
        for (read, write), value in zip(_SWITCHES, self.switches, strict=True):
            if read() != value:
                write(value)
