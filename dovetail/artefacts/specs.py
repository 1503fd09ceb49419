"""The runtime's description of a graph's inputs and outputs as data, and back.

The file has older names for some of its fields: ``ties`` are ``dependencies``, ``freed_together`` is ``freed_by_backward``, and
``arrangement`` is ``leaf_order``. ``feeding`` is no longer read: ``ties`` say all of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.aot.views import AutogradView, StridedView
from dovetail.errors import ArtefactError, InputError
from dovetail.runtime.spec import (
    FreshOutput,
    InputOutput,
    Mutation,
    OutputDependency,
    OutputTensor,
    RuntimeSpec,
    ViewOutput,
)


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
        "mutations": list(map(dataclasses.asdict, spec.mutations)),
        "feeding": [],
        "ties": [
            {"output": item.output, "results": list(item.results), "inputs": list(item.inputs)}
            for item in spec.dependencies
        ],
        "freed_together": None if freed is None else [sorted(item) for item in freed],
        "arrangement": list(spec.leaf_order),
    }


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
