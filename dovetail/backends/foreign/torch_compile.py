"""``torch.compile(backend="dovetail")``: torch captures the function, and Dovetail enters at stage 0.

The trace lives in the caller's fake mode and shape environment: the caller's symbolic sizes are used as they are, and whatever is
assumed about them while the backward is traced or the inner backend compiles is a guard of the caller's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from dovetail.aot.capture_joint import capture_joint
from dovetail.aot.capture_result import CaptureResult
from dovetail.aot.compile_joint import choose_backend, compile_joint
from dovetail.aot.compiled_graph import CompiledGraph
from dovetail.aot.descriptors import BufferInput, Descriptor, ParamInput, UserInput
from dovetail.aot.state import create_state
from dovetail.backends import Backend
from dovetail.errors import (
    CaptureError,
    DovetailError,
    EagerFallbackWarning,
    InputError,
    OptionError,
    UserLocation,
)
from dovetail.events import EventLog
from dovetail.face.loading import load_rules
from dovetail.guards import AmbientChange, AmbientState, GuardSet, autocast_nesting
from dovetail.options import Options, make_options
from dovetail.torch_private import autograd as private_autograd
from dovetail.torch_private import dynamo as private_dynamo
from dovetail.torch_private import sizes as private_sizes
from dovetail.torch_private import state as private_state
from dovetail.torch_private import tensors as private_tensors
from dovetail.torch_private import tracing as private_tracing
from dovetail.torch_private import trees as private_trees
from dovetail.trace import Trace

TorchCompiled = Callable[..., Any]
_MODULE_TABLE = re.compile(r"\._(modules|parameters|buffers)\['([^']+)'\]")
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (.*)\n\s*(.*)')
_OPTION_NAMES = ("inner", "fullgraph", "passes", "memory_budget", "numerics", "backend_options")


def describe(name: str, value: torch.Tensor) -> Descriptor:
    """The descriptor of an input, by how the caller reads it.

    >>> describe("L['self']._modules['fc']._buffers['mean']", torch.zeros(1))
    BufferInput(fqn='fc.mean')
    """
    steps = _MODULE_TABLE.findall(name)
    path = ".".join(step for _, step in steps) or name
    if isinstance(value, torch.nn.Parameter):
        return ParamInput(path)
    if steps and steps[-1][0] == "buffers":
        return BufferInput(path)
    return UserInput(name)


def location_of(node: torch.fx.Node) -> UserLocation | None:
    """The user's line that a node of the caller's graph came from: the innermost one outside of torch."""
    frames = _FRAME.findall(str(node.meta.get("stack_trace") or ""))
    for file, line, function, text in reversed(frames):
        if "/torch/" not in file.replace("\\", "/"):
            return UserLocation(file, int(line), function.strip(), text.strip())
    return None


class CallersGuards(GuardSet):
    """What stage 1 assumes about inputs that the compiler that calls does not guard: it is asked at each call.

    A call for which it does not hold runs the graph as torch captured it, which is right for all inputs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.leafness: dict[int, bool] = {}
        self.is_separate = False
        self.values: list[torch.Tensor] = []

    def add_leafness(self, index: int, location: UserLocation | None = None) -> None:
        """The input stays a leaf, or none."""
        if self.values[index].requires_grad:
            self.leafness[index] = self.values[index].is_leaf

    def add_separate_memory(self, index: int) -> None:
        """No two inputs share memory."""
        self.is_separate = True

    def check(self) -> Callable[[Sequence[torch.Tensor]], bool] | None:
        """Whether all that holds for other tensors; None where there is nothing to ask."""
        leafness, is_separate = tuple(self.leafness.items()), self.is_separate
        if not leafness and not is_separate:
            return None
        return lambda values: (
            all(values[index].is_leaf is flag for index, flag in leafness)
            and not (is_separate and private_tensors.share_memory(values))
        )


