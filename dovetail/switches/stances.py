"""Whether calls are compiled, or run eagerly: the stances of ``torch.compiler.set_stance``, and our own.

A stance is state of the process, as torch's is. While it is another one than "default", no entry takes a call by itself, and
:func:`under_a_stance` decides.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from dovetail.errors import OptionError, RecompileError, did_you_mean
from dovetail.face.dispatcher import SURROUNDINGS, Dispatcher, Run
from dovetail.face.warnings import name_of
from dovetail.guards.ambient import WATCHED, Watched
from dovetail.switches import resets, settings
from dovetail.torch_private import dynamo as private_dynamo
from dovetail.torch_private.guard_managers import INLINED

Function = TypeVar("Function", bound=Callable[..., Any])

#: The meaning of each stance.
STANCES = {
    "default": "compile whatever no entry takes",
    "force_eager": "run everything eagerly",
    "eager_on_recompile": "use the entries that there are; run eagerly what none of them takes",
    "fail_on_recompile": "use the entries that there are; raise RecompileError for what none of them takes",
    "eager_then_compile": "run the first call of each function eagerly, compile the second one",
    "aot_eager_then_compile": "as eager_then_compile",
}
_SWITCHES = ("DOVETAIL_DISABLE", "TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE")


class _Here(threading.local):
    """The stance of this thread, which goes before that of the process."""

    stance: str | None = None


_here = _Here()
_is_off = any(os.environ.get(name) == "1" for name in _SWITCHES)
_ours: str | None = "force_eager" if _is_off else None
_began_eagerly: weakref.WeakSet[Dispatcher] = weakref.WeakSet()


def stance_in_force() -> str:
    """The stance of this thread, else that of :class:`set_stance`, else that of ``torch.compiler.set_stance``.

    >>> with set_stance("force_eager"):
    ...     stance_in_force()
    'force_eager'
    """
    return _here.stance or _ours or private_dynamo.compile_stance()


@contextlib.contextmanager
def stance_of_this_thread(stance: str) -> Iterator[None]:
    """A block with this stance, whatever the process says."""
    before, _here.stance = _here.stance, stance
    try:
        yield
    finally:
        _here.stance = before


class set_stance:
    """Set whether calls of compiled functions are compiled: at once, for a ``with`` block, or as a decorator for each call.

    ``stance`` is one of "default", "force_eager", "eager_on_recompile", "fail_on_recompile", "eager_then_compile" and
    "aot_eager_then_compile", as for ``torch.compiler.set_stance``. That one holds for Dovetail too; this one leaves torch.compile
    alone, and goes before it unless it is "default".

    >>> import torch, dovetail
    >>> double = dovetail.compile(lambda x: x * 2, backend="aten")
    >>> with dovetail.set_stance("force_eager"):
    ...     print(double(torch.ones(2)), len(double.entries))
    tensor([2., 2.]) 0
    """

    def __init__(self, stance: str = "default") -> None:
        if stance not in STANCES:
            advice = did_you_mean(stance, STANCES, f"the stances are: {', '.join(STANCES)}")
            raise OptionError(f"there is no stance {stance!r}", advice=advice)
        self.stance = stance
        self._before = _put(None if stance == "default" else stance)

    def __enter__(self) -> None:
        _put(None if self.stance == "default" else self.stance)

    def __exit__(self, *error: object) -> None:
        _put(self._before)

    def __call__(self, function: Function) -> Function:
        """A function during whose calls the stance is in force."""
        _put(self._before)

        @functools.wraps(function)
        def with_stance(*args: Any, **kwargs: Any) -> Any:
            with type(self)(self.stance):
                return function(*args, **kwargs)

        return with_stance  # type: ignore[return-value]


def _put(stance: str | None) -> str | None:
    global _ours
    before, _ours = _ours, "force_eager" if _is_off else stance
    return before


def under_a_stance(dispatcher: Dispatcher, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Run | None:
    """Decide how a call that missed runs under a stance; None where it is compiled as always."""
    resets.follow_torch()
    changed = settings.changed_in_torch()
    settings.apply_to(dispatcher, changed)
    for wish in private_dynamo.wishes_of_stance():
        settings.say_in_vain(f"torch.compiler.set_stance({wish}=...)")
    stance, eagerly = stance_in_force(), functools.partial(dispatcher.original, *args, **kwargs)
    if stance == "force_eager" or changed.get("disable"):
        return eagerly
    if stance == "default":
        if dispatcher.entries and changed.get("error_on_recompile"):
            _refuse(dispatcher, args, kwargs, "torch._dynamo.config.error_on_recompile is set")
        return None
    with stance_of_this_thread("default"):
        hit = dispatcher.find(args, kwargs, dispatcher.entries)
        if hit is not None:
            return hit[1]
        if stance == "fail_on_recompile":
            _refuse(dispatcher, args, kwargs, f"the stance {stance!r} is in force")
        if stance == "eager_on_recompile":
            return eagerly
        if stance.endswith("then_compile") and not dispatcher.entries and dispatcher not in _began_eagerly:
            _began_eagerly.add(dispatcher)
            return eagerly
        others = (one(dispatcher, args, kwargs) for one in SURROUNDINGS if one is not under_a_stance)
        return next(filter(None, others), None) or dispatcher.decide(args, kwargs)


def _refuse(dispatcher: Dispatcher, args: tuple[Any, ...], kwargs: dict[str, Any], because: str) -> None:
    failures = dispatcher.entries[0].checker.explain(dispatcher.original, args, kwargs) if dispatcher.entries else []
    reason = f"the last entry does not take the call: {failures[0]}" if failures else "it has not been compiled yet"
    raise RecompileError(
        f"{name_of(dispatcher.original)} would be compiled, and {because}; {reason}",
        advice='call it once before under the stance "default" with inputs of this kind, or mark what changes as dynamic',
    )


WATCHED.append(Watched(stance_in_force, lambda: None))
INLINED[stance_in_force] = (
    "(here.stance or stances._ours or stance_of_torch())",
    {"here": _here, "stances": sys.modules[__name__], "stance_of_torch": private_dynamo.compile_stance},
)
SURROUNDINGS.insert(0, under_a_stance)
