"""The error of a backward that is marked ``@once_differentiable`` and is differentiated."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from dovetail.errors import CaptureError
from dovetail.trace.overrides import GRADIENTS, GradientRequest, autograd_nodes


@contextlib.contextmanager
def _check_differentiable(request: GradientRequest) -> Iterator[None]:
    # The node that raises eager's error leads to no input, so that a request for the gradients of inputs does not reach it.
    if any(node.name() == "torch::autograd::Error" for node in autograd_nodes(request.roots)):
        raise CaptureError(
            "a result of a backward marked with @once_differentiable is differentiated",
            advice="write that backward with operators that can be differentiated, and drop the mark",
        )
    yield


GRADIENTS.append(_check_differentiable)
