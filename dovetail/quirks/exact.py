"""Gradients that torch's C++ computes by another formula while a dispatch mode is on (``isTensorSubclassLike``).

The last bit differs. Such a node of the autograd graph gets a hook that puts eager's own formula, as one opaque operator, in
the place of what was traced; the traced formula is then read by nobody and leaves the graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dovetail.errors import CaptureError
from dovetail.torch_private import autograd as private_autograd
from dovetail.torch_private import sizes as private_sizes
from dovetail.trace.opaque import gradients
from dovetail.trace.sized import sized_gradients
from dovetail.trace.trace import Trace


def _prod(node: Any) -> Any:
    return functools.partial(torch.prod, dtype=private_autograd.saved_value(node, "result").dtype)


def _prod_of_dimension(node: Any) -> Any:
    dim, keepdim = private_autograd.saved_value(node, "dim"), private_autograd.saved_value(node, "keepdim")
    return functools.partial(_prod(node), dim=dim, keepdim=keepdim)


def _ormqr(node: Any) -> Any:
    left, transpose = private_autograd.saved_value(node, "left"), private_autograd.saved_value(node, "transpose")
    return functools.partial(torch.ormqr, left=left, transpose=transpose)


def _plain(function: Callable[..., torch.Tensor]) -> Any:
    return lambda node: function


# The saved arguments, and what eager calls with them. Found by running torch's operator database bitwise; all differ by
# rounding, ormqr by the strides of its gradient.
OTHER_FORMULA: dict[str, tuple[tuple[str, ...], Callable[[Any], Any]]] = {
    "MaxBackward1": (("self",), _plain(torch.max)),
    "MinBackward1": (("self",), _plain(torch.min)),
    "MedianBackward0": (("self",), _plain(torch.median)),
    "NanmedianBackward0": (("self",), _plain(torch.nanmedian)),
    "ProdBackward0": (("self",), _prod),
    "ProdBackward1": (("self",), _prod_of_dimension),
    "OrmqrBackward0": (("self", "input2", "input3"), _ormqr),
    "MaskedFillBackward1": (("mask",), _plain(torch.masked_fill)),
}


# Their gradient is traced as in eager, the gradient of that is not.
OTHER_SECOND_FORMULA: dict[str, tuple[tuple[str, ...], Callable[[Any], Any]]] = {
    "CumprodBackward0": (
        ("self",),
        lambda node: functools.partial(torch.cumprod, dim=private_autograd.saved_value(node, "dim")),
    ),
    "LinalgMatrixExpBackward0": (("self",), _plain(torch.linalg.matrix_exp)),
}


def differs(node: Any, twice: bool = False) -> bool:
    """Whether the traced formula of an autograd node is not eager's; ``twice``: or that of its gradient."""
    name = node.name()
    if twice and name in OTHER_SECOND_FORMULA:
        return True
    # The value of a masked_fill is the second input; with a number, or a value without gradient, the formulas agree.
    return name in OTHER_FORMULA and not (name == "MaskedFillBackward1" and node.next_functions[1][0] is None)


def differing_nodes(roots: Sequence[torch.Tensor], twice: bool = False) -> list[Any]:
    """The autograd nodes behind ``roots`` whose traced formula is not eager's. Raises :class:`CaptureError` for what cannot be
    differentiated.
    """
    found: list[Any] = []
    seen: set[Any] = set()
    stack: list[Any] = [root.grad_fn for root in roots]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        stack += [entry[0] for entry in node.next_functions]
        if node.name() == "torch::autograd::Error":
            # It leads to no input, so that asking for gradients does not come by; eager's backward does.
            raise CaptureError(
                "a result of a backward marked with @once_differentiable is differentiated",
                advice="write that backward with operators that can be differentiated, and drop the mark",
            )
        if differs(node, twice):
            found.append(node)
    return found


def use_exact_formulas(trace: Trace, roots: Sequence[torch.Tensor], twice: bool = False) -> None:
    """Make the gradients of ``roots`` eager's to the last bit, and with ``twice`` their gradients too; to be called before
    autograd is asked for them.
    """
    for node in differing_nodes(roots, twice):
        if not node.metadata.get("dovetail exact formula"):
            node.metadata["dovetail exact formula"] = True
            names, make = (OTHER_SECOND_FORMULA | OTHER_FORMULA)[node.name()]
            # Not the node: a hook that holds it would keep both alive for ever.
            values = [private_autograd.saved_value(node, name) for name in names]
            node.register_hook(functools.partial(_exact, trace, node.name(), make(node), values))


def _exact(
    trace: Trace,
    name: str,
    function: Callable[..., torch.Tensor],
    values: Sequence[torch.Tensor],
    traced: Sequence[torch.Tensor | None],
    tangents: Sequence[torch.Tensor | None],
) -> tuple[torch.Tensor | None, ...] | None:
    tangent = tangents[0]
    if tangent is None:
        return None
    wanted = [gradient is not None for gradient in traced]
    if name == "MaskedFillBackward1":
        # Neither of its two gradients depends on what they are gradients of, and none of it is saved.
        values = [tangent.detach(), values[0], torch.zeros((), dtype=tangent.dtype, device=tangent.device)]
        wanted = [wanted[0], False, wanted[1]]
    wanted += [False] * (len(values) - len(wanted))

    def call(*arguments: torch.Tensor) -> list[torch.Tensor]:
        return [function(*arguments)]

    if any(map(private_sizes.has_symbols, (*values, tangent))):
        asked = [at for at, flag in enumerate(wanted) if flag]
        made = dict(zip(asked, sized_gradients(name, call, values, [tangent], asked, keeps_strides=True), strict=True))
        found: tuple[torch.Tensor | None, ...] = tuple(made.get(at) for at in range(len(values)))
    else:
        found = gradients(trace, name, call, values, [tangent], wanted)
    return (found[0], found[2]) if name == "MaskedFillBackward1" else found[: len(traced)]
