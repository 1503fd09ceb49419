"""The protocol for derivatives of a compiled function's backward (``create_graph=True``), and where they are refused.

The core gives first-order gradients. A backward that is to be differentiated itself is another function, of the forward's inputs
and of the tangents; who provides it (:mod:`dovetail.higher_order`, by a hook of :mod:`dovetail.aot.steps`) keeps a call's inputs
until then. Without a provider a second derivative raises :class:`HigherOrderGradientError`.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from dovetail.errors import HigherOrderGradientError

Edges = Sequence[tuple[Any, int]]
"""The nodes of autograd that a node passes its gradients on to, each with the number of its output."""
Gradients = Sequence["torch.Tensor | None"]
FREED = (
    "Trying to backward through the graph a second time (or directly access saved tensors after they have already been "
    "freed). Saved intermediate values of the graph are freed when you call .backward() or autograd.grad(). Specify "
    "retain_graph=True if you need to backward through the graph a second time or if you need to access saved tensors after "
    "calling backward."
)
"""Eager's text."""


class DifferentiableBackward(Protocol):
    """The backward of one entry as a function that can be differentiated."""

    def prepare(self, inputs: list[torch.Tensor]) -> None:
        """Put nodes of autograd in front of inputs that need them, before the forward runs."""

    def keep(self, primals: Sequence[torch.Tensor]) -> Any:
        """Keep what is needed of a call's inputs; the runtime hands it back to the other methods."""

    def settle(self, kept: Any, primals: Sequence[torch.Tensor], saved: Sequence[Any]) -> None:
        """The forward has run, and has saved these values."""

    def watch(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        """The call has ended; these are its inputs and forward outputs as autograd has them outside."""

    def run(
        self, kept: Any, edges: Edges, tangents: Gradients, plain: Callable[[], Gradients], saved: Sequence[Any]
    ) -> Gradients:
        """One gradient for each input, connected to inputs and tangents. ``kept`` is None for a call that has let go of them.

        ``plain()`` is the ordinary backward, ``saved`` are the values that the forward has saved for it.
        """

    def divide(self, dependent: Any, tangent: torch.Tensor) -> Gradients:
        """Divide the gradient at a node of ``DependentOutput``: the rest, and the parts for the outputs it was computed from."""

    def differs(self, defined: tuple[bool, ...]) -> bool:
        """Whether eager's backward for these tangents, in the autocast state of the moment, is another one than the captured."""

    def first_order(self, kept: Any, edges: Edges, tangents: Gradients, saved: Sequence[Any]) -> Gradients:
        """One gradient for each input, in the autocast state of the moment, connected to nothing."""


_partial: contextvars.ContextVar[bool] = contextvars.ContextVar("dovetail partial gradients", default=False)


@contextlib.contextmanager
def partial_gradients() -> Iterator[None]:
    """Backwards in the block compute some summands of gradients, and another backward the rest: where eager checks a gradient as
    a whole, no summand alone says whether the check holds.
    """
    token = _partial.set(True)
    try:
        yield
    finally:
        _partial.reset(token)


def are_partial() -> bool:
    """Whether the backward that runs now computes summands of gradients."""
    return _partial.get()


def refusal(reason: str, advice: str = "") -> HigherOrderGradientError:
    """The error for a derivative of the next order that a compiled function cannot give."""
    return HigherOrderGradientError(
        f"a derivative of a compiled function's backward is asked for (create_graph=True), and it cannot be captured: {reason}",
        advice=advice or "take both derivatives inside the compiled function, or run this one eagerly",
    )
