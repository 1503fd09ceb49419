"""``copy.deepcopy`` of plain data, and of containers of tensors such as ``model.state_dict()``, which the graph clones."""

from __future__ import annotations

import copy
from collections import deque
from typing import Any

import torch

from dovetail.frontend.code.frame import Break
from dovetail.frontend.interpreter.callbacks import callback_codes, watched
from dovetail.frontend.interpreter.containers import HASHING
from dovetail.frontend.interpreter.opaque import guard_deep
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, Keywords, rule
from dovetail.guards import InstanceDictSource
from dovetail.torch_private import calls as private_calls
from dovetail.torch_private import tensors as private_tensors

_ADVICE = "use .clone(), or copy outside of the function"


@rule(copy.deepcopy)
def _deepcopy(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    if len(args) != 1 or kwargs:
        raise Break("copy.deepcopy is called with a memo", "copy outside of the function")
    tensors: dict[int, Any] = {}
    _collect(args[0], tensors, set())
    seen = dict(tensors)
    guard_deep(interpreter.values, args[0], seen)
    memo: dict[int, Any] = {}
    memories: set[int] = set()
    for key, tensor in tensors.items():
        memo[key] = _copied(interpreter, interpreter.values.wrap(tensor), memories)
    with watched(copy.deepcopy, callback_codes((item for key, item in seen.items() if key not in tensors), HASHING)):
        return memo[id(args[0])] if id(args[0]) in tensors else copy.deepcopy(args[0], memo)


def _collect(value: Any, tensors: dict[int, Any], seen: set[int]) -> None:
    """Find the tensors in nested containers. Those of other objects stay with :func:`guard_deep`, which refuses them."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        tensors[id(value)] = value
    elif isinstance(value, (list, tuple, deque, dict)):
        for item in dict.values(value) if isinstance(value, dict) else value:
            _collect(item, tensors, seen)


def _copied(interpreter: TracingInterpreter, value: torch.Tensor, memories: set[int]) -> Any:
    """A copy as eager makes it of a plain leaf that has its memory for itself; breaks the graph for any other tensor."""
    trace, values = interpreter.trace, interpreter.values
    item, is_parameter = trace.input_of(value), isinstance(value, torch.nn.Parameter)
    with private_calls.no_torch_function():
        is_plain = type(value) is private_tensors.FunctionalTensor and value.layout is torch.strided and value.is_leaf
        if not is_plain or value._base is not None or value.is_conj() or value.is_neg():
            raise Break("a tensor that is no plain leaf is copied by copy.deepcopy", _ADVICE)
        memory = value.untyped_storage()._cdata
        owners = [known for known in trace.inputs if known.value.untyped_storage()._cdata == memory]
    is_whole = all(known.real.untyped_storage().nbytes() == known.real.nbytes for known in owners)
    if memory in memories or not is_whole:
        raise Break("tensors that share memory are copied by copy.deepcopy", _ADVICE)
    memories.add(memory)
    for owner in owners:
        values.guards.add_separate_memory(owner.index)
    if item is not None and not is_parameter:
        attributes = item.real.__dict__
        values.note(attributes, InstanceDictSource(values.guards.tensor_source(item.index)))
        values.whole(attributes)
        if attributes or interpreter.load_attribute(value, "grad") is not None:
            raise Break("a tensor with a gradient, or with attributes, is copied by copy.deepcopy", _ADVICE)
    clone = value.detach().clone()
    if clone.stride() != value.stride():
        raise Break("a tensor with gaps in its memory is copied by copy.deepcopy", _ADVICE)
    if is_parameter:
        return interpreter.call(torch.nn.Parameter, (clone, value.requires_grad), {})
    return clone.requires_grad_() if value.requires_grad else clone
