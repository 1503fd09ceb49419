"""``.grad`` of input tensors, and ``backward()`` inside of the function.

torch's own engine accumulates into ``.grad`` of the traced leaves, as it would into the real ones. So ``.grad`` before the call
is an input (or a guard that there is none), and what it is in the end is an effect that the entry replays.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dovetail.frontend.code.frame import Break
from dovetail.frontend.effects.journal import Effect
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, Keywords, attribute_rule, end_rule, kind_of, rule, setter_rule
from dovetail.frontend.values.leaves import plain_flag
from dovetail.guards import AttributeSource, ComputedSource, Equals, GradSource, Source, TypeIs
from dovetail.rules.gradients.apart import Behind, GradientsApart
from dovetail.rules.gradients.flags import guard_leaf
from dovetail.rules.gradients.independent_outputs import saves
from dovetail.rules.gradients.marks import marked_gradients
from dovetail.rules.gradients.node_hooks import LeafNodeHooks
from dovetail.rules.torch.hooks_outside import HooksOutside
from dovetail.runtime.epilogue import freed
from dovetail.torch_private import autograd_nodes as private_autograd_nodes
from dovetail.torch_private import calls as private_calls
from dovetail.torch_private import tracing as private_tracing
from dovetail.trace import Trace, TracedInput
from dovetail.trace.overrides import autograd_nodes, requested_gradients

BACKWARD = inspect.signature(torch.autograd.backward)
TENSOR_BACKWARD = inspect.signature(torch.Tensor.backward)
_GRAD: Any = torch.autograd.grad
GRAD = inspect.signature(_GRAD)
HOOK_TABLES = ("_backward_hooks", "_post_accumulate_grad_hooks")


def _inputs_behind(trace: Trace, roots: list[torch.Tensor]) -> list[TracedInput]:
    """The inputs that a derivative of ``roots`` reaches."""
    leaves = {id(item.leaf): item for item in trace.inputs}
    found = [leaves.get(id(root)) for root in roots if root.grad_fn is None]
    found += [leaves.get(id(getattr(node, "variable", None))) for node in autograd_nodes(roots)]
    return [item for item in found if item is not None]


def _free_graph(
    trace: Trace,
    roots: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor] | None,
    kept: Sequence[torch.Tensor] = (),
) -> None:
    """Note through what no further backward can go in eager: it has passed a node that lets go of what it had saved.

    A backward with ``inputs`` visits only what leads to them. What is behind the stand-ins ``kept`` is not visited either.
    """
    nodes = set(autograd_nodes(roots)) - set(autograd_nodes(kept))
    if inputs is not None:
        nodes = private_autograd_nodes.leading_to(nodes, map(private_autograd_nodes.gradient_node, inputs))
    holders = [node for node in nodes if saves(node)]
    trace.freed |= private_autograd_nodes.leading_to(nodes, holders).union(holders)


class Gradients:
    """The ``.grad`` of the inputs of one trace."""

    def __init__(self, interpreter: TracingInterpreter) -> None:
        self._interpreter = interpreter
        self._values = interpreter.values
        self._native = interpreter.native
        self._journal = interpreter.effects
        self._before: dict[int, torch.Tensor | None] = {}
        self._dropped: dict[int, int] = {}
        self._apart = interpreter.state(GradientsApart)
        self._hooks = interpreter.state(HooksOutside)
        interpreter.effects.defer(self._effects)

    def read(self, traced: TracedInput) -> torch.Tensor | None:
        """``tensor.grad`` of an input, as it is by now."""
        self._begin(traced)
        return traced.leaf.grad

    def write(self, traced: TracedInput, value: Any) -> None:
        """``tensor.grad = value`` on an input."""
        if not traced.real.is_leaf:
            raise Break(".grad of a tensor that is no leaf is set", "set it outside of the compiled function")
        if kind_of(value) is not None:
            raise Break("a sparse or jagged tensor becomes a .grad", "set it outside of the compiled function")
        if value is not None and not isinstance(value, torch.Tensor):
            raise TypeError(f"assigned grad expected to be a Tensor or None but got {type(value).__name__}")
        self._begin(traced)
        if value is None:
            self._note_dropped(traced)
        traced.leaf.grad = None if value is None else self._values.wrap(value)

    def finish(self) -> None:
        """The program has ended: no native code may have added up gradients; note which were dropped at the start.

        Of an input whose ``.grad`` was set to None before anything was computed, eager frees the memory at that point.
        """
        inputs = self._values.trace.inputs
        self._note_freed_inputs()
        with private_calls.no_torch_function():
            has_gradient = [item.index for item in inputs if item.leaf.is_leaf and item.leaf.grad is not None]
        if not self._before.keys() >= {*has_gradient}:
            raise Break("native code calls .backward()", "return the loss and call .backward() outside")
        # A gradient that is set again is none of these.
        self._journal.gradients_dropped_first += [
            (owner, gradient)
            for owner, gradient in self._dropped.items()
            if inputs[owner].leaf.grad is not self._before[owner]
        ]

    def _note_freed_inputs(self) -> None:
        """Note inputs whose graph an earlier call has freed, as of losses that are added up without ``detach()``."""
        trace = self._values.trace
        if not trace.freed:
            return
        with private_tracing.disable_current_modes(), private_calls.no_torch_function():
            kind = type(freed(torch.empty(()), []).grad_fn)
            found = [item for item in trace.inputs if type(item.real.grad_fn) is kind and item.leaf.grad_fn is None]
        for traced in found:
            source = AttributeSource(self._values.guards.tensor_source(traced.index), "grad_fn")
            self._values.guard(source, TypeIs(kind), "an earlier call has freed its graph")
            trace.freed.add(private_autograd_nodes.gradient_node(traced.leaf))

    def _note_dropped(self, traced: TracedInput) -> None:
        trace, before = self._values.trace, self._before[traced.index]
        if before is None or traced.leaf.grad is not before or len(trace.graph.nodes) > len(trace.inputs):
            return
        gradient = trace.input_of(before)
        plain = (torch.Tensor, torch.nn.Parameter)
        if gradient is not None and type(traced.real) in plain and type(gradient.real) in plain:
            self._dropped[traced.index] = gradient.index

    def _begin(self, traced: TracedInput) -> None:
        if self._values.in_backward:
            raise Break(
                "a hook or the backward of a custom autograd.Function reads or sets .grad",
                "do so outside of the compiled function",
            )
        if traced.index in self._before:
            return
        guards, real = self._values.guards, traced.real
        if not real.is_leaf and real.retains_grad and real.grad is not None:
            raise Break(
                "the retained .grad of a tensor that is no leaf is read", "read it outside of the compiled function"
            )
        with self._values.trace.recorder.paused():
            before = real.grad if real.is_leaf else None
        if before is not None:
            value = self._values.read(before, GradSource(guards.tensor_source(traced.index)))
            # A tensor may have been given another size since its gradient was set (``resize_``, ``set_``).
            if kind_of(value) is not None or before.shape != real.shape:
                what = f"the .grad of {guards.tensor_source(traced.index).name} is sparse, jagged or of another size"
                raise Break(what, "read it outside of the compiled function")
            # Set under the trace's modes, so that the program tape has it too.
            traced.leaf.grad = value
        else:
            source = GradSource(guards.tensor_source(traced.index))
            guards.add(source, Equals(None), self._values.where(), f"{source.name} was read")
            value = None
        self._before[traced.index] = value

    def _effects(self) -> list[Effect]:
        """The gradients that the entry has to set."""
        found = []
        for traced in self._values.trace.inputs:
            if traced.index not in self._before:
                continue
            value = traced.leaf.grad
            if value is not self._before[traced.index]:
                source = self._values.guards.tensor_source(traced.index)
                found.append(Effect(source, "attribute", {"grad": value}))
        return found

    def check_hooks(self, traced: TracedInput) -> None:
        """Refuse hooks on the real tensor: the engine of the trace would not run them."""
        self._check_hooks(traced.real, self._values.guards.tensor_source(traced.index))

    def _check_hooks(self, real: torch.Tensor, source: Source) -> None:
        for table in HOOK_TABLES:
            if getattr(real, table) is not None:
                raise Break(
                    f"{source.name} has a hook on its gradient, and the gradient is computed inside",
                    "register the hook inside of the compiled function, or compute the gradient outside",
                )
            self._values.guard(AttributeSource(source, table), Equals(None), f"{source.name} has no gradient hooks")

    def backward(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """``tensor.backward(...)`` or ``torch.autograd.backward(...)``."""
        method = function is torch.Tensor.backward
        bound = (TENSOR_BACKWARD if method else BACKWARD).bind(*args, **kwargs)
        given = bound.arguments
        if not method and given.get("grad_variables") is not None:
            raise Break("backward is called with grad_variables", "use grad_tensors")
        roots, tangents = (
            (given["self"], given.get("gradient")) if method else (given["tensors"], given.get("grad_tensors"))
        )
        roots, tangents, inputs = map(self._tensors, (roots, tangents, given.get("inputs")))
        if roots is None or any(root is None for root in roots):
            raise Break("backward is called on something that is no tensor", "call it on the loss")
        self._check_freed(roots)
        create = bool(given.get("create_graph", False))
        leaves, apart = self._prepare(roots, inputs, create)
        retain = plain_flag(given.get("retain_graph"))
        trace = self._values.trace
        # The graph of autograd, which eager frees, stays: results may have been computed from it whose gradients nobody asks for.
        call: dict[str, Any] = {"create_graph": create, "inputs": inputs}
        watched = marked_gradients(trace, leaves), self._apart.caught(apart)
        with trace.recorder.paused(), requested_gradients(trace, roots), watched[0], watched[1]:
            self._native(torch.autograd.backward, (roots, tangents), {**call, "retain_graph": True})
        trace.recorder.record(torch.autograd.backward, (roots, tangents), {**call, "retain_graph": retain}, None)
        if not (create if retain is None else retain):
            _free_graph(trace, roots, inputs, [known.value for known, *_ in apart])

    def grad(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``torch.autograd.grad(...)``."""
        given = GRAD.bind(*args, **kwargs).arguments
        outputs, inputs = self._tensors(given.pop("outputs")), self._tensors(given.pop("inputs"))
        if outputs is None or inputs is None or not all(isinstance(item, torch.Tensor) for item in (*outputs, *inputs)):
            raise Break("torch.autograd.grad is called with something that is no tensor", "hand over tensors")
        tangents = self._tensors(given.pop("grad_outputs", None))
        for item in inputs:
            traced = self._values.trace.input_of(item)
            if traced is not None:
                self.check_hooks(traced)
        self._check_freed(outputs)
        retain = plain_flag(given.pop("retain_graph", None))
        recorder = self._values.trace.recorder
        with recorder.paused():
            result = self._native(torch.autograd.grad, (outputs, inputs, tangents), {**given, "retain_graph": True})
        recorder.record(torch.autograd.grad, (outputs, inputs, tangents), {**given, "retain_graph": retain}, result)
        if not (given.get("create_graph", False) if retain is None else retain):
            _free_graph(self._values.trace, outputs, inputs)
        return result

    def _check_freed(self, roots: Sequence[torch.Tensor]) -> None:
        self._hooks.check_gradient()
        if torch.is_anomaly_enabled():
            raise Break(
                "a gradient is computed inside while anomaly mode is on, which looks at every node of eager's graph",
                "turn anomaly mode off, or compute the gradient outside of the compiled function",
            )
        if any(map(self._values.trace.is_freed, roots)):
            raise Break(
                "a second backward goes through a graph that may have been freed", "pass retain_graph=True to the first"
            )

    def _prepare(
        self, roots: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor] | None, create: bool
    ) -> tuple[list[TracedInput], list[Behind]]:
        """The leaves behind these tensors: inputs, and wrappers of inputs."""
        trace = self._values.trace
        leaves: list[TracedInput] = []
        apart: list[Behind] = []
        for traced in _inputs_behind(trace, list(roots)):
            behind = self._apart.behind(traced) if inputs is None and not create else None
            if behind is not None:
                self._check_hooks(behind[0].real, behind[0].source)
                guard_leaf(self._interpreter, behind[0].real, behind[0].source)
                self._apart.begin(behind[0])
                apart.append(behind)
                continue
            if not traced.real.is_leaf:
                raise Break(
                    "backward() goes on behind an input that is no leaf, outside of the function",
                    "call backward() outside, or detach the input",
                )
            guard_leaf(self._interpreter, traced.real, self._values.guards.tensor_source(traced.index))
            if inputs is None or any(item is traced.value for item in inputs):
                self.check_hooks(traced)
                self._begin(traced)
                leaves.append(traced)
        own = [(traced.real, self._values.guards.tensor_source(traced.index)) for traced in leaves]
        self._check_node_hooks([*own, *((known.real, known.source) for known, *_ in apart)])
        return leaves, apart

    def _check_node_hooks(self, leaves: Sequence[tuple[torch.Tensor, Source]]) -> None:
        """Refuse hooks on the nodes of leaves, now and at each call."""
        if not leaves:
            return
        are_there = LeafNodeHooks()
        with private_tracing.disable_current_modes(), private_calls.no_torch_function():
            found = are_there(*(real for real, _ in leaves))
        if found:
            raise Break(
                "the node of a leaf's gradient has hooks, and the gradient is computed inside",
                "register the hook on the tensor inside of the compiled function, or compute the gradient outside",
            )
        text = f"hooks on the nodes of {len(leaves)} leaves"
        sources = tuple(source for _, source in leaves)
        self._values.guard(ComputedSource(are_there, sources, text), Equals(False), "gradients are added up inside")

    def _tensors(self, value: Any) -> list[Any] | None:
        if value is None:
            return None
        self._values.whole(value)
        items = [value] if isinstance(value, torch.Tensor) else list(value)
        return [None if item is None else self._values.for_native(item) for item in items]