class _GraphRunner(torch.fx.Interpreter):
    """Runs the caller's graph under the open trace; tensors that the graph holds as attributes become inputs."""

    def __init__(
        self, graph: torch.fx.GraphModule, trace: Trace, attribute: Callable[[torch.Tensor, str], Any]
    ) -> None:
        super().__init__(graph)
        self._trace = trace
        self._attribute = attribute
        self._place: UserLocation | None = None
        self._traced: dict[int, Any] = {}
        trace.locate = lambda: self._place

    def run_node(self, n: torch.fx.Node) -> Any:
        """See the base class."""
        place = location_of(n)
        if place is not None:
            self._place = place
            self._trace.lines.add(private_autograd.next_sequence_number(), place)
        return super().run_node(n)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """See the base class."""
        value = super().get_attr(target, args, kwargs)
        return self._attribute(value, str(target)) if isinstance(value, torch.Tensor) else value

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        """See the base class."""
        module = self.fetch_attr(target)
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        traced = {name: self._attribute(value, f"{target}.{name}") for name, value in tensors.items()}
        return torch.func.functional_call(module, traced, args, kwargs)


@dataclass(frozen=True)
class CallersCall:
    """How a compiled graph is called in the place of the caller's graph.

    ``inputs`` says for each traced input which argument it is, or is the tensor that the graph holds itself; an argument in
    ``carriers`` is a number that comes as the size of an empty tensor. ``results`` says for each leaf of the result of which
    kind it is: ``("tensor", index)``, ``("number", index)`` or ``("constant", value)``.
    """

    guards: CallersGuards
    inputs: tuple[int | torch.Tensor, ...]
    carriers: frozenset[int]
    results: tuple[tuple[str, Any], ...]
    result_spec: private_trees.TreeSpec

    def runtime(self, compiled: CompiledGraph) -> TorchCompiled:
        """The function that the caller runs instead of its graph."""
        run, inputs, carriers, results, spec = compiled.run, self.inputs, self.carriers, self.results, self.result_spec
        capture = compiled.joint.capture
        numbers = capture.bindings.function(capture.numbers) if capture.numbers else None
        change, holds, graph = capture.ambient_change, self.guards.check(), capture.function

        def call(*args: Any) -> Any:
            values: list[Any] = []
            for item in inputs:
                if not isinstance(item, int):
                    values.append(item)
                elif item in carriers:
                    values.append(torch.empty((args[item], 0)))
                else:
                    values.append(args[item])
            if holds is not None and not holds(values):
                return graph(*args)
            # Read before the graph runs: it may change a size in place.
            found = numbers(values) if numbers is not None else ()
            tensors = run(values)
            leaves = [
                tensors[item] if kind == "tensor" else found[item] if kind == "number" else item
                for kind, item in results
            ]
            if change is not None:
                change.make()
            return private_trees.tree_unflatten(leaves, spec)

        return call


class _Inputs:
    """Hands the caller's inputs to the trace."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.guards = CallersGuards()
        self.origins: list[int | torch.Tensor] = []
        self.descriptors: list[Descriptor] = []
        self.carriers: set[int] = set()
        # The trace knows its inputs by their identity.
        self._alive: list[torch.Tensor] = []

    def _add(self, value: torch.Tensor, name: str, origin: int | torch.Tensor) -> torch.Tensor:
        traced = self.trace.input(value, name)
        if traced.index == len(self.origins):
            self.origins.append(origin)
            self.descriptors.append(describe(name, value))
            self.guards.values.append(value)
        return traced.value

    def arguments(self, given: Sequence[private_dynamo.CallersInput]) -> list[Any]:
        """The values that the graph is run on."""
        found: list[Any] = [item.value for item in given]
        for position, item in enumerate(given):
            if isinstance(item.value, torch.Tensor):
                found[position] = self._add(item.value, item.name, position)
        for position, item in enumerate(given):
            if isinstance(item.value, torch.Tensor):
                continue
            if not private_sizes.is_symbolic(item.value):
                # It would be the same at every call.
                raise CaptureError(f"{item.name} is a {type(item.value).__name__}, neither a tensor nor a size")
            found[position] = self._number(item, position)
        return found

    def _number(self, item: private_dynamo.CallersInput, position: int) -> Any:
        if not isinstance(item.value, torch.SymInt):
            raise CaptureError(f"{item.name} is a symbolic {type(item.value).__name__}", advice="pass it in a tensor")
        place = self.trace.bindings().symbols.get(private_sizes.first_expression(item.value))
        if place is not None:
            index, kind, dim = place
            value = self.trace.inputs[index].value
            return (
                value.shape[dim]
                if kind == "size"
                else value.stride(dim)
                if kind == "stride"
                else value.storage_offset()
            )
        with private_tracing.disable_current_modes():
            if not item.value >= 0:  # a guard of the caller's: a size cannot be negative
                return int(item.value)
            with self.trace.fake_mode:
                carrier = torch.empty((item.value, 0))
        self._alive.append(carrier)
        self.carriers.add(position)
        return self._add(carrier, item.name, position).shape[0]

    def attribute(self, value: torch.Tensor, name: str) -> torch.Tensor:
        """A tensor that the graph holds itself."""
        if private_tensors.is_traced(value):
            return value
        self.trace.check_input(value, name)
        with private_tracing.disable_current_modes():
            fake = self.trace.fake_mode.from_tensor(value, static_shapes=True)
        self._alive.append(fake)
        return self._add(fake, name, value)


class _Results:
    """Sorts the leaves of the graph's result."""

    def __init__(self, inputs: _Inputs) -> None:
        self._inputs = inputs
        self._positions: dict[int, int] = {}
        self.tensors: list[torch.Tensor] = []
        self.numbers: list[Any] = []

    def sort(self, leaf: Any) -> tuple[str, Any]:
        """The kind of a leaf, see :class:`CallersCall`."""
        if private_sizes.is_symbolic(leaf):
            self.numbers.append(private_sizes.expression_of(leaf))
            return "number", len(self.numbers) - 1
        if not isinstance(leaf, torch.Tensor):
            return "constant", leaf
        value = self._inputs.attribute(leaf, "a constant")
        if value.requires_grad and value.is_leaf and self._inputs.trace.input_of(value) is None:
            raise CaptureError(
                "a leaf that requires a gradient is made inside and leaves the function",
                advice="make it outside of the function",
            )
        if id(value) not in self._positions:
            self._positions[id(value)] = len(self.tensors)
            self.tensors.append(value)
        return "tensor", self._positions[id(value)]


