"""Hooks for saved tensors around a compiled call, and set in one.

``torch.utils.checkpoint`` and ``torch.autograd.graph.save_on_cpu`` set hooks that hand back the values that were saved. No
capture depends on these: the call is captured without them, and what its node of autograd saves goes through them when it
runs. The hooks of a program may give other values. They get what eager saves, as the call runs eagerly.
"""

from __future__ import annotations

import functools
import operator
import weakref
from typing import Any

from dovetail.errors import CaptureError, EagerFallbackWarning, GraphBreakError
from dovetail.face.dispatcher import SURROUNDINGS, Dispatcher, Run
from dovetail.face.warnings import messages, name_of, warn_user
from dovetail.frontend.code.frame import Break
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, Keywords, end_rule, rule
from dovetail.guards import ComputedSource, Equals
from dovetail.rules.torch.equal_modules import by_entry_of_equal_module
from dovetail.runtime.entry import Entry
from dovetail.torch_private import autograd as private_autograd
from dovetail.torch_private import checkpoints as private_checkpoints
from dovetail.trace.program import HOOKS_SAVED
from dovetail.trace.repeats import draws_random_numbers


def guard_hooks_allowed(interpreter: TracingInterpreter) -> None:
    """Hooks are set: that raises where ``disable_saved_tensors_hooks`` is in force."""
    values, name = interpreter.values, "the reason for which hooks on saved tensors are refused"
    refused = private_checkpoints.saved_tensor_hooks_refused
    source = ComputedSource(operator.call, (values.pin(refused, name),), name)
    values.guard(source, Equals(refused()), "hooks on saved tensors are set")


@rule(private_checkpoints.push_saved_tensor_hooks)
def _push(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    guard_hooks_allowed(interpreter)
    return interpreter.native(private_checkpoints.push_saved_tensor_hooks, args, kwargs)


@end_rule
def _leave_to_eager(interpreter: TracingInterpreter) -> None:
    """No replay of the program, for a second derivative, could set hooks of the program's own again."""
    trace = interpreter.trace
    is_differentiated = any(item.requires_grad for item in trace.inputs)
    if HOOKS_SAVED in trace.recorder.refusals and is_differentiated and not trace.settings.one_graph:
        raise CaptureError(HOOKS_SAVED, advice="pass fullgraph=True if you need no second derivative")


def in_hooks_that_keep_values(dispatcher: Dispatcher, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Run | None:
    """Decide how a call runs inside of hooks of torch's own; None elsewhere."""
    if not private_autograd.has_saved_tensor_hooks() or private_autograd.saved_tensor_hooks_change_values():
        return None
    found = private_checkpoints.open_region()
    with private_checkpoints.saved_tensor_hooks_set_aside():
        if found is None:
            return _decide(dispatcher, args, kwargs)
        return _in_region(*found, dispatcher, args, kwargs)


_REPORTED: weakref.WeakSet[Dispatcher] = weakref.WeakSet()
# Before what runs a part for real: a recomputation goes the way of what it repeats.
SURROUNDINGS.insert(0, in_hooks_that_keep_values)


def _decide(dispatcher: Dispatcher, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Run:
    return by_entry_of_equal_module(dispatcher, args, kwargs) or dispatcher.decide(args, kwargs)


def _in_region(
    region: private_checkpoints.Region,
    backward: Any,
    dispatcher: Dispatcher,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Run:
    """Decide how a call runs in a region that the backward computes again: then by the entry that it has run by at first.

    Another one might save other tensors, or save them in another order, and nobody would notice.
    """
    eagerly: Run = functools.partial(dispatcher.original, *args, **kwargs)
    if backward is not None:
        position = region.positions.get(backward, 0)
        region.positions[backward] = position + 1
        if position < len(region.taken) and region.taken[position][0] is dispatcher:
            hit = dispatcher.find(args, kwargs, region.taken[position][1])
            return eagerly if hit is None or _may_be_cut(region, hit[0]) else hit[1]
    hit, run = dispatcher.find(args, kwargs, dispatcher.entries), eagerly
    if hit is None:
        run = _decide(dispatcher, args, kwargs)
        hit = dispatcher.find(args, kwargs, dispatcher.entries)
    if backward is None:
        region.taken.append((dispatcher, dispatcher.entries))
    if hit is None:
        return run
    if _may_be_cut(region, hit[0]):
        _report(dispatcher)
        return eagerly
    return hit[1]


def _may_be_cut(region: private_checkpoints.Region, entry: Entry) -> bool:
    """Whether the region may end before something that the entry does beside its result: eager does it or not, by its place."""
    if not region.ends_early or entry.compiled is None:
        return False
    joint = entry.compiled.lowering.joint
    if entry.effects or entry.ambient_change or entry.inputs_made_differentiable or entry.gradients_dropped_first:
        return True
    if joint.spec.mutations or joint.spec.metadata_changes:
        return True
    return not region.keeps_random_state and any(draws_random_numbers(node.target) for node in joint.graph.nodes)


def _report(dispatcher: Dispatcher) -> None:
    stop = Break(
        "it writes to a buffer or to an object, or draws random numbers without preserve_rng_state, in a region of "
        "torch.utils.checkpoint that ends at its last saved tensor when it is computed again",
        "pass early_stop=False to checkpoint",
    )
    if dispatcher not in _REPORTED:
        dispatcher.events.note("graph break", reason=stop.reason, where=None)
        _REPORTED.add(dispatcher)
    if dispatcher.options.fullgraph:
        raise GraphBreakError(stop.reason, advice=stop.advice)
    warn_user(messages().explain_break(f"{name_of(dispatcher.original)} runs eagerly", stop), EagerFallbackWarning)
