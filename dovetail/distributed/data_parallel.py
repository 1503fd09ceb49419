"""``data_parallel``: a model or a training step that runs on several processes, each with its part of the batch."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed

from dovetail.aot.descriptors import ParamInput
from dovetail.aot.joint_graph import JointGraph
from dovetail.distributed.exchange import Team
from dovetail.distributed.placement import is_data
from dovetail.distributed.plan import made_by, refuse_other_versions
from dovetail.distributed.replicate import replicate
from dovetail.errors import DistributedError, NotCallableError, OptionError, ShardedModuleError
from dovetail.face.compile import CompiledFunction, compile
from dovetail.face.module import CompiledModule
from dovetail.torch_private import distributed as private_distributed
from dovetail.torch_private import state as private_state
from dovetail.torch_private import tensors as private_tensors
from dovetail.trace.trace import open_trace


def data_parallel(
    function: Any,
    *,
    modules: Iterable[torch.nn.Module] = (),
    group: Any = None,
    bucket_megabytes: float = 25.0,
    reduction: str = "mean",
    check: bool = True,
    broadcast_buffers: bool = True,
    **options: Any,
) -> Any:
    """Compile a model or a training step for data-parallel training: gradients are reduced over the ranks of ``group``.

    A model gives a model, of which each rank calls ``backward()`` on its own loss. A function that calls ``backward()`` itself,
    and steps an optimizer, is one graph with the exchanges in it. In both, ``.grad`` is the mean over the ranks (or the "sum",
    by ``reduction``). Before the first call the first rank's parameters and buffers are sent to all: those of ``function``, of
    ``modules`` and of the modules that the function reaches by name.

    Gradients are exchanged in buckets of at most ``bucket_megabytes``, begun as soon as the last gradient of a bucket is
    computed and awaited when the first is read. With ``check`` (a small exchange at each call, beside the computation) ranks
    whose graphs differ raise :class:`RanksDifferError`. With ``broadcast_buffers`` a buffer that the forward writes to has at
    each call the first rank's value. Other options are those of :func:`dovetail.compile`; ``fullgraph`` is always True, because
    what runs eagerly is not reduced.

    Raises :class:`DistributedError` without a process group, :class:`OptionError` and :class:`NotCallableError` as
    :func:`dovetail.compile` does.
    """
    if not callable(function):
        raise NotCallableError(
            f"an object of type {type(function).__name__} cannot be compiled because it cannot be called",
            advice="hand over a function or a torch.nn.Module",
        )
    if reduction not in ("mean", "sum"):
        raise OptionError(f"reduction must be 'mean' or 'sum', not {reduction!r}")
    if not isinstance(bucket_megabytes, (int, float)) or isinstance(bucket_megabytes, bool) or bucket_megabytes <= 0:
        raise OptionError(f"bucket_megabytes must be a number greater than 0, not {bucket_megabytes!r}")
    if options.get("fullgraph") is False:
        raise OptionError(
            "fullgraph=False: what runs eagerly between graphs is not reduced", advice="leave fullgraph out"
        )
    if isinstance(function, (CompiledModule, CompiledFunction)):
        function = function.original
    passes = tuple(options.pop("passes", ()))
    options = {"at_recompile_limit": "error", **options, "fullgraph": True}

    def build(team: Team, check_inputs: Callable[[JointGraph], None]) -> Any:
        own = replicate(
            team,
            bucket_bytes=max(1, int(bucket_megabytes * 2**20)),
            reduction=reduction,
            check=check,
            buffers=broadcast_buffers,
        )
        # The user's passes come after: they see reduced gradients, and clip by the norm of the whole batch's.
        return compile(function, passes=(check_inputs, own, *passes), **options)

    made = _DataParallel(function, build, tuple(modules), group)
    if isinstance(function, torch.nn.Module):
        return CompiledModule(function, lambda original: made)
    return made


class _DataParallel:
    """A compiled function that is compiled again for another process group."""

    def __init__(
        self,
        function: Any,
        build: Callable[[Team, Callable[[JointGraph], None]], Any],
        modules: tuple[torch.nn.Module, ...],
        group: Any,
    ) -> None:
        self.original = function
        self._build = build
        self._modules = modules
        self._group = group
        self._team: Team | None = None
        self._members: Any = None
        #: The arguments of the running call.
        self._arguments: tuple[tuple[Any, ...], dict[str, Any]] = (), {}
        #: The tensors that all ranks have from the first one, by identity.
        self._sent: dict[int, torch.Tensor] = {}
        self.compiled: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run on this rank's part of the batch."""
        self.prepare(args, kwargs)
        self._arguments = args, kwargs
        try:
            return self.compiled(*args, **kwargs)
        finally:
            self._arguments = (), {}

    def prepare(self, args: tuple[Any, ...] = (), kwargs: Any = None) -> None:
        """Compile for the process group, and send the first rank's parameters and buffers to all ranks, before the first call."""
        if private_state.dispatch_mode_count() or open_trace() is not None or torch.compiler.is_compiling():
            raise DistributedError(
                "a data-parallel function is called while something else compiles or watches tensor operations",
                advice="call it outside, and compile the whole step with data_parallel",
            )
        present, members = current_team(self._group)
        if present == self._team and members is self._members:
            return
        self.compiled = self._build(present, self._check_inputs)
        found = tensors_of(reachable_modules(self.original, self._modules, (*args, *(kwargs or {}).values())))
        broadcast(found, present)
        # Their identities are compared, so they are kept alive.
        self._sent = {id(tensor): tensor for tensor in found}
        self._team, self._members = present, members

    def _check_inputs(self, joint: JointGraph) -> None:
        """A pass that changes nothing: refuse parameters that have not been sent to all ranks."""
        args, kwargs = self._arguments
        function = joint.capture.function
        for number, descriptor in enumerate(joint.input_descriptors[: joint.num_primals]):
            if not isinstance(descriptor, ParamInput) and (
                is_data(descriptor) or not joint.spec.input_requires_grad[number]
            ):
                continue
            real = joint.capture.guards.tensor_source(number).fetch(function, args, kwargs)
            if id(real) not in self._sent:
                raise DistributedError(
                    f"{descriptor} belongs to a module that was not known before the first call, so that it may differ between "
                    "the ranks",
                    advice="name the module: data_parallel(step, modules=(model,)); make a tensor of your own a parameter of one",
                )


