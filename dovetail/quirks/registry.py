"""The decorator that makes a function a quirk: where it goes, for which versions of torch, and the program that shows it.

A quirk is one place where torch is wrong or lacks something, and the function that makes it right. The function goes into a
table that the core owns (:mod:`dovetail.trace.overrides`, the rules of the frontend, or a table of a backend). Its examples
are the smallest programs that show it: ``tests/quirks/test_quirks.py`` runs each **without** the quirk and fails when the
program is right all the same, because torch has been mended and the quirk can be deleted; and each with the quirk.

>>> table = {}
>>> @quirk(table, torch.ops.aten.sin.default, example=lambda: Example(torch.sin, [(torch.ones(2),)]))
... def sine(run, operator, args, kwargs):
...     return run(operator, args, kwargs)
>>> table[torch.ops.aten.sin.default] is QUIRKS["sine"].function is sine
True
>>> QUIRKS.pop("sine").remove()
>>> table
{}
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from dovetail.versions import parse

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Example:
    """A program that shows a quirk: ``function`` is called with each of ``calls``, compiled and eagerly, and compared.

    Results, their strides, random numbers, errors and gradients up to ``order`` must be eager's, to the last bit if ``exact``.
    ``graphs`` is how many graphs there may be after all calls, ``stays`` that what the quirk does cannot be taken back in a process
    that has used it, ``options`` are for ``dovetail.compile``.
    """

    function: Callable[..., Any]
    calls: Sequence[tuple[Any, ...]]
    order: int = 1
    exact: bool = True
    graphs: int | None = None
    stays: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(eq=False)
class Quirk:
    """One quirk; ``table`` is a dictionary with ``keys``, or a list."""

    name: str
    function: Callable[..., Any]
    table: Any
    keys: tuple[Any, ...]
    examples: Mapping[str, Callable[[], Example]]
    issue: str | None
    since: tuple[int, int]
    until: tuple[int, int] | None

    @property
    def holds(self) -> bool:
        """Whether this version of torch has the quirk."""
        running = parse(torch.__version__)
        return self.since <= running and (self.until is None or running < self.until)

    def install(self) -> None:
        """Put the function into its table, in every place that no other function has taken."""
        if not self.keys:
            self.table.append(self.function)
        for key in self.keys:
            self.table.setdefault(key, self.function)

    def remove(self) -> None:
        """Take the function out of its table."""
        if not self.keys:
            self.table.remove(self.function)
        for key in self.keys:
            if self.table.get(key) is self.function:
                del self.table[key]

    @contextlib.contextmanager
    def absent(self) -> Iterator[None]:
        """A block without the quirk, for tests."""
        before = self.table.copy()
        self.remove()
        try:
            yield
        finally:
            self.table.clear()
            (self.table.extend if isinstance(self.table, list) else self.table.update)(before)


QUIRKS: dict[str, Quirk] = {}
"""All quirks by name, those of other versions of torch included."""


def quirk(
    table: Any,
    *keys: Any,
    example: Callable[[], Example] | Mapping[str, Callable[[], Example]],
    issue: str | None = None,
    since: str = "2.11",
    until: str | None = None,
) -> Callable[[Function], Function]:
    """Register a function as a quirk of torch ``since`` one version and before ``until``, and put it into ``table``.

    ``example`` makes the program that shows it, or several by name, where one function stands for several operators. ``issue``
    is the address of torch's issue, where there is one.
    """

    def register(function: Function) -> Function:
        examples = example if isinstance(example, Mapping) else {"": example}
        bounds = parse(since), None if until is None else parse(until)
        found = Quirk(function.__name__, function, table, keys, examples, issue, *bounds)
        assert found.name not in QUIRKS, f"two quirks have the name {found.name}"
        QUIRKS[found.name] = found
        if found.holds:
            found.install()
        return function

    return register
