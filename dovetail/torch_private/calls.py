"""Python calls: module calls and their global hooks, wrappers that torch puts around functions, ``__torch_function__``."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import torch

_DISABLED: types.CodeType = next(
    item
    for item in torch._compile._disable_dynamo.__code__.co_consts
    if isinstance(item, types.CodeType) and item.co_name == "inner"
)


MODULE_CALL_IMPL: Any = torch.nn.Module._call_impl  # as torch has it; a program may put another one in its place


def global_module_hooks() -> dict[str, Any]:
    """The dictionaries of hooks that run on every module, by name."""
    from torch.nn.modules import module

    kinds = ("backward_pre", "backward", "forward_pre", "forward")
    return {name: getattr(module, name) for name in [f"_global_{kind}_hooks" for kind in kinds]}


def called_by_graph_module(module: torch.nn.Module, caller: Any) -> Any:
    """The ``__call__`` behind that of a graph module, which gives better tracebacks and nothing else; of others, their own."""
    name = getattr(caller, "__qualname__", "").split(".")[-1]
    if not isinstance(module, torch.fx.GraphModule) or name != "call_wrapped":
        return caller
    wrapped: Any = type(module)._wrapped_call
    return wrapped.cls_call or super(wrapped.cls, module).__call__.__func__


def no_torch_function() -> Any:
    """A context in which no ``__torch_function__`` is called, neither a mode's nor a subclass's."""
    return torch._C.DisableTorchFunction()


def hide_from_dynamo(function: Callable[..., Any]) -> None:
    """Have torch.compile run a function, and all that it calls, without looking at its code.

    The autograd engine calls a backward; in a program that torch.compile has broken into graphs, it would be captured.
    """
    frames = torch._C._dynamo.eval_frame
    if hasattr(frames, "set_code_exec_strategy"):
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))


def without_dynamo_guard(function: Any) -> Any:
    """The function inside torch's wrapper that keeps it out of torch's own compiler; anything else is returned as it is."""
    return function.__wrapped__ if getattr(function, "__code__", None) is _DISABLED else function


def is_wrapped_module(value: Any) -> bool:
    """Whether a value is the module that ``torch.compile`` has put around another one."""
    wrappers = sys.modules.get("torch._dynamo.eval_frame")
    return wrappers is not None and isinstance(value, wrappers.OptimizedModule)
