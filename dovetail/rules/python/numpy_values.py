"""NumPy on numbers and arrays that the capture knows: computed once, by NumPy itself, while the call is traced.

Known are plain numbers, NumPy's own, arrays that the program has made of them, and small arrays that existed before the call and
whose items have not changed so far: these are guarded by their items, and NumPy gets a read-only copy. All else breaks the graph:
data, writes to arrays that existed before, random numbers, warnings, what depends on NumPy's state.
"""

from __future__ import annotations

import functools
import operator
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.errors import CaptureError
from dovetail.frontend.code.frame import Break
from dovetail.frontend.instructions.operations import BINARY, COMPARE, SYMBOLS
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import (
    Arguments,
    Chain,
    Keywords,
    callable_rule,
    error_rule,
    kind_among,
    operator_rule,
    rule,
)
from dovetail.frontend.values.leaves import plain_numbers
from dovetail.guards import ComputedSource, Equals, Identity
from dovetail.rules.python.numpy_numbers import ARRAY, NUMPY, SCALAR
from dovetail.runtime.recipe_builder import MADE_BY_CALL
from dovetail.torch_private import tracing as private_tracing

_MOST_BYTES = 16_384
_ADVICE = "call it outside of the function"
_PLAIN = (int, float, complex, bool, str, bytes, type(None), type(Ellipsis))
#: Functions that write to an argument, call a function of the user's, show state, or touch files.
_IMPURE = frozenset(
    {
        *("copyto", "put", "place", "putmask", "fill_diagonal", "put_along_axis", "apply_along_axis"),
        *("apply_over_axes", "piecewise", "save", "savez", "savez_compressed", "savetxt", "array_repr", "array_str"),
        *("array2string", "shares_memory", "may_share_memory", "fromregex"),
    }
)
_WRITING = frozenset({*BINARY[len(SYMBOLS) :], operator.setitem})
_OTHERS = (operator.neg, operator.pos, operator.invert, operator.getitem, operator.setitem)
_MAKERS = (
    *("ones", "full", "eye", "identity", "tri", "isscalar", "array", "asarray", "arange", "zeros", "ascontiguousarray"),
    *("asanyarray", "asfortranarray", "result_type", "promote_types"),
)


#: ``rule(interpreter, function, args, kwargs)`` has NumPy compute in the graph what is not known.
unknown_arrays: Chain[Callable[[TracingInterpreter, Any, Arguments, Keywords], Any]] = Chain()
#: ``rule(interpreter, function, args)`` computes with numbers that change from call to call.
changing_numbers: Chain[Callable[[TracingInterpreter, Any, Arguments], Any]] = Chain()


class _Arrays:
    """The arrays that existed before this capture and are known, by id, with the copies that NumPy gets."""

    def __init__(self, interpreter: TracingInterpreter) -> None:
        self.copies: dict[int, tuple[Any, Any]] = {}


def root(array: Any) -> Any:
    """The array whose memory this one is a view of."""
    while isinstance(array.base, ARRAY):
        array = array.base
    return array


def _content(array: Any) -> Any:
    """The items and layout of an array, to be compared; None where it shares the memory of something else than an array."""
    is_plain = type(array) in ARRAY and root(array).base is None
    return (array.dtype.str, array.shape, array.strides, array.tobytes()) if is_plain else None


def _known(interpreter: TracingInterpreter, value: Any) -> Any:
    """A value as NumPy gets it; raises :class:`Break` for one that is not known."""
    value = plain_numbers(tuple(value) if type(value) is torch.Size else value)
    kind, values = type(value), interpreter.values
    if kind in (list, tuple, dict):
        values.whole(value)
        items = {
            key: _known(interpreter, item) for key, item in (value if kind is dict else dict(enumerate(value))).items()
        }
        return items if kind is dict else kind(items.values())
    if kind is slice:
        return slice(*(_known(interpreter, item) for item in (value.start, value.stop, value.step)))
    if kind in _PLAIN or isinstance(value, SCALAR) or (isinstance(value, NUMPY.dtype) and value.isbuiltin == 1):
        return value
    if isinstance(value, type) and value.__module__ in ("numpy", "builtins"):
        return value
    if kind in ARRAY:
        if values.source_of(value) is not None:
            return _copy(interpreter, value)
        owner = root(value)
        if owner.base is None and values.source_of(owner) is None:
            return value
    raise Break(f"NumPy is given a {kind.__qualname__}", _ADVICE)


