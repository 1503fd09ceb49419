"""When a backward is captured, and how it runs: the context manager, the way into torch's engine and the way back to eager."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from dovetail.backward_capture.anomaly import StepByStep, unwatched
from dovetail.backward_capture.explanation import explain_parts
from dovetail.backward_capture.forward_lines import forward_lines, lines_are_noted, noting_lines
from dovetail.backward_capture.graph import CapturedBackward
from dovetail.backward_capture.history import with_history
from dovetail.backward_capture.operations import inside_the_engine, is_traceable
from dovetail.backward_capture.parts import Part, PartsRunner, cut, hook_index
from dovetail.backward_capture.recorder import Recorder
from dovetail.backward_capture.reducers import Bucketing, bucket_ends, reducers_among, replace_native_reducers
from dovetail.errors import CaptureError, EagerFallbackWarning
from dovetail.events import EventLog
from dovetail.torch_private import autograd as private_autograd
from dovetail.torch_private import engine as private_engine
from dovetail.torch_private import state as private_state
from dovetail.torch_private import tensors as private_tensors
from dovetail.trace.backward_order import BackwardCall, hook_order, will_execute

#: ``compile_graph(function) -> function``: what happens to the graph of a captured backward.
GraphCompiler = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass
class BackwardSession:
    """What one ``compiled_autograd`` block, or one compiled function, has captured.

    ``captures`` are the captured backwards, in the order in which they were first needed; ``runs`` says how often a captured
    graph ran, ``fallbacks`` why a backward was left to eager. Sessions that compile in the same way may share ``compiled``, what
    they have compiled so far. With ``forward_lines`` the nodes remember the lines that made them, which takes time: a traceback for
    each operator of the forward.
    """

    compile_graph: GraphCompiler | None = None
    compiled: dict[tuple[Any, ...], PartsRunner] = field(default_factory=dict, repr=False)
    events: EventLog = field(default_factory=EventLog)
    captures: list[CapturedBackward] = field(default_factory=list)
    fallbacks: list[str] = field(default_factory=list)
    runs: int = 0
    forward_lines: bool = False

    def __post_init__(self) -> None:
        self._warned = False
        self._lines: dict[CapturedBackward, dict[int, str]] = {}

    def __str__(self) -> str:
        return "\n".join([*self._summary(), *(capture.shown(self._lines[capture]) for capture in self.captures)])

    def _summary(self) -> list[str]:
        lines = [f"{len(self.captures)} captured backward(s), {self.runs} run(s)"]
        return lines + [f"left to eager: {reason}" for reason in dict.fromkeys(self.fallbacks)]

    def explain(self) -> str:
        """In which parts the captured backwards run, which of them are compiled, and why the others are not."""
        lines = self._summary()
        for number, capture in enumerate(self.captures):
            runners = [runner for key, runner in self.compiled.items() if key[0] is capture]
            lines += explain_parts(number, capture, runners)
        return "\n".join(lines)

    def run(
        self,
        captured: CapturedBackward,
        call: BackwardCall,
        arguments: tuple[Any, ...],
        engine_run: Callable[..., Any],
    ) -> list[Any]:
        """Run a captured backward on what the engine has collected from the nodes."""
        if captured not in self.captures:
            self.captures.append(captured)
            self._lines[captured] = forward_lines(hook_order(call))
        order = captured.order(call)
        higher = call.create_graph
        traceable = tuple(is_traceable(hook, higher) for hook in arguments[3]) if captured.runs_user_code else ()
        reducers = reducers_among(arguments[3])
        key = (captured, order, traceable, reducers, higher)
        watched = torch.is_anomaly_enabled()
        compiled: Any = StepByStep(captured, call, order) if watched else self.compiled.get(key)
        if compiled is None:
            with self.events.span("prepare backward", nodes=len(captured.names)):
                compiled = self.compiled[key] = self._compile(captured.graph_for(order, higher), traceable, reducers)
        self.runs += 1
        with torch.set_grad_enabled(higher):
            if captured.runs_user_code:
                with unwatched() if watched else contextlib.nullcontext(contextlib.nullcontext) as as_before:
                    return list(
                        inside_the_engine(
                            engine_run, call.keep_graph, lambda: _noted(compiled, higher, arguments, as_before)
                        )
                    )
            return list(compiled(*arguments))

    def _compile(
        self, graph: torch.fx.GraphModule, traceable: tuple[bool, ...], reducers: tuple[tuple[int, Bucketing], ...]
    ) -> PartsRunner:
        told = dict(reducers)
        called = [(place, told[place]) for place in map(hook_index, graph.graph.nodes) if place in told]
        parts = cut(graph, traceable, frozenset(told), bucket_ends(called))
        run = [self._compile_part(part) for part in parts.parts]
        return PartsRunner(parts, run)

    def _compile_part(self, part: Part) -> Callable[..., Any]:
        if part.reason or self.compile_graph is None:
            return part.graph.forward
        return self.compile_graph(part.graph.forward)

    def leave_to_eager(self, reason: str) -> None:
        """Note why a backward is eager's, and warn the first time."""
        self.fallbacks.append(reason)
        self.events.note("left to eager", reason=reason)
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"dovetail leaves a backward to eager: {reason} (said once; see .fallbacks)",
                EagerFallbackWarning,
                stacklevel=4,
            )


