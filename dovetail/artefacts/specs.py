"""The runtime's description of a graph's inputs, outputs and result as data, and back.

The file has older names for some fields of a :class:`RuntimeSpec`: ``ties`` are ``dependencies``, ``freed_together`` is
``freed_by_backward``, and ``arrangement`` is ``leaf_order``. ``feeding`` is no longer read: ``ties`` say all of it.

>>> build_result({"dict": [["loss", {"tensor": 0}], ["steps", 3]]}, ["a tensor"])
{'loss': 'a tensor', 'steps': 3}
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.aot.descriptors import (
    AliasBase,
    BufferInput,
    Descriptor,
    Gradient,
    MutatedInput,
    ParamInput,
    Tangent,
    UserInput,
    UserOutput,
)
from dovetail.aot.joint_graph import JointGraph
from dovetail.aot.views import AutogradView, StridedView
from dovetail.errors import ArtefactError, InputError
from dovetail.runtime.recipe import ConstantItem, ObjectItem, Recipe, TensorItem, TupleItem
from dovetail.runtime.spec import (
    FreshOutput,
    InputOutput,
    Mutation,
    OutputDependency,
    OutputTensor,
    RuntimeSpec,
    ViewOutput,
)

#: For each kind: the class, its field, and the name of the field in a file.
_KINDS: dict[str, tuple[type[Any], str, str]] = {
    "parameter": (ParamInput, "fqn", "name"),
    "buffer": (BufferInput, "fqn", "name"),
    "input": (UserInput, "path", "name"),
    "output": (UserOutput, "path", "name"),
    "base": (AliasBase, "index", "index"),
    "mutated": (MutatedInput, "of", "of"),
    "tangent": (Tangent, "of", "of"),
    "gradient": (Gradient, "of", "of"),
}


def derivative_order(joint: JointGraph) -> int:
    """How often a joint graph can be differentiated from outside: 0 where it has no gradients."""
    return int(any(descriptor is not None for descriptor in joint.output_descriptors[joint.num_forward_outputs :]))


def encode_descriptor(descriptor: Descriptor) -> dict[str, Any]:
    """A descriptor as data; raises :class:`ArtefactError` for a kind that no artefact has."""
    for kind, (cls, attribute, field) in _KINDS.items():
        if type(descriptor) is cls:
            value = getattr(descriptor, attribute)
            return {"kind": kind, field: encode_descriptor(value) if field == "of" else value}
    raise ArtefactError(f"{descriptor} cannot be written to an artefact", advice="export a graph of plain tensors")


def decode_descriptor(data: Mapping[str, Any]) -> Descriptor:
    """The descriptor in data that has the form of the schema."""
    cls, _, field = _KINDS[data["kind"]]
    return cls(decode_descriptor(data["of"]) if field == "of" else data[field])  # type: ignore[no-any-return]


def name_of_input(descriptor: Descriptor) -> str:
    """The name under which an artefact keeps the value of an input."""
    if isinstance(descriptor, (ParamInput, BufferInput)):
        return descriptor.fqn
    return descriptor.path if isinstance(descriptor, UserInput) else str(descriptor)


@dataclass(frozen=True)
class LoadedView:
    """Makes a view of a base again; ``plain`` is its size, its stride, and its offset from the base's."""

    plain: tuple[tuple[int, ...], tuple[int, ...], int]

    def __call__(self, base: torch.Tensor, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """The view, of another base; raises :class:`InputError` where it would leave the base's memory."""
        size, stride, offset = self.plain
        offset += int(base.storage_offset())
        if offset < 0 or len(size) != len(stride):
            raise InputError("the view in the artefact lies outside of its base")
        return base.as_strided(size, stride, offset)


def encode_spec(spec: RuntimeSpec) -> dict[str, Any]:
    """A description as data; raises :class:`ArtefactError` for a view that needs more than strides."""
    freed = spec.freed_by_backward
    return {
        "input_requires_grad": list(spec.input_requires_grad),
        "output_differentiable": list(spec.output_differentiable),
        "outputs": list(map(_encode_output, spec.outputs)),
        "mutations": list(map(_encode_mutation, spec.mutations)),
        "feeding": [],
        "ties": [
            {"output": item.output, "results": list(item.results), "inputs": list(item.inputs)}
            for item in spec.dependencies
        ],
        "freed_together": None if freed is None else [sorted(item) for item in freed],
        "arrangement": list(spec.leaf_order),
    }


def _encode_mutation(mutation: Mutation) -> dict[str, Any]:
    found = dataclasses.asdict(mutation)
    if found.pop("is_freed"):
        advice = "write its detached value"
        raise ArtefactError("an input is written to by what a backward inside has freed", advice=advice)
    return found


def _encode_output(output: OutputTensor) -> dict[str, Any]:
    if not isinstance(output, ViewOutput):
        return {"kind": "fresh" if isinstance(output, FreshOutput) else "input", **dataclasses.asdict(output)}
    replay = output.replay
    if not isinstance(replay, (StridedView, AutogradView, LoadedView)) or replay.plain is None:
        raise ArtefactError("a returned view cannot be written to an artefact", advice="return a clone of it")
    size, stride, offset = replay.plain
    base = {"is_leaf": False, "is_freed": False, **_encode_output(output.base)}
    return {
        **base,
        "kind": "view",
        "of": base["kind"],
        "size": list(size),
        "stride": list(stride),
        "offset": offset,
        "differentiable": output.differentiable,
        "requires_grad": output.requires_grad,
    }


def decode_spec(data: Mapping[str, Any], primals: int, forward: int) -> RuntimeSpec:
    """The description in data that has the form of the schema, for so many primals and forward outputs.

    Raises :class:`ArtefactError` where it does not fit them.
    """
    if len(data["input_requires_grad"]) != primals or len(data["output_differentiable"]) != forward:
        raise ArtefactError("the artefact does not describe each input and output of its graph")
    outputs = [_decode_output(item, primals, forward) for item in data["outputs"]]
    mutations = tuple(Mutation(**item) for item in data["mutations"])
    for item in mutations:
        _check_index(item.input_index, primals)
        _check_index(item.output_index, forward)
    if len({item.input_index for item in mutations}) != len(mutations):
        raise ArtefactError("the artefact writes twice to one input")
    differentiable = tuple(data["output_differentiable"])
    if data["arrangement"] and sorted(data["arrangement"]) != list(range(primals)):
        raise ArtefactError("the artefact does not say in which order its inputs get their gradients")
    return RuntimeSpec(
        tuple(data["input_requires_grad"]),
        differentiable,
        tuple(outputs),
        mutations,
        dependencies=_decode_dependencies(data["ties"], outputs, mutations, differentiable),
        freed_by_backward=_decode_freed(data["freed_together"], sum(differentiable)),
        leaf_order=tuple(data["arrangement"]),
    )


def _check_index(index: int, count: int) -> int:
    if index >= count:
        raise ArtefactError("the artefact names an input or output that does not exist")
    return index


def _decode_output(item: Mapping[str, Any], primals: int, forward: int) -> OutputTensor:
    is_input = item["kind"] == "input" or item.get("of") == "input"
    index = _check_index(item["index"], primals if is_input else forward)
    base = InputOutput(index) if is_input else FreshOutput(index, item["is_leaf"], item["is_freed"])
    if item["kind"] != "view":
        return base
    replay = LoadedView((tuple(item["size"]), tuple(item["stride"]), item["offset"]))
    return ViewOutput(base, replay, item["differentiable"], item["requires_grad"])


def _decode_dependencies(
    data: Sequence[Mapping[str, Any]],
    outputs: Sequence[OutputTensor],
    mutations: Sequence[Mutation],
    differentiable: Sequence[bool],
) -> tuple[OutputDependency, ...]:
    """Raises :class:`ArtefactError` unless each can be made when those before it are."""
    left = {item["output"] for item in data}
    if len(left) != len(data) or any(index >= len(differentiable) or not differentiable[index] for index in left):
        raise ArtefactError("the artefact ties an output that there is not")
    written = {item.input_index: item.output_index for item in mutations}
    found: list[OutputDependency] = []
    for item in data:
        places, inputs = tuple(item["results"]), tuple(item["inputs"])
        if any(place >= len(outputs) for place in places) or any(index not in written for index in inputs):
            raise ArtefactError("the artefact ties an output to a result that there is not")
        results = [outputs[place] for place in places]
        bases = [item.base if isinstance(item, ViewOutput) else item for item in results]
        sources = {base.index if isinstance(base, FreshOutput) else written.get(base.index) for base in bases}
        sources |= {written[index] for index in inputs}
        if sources & left:
            raise ArtefactError("the artefact ties outputs to each other in an order in which they cannot be made")
        left.remove(item["output"])
        found.append(OutputDependency(item["output"], places, inputs))
    return tuple(found)


def _decode_freed(data: Sequence[Sequence[int]] | None, count: int) -> tuple[frozenset[int], ...] | None:
    if data is None:
        return None
    if len(data) != count or any(index >= count for item in data for index in item):
        raise ArtefactError("the artefact does not say for each differentiable output what it frees")
    return tuple(map(frozenset, data))


@dataclass(frozen=True)
class StoredResult(Recipe):
    """The result of a loaded graph, as the file has it."""

    data: Any


class _NotStorable(Exception):
    """A part of a result is of a class that a file cannot name."""


def encode_result(recipe: Recipe | None, count: int) -> Any:
    """A result as data. One with a part of a class that a file cannot name becomes the flat tuple of its ``count`` tensors."""
    try:
        return _encode(recipe)
    except _NotStorable:
        return {"tuple": [{"tensor": index} for index in range(count)]}


def _encode(recipe: Recipe | None) -> Any:
    if isinstance(recipe, StoredResult):
        return recipe.data
    if isinstance(recipe, TensorItem):
        return {"tensor": recipe.index}
    if isinstance(recipe, ConstantItem) and type(recipe.value) in (type(None), bool, int, str):
        return recipe.value
    if isinstance(recipe, ConstantItem) and type(recipe.value) is float:
        return {"float": recipe.value.hex()}
    if isinstance(recipe, TupleItem) and recipe.cls is tuple:
        return {"tuple": list(map(_encode, recipe.items))}
    if isinstance(recipe, ObjectItem) and not recipe.attributes:
        if recipe.cls is list:
            return {"list": list(map(_encode, recipe.items))}
        if recipe.cls is dict and not recipe.items:
            pairs = [[_encode(key), _encode(item)] for key, item in recipe.pairs]
            if all(type(key) in (str, int, bool) for key, _ in pairs):
                return {"dict": pairs}
    raise _NotStorable


def build_result(data: Any, tensors: Sequence[Any]) -> Any:
    """A call's result from its data and the graph's tensors. Raises ValueError or IndexError where the data is wrong."""
    if not isinstance(data, dict):
        return data
    ((kind, content),) = data.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "float":
        return float.fromhex(content)
    if kind == "dict":
        if any(not isinstance(key, (str, int)) for key, _ in content):
            raise ValueError("a dictionary has a key that is no constant")
        return {key: build_result(item, tensors) for key, item in content}
    items = [build_result(item, tensors) for item in content]
    return tuple(items) if kind == "tuple" else items