def current_team(group: Any) -> tuple[Team, Any]:
    """The ranks of a process group as it is now, and the group itself; raises :class:`DistributedError` if there is none."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        raise DistributedError(
            "there is no process group",
            advice='start the program with torchrun, and call torch.distributed.init_process_group("gloo") first',
        )
    found = group if group is not None else torch.distributed.group.WORLD
    size = torch.distributed.get_world_size(group)
    if size < 1:
        raise DistributedError("this rank is not in the process group", advice="call it on the ranks of the group only")
    return Team(private_distributed.process_group_name(group), size), found


def team(group: Any = None) -> Team:
    """The ranks of a process group (by default: all), as passes take them; raises :class:`DistributedError` without one."""
    return current_team(group)[0]


def reachable_modules(function: Any, given: Iterable[torch.nn.Module], args: Iterable[Any]) -> list[torch.nn.Module]:
    """The modules that a function is, belongs to, closes over, names or is called with."""
    found: dict[int, torch.nn.Module] = {}
    for value in (*given, *_values_behind(function), *args):
        for item in _with_items(value):
            if isinstance(item, torch.nn.Module):
                found[id(item)] = item
    return list(found.values())


def _values_behind(function: Any) -> Iterator[Any]:
    yield function
    owner = getattr(function, "__self__", None)
    if owner is not None:
        yield owner
        yield from getattr(owner, "__dict__", {}).values()
    plain = getattr(function, "__func__", function)
    if isinstance(plain, types.FunctionType):
        for cell in plain.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:
                # A cell that is filled later.
                continue
        for name in plain.__code__.co_names:
            if name in plain.__globals__:
                yield plain.__globals__[name]
        yield from plain.__defaults__ or ()
        yield from (plain.__kwdefaults__ or {}).values()
    elif hasattr(function, "func") and hasattr(function, "args"):
        yield from (function.func, *function.args, *function.keywords.values())


def _with_items(value: Any) -> Iterator[Any]:
    yield value
    if isinstance(value, (list, tuple)):
        yield from value
    elif isinstance(value, dict):
        yield from value.values()


def tensors_of(modules: Iterable[torch.nn.Module]) -> list[torch.Tensor]:
    """Parameters and buffers, each once."""
    found: dict[int, torch.Tensor] = {}
    for module in modules:
        for tensor in (*module.parameters(), *module.buffers()):
            found[id(tensor)] = tensor
    return list(found.values())


def broadcast(tensors: Iterable[torch.Tensor], team: Team) -> None:
    """Send the first rank's values to all ranks; raises :class:`DistributedError` if the ranks have other tensors."""
    values = [tensor.detach() for tensor in tensors]
    for value in values:
        if private_tensors.is_wrapper(value):
            raise ShardedModuleError(
                f"a parameter or buffer is a {type(value).__name__}, which has its own way over the ranks",
                advice="use dovetail.compile, or hand over a module of plain tensors",
            )
    group = private_distributed.process_group(team.name)
    shapes = [(tuple(value.shape), str(value.dtype), value.device.type) for value in values]
    everyone: list[Any] = [None] * team.size
    torch.distributed.all_gather_object(everyone, (made_by(), shapes), group=group)
    refuse_other_versions([versions for versions, _ in everyone], torch.distributed.get_rank(group))
    if any(other != shapes for _, other in everyone):
        raise DistributedError(
            "the ranks have parameters or buffers of different number, shape or dtype, or on devices of different kinds",
            advice="build the same model on all ranks",
        )
    first = torch.distributed.get_global_rank(group, 0)
    with torch.no_grad():
        for value in values:
            torch.distributed.broadcast(value, first, group=group)
