"""Eigenvectors: checks of their gradients that torch leaves out while tracing, and formulas that it changes."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from dovetail.quirks.registry import Example, quirk
from dovetail.runtime.derivatives import are_partial
from dovetail.torch_private import autograd_nodes as private_autograd_nodes
from dovetail.torch_private import calls as private_calls
from dovetail.torch_private import sizes as private_sizes
from dovetail.torch_private.autograd_nodes import node_name
from dovetail.trace import Trace
from dovetail.trace.overrides import GRADIENTS, GRAPHS, GradientRequest, autograd_nodes
from dovetail.whole_calls.call import whole_call

_EIG, _EIGH = "LinalgEigBackward0", "LinalgEighBackward0"
_ILL_DEFINED = (
    "The eigenvectors in the complex case are specified up to multiplication by e^{i phi}. The specified loss function depends "
    "on this quantity, so it is ill-defined."
)
_MESSAGES = {_EIG: f"linalg_eig_backward: {_ILL_DEFINED}", _EIGH: f"linalg_eigh_backward: {_ILL_DEFINED}"}

Tangents = Sequence[torch.Tensor | None]


def _matrix() -> torch.Tensor:
    return torch.tensor([[2.0, 0.3, -0.7], [0.1, -1.0, 0.4], [0.6, 0.2, 0.5]])


def _phase(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.eigh(torch.complex(x + x.T, x - x.T))[1].real


@contextlib.contextmanager
def _hooks(
    request: GradientRequest, names: Sequence[str], make: Callable[[Any, torch.Tensor, torch.Tensor], Any]
) -> Iterator[None]:
    """Put hooks on the nodes with these names, made from a node, its values and its vectors, as long as the block."""
    with contextlib.ExitStack() as stack:
        for node in autograd_nodes(request.roots):
            if node_name(node) in names:
                with request.trace.recorder.paused():
                    saved = [private_autograd_nodes.saved_value(node, each) for each in ("eigenvalues", "eigenvectors")]
                handle = make(node, *saved)
                if handle is not None:
                    stack.callback(handle.remove)
        yield


@quirk(GRADIENTS, example=lambda: Example(_phase, [(_matrix(),)]))
def phases_are_checked(request: GradientRequest) -> contextlib.AbstractContextManager[None]:
    """Raise eager's error for a gradient that depends on the phase of complex eigenvectors.

    Such vectors are given up to a phase. Eager checks that a loss does not depend on it, but not while a dispatch mode is on: a
    whole call in the graph checks it. Where a gradient is differentiated again it arrives in two summands, one at the backward
    and one at the derivative of that; eager checks their sum, and of the summands nothing can be checked.
    """

    def checked(node: Any, values: torch.Tensor, vectors: torch.Tensor) -> Any:
        if request.partial or not vectors.is_complex():
            return None
        return node.register_prehook(functools.partial(_checked, request.trace, vectors, _MESSAGES[node_name(node)]))

    return _hooks(request, (_EIG, _EIGH), checked)


def _checked(trace: Trace, vectors: torch.Tensor, message: str, tangents: Tangents) -> Tangents | None:
    tangent = tangents[1]
    if tangent is None:
        return None
    with trace.recorder.paused(), private_calls.no_torch_function():
        with torch.no_grad():
            # How the gradient turns each vector's phase.
            angles = torch.diagonal(torch.matmul(vectors.mH, tangent), 0, -2, -1).imag
            holds = torch.isclose(angles, torch.zeros_like(angles), rtol=1e-2, atol=1e-2).all()
            (holds,) = whole_call(trace, "the check of phases", functools.partial(_require, message), [holds])
        # Where the check does not hold there is no result, but a result must depend on the check. (This keeps the strides.)
        return tangents[0], torch.where(holds, tangent, 0), *tangents[2:]


def _require(message: str, holds: torch.Tensor) -> list[torch.Tensor]:
    if not are_partial() and not bool(holds):
        raise RuntimeError(message)
    return [torch.ones_like(holds)]


def _eigenvectors(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values, vectors = torch.linalg.eig(x)
    return values, vectors.abs()


@quirk(GRADIENTS, example=lambda: Example(_eigenvectors, [(_matrix(),)], order=2, exact=False))
def eager_eig_gradient(request: GradientRequest) -> contextlib.AbstractContextManager[None]:
    """Compute a gradient of ``torch.linalg.eig`` that will be differentiated with eager's operators in eager's order.

    The C++ formula writes in place in eager and out of place while tracing; its own gradient then differs by rounding and
    strides.
    """
    if not (request.twice and request.trace.settings.exact):
        return contextlib.nullcontext()

    def computed(node: Any, values: torch.Tensor, vectors: torch.Tensor) -> Any:
        return node.register_hook(functools.partial(_eig_gradient, request.trace, values, vectors))

    return _hooks(request, (_EIG,), computed)


def _eig_gradient(
    trace: Trace, values: torch.Tensor, vectors: torch.Tensor, traced: Tangents, tangents: Tangents
) -> tuple[torch.Tensor | None] | None:
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


@quirk(
    GRAPHS,
    example={
        "eigvalsh": lambda: Example(torch.linalg.eigvalsh, [(torch.rand(24, 24),)], order=0),
        "svdvals": lambda: Example(torch.linalg.svdvals, [(torch.rand(24, 24),)], order=0),
        "cond": lambda: Example(torch.linalg.cond, [(torch.rand(30, 24, 24),)], order=0, options={"dynamic": True}),
    },
)
def unused_vectors(graph: torch.fx.Graph) -> None:
    """Leave out eigenvectors and singular vectors that nothing reads.

    Eager computes them only where a gradient may need them; for a traced tensor torch always asks for them, and the values
    come from another routine of LAPACK.
    """
    for target, wanted in ((torch.ops.aten._linalg_eigh.default, 0), (torch.ops.aten._linalg_svd.default, 1)):
        for node in graph.find_nodes(op="call_function", target=target):
            _read_sizes_elsewhere(graph, node, wanted)
            if all(user.target is operator.getitem and user.args[1] == wanted for user in node.users):
                names = [argument.name for argument in target._schema.arguments]
                flag = "compute_v" if "compute_v" in names else "compute_uv"
                position = names.index(flag)
                if len(node.args) > position:
                    node.update_arg(position, False)
                else:
                    node.kwargs = {**node.kwargs, flag: False}


def _read_sizes_elsewhere(graph: torch.fx.Graph, call: torch.fx.Node, wanted: int) -> None:
    """Read symbolic sizes of the vectors off the matrix or its values, so that nobody asks for the vectors because of them."""
    results = {user.args[1]: user for user in call.users if user.target is operator.getitem}
    others = [result for place, result in results.items() if place != wanted]
    tensors: list[Any] = [call.args[0]]
    if wanted in results:
        call.append(results[wanted])
        tensors.append(results[wanted])
    for size in [user for result in others for user in result.users if user.target is torch.ops.aten.sym_size.int]:
        expression = private_sizes.expression_of(size.meta["val"])
        for tensor in tensors:
            for dimension, other in enumerate(tensor.meta["val"].shape):
                if private_sizes.is_symbolic(other) and private_sizes.expression_of(other) == expression:
                    size.args = (tensor, dimension)
    for result in others:
        if not result.users:
            graph.erase_node(result)