def capture_graph(
    trace: Trace, graph: torch.fx.GraphModule, given: Sequence[private_dynamo.CallersInput]
) -> tuple[CaptureResult, CallersCall]:
    """Run a graph that another compiler has captured under an open trace.

    Raises :class:`CaptureError` or :class:`InputError` for what Dovetail cannot take.
    """
    # The caller is a compiler itself, and says so.
    refusal = dataclasses.replace(trace.ambient, compiling=False).refuses_capture
    if refusal:
        raise CaptureError(refusal, advice="call the function outside of that mode")
    inputs = _Inputs(trace)
    inside, nesting = AmbientState.snapshot(), autocast_nesting()
    try:
        result = _GraphRunner(graph, trace, inputs.attribute).run(*inputs.arguments(given))
    finally:
        change = AmbientChange.between(inside, nesting)
        change.take_back()
    if change.unsettable:
        raise CaptureError(f"the graph changes the state of torch: {change.differences[0]}")
    for traced in trace.inputs:
        if traced.changes_requires_grad():
            raise CaptureError(f"requires_grad of {traced.name} is changed", advice="set it outside of the function")
    leaves, spec = private_trees.tree_flatten(result)
    sorter = _Results(inputs)
    results = tuple(map(sorter.sort, leaves))
    capture = CaptureResult(
        graph,
        tuple(sorter.tensors),
        tuple(inputs.descriptors),
        inputs.guards,
        trace.program(tuple(sorter.tensors)),
        trace.bindings(),
        numbers=tuple(sorter.numbers),
        ambient=trace.ambient,
        ambient_change=None if change.is_empty else change,
    )
    return capture, CallersCall(inputs.guards, tuple(inputs.origins), frozenset(inputs.carriers), results, spec)


