"""Branches on the data of tensors: ``if step > 5``, ``if labels.max() >= vocabulary: raise ValueError(...)``.

Torch cannot trace them. Two ways are open without a graph break:

- **Replay.** In torch's own code a condition is often computed by a few operators from small tensors that were there before
  the call: RAdam asks whether its count of steps is large enough, a transformer whether its mask is causal. A guard runs
  these operators on the tensors of each call and compares the answer. There is one entry for each way, not one for each value.
  So it is with the user's own branches on flags, tensors of one truth value, and on numbers that an object keeps in a tensor
  (``if not self.is_initialised: ...``, ``if self.steps < 100: ...``), as long as the answers do not change again and again.
- **Assertion.** Where one way only raises, the graph takes the other one and checks, as one of its operators, that this was right.
  Where it was not, nothing has been written yet: the call runs eagerly, and raises in the user's own line.

>>> import dovetail
>>> def f(x):
...     if x.min() < 0:
...         raise ValueError("a negative number")
...     return x.sqrt()
>>> dovetail.compile(f, fullgraph=True, backend="aten")(torch.tensor([4.0]))
tensor([2.])
"""

from __future__ import annotations

import dis
import functools
import operator
import types
import weakref
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.errors import CaptureError, OutgrownError
from dovetail.frontend.code.frame import decode
from dovetail.frontend.outputs import number_as_tensor
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Jump, branch_rule, operator_rule
from dovetail.frontend.values.values import Values
from dovetail.guards import ComputedSource, Equals
from dovetail.guards.guard import is_argument
from dovetail.guards.source import AttributeSource, InstanceDictSource, Source
from dovetail.rules.sizes.exact_numbers import PYTHON_ONLY, gives_a_float, is_exact_only_in_python, real_power
from dovetail.torch_private import calls as private_calls
from dovetail.torch_private import numbers as private_numbers
from dovetail.torch_private import operators as private_operators
from dovetail.torch_private import sizes as private_sizes
from dovetail.torch_private import tensors as private_tensors
from dovetail.torch_private import tracing as private_tracing
from dovetail.trace import ASSUMPTION, Trace, TracedInput
from dovetail.trace.settings import DATA_GUARDS

# The user's own branches can be written in another way, and would hold the graph to answers that change at every call: of these
# only those on flags are followed.
_FOLLOWED = ("torch.optim.", "torch.amp.", "torch.nn.", "torch.ao.")
_MOST_ELEMENTS = 64
_MOST_NODES = 100
_MOST_ANSWERS = 16
_MOST_CHANGES = 2
_MOST_INSTRUCTIONS = 200
_UNKNOWN = object()
_ERRORS = (ArithmeticError, TypeError, ValueError, RuntimeError, OutgrownError)
_REPLAYS: weakref.WeakValueDictionary[str, Replay] = weakref.WeakValueDictionary()
Step = tuple[Any, tuple[Any, ...], dict[str, Any]]


def follows_branches(interpreter: TracingInterpreter) -> bool:
    """Whether the code that runs now is torch's own, and its branches are followed with guards."""
    frames = interpreter.frames
    return bool(frames) and str(frames[-1].globals.get("__name__")).startswith(_FOLLOWED)


# --- replay -----------------------------------------------------------------------------------------------------------


@branch_rule
def follow(interpreter: TracingInterpreter, condition: Any, jump: Jump | None) -> Any:
    """The truth of a condition that small tensors decide, with a guard that computes it at each call.

    A condition of the user's own is followed where nothing that the call was given decides it, or flags alone.
    """
    values, trace = interpreter.values, interpreter.trace
    end, is_torchs = _node_of(trace, condition), follows_branches(interpreter)
    # A hook asks when the backward runs, and what it reads may have changed since the guards were checked.
    is_guarded = trace.settings.allows(DATA_GUARDS) and not values.in_backward
    inputs = {item.node: item for item in trace.inputs if is_torchs or (is_guarded and _is_flag(values, item))}
    constants = vars(trace.tracer.root)
    order = None if end is None else _order(end, inputs, constants)
    if order is None:
        return NotImplemented
    read = [inputs[node] for node in order if node in inputs]
    steps = _steps(order, [item.node for item in read], constants)
    replay = Replay.shared(tuple((item.real.dtype, item.real.shape) for item in read), steps)
    answer = replay.compute([item.real for item in read])
    if answer is None:
        return NotImplemented
    if read:
        sources = tuple(values.guards.tensor_source(item.index) for item in read)
        text = f"the branch on {', '.join(source.name for source in sources)}"
        if not (is_torchs or trace.settings.one_graph) and _changes_often(trace, (text, replay), answer):
            return NotImplemented
        values.guard(ComputedSource(replay, sources, text), Equals(answer), "a branch depends on it")
    return answer