# --- rules ------------------------------------------------------------------------------------------------------------


@attribute_rule("grad")
def _read(interpreter: TracingInterpreter, target: torch.Tensor, name: str) -> Any:
    traced = interpreter.trace.input_of(target)
    if traced is not None:
        return interpreter.state(Gradients).read(traced)
    known = interpreter.values.stood_for(target)
    return NotImplemented if known is None else interpreter.state(GradientsApart).read(known)


@attribute_rule(*HOOK_TABLES)
def _read_hooks(interpreter: TracingInterpreter, target: torch.Tensor, name: str) -> Any:
    traced = interpreter.trace.input_of(target)
    if traced is None:
        return NotImplemented
    if getattr(traced.real, name) is not None:
        raise Break(f".{name} of an input is read", "read it outside of the compiled function")
    source = interpreter.values.guards.tensor_source(traced.index)
    interpreter.values.guard(AttributeSource(source, name), Equals(None), f"{source.name} has no gradient hooks")
    return NotImplemented


@setter_rule("grad")
def _write(interpreter: TracingInterpreter, target: torch.Tensor, value: Any) -> Any:
    traced = interpreter.trace.input_of(target)
    if traced is not None:
        return interpreter.state(Gradients).write(traced, value)
    known = interpreter.values.stood_for(target)
    return NotImplemented if known is None else interpreter.state(GradientsApart).write(known, value)