@dataclass(frozen=True, eq=False)
class TorchBackend:
    """A backend for ``torch.compile``; made by :func:`torch_backend`. ``events`` says what it did."""

    options: Options
    inner: Backend
    events: EventLog = field(default_factory=EventLog)

    @property
    def __name__(self) -> str:
        return f"dovetail_{self.inner.name}"

    def __deepcopy__(self, memo: dict[int, Any]) -> TorchBackend:
        """Copied along with a model that it compiles, and changed by nothing."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as its options."""
        return _with_options, (self.options,)

    def __call__(
        self, graph: torch.fx.GraphModule, inputs: Sequence[Any], mode: str | None = None, **more: Any
    ) -> TorchCompiled:
        """Compile a graph that torch has captured. What cannot be compiled runs as it is, with a warning."""
        _refuse_mode(mode, more)
        if self.inner.takes_program and not self.options.passes:
            return graph.forward
        try:
            return self._compile(graph, inputs)
        except (CaptureError, InputError) as error:
            return self._fall_back(graph, error)
        except DovetailError:
            raise
        except Exception as error:  # noqa: BLE001  (a graph that cannot be captured is still a graph that runs)
            return self._fall_back(graph, CaptureError(f"capture failed with {type(error).__name__}: {error}"))

    def _compile(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> TorchCompiled:
        load_rules()
        with contextlib.ExitStack() as outer:
            outer.enter_context(private_state.preserved_rng_state())
            outer.enter_context(self.events.span("compile", caller="torch.compile"))
            with self.events.span("capture"), contextlib.ExitStack() as stack:
                fake_mode = private_dynamo.callers_fake_mode(inputs) or private_tracing.FakeTensorMode(
                    shape_env=ShapeEnv()
                )
                outer.enter_context(private_dynamo.symbolic_sizes_in(fake_mode))
                given = private_dynamo.callers_inputs(graph, inputs, fake_mode)
                calls: list[CallersCall] = []

                def frontend(trace: Trace, graph: Any, given: Any, _: Mapping[str, Any]) -> CaptureResult:
                    capture, call = capture_graph(trace, graph, given)
                    calls.append(call)
                    return capture

                state = create_state(stack, graph, tuple(given), frontend=frontend, fake_mode=fake_mode)
                for item, real in zip(given, inputs, strict=True):
                    if isinstance(real, torch.Tensor) and real is not item.value:
                        state.trace.check_input(real, item.name)
                joint = capture_joint(state)
            for graph_pass in self.options.passes:
                joint = joint.apply(graph_pass)
            compiled = compile_joint(
                None,
                joint,
                self.inner,
                options=self.options.backend_options,
                events=self.events,
                memory_budget=self.options.memory_budget,
                numerics=self.options.numerics,
            )
            return calls[0].runtime(compiled)

    def _fall_back(self, graph: torch.fx.GraphModule, error: CaptureError | InputError) -> TorchCompiled:
        self.events.note("runs as torch captured it", reason=error.what, where=error.where)
        if self.options.fullgraph:
            raise error
        warnings.warn(f"a graph of torch.compile runs eagerly: {error}", EagerFallbackWarning, stacklevel=2)
        return graph.forward


def _refuse_mode(mode: str | None, more: Mapping[str, Any]) -> None:
    if mode not in (None, "default"):
        raise OptionError(
            f"backend 'dovetail' has no mode {mode!r}",
            advice='use options={"inner": "inductor", "backend_options": {...}} with the settings that the mode stands for',
        )
    if more:
        raise OptionError(f"backend 'dovetail' takes no argument {next(iter(more))!r}")


def _with_options(options: Options) -> TorchBackend:
    return TorchBackend(options, choose_backend(options.backend, options.numerics))


def torch_backend(
    inner: str | Callable[..., Any] | None = None,
    *,
    fullgraph: bool = False,
    passes: Sequence[Callable[[Any], Any]] = (),
    memory_budget: float | int | None = None,
    numerics: str = "fast",
    backend_options: Mapping[str, Any] | None = None,
) -> TorchBackend:
    """A backend for ``torch.compile``: its graphs go through Dovetail's stages, compiled by the backend ``inner``.

    ``passes``, ``memory_budget``, ``numerics`` and ``backend_options`` are those of :func:`dovetail.compile`. A graph that
    cannot be compiled runs as torch captured it, with one :class:`EagerFallbackWarning`; with ``fullgraph=True`` it is an error.

    >>> import torch, dovetail
    >>> doubled = torch.compile(lambda x: x * 2, backend=dovetail.torch_backend("aten"))
    """
    options = make_options(
        backend=inner,
        fullgraph=fullgraph,
        passes=tuple(passes),
        memory_budget=memory_budget,
        numerics=numerics,
        backend_options=dict(backend_options or {}),
    )
    return _with_options(options)


def dovetail(
    graph: torch.fx.GraphModule, inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None, **more: Any
) -> TorchCompiled:
    """What ``torch.compile(backend="dovetail", options={...})`` calls; ``options`` are the arguments of
    :func:`torch_backend` by name.
    """
    given = dict(options or {})
    for name in given:
        if name not in _OPTION_NAMES:
            raise OptionError(
                f"backend 'dovetail' has no option {name!r}", advice=f"the options are: {', '.join(_OPTION_NAMES)}"
            )
    return torch_backend(**given)(graph, inputs, **more)
