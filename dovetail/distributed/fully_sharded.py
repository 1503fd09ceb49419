"""Whole steps of modules that ``fully_shard`` (FSDP2) has spread: what its hooks do becomes part of the graph.

A hook in front of a forward gathers the module's parameters, one behind it frees them, and others do so around the backward and
exchange the gradients. In a graph a parameter is gathered by an operator whose derivative reduces its gradient
(:mod:`dovetail.distributed.sharded_pass` puts many into one exchange, ahead of their use), and FSDP's own state stays what it is
between steps. So the graph has to hold the backward too: where gradients would leave it, where the program has told FSDP to do
something else than that, or where the graph breaks within a module, the hooks run as in eager and break the graph.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.utils.checkpoint

from dovetail.aot.steps import checks_outputs
from dovetail.distributed.eager_ranks import watch_fsdp
from dovetail.distributed.operators import average, filled_up, reshard, unshard
from dovetail.distributed.wrapped_models import at_capture
from dovetail.frontend.code.frame import Break
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, Instead, Keywords, end_rule, rule, wrapper_rule
from dovetail.guards import ComputedSource, Equals
from dovetail.rules.torch.checkpoints import interpret_checkpoint
from dovetail.torch_private import calls as private_calls
from dovetail.torch_private import distributed as private_distributed
from dovetail.torch_private import fsdp as private_fsdp
from dovetail.torch_private import tracing as private_tracing
from dovetail.torch_private import trees as private_trees
from dovetail.torch_private.autograd import current_backward
from dovetail.torch_private.autograd_nodes import node_name
from dovetail.trace import Trace
from dovetail.trace.overrides import autograd_nodes
from dovetail.trace.settings import CaptureSettings, Retry

#: A capture that has given up a strategy of this name leaves the hooks to eager; what follows is the reason.
_IN_GRAPH = "FSDP in the graph: "
_UNREACHED = "gradients were kept of parameters that the backward which reduces them does not reach"


@dataclass(frozen=True)
class Spread:
    """How a parameter is spread over ranks, whether it is freed after the forward, and the dtypes it is used and reduced in.

    Each part is there on ``copies`` ranks, the group ``others``; gradients are divided by two factors, or averaged.
    """

    group: str
    others: str
    size: int
    again: bool
    rows: int
    padded: int
    whole: int
    dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    factors: tuple[float, float] | None
    copies: int

    @property
    def reduction(self) -> str:
        """The reduction by which exchanges combine gradients."""
        return "mean" if self.factors is None else "sum"

    def scattered(self, gradient: torch.Tensor) -> torch.Tensor:
        """This rank's part of the mean of the gradients of the ranks that have other parts."""
        given = filled_up(gradient if self.factors is None else gradient / self.factors[0], self.size)
        return reshard(given, self.size, self.group, self.reduction)  # type: ignore[no-any-return]

    def reduced(self, part: torch.Tensor) -> torch.Tensor:
        """The same part of the mean of all ranks' gradients."""
        if self.copies > 1:
            part = average(part, self.copies, self.others, self.reduction)
        part = part if self.factors is None else part / self.factors[1]
        return part[: self.rows] if self.rows != self.padded else part


def _give_up(reason: str) -> NoReturn:
    raise Retry(reason, without=_IN_GRAPH + reason)


