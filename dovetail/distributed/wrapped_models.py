"""Rules for modules in ``DistributedDataParallel`` that a compiled function calls.

The data-parallel wrapper learns from hooks in C++ that a gradient is ready, and a graph cannot hold those. So in a step that calls
``backward()`` itself the wrapped module becomes part of the graph, and the pass of :mod:`dovetail.distributed.replicate` exchanges
the gradients, in buckets of the wrapper's size. The buffers are the first rank's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed
from torch.nn.parallel import DistributedDataParallel

from dovetail.aot.joint_graph import JointGraph, Pass
from dovetail.aot.steps import required_passes
from dovetail.distributed.exchange import Reduction, Site, Team
from dovetail.distributed.gradients import defer_readers, gradient_sites, is_marked
from dovetail.distributed.operators import of_first_rank
from dovetail.distributed.placement import check_parameters
from dovetail.distributed.replicate import reduce_sites, refuse_assumptions
from dovetail.errors import CaptureError
from dovetail.frontend.code.frame import Break
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import end_rule, rule
from dovetail.rules.gradients.marks import EXCHANGE
from dovetail.torch_private import distributed as private_distributed
from dovetail.torch_private import trees as private_trees


@dataclass(frozen=True)
class Replica:
    """The exchange that a wrapped module wants for the gradients of its parameters: by identity, with their names in it."""

    reduction: Reduction
    members: frozenset[int]
    names: Mapping[int, str] = field(compare=False)

    def __contains__(self, parameter: torch.Tensor) -> bool:
        return id(parameter) in self.members


def at_capture(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` as interpreted code calls it: without the interpreter, which is its first argument."""

    def stand_in(*args: Any) -> Any:
        raise AssertionError(f"{function.__name__} runs while the wrapper's forward is interpreted")

    rule(stand_in)(lambda interpreter, args, kwargs: function(interpreter, *args))
    return stand_in


@at_capture
def _refuse(interpreter: TracingInterpreter, reason: str) -> None:
    raise Break(
        f"DistributedDataParallel is called, and {reason}",
        "compile the model first: DistributedDataParallel(compile(model))",
    )


@at_capture
def _check_devices(interpreter: TracingInterpreter, ids: Any, *given: Any) -> None:
    wanted = torch.device(ids[0]) if isinstance(ids[0], (str, torch.device)) else torch.device("cuda", ids[0])
    if any(isinstance(leaf, torch.Tensor) and leaf.device != wanted for leaf in private_trees.tree_leaves(given)):
        raise Break("DistributedDataParallel moves its inputs to another device", f"hand over tensors on {wanted}")


@at_capture
def _name_of(interpreter: TracingInterpreter, model: Any) -> str:
    return private_distributed.process_group_name(model.process_group)


@at_capture
def _size_of(interpreter: TracingInterpreter, model: Any) -> int:
    return torch.distributed.get_world_size(model.process_group)


@at_capture
def _note_gradients(interpreter: TracingInterpreter, model: Any, name: str) -> None:
    names = {id(parameter): name for name, parameter in model.module.named_parameters() if parameter.requires_grad}
    if set(model.parameters_to_ignore):
        raise Break("DistributedDataParallel ignores some of the parameters", "compile the model before it is wrapped")
    team = Team(name, torch.distributed.get_world_size(model.process_group))
    interpreter.trace.replicas.append(Replica(Reduction(team, int(model.bucket_bytes_cap)), frozenset(names), names))


class _Open:
    """The wrapped modules of one capture whose forward has begun and not ended."""

    def __init__(self, interpreter: TracingInterpreter) -> None:
        self.models: list[Any] = []


@at_capture
def _begin(interpreter: TracingInterpreter, model: Any) -> None:
    interpreter.state(_Open).models.append(model)


@at_capture
def _end(interpreter: TracingInterpreter, model: Any) -> None:
    interpreter.state(_Open).models.remove(model)


@end_rule
def _check_closed(interpreter: TracingInterpreter) -> None:
    """Code behind a break within a wrapped module would compute gradients that nobody reduces.

    A result that needs them is no result of a graph either; behind ``backward()`` a graph may break.
    """
    if interpreter.state(_Open).models:
        raise CaptureError(
            "a graph break within a module in DistributedDataParallel",
            where=interpreter.locate(),
            advice="keep what breaks it out of the step, or compile the model before it is wrapped",
        )


@rule(DistributedDataParallel.forward)
def _interpret_forward(interpreter: TracingInterpreter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return interpreter.call(_inlined, args, kwargs)


def _inlined(model: Any, *args: Any, **kwargs: Any) -> Any:
    """The wrapper's forward, written for the graph. It is interpreted, so that its reads of the wrapper are guarded."""
    reason = private_distributed.why_not_replicated(model)
    if reason:
        _refuse(reason)
    if model.device_ids:
        _check_devices(model.device_ids, args, kwargs)
    name = _name_of(model)
    if private_distributed.syncs_buffers(model):
        size = _size_of(model)
        with torch.no_grad():
            for buffer in model.modules_buffers:
                buffer.copy_(of_first_rank(buffer, size, name))
    sync = torch.is_grad_enabled() and model.require_backward_grad_sync
    if sync:
        _note_gradients(model, name)
    if model.require_forward_param_sync != sync:
        model.require_forward_param_sync = sync
    _begin(model)
    result = model.module(*args, **kwargs)
    _end(model)
    return result


def reduce_replicas(joint: JointGraph) -> None:
    """A pass: exchange the gradients of wrapped modules."""
    refuse_assumptions(joint)
    defer_readers(joint, is_marked)
    begun = dict(_send_buffers(joint))
    sites = gradient_sites(joint)
    replicas: dict[Replica, None] = {node.meta[EXCHANGE]: None for node in joint.graph.nodes if EXCHANGE in node.meta}
    for replica in replicas:
        own = [site for site in sites if site.mark is not None and site.mark.meta.get(EXCHANGE) == replica]
        reduce_sites(joint, own, "step", replica.reduction, behind=begun.get(replica.reduction.team))
    check_parameters(joint)


def _send_buffers(joint: JointGraph) -> Iterator[tuple[Team, torch.fx.Node | None]]:
    """Have the first rank's buffers exchanged in buckets; the ranks, and the node behind which their next exchange may begin."""
    nodes = joint.graph.find_nodes(op="call_function", target=of_first_rank)
    for size, name in dict.fromkeys(node.args[1:] for node in nodes):
        own = [node for node in nodes if node.args[1:] == (size, name) and node.users]
        sites = [Site.of_readers("", node.args[0], node.meta["val"], node) for node in own]
        team = Team(name, size)
        yield team, reduce_sites(joint, sites, "buffers", Reduction(team, 25 << 20), "broadcast")
    for node in nodes:
        joint.graph.erase_node(node)


@required_passes
def _reduce_gradients(joint: JointGraph) -> Pass | None:
    exchanges = any(EXCHANGE in node.meta or node.target is of_first_rank for node in joint.graph.nodes)
    return reduce_replicas if exchanges else None
