"""A backward that is asked for inside of an autocast block.

Autocast belongs to the call of ``backward()``, not to the forward: eager's backward of a multiplication in single precision
multiplies in half precision inside of such a block. Graphs are captured for a backward outside of one, which is what torch
recommends, and for most of them it makes no difference: what autocast would cast is in its precision already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dovetail.guards.ambient import autocast_state
from dovetail.torch_private import tensors as private_tensors
from dovetail.torch_private import tracing as private_tracing

GraphOf = Callable[[tuple[bool, ...]], "tuple[torch.fx.GraphModule, Sequence[int]] | None"]


class _Casts(private_tracing.TorchDispatchMode):
    """Counts conversions."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._to_copy.default
        return func(*args, **(kwargs or {}))


def casts_more(graph: torch.fx.GraphModule) -> bool:
    """Whether the operators of a graph would be given other types in the autocast state that there is now."""
    examples = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
    written = len(graph.graph.find_nodes(op="call_function", target=torch.ops.aten._to_copy.default))
    mode = next((value.fake_mode for value in examples if private_tensors.is_fake(value)), None)
    if mode is None:
        return any(node.op == "call_function" for node in graph.graph.nodes)
    casts = _Casts()
    try:
        with torch.no_grad(), mode, casts:
            torch.fx.Interpreter(graph).run(*examples)
    except Exception:  # noqa: BLE001  (a graph that does not run with other types has them)
        return True
    return casts.count != written


class OtherTypes:
    """Whether the captured backward of an entry has other types than eager's in the autocast state of the moment."""

    def __init__(self, graph_of: GraphOf) -> None:
        self._graph_of = graph_of
        self._known: dict[Any, bool] = {}

    def __call__(self, defined: tuple[bool, ...]) -> bool:
        """For a backward from these outputs."""
        key = (defined, autocast_state())
        found = self._known.get(key)
        if found is None:
            graph = self._graph_of(defined)
            found = self._known[key] = graph is not None and casts_more(graph[0])
        return found
