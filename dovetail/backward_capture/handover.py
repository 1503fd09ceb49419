"""Takes a backward from the program's call through torch's engine into a captured graph, or back to eager."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from dovetail.backward_capture.builder import Collected, GraphBuilder
from dovetail.backward_capture.engine import gate
from dovetail.backward_capture.graph import CapturedBackward
from dovetail.backward_capture.printer import lines_are_noted, noting_lines
from dovetail.backward_capture.reducers import replace_native_reducers
from dovetail.backward_capture.session import BackwardSession
from dovetail.errors import CaptureError
from dovetail.rules.gradients.engine_order import BackwardCall, hook_order, will_execute
from dovetail.torch_private import autograd as private_autograd
from dovetail.torch_private import autograd_nodes as private_autograd_nodes
from dovetail.torch_private import engine as private_engine
from dovetail.torch_private import state as private_state
from dovetail.torch_private import tensors as private_tensors
from dovetail.torch_private.autograd_nodes import node_name


class EngineArguments(NamedTuple):
    """The arguments that ``torch.autograd.backward`` and ``grad`` hand to the engine."""

    outputs: Any
    gradients: Any
    keep_graph: Any
    create_graph: Any
    inputs: Any = ()
    allow_unreachable: bool = False
    accumulate_grad: bool = False

    def call(self) -> BackwardCall | None:
        """The backward as nodes of the autograd graph; None where an output or an input has no gradient."""
        try:
            roots, targets = tuple(map(_node_of, self.outputs)), tuple(map(_node_of, self.inputs))
        except (RuntimeError, AttributeError, AssertionError):
            return None
        if None in roots or None in targets:
            return None
        return BackwardCall(roots, targets, self.accumulate_grad, self.keep_graph, self.create_graph)


def _node_of(value: Any) -> Any:
    return (
        value.node
        if isinstance(value, torch.autograd.graph.GradientEdge)
        else private_autograd_nodes.gradient_node(value)
    )


class Handover:
    """One backward that the engine hands over. The calling tree::

        run_backward                       stands in the place of torch's function, in all threads
        +-- EngineGate.run                 a backward that eager runs
        +-- Handover.run
            +-- _let_engine_walk
            |   +-- EngineGate.compiler
            |       +-- torch's engine     walks the autograd graph
            |           +-- make_builder   where it has not met such a graph: a GraphBuilder, called for each node
            |           |   +-- _finish    its graph becomes a CapturedBackward, which the engine remembers
            |           +-- _collect       at each run, with the values that the nodes have saved
            +-- BackwardSession.run        runs the captured graph

    The captured graph runs after the engine has returned, because the engine admits one such call at a time, whichever thread it
    is for.
    """

    def __init__(self, session: BackwardSession, arguments: EngineArguments, call: BackwardCall) -> None:
        self.session = session
        self.arguments = arguments
        self.call = call
        self._builder: GraphBuilder | None = None
        self._collected: tuple[CapturedBackward, Collected] | None = None
        #: The number by which torch knows the backward in which the captured graph runs.
        self._task = -1

    def run(self) -> Any:
        """Run the backward, eagerly if it cannot be handed over; returns the result of torch's own ``run_backward``."""
        _thread.handover = self
        try:
            with torch.autograd.set_multithreading_enabled(False):
                failure, result = self._let_engine_walk()
                if failure is None and self.call.create_graph and self.call.accumulate:
                    _warn_of_cycles()
                if self._collected is not None:
                    result = self._gradients(self.session.run(self.call, *self._collected, self._note_task))
        finally:
            _thread.handover = None
        if failure is None:
            return result
        if _is_of_a_reducer(failure) and replace_native_reducers(hook_order(self.call)):
            return Handover(self.session, self.arguments, self.call).run()
        self.session.check_allowed(_reason(failure))
        result = gate.run(*self.arguments)
        # Had eager raised, the error was the program's own.
        self.session.leave_to_eager(_reason(failure))
        return result

    def is_current(self) -> bool:
        """Whether the backward that torch runs in this thread is the one in which the captured graph runs."""
        return 0 <= self._task == private_autograd.current_backward()

    def make_builder(self) -> GraphBuilder:
        """The object that the engine calls for each node of a graph that it has not met before."""
        for node in hook_order(self.call):
            if node is not None and private_engine.has_freed_its_saved_tensors(node):
                raise CaptureError(f"{node_name(node)} has run before and let go of what it saved")
        self._builder = GraphBuilder(self._finish, self.call.roots)
        return self._builder

    def collect(self, captured: CapturedBackward, collected: Collected) -> list[Any]:
        """Take over the values that the engine has collected from the nodes."""
        if self.call.create_graph and collected.packed:
            # The graph is kept, so eager can still run it.
            raise CaptureError(
                "create_graph=True differentiates what saved-tensor hooks unpack, which has no history in a graph"
            )
        self._collected = (captured, collected)
        return [torch.empty(0) for _ in captured.results]

    def _finish(self, builder: GraphBuilder) -> tuple[Callable[..., Any], CapturedBackward]:
        return _collect, CapturedBackward(builder, self.call)

    def _let_engine_walk(self) -> tuple[Exception | None, Any]:
        """Have the engine hand the autograd graph over; returns its error, or None, and its result."""
        try:
            with gate.compiler(_make_builder):
                _forget_foreign_captures()
                # The engine refuses to hand over a graph that is to be differentiated again; how it runs is not its business here.
                return None, gate.run(*self.arguments._replace(create_graph=False))
        except Exception as error:
            if self._collected is not None:
                raise  # the nodes have given their saved values away and cannot run again
            if self._builder is not None and self._builder.walking:
                raise CaptureError(
                    f"the capture of a backward was stopped half way ({type(error).__name__}: {error})",
                    advice="this autograd graph can no longer be used: run the forward again, and its backward without "
                    "compiled autograd",
                ) from error
            return error, None

    def _note_task(self) -> None:
        self._task = private_autograd.current_backward()
        gate.is_past_the_hook()

    def _gradients(self, found: list[Any]) -> tuple[Any, ...] | None:
        """The gradients that were asked for, in the form in which the engine returns them."""
        if self.arguments.accumulate_grad:
            return None
        if not self.arguments.allow_unreachable and any(item is None for item in found):
            _complain_of_unused(found)
        return tuple(found)


