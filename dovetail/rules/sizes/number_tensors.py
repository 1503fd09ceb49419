"""Tensors made of symbolic numbers, and the way back: ``torch.tensor(x.shape[0])``, and that tensor used as a number.

Torch's own ``torch.tensor`` asks for the value of a symbolic number, which would hold the graph to the size of today. Here it
becomes an operator that takes the number. A whole-number tensor without dimensions that was computed of such numbers alone is
known to the trace as a formula over sizes: ``.item()``, ``int()``, slices up to it, and functions that take a tensor in the place
of a size (``x.view(torch.div(x.shape[0], 2, rounding_mode="floor"), -1)``) read the formula, not the tensor.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable
from typing import Any

import torch

from dovetail.errors import CaptureError
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, Keywords, method_rule, rule
from dovetail.frontend.values.leaves import plain_flag
from dovetail.rules.sizes.places import check_numbers
from dovetail.rules.torch.branches_on_data import constant_numbers
from dovetail.torch_private import sizes as private_sizes
from dovetail.torch_private import tensors as private_tensors
from dovetail.torch_private.trees import tree_leaves, tree_map

_aten = torch.ops.aten
# The first argument is the tensor; what they may be given beside it (a memory format, a dtype) is looked at below.
_SAME = {getattr(_aten, name).default for name in ("clone", "alias", "detach", "lift_fresh_copy", "_to_copy")}
_OPERATORS: dict[Any, Callable[..., Any]] = {
    _aten.add.Tensor: operator.add,
    _aten.add.Scalar: operator.add,
    _aten.sub.Tensor: operator.sub,
    _aten.sub.Scalar: operator.sub,
    _aten.rsub.Scalar: lambda first, second: second - first,
    _aten.mul.Tensor: operator.mul,
    _aten.mul.Scalar: operator.mul,
    _aten.neg.default: operator.neg,
}
# Tensors wrap around at 64 bits and Python's numbers do not. These operators agree on the last 64 bits whatever
# happened on the way, so that it is enough to look at the result.
_LIMIT = 1 << 62
# Each number that ``tolist`` reads is an operator of the graph.
_MOST_LISTED = 64


_PLAIN = (int, float, bool)
_SYMBOLIC = (torch.SymInt, torch.SymFloat)


@rule(torch.tensor)
def _tensor(interpreter: TracingInterpreter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return make_tensor(interpreter, torch.tensor, args, kwargs)


def make_tensor(interpreter: TracingInterpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``torch.tensor(*args, **kwargs)``, where a number may be symbolic; ``function`` is called where none is."""
    data = args[0] if len(args) == 1 else kwargs.get("data")
    rest = {
        name: value for name, value in kwargs.items() if name != "data" and value is not None and value is not False
    }
    shape: list[int] = []
    check_numbers(interpreter, data)
    if type(data) in (list, tuple) and any(map(private_sizes.is_symbolic, read := interpreter.drain(data))):
        data = read
    if any(type(item) is torch.SymBool for item in tree_leaves(data)):
        return interpreter.call_native(function, (tree_map(plain_flag, data),), rest)
    numbers = _numbers(data, shape, 0)
    dtype = rest.pop("dtype", None)
    if (
        numbers is None
        or not any(type(item) in _SYMBOLIC for item in numbers)
        or rest.keys() - {"device"}
        or any(type(item) is torch.SymInt and private_sizes.is_data_number(item) for item in numbers)
    ):
        return interpreter.call_native(function, args, kwargs)
    is_float = any(type(item) in (float, torch.SymFloat) for item in numbers)
    dtype = dtype or (torch.get_default_dtype() if is_float else torch.int64)
    if dtype.is_complex or dtype == torch.bool or (is_float and not dtype.is_floating_point):
        return interpreter.call_native(function, args, kwargs)
    # Whatever it is stored as, torch.tensor reads a number for a float type as a C double.
    exact = torch.float64 if dtype.is_floating_point else torch.int64
    made = [interpreter.call_torch(torch.scalar_tensor, (item,), {"dtype": exact, **rest}) for item in numbers]
    result = made[0]
    if shape:
        result = interpreter.call_torch(torch.stack, (made,), {})
        result = interpreter.call_torch(torch.reshape, (result, tuple(shape)), {}) if len(shape) > 1 else result
    return result if dtype == exact else interpreter.call_torch(torch.Tensor.to, (result, dtype), {})


def _numbers(data: Any, shape: list[int], depth: int) -> list[Any] | None:
    """The numbers of nested lists in order, their lengths in ``shape``; None for what has other things in it."""
    if type(data) in (*_PLAIN, *_SYMBOLIC):
        return [data] if depth == len(shape) else None
    if not isinstance(data, (list, tuple)) or not data:
        return None
    if depth == len(shape):
        shape.append(len(data))
    if len(data) != shape[depth]:
        return None
    found: list[Any] = []
    for item in data:
        inner = _numbers(item, shape, depth + 1)
        if inner is None:
            return None
        found += inner
    return found


