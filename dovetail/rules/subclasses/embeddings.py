"""``embedding`` of a table whose rows are spread over ranks (``RowwiseParallel``): where its gradient leaves the graph, that ends.

Each rank computes the gradient of the whole table, in another form than the table itself. No graph can return it, as the gradient
of an input has the input's sizes. In a step that calls ``backward()`` itself the gradient is a value like any other.
"""

from __future__ import annotations

from typing import Any

import torch

from dovetail.frontend.code.frame import Break
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, Keywords, method_rule
from dovetail.rules.subclasses.wrappers import OTHER_FORMS
from dovetail.torch_private import tensors as private_tensors


@method_rule("embedding")
def _rows_are_spread(interpreter: TracingInterpreter, function: Any, args: Arguments, kwargs: Keywords) -> Any:
    if interpreter.trace.settings.allows(OTHER_FORMS):
        return NotImplemented
    for value in (*args, *kwargs.values()):
        if not isinstance(value, torch.Tensor) or not private_tensors.is_wrapper(value):
            continue
        spread = any(placement.is_shard(0) for placement in getattr(value, "placements", ()))
        if spread and value.requires_grad and torch.is_grad_enabled():
            raise Break(
                "the rows of an embedding's table are spread over ranks, and its gradient is of another form",
                "compile the modules behind the embedding, and leave the embedding to eager",
            )
    return NotImplemented
