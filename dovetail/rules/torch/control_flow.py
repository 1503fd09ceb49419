"""``torch.cond``, ``while_loop``, ``scan``, ``map`` and ``flex_attention``: the graph breaks there."""

from __future__ import annotations

from typing import Any

import torch

from dovetail.frontend.code.frame import Break
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, Keywords, rule
from dovetail.torch_private import libraries as private_libraries


def _break_at(function: Any, name: str) -> None:
    @rule(function)
    def refuse(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
        """Torch compiles the functions that it is given with torch.compile, which cannot read a trace of Dovetail's."""
        condition = args[0] if args else kwargs.get("pred")
        if function is torch.cond and not isinstance(condition, torch.Tensor):
            return interpreter.call_guarded(function, args, kwargs)
        advice = "compute both sides and use torch.where, or call it outside of the compiled function"
        if function is not torch.cond:
            advice = "write it with operators of torch, or call it outside of the compiled function"
        raise Break(f"{name} compiles the functions that it is given with torch.compile", advice)


for _function, _name in private_libraries.control_flow().items():
    _break_at(_function, _name)