def _noted(
    compiled: Callable[..., Any],
    create_graph: bool,
    arguments: tuple[Any, ...],
    as_before: Callable[[], contextlib.AbstractContextManager[Any]],
) -> Any:
    _state.task = private_autograd.current_backward()
    with as_before(), torch.set_grad_enabled(create_graph):
        return compiled(*arguments)


class _State(threading.local):
    """What this thread is doing."""

    sessions: tuple[BackwardSession, ...] = ()
    call: BackwardCall | None = None
    recorder: Recorder | None = None
    #: A captured backward and what the engine has collected for it, on the way out of the engine.
    collected: tuple[CapturedBackward, tuple[Any, ...]] | None = None
    #: The arguments of a backward that is eager's, should the engine hand it over all the same.
    eager_call: tuple[Any, ...] | None = None
    #: Whether it runs under modes of torch's, which the engine takes off when it hands over.
    eager_in_modes = False
    running = False
    hooked = False
    #: The number by which torch knows the captured backward that runs.
    task = -1


_state = _State()
# The engine's hook is one pointer for all threads: whoever holds the lock has a compiler in it.
_hook_lock = threading.RLock()
_door_lock = threading.Lock()
_open_sessions = 0
#: How many threads run a captured backward inside of the engine, which allows one.
_runs_in_the_engine = 0
_engine_run: Callable[..., Any] | None = None
_engine_will_execute: Callable[[Any], bool] | None = None
_engine_is_checkpoint_valid: Callable[[], bool] | None = None
_foreign = "count(0)"


class _NotThisThreads(Exception):
    """The engine has handed a backward over that is eager's, because another thread had a compiler in its hook."""


def _unhook() -> None:
    if _state.hooked:
        _state.hooked = False
        private_engine.set_engine_compiler(None)
        _hook_lock.release()


def _finish(recorder: Recorder) -> tuple[Callable[..., Any], CapturedBackward]:
    assert _state.call is not None
    return _collect, CapturedBackward(recorder, _state.call)


def _collect(captured: CapturedBackward, *arguments: Any) -> list[Any]:
    """Called by the engine, the first time and whenever it meets a graph of the same shape again."""
    if _state.call is not None and _state.call.create_graph and arguments[4]:
        # The graph is kept, so eager can still run it.
        arguments = with_history(captured, _state.call, arguments)
    if _state.call is not None and not captured.needs_the_engine:
        # The engine does one such call at a time, whichever thread it is for, so the backward runs when it has returned.
        _state.collected = (captured, arguments)
        return [torch.empty(0) for _ in captured.results]
    with _counted():
        _unhook()
        if _state.call is not None:
            return _run(captured, arguments)
        with _hook_lock:  # the compiler in the hook is another thread's, and this run has backwards in it
            pass
        with torch.no_grad():
            if _state.eager_call is None:
                # Torch's own compiled autograd has met a graph that was captured here: the engine has one cache for all.
                return list(captured(*arguments))
            assert _engine_run is not None
            if _state.eager_in_modes:
                raise CaptureError("another thread's compiled autograd came in between a backward that is being traced")
            outputs, _, keep_graph, create_graph, inputs, _, accumulate = _state.eager_call
            roots, targets = tuple(map(_node_of, outputs)), tuple(map(_node_of, inputs))
            call = BackwardCall(roots, targets, accumulate, keep_graph, create_graph)
            return BackwardSession().run(captured, call, arguments, _engine_run)


@contextlib.contextmanager
def _counted() -> Iterator[None]:
    """While a captured backward runs inside of the engine, no other one can be captured."""
    global _runs_in_the_engine
    with _door_lock:
        _runs_in_the_engine += 1
    try:
        yield
    finally:
        with _door_lock:
            _runs_in_the_engine -= 1


