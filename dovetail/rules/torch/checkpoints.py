"""``torch.utils.checkpoint``: the reentrant kind runs as the other one, whose gradients are the same."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.utils.checkpoint

from dovetail.errors import UserLocation
from dovetail.frontend.code.frame import Break, Frame
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, Keywords, end_rule, rule
from dovetail.rules.torch.saved_tensor_hooks import guard_hooks_allowed
from dovetail.torch_private import checkpoints as private_checkpoints
from dovetail.trace.overrides import WHILE_OPEN
from dovetail.trace.settings import RECOMPUTES

_WARNING = "torch.utils.checkpoint"
# With others the reentrant kind raises.
_TAKEN = frozenset({"use_reentrant", "preserve_rng_state", "determinism_check", "debug", "early_stop"})

WHILE_OPEN.extend((private_checkpoints.plain_checkpoints, private_checkpoints.generator_of_its_own))


class _Regions:
    """The variables of running functions that regions of one capture read again in the backward."""

    def __init__(self, interpreter: TracingInterpreter) -> None:
        self.variables: list[tuple[Frame, str, UserLocation | None]] = []

    def add(self, interpreter: TracingInterpreter, function: Any) -> None:
        """Note what a region reads of the functions around it."""
        while isinstance(function, functools.partial):
            function = function.func
        cells, place = getattr(function, "__closure__", None) or (), interpreter.locate()
        for frame in interpreter.frames if cells else ():
            read = [name for name, cell in frame.cells.items() if any(cell is item for item in cells)]
            self.variables += [(frame, name, place) for name in read]


@end_rule
def _keep_variables(interpreter: TracingInterpreter) -> None:
    """The backward is captured where the graph ends; what the program sets behind a graph break, eager's backward reads."""
    trace = interpreter.trace
    is_break = trace.settings.stop_before or trace.findings.ended is not None
    for frame, name, place in interpreter.state(_Regions).variables if is_break else ():
        if _may_set(frame, name):
            reason = f"a checkpointed region reads {name}, which may be set after a graph break"
            raise Break(reason, "hand it over as an argument of the region", place, resumable=False)


def _may_set(frame: Frame, name: str) -> bool:
    """Whether an instruction that may come later sets a variable."""
    instructions, position = frame.decoded.instructions, frame.position
    if instructions[position - 1].opname.startswith("RETURN"):
        return False
    loops = {item.argval for item in instructions[position:] if item.opname.startswith("JUMP_BACKWARD")}
    first = min([position, *(at for at, item in enumerate(instructions) if item.offset in loops)])
    setting = ("STORE_DEREF", "DELETE_DEREF")
    return any(item.opname in setting and item.argval == name for item in instructions[first:])


@rule(torch.utils.checkpoint.checkpoint)
def interpret_checkpoint(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    """A region that is computed again when the backward first needs it."""
    if not interpreter.trace.settings.allows(RECOMPUTES):
        raise Break("a checkpoint runs its function again in the backward", 'use backend="aten"')
    guard_hooks_allowed(interpreter)
    interpreter.state(_Regions).add(interpreter, args[0] if args else None)
    kwargs = _with_the_default(interpreter, torch.utils.checkpoint.checkpoint, kwargs)
    if kwargs.get("use_reentrant") is not True or len(args) < 2 or kwargs.keys() - _TAKEN:
        return interpreter.call_torch(torch.utils.checkpoint.checkpoint, args, kwargs)
    # The reentrant kind runs a backward of its own inside of the backward, for the same gradients as the other kind.
    # Where no argument requires a gradient it records nothing, whatever the function uses beside its arguments.
    if torch.is_grad_enabled() and any(isinstance(item, torch.Tensor) and item.requires_grad for item in args[1:]):
        settings = {**kwargs, "use_reentrant": False}
        result = interpreter.call_torch(torch.utils.checkpoint.checkpoint, args, settings)
        _refuse_containers(result)
        return _returned(interpreter, result, args[1:])
    with torch.no_grad():
        result = interpreter.call(args[0], args[1:], {})
    return _returned(interpreter, result, args[1:])


class _Output(torch.autograd.Function):
    """A result without a gradient of its own; as any result of the reentrant kind's node, it requires one."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, result: Sequence[torch.Tensor]) -> torch.Tensor:
        return result[0]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None]:
        return None, None


def _returned(interpreter: TracingInterpreter, result: Any, args: Arguments) -> Any:
    """The results of a node of autograd: a tuple of Python's, with views of what the region returns as it was given it."""
    anchor = next((item for item in args if isinstance(item, torch.Tensor) and item.requires_grad), None)

    def one(part: Any) -> Any:
        if any(part is item for item in args if isinstance(item, torch.Tensor)):
            part = interpreter.call_torch(torch.Tensor.view_as, (part, part), {})
        if anchor is None or not torch.is_grad_enabled() or not isinstance(part, torch.Tensor) or part.requires_grad:
            return part
        is_number = part.is_floating_point() or part.is_complex()
        return interpreter.call_torch(_Output.apply, (anchor, [part]), {}) if is_number else part

    return tuple(map(one, result)) if isinstance(result, tuple) else one(result)


def _refuse_containers(result: Any) -> None:
    """The reentrant kind gives no gradient to tensors that its function returns in a container or in another object."""
    parts = result if isinstance(result, tuple) else (result,)
    if not all(part is None or isinstance(part, (torch.Tensor, int, float, complex, str)) for part in parts):
        raise Break(
            "a reentrant checkpoint returns tensors in an object", "pass use_reentrant=False, or return a tuple"
        )


@rule(torch.utils.checkpoint.checkpoint_sequential)
def _checkpoint_sequential(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    kwargs = _with_the_default(interpreter, torch.utils.checkpoint.checkpoint_sequential, kwargs)
    if len(args) != 3 or type(args[1]) is not int or type(kwargs.get("use_reentrant")) is not bool:
        raise Break("checkpoint_sequential is called without use_reentrant", "pass use_reentrant=False")
    functions, segments, value = args
    if isinstance(functions, torch.nn.Sequential):
        functions = interpreter.call(interpreter.load_attribute(functions, "children"), (), {})
    layers = interpreter.drain(functions)

    def run(start: int, stop: int, value: Any) -> Any:
        for layer in layers[start:stop]:
            value = interpreter.call(layer, (value,), {})
        return value

    size, begun = len(layers) // segments, 0
    for start in range(0, size * (segments - 1), size):
        begun = start + size
        value = interpret_checkpoint(interpreter, (functools.partial(run, start, begun), value), kwargs)
    return run(begun, len(layers), value)


def _with_the_default(interpreter: TracingInterpreter, function: Any, kwargs: Keywords) -> Keywords:
    """The keywords with ``use_reentrant=True`` where nothing is said and torch takes that, with its warning."""
    inside = inspect.unwrap(function), private_checkpoints.CHECKPOINT_INSIDE
    constants = [item for each in inside for item in each.__code__.co_consts]
    warning = next((item for item in constants if type(item) is str and item.startswith(_WARNING)), None)
    if kwargs.get("use_reentrant") is not None or warning is None:
        return kwargs
    interpreter.call(warnings.warn, (warning,), {})
    return {**kwargs, "use_reentrant": True}
