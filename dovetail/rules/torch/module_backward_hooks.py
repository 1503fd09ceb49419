"""Full backward hooks of modules (``register_full_backward_hook``, ``register_full_backward_pre_hook``) in the graph.

In eager two nodes of autograd around the module's forward keep the hooks. Here the nodes are custom functions of the same meaning
whose backward calls the hooks, so that they are interpreted like the backward of a custom ``autograd.Function``. That is done where
one graph is asked for: a backward of the backward calls the hooks with sums of gradients that meet around the graph. It is refused,
and eager has it at a graph break. A hook that writes to an object belongs to each backward, not to the capture, and is left to
eager too. Torch's warning about a module none of whose inputs requires a gradient is given when the function is captured.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dovetail.frontend.code.frame import Break
from dovetail.frontend.interpreter.lookup import instance_dict
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, Instead, Keywords, rule, wrapper_rule
from dovetail.rules.torch.patched_tensors import note_for_backward
from dovetail.torch_private import calls as private_calls
from dovetail.trace import Retry

#: The strategy of this module; it is given up where a hook does what no graph can hold.
IN_THE_GRAPH = "backward hooks of modules are in the graph"
_REGISTERING = (
    *(torch.nn.modules.module.register_module_forward_pre_hook, torch.nn.modules.module.register_module_forward_hook),
    torch.nn.modules.module.register_module_backward_hook,
    torch.nn.modules.module.register_module_full_backward_pre_hook,
    torch.nn.modules.module.register_module_full_backward_hook,
)
Hooks = Sequence[Callable[..., Any]]


class _Ends:
    """What the two ends of one call of a module share: its hooks, and the gradients of its results."""

    def __init__(self, module: torch.nn.Module, hooks: Hooks, pre_hooks: Hooks) -> None:
        self.module, self.hooks, self.pre_hooks = module, hooks, pre_hooks
        self.inputs: tuple[int, tuple[int, ...] | None] = 0, None
        self.outputs: tuple[int, tuple[int, ...] | None] = 0, None
        self.gradients: tuple[Any, ...] | None = None

    def at_outputs(self, gradients: tuple[Any, ...]) -> tuple[Any, ...]:
        """The gradients of the results, as the hooks in front of the module change them."""
        count, places = self.outputs
        assert places is not None
        found = _among(count, places, gradients)
        for hook in self.pre_hooks:
            found = _replaced(found, hook(self.module, found), "pre hook returned an invalid number of grad_output")
        self.gradients = found
        if self.inputs[1] is None:
            self.at_no_inputs()
        return tuple(found[place] for place in places)

    def at_no_inputs(self) -> None:
        """Call the hooks of a module none of whose inputs requires a gradient."""
        warnings.warn(
            "Full backward hook is firing when gradients are computed with respect to module outputs since no inputs require "
            "gradients. See https://docs.pytorch.org/docs/main/generated/torch.nn.Module.html#torch.nn.Module."
            "register_full_backward_hook for more details.",
            stacklevel=2,
        )
        for hook in self.hooks:
            found = hook(self.module, (None,) * self.inputs[0], self.gradients)
            if found is not None and not (isinstance(found, tuple) and all(item is None for item in found)):
                raise RuntimeError(
                    "Backward hook for Modules where no input requires gradient should always return None."
                )
        self.gradients = None

    def at_inputs(self, gradients: tuple[Any, ...]) -> tuple[Any, ...]:
        """The gradients of the arguments, as the hooks behind the module change them."""
        count, places = self.inputs
        if self.gradients is None or places is None:
            # The gradient has come to the arguments without passing the results.
            return gradients
        found = _among(count, places, gradients)
        for hook in self.hooks:
            replaced = hook(self.module, found, self.gradients)
            found = _replaced(found, replaced, "hook returned an invalid number of grad_input")
        self.gradients = None
        return tuple(found[place] for place in places)


def _among(count: int, places: Sequence[int], values: Sequence[Any]) -> tuple[Any, ...]:
    found = dict(zip(places, values, strict=True))
    return tuple(found.get(place) for place in range(count))


def _replaced(before: tuple[Any, ...], after: Any, what: str) -> Any:
    if after is None:
        return before
    if len(after) != len(before):
        raise RuntimeError(f"Backward {what}, got {len(after)}, but expected {len(before)}")
    for old, new in zip(before, after, strict=True):
        if new is not None and (old is None or old.shape != new.shape or old.dtype != new.dtype):
            raise RuntimeError("a backward hook has changed the shape or the dtype of a gradient")
    return after


class ModuleInputs(torch.autograd.Function):
    """The arguments of a module."""

    @staticmethod
    def forward(ctx: Any, ends: _Ends, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The same tensors."""
        ctx.ends = ends
        ctx.mark_non_differentiable(*[item for item in tensors if not item.requires_grad])
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        """The gradients behind the hooks."""
        return None, *ctx.ends.at_inputs(gradients)