def _is_flag(values: Values, item: TracedInput) -> bool:
    """Whether a tensor is one truth value, or one number that an object keeps: a module knows by it that it was initialised, or
    counts its steps, and the answers that it gives hardly ever change.
    """
    source = values.guards.tensor_source(item.index)
    is_kept = item.real.dtype == torch.bool or not is_argument(source) or _is_of_object(source)
    return item.real.numel() == 1 and is_kept and _is_small(item.real)


def _is_of_object(source: Source) -> bool:
    """Whether a source goes through an attribute (``model.is_initialised`` of an argument); a module is often one."""
    while (parent := source.parent) is not None:
        if isinstance(source, (AttributeSource, InstanceDictSource)):
            return True
        source = parent
    return False


def _changes_often(trace: Trace, question: Hashable, answer: bool) -> bool:
    """Whether the answers to a question have differed from capture to capture, more than from untrue to true and back."""
    last, changes = trace.settings.observed.get(question, (answer, 0))
    changes += last != answer
    trace.findings.observed[question] = answer, changes
    return bool(changes > _MOST_CHANGES)


def constant_numbers(trace: Trace, value: torch.Tensor) -> Any:
    """``value.tolist()`` of a few numbers that nothing decides which the call was given; None for other tensors.

    Raises :class:`CaptureError` for a tensor that the trace has not made.
    """
    if (
        private_sizes.has_symbols(value)
        or private_tensors.is_functorch_wrapped(value)
        or value.numel() > _MOST_ELEMENTS
    ):
        return None
    constants = vars(trace.tracer.root)
    order = _order(trace.node_of(value), {}, constants)
    try:
        with private_tracing.disable_current_modes(), private_calls.no_torch_function():
            return None if order is None else _run(_steps(order, (), constants), ()).tolist()
    except _ERRORS:
        return None


def _steps(
    order: Sequence[torch.fx.Node], read: Sequence[torch.fx.Node], constants: Mapping[str, Any]
) -> tuple[Step, ...]:
    """The nodes but for those that are ``read``, as calls with the values by their numbers."""
    computed: dict[torch.fx.Node, Any] = {node: Computed(at) for at, node in enumerate(read)}
    steps: list[Step] = []
    for node in order:
        if node not in computed:
            function, given, keywords = _call_of(node, constants)
            args, kwargs = torch.fx.node.map_arg((given, keywords), computed.__getitem__)
            steps.append((function, args, kwargs))
            computed[node] = Computed(len(computed))
    return tuple(steps)


def _run(steps: Sequence[Step], tensors: Sequence[torch.Tensor]) -> Any:
    """The value of the last step."""
    with torch.no_grad():
        values: list[Any] = [tensor.detach() for tensor in tensors]
        for function, args, kwargs in steps:
            given = [_filled(item, values) for item in args]
            values.append(function(*given, **{name: _filled(item, values) for name, item in kwargs.items()}))
    return values[-1]


class Replay:
    """Operators of a graph, run again on real tensors; ``facts`` are the types and shapes of these.

    The state of all parameters is mostly the same, so the last answers are remembered by the tensors' contents.
    """

    #: A guard with this mark is about the numbers in tensors, see :meth:`dovetail.guards.GuardSet.about_data`.
    reads_data = True

    def __init__(self, facts: tuple[tuple[torch.dtype, torch.Size], ...], steps: tuple[Step, ...]) -> None:
        self.facts = facts
        self.steps = steps
        self._answers: dict[bytes, object] = {}

    @classmethod
    def shared(cls, facts: tuple[tuple[torch.dtype, torch.Size], ...], steps: tuple[Step, ...]) -> Replay:
        """One for all branches that are computed in the same way."""
        key = repr((facts, steps))
        found = _REPLAYS.get(key)
        if found is None:
            found = _REPLAYS[key] = cls(facts, steps)
        return found

    def __call__(self, *tensors: Any) -> bool | None:
        """The truth of the last value; None where the tensors are of another kind or it cannot be computed."""
        for tensor, (dtype, shape) in zip(tensors, self.facts, strict=True):
            if not _is_small(tensor) or tensor.dtype != dtype or tensor.shape != shape:
                return None
        try:
            with private_calls.no_torch_function():
                content = b"".join([tensor.numpy().tobytes() for tensor in tensors])
        except (RuntimeError, TypeError):
            # A dtype that numpy does not know, or a mode of the caller that is against it.
            return self.compute(tensors)
        answer = self._answers.get(content, _UNKNOWN)
        if answer is _UNKNOWN:
            if len(self._answers) >= _MOST_ANSWERS:
                self._answers.clear()
            answer = self._answers[content] = self.compute(tensors)
        return answer  # type: ignore[return-value]

    def compute(self, tensors: Sequence[torch.Tensor]) -> bool | None:
        """The truth of the last value, with nothing remembered; None where it cannot be computed."""
        try:
            with private_tracing.disable_current_modes(), private_calls.no_torch_function():
                return bool(_run(self.steps, tensors))
        except _ERRORS:
            return None