def _copy(interpreter: TracingInterpreter, array: Any) -> Any:
    """A copy of a small array that existed before, which is guarded by its items."""
    copies, source = interpreter.state(_Arrays).copies, interpreter.values.source_of(array)
    assert source is not None
    content = _content(array) if array.nbytes <= _MOST_BYTES and array.dtype.kind in "biufc" else None
    if content is None or interpreter.trace.changes(("array", source.name), content) or _is_shared(interpreter, array):
        raise Break("the items of an array are read", "hand it over as a tensor")
    if id(array) not in copies:
        place = ComputedSource(_content, (source,), f"the items of {source.name}")
        interpreter.values.guard(place, Equals(content), f"the items of {source.name} were read")
        copy = array.copy(order="K")
        copy.flags.writeable = False
        copies[id(array)] = (array, copy)
    return copies[id(array)][1]


def _byte_bounds(array: Any) -> tuple[int, int]:
    """The first byte of an array's memory, and the one behind it; NumPy 2 has moved the function."""
    bounds = NUMPY.lib.array_utils.byte_bounds if hasattr(NUMPY.lib, "array_utils") else NUMPY.byte_bounds
    first, end = bounds(array)
    return first, end


def _is_shared(interpreter: TracingInterpreter, array: Any) -> bool:
    """Whether an input of the graph lies in the memory of an array: its writes are not seen there while it is traced."""
    with private_tracing.disable_current_modes():
        found = [item.real.untyped_storage() for item in interpreter.trace.inputs if item.real.device.type == "cpu"]
        first, end = _byte_bounds(array)
        return any(item.data_ptr() < end and first < item.data_ptr() + item.nbytes() for item in found)


def compute(interpreter: TracingInterpreter, function: Any, args: Arguments, kwargs: Keywords) -> Any:
    """A pure function of NumPy's, of what is known; raises :class:`Break` for all else, and for what a warning or a switch says."""
    stand_in = kind_among((*args, *kwargs.values()))
    if stand_in is not None:
        return stand_in.call(interpreter, function, args, kwargs)
    for changing in () if kwargs else changing_numbers:
        found = changing(interpreter, function, args)
        if found is not NotImplemented:
            return found
    try:
        given, keywords = _known(interpreter, args), _known(interpreter, kwargs)
    except Break:
        for handler in unknown_arrays:
            found = handler(interpreter, function, args, kwargs)
            if found is not NotImplemented:
                return found
        raise
    except private_tracing.DATA_DEPENDENT_ERRORS as error:
        raise Break("NumPy is given a number made of data", _ADVICE) from error
    if any(isinstance(item, ARRAY) for item in (keywords.get("out"), *given[getattr(function, "nin", len(given)) :])):
        raise Break(f"{function.__name__} writes to an array", _ADVICE)
    try:
        with NUMPY.errstate(all="raise"), warnings.catch_warnings():
            warnings.simplefilter("error")
            result = function(*given, **keywords)
    except (FloatingPointError, Warning) as error:
        raise Break(f"{function.__name__} warns of what it is given", _ADVICE) from error
    except ValueError as error:
        _read_only(interpreter, error, ())
        raise
    for item in result if type(result) in (tuple, list) else (result,):
        if isinstance(item, ARRAY) and not root(item).flags.writeable:
            raise Break(f"{function.__name__} makes a view of an array that existed before", _ADVICE)
    return result


# --- which functions ----------------------------------------------------------------------------------------------------


def is_pure(function: Any) -> bool:
    """Whether this is a function of NumPy's whose result follows from its arguments."""
    name = function.__name__
    found = (getattr(module, name, None) for module in (NUMPY, NUMPY.linalg, NUMPY.fft))
    return name not in _IMPURE and any(item is function for item in found)