class _Thread(threading.local):
    """The open sessions of a thread, and the backward that it hands over."""

    sessions: tuple[BackwardSession, ...] = ()
    handover: Handover | None = None


_thread = _Thread()
_sessions_lock = threading.Lock()
_open_sessions = 0
#: torch's functions, which stand aside while sessions are open.
_torchs = private_engine.EngineFunctions.present()
#: The state of torch's own compiled autograd when the engine's memory of graphs was last cleared.
_foreign = "count(0)"


def run_backward(*arguments: Any, **options: Any) -> Any:
    """Called by ``torch.autograd.backward`` and ``grad`` while a session is open, in this thread or in another one."""
    given = EngineArguments(*arguments, **options)
    in_a_mode = private_state.dispatch_mode_count() or private_state.functorch_level() is not None
    if not _thread.sessions or _thread.handover is not None or in_a_mode:
        return gate.run(*given)
    session = _thread.sessions[-1]
    if session.forward_lines and lines_are_noted():
        # The mode was for the forward; nobody asked to watch the backward.
        with torch.autograd.set_detect_anomaly(False):
            return run_backward(*given)
    reason = _why_eager(given)
    if reason:
        # Anomaly mode asks for eager's words; they need no further ones.
        session.check_allowed(reason)
        session.leave_to_eager(reason, warn=not torch.is_anomaly_enabled())
        return gate.run(*given)
    call = given.call()
    # An output or an input without a gradient: eager has the words for it.
    return gate.run(*given) if call is None else Handover(session, given, call).run()