@rule(operator.index)
def _index(interpreter: TracingInterpreter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    number = number_of(interpreter, args[0]) if len(args) == 1 else None
    return interpreter.call_native(operator.index, args, kwargs) if number is None else number


@method_rule("item", "__int__", "__index__")
def _known(interpreter: TracingInterpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = with_owner(function, args)
    interpreter.trace.findings.asked_numbers = True
    number = number_of(interpreter, given[0]) if len(given) == 1 and not kwargs else None
    if number is None and isinstance(given[0], torch.Tensor) and given[0].dtype == torch.bool:
        with interpreter.trace.reading_truths():
            number = interpreter.call_torch(torch.ops.aten.item.default, given, kwargs)
    return NotImplemented if number is None else number


@method_rule("tolist")
def _as_list(interpreter: TracingInterpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A few numbers: those that are the same in each call, or in the one graph that is asked for, where they are read one by one
    (a loop over them would break the graph in each round).
    """
    given = with_owner(function, args)
    tensor = given[0] if len(given) == 1 and not kwargs else None
    if not isinstance(tensor, torch.Tensor) or any(type(size) is not int for size in tensor.shape):
        return NotImplemented
    with contextlib.suppress(CaptureError):
        if (known := constant_numbers(interpreter.trace, tensor)) is not None:
            return known
    if not interpreter.trace.settings.one_graph:
        return NotImplemented
    if tensor.layout != torch.strided or tensor.numel() > _MOST_LISTED:
        return NotImplemented
    interpreter.trace.findings.asked_numbers = True

    def read(part: torch.Tensor) -> Any:
        if not part.dim():
            return interpreter.call_torch(torch.Tensor.item, (part,), {})
        return [read(interpreter.call_torch(torch.select, (part, 0, at), {})) for at in range(part.shape[0])]

    return read(tensor)


def with_owner(function: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a function or a bound method of tensors, with the tensor that it is bound to."""
    owner = getattr(function, "__self__", None)
    return (owner, *args) if isinstance(owner, torch.Tensor) else args


def number_of(interpreter: TracingInterpreter, value: Any) -> Any:
    """The number in a traced int64 tensor without dimensions that was computed of sizes or numbers alone; None for all else."""
    if not isinstance(value, torch.Tensor) or value.dim() or value.dtype != torch.int64 or value.requires_grad:
        return None
    try:
        number = _evaluate(interpreter.trace.node_of(value))
        number = constant_numbers(interpreter.trace, value) if number is None else number
    except CaptureError:
        return None
    if number is None or private_sizes.is_data_number(number):
        return None
    return number if -_LIMIT < number < _LIMIT else None


def _evaluate(item: Any) -> Any:
    if type(item) is int:
        return item
    if not isinstance(item, torch.fx.Node):
        return None
    example = item.meta.get("val")
    if isinstance(example, torch.SymInt):
        return example
    if not isinstance(example, torch.Tensor) or example.dim() or example.dtype != torch.int64:
        return None
    if item.target is _aten.scalar_tensor.default or item.target in _SAME:
        return _evaluate(item.args[0])
    compute = _OPERATORS.get(item.target)
    if compute is None or item.kwargs:
        # ``alpha`` of an addition is given by keyword.
        return None
    numbers = [_evaluate(argument) for argument in item.args]
    return None if any(number is None for number in numbers) else compute(*numbers)


WHOLE_NUMBERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})


@method_rule("getitem", "setitem")
def _by_number(interpreter: TracingInterpreter, function: Any, args: Arguments, kwargs: Keywords) -> Any:
    """``target[key]`` or ``target[key] = value`` with numbers that torch does not have to ask for."""
    target, key, *value = args
    if not isinstance(target, torch.Tensor):
        return NotImplemented
    selected, rest = _select_symbolic(interpreter, target, _with_numbers(interpreter, key))
    if selected is target and rest is key:
        return NotImplemented
    if not value and rest == () and selected is not target:
        return selected
    return interpreter.native(function, (selected, rest, *value), {})


def _with_numbers(interpreter: TracingInterpreter, key: Any) -> Any:
    """An index of a tensor with the number in the place of each tensor that selects one item, or bounds a slice."""
    if type(key) is tuple:
        return tuple(_with_numbers(interpreter, item) for item in key)
    if type(key) is slice:
        return slice(*[whole_number(interpreter, item) for item in (key.start, key.stop, key.step)])
    # Torch takes a byte for a mask.
    return key if isinstance(key, torch.Tensor) and key.dtype == torch.uint8 else whole_number(interpreter, key)


def whole_number(interpreter: TracingInterpreter, item: Any) -> Any:
    """A tensor's number where that is known, else one that the graph computes; an item that is no whole number is as it is."""
    number = number_of(interpreter, item)
    if number is not None:
        return number
    is_whole = isinstance(item, torch.Tensor) and item.dim() == 0 and item.dtype in WHOLE_NUMBERS
    if not is_whole or private_tensors.is_functorch_wrapped(item):
        return item
    return interpreter.call(torch.Tensor.item, (item,), {})


def _select_symbolic(interpreter: TracingInterpreter, target: torch.Tensor, key: Any) -> tuple[torch.Tensor, Any]:
    """A view of ``target`` and the rest of an index of it, once the symbolic numbers in the index have selected.

    Torch's own indexing asks for the value of such a number, which would hold the graph to it; ``select`` does not.
    """
    items = list(key) if type(key) is tuple else [key]
    places = [at for at, item in enumerate(items) if type(item) is torch.SymInt]
    if not places:
        return target, key
    width = sum(map(_dimensions_of, items))
    dimensions = {}
    dim = 0
    for at, item in enumerate(items):
        dimensions[at] = dim
        dim += target.dim() - width if item is Ellipsis else _dimensions_of(item)
    if dim > target.dim() or items.count(Ellipsis) > 1:
        return target, key
    for at in reversed(places):
        target = interpreter.call_torch(torch.Tensor.select, (target, dimensions[at], items[at]), {})
        del items[at]
    return target, tuple(items)


def _dimensions_of(item: Any) -> int:
    """The number of dimensions of the tensor that an item of an index stands for."""
    if item is None or item is Ellipsis or type(item) is bool:
        return 0
    if isinstance(item, torch.Tensor) and item.dtype in (torch.bool, torch.uint8):
        return item.dim()
    return 1
