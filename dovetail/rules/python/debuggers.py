"""``breakpoint()`` and ``pdb.set_trace()``: the whole call runs eagerly, so that the debugger stops in the program's own frame."""

from __future__ import annotations

from typing import Any

import torch

from dovetail.frontend.code.frame import Break
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, Instead, Keywords, rule, wrapper_rule

_DEBUGGERS = frozenset({"pdb", "bdb", "ipdb", "IPython", "pudb", "debugpy"})


@rule(breakpoint)
def _breakpoint(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    raise Break(
        "breakpoint stops the program",
        "the call runs eagerly as long as the breakpoint is there, and so has its own frames and variables",
        resumable=False,
    )


@wrapper_rule
def _debugger(interpreter: TracingInterpreter, function: Any, args: Arguments, kwargs: Keywords) -> Instead | None:
    """A debugger that is called by its own name."""
    is_module = isinstance(function, torch.nn.Module)
    if not is_module and (function.__globals__.get("__name__") or "").split(".", 1)[0] in _DEBUGGERS:
        _breakpoint(interpreter, args, kwargs)
    return None
