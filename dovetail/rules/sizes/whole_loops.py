"""``for i in range(n)`` over a symbolic size, as one call: a recurrence along a sequence, written in Python.

Unrolled, each length is a graph of its own; with a graph break, each round costs a check of its guards. Where the body does
nothing but compute with tensors, the whole loop is one call with the sizes of its results known
(:mod:`dovetail.trace.sized`), and runs for real, with autograd around it, when the graph runs.

What a body may do is decided twice. Its bytecode has no jumps, and calls torch's own functions and methods. And all of its rounds
run once without values, on the meta device, watched: random operators, tensors of another device and sizes that change from
round to round are refused, and what it writes to is found.
"""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.frontend.code.frame import Frame
from dovetail.frontend.code.liveness import live_locals
from dovetail.frontend.instructions.shared import read_variable
from dovetail.frontend.interpreter.call_tables import IMPURE_TORCH
from dovetail.frontend.interpreter.machine import Machine
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.values.leaves import is_leaf_value
from dovetail.rules.sizes.recurrent_networks import SizedFunction, call_sized
from dovetail.torch_private import sizes as private_sizes
from dovetail.torch_private import state as private_state
from dovetail.torch_private import tensors as private_tensors
from dovetail.torch_private import tracing as private_tracing
from dovetail.torch_private import trees as private_trees

_PLAIN = frozenset(
    {
        *("NOP", "PUSH_NULL", "PRECALL", "CALL", "KW_NAMES", "CALL_KW", "LOAD_CONST", "COPY", "SWAP", "POP_TOP"),
        *("BINARY_OP", "BINARY_SUBSCR", "BINARY_SLICE", "STORE_SUBSCR", "STORE_SLICE", "BUILD_SLICE", "UNARY_NEGATIVE"),
        *("BUILD_TUPLE", "BUILD_LIST", "COMPARE_OP", "UNPACK_SEQUENCE"),
    }
)
_LOADS = frozenset({"LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_FAST_LOAD_FAST", "LOAD_FAST_BORROW"})
_STORES = frozenset({"STORE_FAST", "STORE_FAST_STORE_FAST"})
_TENSOR_ATTRIBUTES = frozenset({"dtype", "device", "shape", "ndim", "T", "mT", "H", "mH"})
# Methods in C that do something else than compute.
_NO_COMPUTATION = frozenset({"data_ptr", "untyped_storage", "storage", "tolist", "numpy", "item", "record_stream"})
_MOST_ROUNDS_WATCHED = 4096


@dataclass(frozen=True)
class _Body:
    """The body of a loop: where it stands in the code, and the local variables that it reads first, and writes."""

    code: types.CodeType
    head: int
    end: int
    read: tuple[str, ...]
    written: frozenset[str]
    counter: str


class _RefusedError(Exception):
    """A loop is not one that runs whole."""


def run_loop_whole(interpreter: TracingInterpreter, frame: Frame, start: Any, stop: Any, step: Any) -> bool:
    """Run the loop whose ``range`` is about to be made as one call; False where it is not one that can.

    Afterwards the variables of the frame are as after the loop.
    """
    is_counted = type(start) is int and start >= 0 and type(stop) is torch.SymInt and type(step) is int and step > 0
    if not is_counted or private_state.is_any_autocast_on():
        return False
    try:
        loop = _Loop(interpreter, frame, _body(interpreter, frame), start, stop, step)
    except _RefusedError:
        return False
    # Without a round Python leaves the variables as they were.
    if not stop > start:
        return False
    loop.run()
    return True


def _body(interpreter: TracingInterpreter, frame: Frame) -> _Body:
    """The loop after the ``range`` call at which a frame stands."""
    code, instructions = frame.code, frame.decoded.instructions
    head = frame.position + 1
    while instructions[head].opname in ("PRECALL", "CALL", "NOP"):
        head += 1
    if instructions[head].opname != "GET_ITER" or instructions[head + 1].opname != "FOR_ITER":
        raise _RefusedError
    head += 1
    exit_position = frame.decoded.index_of[instructions[head].argval]
    end = exit_position - 1
    back = instructions[end]
    if back.opname != "JUMP_BACKWARD" or frame.decoded.index_of[back.argval] != head:
        raise _RefusedError
    if any(entry.start < end and head < entry.end for entry in frame.decoded.exceptions):
        raise _RefusedError
    known: set[str] = set()
    read: dict[str, None] = {}
    current: Any = None
    if instructions[head + 1].opname != "STORE_FAST":
        raise _RefusedError
    for instruction in instructions[head + 1 : end]:
        name, argument = instruction.opname, instruction.argval
        following: Any = None
        if name in _STORES:
            known.update((argument,) if isinstance(argument, str) else argument)
        elif name in _LOADS:
            read.update(
                (item, None) for item in ((argument,) if isinstance(argument, str) else argument) if item not in known
            )
        elif name == "STORE_FAST_LOAD_FAST":
            known.add(argument[0])
            read.update((item, None) for item in argument[1:] if item not in known)
        elif name == "LOAD_GLOBAL":
            following = interpreter.load_global(frame, argument)
            is_number = type(following) in (int, float, bool)
            if (
                not is_number
                and not _is_torch_module(following)
                and not any(following is item for item in (min, max, len, abs))
            ):
                raise _RefusedError
        elif name in ("LOAD_ATTR", "LOAD_METHOD"):
            following = _attribute(interpreter, current, argument)
        elif name not in _PLAIN:
            raise _RefusedError
        current = following if isinstance(following, types.ModuleType) else None
    counter = instructions[head + 1].argval
    return _Body(code, head, exit_position, tuple(read), frozenset(known - {counter}), counter)


