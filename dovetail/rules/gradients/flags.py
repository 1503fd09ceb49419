"""``requires_grad`` of inputs, set inside of the function: ``positions.requires_grad_()`` before energies and forces, say.

An input that was not used so far is turned on before the graph runs, as if the caller had done so. An input that is turned off
is turned off when the graph has run: results that were computed before still have their gradients, as in eager.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NoReturn

import torch

from dovetail.aot.outputs import is_new_leaf
from dovetail.aot.steps import checks_outputs
from dovetail.errors import CaptureError
from dovetail.frontend.code.frame import Break
from dovetail.frontend.effects.journal import Effect
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, Keywords, attribute_rule, end_rule, method_rule, rule, setter_rule
from dovetail.frontend.values.leaves import plain_flag
from dovetail.guards import AttributeSource, Equals, Source, TypeIs
from dovetail.torch_private import autograd_nodes as private_autograd_nodes
from dovetail.torch_private import calls as private_calls
from dovetail.torch_private import sizes as private_sizes
from dovetail.torch_private import tensors as private_tensors
from dovetail.trace import Trace, TracedInput
from dovetail.trace.overrides import autograd_nodes
from dovetail.trace.settings import GRAPH_BREAKS, Retry

#: The strategy to have leaves that the program makes in the graph; without it, eager makes them at a graph break.
_NEW_LEAVES: Final = "leaves that the program makes"


class GradientFlags:
    """The inputs of one trace whose gradients the program turns on and off."""

    def __init__(self, interpreter: TracingInterpreter) -> None:
        self._interpreter = interpreter
        self._values = interpreter.values
        self._journal = interpreter.effects
        self._changed: list[TracedInput] = []
        interpreter.effects.defer(self._effects)

    def set(self, traced: TracedInput, flag: bool) -> None:
        """``tensor.requires_grad = flag`` on an input."""
        if traced.value.requires_grad == flag:
            return
        if self._values.in_backward:
            raise Break("a hook sets requires_grad of an input", "set it outside of the function")
        if not traced.real.is_leaf or type(traced.real) not in (torch.Tensor, torch.nn.Parameter):
            raise Break("requires_grad of an input that is no plain leaf is changed", "set it outside of the function")
        guard_leaf(self._interpreter, traced.real, self._values.guards.tensor_source(traced.index))
        if flag and not traced.requires_grad:
            if not self._may_turn_on(traced):
                raise Break(
                    "requires_grad of an input is set when it has been used already",
                    "set it at the start of the function, or outside of it",
                )
            traced.requires_grad = True
            self._journal.inputs_made_differentiable.append(traced.index)
        if not flag:
            # A replay's inputs have the flag from beginning to end.
            self._values.trace.recorder.refuse_replay("requires_grad of an input is turned off in it")
        self._changed.append(traced)
        with self._values.trace.recorder.paused():
            traced.leaf.requires_grad_(flag)

    def check_views(self) -> None:
        """Refuse inputs that are views of one whose flag changes, and so change with it; guard that there are none."""
        for traced in self._changed:
            items = [item for item in self._values.trace.inputs if item is not traced]
            if any(item.real._base is traced.real for item in items):
                reason = "requires_grad of an input is set, and another input is a view of it"
                raise Break(reason, "set it outside of the function", resumable=False)
            plain = [item.real for item in items if item.real.layout is torch.strided]
            base = traced.real._base
            if not any(private_tensors.share_memory([traced.real, other]) for other in plain):
                self._values.guards.add_separate_memory(traced.index)
            elif base is not None:
                # Nothing is a view of a view.
                source = AttributeSource(self._values.guards.tensor_source(traced.index), "_base")
                self._values.guard(source, TypeIs(type(base)), f"{traced.name} is a view")
            else:
                for item in items:
                    guard_no_view(self._interpreter, item, "of other memory than an input whose requires_grad is set")

    def _may_turn_on(self, traced: TracedInput) -> bool:
        differentiable = traced.real.is_floating_point() or traced.real.is_complex()
        # Nodes that read its sizes do not depend on the flag.
        unused = all(private_sizes.is_symbolic(user.meta.get("val")) for user in traced.node.users)
        return differentiable and unused and traced.value is traced.leaf

    def _effects(self) -> list[Effect]:
        """The flags that the entry has to turn off. The traced inputs are turned on again: gradients are still to be asked for."""
        found = []
        with private_calls.no_torch_function():
            for traced in self._values.trace.inputs:
                if traced.requires_grad and traced.real.is_leaf and not traced.leaf.requires_grad:
                    source = self._values.guards.tensor_source(traced.index)
                    found.append(Effect(source, "attribute", {"requires_grad": False}))
                    traced.leaf.requires_grad_()
        return found


def _make_leaf(interpreter: TracingInterpreter, target: torch.Tensor, flag: Any) -> Any:
    """Set ``requires_grad`` of a tensor that the program has made itself."""
    if flag is True and target.requires_grad:
        _guard_inherited(interpreter, target)
    makes_leaf = flag is True and not target.requires_grad
    if makes_leaf and not interpreter.values.in_backward and not interpreter.trace.settings.allows(_NEW_LEAVES):
        raise Break("a leaf is made that leaves the graph", "make it outside of the function")
    return NotImplemented


def _guard_inherited(interpreter: TracingInterpreter, view: torch.Tensor) -> None:
    """Have a view that was made without recording require a gradient because its base does, as that of the traced one does.

    The base is what the input is a view of, if it is one: a leaf that is a view requires a gradient, and its base none.
    """
    traced = None if view._base is None or view.grad_fn is not None else interpreter.trace.input_of(view._base)
    if traced is None:
        return
    values, base = interpreter.values, traced.real._base
    source = AttributeSource(values.guards.tensor_source(traced.index), "_base")
    if base is None:
        values.guard(source, Equals(None), f"{traced.name} is no view")
    elif base.requires_grad:
        values.guard(
            AttributeSource(source, "requires_grad"), Equals(True), f"the base of {traced.name} requires a gradient"
        )
    else:
        raise Break("requires_grad is asked or set of a part of a leaf that is a view", "do it outside of the function")


@attribute_rule("requires_grad")
def _read(interpreter: TracingInterpreter, target: Any, name: str) -> Any:
    if isinstance(target, torch.Tensor) and target.requires_grad:
        _guard_inherited(interpreter, target)
    return NotImplemented


@setter_rule("requires_grad")
def _write(interpreter: TracingInterpreter, target: torch.Tensor, value: Any) -> Any:
    traced, flag = interpreter.trace.input_of(target), plain_flag(value)
    if traced is not None and type(flag) is bool:
        interpreter.state(GradientFlags).set(traced, flag)
        return None
    _make_leaf(interpreter, target, flag)
    if traced is not None or flag is value:
        return NotImplemented
    target.requires_grad = flag
    return None


@method_rule("requires_grad_")
def _requires_grad(interpreter: TracingInterpreter, function: Any, args: Arguments, kwargs: Keywords) -> Any:
    owner = getattr(function, "__self__", None)
    target, *given = args if owner is None else (owner, *args)
    traced = interpreter.trace.input_of(target)
    flag = given[0] if given else kwargs.get("requires_grad", True)
    if traced is None or type(flag) is not bool or len(given) + len(kwargs) > 1:
        return _make_leaf(interpreter, target, flag)
    interpreter.state(GradientFlags).set(traced, flag)
    return target


@method_rule("detach_")
def _detach(interpreter: TracingInterpreter, function: Any, args: Arguments, kwargs: Keywords) -> Any:
    """Eager refuses to detach a view in place."""
    owner = getattr(function, "__self__", None)
    target: Any = owner if args == () else args[0]
    traced = interpreter.trace.input_of(target)
    if traced is not None:
        guard_no_view(interpreter, traced, "is detached in place")
        if traced.real.is_leaf:
            guard_leaf(interpreter, traced.real, interpreter.values.guards.tensor_source(traced.index))
    return NotImplemented


@checks_outputs
def _refuse_anomaly_mode(
    trace: Trace, values: Sequence[torch.Tensor], roots: Sequence[torch.Tensor], order: int
) -> None:
    """Anomaly mode looks at the values of each node's gradients and names the node, which only eager's graph has."""
    if roots and torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled():
        raise CaptureError("anomaly mode is on, which looks at every node of eager's graph", advice="turn it off")


@checks_outputs
def _refuse_new_leaves(trace: Trace, values: Sequence[torch.Tensor], roots: Sequence[torch.Tensor], order: int) -> None:
    """Refuse leaves that the program makes where something is seen of their gradients, which the graph does not compute.

    Such a leaf is returned beside an output that was computed from it, or code of the program's own runs on the way to it only.
    """
    known = {id(item.leaf) for item in trace.inputs}
    if any(getattr(value, "_is_param", False) and trace.input_of(value) is None for value in values):
        _leave_to_eager(trace, "a parameter is made inside and leaves the function")
    nodes = autograd_nodes(roots)
    ends = {node: id(node.variable) for node in nodes if hasattr(node, "variable")}
    made = {leaf for leaf in ends.values() if leaf not in known}
    # In a replay for the next order, they stand for inputs.
    if not made or order > 1:
        return
    if any(id(value) in made for value in values if is_new_leaf(value)):
        reason = "a tensor that the function makes with requires_grad is returned beside what is computed from it"
    else:
        inputs = [node for node, leaf in ends.items() if leaf in known]
        passed = private_autograd_nodes.leading_to(nodes, inputs).union(inputs)
        if not any(private_autograd_nodes.acts(node) for node in nodes if node not in passed):
            return
        reason = "a hook or custom backward leads to tensors only that the function makes with requires_grad"
    _leave_to_eager(trace, reason)


def _leave_to_eager(trace: Trace, reason: str) -> NoReturn:
    if trace.settings.allows(_NEW_LEAVES) and trace.settings.allows(GRAPH_BREAKS):
        raise Retry(reason, without=_NEW_LEAVES)
    raise CaptureError(reason, advice="make it outside of the function")


@rule(torch.nn.Parameter)
def _parameter(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    if not interpreter.trace.settings.allows(_NEW_LEAVES):
        raise Break("a parameter is made that leaves the graph", "make it outside of the function")
    return interpreter.make_instance(torch.nn.Parameter, args, kwargs)


@end_rule
def _finish(interpreter: TracingInterpreter) -> None:
    """Native code may have set flags too."""
    interpreter.state(GradientFlags).check_views()
    changed = {change.input_index for change in interpreter.trace.metadata_changes}
    for item in interpreter.trace.inputs:
        is_changed = item.index in changed or (item.real.is_leaf and is_written(item))
        if is_changed and item.requires_grad and type(item.real) is torch.Tensor:
            # A write to a leaf that is a view: autograd makes older views anew, of a base that requires no gradient. A change
            # of the sizes of a view of a leaf: eager's error, which would come before the graph has run.
            guard_no_view(interpreter, item, "that requires a gradient, is changed in place")


def is_written(item: TracedInput) -> bool:
    """Whether the program has written to an input, with gradients or without."""
    return private_tensors.version_of(item.value) != item.original_version


def guard_no_view(interpreter: TracingInterpreter, item: TracedInput, event: str) -> None:
    """Have an input be no view; break the graph where it is one. The traced tensor that stands for it is never a view."""
    if item.real._base is not None:
        raise Break(f"{item.name}, a view {event}", "do it outside of the compiled function")
    source = AttributeSource(interpreter.values.guards.tensor_source(item.index), "_base")
    interpreter.values.guard(source, Equals(None), f"{item.name} is no view")


def guard_leaf(interpreter: TracingInterpreter, real: torch.Tensor, source: Source) -> None:
    """Guard that a tensor has no history of autograd. A parameter's could only be one that is written to while it is frozen."""
    if type(real) is not torch.nn.Parameter:
        interpreter.values.guard(AttributeSource(source, "is_leaf"), Equals(True), f"{source.name} is a leaf")
