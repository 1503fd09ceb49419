"""Hooks that the program registers and that outlive the call: on an input, on a result, or with a write to an object outside.

A hook belongs to the graph at first: the gradient that the graph computes goes through it. Where that is not what eager does (the
tensor is seen outside, where its gradient is that behind the hook; or the hook writes to an object, which belongs to each backward)
the capture begins anew, and the hook is registered on the real tensor when the graph has run, as an effect of the entry. So is
``retain_grad()`` of a tensor that leaves; of one that does not, nobody sees what it retains.

A result has its gradient outside by :mod:`dovetail.runtime.output_dependencies`, for which the calls of the program run again; so
that is done with ``fullgraph=True`` only, where eager is not at hand. A second derivative does not come by there, and is refused.
"""

from __future__ import annotations

import functools
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.errors import CaptureError, PartialGradientError
from dovetail.frontend.code.frame import Break
from dovetail.frontend.effects.journal import Effect
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import attribute_rule, end_rule, leaving_rule
from dovetail.guards import AttributeSource, ComputedSource, Equals
from dovetail.rules.gradients.flags import guard_no_view, is_written
from dovetail.rules.gradients.hooks_of_inputs import protect_hooks
from dovetail.torch_private import calls as private_calls
from dovetail.trace import Retry, TracedInput


@dataclass(eq=False)
class Waiting:
    """A hook that is registered by ``method`` when the graph has run; ``version`` is the tensor's at its call."""

    method: str
    tensor: torch.Tensor
    hook: Any
    is_result: bool
    version: int
    is_built: bool = False
    is_removed: bool = False


class WaitingHandle(torch.utils.hooks.RemovableHandle):
    """The handle of a waiting hook. Where it leaves the program, a recipe registers the hook and has its real handle."""

    def __init__(self, waiting: Waiting, earlier: list[Waiting]) -> None:
        super().__init__(OrderedDict())
        self._waiting, self._earlier = waiting, earlier

    def remove(self) -> None:
        """See the base class."""
        self._waiting.is_removed = True

    def __recipe__(self) -> tuple[Any, ...]:
        waiting = self._waiting
        if waiting.is_removed:
            return _handle_of_nothing, ()
        if any(one.tensor is waiting.tensor and not (one.is_built or one.is_removed) for one in self._earlier):
            raise CaptureError("one of several hooks of a tensor has a handle that leaves the function")
        waiting.is_built = True
        return _register, (waiting.method, waiting.tensor, waiting.hook, waiting.is_result)


class HooksOutside:
    """The hooks of one capture, each with its place in the program: those in the graph, and those that wait for its end."""

    def __init__(self, interpreter: TracingInterpreter) -> None:
        self._interpreter = interpreter
        self._passes: Counter[Any] = Counter()
        self._in_graph: list[tuple[Any, torch.Tensor]] = []
        self._retained: list[tuple[Any, torch.Tensor]] = []
        self._waiting: list[WaitingHandle] = []
        interpreter.effects.defer(self._effects)
        interpreter.trace.at_close.append(lambda: vars(self).clear())

    def place(self) -> Any:
        """The key of the registration that the program makes now."""
        frame = self._interpreter.frames[-1]
        at = ("hook outside", frame.code, frame.position)
        self._passes[at] += 1
        return (*at, self._passes[at])

    def is_outside(self, key: Any) -> bool:
        """Whether an earlier attempt has found that this hook cannot be in the graph."""
        return key in self._interpreter.trace.settings.observed

    def note(self, key: Any, tensor: torch.Tensor) -> None:
        """A hook is in the graph."""
        self._in_graph.append((key, tensor))

    def note_retained(self, key: Any, tensor: torch.Tensor) -> None:
        """``retain_grad()`` of a tensor which, as far as is known, does not leave the program."""
        self._retained.append((key, tensor))

    def wait(self, method: str, tensor: torch.Tensor, hook: Any = None) -> WaitingHandle:
        """Register a hook when the graph has run."""
        is_result = self._interpreter.trace.input_of(tensor) is None
        waiting = Waiting(method, tensor, hook, is_result, tensor._version)
        handle = WaitingHandle(waiting, [one._waiting for one in self._waiting])
        self._waiting.append(handle)
        self._interpreter.created(handle)
        return handle

    def retains(self, tensor: torch.Tensor) -> bool:
        """Whether the program has said ``retain_grad()`` of a tensor."""
        waiting = [one._waiting.tensor for one in self._waiting if one._waiting.method == "retain_grad"]
        return any(known is tensor for known in (*waiting, *(known for _, known in self._retained)))

    def keep_outside(self, key: Any, reason: str) -> None:
        """Begin the capture anew with this hook outside, if that can be."""
        interpreter = self._interpreter
        tensor = next(tensor for known, tensor in (*self._in_graph, *self._retained) if known == key)
        # A result's later uses in the graph go through its hook; the graph computes nothing more of a leaf.
        is_left = tensor.is_leaf or interpreter.trace.input_of(tensor) is not None
        if self.is_outside(key) or not (is_left or interpreter.trace.settings.one_graph):
            return
        interpreter.trace.findings.observed[key] = True
        raise Retry(reason)

    def check_leaving(self, tensor: torch.Tensor) -> None:
        """A tensor leaves the program."""
        for key, known in (*(self._in_graph if _has_hooks(tensor) else ()), *self._retained):
            if known is tensor:
                self.keep_outside(key, "a tensor with a hook on its gradient leaves the function")

    def check_inputs(self) -> None:
        """The program has ended: the hooks that are still on inputs stay there."""
        trace = self._interpreter.trace
        with private_calls.no_torch_function():
            left = [item for item in self._in_graph if trace.input_of(item[1]) is not None and _has_hooks(item[1])]
        for key, _ in left:
            self.keep_outside(key, "a hook is registered on an input")

    def check_written(self) -> None:
        """The program has ended: a write to a view takes its node out of the graph of autograd, with the hooks of this program."""
        for tensor in (tensor for _, tensor in self._in_graph):
            item = self._interpreter.trace.input_of(tensor)
            if item is not None and item.is_written_differentiably:
                guard_no_view(self._interpreter, item, "with a hook on its gradient, is written to")

    def check_gradient(self) -> None:
        """A gradient is computed inside, for which no hook that waits is called."""
        if any(not one._waiting.is_removed for one in self._waiting):
            raise Break(
                "a gradient is computed inside, and a hook was registered that outlives the call",
                "remove the hook before the function ends, or compute the gradient outside",
            )
        if self._retained:
            raise Break("torch's retain_grad is called, and a gradient computed inside", "use torch.autograd.grad")

    def _effects(self) -> list[Effect]:
        found = []
        for handle in self._waiting:
            if handle._waiting.is_removed:
                continue
            if handle._waiting.tensor._version != handle._waiting.version:
                raise Break("a tensor with a hook on its gradient is written to", "write to a clone of it")
            source = self._interpreter.values.pin(_register, "the hooks of the function")
            found.append(Effect(source, "call", [_keep, [handle], {}]))
        return found