def _run(captured: CapturedBackward, arguments: tuple[Any, ...]) -> list[Any]:
    assert _state.call is not None and _engine_run is not None
    _state.running = True
    return _state.sessions[-1].run(captured, _state.call, arguments, _engine_run)


def _will_execute(node: Any) -> bool:
    """What torch asks from inside of hooks, while a session is open."""
    assert _engine_will_execute is not None
    if _state.call is not None and _state.task >= 0 and _state.task == private_autograd.current_backward():
        return will_execute(_state.call, node)
    return _engine_will_execute(node)


def _is_checkpoint_valid() -> bool:
    """What torch's reentrant checkpoints ask, while a session is open: whether this backward is after all leaves' gradients."""
    assert _engine_is_checkpoint_valid is not None
    if _state.call is not None and _state.task >= 0 and _state.task == private_autograd.current_backward():
        return not _state.call.targets
    return _engine_is_checkpoint_valid()


def _new_recorder() -> Recorder:
    if _state.call is None:
        raise _NotThisThreads
    for node in hook_order(_state.call):
        if node is not None and private_engine.has_freed_its_saved_tensors(node):
            raise CaptureError(f"{node.name()} has run before and let go of what it saved")
    _state.recorder = Recorder(_finish, _state.call.roots)
    return _state.recorder


def _node_of(value: Any) -> Any:
    return value.node if isinstance(value, torch.autograd.graph.GradientEdge) else private_autograd.gradient_node(value)


def _why_not(gradients: Any, keep_graph: bool, create_graph: bool) -> str | None:
    """Why a backward is eager's from the start."""
    if create_graph and not keep_graph:
        return "retain_graph=False lets go of the graph that create_graph=True builds on"
    if any(isinstance(item, torch.Tensor) and "Batched" in private_tensors.dispatch_keys(item) for item in gradients):
        return "the gradients are batched by vmap"
    return None


def _run_backward(
    outputs: Any,
    gradients: Any,
    keep_graph: Any,
    create_graph: Any,
    inputs: Any = (),
    allow_unreachable: bool = False,
    accumulate_grad: bool = False,
) -> Any:
    """What ``torch.autograd.backward`` and ``grad`` call while a session is open, in this thread or in another one."""
    call = (outputs, gradients, keep_graph, create_graph, inputs, allow_unreachable, accumulate_grad)

    def eager() -> Any:
        return _run_eagerly(*call)

    if (
        not _state.sessions
        or _state.running
        or private_state.dispatch_mode_count()
        or private_state.functorch_level() is not None
    ):
        return eager()
    session = _state.sessions[-1]
    if session.forward_lines and lines_are_noted():
        # The mode was for the forward, and nobody is to be watched now.
        with torch.autograd.set_detect_anomaly(False):
            return _run_backward(*call)
    reason = _why_not(gradients, keep_graph, create_graph)
    if reason is not None:
        session.leave_to_eager(reason)
        return eager()
    return _captured_backward(session, eager, *call)


#: What the engine says where another thread's captured backward is in it.
_ENGINE_IS_TAKEN = "Trying to run compiled autograd within another compiled autograd call"


def _run_eagerly(*call: Any) -> Any:
    """Run eager's engine. Another thread may have a compiler in the hook, or put one there at any moment."""
    assert _engine_run is not None
    if _state.hooked:
        return _engine_run(*call)
    before = _state.eager_call, _state.eager_in_modes
    _state.eager_call = call
    _state.eager_in_modes = bool(private_state.dispatch_mode_count()) or private_state.functorch_level() is not None
    try:
        while True:
            with _hook_lock:
                pass
            try:
                return _engine_run(*call)
            except _NotThisThreads:
                continue
            except NotImplementedError as error:
                if not str(error).startswith(_ENGINE_IS_TAKEN):
                    raise
    finally:
        _state.eager_call, _state.eager_in_modes = before


def _captured_backward(session: BackwardSession, eager: Callable[[], Any], *arguments: Any) -> Any:
    outputs, inputs, accumulate = arguments[0], arguments[4], arguments[6]
    assert _engine_run is not None
    try:
        roots = tuple(_node_of(value) for value in outputs)
        targets = tuple(_node_of(value) for value in inputs)
    except (RuntimeError, AttributeError, AssertionError):
        return eager()  # a root or an input without a gradient: eager has the words for it
    if None in roots or None in targets:
        return eager()
    call = _state.call = BackwardCall(roots, targets, accumulate, arguments[2], arguments[3])
    try:
        with torch.autograd.set_multithreading_enabled(False):
            failure, result = _hand_over(arguments)
            if failure is None and arguments[3] and accumulate:
                _warn_of_cycles()
            if _state.collected is not None:
                result = _gradients(_run(*_state.collected), *arguments[5:])
    finally:
        _state.running = False
        _state.call = _state.recorder = _state.collected = None
        _state.task = -1
    if failure is None:
        return result
    if _is_of_a_reducer(failure) and replace_native_reducers(hook_order(call)):
        return _captured_backward(session, eager, *arguments)
    result = eager()
    # Had eager raised, the error was the program's own.
    session.leave_to_eager(_words(failure))
    return result


