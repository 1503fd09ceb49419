"""Branches of torch's optimizers on small tensors of their state: a guard computes which way the branch goes.

RAdam asks whether its count of steps is large enough, ``AveragedModel`` whether anything was averaged yet. What they ask was
computed from tensors that were there before the call, by a few operators of the graph so far. The guard runs these operators
on the tensors of the call and compares the answer, so that there is one entry for each way, not one for each value.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.errors import CaptureError, OutgrownError
from dovetail.frontend.sizes.numbers import PYTHON_ONLY
from dovetail.guards import ComputedSource, Equals
from dovetail.rules.torch.known_truth import is_pure, is_small
from dovetail.torch_private import calls as private_calls
from dovetail.torch_private import operators as private_operators
from dovetail.torch_private import sizes as private_sizes
from dovetail.torch_private import tracing as private_tracing
from dovetail.trace import Trace
from dovetail.trace.python_numbers import real_power

_MOST_NODES = 64
_FOLLOWED = ("torch.optim.", "torch.amp.")
_MOST_ANSWERS = 16
_UNKNOWN = object()
_REPLAYS: weakref.WeakValueDictionary[str, Replay] = weakref.WeakValueDictionary()
Step = tuple[Any, tuple[Any, ...], dict[str, Any]]
_ERRORS = (ArithmeticError, TypeError, ValueError, RuntimeError, OutgrownError)


def is_followed(module: object) -> bool:
    """Whether branches in this module are followed with a guard.

    >>> is_followed("torch.optim.radam"), is_followed("my.training")
    (True, False)
    """
    return str(module).startswith(_FOLLOWED)


class Replay:
    """Operators of a graph, run again on real tensors.

    ``facts`` are dtype and shape of the tensors, ``steps`` functions with their arguments, in which a :class:`Place` stands for
    an earlier value. The state of all parameters is mostly the same: the last answers are remembered by the tensors' contents.
    """

    def __init__(self, facts: tuple[tuple[torch.dtype, torch.Size], ...], steps: tuple[Step, ...]) -> None:
        self.facts = facts
        self.steps = steps
        self._answers: dict[bytes, object] = {}

    @staticmethod
    def shared(facts: tuple[tuple[torch.dtype, torch.Size], ...], steps: tuple[Step, ...]) -> Replay:
        """One for all branches that are computed in the same way."""
        key = repr((facts, steps))
        found = _REPLAYS.get(key)
        if found is None:
            found = _REPLAYS[key] = Replay(facts, steps)
        return found

    def __call__(self, *tensors: Any) -> bool | None:
        """The truth of the last value; None where the tensors are of another kind or it cannot be computed."""
        for tensor, (dtype, shape) in zip(tensors, self.facts, strict=True):
            if not is_small(tensor) or tensor.dtype != dtype or tensor.shape != shape:
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
            with private_tracing.disable_current_modes(), private_calls.no_torch_function(), torch.no_grad():
                values: list[Any] = list(tensors)
                for function, args, kwargs in self.steps:
                    given = [_filled(item, values) for item in args]
                    values.append(function(*given, **{name: _filled(item, values) for name, item in kwargs.items()}))
                return bool(values[-1])
        except _ERRORS:
            return None


@dataclass(frozen=True)
class Place:
    """Where a value stands in the list of those computed so far."""

    index: int


def _filled(item: Any, values: list[Any]) -> Any:
    if type(item) is Place:
        return values[item.index]
    return [_filled(inner, values) for inner in item] if isinstance(item, (list, tuple)) else item


def followed_branch(values: Any, condition: Any) -> bool | None:
    """Which way a branch goes on ``condition``, a traced tensor or a number made of data, with a guard that asks the same at
    each call; None where that depends on more than small tensors that were there before.
    """
    trace: Trace = values.trace
    node = _node_of(trace, condition)
    if node is None:
        return None
    inputs = {item.original_node: item for item in trace.inputs}
    constants = vars(trace.tracer.root)
    order = _order(node, inputs, constants)
    if order is None:
        return None
    read = [inputs[item] for item in order if item in inputs]
    places: dict[torch.fx.Node, Any] = {item.original_node: Place(index) for index, item in enumerate(read)}
    steps = []
    for item in order:
        if item not in inputs:
            function, given, keywords = _call_of(item, constants)
            args, kwargs = torch.fx.node.map_arg((given, keywords), places.__getitem__)
            steps.append((function, args, kwargs))
            places[item] = Place(len(places))
    replay = Replay.shared(tuple((item.real.dtype, item.real.shape) for item in read), tuple(steps))
    answer = replay.compute([item.real for item in read])
    if answer is not None and read:
        sources = tuple(values.guards.tensor_source(item.index) for item in read)
        text = f"the branch on {', '.join(source.name for source in sources)}"
        values.guard(ComputedSource(replay, sources, text), Equals(answer), "an optimizer branches on its state")
    return answer


def _node_of(trace: Trace, condition: Any) -> torch.fx.Node | None:
    try:
        if isinstance(condition, torch.Tensor):
            return (
                trace.node_of(condition)
                if condition.numel() == 1 and not private_sizes.has_symbols(condition)
                else None
            )
        return private_tracing.node_of_number(condition, trace.tracer)
    except CaptureError:
        return None


def _order(
    end: torch.fx.Node, inputs: dict[torch.fx.Node, Any], constants: dict[str, Any]
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
            is_usable = is_small(inputs[node].real) if node in inputs else _is_pure(node, constants)
            if len(seen) == _MOST_NODES or not is_usable:
                return None
            seen.add(node)
            stack.append((node, True))
            given: list[torch.fx.Node] = []
            if node not in inputs:
                torch.fx.node.map_arg(_call_of(node, constants)[1:], given.append)
            stack += [(item, False) for item in given]
    return order


def _is_pure(node: torch.fx.Node, constants: dict[str, Any]) -> bool:
    if node.op == "get_attr":
        return is_small(constants.get(str(node.target)))
    if _is_item_of_list(node):
        return is_pure(node.args[0], numbers=True)  # type: ignore[arg-type]
    if isinstance(node.target, private_operators.OpOverload):
        return is_pure(node, numbers=True)
    return node.op == "call_function" and (node.target in PYTHON_ONLY or node.target is real_power)


def _is_item_of_list(node: torch.fx.Node) -> bool:
    made = node.args[0] if node.target is operator.getitem else None
    return (
        isinstance(made, torch.fx.Node)
        and isinstance(made.target, private_operators.OpOverload)
        and _is_by_item(made.target)
    )


def _is_by_item(target: Any) -> bool:
    """Whether an operator takes lists of tensors and does the same to each item of them by itself."""
    return str(target._schema.name).startswith("aten::_foreach_")


def _call_of(node: torch.fx.Node, constants: dict[str, Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
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


@dataclass(frozen=True, repr=False)
class Constant:
    """A tensor that the graph holds."""

    value: torch.Tensor

    def __repr__(self) -> str:
        with private_tracing.disable_current_modes(), private_calls.no_torch_function(), torch.no_grad():
            return f"Constant({self.value.dtype}, {self.value.tolist()!r})"

    def __call__(self) -> torch.Tensor:
        """That tensor."""
        return self.value


@dataclass(frozen=True)
class FirstOf:
    """An operator that gives a list, of which the first item is taken."""

    function: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The first item of the result."""
        return self.function(*args, **kwargs)[0]
