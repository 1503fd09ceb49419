"""Makes the graph of a document that was read from disk: operators from the list, fake values, descriptors, guards, and a lint."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dovetail.aot.capture_result import CaptureResult
from dovetail.aot.descriptors import BufferInput, ParamInput
from dovetail.aot.joint_graph import JointGraph, PassRecord
from dovetail.artefacts.allow_list import (
    check_arguments,
    makes_a_float,
    name_of_operator,
    operator_by_name,
    takes_only_floats,
)
from dovetail.artefacts.arguments import decode_argument, device_named, value_named
from dovetail.artefacts.loaded_graph import LoadedGraph
from dovetail.artefacts.specs import (
    StoredResult,
    build_result,
    decode_descriptor,
    decode_spec,
    derivative_order,
    name_of_input,
)
from dovetail.backends.common.size_expressions import depends_on_data, evaluate
from dovetail.backends.common.sizes_elsewhere import new_fake_mode
from dovetail.errors import ArtefactError, InputError
from dovetail.guards import GuardSet
from dovetail.quirks.functionalisation import SAME_DTYPE
from dovetail.torch_private import numbers as private_numbers
from dovetail.torch_private import operators as private_operators
from dovetail.torch_private import sizes as private_sizes
from dovetail.torch_private import tracing as private_tracing
from dovetail.trace import Bindings, Program, shape_guards
from dovetail.trace.shapes import RecordingShapeEnv


class GraphReader:
    """Reads nodes in their order; each gets its fake value. The calling tree::

    add
    +-- _placeholder
    +-- _constant
    +-- _call
        +-- operator_by_name     from the allow-list
        +-- decode_argument
        +-- check_arguments      against the operator's schema
    """

    def __init__(self, fake_mode: Any, symbols: Sequence[Any], tensors: Mapping[str, torch.Tensor]) -> None:
        self.graph = torch.fx.Graph()
        self.root = torch.nn.Module()
        self._fake_mode = fake_mode
        self._symbols = symbols
        self._tensors = tensors
        self._known: dict[str, torch.fx.Node] = {}
        self._has_operators = False

    def node(self, name: str) -> torch.fx.Node:
        """The node with a name; raises :class:`ArtefactError` unless it came before."""
        found = self._known.get(name)
        if found is None:
            raise ArtefactError(f"the artefact reads {name!r} before it is computed")
        return found

    def add(self, entry: Mapping[str, Any]) -> None:
        """Add one node; raises :class:`ArtefactError` for one that no graph can have."""
        name = entry["name"]
        if name in self._known:
            raise ArtefactError(f"the artefact has two nodes named {name!r}")
        if entry["op"] == "placeholder" and self._has_operators:
            raise ArtefactError(f"the input {name} comes after an operator")
        self._has_operators = entry["op"] != "placeholder"
        make = {"placeholder": self._placeholder, "call_function": self._call, "get_attr": self._constant}[entry["op"]]
        node, value = make(entry)
        if node.name != name:
            raise ArtefactError(f"{name!r} is not a name that a node can have")
        node.meta["val"] = value
        node.meta["phase"] = entry.get("phase", "forward")
        self._known[name] = node

    def _placeholder(self, entry: Mapping[str, Any]) -> tuple[torch.fx.Node, Any]:
        shape = [evaluate(item, self._symbols) for item in entry["shape"]]
        stride = [evaluate(item, self._symbols) for item in entry["stride"]]
        if len(shape) != len(stride) or any(private_sizes.hint(item) < 0 for item in (*shape, *stride)):
            raise ArtefactError(f"{entry['name']} has no shape that a tensor can have")
        dtype, device = value_named("dtype", entry["dtype"]), device_named(entry["device"])
        with private_tracing.disable_current_modes(), self._fake_mode, torch.no_grad():
            value = torch.empty_strided(shape, stride, dtype=dtype, device=device)
        return self.graph.create_node("placeholder", entry["name"], (), {}, name=entry["name"]), value

    def _constant(self, entry: Mapping[str, Any]) -> tuple[torch.fx.Node, Any]:
        name = entry["target"]
        key = f"constant.{name}"
        if key not in self._tensors or hasattr(torch.nn.Module, name):
            raise ArtefactError(f"the artefact has no constant {name!r}")
        self.root.register_buffer(name, self._tensors[key])
        value = self._fake_mode.from_tensor(self._tensors[key], static_shapes=True)
        return self.graph.create_node("get_attr", name, (), {}, name=entry["name"]), value

    def _call(self, entry: Mapping[str, Any]) -> tuple[torch.fx.Node, Any]:
        target = operator_by_name(entry["target"])
        args = tuple(decode_argument(item, self.node) for item in entry["args"])
        names = [key for key, _ in entry["kwargs"] if isinstance(key, str)]
        if len(names) != len(entry["kwargs"]):
            raise ArtefactError(f"{entry['name']} has an argument without a name")
        check_arguments(target, len(args), names)
        kwargs = {key: decode_argument(item, self.node) for key, item in entry["kwargs"]}
        node = self.graph.create_node("call_function", target, args, kwargs, name=entry["name"])
        values: Any = torch.fx.node.map_arg((args, kwargs), lambda item: item.meta["val"])
        dtypes = {item.dtype for item in values[0] if isinstance(item, torch.Tensor)}
        if target in SAME_DTYPE and len(dtypes) > 1:
            raise ArtefactError(f"{name_of_operator(target)} got operands of different dtypes")
        if isinstance(target, private_operators.OpOverload) or target is operator.getitem:
            # A number that is read from data is a symbol that no other value defines.
            unbound = self._fake_mode.shape_env.ignore_fresh_unbacked_symbols()
            with private_tracing.disable_current_modes(), self._fake_mode, torch.no_grad(), unbound:
                value = target(*values[0], **values[1])
        else:
            value = self._number(entry["target"], target, values[0])
        if depends_on_data(value):
            raise ArtefactError(f"the size of {node.name} depends on data, and no artefact has such sizes")
        return node, value

    def _number(self, name: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """The result of a function of numbers; one that a tensor's data decide is a symbol of its own, as in a capture."""
        if not all(isinstance(item, (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)) for item in arguments):
            raise ArtefactError(f"{name} is given something else than numbers")
        if any(isinstance(item, torch.SymFloat) for item in arguments):
            if not makes_a_float(name):
                raise ArtefactError(f"{name} of a number that depends on data is not allowed in an artefact")
            environment = self._fake_mode.shape_env
            with environment.ignore_fresh_unbacked_symbols():
                return environment.create_unbacked_symfloat()
        if takes_only_floats(name):
            raise ArtefactError(f"{name} is given no float")
        result = function(*arguments)
        if type(result) is int and abs(result) >> 63:
            # A chain of products would double the digits at each step.
            raise ArtefactError(f"{name} makes a number that no size can be")
        return result


