"""Exchanges as nodes of a graph: many tensors in one flat one, the collective, and the tensors again; begun early, awaited late."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.aot.joint_graph import IN_BACKWARD, JointGraph
from dovetail.aot.tangents import FOR_PATTERN, MEMBER, PACK
from dovetail.distributed.plan import Plan, agree, fingerprint, register
from dovetail.torch_private import distributed as private_distributed
from dovetail.torch_private import tracing as private_tracing

aten = torch.ops.aten
collectives = private_distributed.functional_collectives()


@dataclass(frozen=True)
class Team:
    """The ranks that exchange with each other: the name of their process group, and how many they are."""

    name: str
    size: int


class Inserter:
    """Puts nodes into a joint graph at one place after the other.

    In the phase "backward" they belong to the backward graph, in any other one to the forward graph or to the only one.
    """

    def __init__(self, joint: JointGraph, phase: str) -> None:
        self.graph = joint.graph
        self.fake_mode = joint.fake_mode
        self.phase = phase

    def after(self, place: torch.fx.Node) -> Callable[..., torch.fx.Node]:
        """A function ``call(target, *args, **kwargs)`` whose nodes come one after the other behind ``place``."""
        last = place

        def call(target: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
            nonlocal last
            with self.graph.inserting_after(last):
                last = self._make(target, args, kwargs)
            return last

        return call

    def before(self, place: torch.fx.Node) -> Callable[..., torch.fx.Node]:
        """The same in front of ``place``."""

        def call(target: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
            with self.graph.inserting_before(place):
                return self._make(target, args, kwargs)

        return call

    def _make(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        node.meta["phase"] = "forward"
        if self.phase == "backward":
            node.meta["phase"] = "backward"
            # Also where no tangent is needed for it: what is awaited in the backward is asked for in the backward.
            node.meta[IN_BACKWARD] = True
        # Later nodes read the shape of this one before the pass is over.
        values = torch.fx.node.map_arg((args, kwargs), lambda item: item.meta["val"])
        with private_tracing.disable_current_modes(), self.fake_mode, torch.no_grad():
            node.meta["val"] = target(*values[0], **values[1])
        return node


def begin_agreement(call: Callable[..., torch.fx.Node], plan: Plan, team: Team, device: torch.device) -> torch.fx.Node:
    """Nodes that tell the other ranks the plan."""
    own = call(fingerprint, register(plan), device)
    own.meta[FOR_PATTERN] = lambda args, defined: (register(plan.for_tangents(defined)), *args[1:])
    return call(collectives.all_reduce.default, own, "max", team.name)


def end_agreement(
    call: Callable[..., torch.fx.Node], begun: torch.fx.Node, plan: Plan, team: Team, dtype: torch.dtype
) -> torch.fx.Node:
    """Nodes that make sure that all ranks have this plan: an empty tensor that exists only if they have.

    Each bucket has one of its own: a backward for some of the outputs leaves buckets out.
    """
    greatest = next((user for user in begun.users if user.target is collectives.wait_tensor.default), None)
    if greatest is None:
        greatest = call(collectives.wait_tensor.default, begun)
    token = call(agree, greatest, plan.fingerprint, team.size, team.name, dtype)
    token.meta[FOR_PATTERN] = lambda args, defined: (args[0], plan.for_tangents(defined).fingerprint, *args[2:])
    return token


def pack(
    call: Callable[..., torch.fx.Node], parts: Sequence[torch.fx.Node], token: torch.fx.Node | None
) -> torch.fx.Node:
    """All elements of the parts in one flat tensor; ``token`` is an empty tensor that has to be there by then."""
    flat = [_flat(call, part) for part in parts]
    packed = call(aten.cat.default, flat if token is None else [*flat, token])
    packed.meta[PACK] = True
    return packed


def _flat(call: Callable[..., torch.fx.Node], part: torch.fx.Node) -> torch.fx.Node:
    value = part.meta["val"]
    if value.is_complex():
        return _flat(call, call(aten.view_as_real.default, part))
    if not value.is_contiguous():
        part = call(aten.clone.default, part, memory_format=torch.contiguous_format)
    return call(aten.view.default, part, [value.numel()])


def unpack(
    call: Callable[..., torch.fx.Node], flat: torch.fx.Node, parts: Iterable[torch.fx.Node]
) -> list[torch.fx.Node]:
    """The parts of a flat tensor again, each with the shape of the node that it was packed from."""
    found: list[torch.fx.Node] = []
    parts = list(parts)
    start = 0
    for part in parts:
        value = part.meta["val"]
        shape = [*value.shape, 2] if value.is_complex() else list(value.shape)
        length = value.numel() * (2 if value.is_complex() else 1)
        piece = call(aten.view.default, call(aten.slice.Tensor, flat, 0, start, start + length), shape)
        if len(parts) > 1:
            # In memory of its own: it may become someone's .grad, which is written to alone.
            piece = call(aten.clone.default, piece)
        found.append(call(aten.view_as_complex.default, piece) if value.is_complex() else piece)
        found[-1].meta[MEMBER] = len(found) - 1
        start += length
    return found


def element_bytes(value: torch.Tensor) -> int:
    """The bytes of a tensor's elements."""
    return int(value.numel()) * value.element_size()


def real_dtype(value: torch.Tensor) -> torch.dtype:
    """The dtype that a tensor is exchanged in: a complex number is two real ones."""
    return value.dtype.to_real() if value.is_complex() else value.dtype
