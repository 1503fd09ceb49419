"""Tells values of a graph that are the same on all ranks from values that are a rank's own.

A parameter must stay the same everywhere, so its new value may depend on this rank's data only through an exchange.
"""

from __future__ import annotations

import re

import torch

from dovetail.aot.descriptors import BufferInput, Descriptor, MutatedInput, ParamInput, UserInput
from dovetail.aot.joint_graph import JointGraph
from dovetail.errors import NotReducedError

# An argument itself or an item of one: a batch. A tensor reached through an attribute may be an optimizer's state.
_DATA = re.compile(r"L\[[^\]]*\](\[[^\]]*\])*(\.(?!grad$|state\b)\w+(\[[^\]]*\])*)?")


def is_data(descriptor: Descriptor) -> bool:
    """Whether an input is this rank's own: an argument. Parameters, buffers and tensors reached otherwise are not.

    >>> is_data(UserInput("L['x']")), is_data(UserInput("L['batch']['ids']")), is_data(UserInput("G['state']['step']"))
    (True, True, False)
    """
    if isinstance(descriptor, (ParamInput, BufferInput)):
        return False
    return not isinstance(descriptor, UserInput) or _DATA.fullmatch(descriptor.path) is not None


def own_values(joint: JointGraph) -> set[torch.fx.Node]:
    """The nodes whose values are this rank's own, and not the same on all ranks."""
    placeholders = joint.graph.find_nodes(op="placeholder")
    own = {
        node
        for node, descriptor in zip(placeholders, joint.input_descriptors, strict=True)
        if is_data(descriptor) and not _is_written(joint, descriptor)
    }
    while True:
        _follow(joint, own)
        # A tensor outside that collects this rank's results (a running mean) is this rank's own at the next call.
        grown = [
            placeholders[item.input_index]
            for item in joint.spec.mutations
            if joint.results[item.output_index] in own
            and not isinstance(joint.input_descriptors[item.input_index], ParamInput)
            and not joint.spec.input_requires_grad[item.input_index]
            and placeholders[item.input_index] not in own
        ]
        if not grown:
            return own
        own.update(grown)


def _is_written(joint: JointGraph, descriptor: Descriptor) -> bool:
    return MutatedInput(descriptor) in joint.output_descriptors


def _follow(joint: JointGraph, own: set[torch.fx.Node]) -> None:
    """Add the nodes that read a value of this rank's own, or draw random numbers."""
    for node in joint.graph.nodes:
        if node.op != "call_function" or node in own:
            continue
        target = node.target
        if getattr(target, "namespace", "") in ("_c10d_functional", "dovetail_distributed"):
            continue
        is_random = torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())
        # The destination of a copy is overwritten.
        read = [node.args[1]] if target is torch.ops.aten.copy.default else node.all_input_nodes
        if is_random or any(argument in own for argument in read):
            own.add(node)


def check_parameters(joint: JointGraph) -> None:
    """Raise :class:`NotReducedError` if a parameter's new value is this rank's own."""
    own = own_values(joint)
    for item in joint.spec.mutations:
        descriptor = joint.input_descriptors[item.input_index]
        node = joint.results[item.output_index]
        is_trained = isinstance(descriptor, ParamInput) or joint.spec.input_requires_grad[item.input_index]
        if is_trained and node in own:
            raise NotReducedError(
                f"the new value of {descriptor} is computed from this rank's own data, which no exchange has reduced",
                where=node.meta.get("user_line") if node is not None else None,
                advice="get gradients by loss.backward(), which reduces them; torch.autograd.grad does not",
            )
