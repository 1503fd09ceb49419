"""The program: the torch calls of a traced function in order, replayable on other tensors.

The ATen graph has lost what autograd needs (a user's ``detach``, ``no_grad`` regions, custom ``autograd.Function``
boundaries); the program has it. Replaying it on real tensors is eager, without the user's Python around it.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from dovetail.errors import CaptureError
from dovetail.guards.ambient import autocast_state, set_autocast
from dovetail.guards.ambient_change import autocast_nesting
from dovetail.torch_private import autograd as private_autograd
from dovetail.torch_private import sizes as private_sizes
from dovetail.torch_private import state as private_state
from dovetail.torch_private import tensors as private_tensors
from dovetail.trace.overrides import RefusedOperatorError

_GET_DATA, _SET_DATA = torch.Tensor.data.__get__, torch.Tensor.data.__set__  # type: ignore[attr-defined]
# Their results have another derivative than the operators that compute them, or none.
_CUTS = frozenset({"detach", "detach_", "_set_data", "set_", "apply", "custom_function_call", "_make_subclass"})
# Their effect is on the backward, where the tape records nothing.
HOOKS = frozenset({"register_hook", "register_post_accumulate_grad_hook"})
USES_FUNC, HOOKS_SAVED = "it uses torch.func", "saved-tensor hooks are set in it"


@dataclass(frozen=True)
class Slot:
    """A tensor of the program by its number; inputs come first."""

    number: int


@dataclass(frozen=True)
class NumberSlot:
    """A number that follows from the sizes of the inputs, by its place among the program's numbers, or that a replay reads of
    the values that it has by then.
    """

    index: int
    read: Callable[[Mapping[Any, Any]], Any] | None = None


AutocastState = tuple[tuple[str, bool, torch.dtype], ...]


@contextlib.contextmanager
def _autocast(state: AutocastState) -> Iterator[None]:
    """Autocast switched as it was when a call was recorded."""
    before = autocast_state()
    with contextlib.ExitStack() as stack:
        if before != state:
            stack.callback(set_autocast, before)
            set_autocast(state)
        yield


@dataclass(frozen=True)
class ProgramCall:
    """One torch call: results go to ``results`` (the flat tensors of what it returned)."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: tuple[int, ...]
    grad_enabled: bool
    autocast: AutocastState


@dataclass(frozen=True)
class Program:
    """``run(inputs)`` replays the calls. ``refusals`` say why it cannot be; a hook that runs in the backward may add one.

    ``numbers`` computes the numbers among the arguments of the calls from the sizes of the inputs. ``cuts``: a call of it is no
    function of its arguments for autograd, so that its operators alone have other derivatives.
    """

    inputs: tuple[int, ...]
    calls: tuple[ProgramCall, ...]
    outputs: tuple[int, ...]
    refusals: Sequence[str] = ()
    numbers: Callable[[Sequence[Any]], tuple[Any, ...]] | None = None
    cuts: bool = False

    def run(self, inputs: list[torch.Tensor], sizes_of: Sequence[Any] | None = None) -> list[torch.Tensor]:
        """The output tensors, computed by the same torch calls on other inputs; numbers are read from ``sizes_of``."""
        values: dict[Any, Any] = dict(zip(self.inputs, inputs, strict=True))
        if self.numbers is not None:
            for index, number in enumerate(self.numbers(inputs if sizes_of is None else sizes_of)):
                values[NumberSlot(index)] = number
        outside, nesting = autocast_state(), autocast_nesting()
        was_inside = False
        for call in self.calls:
            is_inside = call.autocast != outside
            if was_inside and not is_inside and not nesting:
                # As at the end of the outermost autocast block: what was cast there may be written to from now on.
                torch.clear_autocast_cache()
            was_inside = is_inside
            args = tuple(_fill(item, values) for item in call.args)
            kwargs = {key: _fill(item, values) for key, item in call.kwargs.items()}
            with torch.set_grad_enabled(call.grad_enabled), _autocast(call.autocast):
                result = call.function(*args, **kwargs)
            values.update(zip(call.results, _tensors(result), strict=True))
        if was_inside and not nesting:
            torch.clear_autocast_cache()
        return [values[number] for number in self.outputs]


def _fill(value: Any, values: Mapping[Any, Any]) -> Any:
    if isinstance(value, NumberSlot):
        return values[value] if value.read is None else value.read(values)
    if isinstance(value, Slot):
        return values[value.number]
    kind = type(value)
    if kind is slice:
        return slice(_fill(value.start, values), _fill(value.stop, values), _fill(value.step, values))
    if kind in (list, tuple):
        return kind(_fill(item, values) for item in value)
    return {key: _fill(item, values) for key, item in value.items()} if kind is dict else value


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in _tensors(item)]
    return []


def base_of(view: torch.Tensor) -> torch.Tensor:
    """The tensor that a view is a view of, as a call of a program.

    >>> base_of(torch.ones(2)[:1])
    tensor([1., 1.])
    """
    base = view._base
    if base is None:
        raise CaptureError("a tensor that was a view when the program was captured is none when it runs again")
    return base


