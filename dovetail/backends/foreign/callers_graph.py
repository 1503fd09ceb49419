"""The capture of a graph that torch.compile hands over: run under an open trace, and called in the place of the original.

The trace lives in the caller's fake mode and shape environment. The caller's symbolic sizes are used as they are, and what is
assumed about them while the backward is traced or the inner backend compiles becomes a guard of the caller's.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.aot.capture_result import CaptureResult
from dovetail.aot.compiled_graph import CompiledGraph
from dovetail.aot.descriptors import BufferInput, Descriptor, ParamInput, UserInput
from dovetail.errors import CaptureError, UserLocation
from dovetail.guards import AmbientChange, AmbientState, GuardSet, autocast_nesting
from dovetail.torch_private import dynamo as private_dynamo
from dovetail.torch_private import sizes as private_sizes
from dovetail.torch_private import tensors as private_tensors
from dovetail.torch_private import tracing as private_tracing
from dovetail.torch_private import trees as private_trees
from dovetail.trace import Trace

_MODULE_TABLE = re.compile(r"\._(modules|parameters|buffers)\['([^']+)'\]")
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (.*)\n\s*(.*)')


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
    """The user's line that made a node of the caller's graph: the innermost one outside of torch."""
    frames = _FRAME.findall(str(node.meta.get("stack_trace") or ""))
    for file, line, function, text in reversed(frames):
        if "/torch/" not in file.replace("\\", "/"):
            return UserLocation(file, int(line), function.strip(), text.strip())
    return None


class CallersGuards(GuardSet):
    """Assumptions of stage 1 about inputs that torch.compile does not guard; they are checked at each call.

    A call for which they do not hold runs the graph as torch captured it, which is right for all inputs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.leafness: dict[int, bool] = {}
        self.is_separate = False
        self.values: list[torch.Tensor] = []

    def add_leafness(self, index: int, location: UserLocation | None = None) -> None:
        """Assume that an input stays a leaf, or no leaf."""
        if self.values[index].requires_grad:
            self.leafness[index] = self.values[index].is_leaf

    def add_separate_memory(self, index: int) -> None:
        """Assume that no two inputs share memory."""
        self.is_separate = True

    def check(self) -> Callable[[Sequence[torch.Tensor]], bool] | None:
        """A function that says whether the assumptions hold for other tensors; None if there are none."""
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
            self._trace.note_line()
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
    """The call of a compiled graph in the place of the caller's graph.

    ``inputs`` has for each traced input the number of its argument, or the tensor that the graph holds itself; an argument in
    ``carriers`` is a number that comes as the size of an empty tensor. ``results`` has the kind of each leaf of the result:
    ``("tensor", index)``, ``("number", index)`` or ``("constant", value)``.
    """

    guards: CallersGuards
    inputs: tuple[int | torch.Tensor, ...]
    carriers: frozenset[int]
    results: tuple[tuple[str, Any], ...]
    result_spec: private_trees.TreeSpec

    def runtime(self, compiled: CompiledGraph) -> Callable[..., Any]:
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
            # Before the graph runs, which may change a size in place.
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
        """The traced values on which the graph is run."""
        found: list[Any] = [item.value for item in given]
        for position, item in enumerate(given):
            if isinstance(item.value, torch.Tensor):
                found[position] = self._add(item.value, item.name, position)
        for position, item in enumerate(given):
            if isinstance(item.value, torch.Tensor):
                continue
            if not private_sizes.is_symbolic(item.value):
                # As an input it would be the same at every call.
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
            return {"size": value.shape, "stride": value.stride(), "offset": (value.storage_offset(),)}[kind][dim]
        with private_tracing.disable_current_modes():
            if not item.value >= 0:  # a guard of the caller's: a size cannot be negative
                return int(item.value)
            with self.trace.fake_mode:
                carrier = torch.empty((item.value, 0))
        self._alive.append(carrier)
        self.carriers.add(position)
        return self._add(carrier, item.name, position).shape[0]

    def attribute(self, value: torch.Tensor, name: str) -> torch.Tensor:
        """The traced value of a tensor that the graph holds itself."""
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


class CallersFrontend:
    """A frontend for stage 0 whose function is a graph that torch.compile has captured. The calling tree::

        __call__
        +-- _Inputs.arguments     the caller's fake values become inputs of the trace
        +-- _GraphRunner.run      the graph runs under the trace
        +-- _Results.sort         the leaves of its result

    ``call`` says afterwards how the compiled graph is called.
    """

    call: CallersCall

    def __call__(
        self,
        trace: Trace,
        graph: torch.fx.GraphModule,
        given: Sequence[private_dynamo.CallersInput],
        _: Mapping[str, Any],
    ) -> CaptureResult:
        """Capture. Raises :class:`CaptureError` or :class:`InputError` for a graph that Dovetail cannot take."""
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
                raise CaptureError(
                    f"requires_grad of {traced.name} is changed", advice="set it outside of the function"
                )
        leaves, spec = private_trees.tree_flatten(result)
        sorter = _Results(inputs)
        results = tuple(map(sorter.sort, leaves))
        self.call = CallersCall(inputs.guards, tuple(inputs.origins), frozenset(inputs.carriers), results, spec)
        return CaptureResult(
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
