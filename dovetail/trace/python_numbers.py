"""Functions of Python numbers that a graph calls, where Python's own may give a number of another kind."""

from __future__ import annotations

from dovetail.errors import OutgrownError


def real_power(base: float, exponent: float) -> float:
    """``base ** exponent`` as Python computes it. A complex result is refused: the graph was made for a real one.

    >>> real_power(4.0, 0.5)
    2.0
    """
    result = base**exponent
    if isinstance(result, complex):
        raise OutgrownError(
            f"{base!r} ** {exponent!r} is a complex number; the graph was compiled for real ones",
            advice="keep this number out of the compiled function",
        )
    return result  # type: ignore[no-any-return]
