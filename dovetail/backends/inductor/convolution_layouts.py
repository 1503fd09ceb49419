"""One memory layout for convolutions and their gradients: channels last, where Inductor chooses it for the graph.

Inductor computes convolutions on the CPU with channels last. It lays out a value that a gradient of a convolution reads as well
as the captured value was, with channels first, and copies it for both readers; in a graph that holds forward and backward these
are all activations of the network (torch 2.13).
"""

from __future__ import annotations

from typing import Any

import torch

from dovetail.torch_private import inductor as private_inductor

_BACKWARD = torch.ops.aten.convolution_backward.default
_FORWARD = torch.ops.aten.convolution.default
_BY_ELEMENTS = {
    _FORWARD,
    _BACKWARD,
    torch.ops.aten.cat.default,
    torch.ops.aten.view.default,
    torch.ops.aten.reshape.default,
    torch.ops.aten.slice.Tensor,
    torch.ops.aten.avg_pool2d.default,
    torch.ops.aten.avg_pool2d_backward.default,
    torch.ops.aten.max_pool2d_with_indices.default,
    torch.ops.aten.max_pool2d_with_indices_backward.default,
}
_TAGS = {tag for name, tag in torch.Tag.__members__.items() if name in ("pointwise", "reduction")}


def lay_out_convolutions(graph: torch.fx.Graph) -> None:
    """Mark values that gradients of convolutions read as channels last, if Inductor computes this graph so.

    The graph's inputs and outputs keep their layout, and so do values that an operator reads by strides.

    >>> class Two(torch.nn.Module):
    ...     def forward(self, x, weight, gradient):
    ...         inner = torch.ops.aten.relu.default(x)
    ...         mask = [False, True, False]
    ...         settings = [None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1]
    ...         y = torch.ops.aten.convolution.default(inner, weight, *settings)
    ...         z = torch.ops.aten.convolution_backward.default(gradient, inner, weight, *settings, mask)
    ...         return [y, z]
    >>> module = torch.fx.symbolic_trace(Two())
    >>> x, weight = torch.empty(2, 3, 4, 4), torch.empty(5, 3, 1, 1)
    >>> for node, value in zip(module.graph.nodes, [x, weight, torch.empty(2, 5, 4, 4), x.clone()]):
    ...     node.meta["val"] = value
    >>> lay_out_convolutions(module.graph)
    >>> [node.meta["val"].stride() for node in list(module.graph.nodes)[:4]]
    [(48, 16, 4, 1), (3, 1, 1, 1), (80, 16, 4, 1), (48, 1, 12, 3)]
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
    value: Any = node.meta.get("val")
    return (
        node.op == "call_function"
        and isinstance(value, torch.Tensor)
        and value.dim() == 4
        and all(map(reads_elements, node.users))
    )


def reads_elements(user: torch.fx.Node) -> bool:
    """Return whether the user's result depends on elements only, not on their places in memory."""
    return user.target in _BY_ELEMENTS or not _TAGS.isdisjoint(getattr(user.target, "tags", ()))
