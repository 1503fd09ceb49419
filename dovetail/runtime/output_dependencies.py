"""Outputs that other outputs were computed from: autograd outside of the graph is told.

This is core. A graph is one node of autograd, whatever is computed from what inside. Of ``y, z = f(x)`` with ``z = y.exp()``
inside, ``torch.autograd.grad(z.sum(), y, allow_unused=True)`` would give None, and a hook on ``y`` would miss what comes from
``z``: a wrong first-order gradient. So ``z`` depends on ``y`` outside too: its node leads to that of ``y``. It passes nothing
there, unless something is wanted there: then the gradient of ``z`` is divided into what comes to ``y`` and the rest.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dovetail.errors import PartialGradientError
from dovetail.runtime.spec import OutputDependency
from dovetail.torch_private import autograd as private_autograd
from dovetail.torch_private import state as private_state


class GradientHooks(OrderedDict[int, Any]):
    """The hooks of a result. With several results in one node, autograd calls those of all whenever one has a gradient.

    Those of a result that has none are called with None; in eager, they are not called.
    """

    def __setitem__(self, key: int, hook: Callable[[torch.Tensor], Any]) -> None:
        super().__setitem__(key, functools.partial(unless_none, hook))


def unless_none(hook: Callable[..., Any], gradient: torch.Tensor | None) -> Any:
    """Call a hook if there is a gradient. A hook of several tensors at once waits for each whose node runs."""
    waits = getattr(hook, "__qualname__", "").endswith(".get_inner_hook.<locals>.inner_hook")
    return None if gradient is None and not waits else hook(gradient)


def prepare_hooks(result: torch.Tensor) -> Mapping[int, Any]:
    """The table of a result's hooks, which is there before the first one is registered (1 us)."""
    hooks = result._backward_hooks
    if hooks is None:
        # What Tensor.register_hook does at the first hook.
        hooks = result._backward_hooks = GradientHooks()
        result.grad_fn._register_hook_dict(result)  # type: ignore[union-attr]
    return hooks


class DependentOutput(torch.autograd.Function):
    """The first tensor, with edges to the others."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, *sources: torch.Tensor) -> torch.Tensor:
        """A tensor in the same memory, with the same version counter, that is no view for autograd."""
        ctx.set_materialize_grads(False)
        return value.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """The gradient as it comes, for the first tensor only; or its parts for the others."""
        if gradient is not None and DependentOutput.divides(ctx):
            call = getattr(ctx.next_functions[0][0], "call", None)
            if call is None or call.graph.derivatives is None:
                raise partial_gradient("the graph has no further derivative")
            return tuple(call.graph.derivatives.divide(ctx, gradient))
        return gradient, *[None] * len(ctx.next_functions[1:])

    @staticmethod
    def divides(ctx: Any) -> bool:
        """Whether something is wanted at an edge. A captured backward is told that otherwise nothing comes there."""
        return any(_is_wanted(*item) for item in zip(ctx.next_functions[1:], getattr(ctx, "sources", ()), strict=False))


_direct_apply = private_autograd.direct_apply(DependentOutput)


def depend_on(value: torch.Tensor, sources: Sequence[torch.Tensor], item: OutputDependency) -> torch.Tensor:
    """``value``, which was computed from ``sources`` inside of the same graph, with edges to them."""
    noted = [_noted(tensor, prepare_hooks(tensor)) for tensor in sources]
    apply = _direct_apply if private_state.functorch_level() is None else DependentOutput.apply
    with contextlib.nullcontext() if torch.is_grad_enabled() else torch.enable_grad():
        dependent: torch.Tensor = apply(value, *sources)
    node: Any = dependent.grad_fn
    node.sources, node.item = [*noted, _noted(dependent, {})], item  # the last one is the output itself
    return dependent


def _noted(tensor: torch.Tensor, hooks: Mapping[int, Any]) -> tuple[Any, ...]:
    return hooks, len(hooks), weakref.ref(tensor), _memory_of(tensor)


def _memory_of(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # a tensor without memory
        return 0


_anchor = torch.empty(0, requires_grad=True)


def require_gradient(value: torch.Tensor) -> torch.Tensor:
    """``value`` as the result of what requires a gradient, though no input does: a tensor made inside did."""
    with torch.enable_grad():
        return DependentOutput.apply(value, _anchor)  # type: ignore[no-any-return, no-untyped-call]


def _is_wanted(edge: tuple[Any, int], source: tuple[Any, ...]) -> bool:
    """Whether somebody asks for the gradient that arrives at an edge, or has given the output there other memory."""
    (hooks, count, _, memory), output = source, source[2]()
    wanted = len(hooks) > count or (output is not None and (output.retains_grad or _memory_of(output) != memory))
    return wanted or any(is_edge(item, *edge) for item in private_autograd.wanted_gradients())


def partial_gradient(reason: str) -> PartialGradientError:
    """The error where a gradient cannot be divided."""
    return PartialGradientError(
        "the gradient of an output is asked for (by torch.autograd.grad, a hook or retain_grad()), and another output of "
        f"the same graph was computed from it{reason and ': '}{reason}",
        advice="ask for it inside the compiled function, or return only one of the two outputs",
    )


def is_edge(wanted: Any, node: Any, number: int) -> bool:
    """Whether a wanted gradient (:func:`wanted_gradients`) is the one that arrives there."""
    found = wanted.grad_fn if isinstance(wanted, torch.Tensor) else wanted.node
    return found is node and wanted.output_nr == number