class _Gathered(torch.autograd.Function):
    """A whole parameter from this rank's part; its gradient is reduced over the ranks."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, spread: Spread, number: int) -> torch.Tensor:
        """Gather the parts, in the dtype in which the module computes."""
        ctx.spread, ctx.dtype, ctx.number = spread, part.dtype, number
        given = part if spread.dtype is None else part.to(spread.dtype)
        if spread.padded != spread.rows:
            given = torch.cat([given, given.new_zeros((spread.padded - spread.rows, *given.shape[1:]))])
        whole: torch.Tensor = unshard(given, spread.again, spread.size, spread.group, spread.reduction)
        whole = whole[: spread.whole] if spread.whole != whole.shape[0] else whole
        _, _, param = _unchanged(number)
        return _beside_tensor_parallelism(param, whole) if param.is_dtensor else whole

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """This rank's part, or nothing where FSDP is to add up whole gradients of several backwards first."""
        spread, (state, group, param) = ctx.spread, _unchanged(ctx.number)
        kept, reduces = private_fsdp.kept_gradient(param), group.reduce_grads
        _note_backward(state, group, param, reduces)
        _note_resharding(ctx.number, group.reshard_after_backward)
        if kept is not None:
            gradient = (kept + gradient).to(kept.dtype)
        if not reduces:
            gradient = gradient if spread.reduce_dtype is None else gradient.to(spread.reduce_dtype)
            # FSDP adds to it in place.
            private_fsdp.keep_gradient(param, gradient.clone(memory_format=torch.contiguous_format))
            return None, None, None
        if kept is not None:
            private_fsdp.keep_gradient(param, None)
        if param.is_dtensor:
            gradient = _own_gradient(param, gradient)
        if spread.reduce_dtype is not None:
            gradient = gradient.to(spread.reduce_dtype)
        part = spread.scattered(gradient)
        if spread.copies > 1:
            part = _added_up(group, param, part, group.all_reduce_grads)
            if not group.all_reduce_grads:
                return None, None, None
        return spread.reduced(part).to(ctx.dtype), None, None


class _Open:
    """The modules of one capture whose parameters are gathered now, and the parts that were gathered in the graph."""

    def __init__(self, interpreter: TracingInterpreter) -> None:
        self.states: list[Any] = []
        #: Of each parameter the state that it belongs to, the module and name under which it is found, and the whole.
        self.wholes: list[tuple[Any, Any, str, Any]] = []
        #: What is gathered at each call of ``torch.utils.checkpoint``; of those that run the states open then, and what was there.
        self.regions: list[list[Any]] = []
        self.entered: list[tuple[int, list[Any]]] = []
        #: The parts that were gathered, the nodes that computed them, and the state, group and parameter that they belong to.
        self.parts: list[tuple[torch.Tensor, torch.fx.Node, Any]] = []
        #: Of these the ones of parameters without a gradient, for a forward that may have a backward.
        self.frozen: list[tuple[torch.Tensor, torch.fx.Node]] = []
        #: Of each outermost module that has begun the parameters that had a gradient kept, and those that have got one, with the
        #: group of each and the backward that kept it first; and the backwards that have reduced gradients.
        self.kept: dict[int, dict[Any, tuple[Any, int]]] = {}
        self.reduced: dict[int, set[int]] = {}
        #: What backwards have added up that no copies have exchanged yet; of each group and backward the parameters that it
        #: reached, and whether it exchanged them.
        self.sums: dict[Any, torch.Tensor] = {}
        self.reached: dict[Any, dict[tuple[int, bool], set[Any]]] = {}
        #: Of each outermost module the groups that eager would leave gathered, with their parts, the nodes that computed these, and
        #: whether a backward has left them so.
        self.gathered: dict[int, dict[Any, list[tuple[torch.Tensor, torch.fx.Node, bool]]]] = {}


@at_capture
def _begin(interpreter: TracingInterpreter, state: Any, values: Any) -> None:
    source = interpreter.values.source_of(state)
    if source is None:
        _give_up("its state is made in the program")
    with private_tracing.disable_current_modes(), private_calls.no_torch_function():
        reason = private_fsdp.why_not_in_graph(state)
    if reason:
        _give_up(reason)
    asked = ComputedSource(private_fsdp.why_not_in_graph, (source,), f"why {source.name} is not ready")
    interpreter.values.guard(asked, Equals(""), "FSDP's hooks are part of the graph")
    device = private_fsdp.device_of(state)
    if device.type != "cpu" and any(
        isinstance(leaf, torch.Tensor) and leaf.device.type != device.type for leaf in private_trees.tree_leaves(values)
    ):
        _give_up("inputs are moved to another device")
    opened = interpreter.state(_Open)
    opened.states.append(state)
    key = private_fsdp.context_of(state)
    if key not in opened.kept:
        kept = private_fsdp.kept_gradients(state)
        counted = ComputedSource(private_fsdp.places_of_kept, (source,), f"which gradients {source.name} has kept")
        interpreter.values.guard(counted, Equals(private_fsdp.places_of_kept(state)), "FSDP adds up gradients")
        opened.kept[key], opened.reduced[key] = {param: (group, -1) for group, param in kept}, set()


