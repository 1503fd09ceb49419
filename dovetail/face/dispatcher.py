"""A callable with its compiled entries: finds the entry for a call, or makes one."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from dovetail.errors import (
    DovetailError,
    EagerFallbackWarning,
    GraphBreakError,
    Interruption,
    RecompileLimitError,
    RecompileLimitWarning,
)
from dovetail.events import EventLog
from dovetail.face.attempts import Attempts, Compiled, EagerFromNowOn, EagerOnce, Outcome, capturing
from dovetail.face.learned import Part
from dovetail.face.loading import load_distributed_rules, load_rules
from dovetail.face.warnings import messages, name_of, warn_user
from dovetail.frontend.code.frame import Break, LetGo
from dovetail.frontend.code.points import ResumePoint
from dovetail.frontend.interpreter.generator import cleans_up
from dovetail.guards import AmbientState, GuardSet, are_decided_by, compile_checker
from dovetail.options import Options
from dovetail.runtime.entry import Entry
from dovetail.torch_private import state as private_state
from dovetail.torch_private.trees import tree_leaves
from dovetail.trace.settings import SAYS_EAGER

#: Held while a call is compiled, never while the user's code runs: that may wait for another thread that wants to compile.
compile_lock = threading.RLock()
if hasattr(os, "register_at_fork"):
    # A child has no thread that could release it.
    os.register_at_fork(after_in_child=compile_lock._at_fork_reinit)  # type: ignore[attr-defined]
Run = Callable[[], Any]
"""How a call runs, once that is decided."""
#: Asked at each call that no entry takes, with the dispatcher and the arguments: how it runs inside of what surrounds it, or None.
SURROUNDINGS: list[Callable[..., Run | None]] = []


@contextlib.contextmanager
def _taken_back(*values: Any) -> Iterator[None]:
    """Give plain tensors their values back, and the CPU's generator its state, after a block that does not raise."""
    plain = [item.detach() for item in tree_leaves(values) if type(item) is torch.Tensor and not item.is_inference()]
    before, state = [(item, item._version, item.clone()) for item in plain], torch.get_rng_state()
    yield
    torch.set_rng_state(state)
    for item, version, copy in before:
        if item._version != version:
            item.copy_(copy)


