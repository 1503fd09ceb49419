"""Operators that were recorded before, in this capture or an earlier one, are recorded again without torch's dispatch modes.

Torch takes about a millisecond to record one operator: three modes take its arguments apart and put them together again, and
the fake kernel is looked up. But most operators of a model come again: those of the next block, and of its backward. For an
operator of ATen that only computes, what is recorded follows from the operator, its plain arguments and what is known of its
tensors (type, sizes, strides, device, ...). So the first time is torch's, and teaches what came out of it: one node, and fake
tensors that can be made again. Later times put down the same node on other arguments; autograd, which is above, and the views
and writes of functionalisation, which torch still does itself, see no difference.

Whatever is not such a plain case goes torch's way every time: symbolic sizes, known data, operators that write to several
arguments, operators with a rule of their own, and each one whose result made again is not that of torch in every respect.
"""

from __future__ import annotations

import operator as python_operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.fast_capture.memory import MEMORIES, Known, Memory, Output
from dovetail.torch_private import fast_capture as private
from dovetail.torch_private import state as private_state
from dovetail.trace.overrides import EVERY, FAKE, SYMBOLIC_FAKE, Run
from dovetail.trace.repeats import draws_random_numbers
from dovetail.trace.trace import Trace, open_trace

_CONSTANTS = frozenset({int, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})
#: The tracer's own notes on a node, and the value, which is made again.
_NOTED = frozenset(
    {"val", "tensor_meta", "phase", "user_line", "in_backward", "checkpointed", "user_backward", "without_gradients"}
)
_NO_INTEGERS = frozenset({torch.bool, torch.uint8, torch.int8})


class _UnknownError(Exception):
    """An argument says nothing for certain."""


@dataclass(frozen=True, eq=False)
class Operator:
    """Unchanging facts about an operator; a key by its identity (torch finds the hash of an operator in Python)."""

    operator: Any
    #: The operator of the node: itself, or of an operator that writes the form that returns; None: torch's way every time.
    recorded: Any
    makes_memory: bool
    is_random: bool
    is_by_elements: bool
    name: str

    @staticmethod
    def of(operator: Any) -> Operator:
        """The same object for the same operator."""
        found = _OPERATORS.get(id(operator))
        if found is None:
            found = Operator(operator, None, False, False, False, "")
            recorded = private.written_form(operator) or operator
            draws, tags = draws_random_numbers(recorded), getattr(recorded, "tags", ())
            if private.is_plain_operator(recorded) and not (draws and recorded is not operator):
                facts = private.makes_memory(operator), draws, torch.Tag.pointwise in tags
                found = Operator(operator, recorded, *facts, private.name_of_nodes(recorded))
            _OPERATORS[id(operator)] = found
        return found


#: By identity; the operator is kept alive.
_OPERATORS: dict[int, Operator] = {}


