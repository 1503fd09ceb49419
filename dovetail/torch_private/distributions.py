"""The table of divergences of ``torch.distributions``. Checked on torch 2.11 to 2.13."""

from __future__ import annotations

from typing import Any

from torch.distributions import kl


def registered_divergence(kind: type, other: type) -> Any:
    """The function that is registered for two classes of distributions, or NotImplemented."""
    table: dict[Any, Any] = kl._KL_MEMOIZE
    found = table.get((kind, other))
    return kl._dispatch_kl(kind, other) if found is None else found
