"""Gradients of eigenvectors that are complex: what eager checks about them, and eager's formula for ``eig``.

Such vectors are given up to a phase. Where a loss depends on it, eager raises an error, but not while a dispatch mode is on:
an opaque call in the graph raises it instead. A gradient that is differentiated again comes back in two parts, to the backward
and to the derivative of that, where eager checks their sum; in parts nothing is checked.

The formula of ``torch.linalg.eig`` writes in place in eager and out of place while tracing; its own gradient then differs by
rounding and strides.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from dovetail.torch_private import autograd as private_autograd
from dovetail.torch_private import calls as private_calls
from dovetail.trace.opaque import opaque
from dovetail.trace.trace import Trace

_ILL_DEFINED = (
    "The eigenvectors in the complex case are specified up to multiplication by e^{i phi}. The specified loss function depends "
    "on this quantity, so it is ill-defined."
)
_MESSAGES = {
    "LinalgEigBackward0": f"linalg_eig_backward: {_ILL_DEFINED}",
    "LinalgEighBackward0": f"linalg_eigh_backward: {_ILL_DEFINED}",
}


@contextlib.contextmanager
def phases_checked(
    trace: Trace, roots: Sequence[torch.Tensor], twice: bool = False, in_parts: bool = False
) -> Iterator[None]:
    """Gradients of ``roots`` that autograd is asked for in the block raise eager's error where they depend on a phase, unless
    they come ``in_parts``; with ``twice`` those of ``torch.linalg.eig`` can be differentiated as in eager.

    >>> with phases_checked(Trace(), [torch.ones(2, requires_grad=True)]):
    ...     pass
    """
    with contextlib.ExitStack() as stack:
        for node in _vector_nodes(roots):
            name = node.name()
            with trace.recorder.paused():
                values, vectors = (private_autograd.saved_value(node, each) for each in ("eigenvalues", "eigenvectors"))
            if not in_parts and vectors.is_complex():
                handle = node.register_prehook(functools.partial(_check, trace, vectors, _MESSAGES[name]))
                stack.callback(handle.remove)
            if twice and trace.settings.exact and name == "LinalgEigBackward0":
                handle = node.register_hook(functools.partial(_eig_gradient, trace, values, vectors))
                stack.callback(handle.remove)
        yield


def _vector_nodes(roots: Sequence[torch.Tensor]) -> list[Any]:
    found: list[Any] = []
    seen: set[Any] = set()
    stack: list[Any] = [root.grad_fn for root in roots]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        stack += [entry[0] for entry in node.next_functions]
        if node.name() in _MESSAGES:
            found.append(node)
    return found


def _check(
    trace: Trace, vectors: torch.Tensor, message: str, tangents: Sequence[torch.Tensor | None]
) -> tuple[torch.Tensor | None, ...] | None:
    tangent = tangents[1]
    if tangent is None:
        return None
    with trace.recorder.paused(), private_calls.no_torch_function():
        with torch.no_grad():
            # How the gradient turns each vector's phase.
            angles = torch.diagonal(torch.matmul(vectors.mH, tangent), 0, -2, -1).imag
            holds = torch.isclose(angles, torch.zeros_like(angles), rtol=1e-2, atol=1e-2).all()
            (holds,) = opaque(trace, "the check of phases", functools.partial(_require, message), [holds])
        # Where the check does not hold there is no result, but a result must depend on the check. (This keeps the strides.)
        return tangents[0], torch.where(holds, tangent, 0), *tangents[2:]


_parts: contextvars.ContextVar[bool] = contextvars.ContextVar("dovetail gradient in parts", default=False)


@contextlib.contextmanager
def gradient_in_parts() -> Iterator[None]:
    """Other parts of the gradients that a backward runs with go through another one, so that no part says anything by itself.

    >>> with gradient_in_parts():
    ...     _require("it does not hold", torch.tensor(False))
    [tensor(True)]
    """
    token = _parts.set(True)
    try:
        yield
    finally:
        _parts.reset(token)


def _require(message: str, holds: torch.Tensor) -> list[torch.Tensor]:
    if not _parts.get() and not bool(holds):
        raise RuntimeError(message)
    return [torch.ones_like(holds)]


def _eig_gradient(
    trace: Trace,
    values: torch.Tensor,
    vectors: torch.Tensor,
    traced: Sequence[torch.Tensor | None],
    tangents: Sequence[torch.Tensor | None],
) -> tuple[torch.Tensor | None] | None:
    """The gradient of ``torch.linalg.eig``, with eager's operators in eager's order."""
    of_values, of_vectors = tangents[:2]
    if traced[0] is None or of_vectors is None:
        return None
    with trace.recorder.paused(), private_calls.no_torch_function():
        turned = vectors.mH
        inner = torch.matmul(turned, of_vectors)
        lengths = torch.diagonal(inner, 0, -2, -1).real
        inner = inner - torch.matmul(turned, vectors * lengths.unsqueeze(-2))
        conjugated = values.conj()
        gaps = conjugated.unsqueeze(-2) - conjugated.unsqueeze(-1)
        torch.diagonal(gaps, 0, -2, -1).fill_(1.0)
        inner.div_(gaps)
        middle = torch.diagonal(inner, 0, -2, -1)
        if of_values is None:
            middle.zero_()
        else:
            middle.copy_(of_values)
        gradient = torch.linalg.solve(turned, torch.matmul(inner, turned))
        return (gradient if traced[0].is_complex() else gradient.real,)