@at_capture
def _spread(interpreter: TracingInterpreter, members: Any, others: Any, *numbers: Any) -> Spread:
    name = private_distributed.process_group_name
    return Spread(name(members), "" if others is None else name(others), *numbers)


@at_capture
def _remember(interpreter: TracingInterpreter, part: torch.Tensor, stays: bool, *owners: Any) -> int:
    opened, node = interpreter.state(_Open), interpreter.trace.node_of(part)
    opened.parts.append((part, node, owners))
    if torch.is_grad_enabled() and not part.requires_grad:
        opened.frozen.append((part, node))
    _check_gathered(interpreter)
    if stays:
        _stay_gathered(opened, len(opened.parts) - 1, False)
    return len(opened.parts) - 1


def _stay_gathered(opened: _Open, number: int, in_backward: bool) -> None:
    part, node, (state, group, _) = opened.parts[number]
    opened.gathered.setdefault(private_fsdp.context_of(state), {}).setdefault(group, []).append(
        (part, node, in_backward)
    )


def _check_gathered(interpreter: TracingInterpreter) -> None:
    """In eager the forwards that follow compute with what was gathered before the write."""
    groups = [group for groups in interpreter.state(_Open).gathered.values() for group in groups.values()]
    if any(interpreter.trace.node_of(part) is not node for group in groups for part, node, _ in group):
        _give_up("a parameter that stays gathered is written to")


@at_capture
def _unchanged(interpreter: TracingInterpreter, number: int) -> Any:
    """The owners of a part. FSDP gathers a parameter for its backward as it is by then."""
    part, node, owners = interpreter.state(_Open).parts[number]
    if interpreter.trace.node_of(part) is not node:
        _give_up("a parameter is written to between a forward and its backward")
    return owners


@at_capture
def _beside_tensor_parallelism(interpreter: TracingInterpreter, param: Any, whole: torch.Tensor) -> torch.Tensor:
    return private_fsdp.beside_tensor_parallelism(param, whole)


@at_capture
def _own_gradient(interpreter: TracingInterpreter, param: Any, gradient: torch.Tensor) -> torch.Tensor:
    return private_fsdp.own_gradient(param, gradient)


@at_capture
def _note_backward(interpreter: TracingInterpreter, state: Any, group: Any, param: Any, reduces: bool) -> None:
    """In eager a backward that reduces gradients reduces all that were kept, also those of parameters that it does not reach."""
    opened, key, now = interpreter.state(_Open), private_fsdp.context_of(state), current_backward()
    if not (reduces or private_fsdp.KEEPS_GRADIENTS):
        _give_up("this torch keeps gradients that are not reduced in the parameters themselves")
    since = opened.kept[key].setdefault(param, (group, now))[1]
    if any(since < other < now for other in opened.reduced[key]):
        _give_up(_UNREACHED)
    if reduces:
        opened.reduced[key].add(now)
        del opened.kept[key][param]


@at_capture
def _note_resharding(interpreter: TracingInterpreter, number: int, frees: bool) -> None:
    """In eager the end of a backward frees all parameters under the outermost module, where their groups do not say otherwise."""
    opened = interpreter.state(_Open)
    groups = opened.gathered.setdefault(private_fsdp.context_of(opened.parts[number][2][0]), {})
    if not frees:
        _stay_gathered(opened, number, True)
    for group in list(groups) if frees else ():
        if interpreter.load_attribute(group, "reshard_after_backward"):
            del groups[group]


@at_capture
def _added_up(
    interpreter: TracingInterpreter, group: Any, param: Any, part: torch.Tensor, exchanges: bool
) -> torch.Tensor:
    """The sum of a part of several backwards, of which the last one exchanges it between its copies."""
    opened = interpreter.state(_Open)
    opened.reached.setdefault(group, {}).setdefault((current_backward(), exchanges), set()).add(param)
    before = opened.sums.pop(param, None)
    total = part if before is None else part + before
    if not exchanges:
        opened.sums[param] = total
    return total


