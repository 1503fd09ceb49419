"""Derivatives that are refused: that of a backward marked with ``@once_differentiable``, and the third one of a determinant."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from dovetail.errors import CaptureError
from dovetail.torch_private.autograd_nodes import node_name
from dovetail.trace.overrides import GRADIENTS, GradientRequest, autograd_nodes

_SVD = "LinalgSvdBackward0"


@contextlib.contextmanager
def _check_differentiable(request: GradientRequest) -> Iterator[None]:
    nodes = autograd_nodes(request.roots)
    # The node that raises eager's error leads to no input, so that a request for the gradients of inputs does not reach it.
    if any(node_name(node) == "torch::autograd::Error" for node in nodes):
        raise CaptureError(
            "a result of a backward marked with @once_differentiable is differentiated",
            advice="write that backward with operators that can be differentiated, and drop the mark",
        )
    # Traced, torch differentiates a determinant by singular vectors, and the determinants of these by theirs. All their singular
    # values are one, where that derivative is not a number; eager looks whether a matrix is singular.
    if any(node_name(node) == _SVD and node_name(node.next_functions[0][0]) == _SVD for node in nodes):
        raise CaptureError(
            "the singular vectors of singular vectors are differentiated, as by the third derivative of a determinant",
            advice="run this derivative eagerly",
        )
    yield


GRADIENTS.append(_check_differentiable)