@dataclass(frozen=True)
class Computed:
    """Stands for a value by its number in the order in which they are computed."""

    index: int


@dataclass(frozen=True, repr=False)
class Constant:
    """A tensor that the graph holds."""

    value: torch.Tensor

    def __repr__(self) -> str:
        with private_tracing.disable_current_modes(), private_calls.no_torch_function(), torch.no_grad():
            return f"Constant({self.value.dtype}, {self.value.tolist()!r})"

    def __call__(self) -> torch.Tensor:
        """The tensor."""
        return self.value


@dataclass(frozen=True)
class FirstOf:
    """An operator that gives a list, of which the first item is taken."""

    function: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The first item of the result."""
        return self.function(*args, **kwargs)[0]


def _filled(item: Any, values: list[Any]) -> Any:
    if type(item) is Computed:
        return values[item.index]
    return [_filled(inner, values) for inner in item] if isinstance(item, (list, tuple)) else item


def _node_of(trace: Trace, condition: Any) -> torch.fx.Node | None:
    try:
        if not isinstance(condition, torch.Tensor):
            return private_numbers.node_of_number(condition, trace.tracer)
        is_one = condition.numel() == 1 and not private_sizes.has_symbols(condition)
        return trace.node_of(condition) if is_one else None
    except CaptureError:
        return None


def _order(
    end: torch.fx.Node, inputs: Mapping[torch.fx.Node, Any], constants: Mapping[str, Any]
) -> list[torch.fx.Node] | None:
    """The nodes that a node is computed by, itself last; None if one of them cannot be run again."""
    order: list[torch.fx.Node] = []
    seen: set[torch.fx.Node] = set()
    stack = [(end, False)]
    while stack:
        node, is_left = stack.pop()
        if is_left:
            order.append(node)
        elif node not in seen:
            is_usable = _is_small(inputs[node].real) if node in inputs else _is_pure(node, constants)
            if len(seen) == _MOST_NODES or not is_usable:
                return None
            seen.add(node)
            stack.append((node, True))
            given: list[torch.fx.Node] = []
            if node not in inputs:
                torch.fx.node.map_arg(_call_of(node, constants)[1:], given.append)
            stack += [(item, False) for item in given]
    return order


def _is_small(real: Any) -> bool:
    """Whether this is a tensor on the CPU of few elements, and no parameter: those change at every call."""
    plain = type(real) is torch.Tensor and real.layout is torch.strided and real.device.type == "cpu"
    return plain and not real.requires_grad and real.numel() <= _MOST_ELEMENTS


def _is_pure(node: torch.fx.Node, constants: Mapping[str, Any]) -> bool:
    """Whether a node gives the same for the same."""
    if node.op == "get_attr":
        return _is_small(constants.get(str(node.target)))
    target: Any = node.args[0].target if _is_item_of_list(node) else node.target  # type: ignore[union-attr]
    if isinstance(target, private_operators.OpOverload):
        random = torch.Tag.nondeterministic_seeded in target.tags
        # An operator of a library may count its calls, and one of Dovetail's runs code of the program.
        is_torchs = target.namespace in ("aten", "prims")
        return node.op == "call_function" and is_torchs and not random and not target._schema.is_mutable
    return node.op == "call_function" and (target in PYTHON_ONLY or target in (real_power, operator.getitem))


def _is_item_of_list(node: torch.fx.Node) -> bool:
    """Whether a node is an item of an operator's result that does the same to each item of its lists by itself."""
    made = node.args[0] if node.target is operator.getitem else None
    target = made.target if isinstance(made, torch.fx.Node) else None
    return isinstance(target, private_operators.OpOverload) and str(target._schema.name).startswith("aten::_foreach_")


