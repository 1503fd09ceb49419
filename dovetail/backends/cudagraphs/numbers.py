"""Numbers that change from call to call: a recorded piece reads them from the device's memory, never from a recorded constant."""

from __future__ import annotations

from typing import Any

import torch

from dovetail.backends.cudagraphs.obstacles import is_float, node_tensors
from dovetail.torch_private import tensors as private_tensors

_aten = torch.ops.aten
#: Operators that give the same bits on CUDA for a number from memory as for one in the launch; a division does not.
_EXACT: dict[Any, Any] = {
    getattr(getattr(_aten, name), overload): getattr(_aten, name).Tensor
    for name in ("add", "sub", "mul")
    for overload in ("Tensor", "Scalar")
}
_ROUNDED: dict[Any, Any] = {
    **_EXACT,
    _aten.div.Tensor: _aten.div.Tensor,
    _aten.div.Scalar: _aten.div.Tensor,
    _aten.pow.Tensor_Scalar: _aten.pow.Tensor_Tensor,
}


def float_arguments(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Return the arguments of a node that are floating-point numbers which may change."""
    return [value for value in node.all_input_nodes if is_float(value)]


def can_read_from_memory(node: torch.fx.Node, *, exact: bool) -> bool:
    """Return whether the node gives the same result (with ``exact`` to the last bit) for its number as a 0-d tensor."""
    numbers = float_arguments(node)
    table = _EXACT if exact else _ROUNDED
    if len(numbers) != 1 or node.target not in table or node.kwargs or len(node.args) != 2:
        return False
    other = next((item for item in node.args if item is not numbers[0]), None)
    value = other.meta.get("val") if isinstance(other, torch.fx.Node) else None
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return False
    if exact:
        return value.dtype in (torch.float32, torch.float64)
    return value.is_floating_point() or value.is_complex()


def read_from_memory(graph: torch.fx.GraphModule, device: torch.device) -> tuple[int, ...]:
    """Turn every number that ``graph`` takes into a zero-dimensional tensor; return the indices of these inputs."""
    placeholders = graph.graph.find_nodes(op="placeholder")
    numbers = {index: node for index, node in enumerate(placeholders) if is_float(node)}
    for placeholder in numbers.values():
        tensor = next(
            leaf for node in graph.graph.nodes for leaf in node_tensors(node) if private_tensors.is_fake(leaf)
        )
        with tensor.fake_mode:  # type: ignore[attr-defined]
            placeholder.meta["val"] = torch.empty((), dtype=torch.float64, device=device)
        for user in placeholder.users:
            user.target = _ROUNDED[user.target]
    return tuple(numbers)
