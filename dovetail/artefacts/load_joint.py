"""An exported joint graph, read back: a joint graph again, and something to call, without the user's code.

Everything in the file is data that is checked: first against the schema, then against the list of operators, then by running
the graph on fake tensors (shapes only, no memory), then by ``JointGraph.lint``. What does not fit raises :class:`ArtefactError`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dovetail.aot.capture_result import CaptureResult
from dovetail.aot.compiled_graph import CompiledGraph
from dovetail.aot.descriptors import AliasBase, BufferInput, Descriptor, ParamInput
from dovetail.aot.joint_graph import JointGraph, PassRecord
from dovetail.artefacts.allow_list import check_arguments, name_of_operator, operator_by_name
from dovetail.artefacts.artefact import read_artefact
from dovetail.artefacts.export_joint import NAMED, WRAPPING, StoredResult, derivative_order, name_of_input
from dovetail.artefacts.loaded_parts import LoadedView, build_result, highest_tensor
from dovetail.artefacts.schema import make_schema, validate
from dovetail.artefacts.size_expressions import evaluate
from dovetail.backends import compile_with, lookup_backend
from dovetail.errors import ArtefactError, DovetailError, InputError
from dovetail.guards import GuardSet
from dovetail.quirks.functionalisation import SAME_DTYPE
from dovetail.runtime.spec import (
    FreshOutput,
    InputOutput,
    Mutation,
    OutputDependency,
    OutputTensor,
    RuntimeSpec,
    ViewOutput,
)
from dovetail.torch_private import sizes as private_sizes
from dovetail.torch_private import tracing as private_tracing
from dovetail.trace import Bindings, Program, shape_guards
from dovetail.trace.shapes import RecordingShapeEnv

_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_LAYOUTS = {str(value): value for value in vars(torch).values() if isinstance(value, torch.layout)}
_FORMATS = {str(value): value for value in vars(torch).values() if isinstance(value, torch.memory_format)}
_TABLES: dict[str, Mapping[str, Any]] = {"dtype": _DTYPES, "layout": _LAYOUTS, "memory_format": _FORMATS}


_NO_PROGRAM = Program((), (), (), unreplayable="the graph was loaded from a file, without its program")


class _UnknownFunction(GuardSet):
    """In place of the guards of a loaded graph: the function that it was captured from is not known."""

    @property
    def is_frozen(self) -> bool:
        """Raises :class:`InputError`."""
        raise InputError(
            "a loaded graph does not know the function that it was captured from",
            advice="call what dovetail.load returned, or its .compile(...)",
        )


@dataclass(frozen=True, eq=False)
class LoadedGraph:
    """A joint graph from disk, with the values that were exported with it.

    Call it with the inputs that are not in ``state``, in the order of ``open_inputs``; it returns what the captured function
    returned, differentiable ``derivative_order`` times, and writes to the tensors that the function wrote to. ``joint`` is the
    graph itself: it can be printed, edited and compiled again.
    """

    joint: JointGraph
    state: dict[str, torch.Tensor]
    derivative_order: int
    result: Any
    exported_by: str = ""
    compiled: CompiledGraph | None = None
    _cache: dict[str, Any] = field(default_factory=dict)

    @property
    def inputs(self) -> tuple[str, ...]:
        """All inputs of the graph, primals first, as sentences."""
        return tuple(str(descriptor) for descriptor in self.joint.input_descriptors)

    @property
    def outputs(self) -> tuple[str | None, ...]:
        """All outputs of the graph, as sentences."""
        return tuple(None if item is None else str(item) for item in self.joint.output_descriptors)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the primals, as ``state`` has them."""
        return tuple(name_of_input(item) for item in self.joint.input_descriptors[: self.joint.num_primals])

    @property
    def open_inputs(self) -> tuple[str, ...]:
        """The names of the inputs that a call must bring."""
        return tuple(name for name in self.names if name not in self.state)

    def bind(self, values: Mapping[str, torch.Tensor]) -> LoadedGraph:
        """The same graph with these values for inputs, by name. Raises :class:`InputError` for a name that is no input."""
        unknown = sorted(set(values) - set(self.names))
        if unknown:
            raise InputError(
                f"the graph has no input {unknown[0]!r}", advice=f"its inputs are: {', '.join(self.names)}"
            )
        return dataclasses.replace(self, state={**self.state, **values}, _cache={})

    def compile(self, backend: str | Callable[..., Any] | None = None, **options: Any) -> LoadedGraph:
        """The same graph, run by another backend than ``"aten"``; options are those of ``JointGraph.compile``."""
        return dataclasses.replace(self, compiled=self.joint.compile(backend, **options), _cache={})

    def __call__(self, *inputs: torch.Tensor) -> Any:
        """Run the graph. Raises :class:`InputError` for inputs that it was not captured for."""
        missing = self.open_inputs
        if len(inputs) != len(missing):
            raise InputError(f"{len(missing)} inputs are needed, not {len(inputs)}: {', '.join(missing)}")
        given = iter(inputs)
        primals = [self.state[name] if name in self.state else next(given) for name in self.names]
        if self.compiled is None:
            object.__setattr__(self, "compiled", self.joint.compile("aten"))
        assert self.compiled is not None
        self._check(primals, 0)
        self._check_autograd(primals)
        return build_result(self.result, self.compiled.run(primals))

    def run(
        self, primals: list[torch.Tensor], tangents: list[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        """Forward outputs and one gradient (or None) for each primal. Raises :class:`InputError` for other inputs."""
        count = len(self.joint.input_descriptors)
        if len(primals) != self.joint.num_primals or len(primals) + len(tangents) != count:
            raise InputError(
                f"{self.joint.num_primals} primals and {count - self.joint.num_primals} tangents are needed"
            )
        values = [value.detach() for value in (*primals, *tangents)]
        self._check(values, 0)
        if "whole" not in self._cache:
            module = self.joint.graph_module
            examples = [node.meta["val"] for node in self.joint.graph.find_nodes(op="placeholder")]
            self._cache["whole"] = compile_with(lookup_backend("aten"), module, examples, "inference", {})
        with torch.no_grad():
            results = self._cache["whole"](values)
        return results[: self.joint.num_forward_outputs], results[self.joint.num_forward_outputs :]

    def _check(self, values: Sequence[torch.Tensor], start: int) -> None:
        """Raise :class:`InputError` unless the tensors are such as the graph was captured for."""
        placeholders = self.joint.graph.find_nodes(op="placeholder")[start:]
        strided = any("as_strided" in str(node.target) for node in self.joint.graph.nodes)
        for value, node, name in zip(values, placeholders, self.inputs[start:]):
            promised = node.meta["val"]
            if not isinstance(value, torch.Tensor) or type(value) not in (torch.Tensor, torch.nn.Parameter):
                raise InputError(f"{name} must be a plain tensor, not a {type(value).__name__}")
            if value.dtype != promised.dtype or value.layout is not torch.strided or value.dim() != promised.dim():
                raise InputError(f"{name} must be {promised.dtype} of {promised.dim()} dimensions")
            if value.device.type != promised.device.type or value.is_conj() or value.is_neg():
                raise InputError(f"{name} must be a plain tensor on {promised.device.type}, not on {value.device}")
            for kind, found, wanted in (
                ("shape", value.shape, promised.shape),
                ("strides", value.stride(), promised.stride()),
            ):
                fixed = zip(found, wanted, value.shape)
                if any(
                    not private_sizes.is_symbolic(one) and one != other and (kind == "shape" or size > 1)
                    for other, one, size in fixed
                ):
                    raise InputError(f"{name} has the {kind} {tuple(found)}, and the graph is for {tuple(wanted)}")
            if strided and value.storage_offset() != 0:
                raise InputError(f"{name} is part of a larger tensor", advice="hand over a clone")
        guards = self._guards()
        failures = guards.failures(values) if guards is not None and not guards.holds(values) else []
        if failures:
            raise InputError("the graph was captured for other sizes: " + "; ".join(text for text, _ in failures))

    def _guards(self) -> Any:
        environment = self.joint.fake_mode.shape_env
        # A backend may have assumed more since the last call.
        count = len(environment.guards)
        if self._cache.get("guards", (-1, None))[0] != count:
            self._cache["guards"] = (count, shape_guards(environment, self.joint.capture.bindings))
        return self._cache["guards"][1]

    def _check_autograd(self, primals: Sequence[torch.Tensor]) -> None:
        spec = self.joint.spec
        if torch.is_grad_enabled():
            for value, flag, name in zip(primals, spec.input_requires_grad, self.inputs):
                if value.requires_grad and not flag:
                    raise InputError(
                        f"{name} requires a gradient, and the graph has none for it",
                        advice="detach it, or capture the function with an input that requires a gradient",
                    )
        written = {mutation.input_index for mutation in spec.mutations}
        storages = [value.untyped_storage().data_ptr() for value in primals]
        for index in written:
            if primals[index].numel() and storages.count(storages[index]) > 1:
                raise InputError(f"{self.inputs[index]} is written to and shares memory with another input")

    def __str__(self) -> str:
        return (
            f"a graph of {len(self.joint.graph.nodes)} nodes exported with torch {self.exported_by}, derivative order "
            f"{self.derivative_order}; inputs: {', '.join(self.open_inputs)}; values from the file: {len(self.state)}"
        )


def load(path: str | os.PathLike[str]) -> LoadedGraph:
    """Read an artefact that ``joint.export`` wrote. Raises :class:`ArtefactError`; no code from the file is executed."""
    payload, tensors = read_artefact(path)
    try:
        validate(payload, make_schema())
        return _build(payload, tensors)
    except ArtefactError:
        raise
    except DovetailError as error:
        raise ArtefactError(f"{path} does not hold a graph: {error.what}", advice="export it again") from error
    except RecursionError as error:
        raise ArtefactError(f"{path} is nested too deeply", advice="export it again") from error
    except Exception as error:
        raise ArtefactError(
            f"{path} does not hold a graph: {type(error).__name__}: {error}", advice="export it again"
        ) from error


def _build(payload: Mapping[str, Any], tensors: dict[str, torch.Tensor]) -> LoadedGraph:
    environment = RecordingShapeEnv()
    fake_mode: Any = private_tracing.FakeTensorMode(shape_env=environment, allow_fallback_kernels=False)
    symbols = [
        private_sizes.new_size(environment, item["hint"], f"symbol_{number}", item["low"], item["high"])
        for number, item in enumerate(payload["symbols"])
    ]
    reader = _Reader(fake_mode, symbols, tensors)
    for entry in payload["nodes"]:
        reader.add(entry)
    results = [None if name is None else reader.node(name) for name in payload["results"]]
    reader.graph.output(results)
    reader.finish()
    inputs = tuple(_descriptor(item) for item in payload["inputs"])
    outputs = tuple(None if item is None else _descriptor(item) for item in payload["outputs"])
    primals, forward = payload["num_primals"], payload["num_forward_outputs"]
    fakes = [node.meta["val"] for node in reader.graph.find_nodes(op="placeholder")]
    if len(fakes) != len(inputs) or primals > len(inputs) or len(outputs) != forward + primals:
        raise ArtefactError("the artefact does not describe each input and output of its graph")
    for node, descriptor in zip(reader.graph.find_nodes(op="placeholder"), inputs, strict=True):
        node.meta["desc"] = descriptor
    spec = _spec(payload["spec"], primals, forward, results)
    if sum(spec.output_differentiable) != len(inputs) - primals:
        raise ArtefactError("the artefact does not have one tangent for each differentiable output")
    if highest_tensor(payload["result"]) >= len(spec.outputs):
        raise ArtefactError("the result in the artefact names an output that does not exist")
    bindings = Bindings(fakes[:primals], [name_of_input(item) for item in inputs[:primals]])
    for item in payload["guards"]:
        if not bool(evaluate(item, symbols)):
            raise ArtefactError("the artefact's guards do not hold for its own sizes")
    joint = JointGraph(
        graph_module=private_tracing.lazy_graph_module(reader.root, reader.graph),
        input_descriptors=inputs,
        output_descriptors=outputs,
        num_primals=primals,
        num_forward_outputs=forward,
        spec=spec,
        fake_mode=fake_mode,
        capture=CaptureResult(
            None, (), inputs, _UnknownFunction(), _NO_PROGRAM, bindings, recipe=StoredResult(payload["result"])
        ),
        provenance=(PassRecord("load", 0.0, len(reader.graph.nodes), len(reader.graph.nodes)),),
        inexact=tuple(payload["inexact"]),
    )
    joint.lint()
    if derivative_order(joint) != payload["derivative_order"]:
        raise ArtefactError("the artefact's derivative order is not that of its graph")
    shape_guards(environment, bindings)
    state = _state(payload, joint, tensors)
    return LoadedGraph(joint, state, payload["derivative_order"], payload["result"], payload["torch"])


class _Reader:
    """Makes nodes from their description, each with its fake value."""

    def __init__(self, fake_mode: Any, symbols: Sequence[Any], tensors: Mapping[str, torch.Tensor]) -> None:
        self.graph = torch.fx.Graph()
        self.root = torch.nn.Module()
        self.used: set[str] = set()
        self._fake_mode = fake_mode
        self._symbols = symbols
        self._tensors = tensors
        self._known: dict[str, torch.fx.Node] = {}
        self._values: dict[torch.fx.Node, Any] = {}

    def node(self, name: str) -> torch.fx.Node:
        """The node of this name; it must have come before."""
        found = self._known.get(name)
        if found is None:
            raise ArtefactError(f"the artefact reads {name!r} before it is computed")
        return found

    def add(self, entry: Mapping[str, Any]) -> None:
        """Add one node."""
        name = entry["name"]
        if name in self._known:
            raise ArtefactError(f"the artefact has two nodes named {name!r}")
        make = {"placeholder": self._placeholder, "call_function": self._call, "get_attr": self._constant}[entry["op"]]
        node, value = make(entry)
        if node.name != name:
            raise ArtefactError(f"{name!r} is not a name that a node can have")
        node.meta["val"] = value
        node.meta["phase"] = entry.get("phase", "forward")
        self._known[name] = node

    def finish(self) -> None:
        """Raise :class:`ArtefactError` for an input after the first operator, which no graph has."""
        seen_other = False
        for node in self.graph.nodes:
            if node.op == "placeholder" and seen_other:
                raise ArtefactError(f"the input {node.name} comes after an operator")
            seen_other = seen_other or node.op != "placeholder"

    def _placeholder(self, entry: Mapping[str, Any]) -> tuple[torch.fx.Node, Any]:
        shape = [evaluate(item, self._symbols) for item in entry["shape"]]
        stride = [evaluate(item, self._symbols) for item in entry["stride"]]
        if len(shape) != len(stride) or any(private_sizes.hint(item) < 0 for item in (*shape, *stride)):
            raise ArtefactError(f"{entry['name']} has no shape that a tensor can have")
        dtype, device = _look_up("dtype", entry["dtype"]), _device(entry["device"])
        with private_tracing.disable_current_modes(), self._fake_mode, torch.no_grad():
            value = torch.empty_strided(shape, stride, dtype=dtype, device=device)
        return self.graph.create_node("placeholder", entry["name"], (), {}, name=entry["name"]), value

    def _constant(self, entry: Mapping[str, Any]) -> tuple[torch.fx.Node, Any]:
        name = entry["target"]
        key = f"constant.{name}"
        if key not in self._tensors or hasattr(torch.nn.Module, name):
            raise ArtefactError(f"the artefact has no constant {name!r}")
        self.used.add(key)
        self.root.register_buffer(name, self._tensors[key])
        value = self._fake_mode.from_tensor(self._tensors[key], static_shapes=True)
        return self.graph.create_node("get_attr", name, (), {}, name=entry["name"]), value

    def _call(self, entry: Mapping[str, Any]) -> tuple[torch.fx.Node, Any]:
        target = operator_by_name(entry["target"])
        args = tuple(self._argument(item) for item in entry["args"])
        names = [key for key, _ in entry["kwargs"] if isinstance(key, str)]
        if len(names) != len(entry["kwargs"]):
            raise ArtefactError(f"{entry['name']} has an argument without a name")
        check_arguments(target, len(args), names)
        kwargs = {key: self._argument(item) for key, item in entry["kwargs"]}
        node = self.graph.create_node("call_function", target, args, kwargs, name=entry["name"])
        values: Any = torch.fx.node.map_arg((args, kwargs), lambda item: item.meta["val"])
        dtypes = {item.dtype for item in values[0] if isinstance(item, torch.Tensor)}
        if target in SAME_DTYPE and len(dtypes) > 1:
            raise ArtefactError(f"{name_of_operator(target)} got operands of different dtypes")
        with private_tracing.disable_current_modes(), self._fake_mode, torch.no_grad():
            value = target(*values[0], **values[1])
        return node, value

    def _argument(self, data: Any) -> Any:
        if isinstance(data, list):
            return [self._argument(item) for item in data]
        if not isinstance(data, dict):
            return data
        ((kind, content),) = data.items()
        if kind == "node":
            return self.node(content)
        if kind == "float":
            return float.fromhex(content)
        if kind == "complex":
            return complex(float.fromhex(content[0]), float.fromhex(content[1]))
        return _device(content) if kind == "device" else _look_up(kind, content)


def _look_up(kind: str, name: str) -> Any:
    found = _TABLES[kind].get(name)
    if found is None:
        raise ArtefactError(f"there is no {kind} {name!r}")
    return found


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ArtefactError(f"there is no device {name!r}") from error
    if device.type not in ("cpu", "cuda", "mps", "xpu"):
        raise ArtefactError(f"a tensor on the device {name!r} cannot be loaded")
    return device


def _descriptor(data: Mapping[str, Any]) -> Descriptor:
    kind = data["kind"]
    if kind in NAMED:
        return NAMED[kind](data["name"])  # type: ignore[no-any-return]
    if kind in WRAPPING:
        return WRAPPING[kind](_descriptor(data["of"]))  # type: ignore[no-any-return]
    return AliasBase(data["index"])


def _spec(data: Mapping[str, Any], primals: int, forward: int, results: Sequence[Any]) -> RuntimeSpec:
    if len(data["input_requires_grad"]) != primals or len(data["output_differentiable"]) != forward:
        raise ArtefactError("the artefact does not describe each input and output of its graph")

    def check(index: int, count: int) -> int:
        if index >= count:
            raise ArtefactError("the artefact names an input or output that does not exist")
        return index

    outputs: list[OutputTensor] = []
    for item in data["outputs"]:
        is_input = item["kind"] == "input" or item.get("of") == "input"
        index = check(item["index"], primals if is_input else forward)
        base = InputOutput(index) if is_input else FreshOutput(index, item["is_leaf"], item["is_freed"])
        if item["kind"] == "view":
            replay = LoadedView((tuple(item["size"]), tuple(item["stride"]), item["offset"]))
            outputs.append(ViewOutput(base, replay, item["differentiable"], item["requires_grad"]))
        else:
            outputs.append(base)
    mutations = tuple(
        Mutation(
            check(item["input_index"], primals),
            check(item["output_index"], forward),
            item["differentiable"],
            item["counted"],
        )
        for item in data["mutations"]
    )
    if len({item.input_index for item in mutations}) != len(mutations):
        raise ArtefactError("the artefact writes twice to one input")
    if any(node is None for node in results[:forward]):
        raise ArtefactError("the artefact does not compute all of its outputs")
    return RuntimeSpec(
        tuple(data["input_requires_grad"]),
        tuple(data["output_differentiable"]),
        tuple(outputs),
        mutations,
        tuple(check(item, forward) for item in data["feeding"]),
        _dependencies(data["ties"], outputs, mutations, tuple(data["output_differentiable"])),
        freed_by_backward=_freed_by_backward(data["freed_together"], sum(data["output_differentiable"])),
        leaf_order=_leaf_order(data["arrangement"], primals),
    )


def _dependencies(
    data: Sequence[Mapping[str, Any]],
    outputs: Sequence[OutputTensor],
    mutations: Sequence[Mutation],
    differentiable: Sequence[bool],
) -> tuple[OutputDependency, ...]:
    """The output dependencies of a file; raises :class:`ArtefactError` unless they can be made in their order."""
    left = {item["output"] for item in data}
    if len(left) != len(data) or any(index >= len(differentiable) or not differentiable[index] for index in left):
        raise ArtefactError("the artefact ties an output that there is not")
    written = {item.input_index: item.output_index for item in mutations}
    found: list[OutputDependency] = []
    for item in data:
        places, inputs = tuple(item["results"]), tuple(item["inputs"])
        if any(place >= len(outputs) for place in places) or any(index not in written for index in inputs):
            raise ArtefactError("the artefact ties an output to a result that there is not")
        bases = [outputs[place].base if isinstance(outputs[place], ViewOutput) else outputs[place] for place in places]
        sources = {base.index if isinstance(base, FreshOutput) else written.get(base.index) for base in bases}
        sources |= {written[index] for index in inputs}
        if sources & left:
            raise ArtefactError("the artefact ties outputs to each other in an order in which they cannot be made")
        left.remove(item["output"])
        found.append(OutputDependency(item["output"], places, inputs))
    return tuple(found)


def _leaf_order(data: Sequence[int], primals: int) -> tuple[int, ...]:
    if data and sorted(data) != list(range(primals)):
        raise ArtefactError("the artefact does not say in which order its inputs get their gradients")
    return tuple(data)


def _freed_by_backward(data: Sequence[Sequence[int]] | None, count: int) -> tuple[frozenset[int], ...] | None:
    if data is None:
        return None
    if len(data) != count or any(index >= count for item in data for index in item):
        raise ArtefactError("the artefact does not say for each differentiable output what it frees")
    return tuple(map(frozenset, data))


def _state(
    payload: Mapping[str, Any], joint: JointGraph, tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The values in the file, as leaves that require a gradient where the captured function's did."""
    state: dict[str, torch.Tensor] = {}
    names = [name_of_input(item) for item in joint.input_descriptors[: joint.num_primals]]
    placeholders = joint.graph.find_nodes(op="placeholder")
    constants = {f"constant.{node.target}" for node in joint.graph.find_nodes(op="get_attr")}
    if set(tensors) != constants | {key for _, key in payload["state"]}:
        raise ArtefactError("the artefact holds tensors that nothing reads, or lacks some")
    for name, key in payload["state"]:
        if names.count(name) != 1 or name in state or key in constants:
            raise ArtefactError(f"the artefact has a value for {name!r}, which is not one input")
        position = names.index(name)
        value, promised = tensors[key], placeholders[position].meta["val"]
        if tuple(value.shape) != tuple(promised.shape) or value.dtype != promised.dtype:
            raise ArtefactError(f"the artefact's value for {name!r} does not fit the graph")
        if value.stride() != promised.stride():
            value = torch.empty_strided(promised.shape, promised.stride(), dtype=value.dtype).copy_(value)
        if promised.device.type != "cpu":
            value = value.to(promised.device)
        if isinstance(joint.input_descriptors[position], (ParamInput, BufferInput)) or value.is_floating_point():
            value = value.requires_grad_(joint.spec.input_requires_grad[position])
        state[name] = value
    return state
