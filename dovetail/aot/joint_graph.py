"""The joint graph of stage 1: forward and backward in one ``torch.fx`` graph, described input by input, output by output."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from dovetail.aot.descriptors import Descriptor
from dovetail.runtime.spec import RuntimeSpec


@dataclass(frozen=True)
class PassRecord:
    """Who made this version of the graph: name, seconds it took, nodes before and after."""

    name: str
    seconds: float
    nodes_before: int
    nodes_after: int


@dataclass(frozen=True)
class JointGraph:
    """Forward and backward of a captured function.

    Placeholders come in the order of ``input_descriptors``: first the primals, then the tangents (one for each forward output
    with a gradient). The output node returns one flat list in the order of ``output_descriptors``: first
    ``num_forward_outputs`` forward outputs, then one gradient per primal, None where there is none.
    Each node's ``meta`` holds ``val`` (fake value), ``phase`` ("forward" or "backward") and, where known, ``user_line``
    (a :class:`dovetail.errors.UserLocation`).
    """

    graph_module: torch.fx.GraphModule
    input_descriptors: tuple[Descriptor, ...]
    output_descriptors: tuple[Descriptor | None, ...]
    num_primals: int
    num_forward_outputs: int
    spec: RuntimeSpec
    fake_mode: Any
    capture: Any = None
    provenance: tuple[PassRecord, ...] = field(default_factory=tuple)
