"""A mark on backwards that compute some summands of a gradient while another backward computes the rest.

Where eager checks a gradient as a whole, no summand alone says whether the check holds.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

_partial: contextvars.ContextVar[bool] = contextvars.ContextVar("dovetail partial gradients", default=False)


@contextlib.contextmanager
def partial_gradients() -> Iterator[None]:
    """A block in which backwards compute summands of gradients.

    >>> with partial_gradients():
    ...     are_partial()
    True
    """
    token = _partial.set(True)
    try:
        yield
    finally:
        _partial.reset(token)


def are_partial() -> bool:
    """Whether the backward that runs now computes summands of gradients."""
    return _partial.get()