def _is_torch_module(value: object) -> bool:
    return isinstance(value, types.ModuleType) and value.__name__.split(".")[0] == "torch"


def _attribute(interpreter: TracingInterpreter, owner: Any, name: str) -> Any:
    """What is read from a module of torch, guarded; None for an attribute of a tensor."""
    if owner is None:
        method = getattr(torch.Tensor, name, None)
        is_method = isinstance(method, types.MethodDescriptorType) and name not in _NO_COMPUTATION
        if name not in _TENSOR_ATTRIBUTES and not is_method:
            raise _RefusedError
        return None
    value = interpreter.load_attribute(owner, name)
    is_function = isinstance(value, types.BuiltinFunctionType) and name not in IMPURE_TORCH
    is_functional = isinstance(value, types.FunctionType) and value.__globals__.get("__name__") == "torch.nn.functional"
    if not (is_function or is_functional or isinstance(value, torch.dtype) or _is_torch_module(value)):
        raise _RefusedError
    return value


def are_plain(values: Sequence[torch.Tensor]) -> bool:
    """Whether tensors are dense ones of one device that no transform looks after."""
    is_transformed = private_state.forward_ad_level() >= 0 or any(map(private_tensors.is_functorch_wrapped, values))
    is_dense = all(item.layout is torch.strided and not item.is_conj() and not item.is_neg() for item in values)
    devices = {item.device for item in values}
    return is_dense and not is_transformed and len(devices) == 1 and not any(map(private_tensors.is_wrapper, values))


class _Loop:
    """One loop at its place in a program."""

    def __init__(
        self, interpreter: TracingInterpreter, frame: Frame, body: _Body, start: int, stop: torch.SymInt, step: int
    ) -> None:
        self._interpreter = interpreter
        self._frame = frame
        self._body = body
        self._stop = stop
        live = live_locals(body.code)[body.end]
        names = sorted({*body.read, *(body.written & live)} - {body.counter})
        self._tensors: dict[str, torch.Tensor] = {}
        constants: dict[str, Any] = {}
        sizes: dict[str, torch.SymInt] = {}
        if body.counter in body.read:
            raise _RefusedError
        for name in names:
            if name not in frame.locals:
                raise _RefusedError
            value = read_variable(interpreter, frame, name)
            if isinstance(value, torch.Tensor):
                self._tensors[name] = value
            elif type(value) is torch.SymInt:
                sizes[name] = value
            elif is_leaf_value(value):
                constants[name] = value
            else:
                raise _RefusedError
        self._names = list(self._tensors)
        self._results = [name for name in names if name in body.written and name in live]
        if not all(name in self._tensors for name in self._results):
            raise _RefusedError
        places = {name: self._place(value) for name, value in {**sizes, "": stop}.items()}
        self._written: list[int] = []
        #: Of each result whether it requires a gradient: where one does, the call says so of all.
        self._depends: list[bool] = []
        self._rounds = _Rounds(
            body, frame.function, (start, step), tuple(self._names), tuple(self._results), constants, places
        )
        self._watch()

    def _place(self, size: torch.SymInt) -> tuple[int, int]:
        """An argument and a dimension of it that has this size at every call."""
        wanted = private_sizes.expression_of(size)
        for index, tensor in enumerate(self._tensors.values()):
            for dim, item in enumerate(tensor.shape):
                if private_sizes.is_symbolic(item) and private_sizes.expression_of(item) == wanted:
                    return index, dim
        raise _RefusedError

    def _watch(self) -> None:
        """Run the loop without values, to see what it does."""
        hint = private_sizes.hint
        values = list(self._tensors.values())
        if not are_plain(values) or hint(self._stop) > _MOST_ROUNDS_WATCHED:
            raise _RefusedError
        with_gradients = torch.is_grad_enabled()
        flags = [value.requires_grad and with_gradients for value in values]
        forms = [(tuple(map(hint, item.shape)), tuple(map(hint, item.stride())), item.dtype) for item in values]
        with private_tracing.disable_current_modes(), torch.set_grad_enabled(with_gradients):
            like = [torch.empty_strided(shape, steps, dtype=kind, device="meta") for shape, steps, kind in forms]
            # No leaves: a loop may write to what requires a gradient.
            given = [item.requires_grad_(flag).clone() for item, flag in zip(like, flags, strict=True)]
            memory = {private_tensors.storage_key(item.untyped_storage()): at for at, item in enumerate(given)}
            watch = Watch()
            try:
                with watch:
                    found = self._rounds.results(given)
            except Exception as error:
                raise _RefusedError from error
            written = [at for key, at in memory.items() if key in watch.written]
            if watch.is_refused or watch.draws:
                raise _RefusedError
            taken, results = set(memory), []
            for name, result in zip(self._results, found, strict=True):
                at = self._names.index(name)
                if result is given[at]:
                    # The same tensor as before the loop; what was written to it is another matter.
                    continue
                key = private_tensors.storage_key(result.untyped_storage())
                form = (result.shape, result.stride(), result.dtype, result.layout)
                expected = (like[at].shape, torch.empty_like(like[at]).stride(), like[at].dtype, torch.strided)
                if key in taken or form != expected:
                    raise _RefusedError
                taken.add(key)
                results.append(name)
                self._depends.append(result.requires_grad)
            self._depends += [given[at].requires_grad for at in written]
        self._written, self._results = written, results
        self._check_memory()

    def _check_memory(self) -> None:
        """What is written to shares its memory with nothing else that the loop reads."""
        values = list(self._tensors.values())
        keys = [private_tensors.storage_key(value.untyped_storage()) for value in values]
        if any(keys.count(keys[at]) > 1 for at in self._written):
            raise _RefusedError

    def run(self) -> None:
        """Record the call, and bring the variables to where they are after the loop."""
        rounds = _Rounds(
            self._rounds.body,
            self._rounds.function,
            self._rounds.steps,
            self._rounds.names,
            tuple(self._results),
            self._rounds.constants,
            self._rounds.places,
            tuple(self._written),
        )
        ends = [*(self._names.index(name) for name in self._results), *self._written]
        if ends:

            def sizes(*given: torch.Tensor) -> list[torch.Tensor]:
                return [given[at] for at in ends]

            function = SizedFunction(f"loop at line {self._frame.line()}", rounds, sizes)
            call, given = self._interpreter.call_torch, list(self._tensors.values())
            for at in self._written:
                # The call keeps what it is given for its derivative.
                given[at] = call(torch.clone, (given[at],), {})
            found = [
                value if depends or not value.requires_grad else call(torch.Tensor.detach, (value,), {})
                for value, depends in zip(call_sized(self._interpreter, function, given), self._depends, strict=True)
            ]
            for name, value in zip(self._results, found, strict=False):
                self._frame.locals[name] = value
            for at, value in zip(self._written, found[len(self._results) :], strict=True):
                call(torch.Tensor.copy_, (self._tensors[self._names[at]], value), {})
        start, step = self._rounds.steps
        last = self._stop - 1
        self._frame.locals[self._body.counter] = last if step == 1 else start + (last - start) // step * step


