"""A backend with planted faults, registered when this module is imported, so that a script can import it too."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dovetail.backends import list_backends, register_backend
from dovetail.backends.aten import compile_aten

aten = torch.ops.aten


def compile_planted(
    graph: torch.fx.GraphModule, inputs: Sequence[Any], *, kind: Any, options: Mapping[str, Any]
) -> Any:
    """ATen's operators, but what ``fault`` says goes wrong where the graph has a softmax (or a sine right before a cosine)."""
    fault = options.get("fault")
    nodes = copy.deepcopy(graph.graph)
    softmax = nodes.find_nodes(op="call_function", target=aten._softmax.default)
    pairs = [
        node
        for node in nodes.find_nodes(op="call_function", target=aten.cos.default)
        if node.args[0].target is aten.sin.default
    ]
    if fault == "pair":
        for node in pairs:
            _scaled(nodes, node)
    elif softmax and fault == "wrong":
        _scaled(nodes, softmax[0])
    elif softmax and fault == "raise":
        raise NotImplementedError("no softmax here")
    elif softmax and fault == "crash":
        os.abort()
    elif softmax and fault == "hang":
        time.sleep(1000)
    return compile_aten(torch.fx.GraphModule(graph, nodes), inputs, kind=kind)


def _scaled(nodes: torch.fx.Graph, node: torch.fx.Node) -> None:
    with nodes.inserting_after(node):
        more = nodes.call_function(aten.mul.Tensor, (node, 1.01))
    node.replace_all_uses_with(more)
    more.args = (node, 1.01)


if "planted" not in list_backends(torch_backends=False):
    register_backend("planted", compile_planted)
