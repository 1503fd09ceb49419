"""``shard``: a module whose parameters are sharded over the ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
from torch import nn

from dovetail.distributed.data_parallel import broadcast, current_team, tensors_of
from dovetail.distributed.exchange import Team
from dovetail.distributed.operators import filled_up, gather, replica, shard_rows
from dovetail.errors import DistributedError, OptionError, ShardedModuleError
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import rule
from dovetail.torch_private import distributed as private_distributed


@dataclass(frozen=True, eq=False)
class ShardedParameter:
    """A parameter under a name of a module; ``rows`` are those of the whole (None: all ranks have it whole).

    Parameters with the same ``number`` are one parameter under several names.
    """

    owner: nn.Module
    name: str
    number: int
    rows: int | None


def is_captured() -> bool:
    """Whether the caller is being captured by Dovetail."""
    return False


@rule(is_captured)
def _is_captured(interpreter: TracingInterpreter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return True


class Sharded(nn.Module):
    """A module with this rank's shards of its parameters; made by :func:`shard`.

    ``parameters()`` are the shards: an optimizer made of them has its state in shards too. ``state_dict()`` has whole tensors
    under the names of the module itself, on all ranks, which have to call it together; ``load_state_dict()`` takes the same.
    """

    def __init__(self, module: nn.Module, team: Team, rank: int, reduction: str, eager_optimizer: bool) -> None:
        super().__init__()
        self.module = module
        self.team = team
        self.rank = rank
        self.reduction = reduction
        self.eager_optimizer = eager_optimizer
        self.sharded = _cut(module, team, rank)
        self.register_state_dict_post_hook(_whole_state)
        self.register_load_state_dict_pre_hook(_own_state)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward, on whole parameters, which exist while it runs."""
        self._check_use()
        shards = [item.owner._parameters[item.name] for item in self.sharded]
        wholes: dict[int, torch.Tensor] = {}
        for item, shard in zip(self.sharded, shards, strict=True):
            if shard is not None and item.number not in wholes:
                wholes[item.number] = self._whole(item, shard)
        for item in self.sharded:
            item.owner._parameters[item.name] = wholes[item.number]  # type: ignore[assignment]
        try:
            return self.module(*args, **kwargs)
        finally:
            for item, shard in zip(self.sharded, shards, strict=True):
                item.owner._parameters[item.name] = shard

    def _whole(self, item: ShardedParameter, shard: torch.Tensor) -> torch.Tensor:
        settings = self.eager_optimizer, self.team.size, self.team.name, self.reduction
        if item.rows is None:
            return replica(shard, *settings)  # type: ignore[no-any-return]
        return gather(shard, item.rows, *settings)  # type: ignore[no-any-return]

    def _check_use(self) -> None:
        if torch.is_grad_enabled() and not self.eager_optimizer and not is_captured():
            raise DistributedError(
                "a sharded module is called outside of a compiled training step: what eager code computes from the gradients "
                "of its parts (a norm, say) is not that of the whole",
                advice="compile the whole step with dovetail.compile, or say shard(..., eager_optimizer=True), and clip with "
                "dovetail.distributed.clip_grad_norm_",
            )

    def extra_repr(self) -> str:
        """How many ranks share the parameters."""
        return f"rank {self.rank} of {self.team.size}"


def shard(module: nn.Module, mesh: Any = None, *, reduction: str = "mean", eager_optimizer: bool = False) -> Sharded:
    """Shard the parameters of a module over the ranks of a device mesh of one dimension (by default: over all ranks).

    The module is changed in place: each parameter becomes this rank's shard of the first rank's, cut along the first dimension;
    make the optimizer afterwards. While the module runs, whole parameters are gathered; gradients are reduced (to the "mean" or
    the "sum" over the ranks) and only this rank's shard of them is kept. ``dovetail.compile`` of a whole training step does both
    in buckets, beside the computation, and sees to it that norms are those of whole tensors.

    With ``eager_optimizer=True`` the module may also be compiled or called by itself, with ``backward()`` and the optimizer
    outside: then it is up to you not to compute anything but element by element from gradients and parameters.

    Raises :class:`DistributedError` without a process group, and :class:`ShardedModuleError` for a module that cannot be cut.
    """
    if reduction not in ("mean", "sum"):
        raise OptionError(f"reduction must be 'mean' or 'sum', not {reduction!r}")
    if not isinstance(module, nn.Module):
        raise ShardedModuleError(f"a {type(module).__name__} is no module", advice="hand over a torch.nn.Module")
    team, found = current_team(None if mesh is None else _group_of(mesh))
    _check(module)
    broadcast(tensors_of([module]), team)
    return Sharded(module, team, torch.distributed.get_rank(found), reduction, eager_optimizer)


