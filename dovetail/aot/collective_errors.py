"""Says in words that an exchange with other ranks has failed, where a graph has exchanges in it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

from dovetail.errors import CollectiveError, DovetailError

_NAMESPACES = ("_c10d_functional", "c10d_functional", "dovetail_distributed")
# What gloo, NCCL and the store say when a process is gone or too late.
_SIGNS = re.compile(
    r"gloo|nccl|connection|timed? ?out|broken pipe|socket|peer|process group|no longer alive", re.IGNORECASE
)


def is_exchange(node: torch.fx.Node) -> bool:
    """Whether a node exchanges tensors with other ranks, who would have to do it again as well."""
    return getattr(node.target, "namespace", "") in _NAMESPACES


def exchanges(graph: torch.fx.GraphModule) -> bool:
    """Whether a graph exchanges tensors with other ranks."""
    return any(map(is_exchange, graph.graph.nodes))


def with_collective_errors(
    run: Callable[[list[Any]], list[Any]], graph: torch.fx.GraphModule
) -> Callable[[list[Any]], list[Any]]:
    """``run``, which raises :class:`CollectiveError` where an exchange fails; itself for a graph that has none."""
    if not exchanges(graph):
        return run

    def explained(values: list[Any]) -> list[Any]:
        try:
            return run(values)
        except DovetailError:
            raise
        except RuntimeError as error:
            text = str(error)
            if not _SIGNS.search(text):
                raise
            raise CollectiveError(
                f"an exchange with the other ranks has failed, so this call has changed nothing: {text.splitlines()[0]}",
                advice="see what the other ranks say; to go on without them, call torch.distributed.destroy_process_group() "
                "and init_process_group() again: the next call compiles for the new group",
            ) from error

    return explained
