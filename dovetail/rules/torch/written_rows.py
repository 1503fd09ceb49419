"""``buffer[i] = row`` with an index in a tensor: eager reads the index, to write to a part of the buffer; the graph scatters.

Both write the same numbers, and the gradients are the same: zero where the buffer was written, and that of the row.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, Keywords, method_rule
from dovetail.torch_private import tensors as private_tensors

_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8)


@method_rule("setitem", "__setitem__")
def _set_row(interpreter: TracingInterpreter, function: Any, args: Arguments, kwargs: Keywords) -> Any:
    if function not in (operator.setitem, torch.Tensor.__setitem__) or len(args) != 3:
        return NotImplemented
    buffer, index, row = args
    is_one = private_tensors.is_traced(buffer) and isinstance(index, torch.Tensor) and private_tensors.is_traced(index)
    if not is_one or index.dim() or index.dtype not in _WHOLE or not buffer.dim() or index.device != buffer.device:
        return NotImplemented
    if not isinstance(row, torch.Tensor):
        if type(row) not in (int, float, bool):
            return NotImplemented
        row = torch.full((), row, dtype=buffer.dtype, device=buffer.device)
    while row.dim() >= buffer.dim() and row.shape[0] == 1:
        row = row.squeeze(0)
    row = row.to(device=buffer.device, dtype=buffer.dtype)
    interpreter.call_torch(torch.Tensor.index_put_, (buffer, (index.to(torch.int64),), row), {})
    return None