def _group_of(mesh: Any) -> Any:
    if not isinstance(mesh, torch.distributed.device_mesh.DeviceMesh):
        raise OptionError(
            f"a {type(mesh).__name__} is no device mesh",
            advice="hand over what torch.distributed.device_mesh.init_device_mesh returns",
        )
    if mesh.ndim != 1:
        raise OptionError(
            f"the mesh has {mesh.ndim} dimensions", advice='hand over one of them: mesh["name"], or use one dimension'
        )
    if mesh.get_coordinate() is None:
        raise DistributedError("this rank is not in the mesh", advice="call it on the ranks of the mesh only")
    return mesh.get_group()


def _check(module: nn.Module) -> None:
    for child in module.modules():
        if isinstance(child, Sharded):
            raise ShardedModuleError(
                "a part of the module is sharded already", advice="shard the outermost module only"
            )
        own = {id(value) for value in child._parameters.values() if value is not None}
        for name, value in child._parameters.items():
            if value is None:
                continue
            if isinstance(value, nn.parameter.UninitializedParameter):
                raise ShardedModuleError(f"{name} has no size yet", advice="run the lazy module once, then shard it")
            if type(value) is not nn.Parameter or type(value.data) is not torch.Tensor:
                raise ShardedModuleError(
                    f"{name} is a {type(value.data).__name__}", advice="shard a module of plain parameters"
                )
        for attribute, value in vars(child).items():
            kept = value if isinstance(value, (list, tuple)) else [value]
            if attribute != "_parameters" and any(id(item) in own for item in kept):
                raise ShardedModuleError(
                    f"a {type(child).__name__} keeps its parameters under {attribute} too, where they would stay whole",
                    advice="keep such modules (RNNs) out of the sharded module, or use data_parallel",
                )


def _cut(module: nn.Module, team: Team, rank: int) -> list[ShardedParameter]:
    """Replace the parameters by shards; one that several modules share stays one."""
    numbers: dict[int, tuple[int, nn.Parameter, int | None]] = {}
    found = []
    wholes = []
    for owner in module.modules():
        for name, whole in owner._parameters.items():
            if whole is None:
                continue
            if id(whole) not in numbers:
                rows = whole.shape[0] if whole.dim() else None
                wholes.append(whole)
                numbers[id(whole)] = len(numbers), _shard_of(whole, team, rank), rows
            number, shard, rows = numbers[id(whole)]
            owner._parameters[name] = shard
            found.append(ShardedParameter(owner, name, number, rows))
    return found


def cut(whole: torch.Tensor, size: int, rank: int) -> torch.Tensor:
    """This rank's shard of a tensor."""
    rows = shard_rows(whole.shape[0], size)
    return filled_up(whole, size)[rank * rows : (rank + 1) * rows].clone()


def _shard_of(whole: nn.Parameter, team: Team, rank: int) -> nn.Parameter:
    if not whole.dim():
        return whole
    return nn.Parameter(cut(whole.detach(), team.size, rank), requires_grad=whole.requires_grad)


def _named(module: Sharded) -> Iterator[tuple[str, ShardedParameter]]:
    names = {id(child): name for name, child in module.module.named_modules(remove_duplicate=False)}
    for item in module.sharded:
        prefix = names[id(item.owner)]
        yield (f"{prefix}.{item.name}" if prefix else item.name), item