class _Call:
    """One call of an operator: the key of its facts, and the arguments of its node."""

    def __init__(self, trace: Trace, about: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.trace = trace
        self.about = about
        self.fakes: list[Any] = []
        self._key: list[Any] = [about, FAKE.get(about.recorded), torch.get_default_dtype(), len(args)]
        self.args = tuple([self._argument(item) for item in args])
        self.kwargs: dict[str, Any] = {}
        for name, item in kwargs.items():
            self._key.append(name)
            self.kwargs[name] = self._argument(item)
        if not self.fakes:
            raise _UnknownError
        self.key = tuple(self._key)

    def _argument(self, value: Any) -> Any:
        kind = type(value)
        if kind is private.FunctionalTensor:
            fake = private.fake_of(value, is_argument=True)
            node = private.node_of_fake(self.trace.tracer, fake)
            if node is None or not private.is_plain(fake, self.trace.fake_mode):
                raise _UnknownError
            if self.about.operator is torch.ops.aten.index.Tensor and fake.dtype in _NO_INTEGERS:
                raise _UnknownError
            self.fakes.append(fake)
            self._key.append(private.facts_of(fake))
            return node
        if kind in _CONSTANTS:
            self._key.append((kind, value))
        elif kind is float:
            self._key.append(value.hex())
        elif kind is torch.SymFloat and self.about.is_by_elements:
            # The results of such an operator look the same for every number.
            node = private.node_of_number(self.trace.tracer, value)
            if node is None:
                raise _UnknownError
            self._key.append(kind)
            return node
        elif kind is list or kind is tuple:
            self._key.append((kind, len(value)))
            return kind([self._argument(item) for item in value])
        else:
            raise _UnknownError
        return value


def known_operator(run: Run, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Record an operator as the last time; where it is met for the first time, learn from torch."""
    trace = open_trace()
    if trace is None:
        return NotImplemented
    if operator is private.DEVICE:
        return private.device_of(args[0], trace.fake_mode)
    about = Operator.of(operator)
    if (
        about.recorded is None
        or not private.records_plainly(trace.tracer, trace.fake_mode)
        or about.recorded in SYMBOLIC_FAKE
        or torch.is_inference_mode_enabled()
    ):
        return NotImplemented
    switches = private_state.kernel_flags()
    memory = MEMORIES.get(switches) or MEMORIES.setdefault(switches, Memory(switches))
    try:
        call = _Call(trace, about, args, kwargs)
        known = memory.find(call.key)
    except (_UnknownError, TypeError):
        # A symbolic size cannot be hashed.
        return NotImplemented
    if known is None:
        return NotImplemented
    if known is not NotImplemented:
        return _record(call, known, args, kwargs)
    last = next(reversed(trace.graph.nodes))
    result = run(operator, args, kwargs)
    memory.learn(call.key, _learn(call, result, last))
    return result


if private.IS_KNOWN:
    EVERY.append(known_operator)


def _record(call: _Call, known: Known, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    recorded = (call.args[: known.count], {name: call.kwargs[name] for name in known.names})
    node = _node(call, call.about.recorded, *recorded, call.about.name)
    if known.several is None:
        result = _note(call, node, known.outputs[0])
    else:
        items = []
        for place, output in enumerate(known.outputs):
            item = _node(call, python_operator.getitem, (node, place), {}, "getitem")
            items.append((_note(call, item, output), item))
        result = known.several([fake for fake, _ in items])
        node.meta["val"] = known.several([item.meta.get("val") for _, item in items])
    mode = call.trace.functional_mode
    if known.is_apart and call.about.makes_memory:
        return private.functional(mode, result)
    return private.functionalise(mode, call.about.operator, call.about.recorded, args, kwargs, result)


def _node(call: _Call, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> torch.fx.Node:
    """A node such as the tracer makes it of an operator that draws no random numbers (for these, it counts)."""
    tracer = call.trace.tracer
    if call.about.is_random:
        return tracer.create_node("call_function", target, args, kwargs, name)
    # Further notes of torch's tracers are not learned, or belong to an outer trace, which there is not.
    node = private.add_node(tracer.graph, target, args, kwargs, name)
    tracer.note(node)
    return node


def _note(call: _Call, node: torch.fx.Node, output: Output | None) -> Any:
    """The fake tensor that a node computes."""
    if output is None:
        return None
    fake, shown = output.pattern.make(call.trace.fake_mode, call.fakes, 2)
    private.track(call.trace.tracer, fake, node)
    node.meta["val"] = shown
    node.meta["tensor_meta"] = output.tensor_meta
    return fake


def _learn(call: _Call, result: Any, last: torch.fx.Node) -> Known | None:
    """The nodes recorded by torch after the node ``last``; None where they are not one operator on these arguments."""
    several = None if isinstance(result, torch.Tensor) else type(result)
    if several not in (None, list, tuple):
        return None
    values = [result] if several is None else result
    node = last.next
    holders = [node] if several is None else _items(node, len(values))
    if not _is_alike(node, call) or holders[-1:] != [next(reversed(call.trace.graph.nodes))]:
        return None
    outputs: list[Output | None] = []
    storages = set()
    for value, holder in zip(values, holders, strict=True):
        if value is None and "val" not in holder.meta:
            outputs.append(None)
            continue
        if type(value) is not private.FunctionalTensor:
            return None
        fake = private.fake_of(value, is_argument=False)
        pattern = private.pattern_of(fake, call.fakes) if private.is_plain(fake, call.trace.fake_mode) else None
        if (
            pattern is None
            or private.node_of_fake(call.trace.tracer, fake) is not holder
            or not holder.meta.keys() <= _NOTED
        ):
            return None
        if pattern.alias < 0:
            storages.add(fake.untyped_storage()._cdata)
        outputs.append(Output(pattern, holder.meta["tensor_meta"]))
    # Two results in one new storage: nothing would say so.
    apart = sum(output is not None and output.pattern.alias < 0 for output in outputs)
    return Known(len(node.args), tuple(node.kwargs), tuple(outputs), several) if len(storages) == apart else None


def _items(node: torch.fx.Node, count: int) -> list[torch.fx.Node]:
    """The nodes of the parts of a result, which follow it."""
    found: list[torch.fx.Node] = []
    for place in range(count):
        last = found[-1] if found else node
        if last.next.target is not python_operator.getitem or last.next.args != (node, place):
            break
        found.append(last.next)
    return found


def _is_alike(node: torch.fx.Node, call: _Call) -> bool:
    """Whether a node is the operator on the arguments of the call, constants of equal types included, without some at the end."""
    if node.op != "call_function" or node.target is not call.about.recorded or not node.meta.keys() <= _NOTED:
        return False
    args, named = call.args[: len(node.args)], {name: call.kwargs.get(name) for name in node.kwargs}
    left_out = [*call.args[len(node.args) :], *(item for name, item in call.kwargs.items() if name not in named)]
    has_node = any(isinstance(item, (torch.fx.Node, list, tuple)) for item in left_out)
    return not has_node and repr((node.args, node.kwargs)) == repr((args, named))
