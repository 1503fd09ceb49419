"""Stage 2, exporting: writes a joint graph as data to disk. :mod:`dovetail.artefacts.load` reads it back."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dovetail.aot.descriptors import Descriptor, UserInput
from dovetail.aot.joint_graph import JointGraph, Values
from dovetail.aot.state import AOTState
from dovetail.artefacts.allow_list import check_arguments, name_of_operator
from dovetail.artefacts.arguments import encode_argument
from dovetail.artefacts.files import write_artefact
from dovetail.artefacts.kernels import kernels_of
from dovetail.artefacts.schema import validate
from dovetail.artefacts.specs import derivative_order, encode_descriptor, encode_result, encode_spec, name_of_input
from dovetail.backends.common.size_expressions import depends_on_data, encode_expression, encode_size
from dovetail.errors import ArtefactError, OptionError
from dovetail.guards import ItemSource
from dovetail.guards.reading import FETCH_ERRORS, short
from dovetail.runtime.effects import EffectRecipe
from dovetail.runtime.recipe import ConstantItem, Recipe, TensorItem
from dovetail.runtime.spec import InputOutput
from dovetail.torch_private import sizes as private_sizes

#: Fields of a capture that an artefact cannot hold, with the sentence that says so.
_NOT_STORABLE = {
    "effects": "it writes to Python objects (attributes, lists, .grad), which are not there in another process",
    "ambient_change": "it changes torch's own state (such as the grad mode)",
    "resume_point": "it is only the part of the program before a graph break",
    "inputs_made_differentiable": "it sets requires_grad of a tensor that it is given",
    "numbers": "it returns numbers that depend on sizes",
}


def export_joint(
    state: AOTState | None,
    joint: JointGraph,
    path: str | os.PathLike[str],
    *,
    values: Values | None = None,
    kernels: bool = False,
) -> Path:
    """Write a joint graph to the folder ``path``; ``dovetail.load(path)`` runs it without the user's code.

    ``values`` are tensors to put into the artefact, by the name of a parameter or buffer or by the path of another input (such
    as ``model.state_dict()``); names that are no input of the graph are left out. ``"current"`` stands for those that the captured
    function finds now by itself, such as its weights and the state of its optimizer: only its arguments stay open. With
    ``kernels``, Inductor compiles the graph for this machine, and the machine code lies beside it. ``state`` may be None or
    closed. Raises :class:`OptionError` for other ``values``, and :class:`ArtefactError` for a graph that cannot be written as
    data, or with ``kernels`` for one whose kernels are not kept on disk: nothing is written then. The calling tree::

        export_joint
        +-- _check_capture       refuses calls that do more than a file can hold
        +-- _symbols, _guards    sizes: size_expressions
        +-- _node                operators: allow_list, arguments; constants go into the tensors
        +-- encode_descriptor, encode_spec, encode_result
        +-- _state               values of inputs go into the tensors
        +-- validate             by the schema that readers use
        +-- kernels_of           compiles the graph as readers see it
        +-- write_artefact       files
    """
    joint.lint()
    _check_capture(joint)
    numbers, symbols = _symbols(joint)
    inputs = _named_apart(joint.input_descriptors)
    given = _given(joint, inputs, values)
    tensors: dict[str, torch.Tensor] = {}
    payload = {
        "nodes": [_node(node, joint, numbers, tensors) for node in joint.graph.nodes if node.op != "output"],
        "results": [None if node is None else node.name for node in joint.results],
        "inputs": list(map(encode_descriptor, inputs)),
        "outputs": [None if item is None else encode_descriptor(item) for item in joint.output_descriptors],
        "num_primals": joint.num_primals,
        "num_forward_outputs": joint.num_forward_outputs,
        "derivative_order": derivative_order(joint),
        "symbols": symbols,
        "guards": _guards(joint, numbers),
        "spec": encode_spec(joint.spec),
        "result": encode_result(joint.capture.recipe, len(joint.spec.outputs)),
        "state": _state(joint, inputs, given, tensors),
        "provenance": [str(record) for record in joint.provenance],
        "inexact": list(joint.inexact),
        "torch": torch.__version__,
    }
    validate(payload)
    return write_artefact(path, payload, tensors, kernels_of(payload, tensors) if kernels else ())


def _check_capture(joint: JointGraph) -> None:
    """Raise :class:`ArtefactError` for a call that does more than an artefact can hold."""
    if joint.spec.metadata_changes:
        raise ArtefactError("an input changes its size or strides in place", advice="make a new tensor instead")
    for node in joint.graph.nodes:
        if depends_on_data(node.meta.get("val")):
            raise ArtefactError(
                f"the size of {node.name} depends on data, and no artefact has such sizes",
                where=node.meta.get("user_line"),
                advice="use masks in place of selections",
            )
    if (guard := joint.capture.guards.about_data()) is not None:
        raise ArtefactError(
            f"the function took a way that the data of its inputs decide: {guard.source.name}",
            where=guard.location,
            advice="export a function that computes the same operators whatever the data is",
        )
    for name, text in _NOT_STORABLE.items():
        found = getattr(joint.capture, name)
        if name == "effects":
            found = not all(_puts_back(effect, joint) or _is_as_before(effect, joint) for effect in found)
        if found:
            raise ArtefactError(
                f"the captured function cannot be exported: {text}",
                advice="export a function that only takes and returns tensors and writes to tensors in place",
            )


def _puts_back(effect: EffectRecipe, joint: JointGraph) -> bool:
    """Whether an effect puts inputs where they were read, as ``self.count += 1`` does with a tensor, which changes nothing."""
    source_of = joint.capture.guards.tensor_source

    def is_back(key: Recipe, item: Recipe) -> bool:
        output = joint.spec.outputs[item.index] if isinstance(item, TensorItem) else None
        if not isinstance(output, InputOutput) or not isinstance(key, ConstantItem):
            return False
        return source_of(output.index) == ItemSource(effect.source, key.value)

    return effect.kind == "dict" and bool(effect.pairs) and all(is_back(*pair) for pair in effect.pairs or ())


def _is_as_before(effect: EffectRecipe, joint: JointGraph) -> bool:
    """Whether an effect writes what is there already, and was there at the capture, as a library does that notes something for
    the length of a call.
    """
    items, read = effect.constant_items() or {}, {item.source: item.predicate for item in joint.capture.guards.so_far()}
    try:
        container = effect.source.fetch(joint.capture.function, (), {})
        now = [container[key] for key in items]
    except FETCH_ERRORS:
        return False
    guards = [read.get(ItemSource(effect.source, key)) for key in items]
    was_there = all(guard is None or guard.holds(one) for guard, one in zip(guards, now, strict=True))
    pairs = list(zip(now, items.values(), strict=True))
    return bool(pairs) and was_there and all(type(one) is type(other) and one == other for one, other in pairs)


def _symbols(joint: JointGraph) -> tuple[dict[Any, int], list[dict[str, Any]]]:
    """The number of each symbol, and where each is read, its example and its bounds."""
    bindings = joint.capture.bindings
    numbers: dict[Any, int] = {}
    described: list[dict[str, Any]] = []
    for symbol, (index, kind, dim) in bindings.symbols.items() if bindings is not None else ():
        value = joint.graph.find_nodes(op="placeholder")[index].meta["val"]
        if kind not in ("size", "stride"):
            raise ArtefactError(
                f"a symbolic {kind} of {joint.input_descriptors[index]} cannot be written to an artefact",
                advice="mark sizes as dynamic, and pass numbers as constants",
            )
        hint = private_sizes.hint(value.shape[dim] if kind == "size" else value.stride(dim))
        low, high = private_sizes.range_of(joint.fake_mode.shape_env, symbol)
        numbers[symbol] = len(described)
        place = {"input": index, "kind": kind, "dim": dim}
        described.append({"place": place, "hint": hint, "low": max(low or 0, 0), "high": high})
    return numbers, described


def _guards(joint: JointGraph, numbers: Mapping[Any, int]) -> list[Any]:
    environment = joint.fake_mode.shape_env
    recorded = environment.recorded() if hasattr(environment, "recorded") else []
    return [encode_expression(item.expression, numbers) for item in recorded]


def _node(
    node: torch.fx.Node, joint: JointGraph, numbers: Mapping[Any, int], tensors: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """A node as data; the value of a constant goes into ``tensors``."""
    entry: dict[str, Any] = {"op": node.op, "name": node.name}
    if node.op == "placeholder":
        value = node.meta["val"]
        if value.storage_offset() != 0 and any("as_strided" in str(item.target) for item in joint.graph.nodes):
            raise ArtefactError(
                f"{node.name} is part of a larger tensor", advice="capture the graph with a clone of it"
            )
        return entry | {
            "shape": [encode_size(size, numbers) for size in value.shape],
            "stride": [encode_size(step, numbers) for step in value.stride()],
            "dtype": str(value.dtype),
            "device": str(value.device),
        }
    if node.op == "get_attr":
        found = getattr(joint.graph_module, str(node.target), None)
        if not isinstance(found, torch.Tensor):
            raise ArtefactError(
                f"{node.name} is a {type(found).__name__}, and only tensors can be written to an artefact"
            )
        tensors[f"constant.{node.target}"] = found
        return entry | {"target": node.target}
    if node.op != "call_function":
        raise ArtefactError(f"{node.name} is a node of kind {node.op}, which no artefact holds")
    check_arguments(node.target, len(node.args), list(node.kwargs))
    return entry | {
        "target": name_of_operator(node.target),
        "args": [encode_argument(item) for item in node.args],
        "kwargs": [[key, encode_argument(item)] for key, item in node.kwargs.items()],
        "phase": "backward" if node.meta.get("phase") == "backward" else "forward",
    }


def _named_apart(descriptors: Sequence[Descriptor]) -> list[Descriptor]:
    """The descriptors of inputs under names of their own: the state of an optimizer does not say of which parameter it is."""
    seen: Counter[Descriptor] = Counter()
    found: list[Descriptor] = []
    for item in descriptors:
        seen[item] += 1
        is_again = isinstance(item, UserInput) and seen[item] > 1
        found.append(dataclasses.replace(item, path=f"{item.path} ({seen[item]})") if is_again else item)  # type: ignore[attr-defined, call-arg]
    return found


def _given(joint: JointGraph, inputs: Sequence[Descriptor], values: Values | None) -> Mapping[str, torch.Tensor]:
    if values is None or isinstance(values, Mapping):
        return values or {}
    if values != "current":
        raise OptionError(f"values must be tensors by name, 'current' or None, not {short(values)}")
    return _current(joint, inputs)


def _current(joint: JointGraph, inputs: Sequence[Descriptor]) -> dict[str, torch.Tensor]:
    """The tensors that the captured function would read now without arguments, by the name of their input."""
    if joint.capture.function is None:
        raise ArtefactError("the graph has no function to read values from", advice="hand over a dictionary of values")
    found: dict[str, torch.Tensor] = {}
    for index, descriptor in enumerate(inputs[: joint.num_primals]):
        try:
            value = joint.capture.guards.tensor_source(index).fetch(joint.capture.function, (), {})
        except FETCH_ERRORS:
            # An argument: each call brings its own.
            continue
        if isinstance(value, torch.Tensor):
            found[name_of_input(descriptor)] = value
    return found


def _state(
    joint: JointGraph,
    inputs: Sequence[Descriptor],
    values: Mapping[str, torch.Tensor],
    tensors: dict[str, torch.Tensor],
) -> list[list[str]]:
    """The names of the inputs that have values, each with its name in ``tensors``, where the values go."""
    named: list[list[str]] = []
    placeholders = joint.graph.find_nodes(op="placeholder")[: joint.num_primals]
    for position, (descriptor, node) in enumerate(zip(inputs, placeholders)):
        name = name_of_input(descriptor)
        if name not in values:
            continue
        value, promised = values[name], node.meta["val"]
        if tuple(value.shape) != tuple(promised.shape) or value.dtype != promised.dtype:
            raise ArtefactError(
                f"the value of {descriptor} is {value.dtype} of shape {tuple(value.shape)}, and the graph was captured for "
                f"{promised.dtype} of shape {tuple(promised.shape)}",
                advice="hand over the state of the module that was captured",
            )
        tensors[f"state.{position}"] = value
        named.append([name, f"state.{position}"])
    return named
