"""Exchanges as nodes of a graph: tensors packed into a flat one, the collective, and the tensors again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.aot.joint_graph import JointGraph
from dovetail.aot.nodes import IN_BACKWARD
from dovetail.aot.tangents import FOR_PATTERN, MEMBER, PACK
from dovetail.distributed.plan import Plan, agree, fingerprint, register
from dovetail.torch_private import distributed as private_distributed
from dovetail.torch_private import tracing as private_tracing

aten = torch.ops.aten
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


@dataclass(frozen=True)
class Agreement:
    """A check that all ranks have the same plan: asked at the beginning of a phase, answered in front of its exchanges."""

    team: Team
    plan: Plan
    asked: torch.fx.Node

    @classmethod
    def ask(cls, call: Call, team: Team, plan: Plan, device: torch.device) -> Agreement:
        """Add nodes that tell the other ranks the plan."""
        own = call(fingerprint, register(plan), device)
        own.meta[FOR_PATTERN] = lambda args, defined: (register(plan.for_tangents(defined)), *args[1:])
        return cls(team, plan, call(collectives.all_reduce.default, own, "max", team.name))

    def token(self, call: Call, dtype: torch.dtype) -> torch.fx.Node:
        """Add an empty tensor that exists only if all ranks have the plan; what is packed with it is exchanged after the check.

        Each bucket has a token of its own: a backward for some of the outputs leaves buckets out.
        """
        greatest = next((user for user in self.asked.users if user.target is collectives.wait_tensor.default), None)
        if greatest is None:
            greatest = call(collectives.wait_tensor.default, self.asked)
        plan = self.plan
        token = call(agree, greatest, plan.fingerprint, self.team.size, self.team.name, dtype)
        token.meta[FOR_PATTERN] = lambda args, defined: (args[0], plan.for_tangents(defined).fingerprint, *args[2:])
        return token


def pack(call: Call, tensors: Sequence[torch.fx.Node], tokens: Sequence[torch.fx.Node]) -> torch.fx.Node:
    """All elements of the tensors in one flat tensor, which exists only if the tokens do."""
    packed = call(aten.cat.default, [*(_flat(call, tensor) for tensor in tensors), *tokens])
    packed.meta[PACK] = True
    return packed


def _flat(call: Call, tensor: torch.fx.Node) -> torch.fx.Node:
    value = tensor.meta["val"]
    if value.is_complex():
        return _flat(call, call(aten.view_as_real.default, tensor))
    if not value.is_contiguous():
        tensor = call(aten.clone.default, tensor, memory_format=torch.contiguous_format)
    return call(aten.view.default, tensor, [value.numel()])


def unpack(call: Call, flat: torch.fx.Node, tensors: Iterable[torch.fx.Node]) -> list[torch.fx.Node]:
    """The tensors in a flat tensor, each with the shape of the node that was packed."""
    found: list[torch.fx.Node] = []
    tensors = list(tensors)
    start = 0
    for tensor in tensors:
        value = tensor.meta["val"]
        shape = [*value.shape, 2] if value.is_complex() else list(value.shape)
        length = value.numel() * (2 if value.is_complex() else 1)
        piece = call(aten.view.default, call(aten.slice.Tensor, flat, 0, start, start + length), shape)
        if len(tensors) > 1:
            # It may become a .grad, which is written to by itself.
            piece = call(aten.clone.default, piece)
        found.append(call(aten.view_as_complex.default, piece) if value.is_complex() else piece)
        found[-1].meta[MEMBER] = len(found) - 1
        start += length
    return found


def element_bytes(value: torch.Tensor) -> int:
    """The bytes of a tensor's elements."""
    return int(value.numel()) * value.element_size()


def real_dtype(value: torch.Tensor) -> torch.dtype:
    """The dtype in which a tensor is exchanged: a complex number is two real ones."""
    return value.dtype.to_real() if value.is_complex() else value.dtype


def describe(value: torch.Tensor) -> str:
    """A tensor in a line of a plan.

    >>> describe(torch.ones(2, 3))
    'float32[2, 3]'
    """
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
