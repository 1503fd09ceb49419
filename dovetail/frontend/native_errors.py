"""Marks on exceptions that native calls raised: the captured program may handle them, and they may not depend on its tensors."""

from __future__ import annotations


def mark_native(error: BaseException) -> None:
    """Note on an exception that a tensor operation raised it, not the user's own code."""
    error._dovetail_native = True  # type: ignore[attr-defined]


def is_marked_native(error: BaseException) -> bool:
    """Whether :func:`mark_native` was called on an exception."""
    return bool(getattr(error, "_dovetail_native", False))