def _gradients(found: list[Any], allow_unreachable: bool, accumulate_grad: bool) -> tuple[Any, ...] | None:
    """What the engine makes of the gradients that were asked for."""
    if accumulate_grad:
        return None
    if not allow_unreachable and any(item is None for item in found):
        _complain_of_unused(found)
    return tuple(found)


def _warn_of_cycles() -> None:
    """Warn as eager does of ``backward(create_graph=True)``: torch says it once in a process, or always."""
    assert _engine_run is not None
    with torch.enable_grad():
        root = torch.zeros((), requires_grad=True).clone()
        _engine_run((root,), (torch.ones(()),), True, True, (), True, accumulate_grad=True)


def _complain_of_unused(found: list[Any]) -> None:
    """Raise what eager raises where a gradient that was asked for is not there."""
    assert _engine_run is not None
    with torch.enable_grad():
        used, unused = torch.zeros((), requires_grad=True), torch.zeros((), requires_grad=True)
        inputs = tuple(unused if item is None else used for item in found)
        _engine_run((used.clone(),), (torch.ones(()),), False, False, inputs, False, accumulate_grad=False)


def _hand_over(arguments: tuple[Any, ...]) -> tuple[Exception | None, Any]:
    """Let the engine hand over an autograd graph: why it could not, and what it returned."""
    global _foreign
    assert _engine_run is not None
    _hook_lock.acquire()
    _state.hooked = True
    try:
        if _runs_in_the_engine:
            raise CaptureError(
                "another thread runs hooks of native code in a captured backward, and the engine is taken"
            )
        if private_engine.foreign_captures() != _foreign:
            _foreign = private_engine.foreign_captures()
            private_engine.clear_engine_cache()
        private_engine.set_engine_compiler(_new_recorder)
        # The engine refuses to hand over what is to be differentiated again; how it runs is not its business here.
        return None, _engine_run(*arguments[:3], False, *arguments[4:])
    except Exception as error:
        if _state.running or _state.collected is not None:
            raise  # what the nodes had saved is out of them, and they cannot run again
        if _state.recorder is not None and _state.recorder.walking:
            raise CaptureError(
                f"the capture of a backward was stopped half way ({type(error).__name__}: {error})",
                advice="this autograd graph can no longer be used: run the forward again, and its backward without "
                "compiled autograd",
            ) from error
        return error, None
    finally:
        _unhook()


def _is_of_a_reducer(error: BaseException) -> bool:
    return "DDP Reducer" in str(error)


def _words(error: BaseException) -> str:
    if isinstance(error, CaptureError):
        return str(error)
    if _is_of_a_reducer(error):
        return "the reducer of DistributedDataParallel is native code among the hooks"
    return f"the engine cannot hand it over ({type(error).__name__}: {str(error).strip().splitlines()[0]})"


@contextlib.contextmanager
def open_session(session: BackwardSession) -> Iterator[BackwardSession]:
    """Within the block, the backwards of this thread go through ``session``."""
    global _open_sessions, _engine_run, _engine_will_execute, _engine_is_checkpoint_valid
    private_engine.prepare_engine_hook()
    with _door_lock:
        if _open_sessions == 0:
            _engine_run = private_engine.engine_run_backward()
            private_engine.replace_engine_run_backward(_run_backward)
            _engine_will_execute = private_engine.will_execute()
            private_engine.replace_will_execute(_will_execute)
            _engine_is_checkpoint_valid = private_engine.is_checkpoint_valid()
            private_engine.replace_is_checkpoint_valid(_is_checkpoint_valid)
        _open_sessions += 1
    before = _state.sessions
    _state.sessions = (*before, session)
    try:
        with noting_lines(session.forward_lines):
            yield session
    finally:
        _state.sessions = before
        with _door_lock:
            _open_sessions -= 1
            if _open_sessions == 0:
                assert _engine_run and _engine_will_execute and _engine_is_checkpoint_valid
                private_engine.replace_engine_run_backward(_engine_run)
                private_engine.replace_will_execute(_engine_will_execute)
                private_engine.replace_is_checkpoint_valid(_engine_is_checkpoint_valid)
