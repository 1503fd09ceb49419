"""Gradients that torch's C++ computes by another formula while a dispatch mode is on (``isTensorSubclassLike``).

The last bit differs, or the strides. In a trace that is to be eager's to the last bit such a node of the autograd graph gets a
hook that puts eager's own formula, as one whole call, in the place of the traced one, which then leaves the graph as unused.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from dovetail.quirks.registry import Example, quirk
from dovetail.torch_private import autograd_nodes as private_autograd_nodes
from dovetail.torch_private import sizes as private_sizes
from dovetail.torch_private.autograd_nodes import node_name
from dovetail.trace import Trace
from dovetail.trace.overrides import GRADIENTS, INEXACT_GRADIENTS, GradientRequest, autograd_nodes
from dovetail.whole_calls.call import Gradients, whole_gradients

#: By the name of an autograd node: the values it saves for its function, and the function, given the node.
Formulas = Mapping[str, tuple[tuple[str, ...], Callable[[Any], Callable[..., torch.Tensor]]]]

_saved = private_autograd_nodes.saved_value


def _prod(node: Any) -> Any:
    return functools.partial(torch.prod, dtype=_saved(node, "result").dtype)


def _prod_of_dimension(node: Any) -> Any:
    return functools.partial(_prod(node), dim=_saved(node, "dim"), keepdim=_saved(node, "keepdim"))


def _cumprod(node: Any) -> Any:
    return functools.partial(torch.cumprod, dim=_saved(node, "dim"))


def _plain(function: Callable[..., torch.Tensor]) -> Any:
    return lambda node: function


_MASKED_FILL = "MaskedFillBackward1"
# Found by running torch's operator database bitwise; all differ by rounding.
FIRST_ORDER: Formulas = {
    "MaxBackward1": (("self",), _plain(torch.max)),
    "MinBackward1": (("self",), _plain(torch.min)),
    "MedianBackward0": (("self",), _plain(torch.median)),
    "NanmedianBackward0": (("self",), _plain(torch.nanmedian)),
    "ProdBackward0": (("self",), _prod),
    "ProdBackward1": (("self",), _prod_of_dimension),
    _MASKED_FILL: (("mask",), _plain(torch.masked_fill)),
}
# Their gradient is traced as in eager, the gradient of that is not.
SECOND_ORDER: Formulas = {
    "CumprodBackward0": (("self",), _cumprod),
    "LinalgMatrixExpBackward0": (("self",), _plain(torch.linalg.matrix_exp)),
}


def _differing_nodes(roots: Sequence[torch.Tensor], formulas: Formulas) -> Iterator[Any]:
    for node in autograd_nodes(roots):
        # With a number for the value, or one without a gradient, the formulas of masked_fill agree.
        is_plain_fill = node_name(node) == _MASKED_FILL and node.next_functions[1][0] is None
        if node_name(node) in formulas and not is_plain_fill:
            yield node


def differing_names(roots: Sequence[torch.Tensor]) -> set[str]:
    """The names of the autograd nodes behind ``roots`` whose traced formula is not eager's."""
    return {node_name(node) for node in _differing_nodes(roots, FIRST_ORDER)}


INEXACT_GRADIENTS.append(differing_names)


def _transposed() -> torch.Tensor:
    return torch.arange(1.0, 13.0).sin().reshape(4, 3).t()


def _of(function: Callable[[torch.Tensor], torch.Tensor], order: int = 1) -> Callable[[], Example]:
    return lambda: Example(function, [(_transposed(),)], order=order)


@quirk(
    GRADIENTS,
    example={
        "max": _of(torch.max),
        "min": _of(torch.min),
        "median": _of(torch.median),
        "nanmedian": _of(torch.nanmedian),
        "prod": _of(torch.prod),
        "prod of a dimension": _of(lambda x: x.prod(-1)),
        "masked_fill": lambda: Example(lambda x: x.masked_fill(x > 0.0, x.mean()), [(torch.arange(1.0, 100.0).sin(),)]),
    },
)
def eager_gradient_formula(request: GradientRequest) -> contextlib.AbstractContextManager[None]:
    """Use eager's formula for the gradients of ``FIRST_ORDER``."""
    return _with_formulas(request, FIRST_ORDER)


