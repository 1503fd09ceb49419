"""Views in ``torch.inference_mode`` and outside: inference tensors where their base is one, whatever the mode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dovetail.torch_private import libraries as private_libraries
from dovetail.trace.overrides import EVERY, Run


@EVERY.append
def _view_like_its_base(run: Run, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Make a view as below autograd, where torch would make an inference tensor or none by the mode alone."""
    if not getattr(operator, "is_view", False) or not isinstance(args[0], torch.Tensor):
        return NotImplemented
    if args[0].is_inference() is torch.is_inference_mode_enabled():
        return NotImplemented
    with private_libraries.as_view_of(args[0], operator):
        return run(operator, args, kwargs)
