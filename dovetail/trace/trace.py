"""One open capture: the modes, the graph under construction, and the tensors handed in so far.

From the outside in, a traced tensor passes autograd (C++), functionalisation, optional decomposition, proxy recording and
fake tensors. A traced tensor is a functional wrapper around a fake tensor; PyTorch's own autograd records on the wrapper.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import logging
import operator
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from dovetail.errors import CaptureError, UninitialisedError, UserLocation
from dovetail.guards import AmbientState
from dovetail.torch_private import autograd as private_autograd
from dovetail.torch_private import calls as private_calls
from dovetail.torch_private import sizes as private_sizes
from dovetail.torch_private import state as private_state
from dovetail.torch_private import tensors as private_tensors
from dovetail.torch_private import tracing as private_tracing
from dovetail.torch_private import trees as private_trees
from dovetail.trace.modes import FakeMode, FunctionalMode, SymbolicFakeMode, Tracer
from dovetail.trace.overrides import INPUTS, WHILE_OPEN, autograd_nodes
from dovetail.trace.program import Program, Recorder, RecordingMode
from dovetail.trace.repeats import RandomOperators
from dovetail.trace.settings import CHANGES, CaptureSettings, Findings
from dovetail.trace.shapes import NUMBER_SUFFIX, Bindings, RecordingShapeEnv


@dataclass(eq=False)
class TracedInput:
    """A real tensor that the trace has met: ``leaf`` is what gradients are asked for, ``value`` what user code sees.

    ``grad_fn`` is that of the value before the program wrote to it in place.
    """

    index: int
    real: torch.Tensor
    leaf: torch.Tensor
    value: torch.Tensor
    node: torch.fx.Node
    name: str = ""
    original_grad_fn: Any = None
    original_version: int = 0
    #: Whether the graph runs on a tensor that requires a gradient: the program may turn that on before it uses the input.
    requires_grad: bool = False

    @property
    def is_written_differentiably(self) -> bool:
        """Whether autograd has recorded a write to the value."""
        return self.value.grad_fn is not self.original_grad_fn

    def changes_requires_grad(self) -> bool:
        """Whether the program sets ``requires_grad`` by itself (a write of a differentiable value does, and may)."""
        if self.requires_grad:
            return not self.value.requires_grad
        return self.value.requires_grad and self.value.is_leaf


@dataclass(frozen=True)
class MetadataChange:
    """Input ``input_index`` was given another size, strides or offset in place, by ``operator(input, *arguments)``."""

    input_index: int
    operator: Any
    arguments: tuple[Any, ...]
    grad_enabled: bool


class _Shield(torch.autograd.Function):
    """Another traced tensor with the same content, whose gradient is that of the first; nothing is recorded."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, twin: list[torch.Tensor]) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        # In a list, so that the result is not taken for a view of an argument.
        return twin[0]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        return gradient, None


class _OpenTraces(threading.local):
    """The open traces of a thread, innermost last."""

    def __init__(self) -> None:
        self.stack: list[Trace] = []


_open_traces = _OpenTraces()
# An operator that fails while tracing is tried in another way, or eager raises its own error.
for _name in private_tracing.LOGGING:
    logging.getLogger(_name).addFilter(lambda record: record.levelno < logging.WARNING or not _open_traces.stack)


def open_trace() -> Trace | None:
    """The innermost open trace of this thread."""
    return _open_traces.stack[-1] if _open_traces.stack else None


