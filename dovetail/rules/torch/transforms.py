"""``vmap``, ``grad`` and ``grad_and_value`` name what they return after the function that they are given.

Torch leaves that out while something compiles.
"""

from __future__ import annotations

import functools
import types
from typing import Any

import torch

from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, Keywords, rule


def _names(transform: Any) -> None:
    @rule(transform)
    def named(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
        made = interpreter.call_guarded(transform, args, kwargs)
        if args and type(args[0]) is type(made) is types.FunctionType:
            functools.update_wrapper(made, args[0])
        return made


for _transform in (torch.vmap, torch.func.grad, torch.func.grad_and_value):
    _names(_transform)