@dataclass
class Recorder:
    """Collects the calls of one trace, and the ``tensors`` by their slots."""

    calls: list[ProgramCall] = field(default_factory=list)
    tensors: list[Any] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    cuts: bool = False
    _numbers: dict[int, int] = field(default_factory=dict)
    _paused: int = 0
    _symbolic: list[Any] = field(default_factory=list)

    def refuse_replay(self, reason: str) -> None:
        """Say why the program cannot be replayed call by call; the first reason counts."""
        self.refusals.append(reason)

    def number(self, tensor: torch.Tensor) -> int:
        """The slot number of a tensor, a new one if it has none."""
        found = self._numbers.get(id(tensor))
        if found is None:
            found = self._numbers[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
        return found

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing in the block."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def record(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        """Add one call."""
        name = getattr(function, "__name__", "")
        if name in HOOKS and not self._paused:
            self.refuse_replay("it registers a hook on a tensor")
        self.cuts |= name in _CUTS or function == _GET_DATA
        results = _tensors(result)
        # Reading an attribute such as .grad is no operation; what was read is a value of the capture, not of the replay.
        if self._paused or (not results and (result is not None or name == "__get__")):
            return
        if any(map(private_tensors.is_functorch_wrapped, (*results, *_tensors(args), *_tensors(dict(kwargs))))):
            self.refuse_replay(USES_FUNC)
            return
        if private_autograd.saved_tensor_hooks_change_values():
            self.refuse_replay(HOOKS_SAVED)
        if results and private_state.has_default_device(function):
            # A replay may run in a thread of the engine, to which a default device does not go over.
            kwargs = {**kwargs, "device": results[0].device}
        stored_args = tuple(self._store(item) for item in args)
        stored_kwargs = {key: self._store(item) for key, item in kwargs.items()}
        numbers = tuple(self.number(tensor) for tensor in results)
        self.calls.append(
            ProgramCall(function, stored_args, stored_kwargs, numbers, torch.is_grad_enabled(), autocast_state())
        )

    def _store(self, value: Any) -> Any:
        if private_sizes.is_symbolic(value):
            read = next(filter(None, (rule(self, value) for rule in LATE_NUMBERS)), None)
            self._symbolic += [value] if read is None else []
            return NumberSlot(len(self._symbolic) - 1, read)
        if isinstance(value, torch.Tensor):
            if id(value) not in self._numbers:
                self.refuse_replay("a tensor in it was made by code that is no torch call")
            return Slot(self.number(value))
        if isinstance(value, torch.Generator):
            self.refuse_replay("it draws from a generator of its own")
        kind = type(value)
        if kind is types.FunctionType and not (value.__module__ or "").startswith("torch."):
            self.refuse_replay("a function of the program is handed to torch")
        if kind is slice:
            return slice(self._store(value.start), self._store(value.stop), self._store(value.step))
        if kind in (list, tuple, torch.Size):
            return (tuple if kind is torch.Size else kind)(self._store(item) for item in value)
        return {key: self._store(item) for key, item in value.items()} if kind is dict else value

    def _record_base(self, base: torch.Tensor) -> bool:
        """Record how a tensor is found again that torch made no call for, but a view of it (autograd's formulas do)."""
        for number, known in enumerate(self.tensors):
            if known._base is base:
                state = torch.is_grad_enabled(), autocast_state()
                self.calls.append(ProgramCall(base_of, (Slot(number),), {}, (self.number(base),), *state))
                return True
        return False

    def finish(
        self,
        inputs: list[torch.Tensor],
        outputs: tuple[torch.Tensor, ...],
        numbers: Callable[[Sequence[Any]], Callable[[Sequence[Any]], tuple[Any, ...]]],
    ) -> Program:
        """The program with these inputs and outputs; ``numbers`` makes expressions over sizes into a function of inputs."""
        compute = None
        if self._symbolic:
            try:
                compute = numbers([private_sizes.expression_of(item) for item in self._symbolic])
            except CaptureError as error:
                self.refuse_replay(error.what)
        for tensor in outputs:
            if id(tensor) not in self._numbers and not self._record_base(tensor):
                self.refuse_replay("an output of it was made by code that is no torch call")
        return Program(
            tuple(self.number(tensor) for tensor in inputs),
            tuple(self.calls),
            tuple(self.number(tensor) for tensor in outputs),
            self.refusals,
            compute,
            self.cuts,
        )


#: ``rule(function)`` says which function a torch call means.
RESOLVE: list[Callable[[Any], Any]] = []
#: ``rule(recorder, number)`` says how a replay reads a number that does not follow from the inputs' sizes.
LATE_NUMBERS: list[Callable[[Recorder, Any], Callable[[Mapping[Any, Any]], Any] | None]] = []


class RecordingMode(TorchFunctionMode):
    """Hands every torch call of the traced program to a :class:`Recorder`; ``before_call`` is told that one begins."""

    def __init__(self, recorder: Recorder, before_call: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.recorder = recorder
        self.before_call = before_call

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the call and record it. Raises :class:`RefusedOperatorError`."""
        if function == _SET_DATA:
            raise RefusedOperatorError(".data of a tensor is set", advice="set it outside of the compiled function")
        self.before_call()
        for resolve in RESOLVE:
            function = resolve(function)
        result = function(*args, **(kwargs or {}))
        self.recorder.record(function, args, kwargs or {}, result)
        return result
