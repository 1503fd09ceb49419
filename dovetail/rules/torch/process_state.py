"""Functions of torch that tell a state of the process which the check of torch's own state does not cover.

The answer is a guard: whoever initialises ``torch.distributed`` between two calls, say, gets another graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from dovetail.frontend.code.frame import Break
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, Keywords, rule
from dovetail.guards import ComputedSource, Equals
from dovetail.torch_private import libraries as private_libraries
from dovetail.torch_private import state as private_state
from dovetail.torch_private import tracing as private_tracing

_ANSWERS: tuple[Callable[[], Any], ...] = (
    torch.get_num_threads,
    torch.get_num_interop_threads,
    torch.is_warn_always_enabled,
    torch.autograd.is_multithreading_enabled,
)
if torch.distributed.is_available():
    _ANSWERS += (
        torch.distributed.is_initialized,
        torch.distributed.get_world_size,
        torch.distributed.get_rank,
        torch.distributed.get_backend,
        torch.distributed.is_torchelastic_launched,
    )


def _answer(function: Callable[[], Any]) -> Any:
    try:
        return function()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


def _guard_answer(function: Callable[[], Any]) -> None:
    @rule(function)
    def handler(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
        if not args and not kwargs:
            values, name = interpreter.values, f"{function.__module__}.{function.__name__}"
            source = ComputedSource(_answer, (values.pin(function, name),), f"{name}()")
            values.guard(source, Equals(_answer(function)), f"{name}() was asked")
        return interpreter.native(function, args, kwargs)


for _function in _ANSWERS:
    _guard_answer(_function)


@rule(private_state.fp32_precision)
def _precision(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    """``torch.backends.*.fp32_precision``, in which one backend's answer may come from another one's switch."""
    if len(args) == 2 and not kwargs and all(type(item) is str for item in args):
        values, name = interpreter.values, f"fp32_precision of {args[0]}, {args[1]}"
        read = functools.partial(private_state.fp32_precision, *args)
        values.guard(ComputedSource(_answer, (values.pin(read, name),), name), Equals(read()), f"{name} was read")
    return interpreter.native(private_state.fp32_precision, args, kwargs)


if torch.distributed.is_available():
    _OWNERS = (torch.distributed.group, torch.distributed.GroupMember)

    @rule(*{type(owner).__dict__["WORLD"].fget for owner in _OWNERS})
    def _default_group(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
        """``torch.distributed.group.WORLD``: None until a process group is initialised."""
        values, function = interpreter.values, type(args[0]).__dict__["WORLD"].fget
        source = ComputedSource(function, (values.pin(args[0], args[0].__qualname__),), f"{args[0].__qualname__}.WORLD")
        return values.read(function(args[0]), source)


@rule(private_libraries.enter_function_mode, private_tracing.TorchDispatchMode.__enter__)
def _enter_mode(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    """Torch itself calls a mode's code at each function or operator, where nobody sees what it reads and writes."""
    kind = type(args[0])
    dispatches = issubclass(kind, private_tracing.TorchDispatchMode)
    what = "dispatch" if dispatches else "function"
    if getattr(kind, f"__torch_{what}__").__module__.partition(".")[0] != "torch":
        raise Break(f"{kind.__qualname__}, a torch {what} mode, is entered", "enter it outside", resumable=False)
    enter = private_tracing.TorchDispatchMode.__enter__ if dispatches else private_libraries.enter_function_mode
    return interpreter.native(enter, args, kwargs)


@rule(
    private_tracing.FakeTensorMode.__enter__,
    private_tracing.FunctionalTensorMode.__enter__,
    private_tracing.ProxyTorchDispatchMode.__enter__,
)
def _enter_tracing_mode(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    """A mode of the kinds that a capture is made of: it would take the place of the capture's own."""
    raise Break(f"{type(args[0]).__qualname__} is entered", "enter it outside", resumable=False)