@quirk(
    GRADIENTS,
    example={
        "cumprod": _of(lambda x: x.cumprod(0), order=2),
        "matrix_exp": _of(lambda x: torch.linalg.matrix_exp(x[:, :3]), order=2),
    },
)
def eager_second_formula(request: GradientRequest) -> contextlib.AbstractContextManager[None]:
    """Use eager's formula for the gradients of ``SECOND_ORDER`` where they will be differentiated."""
    return _with_formulas(request, SECOND_ORDER if request.twice else {})


#: By the name of a node: the saved value like which eager lays out its first gradient; traced, it is contiguous.
_LAID_OUT_LIKE = {
    "OrmqrBackward0": "self",
    "LinalgHouseholderProductBackward0": "input",
    "MaskedSelectBackward0": "self",
}


def _square(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], Example]:
    return lambda: Example(function, [(torch.arange(1.0, 10.0).sin().reshape(3, 3).t(),)])


@quirk(
    GRADIENTS,
    example={
        "ormqr": _square(lambda x: torch.ormqr(x, x.detach().diagonal(), x.detach())),
        "householder_product": _square(lambda x: torch.linalg.householder_product(x, x.detach().diagonal())),
        "masked_select": lambda: Example(
            lambda x: x.masked_select(x > 0), [(_transposed(),)], options={"fullgraph": True}
        ),
    },
)
@contextlib.contextmanager
def eager_gradient_layout(request: GradientRequest) -> Iterator[None]:
    """Lay out the first gradient of a node of ``_LAID_OUT_LIKE`` as eager does."""
    with contextlib.ExitStack() as stack:
        for node in autograd_nodes(request.roots):
            if node_name(node) in _LAID_OUT_LIKE:
                value = _saved(node, _LAID_OUT_LIKE[node_name(node)])
                stack.callback(node.register_hook(functools.partial(_laid_out, value.detach())).remove)
        yield


def _laid_out(value: torch.Tensor, traced: Sequence[torch.Tensor | None], tangents: object) -> Gradients | None:
    """The gradients of a node, the first with the layout of a value of its size."""
    gradient = traced[0]
    if gradient is None or gradient.shape != value.shape:
        return None
    found = torch.empty_like(value)
    if list(map(private_sizes.hint, found.stride())) == list(map(private_sizes.hint, gradient.stride())):
        return None
    return (found.copy_(gradient), *traced[1:])


@contextlib.contextmanager
def _with_formulas(request: GradientRequest, formulas: Formulas) -> Iterator[None]:
    """Put hooks with eager's formulas on the nodes that have one, as long as the block.

    A hook that stayed would keep its trace alive for ever: the trace holds the node.
    """
    with contextlib.ExitStack() as stack:
        for node in _differing_nodes(request.roots, formulas) if request.trace.settings.exact else ():
            names, make = formulas[node_name(node)]
            # Saved values of a node come of no call, so that a tape that goes on cannot have them.
            with request.trace.recorder.paused():
                values, function = [_saved(node, name) for name in names], make(node)
            handle = node.register_hook(functools.partial(_exact, request.trace, node_name(node), function, values))
            stack.callback(handle.remove)
        yield


def _exact(
    trace: Trace,
    name: str,
    function: Callable[..., torch.Tensor],
    values: Sequence[torch.Tensor],
    traced: Sequence[torch.Tensor | None],
    tangents: Sequence[torch.Tensor | None],
) -> Gradients | None:
    """The gradients of an autograd node by eager's formula, in the place of the ``traced`` ones."""
    tangent = tangents[0]
    if tangent is None:
        return None
    wanted = [gradient is not None for gradient in traced]
    if name == _MASKED_FILL:
        # Neither of its two gradients depends on the values that they are gradients of, and none of these is saved.
        values = [tangent.detach(), values[0], torch.zeros((), dtype=tangent.dtype, device=tangent.device)]
        wanted = [wanted[0], False, wanted[1]]
    wanted += [False] * (len(values) - len(wanted))
    by_rule = True if any(map(private_sizes.has_symbols, (*values, tangent))) else None
    found = whole_gradients(
        trace, name, lambda *given: [function(*given)], values, [tangent], wanted, keeps_strides=by_rule
    )
    return (found[0], found[2]) if name == _MASKED_FILL else found[: len(traced)]