class Trace:
    """An open trace. Enter it with :meth:`open`, hand tensors in with :meth:`input`, read nodes with :meth:`node_of`.

    ``settings`` say how it captures; ``findings`` collects what later captures should know. ``decompositions`` are applied while
    recording; the default records ATen operators as autograd emits them. With ``fake_mode`` the trace lives in a caller's fake
    mode: it takes that mode's own fake tensors as inputs, with the symbols that they have, and what it assumes about them lands in
    the caller's shape environment.
    """

    def __init__(
        self,
        settings: CaptureSettings | None = None,
        decompositions: Mapping[Any, Callable[..., Any]] | None = None,
        fake_mode: Any = None,
    ) -> None:
        self.settings = settings if settings is not None else CaptureSettings()
        self.findings = Findings()
        self.shape_env: Any = RecordingShapeEnv() if fake_mode is None else fake_mode.shape_env
        if fake_mode is None:
            make_mode = SymbolicFakeMode if self.settings.shapes.has_symbols else FakeMode
            fake_mode = make_mode(shape_env=self.shape_env)
        self.fake_mode = fake_mode
        self.tracer = Tracer(self)
        self.graph = torch.fx.Graph(tracer_cls=private_tracing.PythonKeyTracer)
        self.tracer.graph = self.graph
        self.tracer.root = torch.nn.Module()
        self.tracer.tensor_attrs = {}
        self.decompositions = decompositions
        self.phase = "forward"
        #: A hook, or the backward of a custom autograd.Function, runs now.
        self.user_backward = 0
        #: Modules that were met and want the gradients of their parameters exchanged: ``parameter in replica``.
        self.replicas: list[Any] = []
        self._forgiven: set[Any] = set()
        self._looked_at = private_sizes.KnownSymbols()
        self._truths: set[Any] = set()
        #: The user's present line, as whoever runs the program knows; None where it is not known.
        self.locate: Callable[[], UserLocation | None] = lambda: None
        if isinstance(self.shape_env, RecordingShapeEnv):
            self.shape_env.locate = lambda: self.backward_line() if self.phase == "backward" else self.locate()
        self.random = RandomOperators()
        #: The user's lines, each with the sequence number of the first autograd node that was made in it.
        self._lines: list[tuple[int, UserLocation]] = []
        self.recorder = Recorder()
        self.ambient = AmbientState.snapshot()
        self.inputs: list[TracedInput] = []
        self._bindings = Bindings()
        self.freed: set[Any] = set()
        #: Objects that operators of the graph name by number; whatever can run the graph keeps them alive.
        self.kept_alive: list[Any] = []
        self.metadata_changes: list[MetadataChange] = []
        self._by_real: dict[int, TracedInput] = {}
        self._by_value: dict[int, TracedInput] = {}
        #: Called when the trace is closed.
        self.at_close: list[Callable[[], object]] = []

    def open(self, stack: contextlib.ExitStack) -> Trace:
        """Enter all modes on the caller's stack."""
        stack.callback(self._close)
        self.ambient = AmbientState.snapshot()
        _open_traces.stack.append(self)
        stack.callback(_open_traces.stack.remove, self)
        stack.enter_context(private_tracing.compiling_flag())
        for opened in WHILE_OPEN:
            stack.enter_context(opened())
        self.random.open(stack)
        # Autocast caches casts of tensors for the length of a block, those of traced tensors too.
        stack.callback(torch.clear_autocast_cache)
        stack.enter_context(private_tracing.effects_as_plain_operators())
        stack.enter_context(self.fake_mode)
        stack.enter_context(private_tracing.ProxyTorchDispatchMode(self.tracer, "symbolic"))
        if self.decompositions:
            stack.enter_context(private_tracing.decompose(self.decompositions))
        self.functional_mode = stack.enter_context(FunctionalMode(self))
        stack.enter_context(RecordingMode(self.recorder, self.note_line))
        if self.settings.math_attention:
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        return self

    @contextlib.contextmanager
    def in_user_backward(self) -> Iterator[None]:
        """A block in which a hook, or the backward of a custom ``autograd.Function``, runs; it has a number."""
        outer, self.user_backward = self.user_backward, self.user_backward or len(self.graph.nodes)
        try:
            yield
        finally:
            self.user_backward = outer

    @contextlib.contextmanager
    def reading_truths(self) -> Iterator[None]:
        """A block in which numbers made of data are truth values, 0 or 1: there is nothing to check of them at a call."""
        before = self.data_symbols()
        yield
        self._truths |= self.data_symbols() - before

    def _close(self) -> None:
        """Let go of the user's objects, and open circles, which Python may find much later. The shape environment lives on."""
        self.locate = lambda: None
        if isinstance(self.shape_env, RecordingShapeEnv):
            self.shape_env.locate = lambda: None
        for function in self.at_close:
            function()
        self.recorder = Recorder()
        for table in (self.at_close, self._by_real, self._by_value, self.inputs, self.replicas):
            table.clear()
        vars(self.tracer).clear()
        vars(self).pop("functional_mode", None)

    def input(self, real: torch.Tensor, name: str) -> TracedInput:
        """The traced input for a real tensor, or a fake one of the caller's own fake mode. Raises :class:`CaptureError`."""
        found = self._by_real.get(id(real))
        if found is not None:
            return found
        if not self._is_own(real):
            self.check_input(real, name)
        mode = torch.inference_mode(real.is_inference())
        with private_calls.no_torch_function(), private_state.outside_of_transforms(), mode:
            traced = self._make_input(real, name)
        self.recorder.number(traced.value)
        self.inputs.append(traced)
        self._by_real[id(real)] = traced
        self._by_value[id(traced.value)] = traced
        return traced

    def program(self, outputs: tuple[torch.Tensor, ...]) -> Program:
        """The torch calls so far, as a program that computes ``outputs``."""
        return self.recorder.finish(
            [item.value for item in self.inputs], outputs, lambda items: self.bindings().function(items)
        )

    def _record_input(self, real: torch.Tensor, name: str) -> tuple[Any, torch.fx.Node, Any]:
        """The fake tensor for a real one, its placeholder, and the traced tensor around it."""
        with private_tracing.disable_current_modes():
            symbolic = self.settings.shapes.symbolic_sizes(real, name)
            if self._is_own(real):
                # The tensor itself where it can be: it remembers the symbolic number that it holds.
                fake = real.detach() if real.requires_grad else real
            elif name.endswith(NUMBER_SUFFIX) and real.is_floating_point() and real.dim() == 0:
                fake = private_sizes.float_carrier(self.fake_mode, real.item(), f"input_{len(self.inputs)}")
            elif name.endswith(NUMBER_SUFFIX) and real.shape[1] < 2:
                fake = private_sizes.small_number_carrier(self.fake_mode, real.shape[1], f"input_{len(self.inputs)}")
            elif symbolic:
                bounds = {dim: (item.minimum, item.maximum) for dim, item in symbolic.items()}
                fake = private_sizes.symbolic_fake(self.fake_mode, real.detach(), f"input_{len(self.inputs)}", bounds)
            else:
                fake = self.fake_mode.from_tensor(real.detach(), static_shapes=True)
            node = self.placeholder(fake, f"primals_{len(self.inputs) + 1}")
            if private_sizes.carried_float(fake) is not None:
                # Tracking notes a copy, which does not know the number.
                node.meta["val"] = fake
        return fake, node, private_tracing.to_fun(fake)

    def placeholder(self, fake: torch.Tensor, name: str) -> torch.fx.Node:
        """A node for a fake tensor that the graph is given."""
        proxy = self.tracer.create_proxy("placeholder", name, (), {})
        private_tracing.track_tensor_tree(fake, proxy, constant=None, tracer=self.tracer)
        return proxy.node

    def _make_input(self, real: torch.Tensor, name: str) -> TracedInput:
        made = (hook(self._record_input, self, real, name) for hook in INPUTS)
        fake, node, leaf = next(filter(None, made), None) or self._record_input(real, name)
        if isinstance(real, torch.nn.Parameter):
            leaf._is_param = True
        value = leaf
        if real.requires_grad:
            leaf.requires_grad_()
            if not real.is_leaf:
                # An in-place write on a leaf is an error in eager, on this tensor it is not; and it must not cut the
                # value off from the leaf that gradients are asked for. A clone would have other strides.
                with torch.enable_grad():
                    value = _Shield.apply(leaf, [private_tracing.to_fun(fake)])  # type: ignore[no-untyped-call]
        grad_fn, version, needs = value.grad_fn, private_tensors.version_of(value), real.requires_grad
        return TracedInput(len(self.inputs), real, leaf, value, node, name, grad_fn, version, needs)

    def input_of(self, value: torch.Tensor) -> TracedInput | None:
        """The input whose traced value this very object is."""
        return self._by_value.get(id(value))

    def replace_value(self, item: TracedInput, value: torch.Tensor) -> None:
        """Have another traced value stand for an input; the one of before is known as well."""
        item.value = value
        self._by_value[id(value)] = item

    def note_metadata_change(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """An operator has changed a tensor's size, strides or offset in place; for an input, the call does it again."""
        item = self.input_of(args[0])
        if item is None or target is torch.ops.aten.detach_.default:
            return
        if target is torch.ops.aten.resize_as_.default and kwargs.get("memory_format") is None:
            target, args, kwargs = torch.ops.aten.resize_.default, (args[0], list(args[1].shape)), {}
        hidden = item.requires_grad and not torch.is_grad_enabled()
        if hidden or any(
            isinstance(value, torch.Tensor) or private_sizes.is_symbolic(value)
            for value in private_trees.tree_leaves((args[1:], kwargs))
        ):
            raise CaptureError(
                f"{item.name} is changed in place by {target}", where=self.locate(), advice="make a new tensor instead"
            )
        self.metadata_changes.append(
            MetadataChange(item.index, functools.partial(target, **kwargs), args[1:], torch.is_grad_enabled())
        )

    def changes(self, key: Hashable, value: Any) -> bool:
        """Note a plain value, without a guard, for later captures of the same function; returns whether it has differed."""
        earlier = self.settings.observed.get(key, value)
        differs = earlier is CHANGES or bool(earlier != value)
        self.findings.observed[key] = CHANGES if differs else value
        return differs

    def known(self, real: torch.Tensor) -> TracedInput | None:
        """The input made for this real tensor, if there is one."""
        return self._by_real.get(id(real))

    def is_freed(self, value: torch.Tensor) -> bool:
        """Whether the graph of a value is one that eager would have freed, at least in part."""
        return bool(self.freed) and not self.freed.isdisjoint(autograd_nodes([value]))

    def node_of(self, value: torch.Tensor) -> torch.fx.Node:
        """The graph node that computes the current value of a traced tensor."""
        inner = private_tracing.from_fun(value)
        slot: Any = private_tracing.get_proxy_slot(inner, self.tracer, None)  # type: ignore[call-overload]
        if slot is None:
            raise CaptureError(
                "a tensor in the result was not made by the traced program",
                where=self.locate(),
                advice="pass the tensor to the function as an argument",
            )
        return slot.proxy.node

    def note_line(self) -> None:
        """Autograd nodes that are made from here on belong to the user's present line."""
        line = self.locate() if self.phase != "backward" else None
        if line is not None and not (self._lines and self._lines[-1][1] is line):
            self._lines.append((private_autograd.next_sequence_number(), line))

    def backward_line(self) -> UserLocation | None:
        """The user line whose forward made the autograd node that runs now."""
        node = private_autograd.running_autograd_node()
        number = -1 if node is None else node._sequence_nr()
        at = bisect.bisect_right(self._lines, number, key=operator.itemgetter(0))
        return self._lines[at - 1][1] if at else None

    def data_symbols(self) -> set[Any]:
        """The sizes and numbers that operators have made out of a tensor's data so far, which no static graph can hold."""
        return private_sizes.data_symbols(self.shape_env, self._looked_at) - self._forgiven

    def forgive_data_symbols(self, before: set[Any]) -> None:
        """Forget the data symbols that came after ``before``: the call that made them has failed and left no trace of them."""
        self._forgiven |= self.data_symbols() - before

    def assumptions(self) -> list[Any]:
        """The assumptions about sizes made of data, as expressions: the graph is right where these hold."""
        return [
            expression
            for expression in private_sizes.deferred_assumptions(self.shape_env, self._truths)
            if not self._forgiven.intersection(private_sizes.symbols_of(expression))
        ]

    def bindings(self) -> Bindings:
        """The bindings of this trace: where its symbols are read at a later call."""
        new = self.inputs[len(self._bindings.names) :]
        with private_calls.no_torch_function():
            return self._bindings.add([item.node.meta["val"] for item in new], [item.name for item in new])

    def begin_backward(self) -> None:
        """From here on, recorded nodes belong to the backward."""
        self.phase = "backward"

    def _is_own(self, value: torch.Tensor) -> bool:
        return private_tensors.is_fake(value) and value.fake_mode is self.fake_mode  # type: ignore[attr-defined]

    def check_input(self, real: torch.Tensor, name: str) -> None:
        """Raise :class:`CaptureError` for a tensor that no trace can take."""
        where = self.locate()
        if private_tensors.is_functional(real) or private_tensors.is_fake(real):
            raise CaptureError(f"{name} belongs to another trace", where=where, advice="call it outside of that trace")
        if isinstance(real, (torch.nn.UninitializedParameter, torch.nn.UninitializedBuffer)):
            raise UninitialisedError(
                f"{name} has no size before the first call of its module",
                where=where,
                advice="call the module eagerly first",
            )
        if real.layout is not torch.strided:
            raise CaptureError(f"{name} has the layout {real.layout}", where=where, advice="use a dense tensor")
        if real.is_quantized or real.is_nested:
            raise CaptureError(f"{name} is quantized or nested", where=where, advice="use a plain dense tensor")
        if type(real) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
            raise CaptureError(
                f"{name} is a tensor subclass, {type(real).__name__}", where=where, advice="use a plain tensor"
            )