@rule(torch.Tensor.backward)
def _tensor_backward(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> None:
    interpreter.state(Gradients).backward(torch.Tensor.backward, args, kwargs)


@rule(torch.autograd.backward)
def _backward(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> None:
    interpreter.state(Gradients).backward(torch.autograd.backward, args, kwargs)


@rule(torch.autograd.grad)
def _autograd_grad(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    roots = args[0] if args else kwargs.get("outputs", ())
    if not isinstance(roots, torch.Tensor) and torch.overrides.is_tensor_like(roots):
        return interpreter.run_function(_GRAD, args, kwargs)
    trace = interpreter.trace
    interpreter.values.whole(roots)
    roots = [interpreter.values.wrap(item) for item in ([roots] if isinstance(roots, torch.Tensor) else list(roots))]
    for traced in _inputs_behind(trace, roots):
        if not traced.real.is_leaf:
            raise Break(
                f"torch.autograd.grad goes back through {traced.name}, which was computed before the graph begins",
                "compute it inside the function",
            )
        guard_leaf(interpreter, traced.real, interpreter.values.guards.tensor_source(traced.index))
    with requested_gradients(trace, roots):
        return interpreter.state(Gradients).grad(args, kwargs)


@end_rule
def _finish(interpreter: TracingInterpreter) -> None:
    interpreter.state(Gradients).finish()
