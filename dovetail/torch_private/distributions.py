"""The table of divergences and the checks of ``torch.distributions``."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributions import distribution, kl

#: Whether all values pass a check, as a tensor.
is_all_true: Any = torch._is_all_true
#: The function that gives the same as a plain truth, since torch 2.14 or 2.15; None before.
all_true_or_assert: Any = getattr(distribution, "_all_true_or_runtime_assert", None)


def registered_divergence(kind: type, other: type) -> Any:
    """The function that is registered for two classes of distributions, or NotImplemented."""
    table: dict[Any, Any] = kl._KL_MEMOIZE
    found = table.get((kind, other))
    return kl._dispatch_kl(kind, other) if found is None else found