@at_capture
def _put(interpreter: TracingInterpreter, state: Any, owner: Any, name: str, whole: Any) -> None:
    interpreter.call(private_fsdp.put_parameter, (owner, name, whole), {})
    interpreter.state(_Open).wholes.append((state, owner, name, whole))


@at_capture
def _end(interpreter: TracingInterpreter, state: Any) -> None:
    opened = interpreter.state(_Open)
    opened.states.remove(state)
    opened.wholes = [item for item in opened.wholes if item[0] is not state]


def _pre_forward(state: Any, module: Any, args: Any, kwargs: Any) -> Any:
    """Gather the parameters of a module, as the graph does it. It is interpreted, so that its reads of FSDP's state are guarded."""
    _begin(state, (args, kwargs))
    for group, param, owners, numbers in private_fsdp.parameters_of(state):
        part, spread = private_fsdp.parameter(*owners[0]).to_local(), _spread(*numbers)
        whole = _Gathered.apply(part, spread, _remember(part, not spread.again, state, group, param))
        for owner, name in owners:
            _put(state, owner, name, whole)
    args, kwargs = private_fsdp.cast_inputs(state, args), private_fsdp.cast_inputs(state, kwargs)
    for group in private_fsdp.groups_of(state):
        args, kwargs = private_fsdp.join_inputs(group, args, kwargs)
    return args, kwargs


def _post_forward(state: Any, module: Any, given: Any, output: Any) -> Any:
    """Let the module have its parts again."""
    _close(state)
    return private_fsdp.cast_outputs(state, output)


def _close(state: Any) -> None:
    for _, param, owners, _ in private_fsdp.parameters_of(state):
        for owner, name in owners:
            private_fsdp.put_parameter(owner, name, param.sharded_param)
    _end(state)


_PARTS = {"_pre_forward": _pre_forward, "_post_forward": _post_forward}


@at_capture
def _check_state(interpreter: TracingInterpreter, module: Any, state: Any) -> None:
    if private_fsdp.state_of(module) is not state:
        raise Break("FSDP's state of a module is not known from its hooks", "do this outside of the compiled function")


def _state_behind(module: Any) -> Any:
    states = [hook.__self__ for hook in module._forward_pre_hooks.values() if private_fsdp.is_hook(hook)]
    state = states[0] if states else None
    _check_state(module, state)
    return state


def _groups_under(model: Any, recurse: bool) -> list[Any]:
    """The groups to which a setting is given: what the next backward is to do, which the graph reads when it comes to that."""
    states = [_state_behind(module) for module in (list(model.modules()) if recurse else [model])]
    return [group for state in states if state is not None for group in private_fsdp.groups_of(state)]


