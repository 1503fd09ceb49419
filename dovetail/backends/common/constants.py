"""Small tensors beside a graph as data: those that the program made of numbers, such as ``torch.tensor([1.0, 2.0])``.

>>> decode_constant(encode_constant(torch.tensor([1.0, 2.0])))
tensor([1., 2.])
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import torch

from dovetail.torch_private import tracing as private_tracing

#: Constants in a graph are a few numbers; a graph with larger ones is compiled where it is.
MOST_CONSTANT_BYTES = 1 << 20


def constant_of(node: torch.fx.Node) -> Any:
    """The tensor that a ``get_attr`` node reads, or another object; None where there is none."""
    return getattr(node.graph.owning_module, str(node.target), None)


def encode_constant(value: Any) -> dict[str, Any] | None:
    """A constant as data; None for one that is large, or no plain tensor of the CPU."""
    if not isinstance(value, torch.Tensor) or type(value) not in (torch.Tensor, torch.nn.Parameter):
        return None
    if value.layout is not torch.strided or value.device.type != "cpu" or value.is_conj() or value.is_neg():
        return None
    if value.numel() * value.element_size() > MOST_CONSTANT_BYTES or not value.is_contiguous():
        return None
    with private_tracing.disable_current_modes(), torch.no_grad():
        content = bytes(value.detach().reshape(-1).view(torch.uint8).tolist()) if value.numel() else b""
    return {
        "data": base64.b64encode(content).decode(),
        "shape": list(value.shape),
        "dtype": str(value.dtype).removeprefix("torch."),
        "parameter": isinstance(value, torch.nn.Parameter),
    }


def decode_constant(data: Mapping[str, Any]) -> torch.Tensor:
    """The tensor that :func:`encode_constant` has written down; raises whatever data that means nothing leads to."""
    content, dtype = bytearray(base64.b64decode(data["data"])), getattr(torch, data["dtype"])
    value = torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)
    value = value.reshape(data["shape"]).clone()
    return torch.nn.Parameter(value, requires_grad=False) if data["parameter"] else value
