"""The tables by which a trace treats single operators in another way than torch does.

The tables are empty until ``dovetail.quirks`` fills them; a trace works without any entry. Each table has one kind of hook:

========================  =============================================================================================
``WRITE_CHECKS``          looks at every operator that writes to an argument; raises :class:`RefusedOperatorError`
``WRITES``                functionalises any operator that writes to an argument
``FUNCTIONAL``            by operator: functionalises it (what is recorded)
``EVERY``                 functionalises any operator that the tables above leave
``INPUTS``                makes the traced tensor of an input, as the trace itself does
``FAKE``                  by operator: gives the result on fake tensors (sizes, strides and type of what is recorded)
``SYMBOLIC_FAKE``         the same, in traces that may have symbolic sizes; asked first
``GRADIENTS``             is entered around every request for gradients in an open trace
``INEXACT_GRADIENTS``     names autograd nodes whose traced gradient is not eager's to the last bit
``LEAF_ORDERS``           gives the order in which a node hands over gradients, for leaves to get them in eager's order
``INPUT_GRADIENTS``       checks the gradient of an input before it leaves the graph
``ASSUMES``               by operator: whether a node may find that the data is not such as the graph was captured for
``DATA_SIZES``            checks in the graph what was assumed about sizes made of data; there are none of these without it
``UNREAD``                sees a graph before what nobody reads is dropped from it
``GRAPHS``                edits a graph once it is complete
``WHILE_OPEN``            makes a context that is entered for as long as a trace is open
========================  =============================================================================================

A hook for an operator is called as ``hook(run, operator, args, kwargs)``. ``run(operator, args, kwargs)`` is torch's own
treatment, of this operator or of another one. ``NotImplemented`` says that torch's own treatment is right for these arguments.

>>> def doubled(run, operator, args, kwargs):
...     return run(torch.ops.aten.mul.Tensor, (run(operator, args, kwargs), 2), {})
>>> FUNCTIONAL[torch.ops.aten.sin.default] = doubled
>>> del FUNCTIONAL[torch.ops.aten.sin.default]
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from dovetail.errors import CaptureError

if TYPE_CHECKING:
    from dovetail.trace.trace import Trace, TracedInput

Run = Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]
OperatorHook = Callable[[Run, Any, Sequence[Any], Mapping[str, Any]], Any]

WRITE_CHECKS: list[Callable[[Any, Sequence[Any], Mapping[str, Any]], None]] = []
EVERY: list[OperatorHook] = []
INPUTS: list[Callable[[Callable[..., Any], Trace, torch.Tensor, str], tuple[Any, torch.fx.Node, Any] | None]] = []
WRITES: list[OperatorHook] = []
FUNCTIONAL: dict[Any, OperatorHook] = {}
FAKE: dict[Any, OperatorHook] = {}
SYMBOLIC_FAKE: dict[Any, OperatorHook] = {}
GRADIENTS: list[Callable[[GradientRequest], contextlib.AbstractContextManager[None]]] = []
INEXACT_GRADIENTS: list[Callable[[Sequence[torch.Tensor]], Iterable[str]]] = []
LEAF_ORDERS: list[Callable[[Sequence[Any], Sequence[Any], int, int], tuple[int, ...]]] = []
INPUT_GRADIENTS: list[Callable[[Trace, TracedInput, torch.Tensor], None]] = []
ASSUMES: dict[Any, Callable[[torch.fx.Node], bool]] = {}
DATA_SIZES: list[Callable[[Trace], None]] = []
UNREAD: list[Callable[[torch.fx.Graph], None]] = []
GRAPHS: list[Callable[[torch.fx.Graph], None]] = []
WHILE_OPEN: list[Callable[[], contextlib.AbstractContextManager[None]]] = []


class RefusedOperatorError(CaptureError):
    """No graph can hold this operator as eager runs it; the frontend breaks the graph there."""


@dataclass(frozen=True)
class GradientRequest:
    """A request for the gradients of ``roots`` in an open trace.

    ``twice``: the gradients will be differentiated themselves. ``partial``: they are summands of the gradients that eager
    computes, so that nothing eager checks about a sum can be checked.
    """

    trace: Trace
    roots: tuple[torch.Tensor, ...]
    twice: bool = False
    partial: bool = False


@contextlib.contextmanager
def requested_gradients(
    trace: Trace, roots: Sequence[torch.Tensor], *, twice: bool = False, partial: bool = False
) -> Iterator[None]:
    """Enter the hooks of ``GRADIENTS`` around a call of autograd; see :class:`GradientRequest`."""
    request = GradientRequest(trace, tuple(roots), twice, partial)
    with contextlib.ExitStack() as stack:
        for hook in GRADIENTS:
            stack.enter_context(hook(request))
        # In the engine's thread of another device the modes of the trace are off, which watch hooks and custom backwards.
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        yield


def inexact_gradients(roots: Sequence[torch.Tensor]) -> tuple[str, ...]:
    """The names of the autograd nodes behind ``roots`` whose traced gradient is not eager's to the last bit.

    >>> inexact_gradients([torch.ones(2, requires_grad=True).sum()])
    ()
    """
    return tuple(sorted({name for hook in INEXACT_GRADIENTS for name in hook(roots)}))


def autograd_nodes(roots: Iterable[torch.Tensor]) -> list[Any]:
    """All nodes of the autograd graph behind ``roots``, those of leaves included, each before the nodes that it leads to first.

    >>> [node.name() for node in autograd_nodes([torch.ones(2, requires_grad=True).exp().sum()])]
    ['SumBackward0', 'ExpBackward0', 'torch::autograd::AccumulateGrad']
    """
    found: dict[Any, None] = {}
    stack: list[Any] = [root.grad_fn for root in roots]
    while stack:
        node = stack.pop()
        if node is not None and node not in found:
            found[node] = None
            stack += [following for following, _ in node.next_functions]
    return list(found)
