"""Reads a joint graph from disk, without the user's code.

A file is data that is checked: first against the schema, then against the list of operators, then by running the graph on fake
tensors (shapes only, no memory), then by ``JointGraph.lint``. A file that fails a check raises :class:`ArtefactError`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from dovetail.aot.capture_result import CaptureResult
from dovetail.aot.descriptors import BufferInput, ParamInput
from dovetail.aot.joint_graph import JointGraph, PassRecord
from dovetail.artefacts.descriptors import decode_descriptor, name_of_input
from dovetail.artefacts.export import derivative_order
from dovetail.artefacts.files import read_artefact
from dovetail.artefacts.graph_reader import GraphReader
from dovetail.artefacts.loaded_graph import LoadedGraph
from dovetail.artefacts.results import StoredResult, build_result
from dovetail.artefacts.schema import validate
from dovetail.artefacts.size_expressions import evaluate
from dovetail.artefacts.specs import decode_spec
from dovetail.errors import ArtefactError, DovetailError, InputError
from dovetail.guards import GuardSet
from dovetail.torch_private import numbers as private_numbers
from dovetail.torch_private import tracing as private_tracing
from dovetail.trace import Bindings, Program, shape_guards
from dovetail.trace.shapes import RecordingShapeEnv

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


def load(path: str | os.PathLike[str]) -> LoadedGraph:
    """Read an artefact that ``joint.export`` wrote. Raises :class:`ArtefactError`; no code from the file is executed.

    The calling tree::

        load
        +-- read_artefact        checks format, version and checksums
        +-- validate             checks the form of the document
        +-- _build
            +-- GraphReader.add  makes each node, and runs it on fake tensors
            +-- _joint_graph     decodes descriptors and spec
            +-- evaluate         checks the guards on sizes
            +-- JointGraph.lint
            +-- _state           checks the values of inputs
    """
    payload, tensors = read_artefact(path)
    try:
        validate(payload)
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
        private_numbers.new_size(environment, item["hint"], f"symbol_{number}", item["low"], item["high"])
        for number, item in enumerate(payload["symbols"])
    ]
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
    bindings = Bindings(fakes, [name_of_input(item) for item in inputs[:primals]])
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