def _why_eager(given: EngineArguments) -> str:
    if torch.is_anomaly_enabled():
        return "anomaly mode watches the nodes as the engine runs them"
    if given.create_graph and not given.keep_graph:
        return "retain_graph=False lets go of the graph that create_graph=True builds on"
    tensors = [item for item in given.gradients if isinstance(item, torch.Tensor)]
    if any("Batched" in private_tensors.dispatch_keys(item) for item in tensors):
        return "the gradients are batched by vmap"
    return ""


def _make_builder() -> GraphBuilder:
    """The compiler in the engine's hook."""
    if _thread.handover is None:
        raise CaptureError(
            "native code of another thread has entered torch's engine while a backward was captured",
            advice="begin backwards in Python, or outside of compiled autograd",
        )
    return _thread.handover.make_builder()


def _collect(captured: CapturedBackward, *values: Any) -> list[Any]:
    """Called by the engine for each run of a graph that it remembers; it keeps a reference to this function."""
    collected = Collected(*values)
    if _thread.handover is not None:
        return _thread.handover.collect(captured, collected)
    # Torch's own compiled autograd has met a graph that was captured here: the engine has one memory for both.
    with torch.no_grad():
        return list(captured(*collected))


def _forget_foreign_captures() -> None:
    """Clear the engine's memory of graphs after torch's own compiled autograd has captured some: those are of no use here."""
    global _foreign
    if private_engine.foreign_captures() != _foreign:
        _foreign = private_engine.foreign_captures()
        private_engine.clear_engine_cache()


def _will_execute(node: Any) -> bool:
    """Called by torch from hooks while a session is open: whether this backward comes to a node."""
    handover = _thread.handover
    if handover is not None and handover.is_current():
        return will_execute(handover.call, node)
    return _torchs.will_execute(node)


def _is_checkpoint_valid() -> bool:
    """Called by reentrant checkpoints while a session is open: whether this backward computes the gradients of all leaves."""
    handover = _thread.handover
    if handover is not None and handover.is_current():
        return not handover.call.targets
    return _torchs.is_checkpoint_valid()


def _warn_of_cycles() -> None:
    """Warn as eager does of ``backward(create_graph=True)``: torch says it once in a process, or always."""
    with torch.enable_grad():
        root = torch.zeros((), requires_grad=True).clone()
        gate.run((root,), (torch.ones(()),), True, True, (), True, accumulate_grad=True)


def _complain_of_unused(found: list[Any]) -> None:
    """Raise what eager raises where a gradient that was asked for is not there."""
    with torch.enable_grad():
        used, unused = torch.zeros((), requires_grad=True), torch.zeros((), requires_grad=True)
        inputs = tuple(unused if item is None else used for item in found)
        gate.run((used.clone(),), (torch.ones(()),), False, False, inputs, False, accumulate_grad=False)


def _is_of_a_reducer(error: BaseException) -> bool:
    return "DDP Reducer" in str(error)


def _reason(error: BaseException) -> str:
    if isinstance(error, CaptureError):
        return str(error)
    if _is_of_a_reducer(error):
        return "the reducer of DistributedDataParallel is native code among the hooks"
    return f"the engine cannot hand it over ({type(error).__name__}: {str(error).strip().splitlines()[0]})"


@contextlib.contextmanager
def open_session(session: BackwardSession) -> Iterator[BackwardSession]:
    """Within the block, the backwards of this thread go through ``session``."""
    global _open_sessions, _torchs
    private_engine.prepare_engine_hook()
    with _sessions_lock:
        if _open_sessions == 0:
            _torchs = private_engine.EngineFunctions.present()
            gate.engine_run = _torchs.run_backward
            private_engine.EngineFunctions(run_backward, _will_execute, _is_checkpoint_valid).install()
        _open_sessions += 1
    before = _thread.sessions
    _thread.sessions = (*before, session)
    try:
        with noting_lines(session.forward_lines):
            yield session
    finally:
        _thread.sessions = before
        with _sessions_lock:
            _open_sessions -= 1
            if _open_sessions == 0:
                _torchs.install()
