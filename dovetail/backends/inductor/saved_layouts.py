"""Save activations of convolutions with channels last, where Inductor computes the forward so.

Inductor computes convolutions on the CPU with channels last, and a graph's outputs have the strides that were promised for them.
The values that the forward saves for the backward are promised as they were captured, with channels first: each was copied in the
forward and again in front of the gradient of its convolution. A step of six residual blocks on images of 32 x 32 took 0.84 of
eager's CPU time with this hook and 0.97 without (``benchmarks/step.py``, one thread, torch 2.13).
"""

from __future__ import annotations

from typing import Any

import torch

from dovetail.aot.nodes import memory_of
from dovetail.aot.steps import Lowering, after_partition
from dovetail.backends.inductor.convolution_layouts import reads_elements
from dovetail.torch_private import inductor as private_inductor

#: Their results are views, or not, by the strides of what they read: other code than Inductor's may run the backward.
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
        if _is_activation(saved) and memory_of(saved) not in taken and all(map(_reads_elements_only, readers)):
            moved = torch.empty_like(saved.meta["val"], memory_format=torch.channels_last)
            saved.meta["val"] = placeholder.meta["val"] = moved
    return lowering


def _reads_elements_only(user: torch.fx.Node) -> bool:
    return user.target not in _BY_STRIDES and reads_elements(user)


def _is_activation(node: torch.fx.Node) -> bool:
    value = node.meta.get("val")
    return (
        node.op == "call_function"
        and isinstance(value, torch.Tensor)
        and value.dim() == 4
        and value.layout is torch.strided
        and value.is_contiguous()
    )


def has_channels_last(node: Any) -> bool:
    """Whether a graph's output lies with channels last, and not also with channels first."""
    value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
    return (
        isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and value.dim() == 4
        and not value.is_contiguous()
        and value.is_contiguous(memory_format=torch.channels_last)
    )
