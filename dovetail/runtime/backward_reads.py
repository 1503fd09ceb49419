"""Python values that hooks and custom backwards read, checked again when the backward runs.

Eager runs a hook, or the backward of a custom ``torch.autograd.Function``, at every backward, and it reads what is there by
then. A compiled backward has read it at the capture, and the guards hold it at the call. What was changed in between is noticed
here, so that no gradient is made of what was there before.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dovetail.errors import ChangedReadError, UserLocation
from dovetail.guards import ArgumentSource, FrozenGuards, Guard, KeywordSource, TensorMatch, compile_checker
from dovetail.guards.guard import root_of
from dovetail.guards.reading import FETCH_ERRORS

_ADVICE = (
    "change it after the backward, hand it over as an argument or a closure variable made in the function, "
    "or register the hook outside of the compiled function"
)


class BackwardReads:
    """The values that the backward of one entry needs unchanged since the call."""

    def __init__(self, guards: Sequence[Guard]) -> None:
        plain = tuple(guard for guard in guards if not isinstance(guard.predicate, TensorMatch))
        self.checker = compile_checker(FrozenGuards(plain, ()))
        self.objects = tuple(guard for guard in guards if isinstance(guard.predicate, TensorMatch))
        roots = [root_of(guard.source) for guard in guards]
        self._arguments = frozenset(root.index for root in roots if isinstance(root, ArgumentSource))
        self._keywords = frozenset(root.keyword for root in roots if isinstance(root, KeywordSource))

    def of_call(
        self, callee: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], tensors: Sequence[torch.Tensor]
    ) -> CallReads:
        """The values that must stay unchanged after this call. Arguments that nothing is read from are not kept."""
        kept = tuple(value if index in self._arguments else None for index, value in enumerate(args))
        named = {key: value for key, value in kwargs.items() if key in self._keywords}
        objects = [
            tensors[guard.predicate.index]
            if guard.source.makes_new and isinstance(guard.predicate, TensorMatch)
            else guard.source.fetch(callee, kept, named)
            for guard in self.objects
        ]
        return CallReads(self, (callee, kept, named), objects)


class CallReads:
    """The values of one call: the objects that were read, and the versions of tensors."""

    def __init__(
        self, reads: BackwardReads, call: tuple[Any, tuple[Any, ...], dict[str, Any]], objects: list[Any]
    ) -> None:
        self._reads = reads
        self._call = call
        self._objects = objects
        self._versions: list[int] = []

    def note_versions(self) -> None:
        """The call has ended, with its own writes."""
        self._versions = [value._version if isinstance(value, torch.Tensor) else 0 for value in self._objects]

    def check(self) -> None:
        """Raise :class:`ChangedReadError` for what was changed since."""
        if self._reads.checker.check(*self._call) is None:
            failures = self._reads.checker.explain(*self._call)
            first = failures[0] if failures else None
            raise _changed(first.sentence if first else "something that it reads", first.location if first else None)
        for guard, before, version in zip(self._reads.objects, self._objects, self._versions, strict=True):
            if isinstance(before, torch.Tensor):
                if not guard.source.makes_new and self._fetch(guard) is not before:
                    raise _changed(f"`{guard.source.name}` is another tensor", guard.location)
                if before._version != version:
                    raise _changed(f"`{guard.source.name}` was written to", guard.location)
            else:
                now = self._fetch(guard)
                if type(now) is not type(before) or now != before:
                    raise _changed(f"`{guard.source.name}` was {before!r}, is {now!r}", guard.location)

    def _fetch(self, guard: Guard) -> Any:
        try:
            return guard.source.fetch(*self._call)
        except FETCH_ERRORS:
            return None


def _changed(sentence: str, where: UserLocation | None) -> ChangedReadError:
    return ChangedReadError(
        "a hook or the backward of a custom autograd.Function reads what was changed since the compiled function was called: "
        + sentence,
        where=where,
        advice=_ADVICE,
    )


class _Pending(threading.local):
    reads: CallReads | None = None


_pending = _Pending()


def pending_reads() -> CallReads | None:
    """The reads of the call that is running."""
    return _pending.reads


class reads_of:
    """Autograd nodes that are made in the block look at ``reads`` before their backward runs."""

    __slots__ = ("_before", "_reads")

    def __init__(self, reads: CallReads | None) -> None:
        self._reads = reads

    def __enter__(self) -> None:
        self._before, _pending.reads = _pending.reads, self._reads

    def __exit__(self, *error: object) -> None:
        _pending.reads = self._before