def _has_hooks(tensor: torch.Tensor) -> bool:
    return bool(tensor._backward_hooks) or bool(tensor._post_accumulate_grad_hooks)


def _handle_of_nothing() -> Any:
    """The handle of a hook that was removed again."""
    return torch.utils.hooks.RemovableHandle(OrderedDict())


def _keep(handle: Any) -> None:
    """Stand for the call of a hook's effect: the hook is registered when the handle is made."""


def _register(method: str, tensor: torch.Tensor, hook: Any, is_result: bool) -> Any:
    """Register a hook on a real tensor."""
    if method != "retain_grad":
        handle = getattr(tensor, method)(functools.partial(_first_order, hook) if is_result else hook)
        if not is_result:
            # The graph has run, and has protected the hooks that its inputs had.
            protect_hooks([tensor])
        return handle
    if is_result:
        tensor.register_hook(functools.partial(_first_order, _no_change))
    return tensor.retain_grad()  # type: ignore[no-untyped-call]


def _no_change(gradient: torch.Tensor) -> None:
    """A hook that leaves a gradient as it is."""


def _first_order(hook: Callable[[torch.Tensor], Any], gradient: torch.Tensor) -> Any:
    if torch.is_grad_enabled():
        raise PartialGradientError(
            "a hook (or retain_grad) on a tensor that the compiled function has made meets a backward with create_graph=True",
            advice="drop fullgraph=True, so that eager runs the function",
        )
    return hook(gradient)


@leaving_rule
def _leaving(interpreter: TracingInterpreter, value: torch.Tensor) -> None:
    interpreter.state(HooksOutside).check_leaving(value)


@end_rule
def _end(interpreter: TracingInterpreter) -> None:
    hooks = interpreter.state(HooksOutside)
    hooks.check_inputs()
    hooks.check_written()
    for item in interpreter.trace.inputs:
        if item.value.requires_grad and item.is_written_differentiably and item.real._base is not None:
            _check_view(interpreter, item)
        elif item.requires_grad and not item.real.is_leaf and is_written(item) and not item.is_written_differentiably:
            _check_unrecorded_write(interpreter, item)


def _check_unrecorded_write(interpreter: TracingInterpreter, item: TracedInput) -> None:
    """Autograd makes the node of a view that was written to anew: without the hooks, and without an edge where the base requires no
    gradient (``leaf = zeros(4).view(2, 2).requires_grad_(); x = leaf[:]`` has the base of ``leaf``).
    """
    base, values = item.real._base, interpreter.values
    if base is None or not base.requires_grad or item.real.retains_grad:
        guard_no_view(interpreter, item, "that requires a gradient, is written to without gradients")
        return
    source = values.guards.tensor_source(item.index)
    on_base = AttributeSource(AttributeSource(source, "_base"), "requires_grad")
    values.guard(on_base, Equals(True), f"{item.name}, a view, was written to")
    values.guard(AttributeSource(source, "retains_grad"), Equals(False), f"{item.name}, a view, was written to")
    _check_view(interpreter, item)


def _check_view(interpreter: TracingInterpreter, item: TracedInput) -> None:
    """A write to a view takes its node out of the graph of autograd, with its hooks; those of another tensor stay."""
    if _is_hooked(item.real):
        raise Break(
            f"{item.name}, a view with a hook on its gradient, is written to",
            "hook the tensor that it is a view of, or write to a clone",
        )
    source = interpreter.values.guards.tensor_source(item.index)
    hooked = ComputedSource(_is_hooked, (source,), f"{source.name}._backward_hooks")
    interpreter.values.guard(hooked, Equals(False), f"{item.name} was written to")


def _is_hooked(tensor: torch.Tensor) -> bool:
    return bool(tensor._backward_hooks)


@attribute_rule("retains_grad")
def _retains_grad(interpreter: TracingInterpreter, target: torch.Tensor, name: str) -> Any:
    return True if interpreter.state(HooksOutside).retains(target) else NotImplemented