@dataclass(frozen=True, eq=False)
class _Rounds:
    """All rounds of a loop as a function of the tensors that its body reads."""

    body: _Body
    function: types.FunctionType
    steps: tuple[int, int]
    names: tuple[str, ...]
    wanted: tuple[str, ...]
    constants: Mapping[str, Any]
    places: Mapping[str, tuple[int, int]]
    written: tuple[int, ...] = ()

    def __call__(self, *given: torch.Tensor) -> list[torch.Tensor]:
        """The variables that live on, then what was written to; the arguments are left as they are."""
        own = [item.clone() if at in self.written else item for at, item in enumerate(given)]
        return [*self.results(own), *(own[at] for at in self.written)]

    def results(self, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The variables that live on."""
        sizes = {name: given[index].shape[dim] for name, (index, dim) in self.places.items()}
        rounds = sizes.pop("")
        variables = {**self.constants, **sizes, **dict(zip(self.names, given, strict=True))}
        frame = Frame(self.function, variables)
        machine = Machine()
        for number in range(self.steps[0], rounds, self.steps[1]):
            frame.stack = [None, number]
            machine.run_between(frame, self.body.head + 1, self.body.head)
        return [frame.locals[name] for name in self.wanted]


class Watch(private_tracing.TorchDispatchMode):  # type: ignore[misc]
    """Notes which memory is written to, on which devices, and whether an operator draws random numbers or asks for values."""

    def __init__(self) -> None:
        super().__init__()
        self.written: set[int] = set()
        self.devices: set[str] = set()
        self.draws = False
        self.is_refused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See :class:`torch.utils._python_dispatch.TorchDispatchMode`."""
        kwargs = kwargs or {}
        refused = {torch.Tag.data_dependent_output, torch.Tag.inplace_view}
        self.draws = self.draws or torch.Tag.nondeterministic_seeded in func.tags
        self.is_refused = self.is_refused or not refused.isdisjoint(func.tags)
        self.devices |= {
            item.device.type for item in private_trees.tree_leaves((args, kwargs)) if isinstance(item, torch.Tensor)
        }
        for position, argument in enumerate(func._schema.arguments):
            if argument.is_write:
                value = args[position] if position < len(args) else kwargs.get(argument.name)
                leaves = [item for item in private_trees.tree_leaves(value) if isinstance(item, torch.Tensor)]
                self.written.update(private_tensors.storage_key(item.untyped_storage()) for item in leaves)
        return func(*args, **kwargs)
