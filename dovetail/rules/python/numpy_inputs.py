"""Arrays that existed before the call and become tensors: ``from_numpy``, ``as_tensor``, ``tensor``, and arrays as indices.

Such an array is an input of the graph, as the tensor that shares its memory. One that the program has made is a constant of the
graph; the graph breaks where it is then written to, by its tensor or by itself.
"""

from __future__ import annotations

import itertools
import operator
from typing import Any

import torch

from dovetail.frontend.code.frame import Break
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, Keywords, end_rule, first_rule, method_rule
from dovetail.guards import ComputedSource
from dovetail.rules.python.numpy_numbers import ARRAY
from dovetail.rules.python.numpy_values import root
from dovetail.torch_private import tensors as private_tensors
from dovetail.torch_private import tracing as private_tracing


def shared(array: Any) -> torch.Tensor | None:
    """The tensor in the memory of an array, whose storage is all of that memory; None where torch refuses, or warns."""
    owner = root(array) if type(array) in ARRAY else None
    if owner is None or not array.flags.writeable or owner.base is not None or owner.dtype != array.dtype:
        return None
    size = array.itemsize
    if not owner.flags.forc or any(stride < 0 or stride % size for stride in array.strides):
        return None
    with private_tracing.disable_current_modes():
        try:
            whole = torch.from_numpy(owner.ravel(order="K"))
        except TypeError:
            return None
        steps = [stride // size for stride in array.strides]
        offset = (_address(array) - _address(owner)) // size
        return whole.new_empty(0).set_(whole.untyped_storage(), offset, array.shape, steps)  # type: ignore[call-overload, no-any-return]


def _address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


class _Tensors:
    """The tensors of this capture in the memory of arrays, by the arrays' ids."""

    def __init__(self, interpreter: TracingInterpreter) -> None:
        self.made: dict[int, tuple[Any, torch.Tensor]] = {}
        self.constants: list[torch.Tensor] = []


def input_of_array(interpreter: TracingInterpreter, array: Any) -> Any:
    """The traced tensor in the memory of an array that existed before; NotImplemented for one that the program has made."""
    source, made = interpreter.values.source_of(array), interpreter.state(_Tensors).made
    if source is None:
        return NotImplemented
    if id(array) not in made:
        real = shared(array)
        if real is None:
            raise Break("torch shares no memory with this array", "call it outside of the function")
        made[id(array)] = (array, real)
    place = ComputedSource(shared, (source,), f"from_numpy({source.name})")
    found = interpreter.values.read(made[id(array)][1], place)
    _check_memory(interpreter)
    return found


@end_rule
def _check_memory(interpreter: TracingInterpreter) -> None:
    """Neither other inputs in the memory of an array nor arrays that became constants would see what is written there."""
    if any(map(private_tensors.is_written, interpreter.state(_Tensors).constants)):
        raise Break("a tensor in the memory of an array is written to", "use torch.tensor, which copies the array")
    own = {id(tensor) for _, tensor in interpreter.state(_Tensors).made.values()}
    inputs = [item for item in interpreter.trace.inputs if own and item.real.device.type == "cpu"]
    with private_tracing.disable_current_modes():
        starts = [item.real.untyped_storage().data_ptr() for item in inputs]
        ends = [start + item.real.untyped_storage().nbytes() for item, start in zip(inputs, starts, strict=True)]
    for (one, first, end), (other, other_first, other_end) in itertools.combinations(
        zip(inputs, starts, ends, strict=True), 2
    ):
        is_array = id(one.real) in own or id(other.real) in own
        is_written = private_tensors.is_written(one.value) or private_tensors.is_written(other.value)
        if is_array and is_written and first < other_end and other_first < end:
            raise Break("an array shares its memory with another input, which is written to", "hand over one of them")


@first_rule
def _length(interpreter: TracingInterpreter, function: Any, args: Arguments, kwargs: Keywords) -> Any:
    """The length of an array is the first of its sizes, which are guarded as an attribute."""
    if function is not len or len(args) != 1 or type(args[0]) not in ARRAY:
        return NotImplemented
    sizes = interpreter.load_attribute(args[0], "shape")
    return interpreter.load_item(sizes, 0) if args[0].ndim else len(args[0])


@method_rule("from_numpy")
def _from_numpy(interpreter: TracingInterpreter, function: Any, args: Arguments, kwargs: Keywords) -> Any:
    if function is not torch.from_numpy or len(args) != 1 or kwargs or type(args[0]) not in ARRAY:
        return NotImplemented
    (array,) = args
    found = input_of_array(interpreter, array)
    if found is not NotImplemented:
        return found
    if not array.flags.writeable:
        raise Break("an array becomes a tensor twice", "use the tensor")
    found = interpreter.native(torch.tensor, args, {})
    interpreter.state(_Tensors).constants.append(found)
    # A write to the array from here on breaks the graph.
    root(array).flags.writeable = array.flags.writeable = False
    return found


@method_rule("tensor")
def _tensor(interpreter: TracingInterpreter, function: Any, args: Arguments, kwargs: Keywords) -> Any:
    wanted = {name: item for name, item in kwargs.items() if item is not None}
    data = args[0] if len(args) == 1 else wanted.pop("data", None)
    if function is not torch.tensor or type(data) not in ARRAY or wanted.keys() - {"dtype", "device"}:
        return NotImplemented
    found = input_of_array(interpreter, data)
    if found is not NotImplemented:
        found = interpreter.call_torch(torch.Tensor.to, (found,), {"dtype": found.dtype, **wanted, "copy": True})
    return found


def as_tensor(interpreter: TracingInterpreter, array: Any, wanted: Keywords) -> Any:
    """``torch.as_tensor`` of an array: in its memory where nothing else is wanted."""
    found = _from_numpy(interpreter, torch.from_numpy, (array,), {})
    if found is NotImplemented:
        raise Break(
            "a tensor in the memory of an array is made", "use torch.tensor, or call it outside of the function"
        )
    return interpreter.call_torch(torch.Tensor.to, (found,), wanted) if wanted else found


def _index(interpreter: TracingInterpreter, function: Any, args: Arguments, kwargs: Keywords) -> Any:
    """Arrays of whole numbers or truth values as indices of a tensor are those of the tensors."""
    if function is not operator.getitem or not isinstance(args[0], torch.Tensor):
        return NotImplemented
    keys = args[1] if type(args[1]) is tuple else (args[1],)
    found = [_as_index(interpreter, item) if type(item) in ARRAY else item for item in keys]
    if all(item is key for item, key in zip(found, keys, strict=True)):
        return NotImplemented
    return interpreter.call_torch(function, (args[0], tuple(found) if type(args[1]) is tuple else found[0]), {})


#: Before the rules for slices, which know of no arrays.
method_rule.setdefault("getitem", []).insert(0, _index)


def _as_index(interpreter: TracingInterpreter, array: Any) -> Any:
    is_index = array.dtype.kind in "ib" and array.ndim > 0
    found = input_of_array(interpreter, array) if is_index else NotImplemented
    return array if found is NotImplemented else found