def _call(interpreter: TracingInterpreter, function: Any, args: Arguments, kwargs: Keywords) -> Any:
    if not is_pure(function):
        raise Break(f"numpy.{function.__name__} may read or change state that nobody guards", _ADVICE)
    if (source := interpreter.values.source_of(function)) is not None:
        interpreter.values.guard(source, Identity(function), f"{source.name} was called")
    return compute(interpreter, function, args, kwargs)


@dataclass(frozen=True)
class _Item:
    """Makes a view of an array by numbers and slices; the latter as tuples, which have a hash."""

    keys: tuple[Any, ...]

    def __call__(self, array: Any) -> Any:
        return array[tuple(slice(*key) if type(key) is tuple else key for key in self.keys)]


def _view_of(interpreter: TracingInterpreter, array: Any, key: Any) -> Any:
    """A view of an array that existed before: as little of its items is read as then; NotImplemented where it is no view."""
    source, keys = interpreter.values.source_of(array), key if type(key) is tuple else (key,)
    if source is None or not all(type(item) in (int, slice, type(None), type(Ellipsis)) for item in keys):
        return NotImplemented
    item = _Item(tuple((key.start, key.stop, key.step) if type(key) is slice else key for key in keys))
    found = item(array)
    place = ComputedSource(item, (source,), f"{source.name}[{', '.join(map(str, item.keys))}]")
    return interpreter.values.read(found, place) if isinstance(found, ARRAY) else NotImplemented


def _operate(interpreter: TracingInterpreter, function: Any, operands: Arguments) -> Any:
    is_numpys = any(isinstance(item, ARRAY) for item in (operands[:1] if function is operator.setitem else operands))
    if not is_numpys or any(isinstance(item, torch.Tensor) for item in operands):
        return NotImplemented
    if function in _WRITING and interpreter.values.source_of(root(operands[0])) is not None:
        raise Break(f"an array that existed before is written to by {function.__name__}", _ADVICE)
    if function is operator.getitem and type(operands[0]) in ARRAY and type(operands[1]) is not torch.SymInt:
        found = _view_of(interpreter, operands[0], plain_numbers(operands[1]))
        if found is not NotImplemented:
            return found
    return compute(interpreter, function, operands, {})


@error_rule
def _read_only(interpreter: TracingInterpreter, error: BaseException, operands: Arguments) -> None:
    if any("read-only" in text for text in error.args if type(text) is str):
        raise Break("an array that existed before is written to", _ADVICE)


# --- arrays that leave --------------------------------------------------------------------------------------------------


def _again(array: Any) -> Any:
    return array.copy(order="K")


def _view(offset: int, array: Any, memory: Any) -> Any:
    bytes_of = memory.ravel(order="K").view(NUMPY.uint8)
    return NUMPY.ndarray(array.shape, array.dtype, bytes_of, offset, array.strides)


def _made(array: Any) -> tuple[Any, ...]:
    """The function that makes an array again, and its arguments: one for the memory, one for each view of it."""
    owner = root(array)
    if owner.base is not None or not owner.flags.writeable or owner.dtype.hasobject:
        raise CaptureError("a view of an array that existed before leaves the function", advice="copy it")
    if owner is array:
        return functools.partial(_again, array.copy(order="K")), ()
    first, own = (item.__array_interface__["data"][0] for item in (owner, array))
    return functools.partial(_view, own - first, array), (owner,)


if NUMPY is not None:
    callable_rule[NUMPY.ufunc] = callable_rule[type(NUMPY.mean)] = _call
    for _name in _MAKERS:
        rule[getattr(NUMPY, _name)] = functools.partial(
            lambda function, interpreter, args, kwargs: compute(interpreter, function, args, kwargs),
            getattr(NUMPY, _name),
        )
    for _function in (*BINARY, *COMPARE.values(), *_OTHERS):
        operator_rule(_function)(_operate)
    MADE_BY_CALL[NUMPY.ndarray] = _made
