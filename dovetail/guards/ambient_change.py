"""Changes of torch's state that a captured program makes: what changed, made again or taken back.

Only what has a setter can be changed so: grad mode, autocast with its nesting, the default dtype, deterministic algorithms,
anomaly mode and the switches for kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dovetail.guards.ambient import AmbientState, set_autocast
from dovetail.torch_private import state as private_state

SETTABLE = frozenset(
    {"grad_mode", "autocast", "autocast_cache", "default_dtype", "deterministic", "anomaly", "kernel_flags"}
)


def autocast_nesting() -> int:
    """The number of autocast blocks that are open."""
    count: int = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return count - 1


@dataclass(frozen=True)
class AmbientChange:
    """From one state of torch to another. ``unsettable`` names what has no setter."""

    before: AmbientState
    after: AmbientState
    nesting: int
    differences: tuple[str, ...]
    unsettable: tuple[str, ...]

    @staticmethod
    def between(before: AmbientState, nesting_before: int) -> AmbientChange:
        """From an earlier state to the state now."""
        after = AmbientState.snapshot()
        names = before.differing(after)
        return AmbientChange(
            before,
            after,
            autocast_nesting() - nesting_before,
            tuple(before.differences()),
            tuple(name for name in names if name not in SETTABLE),
        )

    @property
    def is_empty(self) -> bool:
        """Whether nothing changed."""
        return not self.differences and not self.nesting

    def make(self) -> None:
        """Bring torch from the state before to the state after."""
        self._set(self.before, self.after, self.nesting)

    def take_back(self) -> None:
        """Bring torch from the state after to the state before."""
        self._set(self.after, self.before, -self.nesting)

    @staticmethod
    def _set(old: AmbientState, new: AmbientState, nesting: int) -> None:
        if old.grad_mode is not new.grad_mode:
            torch.set_grad_enabled(new.grad_mode)
        set_autocast(item for item in new.autocast if item not in old.autocast)
        torch.set_autocast_cache_enabled(new.autocast_cache)
        if old.default_dtype is not new.default_dtype:
            torch.set_default_dtype(new.default_dtype)
        if old.deterministic != new.deterministic:
            torch.use_deterministic_algorithms(new.deterministic[0], warn_only=new.deterministic[1])
        if old.anomaly != new.anomaly:
            torch.autograd.set_detect_anomaly(*new.anomaly)
        private_state.set_kernel_flags(old.kernel_flags, new.kernel_flags)
        for _ in range(nesting):
            torch.autocast_increment_nesting()
        for _ in range(-nesting):
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()
