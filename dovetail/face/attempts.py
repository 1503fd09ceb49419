"""One call captured and compiled: attempt after attempt, until one succeeds or eager has to take the call."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import threading
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.aot.capture_joint import capture_joint, lacks_derivative
from dovetail.aot.compile_joint import choose_backend, compile_joint
from dovetail.aot.compiled_graph import CompiledGraph
from dovetail.aot.entries import make_entry
from dovetail.aot.joint_graph import JointGraph
from dovetail.aot.state import create_state
from dovetail.errors import (
    MISTAKES,
    BackendError,
    DovetailError,
    EagerFallbackWarning,
    GraphBreakWarning,
    Interruption,
    ModuleMadeError,
    UnbuildableError,
    UninitialisedError,
)
from dovetail.face.learned import Part
from dovetail.face.warnings import messages, name_of, warn_user
from dovetail.frontend.capture import capture as run_frontend
from dovetail.frontend.code.frame import Break, LockTaken
from dovetail.guards import GuardSet
from dovetail.runtime.entry import Entry
from dovetail.torch_private import state as private_state
from dovetail.trace import CaptureSettings, Findings, Retry, overrides
from dovetail.trace.settings import AS_SYMBOL, EAGER_INSTEAD, GRAPH_BREAKS, RECOMPUTES, SAYS_COMPILING, SAYS_EAGER

# An attempt is begun anew at each graph break, with the place to stop known. A program that needs more is not deterministic.
MOST_ATTEMPTS = 16


class _Capturing(threading.local):
    """Whether this thread is capturing: what the capture calls runs as it is, and is not compiled by itself."""

    active = False

    def __enter__(self) -> None:
        self.active = True

    def __exit__(self, *error: object) -> None:
        self.active = False


capturing = _Capturing()


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


@dataclass(frozen=True)
class Compiled:
    """An attempt succeeded. ``tensors`` are the inputs of the graph at this call."""

    entry: Entry
    tensors: list[torch.Tensor]


@dataclass(frozen=True)
class EagerOnce:
    """Eager takes this call, and nothing is concluded for later ones: the call prepares something."""


@dataclass(frozen=True)
class EagerFromNowOn:
    """Eager takes this call and all later ones for which the guards hold.

    ``error`` was raised while the program was captured: eager decides whether it is the program's own.
    """

    stop: Break
    guards: GuardSet
    error: BaseException | None = None


Outcome = Compiled | EagerOnce | EagerFromNowOn


class Attempts:
    """Captures and compiles one call. Each attempt that fails says what the next one does otherwise.

    ::

        run
          _attempt
            _compile              capture, passes, lower
            Retry                 the settings that it changes
            _after_break          the next graph ends before this instruction; or other settings; or eager
            _after_refusal        errors of Dovetail's own
            _after_exception      errors of the program, or of torch at symbolic sizes
    """

    def __init__(self, part: Part, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._part = part
        self._options = part.options
        self._shared = part.shared
        self._call = part.function, args, kwargs
        self._settings = self._first_settings()
        self._guards = GuardSet()
        self._findings = Findings()
        #: The steps of the frames that go on after the graph, outermost first; empty while no graph break is planned.
        self._plan: tuple[int, ...] = ()
        # Graph breaks of a capture that may yet begin anew, and come to another one.
        self._unconfirmed: list[Break] = []

    def run(self) -> Outcome:
        """Attempt until there is an outcome."""
        for _ in range(MOST_ATTEMPTS):
            outcome = self._attempt()
            if outcome is not None:
                for stop in self._unconfirmed if isinstance(outcome, Compiled) else ():
                    self._report(stop)
                return outcome
        return EagerFromNowOn(Break("the capture takes another way each time", "report this as a bug"), self._guards)

    # --- one attempt --------------------------------------------------------------------------------------------------

    def _attempt(self) -> Outcome | None:
        self._guards = GuardSet()
        stop_before = self._plan[-1] if self._plan else 0
        observed = self._shared.learned.observed
        self._settings = dataclasses.replace(self._settings, stop_before=stop_before, observed=observed)
        before = private_state.StateOfTorch.now()
        try:
            with capturing, private_state.frames_let_go():
                return self._checked(self._compile())
        except Retry as retry:
            self._start_over(retry.changed(self._settings), retry)
        except Break as stop:
            return self._after_break(stop)
        except DovetailError as error:
            return self._after_refusal(error)
        except Exception as error:  # noqa: BLE001  (capture is a transaction: any failure rolls back, then runs eagerly)
            return self._after_exception(error)
        except BaseException as error:
            if error is not self._findings.raised:
                # An interrupt between two instructions: a mode may have been entered that nobody would leave.
                before.restore()
                raise
            return self._after_exception(error)
        return None

    def _compile(self) -> Entry:
        # A compiler of kernels leaves more garbage than it keeps: with collection paused, 82 parameters took 100 MiB more.
        paused = contextlib.nullcontext() if self._shared.backend.slow_to_compile else collection_paused()
        with self._shared.events.span("compile"), paused:
            joint = self._capture()
            # A capture draws no random numbers, and what other threads draw meanwhile stays drawn. A pass or a backend may draw.
            with private_state.preserved_rng_state():
                for graph_pass in self._options.passes:
                    joint = joint.apply(graph_pass)
                function = joint.capture.function
                if isinstance(function, (torch.nn.Module, types.MethodType)):
                    # An entry is called with its module, or with an equal one, and keeps none alive.
                    function = function.__func__ if type(function) is types.MethodType else type(function)
                    joint = dataclasses.replace(joint, capture=dataclasses.replace(joint.capture, function=function))
                return make_entry(self._lower(joint))

    def _capture(self) -> JointGraph:
        shared, settings, part = self._shared, self._settings, self._part.point
        with collection_paused(), shared.events.span("capture"), contextlib.ExitStack() as stack:
            frontend: Any = lambda trace, *call: run_frontend(trace, self._guards, *call)  # noqa: E731
            state = create_state(stack, *self._call, frontend=frontend, settings=settings)
            self._findings = state.trace.findings
            try:
                joint = capture_joint(state)
                self._findings.raised = None  # Its traceback leads to the trace.
            finally:
                shared.learn_findings(part, self._findings)
                if (ended := self._findings.ended) is not None:
                    self._plan = ended.steps
                    self._unconfirmed.append(ended)
        needs_data_sizes = settings.shapes.data_sizes == "keep" or (self._findings.asked_numbers and ended is None)
        shared.learn_part(part, needs_data_sizes=needs_data_sizes)
        return joint

    def _lower(self, joint: JointGraph) -> CompiledGraph:
        options, shared = self._options, self._shared
        return compile_joint(
            None,
            joint,
            shared.backend,
            options=options.backend_options,
            events=shared.events,
            memory_budget=options.memory_budget,
            numerics=options.numerics,
            for_entry=True,
        )

    def _checked(self, entry: Entry) -> Outcome:
        """The entry, if its guards hold for the call that it was captured for."""
        checker, call = entry.checker, self._call
        tensors = checker.check(*call)
        if tensors is not None:
            _ = entry.finish  # its code is made before anything is written
            return Compiled(entry, tensors)
        failures = checker.explain(*call)
        reason = f"the guards do not hold right after the capture: {failures[0] if failures else 'unknown'}"
        return EagerFromNowOn(Break(reason, "report this as a bug"), self._guards)

    # --- settings -----------------------------------------------------------------------------------------------------

    def _first_settings(self) -> CaptureSettings:
        part, options, backend = self._part, self._options, self._shared.backend
        known = self._shared.part(part.point)
        dynamic = True if part.is_for_all_sizes and options.dynamic is None else options.dynamic
        # A program tape has no symbols, so a backend that runs the program gets none.
        allows_symbols = backend.takes_symbolic_shapes and not backend.takes_program
        shapes = known.changes.shapes(dynamic, allows_symbols, *self._call[1:])
        if backend.data_sizes and overrides.DATA_SIZES:
            # A part that needed such sizes once most likely needs them again: a step that reads the optimizer's counts, say.
            shapes = dataclasses.replace(shapes, data_sizes="keep" if known.needs_data_sizes else "ask")
        given_up = {GRAPH_BREAKS} if options.fullgraph else set()
        given_up |= ({RECOMPUTES} if backend.takes_program else set()) | ({EAGER_INSTEAD} if options.passes else set())
        without = self._shared.learned.without | given_up
        numbers = frozenset(name for name in shapes.numbers if name + AS_SYMBOL not in without)
        settings = CaptureSettings(
            dataclasses.replace(shapes, numbers=numbers, expects_changes=shapes.allowed),
            marks_gradients=any(getattr(item, "marks_gradients", False) for item in options.passes),
            without=without,
        )
        return self._as_exact_as_backend(settings)

    def _as_exact_as_backend(self, settings: CaptureSettings) -> CaptureSettings:
        exact = self._shared.backend.numerics == "bitwise"
        return dataclasses.replace(settings, exact=exact, one_graph=self._options.fullgraph)

    def _start_over(self, settings: CaptureSettings, because: BaseException) -> None:
        """The next attempt captures the call from its start, with these settings."""
        shared, before, after = self._shared, self._settings.shapes, settings.shapes
        reason = f"{type(because).__name__}: {because}"
        if before.data_sizes == "keep" != after.data_sizes:
            shared.learn_part(self._part.point, needs_data_sizes=False)
            shared.events.note("no sizes made of data", reason=reason)
        elif before.allowed and not after.allowed:
            shared.events.note("static shapes", reason=reason)
            # Symbols for what the data decides may have been given up first, in vain.
            again = dataclasses.replace(after, data_sizes=self._first_settings().shapes.data_sizes)
            settings = dataclasses.replace(settings, shapes=again)
        # These are said by an option of the user's or by the backend, and nothing learned.
        shared.learn(without=settings.without - {GRAPH_BREAKS, RECOMPUTES})
        self._settings = settings
        self._plan = ()
        self._unconfirmed.clear()

    # --- what an attempt raised ---------------------------------------------------------------------------------------

    def _after_break(self, stop: Break) -> Outcome | None:
        if isinstance(stop, LockTaken) and self._is_first_preparation("a lock is taken", stop.where):
            return EagerOnce()
        steps = stop.steps if stop.steps and stop.resumable else ()
        can_end_here = bool(steps) and not self._options.fullgraph
        if stop.otherwise and not can_end_here:
            self._start_over(self._settings.giving_up(stop.otherwise), stop)
            return None
        if self._settings.shapes.data_sizes == "keep" and (self._plan or not steps):
            self._start_over(self._settings.with_fewer_symbols(), stop)
            return None
        return self._end_graph_at(steps, stop)

    def _after_refusal(self, error: DovetailError) -> Outcome | None:
        if isinstance(error, UninitialisedError):
            self._shared.events.note("initialisation", reason=error.what)
            return EagerOnce()
        if isinstance(error, MISTAKES):
            raise error
        if isinstance(error, ModuleMadeError) and self._is_first_preparation(str(error), error.where):
            return EagerOnce()
        has_symbols = self._settings.shapes.has_symbols
        if isinstance(error, BackendError) and not has_symbols:
            self._give_up_backend(error)
            return None
        if has_symbols and not (self._plan and isinstance(error, UnbuildableError)):
            self._start_over(self._settings.with_fewer_symbols(), error)
            return None
        # The state at this break cannot be built again; that of the calling frame may be.
        return self._end_graph_at(self._plan[:-1], Break(error.what, error.advice, error.where))

    def _after_exception(self, error: BaseException) -> Outcome | None:
        settings = self._settings
        if error is self._findings.interrupt:
            raise Interruption(error)
        if lacks_derivative(error) and not settings.math_attention:
            self._shared.events.note("attention by its parts", reason=str(error))
            self._start_over(dataclasses.replace(settings, math_attention=True), error)
        elif self._answers_otherwise(error):
            return None
        elif True in self._findings.told_compiling:
            # The branch for compilers has raised; eager takes the other one.
            self._shared.events.note("is_compiling() is false", reason=f"{type(error).__name__}: {error}")
            self._start_over(settings.giving_up(SAYS_COMPILING), error)
        elif settings.shapes.has_symbols:
            self._start_over(self._settings.with_fewer_symbols(), error)
        else:
            notes = getattr(error, "__notes__", ())
            reason = "; ".join([f"capture failed with {type(error).__name__}: {error}", *notes])
            return EagerFromNowOn(Break(reason), self._guards, error)
        return None

    def _answers_otherwise(self, because: BaseException) -> bool:
        """Begin again with yes for is_compiling(), where one graph is asked for and the program was told no."""
        if (
            not self._options.fullgraph
            or False not in self._findings.told_compiling
            or not self._settings.allows(SAYS_EAGER)
        ):
            return False
        self._shared.events.note("is_compiling() is true", reason=f"{type(because).__name__}: {because}")
        self._start_over(self._settings.giving_up(SAYS_EAGER), because)
        return True

    # --- graph breaks and eager ---------------------------------------------------------------------------------------

    def _end_graph_at(self, steps: tuple[int, ...], stop: Break) -> Outcome | None:
        """Plan a graph that ends before this instruction (step 0: none has run yet); eager takes the call if none can."""
        if self._answers_otherwise(stop):
            return None
        if self._options.fullgraph or not any(steps[-1:]) or steps == self._plan:
            return EagerFromNowOn(stop, self._guards)
        if self._settings.shapes.data_sizes == "keep":
            self._unconfirmed.append(stop)
        else:
            self._report(stop)
        if stop.varies:
            self._shared.learn(sizes_vary=True)
        self._plan = steps
        return None

    def _is_first_preparation(self, reason: str, where: object) -> bool:
        """Whether a call is the first to meet something that may be done once and for all, so that eager may do it.

        Not where passes edit the graph (an exchange between processes, say), which eager would leave out.
        """
        if self._plan or self._options.passes or not self._shared.is_news(reason, where):
            return False
        self._shared.events.note("initialisation", reason=reason, where=where)
        return True

    def _report(self, stop: Break) -> None:
        """Record a graph break, and warn at the first one of each place."""
        self._shared.events.note("graph break", reason=stop.reason, where=stop.where, advice=stop.advice)
        if self._shared.is_news(stop.reason, stop.where):
            warn_user(messages().explain_break("graph break", stop), GraphBreakWarning)

    def _give_up_backend(self, error: BackendError) -> None:
        """Take "aten" in the place of a backend that does not work here; raise for one of the user's own, which is to be mended."""
        shared, chosen = self._shared, self._options.backend
        is_ours = chosen is None or (chosen == "inductor" and not self._options.fullgraph)
        if not is_ours or shared.backend.name == "aten":
            raise error
        shared.events.note("backend given up", instead="aten", reason=error.what)
        warn_user(
            f'{name_of(self._part.function)} runs the captured ATen operators one by one (backend="aten"), because '
            f"{error.what}\n  what to do: run `dovetail doctor`, which says what is missing here",
            EagerFallbackWarning,
        )
        shared.backend = choose_backend("aten", self._options.numerics)
        self._settings = self._as_exact_as_backend(self._settings)
