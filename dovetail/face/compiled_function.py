"""A compiled function: its entries, how a call finds one, and how one is made where none fits."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import gc
import importlib
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.aot.capture_joint import capture_joint
from dovetail.aot.compile_joint import choose_backend, compile_joint, make_entry
from dovetail.aot.first_run import can_put_off, compile_put_off
from dovetail.aot.state import create_state, register_frontend
from dovetail.backends import Backend
from dovetail.errors import (
    BackendError,
    CaptureError,
    DovetailError,
    EagerFallbackWarning,
    GraphBreakError,
    GraphBreakWarning,
    InputError,
    ModuleMadeError,
    RecompileLimitError,
    RecompileLimitWarning,
    UnbuildableError,
    UninitialisedError,
)
from dovetail.events import EventLog
from dovetail.face.loading import load_rules
from dovetail.frontend import native_errors
from dovetail.frontend.breaks.symbols import BreakSymbols, NamesAfter, names_after_break, names_made_at_break
from dovetail.frontend.capture import Capture
from dovetail.frontend.capture import capture as run_frontend
from dovetail.frontend.code.frame import Break, LetGo, LockTaken
from dovetail.frontend.code.points import ResumePoint, flatten, unflatten
from dovetail.frontend.code.resumption import Resumption
from dovetail.frontend.interpreter.generator import cleans_up
from dovetail.frontend.interpreter.machine import Machine
from dovetail.frontend.sizes.size_changes import SizeChanges
from dovetail.guards import AmbientState, GuardSet, are_decided_by, compile_checker
from dovetail.higher_order.capture import lacks_derivative
from dovetail.options import Options
from dovetail.runtime.ended import ended_assumption
from dovetail.runtime.entry import Completed, Entry
from dovetail.torch_private import state as private_state
from dovetail.trace import CaptureSettings, Findings, Retry
from dovetail.trace.settings import GRAPH_BREAKS, SAYS_COMPILING

compile_lock = threading.RLock()


class _Capturing(threading.local):
    """Whether this thread is capturing."""

    active = False


capturing = _Capturing()
# A capture is begun again at each break, with the place to stop known; more often than this something is not deterministic.
_MAXIMUM_ATTEMPTS = 16
_FROM_THE_START: tuple[int, ...] = (-1,)


def _bytecode_frontend(trace: Any, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Capture:
    load_rules()
    return run_frontend(trace, GuardSet(), function, args, kwargs)


register_frontend("bytecode", _bytecode_frontend)


@contextlib.contextmanager
def collection_paused() -> Iterator[None]:
    """No cyclic garbage collection while capturing: nearly all that is made lives on, and going through it again and again
    took 9 % of the capture of a 6-layer GPT.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class CompiledFunction:
    """A function with its compiled entries; made by :func:`compile`."""

    # A tensor that can never be captured is the user's to know of, unless half of the function has run by then.
    _refuses_inputs = True

    def __init__(self, function: Callable[..., Any], options: Options) -> None:
        self.original = function
        self.options = options
        self.backend: Backend = choose_backend(options.backend, options.numerics).with_options(options.backend_options)
        self.entries: list[Entry] = []
        self.events = EventLog()
        self._limit_warned = False
        self._warned: set[tuple[str, str]] = set()
        self._changes = SizeChanges()
        #: What rules have observed in earlier captures, see ``Trace.changes``; shared with continuations.
        self._observed: dict[Any, Any] = {}
        #: Strategies that were given up.
        self._without: frozenset[str] = frozenset()
        # The parts of a loop over a size that changes see all of its sizes: they are not to learn that again, one by one.
        self._sizes_change = False
        self._breaks_a_loop = False
        self._keeps_data_sizes = False
        self._findings = Findings()
        self._continuations: dict[ResumePoint, _Continuation] = {}
        #: What is symbolic at each graph break, by the captures that end there.
        self._exits: dict[ResumePoint, BreakSymbols] = {}
        #: Positions of values that an instruction at an earlier break has made and that are only passed on.
        self._given_at: dict[ResumePoint, set[int]] = {}
        #: What instructions at graph breaks have given, by the names that it has here.
        self._given: frozenset[str] = frozenset()
        if not isinstance(function, torch.nn.Module):
            _look_like(self, function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the first entry whose guards hold; compile one where none do."""
        original = self.original
        # First of all: where torch.compile traces this, it is a constant, and the original becomes part of torch's graph.
        if torch.compiler.is_dynamo_compiling() or private_state.dispatch_mode_count() or capturing.active:
            return original(*args, **kwargs)
        for entry in self.entries:
            tensors = entry.checker.check(original, args, kwargs)
            if tensors is not None:
                if entry is not self.entries[0]:
                    self._ask_first(entry)
                if entry.resume_point is None:
                    return entry.call(original, args, kwargs, tensors)
                return self._go_on(entry.resume_point, [entry.call(original, args, kwargs, tensors)])
        return self._miss(args, kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        """What the function itself carries: attributes that were set on it, ``__defaults__``, ``__code__``."""
        if name == "original":
            raise AttributeError(name)
        return getattr(self.original, name)

    def __repr__(self) -> str:
        return f"<compiled {_name_of(self.original)}>"

    def __copy__(self) -> CompiledFunction:
        """As copying a function: the function itself."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledFunction:
        """Itself for a plain function, which is its own copy too; else the copy compiled anew, with no entries yet."""
        original = copy.deepcopy(self.original, memo)
        return self if original is self.original else type(self)(original, self.options)

    def __reduce__(self) -> Any:
        """Pickled by name where the name leads here, as after ``@dovetail.compile``; else as the original and the options."""
        name = getattr(self.original, "__qualname__", "")
        found: Any = sys.modules.get(getattr(self.original, "__module__", None) or "")
        for part in name.split("."):
            found = getattr(found, part, None)
        return name if found is self else (type(self), (self.original, self.options))

    def _ask_first(self, entry: Entry) -> None:
        """The next call is likely to be of the same kind. An eager entry stays last: its guards let too much pass."""
        if entry.run is None or self.options.entry_order == "newest" or not compile_lock.acquire(blocking=False):
            return
        try:
            # A new list: other threads may be going through the old one.
            self.entries = [entry, *(other for other in self.entries if other is not entry)]
        finally:
            compile_lock.release()

    def _miss(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        waited = not compile_lock.acquire(blocking=False)
        if waited:
            compile_lock.acquire()
        try:
            run = (self._hit(args, kwargs) if waited else None) or self._decide(args, kwargs)
        finally:
            compile_lock.release()
        if any(map(cleans_up, args)):
            # What a capture leaves refers to it, in circles: its ``finally`` would come late.
            gc.collect()
        # The user's code never runs under the lock: it may wait for another thread that wants to compile.
        return run()

    def _hit(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
        """The call with an entry that another thread has compiled meanwhile."""
        for entry in self.entries:
            tensors = entry.checker.check(self.original, args, kwargs)
            if tensors is not None:
                return functools.partial(self._run, entry, args, kwargs, tensors)
        return None

    def _run(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> Any:
        if entry.resume_point is None:
            return entry.call(self.original, args, kwargs, tensors)
        return self._go_on(entry.resume_point, [entry.call(self.original, args, kwargs, tensors)])

    def _decide(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any]:
        """Compile an entry for this call, and say how the call runs: by the entry, or eagerly."""
        original = self.original
        if len(self.entries) >= self.options.recompile_limit:
            return functools.partial(self._over_limit, args, kwargs)
        if self.entries:
            misses = [entry.checker.explain(original, args, kwargs) for entry in self.entries]
            given = next((miss for miss in misses if are_decided_by(miss, self._given)), None)
            chosen, by = (misses[0], {}) if given is None else (given, {"decided_by": "what ran at the graph break"})
            self.events.note("recompile", reason=str(chosen[0]) if chosen else "unknown", **by)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            # What there is to know about modules of several processes.
            importlib.import_module("dovetail.distributed")
        ambient = AmbientState.snapshot()
        self._changes.learn(self.entries, original, args, kwargs)
        self._expect_changes()
        no_symbols = self.backend.takes_program or not self.backend.takes_symbolic_shapes
        dynamic = True if self._sizes_change and self.options.dynamic is None else self.options.dynamic
        policy = self._changes.policy(dynamic, no_symbols, args, kwargs)
        if self.backend.data_sizes:
            # Where the last entry needed such sizes, this one does most likely: a step that reads the optimizer's counts, say.
            policy = dataclasses.replace(policy, data_sizes="keep" if self._keeps_data_sizes else "ask")
        exact = self.backend.numerics == "bitwise"
        settings = CaptureSettings(
            policy,
            exact=exact,
            one_graph=exact and self.options.fullgraph,
            marks_gradients=any(getattr(item, "marks_gradients", False) for item in self.options.passes),
            without=self._without | ({GRAPH_BREAKS} if self.options.fullgraph else set()),
        )
        plan: tuple[int, ...] = ()
        entry: Entry | None = None
        stop = Break("the capture takes another way each time", "report this as a bug")
        # A break in a graph with sizes made of data: without them, it may come to another one.
        unsure: list[Break] = []
        for _ in range(_MAXIMUM_ATTEMPTS):
            guards = GuardSet()
            capturing.active = True
            try:
                stop_before = plan[-1] if plan else 0
                settings = dataclasses.replace(settings, stop_before=stop_before, observed=dict(self._observed))
                entry = self._compile(guards, args, kwargs, settings)
                break
            except Retry as retry:
                before, settings = settings, retry.changed(settings)
                self._without = settings.without - {GRAPH_BREAKS}
                if settings.shapes.data_sizes == "break" != before.shapes.data_sizes or not settings.shapes.allowed:
                    settings = self._without_symbols(retry, before)
                following = _FROM_THE_START
            except Break as raised:
                stop, following = raised, raised.steps if raised.steps and raised.resumable else ()
                # What a pass adds to the graph (an exchange between processes, say), eager would leave out.
                may_run_eagerly = not plan and not self.options.passes
                if (
                    isinstance(raised, LockTaken)
                    and may_run_eagerly
                    and self._is_first("a lock is taken", raised.where)
                ):
                    self.events.note("initialisation", reason="a lock is taken", where=raised.where)
                    return functools.partial(original, *args, **kwargs)
                if raised.otherwise and (self.options.fullgraph or not following):
                    settings, following = settings.giving_up(raised.otherwise), _FROM_THE_START
                    self._without = settings.without - {GRAPH_BREAKS}
                elif settings.shapes.data_sizes == "keep" and (plan or not following):
                    settings, following = self._without_symbols(raised, settings), _FROM_THE_START
            except UninitialisedError as error:
                self.events.note("initialisation", reason=error.what)
                return functools.partial(original, *args, **kwargs)
            except InputError as error:
                if self._refuses_inputs:
                    raise
                stop, following = Break(error.what, error.advice, error.where), ()
            except (CaptureError, BackendError) as error:
                may_run_eagerly = isinstance(error, ModuleMadeError) and not plan and not self.options.passes
                if may_run_eagerly and self._is_first(str(error), error.where):
                    self.events.note("initialisation", reason=str(error))
                    return functools.partial(original, *args, **kwargs)
                if isinstance(error, BackendError) and not settings.shapes.has_symbols:
                    if not self._go_without_default_backend(error):
                        raise
                    continue
                # The state at this break cannot be kept; that of the calling frame may be.
                stop, following = Break(error.what, error.advice, error.where), plan[:-1]
                if settings.shapes.has_symbols and not (plan and isinstance(error, UnbuildableError)):
                    settings, following = self._without_symbols(error, settings), _FROM_THE_START
            except DovetailError:
                raise
            except Exception as error:  # noqa: BLE001  (capture is a transaction: any failure rolls back, then runs eagerly)
                if lacks_derivative(error) and not settings.math_attention:
                    self.events.note("attention by its parts", reason=str(error))
                    settings = dataclasses.replace(settings, math_attention=True)
                elif self._findings.asked_is_compiling and settings.allows(SAYS_COMPILING):
                    # The way that is for compilers has raised; eager takes another.
                    self.events.note("is_compiling() is false", reason=f"{type(error).__name__}: {error}")
                    settings = settings.giving_up(SAYS_COMPILING)
                    self._without = settings.without - {GRAPH_BREAKS}
                elif not settings.shapes.has_symbols:
                    return functools.partial(self._after_exception, error, guards, ambient, args, kwargs)
                else:
                    settings = self._without_symbols(error, settings)
                following = _FROM_THE_START
            finally:
                capturing.active = False
            if following is _FROM_THE_START:
                plan = ()
                unsure.clear()
                continue
            if self.options.fullgraph or not following or following == plan:
                break
            if settings.shapes.data_sizes == "keep":
                unsure.append(stop)
            else:
                self._note_break(stop)
            if stop.varies:
                self._note_loop()
            plan = following
        for item in unsure if entry is not None else ():
            self._note_break(item)
        if entry is None:
            return functools.partial(self._fall_back, stop, guards, ambient, args, kwargs)
        self.entries = [entry, *self.entries]
        self._note_exit(entry)
        tensors = entry.checker.check(original, args, kwargs)
        if tensors is None:
            failures = entry.checker.explain(original, args, kwargs)
            self.entries = [other for other in self.entries if other is not entry]
            reason = f"the guards do not hold right after the capture: {failures[0] if failures else 'unknown'}"
            stop = Break(reason, "report this as a bug")
            return functools.partial(self._fall_back, stop, guards, ambient, args, kwargs)
        return functools.partial(self._run, entry, args, kwargs, tensors)

    def _go_without_default_backend(self, error: BackendError) -> bool:
        """Whether another backend takes the place of one that nobody asked for by name and that does not work here."""
        if self.options.backend is not None or self.backend.name == "aten":
            return False
        self.events.note("backend given up", instead="aten", reason=error.what)
        _warn(
            f'{_name_of(self.original)} runs the captured ATen operators one by one (backend="aten"), because {error.what}'
            "\n  what to do: run `dovetail doctor`, which says what is missing here",
            EagerFallbackWarning,
        )
        self.backend = choose_backend("aten", self.options.numerics)
        return True

    def _without_symbols(self, error: BaseException, settings: CaptureSettings) -> CaptureSettings:
        """The settings after a capture with symbolic sizes has failed: first none that are made of data, then none at all."""
        if settings.shapes.data_sizes == "keep":
            self._keeps_data_sizes = False
            self.events.note("no sizes made of data", reason=f"{type(error).__name__}: {error}")
        else:
            self.events.note("static shapes", reason=f"{type(error).__name__}: {error}")
        return settings.with_fewer_symbols()

    def _is_first(self, reason: str, where: object) -> bool:
        """Whether no call has run eagerly for this reason at this place: what is done there may be done once and for all."""
        key = (reason, str(where))
        is_first = key not in self._warned
        self._warned.add(key)
        return is_first

    def _note_exit(self, entry: Entry) -> None:
        """Record what is symbolic at the graph break that an entry ends at, and what it hands on there."""
        point = entry.resume_point
        symbols = None if point is None else entry.compiled.joint.capture.symbols
        if symbols is not None:
            self._exits[point] = symbols.merged(self._exits.get(point, BreakSymbols()))
            given = {position for position, name in symbols.unchanged.items() if name in self._given}
            self._given_at.setdefault(point, set()).update(given)

    def _expect_changes(self) -> None:
        """Learn what changes without having seen it."""

    def _note_loop(self) -> None:
        """A loop runs for real: what is compiled from here on is made for all sizes."""
        self._breaks_a_loop = True

    def _note_break(self, stop: Break) -> None:
        """Record a graph break, and warn at the first one of each place."""
        self.events.note("graph break", reason=stop.reason, where=stop.where)
        key = (stop.reason, str(stop.where))
        if key not in self._warned:
            self._warned.add(key)
            _warn(_explain_break("the graph is broken", stop), GraphBreakWarning)

    def _has_seen_sizes_change(self) -> bool:
        """Whether any part was called with other sizes: what is reached for the first time after that is made for all sizes."""
        return any(part._changes.has_sizes for part in (self, *self.continuations()))

    def continuations(self) -> list[CompiledFunction]:
        """What runs after graph breaks: one for each place, with entries of its own."""
        return list(self._continuations.values())

    def _go_on(self, point: ResumePoint, results: list[Any]) -> Any:
        """Run the instruction at a graph break for real, then the rest; over and over where the rest breaks again.

        ``results`` holds what the graph has given; it is taken out, so that nobody but the rest refers to the live values.
        """
        values = results.pop()
        if isinstance(values, Completed):
            return values.result
        while True:
            frames = unflatten(point, values)
            if any(map(cleans_up, values)):
                # Its ``finally`` runs as soon as nobody refers to it; a graph would hold all of its arguments to its end.
                self.events.note("graph break", reason="a suspended generator has cleaning up to do", where=None)
                live = values = None
                gc.collect()
                return Machine().run(frames)
            returned = Machine().step_to_work(frames)
            if not frames:
                return returned
            before, live = point, values
            point, values, names = flatten(frames)
            following = self._continuations.get(point)
            if following is None:
                places = names_after_break(live, values, names)
                made = names_made_at_break(live, flatten(unflatten(before, live))[2], values, names)
                following = _Continuation(self, Resumption(point, names), before, places, made)
                following = self._continuations.setdefault(point, following)
            outcome = following(*values)
            if not isinstance(outcome, _Suspended):
                return outcome
            point, values, outcome = outcome.point, outcome.values, None

    def _compile(
        self,
        guards: GuardSet,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        settings: CaptureSettings,
    ) -> Entry:
        def frontend(trace: Any, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Capture:
            load_rules()
            return run_frontend(trace, guards, function, args, kwargs)

        with private_state.preserved_rng_state(), self.events.span("compile"):
            with collection_paused(), self.events.span("capture"), contextlib.ExitStack() as stack:
                state = create_state(stack, self.original, args, kwargs, frontend=frontend, settings=settings)
                self._findings = state.trace.findings
                try:
                    joint = capture_joint(state)
                finally:
                    self._observed.update(self._findings.observed)
                self._keeps_data_sizes = settings.shapes.data_sizes == "keep" or self._findings.asked_numbers
            choices: dict[str, Any] = {
                "options": self.options.backend_options,
                "events": self.events,
                "memory_budget": self.options.memory_budget,
                "numerics": self.options.numerics,
            }
            # A compiler of kernels leaves more garbage than it keeps, 0.6 million objects for a step of 82 parameters: with
            # collection paused, the process needed 100 MiB more.
            with contextlib.nullcontext() if self.backend.slow_to_compile else collection_paused():
                for graph_pass in self.options.passes:
                    joint = joint.apply(graph_pass)
                ended = ended_assumption(guards.so_far(), joint.capture.effects)
                if ended is not None and can_put_off(joint, self.backend):
                    self.events.note("kernels put off", reason=f"the call itself ends what was assumed: {ended}")
                    compiled = compile_put_off(joint, self.backend, **choices)
                else:
                    compiled = compile_joint(None, joint, self.backend, **choices)
                return make_entry(compiled)

    def _after_exception(
        self, error: Exception, guards: GuardSet, ambient: AmbientState, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The program raised while it was captured: eager decides whether that was the user's own error."""
        capturing.active = False
        if self.options.fullgraph:
            if not native_errors.is_marked_native(error):
                self.original(*args, **kwargs)
            raise GraphBreakError(
                f"capture failed with {type(error).__name__}: {error}", advice="drop fullgraph=True to run it eagerly"
            ) from error
        where = getattr(error, "_dovetail_where", None)
        return self._fall_back(
            Break(f"capture failed with {type(error).__name__}: {error}", "", where), guards, ambient, args, kwargs
        )

    def _fall_back(
        self, stop: Break, guards: GuardSet, ambient: AmbientState, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run eagerly from now on wherever the guards collected so far hold, and say so once."""
        capturing.active = False
        self.events.note("graph break", reason=stop.reason, where=stop.where)
        if self.options.fullgraph:
            raise GraphBreakError(stop.reason, where=stop.where, advice=stop.advice) from stop
        name = _name_of(self.original)
        text = _explain_break(f"{name} runs eagerly", stop)
        if isinstance(stop, LetGo) or any(map(cleans_up, args)):
            # The rest of the capture refers to the object, in circles.
            stop.__traceback__ = stop.__cause__ = stop.__context__ = None
            gc.collect()
        result = self.original(*args, **kwargs)
        _warn(text, EagerFallbackWarning)
        checker = compile_checker(guards.freeze(), ambient=ambient)
        with compile_lock:
            self.entries = [*self.entries, Entry(checker, None, None, reason=text)]
        return result

    def _over_limit(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raises = self.options.at_recompile_limit == "error"
        if raises or not self._limit_warned:
            self._limit_warned = True
            failures = self.entries[0].checker.explain(self.original, args, kwargs)
            name = _name_of(self.original)
            text = f"{name} has been compiled {len(self.entries)} times (recompile_limit)"
            reason = f"the last reason: {failures[0] if failures else 'unknown'}"
            if raises:
                raise RecompileLimitError(
                    f"{text}; {reason}", advice='raise recompile_limit, or say at_recompile_limit="eager"'
                )
            _warn(f"{text} and runs eagerly for new inputs; {reason}", RecompileLimitWarning)
        return self.original(*args, **kwargs)


@dataclass(frozen=True)
class _Suspended:
    """What a continuation returns at a graph break: the point and the live values."""

    point: ResumePoint
    values: Any


class _Continuation(CompiledFunction):
    """The rest of a function after a graph break, with entries of its own."""

    _refuses_inputs = False

    def __init__(
        self,
        owner: CompiledFunction,
        resumption: Resumption,
        before: ResumePoint,
        places: NamesAfter,
        made: frozenset[str],
    ) -> None:
        super().__init__(resumption, owner.options)
        self.backend = owner.backend
        self.events = owner.events
        self._warned = owner._warned
        self._observed = owner._observed
        self._without = owner._without
        self._sizes_change = owner._breaks_a_loop or owner._has_seen_sizes_change()
        self._owner = owner
        self._exits = owner._exits
        self._before = before
        self._places = places
        self._given_at = owner._given_at
        given = owner._given_at.get(before, ())
        self._given = made.union(name for position in given for name in places.get(position, ()))

    def _expect_changes(self) -> None:
        parts = self._exits.get(self._before)
        if parts is not None:
            self._changes.expect(parts, self._places)

    def _note_loop(self) -> None:
        super()._note_loop()
        self._owner._note_loop()

    def _go_on(self, point: ResumePoint, results: list[Any]) -> Any:
        values = results.pop()
        if isinstance(values, Completed):
            return values.result
        # The function that the rest belongs to goes on in a loop: a program with a break in a loop needs no deep stack.
        return _Suspended(point, values)


def _name_of(function: Any) -> str:
    """How to call a function in a sentence; an object's own look-up may raise anything."""
    try:
        return str(function.__qualname__)
    except Exception:  # noqa: BLE001  (an attribute of the user's own object)
        return type(function).__name__


def _look_like(compiled: CompiledFunction, function: Any) -> None:
    """What ``functools.update_wrapper`` does, for objects too that cannot be asked."""
    for name in functools.WRAPPER_ASSIGNMENTS:
        try:
            value = getattr(function, name)
        except Exception:  # noqa: BLE001  (an attribute of the user's own object)
            continue
        setattr(compiled, name, value)
    compiled.__wrapped__ = function  # type: ignore[attr-defined]


def _warn(text: str, category: type[Warning]) -> None:
    """Warn at the user's line: the nearest one outside of this package and of torch's module calls."""
    level = 1
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("dovetail", "torch"):
        frame = frame.f_back
        level += 1
    warnings.warn(text, category, stacklevel=level)


def _explain_break(head: str, stop: Break) -> str:
    text = f"{head}: {stop.reason}"
    if stop.where is not None:
        text += f"\n  at {stop.where}"
    if stop.advice:
        text += f"\n  what to do: {stop.advice}"
    return text