def _set_requires_gradient_sync(model: Any, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
    for group in _groups_under(model, recurse):
        group.reduce_grads = group.all_reduce_grads = requires_gradient_sync


def _set_requires_all_reduce(model: Any, requires_all_reduce: bool, *, recurse: bool = True) -> None:
    for group in _groups_under(model, recurse):
        group.all_reduce_grads = requires_all_reduce


def _set_reshard_after_backward(model: Any, reshard_after_backward: bool, *, recurse: bool = True) -> None:
    for group in _groups_under(model, recurse):
        group.reshard_after_backward = reshard_after_backward


def _set_is_last_backward(model: Any, is_last_backward: bool) -> None:
    _state_behind(model)._state_ctx.is_last_backward = is_last_backward


_SETTINGS = {
    function.__name__.removeprefix("_"): function
    for function in (
        _set_requires_gradient_sync,
        _set_requires_all_reduce,
        _set_reshard_after_backward,
        _set_is_last_backward,
    )
}


def _prepared(state: Any, settings: CaptureSettings) -> CaptureSettings:
    """Between two attempts, as what an attempt has changed is undone behind it."""
    private_fsdp.prepare(state)
    return settings


@wrapper_rule
def _hook_of_fsdp(interpreter: TracingInterpreter, function: Any, args: Arguments, kwargs: Keywords) -> Instead | None:
    if isinstance(function, torch.nn.Module) or not private_distributed.is_of_fsdp(function):
        return None
    if function.__name__ in _SETTINGS:
        return Instead(_SETTINGS[function.__name__], args, kwargs)
    watch_fsdp()
    trace = interpreter.trace
    reason = next((text for text in trace.settings.without if text.startswith(_IN_GRAPH)), "")
    part = _PARTS.get(function.__name__)
    if part is None or reason or trace.settings.marks_gradients:
        why = f" ({reason.removeprefix(_IN_GRAPH)})" if reason else ""
        raise Break(
            f"FSDP's {function.__name__} is called: parameters are gathered and freed behind the back of a graph{why}",
            "compile each module that is given to fully_shard, or a whole step with its backward()",
        )
    with private_tracing.disable_current_modes():
        prepared, lacking = private_fsdp.is_prepared(args[0]), private_fsdp.on_meta(args[0])
    if lacking:
        raise Break(
            f"{lacking} is under fully_shard, and on the meta device", "call to_empty(), and fill the parameters"
        )
    if not prepared:
        raise Retry("FSDP looks at its modules for the first time", change=functools.partial(_prepared, args[0]))
    return Instead(part, args, kwargs)


@at_capture
def _enter(interpreter: TracingInterpreter, number: int) -> None:
    opened, call = interpreter.state(_Open), interpreter.call
    before = []
    for owner, name, whole in opened.regions[number]:
        before.append((owner, name, call(private_fsdp.parameter, (owner, name), {})))
        call(private_fsdp.put_parameter, (owner, name, whole), {})
    opened.entered.append((len(opened.states), before))


@at_capture
def _leave(interpreter: TracingInterpreter) -> None:
    opened = interpreter.state(_Open)
    count, before = opened.entered.pop()
    for state in opened.states[count:]:
        interpreter.call(_close, (state,), {})
    for given in before:
        interpreter.call(private_fsdp.put_parameter, given, {})


def _region(number: int, function: Any, *args: Any, **kwargs: Any) -> Any:
    """Interpreted in the forward, and again in the backward, where it may end at any operator."""
    _enter(number)
    try:
        return function(*args, **kwargs)
    finally:
        _leave()


def _checkpoint(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    """A checkpointed region that runs again in the backward finds the parameters as the forward did."""
    if args and private_fsdp.is_used():
        opened = interpreter.state(_Open)
        opened.regions.append([item[1:] for item in opened.wholes])
        args = functools.partial(_region, len(opened.regions) - 1, args[0]), *args[1:]
    return interpret_checkpoint(interpreter, args, kwargs)


#: In the place of the rule for programs without FSDP.
rule[torch.utils.checkpoint.checkpoint] = _checkpoint


@end_rule
def _check_closed(interpreter: TracingInterpreter) -> None:
    """The graph ends within a module, whose other hook would run without this one."""
    opened = interpreter.state(_Open)
    if opened.states:
        _give_up("the graph breaks, or an exception is raised, within the module")
    left = [item for groups in opened.gathered.values() for items in groups.values() for item in items]
    if any(in_backward for *_, in_backward in left):
        _give_up("parameters stay gathered behind the last backward (set_reshard_after_backward)")
    _check_gathered(interpreter)
    if any(interpreter.trace.node_of(part) is not node for part, node in opened.frozen):
        _give_up("a parameter without a gradient is written to behind a forward")
    for reached in opened.reached.values():
        if not all(exchanges for _, exchanges in reached) and len(set(map(frozenset, reached.values()))) > 1:
            _give_up("gradients are reduced in part (set_requires_all_reduce), of other parameters in each backward")
    if opened.sums:
        _give_up("gradients are reduced in part at the end (set_requires_all_reduce)")
    for key, kept in opened.kept.items():
        for group, since in kept.values():
            if any(since < other for other in opened.reduced[key]):
                _give_up(_UNREACHED)
            if since < 0 and interpreter.load_attribute(group, "reduce_grads"):
                _give_up(_UNREACHED)


@checks_outputs
def _check_inside(trace: Trace, values: Sequence[torch.Tensor], roots: Sequence[torch.Tensor], order: int) -> None:
    """Gradients that leave the graph are reduced by FSDP's hooks, as its state says when they arrive."""
    kept = [root for root in roots if not trace.is_freed(root)]
    if any(node_name(node) == f"{_Gathered.__name__}Backward" for node in autograd_nodes(kept)):
        _give_up("gradients leave the graph: backward() is called outside of it")
