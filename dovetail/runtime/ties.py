"""Results that other results were computed from: autograd outside of the graph is told, so that nothing is asked in vain.

A graph is one node of autograd, whatever is computed from what inside. Of ``y, z = f(x)`` with ``z = y.exp()`` inside,
``torch.autograd.grad(z.sum(), y, allow_unused=True)`` would give None, and a hook on ``y`` would miss what comes from ``z``.
So ``z`` is tied to ``y``: its node leads to that of ``y`` too, passes nothing there, and refuses when something is wanted.
"""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dovetail.errors import PartialGradientError
from dovetail.torch_private import autograd as private_autograd
from dovetail.torch_private import state as private_state


class GradientHooks(OrderedDict[int, Any]):
    """The hooks of a result. With several results in one node, autograd calls those of all whenever one has a gradient.

    Those of a result that has none are called with None; in eager, they are not called.
    """

    def __setitem__(self, key: int, hook: Callable[[torch.Tensor], Any]) -> None:
        super().__setitem__(key, functools.partial(_unless_none, hook))


def _unless_none(hook: Callable[[torch.Tensor], Any], gradient: torch.Tensor | None) -> Any:
    return None if gradient is None else hook(gradient)


def prepare_hooks(result: torch.Tensor) -> Mapping[int, Any]:
    """The table of a result's hooks, which is there before the first one is registered (1 us)."""
    hooks = result._backward_hooks
    if hooks is None:
        hooks = GradientHooks()
        # What Tensor.register_hook does at the first hook.
        result._backward_hooks = hooks
        node: Any = result.grad_fn
        node._register_hook_dict(result)
    return hooks


_NOTED = -1
"""The key of a hook of our own; those of the user's hooks count from 0."""


def note_fed(value: torch.Tensor, fed: Sequence[torch.Tensor]) -> None:
    """Refuse gradients of ``fed`` through ``value``, which was computed from them inside of the same node of autograd.

    Cheaper than a node of its own (:func:`tie`), which is needed where they come from different nodes.
    """
    node = weakref.ref(value.grad_fn)
    noted = [(tensor.output_nr, prepare_hooks(tensor), weakref.ref(tensor)) for tensor in fed]
    hooks: Any = prepare_hooks(value)
    OrderedDict.__setitem__(hooks, _NOTED, functools.partial(_check_fed, node, noted))


def _check_fed(node: weakref.ref[Any], fed: Sequence[tuple[int, Any, Any]], gradient: torch.Tensor | None) -> None:
    if gradient is not None:
        for number, hooks, reference in fed:
            _refuse_partial_gradient((node(), number), any(key != _NOTED for key in hooks), reference())


class Tied(torch.autograd.Function):
    """The first tensor, with edges to the others."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, *fed: torch.Tensor) -> torch.Tensor:
        """A tensor in the same memory, with the same version counter, that is no view for autograd."""
        ctx.set_materialize_grads(False)
        return value.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """The gradient as it comes, for the first tensor only."""
        edges = ctx.next_functions[1:]
        fed = getattr(ctx, "fed", ())
        if gradient is not None:
            for edge, (hooks, count, reference) in zip(edges, fed, strict=False):
                _refuse_partial_gradient(edge, len(hooks) > count, reference())
        return gradient, *[None] * len(edges)


_direct_apply = private_autograd.direct_apply(Tied)


def tie(value: torch.Tensor, fed: Sequence[torch.Tensor]) -> torch.Tensor:
    """``value``, which was computed from ``fed`` inside of the same graph."""
    noted = []
    for tensor in fed:
        hooks = prepare_hooks(tensor)
        noted.append((hooks, len(hooks), weakref.ref(tensor)))
    apply = _direct_apply if private_state.functorch_level() is None else Tied.apply
    if torch.is_grad_enabled():
        tied: torch.Tensor = apply(value, *fed)
    else:
        with torch.enable_grad():
            tied = apply(value, *fed)
    node: Any = tied.grad_fn
    node.fed = noted
    return tied


_anchor = torch.empty(0, requires_grad=True)


def require_gradient(value: torch.Tensor) -> torch.Tensor:
    """``value`` as the result of what requires a gradient, though no input does: a tensor made inside did."""
    with torch.enable_grad():
        tied: torch.Tensor = Tied.apply(value, _anchor)  # type: ignore[no-untyped-call]
    return tied


def _refuse_partial_gradient(edge: tuple[Any, int], has_hooks: bool, fed: torch.Tensor | None) -> None:
    node, number = edge
    is_current = fed is not None and fed.grad_fn is node and fed.output_nr == number
    wanted = has_hooks or (fed is not None and is_current and fed.retains_grad)
    if wanted or any(_is_edge(item, node, number) for item in private_autograd.wanted_gradients()):
        raise PartialGradientError(
            "the gradient of an output is asked for (by torch.autograd.grad, a hook or retain_grad()), and another output of "
            "the same graph was computed from it",
            advice="ask for it inside the compiled function, or return only one of the two outputs",
        )


def _is_edge(wanted: Any, node: Any, number: int) -> bool:
    if isinstance(wanted, torch.Tensor):
        return wanted.grad_fn is node and wanted.output_nr == number
    return wanted.node is node and wanted.output_nr == number  # type: ignore[no-any-return]