class Dispatcher:
    """A callable with its entries.

    ::

        __call__
          checker.check            of each entry, the most recent first; a hit runs the entry
          _miss                    what surrounds the call may decide (``SURROUNDINGS``)
            decide                 under the lock
              find                 another thread may have compiled the entry meanwhile
            _compile               attempts, see :class:`dovetail.face.attempts.Attempts`
              _run                 by the new entry
              _fall_back           eagerly, now and whenever the same guards hold
              _over_limit          eagerly, without another entry
    """

    def __init__(self, part: Part) -> None:
        self.original = part.function
        self.options = part.options
        self.entries: list[Entry] = []
        self._part = part
        self._limit_warned = False

    @property
    def events(self) -> EventLog:
        """The log of decisions with their reasons, and of timed stages."""
        return self._part.shared.events

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the first entry whose guards hold; compile one where none do."""
        original = self.original
        # First of all: where torch.compile traces this, it is a constant, and the original becomes part of torch's graph.
        if torch.compiler.is_dynamo_compiling() or private_state.dispatch_mode_count() or capturing.active:
            return original(*args, **kwargs)
        try:
            for entry in self.entries:
                tensors = entry.checker.check(original, args, kwargs)
                if tensors is not None:
                    if entry is not self.entries[0]:
                        self._ask_first(entry)
                    return self._run(entry, args, kwargs, tensors)
        except Exception as error:
            messages().without_internals(error)
            raise
        with messages().Telling():
            return self._miss(args, kwargs)

    def take_options(self, options: Options) -> None:
        """Compile later entries with other options."""
        self.options, self._part = options, dataclasses.replace(self._part, options=options)

    def _go_on(self, point: ResumePoint, results: list[Any]) -> Any:
        """Go on at a graph break with the live values, the only item of ``results``, which is taken out."""
        raise NotImplementedError

    # --- finding an entry ---------------------------------------------------------------------------------------------

    def _ask_first(self, entry: Entry) -> None:
        """The next call is likely to be of the same kind. An eager entry stays last: its guards let too much pass."""
        if entry.run is None or not compile_lock.acquire(blocking=False):
            return
        try:
            # A new list: other threads may be going through the old one.
            self.entries = [entry, *(other for other in self.entries if other is not entry)]
        finally:
            compile_lock.release()

    def _miss(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        load_rules()
        decided = (surrounding(self, args, kwargs) for surrounding in SURROUNDINGS)
        return (next(filter(None, decided), None) or self.decide(args, kwargs))()

    def decide(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Run:
        """Decide how a call runs that missed; another thread may have compiled an entry for it meanwhile."""
        with compile_lock:
            found = self.find(args, kwargs, self.entries)
            run = found[1] if found else self._compile(args, kwargs)
        if any(map(cleans_up, args)):
            # A capture refers to it in circles: its ``finally`` would come late.
            gc.collect()
        return run

    def find(self, args: tuple[Any, ...], kwargs: dict[str, Any], entries: Iterable[Entry]) -> tuple[Entry, Run] | None:
        """The first of the entries that takes the call, and the call with it."""
        for entry in entries:
            tensors = entry.checker.check(self.original, args, kwargs)
            if tensors is not None:
                return entry, functools.partial(self._run, entry, args, kwargs, tensors)
        return None

    def _run(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> Any:
        if entry.resume_point is None:
            return entry.call(self.original, args, kwargs, tensors)
        return self._go_on(entry.resume_point, [entry.call(self.original, args, kwargs, tensors)])

    # --- making an entry ----------------------------------------------------------------------------------------------

    def _compile(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Run:
        """Compile an entry for this call; returns how the call runs."""
        if len(self.entries) >= self.options.recompile_limit:
            return functools.partial(self._over_limit, args, kwargs)
        ambient, was_told = AmbientState.snapshot(), self._says_compiling
        match self._attempt(args, kwargs):
            case Compiled(entry, tensors):
                if self._says_compiling and not was_told:
                    # The others may have been told otherwise, and one function gets one answer.
                    self.entries = []
                self.entries = [entry, *self.entries]
                return functools.partial(self._run, entry, args, kwargs, tensors)
            case EagerOnce():
                return functools.partial(self.original, *args, **kwargs)
            case EagerFromNowOn() as outcome:
                return functools.partial(self._fall_back, outcome, ambient, args, kwargs)

    def _attempt(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Outcome:
        try:
            load_distributed_rules()
            self._learn(args, kwargs)
            return Attempts(self._part, args, kwargs).run()
        except DovetailError:
            raise
        except Interruption as interruption:
            raise interruption.args[0] from None
        except Exception as error:  # noqa: BLE001  (not the program's: eager takes the call)
            reason = f"Dovetail has failed with {type(error).__name__}: {error}"
            return EagerFromNowOn(Break(reason, "report this as a bug"), GuardSet(), error)

    def _learn(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note why no entry takes the call, and the sizes and numbers that have changed."""
        call = (self.original, args, kwargs)
        if self.entries:
            entries = self.entries if self._part.made_at_break else self.entries[:1]
            misses = [entry.checker.explain(*call) for entry in entries]
            by_break = next((miss for miss in misses if are_decided_by(miss, self._part.made_at_break)), None)
            details = {} if by_break is None else {"decided_by": "what ran at the graph break"}
            failures = by_break or misses[0]
            self.events.note("recompile", reason=str(failures[0]) if failures else "unknown", **details)
        part, shared = self._part, self._part.shared
        changes = shared.part(part.point).changes.with_numbers(part.changing)
        shared.learn_part(part.point, changes=changes.with_call(self.entries, *call))

    # --- eager --------------------------------------------------------------------------------------------------------

    def _fall_back(
        self, outcome: EagerFromNowOn, ambient: AmbientState, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run eagerly from now on wherever the guards collected so far hold, and say so once; an error with ``fullgraph``."""
        stop, error = outcome.stop, outcome.error
        self.events.note("graph break", reason=stop.reason, where=stop.where, advice=stop.advice)
        if self.options.fullgraph:
            if error is not None:
                # Where the program itself raises, this is its error; that of a fake kernel has another text, and no line.
                with _taken_back(args, kwargs):
                    self.original(*args, **kwargs)
            advice = stop.advice or "drop fullgraph=True to run it eagerly"
            raise GraphBreakError(stop.reason, where=messages().place(stop.where), advice=advice) from error or stop
        text = messages().explain_break(f"{name_of(self.original)} runs eagerly", stop)
        if isinstance(stop, LetGo) or any(map(cleans_up, args)):
            # The frames of the capture refer to the object, in circles.
            stop.__traceback__ = stop.__cause__ = stop.__context__ = None
            gc.collect()
        result = self.original(*args, **kwargs)
        if self._part.shared.is_news(text, None):
            warn_user(text, EagerFallbackWarning)
        # Where the guards fail, the next call is attempted like this one.
        with contextlib.suppress(Exception), compile_lock:
            checker = compile_checker(outcome.guards.freeze(), ambient=ambient)
            self.entries = [*self.entries, Entry(checker, None, None, reason=text)]
        return result

    @property
    def _says_compiling(self) -> bool:
        return SAYS_EAGER in self._part.shared.learned.without

    def _over_limit(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Eager would take the other branch than the one that was compiled.
        raises = self.options.at_recompile_limit == "error" or self._says_compiling
        if raises or not self._limit_warned:
            self._limit_warned = True
            failures = self.entries[0].checker.explain(self.original, args, kwargs)
            text = f"{name_of(self.original)} has been compiled {len(self.entries)} times (recompile_limit)"
            reason = f"the last reason: {failures[0] if failures else 'unknown'}"
            if raises:
                raise RecompileLimitError(
                    f"{text}; {reason}",
                    advice='raise recompile_limit, or say at_recompile_limit="eager" (without a branch on is_compiling())',
                )
            warn_user(f"{text} and runs eagerly for new inputs; {reason}", RecompileLimitWarning)
        return self.original(*args, **kwargs)