def _whole_state(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """After ``state_dict``: whole tensors, under the names of the module inside."""
    assert isinstance(module, Sharded)
    inner = f"{prefix}module."
    shards = {key.removeprefix(inner): state.pop(key) for key in list(state) if key.startswith(inner)}
    rows = {name: item.rows for name, item in _named(module)}
    for name, value in shards.items():
        state[prefix + name] = whole_of(module, value, rows.get(name))


def whole_of(module: Sharded, shard: torch.Tensor, rows: int | None) -> torch.Tensor:
    """The whole tensor, from the shards of all ranks, which have to call this together."""
    if rows is None:
        return shard
    with torch.no_grad():
        return gather(shard.detach(), rows, True, module.team.size, module.team.name, module.reduction)  # type: ignore[no-any-return]


def _own_state(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Before ``load_state_dict``: this rank's shards of whole tensors."""
    assert isinstance(module, Sharded)
    rows = {name: item.rows for name, item in _named(module)}
    names = {*rows, *(name for name, _ in module.module.named_buffers(remove_duplicate=False))}
    for key in [key for key in state if key.startswith(prefix)]:
        name = key.removeprefix(prefix)
        value = state[key]
        if name.startswith("module.") and name not in names:
            continue
        del state[key]
        if rows.get(name) is not None and value.dim() and value.shape[0] == rows[name]:
            value = cut(value.detach(), module.team.size, module.rank)
        state[f"{prefix}module.{name}"] = value


def whole_optimizer_state(module: Sharded, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """``optimizer.state_dict()`` with whole tensors, as that of an optimizer of the unsharded module; all ranks call it."""
    state = optimizer.state_dict()
    return _map_state(module, optimizer, state, lambda value, rows: whole_of(module, value, rows))


def load_whole_optimizer_state(module: Sharded, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """``optimizer.load_state_dict(state)`` for a state with whole tensors."""
    team, rank = module.team, module.rank
    optimizer.load_state_dict(_map_state(module, optimizer, state, lambda value, rows: cut(value, team.size, rank)))


def _map_state(
    module: Sharded, optimizer: torch.optim.Optimizer, state: Mapping[str, Any], change: Any
) -> dict[str, Any]:
    """The state, changed at each tensor that belongs to a sharded parameter element by element."""
    sharded = {id(item.owner._parameters[item.name]): item for item in module.sharded}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    found = dict(state["state"])
    for number, parameter in zip(numbers, parameters, strict=True):
        item = sharded.get(id(parameter))
        if item is None or item.rows is None or number not in found:
            continue
        shapes = parameter.shape, torch.Size((item.rows, *parameter.shape[1:]))
        found[number] = {
            key: change(value, item.rows)
            if isinstance(value, torch.Tensor) and value.shape in shapes and value.dim()
            else value
            for key, value in found[number].items()
        }
    return {**state, "state": found}


def clip_grad_norm_(module: Sharded, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """``torch.nn.utils.clip_grad_norm_`` for a sharded module in eager: by the norm of whole gradients, which it returns.

    Inside of a compiled step torch's own function does the same. All ranks call it.
    """
    if not norm_type > 0:
        raise OptionError(f"norm_type must be greater than 0, not {norm_type!r}")
    group = private_distributed.process_group(module.team.name)
    sharded: list[torch.Tensor] = []
    whole: list[torch.Tensor] = []
    for item in {item.number: item for item in module.sharded}.values():
        gradient = getattr(item.owner._parameters[item.name], "grad", None)
        if gradient is not None:
            (whole if item.rows is None else sharded).append(gradient)
    gradients = [*sharded, *whole]
    if not gradients:
        return torch.tensor(0.0)
    norms = torch.stack([torch.linalg.vector_norm(gradient, norm_type) for gradient in gradients])
    own, common = norms[: len(sharded)], norms[len(sharded) :]
    if norm_type == math.inf:
        torch.distributed.all_reduce(own, torch.distributed.ReduceOp.MAX, group=group)
    else:
        own = own**norm_type
        torch.distributed.all_reduce(own, group=group)
        own = own ** (1.0 / norm_type)
    total = torch.linalg.vector_norm(torch.cat([own, common]), norm_type)
    torch.nn.utils.clip_grads_with_norm_(
        [shard for shard in module.parameters() if shard.grad is not None], max_norm, total
    )
    return total
