"""Tensors of a graph that ranks exchange, and the insertion of nodes that do it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.aot.joint_graph import JointGraph
from dovetail.aot.nodes import IN_BACKWARD
from dovetail.torch_private import distributed as private_distributed
from dovetail.torch_private import tracing as private_tracing

collectives = private_distributed.functional_collectives()
#: ``call(target, *args, **kwargs)`` puts a node into a graph, see :class:`Inserter`.
Call = Callable[..., torch.fx.Node]


@dataclass(frozen=True)
class Team:
    """The ranks that exchange with each other: the name of their process group, and their number."""

    name: str
    size: int


class Inserter:
    """Puts nodes into a joint graph.

    Those of the phase "backward" belong to the backward graph, those of other phases to the forward graph or to the only one.
    """

    def __init__(self, joint: JointGraph, phase: str) -> None:
        self.graph = joint.graph
        self.fake_mode = joint.fake_mode
        self.phase = phase

    def after(self, node: torch.fx.Node) -> Call:
        """A function whose nodes come one after the other behind ``node``."""
        last = node

        def call(target: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
            nonlocal last
            with self.graph.inserting_after(last):
                last = self._make(target, args, kwargs)
            return last

        return call

    def before(self, node: torch.fx.Node) -> Call:
        """A function whose nodes come one after the other in front of ``node``."""

        def call(target: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
            with self.graph.inserting_before(node):
                return self._make(target, args, kwargs)

        return call

    def _make(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        node.meta["phase"] = "forward"
        if self.phase == "backward":
            node.meta["phase"] = "backward"
            # Marked even if no tangent reaches it: what the backward waits for must begin in the backward.
            node.meta[IN_BACKWARD] = True
        # The pass reads the shapes of nodes that it has just made.
        values = torch.fx.node.map_arg((args, kwargs), lambda item: item.meta["val"])
        with private_tracing.disable_current_modes(), self.fake_mode, torch.no_grad():
            node.meta["val"] = target(*values[0], **values[1])
        return node


def places(joint: JointGraph) -> dict[torch.fx.Node, int]:
    """The position of each node in a graph."""
    return {node: place for place, node in enumerate(joint.graph.nodes)}


@dataclass(frozen=True, eq=False)
class Site:
    """A tensor in a graph that is exchanged: ``node`` computes what this rank gives, ``readers`` read what comes back.

    ``replace(new)`` makes them read another node. ``value`` is the tensor before it is scattered, or after it is gathered. ``mark``
    is the node whose place the exchange takes, where that is not ``node``.
    """

    name: str
    node: torch.fx.Node
    value: torch.Tensor
    readers: tuple[torch.fx.Node, ...]
    replace: Callable[[torch.fx.Node], None]
    mark: torch.fx.Node | None = None

    @classmethod
    def of_readers(cls, name: str, node: torch.fx.Node, value: torch.Tensor, read: torch.fx.Node) -> Site:
        """The site of a tensor that all present users of the node ``read`` will read."""
        readers = tuple(read.users)

        def replace(new: torch.fx.Node) -> None:
            read.replace_all_uses_with(new, delete_user_cb=readers.__contains__)

        return cls(name, node, value, readers, replace, read)

    @property
    def size(self) -> int:
        """The bytes of the tensor's elements."""
        return int(self.value.numel()) * self.value.element_size()

    def __str__(self) -> str:
        tensor = f"{str(self.value.dtype).removeprefix('torch.')}{list(self.value.shape)}"
        return f"{self.name}:{tensor}" if self.name else tensor
