"""Rules for modules in ``DistributedDataParallel`` and FSDP that a compiled function calls.

The data-parallel wrapper learns from hooks in C++ that a gradient is ready, and a graph cannot hold those. So in a step that calls
``backward()`` itself the wrapped module becomes part of the graph, and the pass of :mod:`dovetail.distributed.replicate` exchanges
the gradients, in buckets of the wrapper's size. The buffers are the first rank's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
from torch.nn.parallel import DistributedDataParallel

from dovetail.aot.joint_graph import JointGraph, Pass
from dovetail.aot.steps import required_passes
from dovetail.distributed.exchange import Team
from dovetail.distributed.gradients import defer_readers, gradient_sites, is_marked
from dovetail.distributed.placement import check_parameters
from dovetail.distributed.replicate import Reduction, reduce_sites, refuse_assumptions
from dovetail.errors import ShardedModuleError
from dovetail.frontend.code.frame import Break
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import rule
from dovetail.torch_private import distributed as private_distributed
from dovetail.torch_private import trees as private_trees
from dovetail.trace.gradient_marks import EXCHANGE

_library = torch.library.Library("dovetail_distributed", "FRAGMENT")
_library.define("from_first(Tensor[] tensors, str group) -> Tensor[]")


def _from_first(tensors: list[torch.Tensor], group: str) -> list[torch.Tensor]:
    process_group = private_distributed.process_group(group)
    first = torch.distributed.get_global_rank(process_group, 0)
    copies = [tensor.clone() for tensor in tensors]
    for work in [torch.distributed.broadcast(copy, first, process_group, async_op=True) for copy in copies]:
        work.wait()
    return copies


_library.impl("from_first", _from_first, "CompositeExplicitAutograd")


@torch.library.register_fake("dovetail_distributed::from_first", lib=_library)
def _(tensors: list[torch.Tensor], group: str) -> list[torch.Tensor]:
    return [torch.empty_like(tensor) for tensor in tensors]


@dataclass(frozen=True)
class Replica:
    """How a wrapped module wants the gradients of its parameters, given by identity, to be exchanged."""

    reduction: Reduction
    members: frozenset[int]

    def __contains__(self, parameter: torch.Tensor) -> bool:
        return id(parameter) in self.members


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
        with torch.no_grad():
            buffers = list(model.modules_buffers)
            for buffer, value in zip(buffers, torch.ops.dovetail_distributed.from_first(buffers, name), strict=True):
                buffer.copy_(value)
    sync = torch.is_grad_enabled() and model.require_backward_grad_sync
    if sync:
        _note(model, name)
    if model.require_forward_param_sync != sync:
        model.require_forward_param_sync = sync
    return model.module(*args, **kwargs)


def _refuse(reason: str) -> None:
    raise NotImplementedError(reason)


def _check_devices(ids: Any, args: Any, kwargs: Any) -> None:
    raise NotImplementedError


def _name_of(model: Any) -> str:
    return private_distributed.process_group_name(model.process_group)


def _note(model: Any, name: str) -> None:
    raise NotImplementedError


@rule(_refuse)
def _break_graph(interpreter: TracingInterpreter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    raise Break(
        f"DistributedDataParallel is called, and {args[0]}",
        "compile the model first: DistributedDataParallel(compile(model))",
    )


@rule(_check_devices)
def _check_inputs(interpreter: TracingInterpreter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    ids, *given = args
    leaves = private_trees.tree_leaves(given)
    wanted = torch.device(ids[0]) if isinstance(ids[0], (str, torch.device)) else torch.device("cuda", ids[0])
    if any(isinstance(leaf, torch.Tensor) and leaf.device != wanted for leaf in leaves):
        raise Break("DistributedDataParallel moves its inputs to another device", f"hand over tensors on {wanted}")


@rule(_name_of)
def _read_name(interpreter: TracingInterpreter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    return _name_of(args[0])


@rule(_note)
def _note_gradients(interpreter: TracingInterpreter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    model, name = args
    members = frozenset(id(parameter) for parameter in model.module.parameters() if parameter.requires_grad)
    ignored = set(model.parameters_to_ignore)
    if ignored:
        raise Break("DistributedDataParallel ignores some of the parameters", "compile the model before it is wrapped")
    team = Team(name, torch.distributed.get_world_size(model.process_group))
    interpreter.trace.replicas.append(Replica(Reduction(team, int(model.bucket_bytes_cap)), members))


@rule(*private_distributed.fsdp_forwards())
def _refuse_fsdp(interpreter: TracingInterpreter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise ShardedModuleError(
        "a module that FSDP has spread over the ranks is called: it gathers and frees its parameters in hooks, behind the back "
        "of a graph",
        where=interpreter.locate(),
        advice="use dovetail.distributed.shard on the plain module, or compile modules inside before FSDP takes them over",
    )


def has_replicas(joint: JointGraph) -> bool:
    """Whether a graph has gradients that a wrapper would exchange."""
    return any(EXCHANGE in node.meta for node in joint.graph.nodes)


def reduce_replicas(joint: JointGraph) -> None:
    """A pass: exchange the gradients of wrapped modules."""
    refuse_assumptions(joint)
    defer_readers(joint, is_marked)
    sites = gradient_sites(joint)
    replicas: dict[Replica, None] = {node.meta[EXCHANGE]: None for node in joint.graph.nodes if EXCHANGE in node.meta}
    for replica in replicas:
        own = [site for site in sites if site.mark is not None and site.mark.meta.get(EXCHANGE) == replica]
        reduce_sites(joint, own, "step", replica.reduction)
    check_parameters(joint)


@required_passes
def _reduce_gradients(joint: JointGraph) -> Pass | None:
    return reduce_replicas if has_replicas(joint) else None
