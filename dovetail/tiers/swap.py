"""The runtime function of a graph in tiers: operators first, and from some call on kernels.

::

    run_operators_first         the hook in place of the steps of a compilation
      SwappingRun               called like a runtime function
        _ask_for_kernels        at the second call: graphs for the backend; the background compiles them
        _look                   at later calls: are they there?
          _swap                 takes them from the cache; from this call on they run
            _tune               at all later calls, where variants of them are to compete
          _stay                 anything wrong: tier 0 goes on, with one warning

Forward and backward swap together, as what is saved between them differs: a call that ran on tier 0 has its backward there, and so
has a region of ``torch.utils.checkpoint``, which is computed again by what has computed it first. The
next order of a graph is a graph of its own, with tiers of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dovetail.aot.backward_graphs import Pattern, taking
from dovetail.aot.compile_joint import run_steps
from dovetail.aot.compiled_graph import CompiledGraph
from dovetail.aot.joint_graph import JointGraph
from dovetail.aot.steps import Lowering, instead_of_steps
from dovetail.backends.common.outputs import own_copy
from dovetail.cache.unportable import UnportableError
from dovetail.errors import EagerFallbackWarning
from dovetail.events import EventLog
from dovetail.face.compiled_function import CompiledFunction
from dovetail.face.dispatcher import compile_lock
from dovetail.face.module import CompiledModule
from dovetail.guards import GuardSet
from dovetail.guards.ambient import without_autocast
from dovetail.runtime.function import RuntimeFunction
from dovetail.tiers import kept_steps, process
from dovetail.tiers.check import difference_of_tiers
from dovetail.tiers.choice import CACHES, OPERATORS, Tiers, has_changing_numbers, tiers_of, why_not
from dovetail.tiers.compiling import make_job
from dovetail.tiers.kept_graphs import has_sizes
from dovetail.tiers.later import Collector
from dovetail.tiers.progress import Progress, stage
from dovetail.tiers.tuning import Tuning
from dovetail.tiers.waiting import compile_or_take, from_cache
from dovetail.torch_private import autograd as private_autograd
from dovetail.torch_private import checkpoints as private_checkpoints
from dovetail.torch_private import state as private_state
from dovetail.torch_private import tracing as private_tracing
from dovetail.torch_private.assumptions import Aside
from dovetail.trace import ShapeGuards, shape_guards

#: The graphs of each compiled function that have not ended up on a tier, by the function's log.
_UNSETTLED: weakref.WeakKeyDictionary[EventLog, weakref.WeakSet[SwappingRun]] = weakref.WeakKeyDictionary()
#: The logs of functions that have warned: what is wrong with one graph is wrong with the next one too.
_WARNED: weakref.WeakSet[EventLog] = weakref.WeakSet()


@instead_of_steps
def run_operators_first(lowering: Lowering) -> CompiledGraph | None:
    """Tier 0 at once, where the backend is to compile in the background."""
    tiers = tiers_of(lowering)
    if tiers is None:
        return None
    events, reason = lowering.settings.events, why_not(lowering, tiers)
    if reason is None:
        kept = from_cache(lowering, tiers)
        if kept is not None:
            return kept
        try:
            process.worker().start()
        except OSError as error:
            reason = f"no background process can be started ({error})"
    if reason is not None:
        if tiers.mode == "auto":
            events.note("waits for kernels", reason=reason)
        if tiers.tune:
            events.note("not tuned", reason=reason)
        return compile_or_take(lowering, tiers)
    # The steps leave marks on the nodes of the graph that they are given: what tier 0 saves is not what tier 1 saves.
    unmarked = lowering.joint.with_graph(own_copy(lowering.joint.graph_module, private_tracing.lazy_graph_module))
    settings = dataclasses.replace(lowering.settings, options={})
    first = run_steps(lowering.with_(backend=OPERATORS, settings=settings))
    run = SwappingRun(first, lowering.with_(joint=unmarked), tiers)
    if has_changing_numbers(lowering.joint):
        try:
            # A step's assumption about a number is a guard of the entry, and no guard can be added later.
            run.make_graphs()
        except Exception as error:  # noqa: BLE001  (whatever a step may raise: the user sees it where the graph is compiled at once)
            events.note("waits for kernels", reason=f"{type(error).__name__}: {error}")
            return None
    events.note("tier 0", reason=f"runs by ATen operators until {tiers.backend.name} has compiled it")
    _UNSETTLED.setdefault(events, weakref.WeakSet()).add(run)
    return dataclasses.replace(first, run=run, backend=lowering.backend)


class SwappingRun:
    """The runtime function of one graph. ``tier`` is what it runs on; ``state`` says in words what comes."""

    def __init__(self, first: CompiledGraph, lowering: Lowering, tiers: Tiers) -> None:
        self.tier = 0
        self._state = "kernels are asked for at the second call"
        self._first = first
        self._lowering: Lowering | None = lowering
        self._tiers = tiers
        self._run: RuntimeFunction = first.run
        self._collector = Collector(tiers.backend, tiers)
        self._second: CompiledGraph | None = None
        self._assumed: ShapeGuards | None = None
        self._key: str | None = None
        self._job: process.Job | None = None
        self._asked = 0.0
        self._progress: Progress | None = None
        self._calls = 0
        #: In its blocks, what the kernels assume of symbolic sizes is assumed: what runs by operators is for all of them.
        self._sizes = (
            Aside(lowering.joint.fake_mode.shape_env) if has_sizes(lowering.joint) else contextlib.nullcontext()
        )
        self._lock = threading.RLock()
        #: Work done before a call; None once nothing is to come.
        self._before: Callable[[], object] | None = self._count_calls
        self._check_next = False
        self._details: Mapping[str, float] = {}
        self._tuning: Tuning | None = None

    def __call__(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Run the graph on the tier of the moment; in a region that is computed again, on that of its forward."""
        region = private_checkpoints.open_region() if private_autograd.has_saved_tensor_hooks() else None
        if region is not None and self in region[0].runs:
            return region[0].runs[self](inputs)  # type: ignore[no-any-return]
        if self._before is not None:
            self._take_turn(inputs)
            job = self._job
            if job is not None:
                job.let_it_work()
        elif self._tuning is not None:
            self._tune(self._tuning)
        if region is not None:
            region[0].runs[self] = self._run
        return self._run(inputs)

    @property
    def state(self) -> str:
        """In words, what it runs by and what comes."""
        return self._state if self._tuning is None else f"{self._state}{self._tuning}"

    @property
    def is_settled(self) -> bool:
        """Whether nothing more is to come."""
        return self._before is None

    @property
    def is_to_check(self) -> bool:
        """Whether the kernels are there, and the next call compares them with tier 0."""
        return self._check_next

    def __repr__(self) -> str:
        return f"<tier {self.tier}: {self.state}>"

    # --- between two calls --------------------------------------------------------------------------------------------

    def _take_turn(self, inputs: list[torch.Tensor]) -> None:
        """One step towards the next tier. Another thread's step, or another compilation, is not waited for."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            if self._before is None or not compile_lock.acquire(blocking=False):
                return
            try:
                self._before()
                if self._check_next:
                    self._check(inputs)
            finally:
                compile_lock.release()
        finally:
            self._lock.release()

    def _tune(self, tuning: Tuning) -> None:
        """Go on with the tuning, unless another thread does, or compiles."""
        if not compile_lock.acquire(blocking=False):
            return
        try:
            tuning.step()
            if tuning.is_done:
                self._state, self._tuning = self.state, None
        finally:
            compile_lock.release()
        tuning.let_it_work()

    def _count_calls(self) -> None:
        self._calls += 1
        if self._calls >= 2:
            self._ask_for_kernels()

    def _ask_for_kernels(self) -> None:
        """Make the graphs for the backend, and have the background process compile them."""
        backend, events = self._tiers.backend, self._events
        self._before = self._look
        self._asked = time.monotonic()
        try:
            self.make_graphs()
        except Exception as error:  # noqa: BLE001  (whatever a backend may raise)
            self._stay(f"{type(error).__name__}: {error}")
            return
        assert self._second is not None
        if self._second.lowering.gradients_dropped_first != self._first.lowering.gradients_dropped_first:
            # The entry has dropped these gradients by now; a graph that needs another set of them cannot take over.
            self._stay("its kernels would need other gradients to be dropped first", is_news=False)
            return
        if self._tiers.tune:
            self._tuning = Tuning(self._collector.graphs, backend, self._first.joint.fake_mode, events)
        try:
            with self._sizes:
                job = make_job(backend.name, self._collector.graphs, self._first.joint.fake_mode.shape_env)
            self._job = process.worker().submit(job)
        except UnportableError as error:
            self._compile_here(str(error))
            return
        except OSError as error:
            self._stay(f"the background process cannot be given the graph ({error})")
            return
        except Exception as error:  # noqa: BLE001  (a graph that cannot be written down in a way that nobody has thought of)
            self._stay(f"{type(error).__name__}: {error}")
            return
        weakref.finalize(self, self._job.cancel).atexit = False
        count = len(job["graphs"])
        self._state = f"{backend.name} compiles {count} graph{'s' * (count > 1)} in the background"
        self._progress = Progress(self._state, lambda job=self._job: job.stage)  # type: ignore[misc]
        events.note("tier 1 asked for", backend=backend.name, graphs=count)

    def make_graphs(self) -> None:
        """Make the graphs for the backend, unless they are there; raises what a step raises."""
        lowering, self._lowering = self._lowering, None
        if lowering is not None:
            with private_state.preserved_rng_state(), self._sizes, stage("making graphs for the backend"):
                self._key = kept_steps.key_of_steps(lowering)
                used = self._patterns()
                self._second = run_steps(self._for_backend(lowering, used[0] if used else None))
                backward = self._second.lowering.backward
                if backward is not None:
                    for pattern in used[1:]:
                        backward(pattern)

    def _patterns(self) -> Sequence[Pattern]:
        """The tangents of the backwards that have run on tier 0."""
        backward = self._first.lowering.backward
        return [] if backward is None else [item for item in list(backward.used) if any(item)]

    def _for_backend(self, lowering: Lowering, expected: Pattern | None) -> Lowering:
        """The compilation with a backend that puts off compiling, for the further inputs that tier 0 takes."""
        settings, offered = lowering.settings, set(self._first.lowering.reused)
        find = settings.find_reused
        if find is not None:

            def find_offered(joint: JointGraph) -> Mapping[torch.fx.Node, int]:
                return {node: number for node, number in find(joint).items() if number in offered}

            settings = dataclasses.replace(settings, find_reused=find_offered)
        settings = dataclasses.replace(settings, expected=expected)
        return lowering.with_(backend=self._collector.backend, settings=settings)

    def _look(self) -> None:
        """Are the kernels there?"""
        assert self._job is not None
        answer = self._job.answer()
        if self._progress is not None:
            self._progress.look()
        if answer is None or torch.are_deterministic_algorithms_enabled():
            return
        if answer.status == "compiled":
            self._swap(answer.seconds)
        elif answer.status == "unfit":
            self._compile_here(answer.reason)
        else:
            self._stay(answer.reason, is_news=answer.status != "left")

    def _compile_here(self, reason: str) -> None:
        """The background cannot do it: compile the graphs in this process, as without tiers."""
        self._events.note("compiled in this process", reason=reason)
        self._take_kernels(contextlib.nullcontext(), 0.0)

    def _swap(self, seconds: float) -> None:
        """Take the compiled graphs from the cache."""
        self._take_kernels(CACHES[self._tiers.backend.name].only_from_cache(), seconds)

    def _take_kernels(self, how: contextlib.AbstractContextManager[None], seconds: float) -> None:
        start = time.monotonic()
        assert self._second is not None
        try:
            with private_state.preserved_rng_state(), without_autocast(), self._sizes, how:
                self._collector.compile_all()
                self._assumed = self._assumed_of_sizes()
            # Tuned kernels are for this machine, and for calls that ask for them.
            kept_steps.keep(None if self._tiers.tune else self._key, self._second.lowering)
        except Exception as error:  # noqa: BLE001  (whatever a backend may raise)
            self._stay(f"{type(error).__name__}: {error}")
            return
        self._have_kernels({"compiled": seconds, "loaded": time.monotonic() - start})

    def _have_kernels(self, details: Mapping[str, float]) -> None:
        """They are there: they run from now on, or when the next call has compared them."""
        if self._tiers.check_swap:
            self._check_next, self._details, self._before = True, details, dict
            self._state = "the next call compares the kernels with ATen operators"
        else:
            self._go_over(details)

    def _assumed_of_sizes(self) -> ShapeGuards | None:
        """The assumptions of the kernels about symbolic sizes, with those of the entry."""
        joint = self._first.joint
        return shape_guards(joint.fake_mode.shape_env, joint.capture.bindings) if has_sizes(joint) else None

    def _go_over(self, details: Mapping[str, float]) -> None:
        """From the next line on, the kernels run."""
        second = self._second
        assert second is not None
        waited = time.monotonic() - self._asked
        self._events.note("tier 1", backend=self._tiers.backend.name, after=waited, **details)
        order = self._places_of_reused(second)
        run = second.run if order is None else taking(second.run, order)
        self._run = run if self._assumed is None else self._where_assumed(self._assumed, run)
        self.tier = 1
        self._settle(f"runs by the kernels of {self._tiers.backend.name}", "done")

    def _where_assumed(self, assumed: ShapeGuards, run: RuntimeFunction) -> RuntimeFunction:
        """Run the kernels where what they assume holds. For other sizes the entry is found no longer, and they get their own."""
        holds, operators = assumed.holds, self._first.run
        guards = self._first.joint.capture.guards
        entry = guards.freeze().shapes if isinstance(guards, GuardSet) and guards.is_frozen else None
        if isinstance(entry, ShapeGuards):
            # In place: the check of the guards calls this very function.
            entry.holds.__code__, entry.sentences = holds.__code__, assumed.sentences
        # A call may have been let in before, also by another thread; the graph of a next order has no guards.
        return lambda inputs: run(inputs) if holds(inputs) else operators(inputs)

    def _places_of_reused(self, second: CompiledGraph) -> list[int] | None:
        """Which of the values that tier 0 takes tier 1 takes; None: all of them."""
        if second.lowering.reused == self._first.lowering.reused:
            return None
        count = len(second.joint.spec.input_requires_grad)
        return [
            *range(count),
            *(count + self._first.lowering.reused.index(number) for number in second.lowering.reused),
        ]

    def _check(self, inputs: list[torch.Tensor]) -> None:
        """Compare both tiers on copies of these inputs, before the new one runs for the first time."""
        assert self._second is not None
        if self._assumed is not None and not self._assumed.holds(inputs):
            return
        self._check_next = False
        if self._second.lowering.reused or self._first.lowering.reused:
            self._events.note("swap not checked", reason="the graph takes values that another one has saved")
        else:
            found = difference_of_tiers(self._first, self._second, inputs, self._tiers.backend)
            if found:
                self._stay(f"its kernels give other results than ATen operators: {found}")
                return
            self._events.note("swap checked")
        self._go_over(self._details)

    def _stay(self, reason: str, *, is_news: bool = True) -> None:
        """Tier 0 goes on for good."""
        self._tuning = None
        self._events.note("stays on tier 0", reason=reason)
        self._settle(f"stays on ATen operators: {reason}", "given up")
        if is_news and self._events not in _WARNED:
            _WARNED.add(self._events)
            warnings.warn(
                f"a compiled graph goes on by ATen operators, as {self._tiers.backend.name} has compiled no kernels for it in the "
                f'background: {reason}\n  what to do: run `dovetail doctor`, or compile with tiers="wait" to see the whole error',
                EagerFallbackWarning,
                stacklevel=5,
            )

    def _settle(self, state: str, how: str) -> None:
        """Nothing more is to come."""
        self._state, self._before, self._job = state, None, None
        if self._progress is not None:
            self._progress.end(how)
        _UNSETTLED.get(self._events, weakref.WeakSet()).discard(self)

    @property
    def _events(self) -> EventLog:
        return self._first.events

    # --- waiting ------------------------------------------------------------------------------------------------------

    def wait(self, deadline: float) -> None:
        """Go on until nothing more is to come, or to the deadline."""
        while self._before is not None and time.monotonic() < deadline:
            with self._lock, compile_lock:
                if self._before == self._count_calls:
                    self._ask_for_kernels()
                elif self._before is not None and not self._check_next:
                    self._before()
            if self._check_next or torch.are_deterministic_algorithms_enabled():
                return
            if self._before is not None:
                time.sleep(0.01)


def unsettled(events: EventLog) -> list[SwappingRun]:
    """The graphs of a compiled function that have not ended up on a tier."""
    return list(_UNSETTLED.get(events, ()))


def wait(compiled: Any, seconds: float | None = None) -> bool:
    """Block until the kernels of all graphs of ``compiled`` so far are in place, at most so many seconds.

    Returns whether nothing is left to come. A graph that was called once is compiled too. With ``check_swap=True``, the next call
    compares the tiers, and swaps. A model whose parts are compiled (``regional=True``) is waited for part by part.

    >>> import torch, dovetail
    >>> dovetail.wait(dovetail.compile(torch.sin, backend="aten"))
    True
    """
    deadline = float("inf") if seconds is None else time.monotonic() + seconds
    functions = _compiled_functions(compiled)
    while pending := [item for item in _pending(functions) if not item.is_to_check]:
        for run in pending:
            run.wait(deadline)
        if time.monotonic() >= deadline or torch.are_deterministic_algorithms_enabled():
            break
    return not _pending(functions)


def _pending(functions: Sequence[CompiledFunction]) -> list[SwappingRun]:
    """The graphs that have not ended up on a tier, those of entries that were made for an equal module included."""
    found = {run: None for function in functions for run in unsettled(function.events)}
    taken = (entry.run for function in functions for entry in function.entries)
    found |= {run: None for run in taken if isinstance(run, SwappingRun) and not run.is_settled}
    return list(found)


def _compiled_functions(compiled: Any) -> list[CompiledFunction]:
    """The compiled function behind an object, or those of the parts of a module; raises :class:`NotCallableError` where none is."""
    from dovetail.reports.explanation import compiled_function

    found: list[CompiledFunction] = []
    waiting, seen = [compiled], {None}
    while isinstance(compiled, torch.nn.Module) and waiting:
        module = waiting.pop()
        if isinstance(module, CompiledModule):
            found.append(compiled_function(module))
            module = module.original
        if module in seen:
            continue
        seen.add(module)
        forward = vars(module).get("forward")
        found += [forward] if isinstance(forward, CompiledFunction) else []
        waiting += [part for part in module._modules.values() if part is not None]
    return found or [compiled_function(compiled)]