class ModuleOutputs(torch.autograd.Function):
    """The results of a module."""

    @staticmethod
    def forward(ctx: Any, ends: _Ends, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The same tensors."""
        ctx.ends = ends
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[item for item in tensors if not item.requires_grad])
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        """The gradients behind the hooks that come first."""
        return None, *ctx.ends.at_outputs(gradients)


class HookInGraph:
    """Stands for torch's ``BackwardHook``: the hooks of one call, as the capture calls them."""

    def __init__(
        self, interpreter: TracingInterpreter, module: torch.nn.Module, hooks: Hooks, pre_hooks: Hooks
    ) -> None:
        self._interpreter = interpreter
        self._ends = _Ends(module, *[[self._entered(hook) for hook in given] for given in (hooks, pre_hooks)])

    def _entered(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        interpreter, inner = self._interpreter, self._interpreter.trampoline(hook)

        def call(*args: Any) -> Any:
            try:
                return inner(*args)
            except Break as stop:
                if interpreter.values.in_backward:
                    raise Retry(stop.reason, without=IN_THE_GRAPH) from stop
                raise

        return call

    def apply(self, kind: Any, name: str, values: Any) -> Any:
        """The arguments or results of the module behind one of the two functions."""
        places = tuple(index for index, item in enumerate(values) if isinstance(item, torch.Tensor))
        tensors = [values[place] for place in places]
        is_needed = torch.is_grad_enabled() and any(item.requires_grad for item in tensors)
        setattr(self._ends, name, (len(values), places if is_needed else None))
        if not is_needed:
            return values
        recorder = self._interpreter.trace.recorder
        recorder.refuse_replay("a module in it has backward hooks")
        with recorder.paused():
            found = self._interpreter.native(kind.apply, (self._ends, *tensors), {}, hands_on=True)
        items = list(values)
        for place, item in zip(places, found, strict=True):
            items[place] = item
        return tuple(items) if type(values) is tuple else type(values)(*items)

    def setup_input_hook(self, args: Any) -> Any:
        """See torch's ``BackwardHook``."""
        return self.apply(ModuleInputs, "inputs", args)

    def setup_output_hook(self, args: Any) -> Any:
        """See torch's ``BackwardHook``."""
        found = self.apply(ModuleOutputs, "outputs", args if isinstance(args, tuple) else (args,))
        return found if isinstance(args, tuple) else found[0]


def call_with_backward_hooks(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """A module's call; its rule interprets torch's own code around the forward."""
    return module(*args, **kwargs)


# --- rules ------------------------------------------------------------------------------------------------------------


@wrapper_rule
def _found(interpreter: TracingInterpreter, function: Any, args: Arguments, kwargs: Keywords) -> Instead | None:
    if not isinstance(function, torch.nn.Module) or type(function).__call__ is not torch.nn.Module.__call__:
        return None
    attributes = instance_dict(function) or {}
    own = attributes.get("_backward_hooks"), attributes.get("_backward_pre_hooks")
    everywhere = (hooks for name, hooks in private_calls.global_module_hooks().items() if "backward" in name)
    if not any((*own, *everywhere)) or interpreter.values.in_backward:
        return None
    settings = interpreter.trace.settings
    if attributes.get("_is_full_backward_hook") is False or not (settings.one_graph and settings.allows(IN_THE_GRAPH)):
        return None
    return Instead(call_with_backward_hooks, (function, *args), kwargs)


@rule(call_with_backward_hooks)
def _call(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    note_for_backward(interpreter.values)
    return interpreter.run_function(private_calls.module_call_with_hooks(), args, kwargs)


@rule(torch.utils.hooks.BackwardHook)
def _make(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    module, hooks, pre_hooks = args
    made = HookInGraph(interpreter, module, interpreter.drain(hooks), interpreter.drain(pre_hooks))
    interpreter.created(made)
    return made


def _method(function: Any) -> None:
    rule(function)(lambda interpreter, args, kwargs: function(*args, **kwargs))


for _function in (HookInGraph.setup_input_hook, HookInGraph.setup_output_hook):
    _method(_function)


def _refuse(function: Any) -> None:
    @rule(function)
    def refuse(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
        raise Break("a hook for all modules is registered", "register it outside of the function")


for _registering in _REGISTERING:
    _refuse(_registering)