def _call_of(node: torch.fx.Node, constants: Mapping[str, Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The function that gives a node's value, and its arguments. An item of a list is computed without the other items."""
    if node.op == "get_attr":
        return Constant(constants[str(node.target)]), (), {}
    if not _is_item_of_list(node):
        return node.target, node.args, node.kwargs
    made, position = node.args
    assert isinstance(made, torch.fx.Node) and isinstance(position, int)

    def one(item: Any) -> Any:
        return [item[position]] if isinstance(item, (list, tuple)) else item

    keywords = {name: one(item) for name, item in made.kwargs.items()}
    return FirstOf(made.target), tuple(one(item) for item in made.args), keywords


@operator_rule(max, min)
def _extreme(interpreter: TracingInterpreter, function: Any, numbers: tuple[Any, ...]) -> Any:
    """The larger or smaller of numbers made of data, as comparisons choose it."""
    is_float = is_exact_only_in_python(function, numbers) and gives_a_float(function, numbers)
    is_whole = all(type(number) in (int, torch.SymInt) for number in numbers)
    if is_whole and any(map(private_sizes.is_data_number, numbers)):
        return functools.reduce(torch.sym_max if function is max else torch.sym_min, numbers)
    if is_float or not follows_branches(interpreter):
        return NotImplemented
    compare = operator.gt if function is max else operator.lt
    chosen, *rest = numbers
    for number in rest:
        chosen = number if interpreter.truth(interpreter.operate(compare, number, chosen)) else chosen
    return chosen


# --- assertion --------------------------------------------------------------------------------------------------------


def may_assert(interpreter: TracingInterpreter) -> bool:
    """Whether the graph may check now what it was captured for: it is the forward's, and can run eagerly instead."""
    trace = interpreter.trace
    return (
        trace.phase == "forward" and trace.settings.shapes.data_sizes != "break" and not interpreter.values.in_backward
    )


def assert_in_graph(condition: torch.Tensor, message: str) -> None:
    """Have the graph check that a traced tensor is true; where it is not, the call runs eagerly."""
    with private_calls.no_torch_function(), torch.no_grad():
        torch.ops.aten._assert_async.msg(condition.detach().to("cpu").bool(), f"{ASSUMPTION}{message}")


@branch_rule
def take_way_without_raise(interpreter: TracingInterpreter, condition: Any, jump: Jump | None) -> Any:
    """The truth with which the program goes on, checked by the graph, where it raises otherwise."""
    if jump is None or not may_assert(interpreter):
        return NotImplemented
    frame = jump.frame
    # From Python 3.13 on, the instruction before the jump may ask.
    jumps = frame.decoded.instructions[frame.position].opname.startswith("POP_JUMP")
    jumping, staying = _only_raises(frame.code, jump.target), _only_raises(frame.code, frame.position + 2 - jumps)
    if jumping is staying:
        return NotImplemented
    truth = jump.wanted if staying else not jump.wanted
    with private_calls.no_torch_function(), torch.no_grad():
        # A number goes back into a tensor: what the shape environment learns of one, it would put in its place.
        value = condition.detach() if isinstance(condition, torch.Tensor) else number_as_tensor(condition)
        # The user's line itself does not go into it: a backend may put the message into a string literal of C++.
        message = f"the check in line {frame.line()} does not raise"
        assert_in_graph(value if truth else value.bool().logical_not(), message)
    return truth


@functools.lru_cache(maxsize=4096)
def _only_raises(code: types.CodeType, start: int) -> bool:
    """Whether all ways from an instruction on end in a ``raise``, without a loop."""
    decoded = decode(code)
    seen: set[int] = set()
    waiting = [start]
    while waiting:
        position = waiting.pop()
        if position in seen:
            continue
        seen.add(position)
        if position >= len(decoded.instructions) or len(seen) > _MOST_INSTRUCTIONS:
            return False
        instruction = decoded.instructions[position]
        name = instruction.opname
        if name == "RAISE_VARARGS":
            continue
        if name.startswith(("RETURN", "YIELD", "SEND", "RERAISE", "JUMP_BACKWARD", "FOR_ITER")):
            return False
        if instruction.opcode in dis.hasjrel or instruction.opcode in dis.hasjabs:
            target = decoded.index_of[instruction.argval]
            if target <= position:
                return False
            waiting.append(target)
            if name == "JUMP_FORWARD":
                continue
        waiting.append(position + 1)
    return True