_NO_PROGRAM = Program((), (), (), ("the graph was loaded from a file, without its program",))


class _UnknownFunction(GuardSet):
    """In place of the guards of a loaded graph: the function that it was captured from is not known."""

    @property
    def is_frozen(self) -> bool:
        """Raises :class:`InputError`."""
        raise InputError(
            "a loaded graph does not know the function that it was captured from",
            advice="call what dovetail.load returned, or its .compile(...)",
        )


def build(payload: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> LoadedGraph:
    """The graph of a document that fits the schema; raises whatever a document that means nothing leads to."""
    environment = RecordingShapeEnv()
    symbols = [
        private_numbers.new_size(environment, item["hint"], f"symbol_{number}", item["low"], item["high"])
        for number, item in enumerate(payload["symbols"])
    ]
    fake_mode = new_fake_mode(environment)
    reader = GraphReader(fake_mode, symbols, tensors)
    for entry in payload["nodes"]:
        reader.add(entry)
    joint = _joint_graph(payload, reader, fake_mode)
    try:
        build_result(payload["result"], joint.spec.outputs)
    except IndexError as error:
        raise ArtefactError("the result in the artefact names an output that does not exist") from error
    for item in payload["guards"]:
        if not bool(evaluate(item, symbols)):
            raise ArtefactError("the artefact's guards do not hold for its own sizes")
    joint.lint()
    if derivative_order(joint) != payload["derivative_order"]:
        raise ArtefactError("the artefact's derivative order is not that of its graph")
    shape_guards(environment, joint.capture.bindings)
    state = _state(payload, joint, tensors)
    return LoadedGraph(joint, state, payload["derivative_order"], payload["result"], payload["torch"])


def _joint_graph(payload: Mapping[str, Any], reader: GraphReader, fake_mode: Any) -> JointGraph:
    """The joint graph of nodes that have been read."""
    results = [None if name is None else reader.node(name) for name in payload["results"]]
    reader.graph.output(results)
    inputs = tuple(map(decode_descriptor, payload["inputs"]))
    outputs = tuple(None if item is None else decode_descriptor(item) for item in payload["outputs"])
    primals, forward = payload["num_primals"], payload["num_forward_outputs"]
    placeholders = reader.graph.find_nodes(op="placeholder")
    if len(placeholders) != len(inputs) or primals > len(inputs) or len(outputs) != forward + primals:
        raise ArtefactError("the artefact does not describe each input and output of its graph")
    for node, descriptor in zip(placeholders, inputs, strict=True):
        node.meta["desc"] = descriptor
    spec = decode_spec(payload["spec"], primals, forward)
    if any(node is None for node in results[:forward]):
        raise ArtefactError("the artefact does not compute all of its outputs")
    if sum(spec.output_differentiable) != len(inputs) - primals:
        raise ArtefactError("the artefact does not have one tangent for each differentiable output")
    fakes = [node.meta["val"] for node in placeholders[:primals]]
    bindings = Bindings().add(fakes, [name_of_input(item) for item in inputs[:primals]])
    recipe = StoredResult(payload["result"])
    return JointGraph(
        graph_module=private_tracing.lazy_graph_module(reader.root, reader.graph),
        input_descriptors=inputs,
        output_descriptors=outputs,
        num_primals=primals,
        num_forward_outputs=forward,
        spec=spec,
        fake_mode=fake_mode,
        capture=CaptureResult(None, (), inputs, _UnknownFunction(), _NO_PROGRAM, bindings, recipe=recipe),
        provenance=(PassRecord("load", 0.0, len(reader.graph.nodes), len(reader.graph.nodes)),),
        inexact=tuple(payload["inexact"]),
    )


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
