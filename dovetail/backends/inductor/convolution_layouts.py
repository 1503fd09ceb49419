"""One memory layout for convolutions and their gradients: channels last, where Inductor chooses it for the graph.

Inductor computes convolutions on the CPU with channels last. It lays out a value that a gradient of a convolution reads as well
as the captured value was, with channels first, and copies it for both readers; in a graph that holds forward and backward these
are all activations of the network (torch 2.13): :func:`lay_out_convolutions`, a pass in Inductor.

A graph's outputs have the strides that were promised for them. The values that the forward saves for the backward are promised as
they were captured: each was copied in the forward and again in front of the gradient of its convolution. A step of six residual
blocks on images of 32 x 32 took 0.84 of eager's CPU time with the hook behind the partition and 0.97 without
(``benchmarks/step.py``, one thread, torch 2.13): :func:`save_with_channels_last`.
"""

from __future__ import annotations

from typing import Any

import torch

from dovetail.aot.nodes import memory_of
from dovetail.aot.steps import Lowering, after_partition
from dovetail.torch_private import inductor as private_inductor
from dovetail.torch_private import sizes as private_sizes

_BACKWARD = torch.ops.aten.convolution_backward.default
_FORWARD = torch.ops.aten.convolution.default
_POOLS = ("avg_pool2d", "avg_pool2d_backward", "max_pool2d_with_indices", "max_pool2d_with_indices_backward")
_BY_ELEMENTS = {
    *(getattr(torch.ops.aten, name).default for name in ("cat", "view", "reshape", *_POOLS)),
    *(_FORWARD, _BACKWARD, torch.ops.aten.slice.Tensor),
}
_TAGS = {tag for name, tag in torch.Tag.__members__.items() if name in ("pointwise", "reduction")}


def lay_out_convolutions(graph: torch.fx.Graph) -> None:
    """Mark values that gradients of convolutions read as channels last, if Inductor computes this graph so.

    The graph's inputs and outputs keep their layout, and so do values that an operator reads by strides.
    """
    gradients = graph.find_nodes(op="call_function", target=_BACKWARD)
    module = graph.owning_module
    if not gradients or module is None or not private_inductor.inductor_moves_channels(module):
        return
    read = {node: None for each in gradients for node in each.args[:2] if isinstance(node, torch.fx.Node)}
    for node in read:
        if _may_move(node):
            value = node.meta["val"]
            node.meta["val"] = torch.empty_like(value, memory_format=torch.channels_last)


def _may_move(node: torch.fx.Node) -> bool:
    return node.op == "call_function" and _is_image(node) and all(map(reads_elements, node.users))


def _is_image(node: Any) -> bool:
    value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
    return isinstance(value, torch.Tensor) and value.dim() == 4 and value.layout is torch.strided


def reads_elements(user: torch.fx.Node) -> bool:
    """Return whether the user's result depends on elements only, not on their places in memory."""
    return user.target in _BY_ELEMENTS or not _TAGS.isdisjoint(getattr(user.target, "tags", ()))


#: Their results are views, or not, by the strides of their arguments: other code than Inductor's may run the backward.
_BY_STRIDES = {torch.ops.aten.view.default, torch.ops.aten.reshape.default, torch.ops.aten._unsafe_view.default}


@after_partition
def save_with_channels_last(lowering: Lowering) -> Lowering:
    """Promise channels last for saved values whose readers look at elements only, in the forward and in the backward graph.

    The joint graph keeps the strides of the capture; a later order that takes a saved value takes it with these.
    """
    parts = lowering.parts
    if lowering.backend.name != "inductor" or parts is None or parts.backward is None:
        return lowering
    # Inductor is asked where it may say yes: to load it takes a second.
    convolutions = parts.forward.graph.find_nodes(op="call_function", target=torch.ops.aten.convolution.default)
    if not convolutions or not private_inductor.inductor_moves_channels(parts.forward):
        return lowering
    output = parts.forward.graph.output_node()
    results: Any = output.args[0]
    count = lowering.joint.num_forward_outputs
    given = [*results[:count], *parts.forward.graph.find_nodes(op="placeholder")]
    taken = {memory_of(node) for node in given if isinstance(node, torch.fx.Node)}
    places = zip(results[count:], parts.backward.graph.find_nodes(op="placeholder"), strict=False)
    for saved, placeholder in places:
        readers = [user for user in (*saved.users, *placeholder.users) if user is not output]
        is_made = isinstance(saved, torch.fx.Node) and saved.op == "call_function" and memory_of(saved) not in taken
        # Of symbolic sizes Inductor does not know whether the layout makes a difference: it keeps that of the capture.
        if not is_made or not _is_image(saved) or private_sizes.has_symbols(saved.meta["val"]):
            continue
        if not saved.meta["val"].is_contiguous():
            continue
        if all(user.target not in _BY_STRIDES and reads_elements(user) for user in readers):
            moved = torch.empty_like(saved.meta["val"], memory_format=torch.channels_last)
            saved.meta["val"] = placeholder.meta["val"] = moved
    return lowering


def lies_with_channels_last(node: Any) -> bool:
    """Whether Inductor makes a graph's output with channels last, and not also with channels first."""
    value = node.meta["val"] if _is_image(node) else None
    if value is None or private_sizes.has_symbols(value) or value.is_contiguous():
        return False
    return bool(value.is_contiguous(memory_format=torch.channels_last))
