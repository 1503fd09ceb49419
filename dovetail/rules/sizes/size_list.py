"""``list(range(n))`` where ``n`` is a symbolic size: a list that is not made.

As a list of numbers it would hold the graph to one length. What programs do with such lists is mostly arithmetic: a slice, an
item, the length, a few numbers put in front, a tensor of the whole. A :class:`SizeList` does that with formulas. Whatever else
reaches it begins the capture again, with plain lists.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

#: The strategy of this module; it is given up where such a list is used as only a plain list can be.
SIZE_LISTS = "lists over symbolic sizes"


@dataclass(frozen=True)
class Run:
    """``count`` numbers from ``start`` in steps of ``step``; each may be symbolic."""

    start: Any
    step: Any
    count: Any

    def item(self, index: Any) -> Any:
        """One of its numbers."""
        return self.start + index * self.step


class SizeList:
    """A list of runs of numbers. Plain positions only, and steps forward; no method changes it.

    >>> positions = SizeList((Run(0, 1, 8),))
    >>> len((positions[1:-1])[::2].runs), (positions[1:-1])[::2].runs[0]
    (1, Run(start=1, step=2, count=3))
    """

    def __init__(self, runs: tuple[Run, ...]) -> None:
        self.runs = runs

    @property
    def length(self) -> Any:
        """How many numbers there are."""
        return sum(run.count for run in self.runs)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise _refusal()

    def __getitem__(self, index: Any) -> Any:
        if type(index) is int:
            return self._item(index)
        if type(index) is not slice or any(type(item) not in (int, type(None)) for item in _parts(index)):
            raise _refusal()
        start, stop, step = _parts(index)
        step = 1 if step is None else step
        if step <= 0 or (start or 0) < 0 or (stop is not None and stop >= 0):
            raise _refusal()
        runs = _without_first(self.runs, start or 0)
        runs = _without_last(runs, -(stop or 0))
        return SizeList(runs if step == 1 else _every(runs, step))

    def _item(self, index: int) -> Any:
        for run in self.runs if index >= 0 else reversed(self.runs):
            if index >= 0:
                if run.count > index:
                    return run.item(index)
                index -= _plain(run.count)
            else:
                if run.count >= -index:
                    return run.item(run.count + index)
                index += _plain(run.count)
        raise IndexError("list index out of range")

    def __add__(self, other: Any) -> Any:
        return SizeList((*self.runs, *_runs(other)))

    def __radd__(self, other: Any) -> Any:
        return SizeList((*_runs(other), *self.runs))

    def __bool__(self) -> bool:
        return bool(self.length > 0)

    def refuse(self, *others: Any) -> NoReturn:
        """Begin the capture again, with plain lists."""
        raise _refusal()

    __mul__ = __rmul__ = __iadd__ = __imul__ = __setitem__ = __delitem__ = __contains__ = refuse
    __iter__ = __len__ = __reversed__ = __index__ = __int__ = __float__ = __array__ = refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = refuse  # type: ignore[assignment]
    __hash__ = refuse  # type: ignore[assignment]
    __repr__ = __str__ = __format__ = refuse  # type: ignore[assignment]
    __copy__ = __deepcopy__ = __reduce_ex__ = refuse  # type: ignore[assignment]


def _refusal() -> BaseException:
    from dovetail.trace.settings import Retry  # which needs torch

    return Retry("a list over a size that changes from call to call is used item by item", without=SIZE_LISTS)


def _parts(index: slice) -> tuple[Any, Any, Any]:
    return index.start, index.stop, index.step


def _plain(count: Any) -> int:
    if type(count) is not int:
        raise _refusal()
    return count


def _is_symbolic(value: Any) -> bool:
    # This module works without torch, as the machine of the interpreter does.
    return type(value).__name__ == "SymInt"


def _runs(value: Any) -> tuple[Run, ...]:
    if type(value) is SizeList:
        return value.runs
    if type(value) is not list or not all(type(item) is int or _is_symbolic(item) for item in value):
        raise _refusal()
    return tuple(Run(item, 1, 1) for item in value)


def _without_first(runs: tuple[Run, ...], count: int) -> tuple[Run, ...]:
    while count and runs:
        first, *rest = runs
        if first.count > count:
            return (Run(first.item(count), first.step, first.count - count), *rest)
        count -= _plain(first.count)
        runs = tuple(rest)
    return runs


def _without_last(runs: tuple[Run, ...], count: int) -> tuple[Run, ...]:
    while count and runs:
        *rest, last = runs
        if last.count > count:
            return (*rest, Run(last.start, last.step, last.count - count))
        count -= _plain(last.count)
        runs = tuple(rest)
    return runs


def _every(runs: tuple[Run, ...], step: int) -> tuple[Run, ...]:
    """Every ``step``-th number. Where the numbers after a symbolic run begin depends on the rest of its count."""
    found: list[Run] = []
    skipped = 0
    for at, run in enumerate(runs):
        if not run.count > skipped:
            skipped -= _plain(run.count)
            continue
        found.append(Run(run.item(skipped), run.step * step, (run.count - skipped + step - 1) // step))
        if at < len(runs) - 1:
            skipped = (skipped - _plain(run.count)) % step
    return tuple(found)
