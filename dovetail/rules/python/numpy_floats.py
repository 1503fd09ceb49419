"""``numpy.float64`` numbers that change from call to call: what NumPy makes of symbolic numbers, and arguments seen to change.

The program sees a stand-in that holds a symbolic float. NumPy itself computes it at every call, when the guards are checked: its
functions of plain numbers have no effects, and where one would warn, the entry misses. Torch takes such a number for a Python
float. All else is given the plain number, which then holds for this call only.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.errors import CaptureError
from dovetail.frontend.code.frame import Break
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import (
    Arguments,
    Keywords,
    ValueKind,
    callable_rule,
    changing_rule,
    operator_rule,
    rule,
    value_kind,
)
from dovetail.frontend.values.leaves import plain_numbers
from dovetail.frontend.values.values import Values
from dovetail.guards import ComputedSource, Equals, Source, TypeIs
from dovetail.rules.python.numpy_numbers import ARRAY, NUMPY, array_number
from dovetail.rules.python.numpy_values import changing_numbers, compute
from dovetail.rules.sizes.exact_numbers import PYTHON_ONLY, source_of_number
from dovetail.runtime.recipe import Recipe
from dovetail.runtime.recipe_builder import RecipeBuilder
from dovetail.torch_private import sizes as private_sizes
from dovetail.trace import can_be_symbolic

_SYMBOLIC = (torch.SymInt, torch.SymFloat)
_OPERATORS = frozenset(
    {
        *(operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod, operator.pow),
        *(operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.neg, operator.pos, operator.abs),
        *(operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne),
    }
)


#: Of these, Python's float is NumPy's to the last bit, but for a division by zero: the graph computes them where one number is
#: made of data (Adam's counts).
_ALIKE = frozenset(
    {
        *(operator.add, operator.sub, operator.mul, operator.truediv, operator.neg, operator.pos, operator.abs),
        *(operator.iadd, operator.isub, operator.imul, operator.itruediv),
    }
)
#: Functions of NumPy's that make one number of a list of numbers.
_TAKING_LISTS = frozenset(
    vars(NUMPY)[name]
    for name in ("amax", "amin", "interp", "max", "mean", "median", "min", "prod", "std", "sum", "var")
    if NUMPY is not None
)


#: An array of constants is kept up to this length.
_MOST_CONSTANTS = 4096


class NumpyFloat:
    """A ``numpy.float64`` that changes; ``number`` is the symbolic float that it holds."""

    def __init__(self, number: torch.SymFloat) -> None:
        self.number = number


def _plain(value: Any) -> Any:
    """The number of this call, to which the entry is then held."""
    return NUMPY.float64(float(value.number)) if type(value) is NumpyFloat else value


def _as_plain(name: str) -> Callable[..., Any]:
    return lambda self, *args: getattr(_plain(self), name)(*map(_plain, args))


for _name in (
    *("bool", "float", "int", "complex", "hash", "repr", "str", "format", "round", "abs", "neg", "lt", "gt", "eq"),
):
    # For native code, which knows no stand-ins.
    setattr(NumpyFloat, f"__{_name}__", _as_plain(f"__{_name}__"))


@dataclass(frozen=True)
class _Compute:
    """A function of NumPy's, or an operator, on numbers, of which some are NumPy's own; ValueError where NumPy would warn."""

    function: Any
    numpys: tuple[bool, ...]

    def __call__(self, *numbers: Any) -> Any:
        given = [NUMPY.float64(item) if flag else item for item, flag in zip(numbers, self.numpys, strict=True)]
        with NUMPY.errstate(all="raise"):
            result = self.function(*given)
        if type(result) not in (NUMPY.float64, NUMPY.bool_):
            raise ValueError("another type than float64")
        return result.item()


@dataclass(frozen=True)
class _OfLists:
    """A function of lists of numbers (``numpy.min([a, b])``), called with the numbers; None for one that is in no list."""

    function: Any
    lengths: tuple[int | None, ...]

    @property
    def __name__(self) -> str:
        return str(self.function.__name__)

    def __call__(self, *numbers: Any) -> Any:
        rest = iter(numbers)
        return self.function(
            *(next(rest) if length is None else list(itertools.islice(rest, length)) for length in self.lengths)
        )


def _item_of(items: tuple[float, ...], place: int) -> Any:
    return NUMPY.float64(items[place])


@changing_numbers
def compute_number(interpreter: TracingInterpreter, function: Any, args: Arguments) -> Any:
    """NumPy's result for numbers of which one changes; NotImplemented where that is no float and no truth value."""
    if function in _TAKING_LISTS and any(type(item) in (list, tuple) for item in args):
        lengths = tuple(len(item) if type(item) in (list, tuple) else None for item in args)
        flat = tuple(one for item in args for one in (item if type(item) in (list, tuple) else (item,)))
        if not any(type(item) in (NumpyFloat, *_SYMBOLIC) for item in flat):
            return NotImplemented
        for item in args:
            interpreter.values.whole(item)
        return compute_number(interpreter, _OfLists(function, lengths), flat)
    array = args[0] if function is operator.getitem and type(args[0]) in ARRAY and args[0].ndim == 1 else None
    kept: Any = None if array is None else interpreter.values.source_of(array)
    if array is not None and kept is None and array.dtype == NUMPY.float64 and array.size <= _MOST_CONSTANTS:
        # An array that the program has made of constants, such as a schedule.
        function, kept = _item_of, tuple(array.tolist())
    given = args if kept is None else args[1:]
    is_known = all(type(item) in (int, float, NumpyFloat, *_SYMBOLIC, NUMPY.float64) for item in given)
    if not is_known or not any(type(item) in (NumpyFloat, *_SYMBOLIC) for item in args):
        return NotImplemented
    numbers = [item.number if type(item) is NumpyFloat else item for item in args]
    if any(map(private_sizes.is_data_number, numbers)):
        if function not in _ALIKE or not any(type(item) in (NumpyFloat, NUMPY.float64) for item in args):
            return NotImplemented
        plain = [float(item) if type(item) is NUMPY.float64 else item for item in numbers]
        if function in (operator.truediv, operator.itruediv):
            # Python's would raise for a zero.
            with torch.no_grad():
                upper, lower = (torch.scalar_tensor(item, dtype=torch.float64) for item in plain)  # type: ignore[arg-type]
                quotient: Any = torch.div(upper, lower).item()
            return NumpyFloat(quotient)
        return NumpyFloat(interpreter.operate(function, *plain))
    found: list[Any] = [source_of_number(interpreter, item) if type(item) in _SYMBOLIC else item for item in numbers]
    call = _Compute(function, tuple(type(item) in (NumpyFloat, NUMPY.float64) for item in args))
    hints = [item.node.hint if type(item) in _SYMBOLIC else item for item in numbers]
    try:
        value = call(*hints)
    except (ArithmeticError, IndexError, TypeError, ValueError):
        # Also for a place behind the end: the program may handle that error, which then depends on the number.
        return NotImplemented
    if any(item is None for item in found):
        return NotImplemented
    found = [kept if item is array else item.item() if type(item) is NUMPY.float64 else item for item in found]
    shown = ", ".join(item.name if isinstance(item, Source) else repr(item) for item in found)
    source = ComputedSource(call, tuple(found), f"{function.__name__}({shown})")
    if type(value) is float and can_be_symbolic(value):
        return NumpyFloat(interpreter.values.symbolic_number(value, source))
    interpreter.values.guard(source, Equals(value), f"{source.name} was computed")
    return NUMPY.float64(value) if type(value) is float else NUMPY.bool_(value)


class _Kind(ValueKind):
    """Numbers of NumPy's that change."""

    def claims(self, real: torch.Tensor) -> bool:
        """No tensor is one."""
        return False

    def holds(self, value: Any) -> bool:
        """Whether this is a stand-in."""
        return type(value) is NumpyFloat

    def example(self, values: Any, value: Any) -> Any:
        """A number of the same type."""
        return NUMPY.float64(1.0)

    def leave(self, interpreter: TracingInterpreter, builder: RecipeBuilder, value: Any) -> Recipe:
        """NumPy's number of what the symbol is at a call."""
        return builder.made(value, NUMPY.float64, [value.number])

    def attribute(self, interpreter: TracingInterpreter, value: Any, name: str) -> Any:
        """``value.name``: ``item`` reads the number; all else is asked of the number of this call."""
        return _Item(value.number) if name == "item" else getattr(_plain(value), name)

    def call(self, interpreter: TracingInterpreter, function: Any, args: Arguments, kwargs: Keywords) -> Any:
        """An operator, or a function of NumPy's or torch's."""
        if function is float and len(args) == 1:
            return args[0].number
        function = operator.abs if function is abs else function
        found = NotImplemented if kwargs or not _is_numpys(function) else compute_number(interpreter, function, args)
        if found is not NotImplemented:
            return found
        is_made = getattr(function, "__name__", "") in _MAKERS
        is_torchs = not is_made and _is_given_tensors(getattr(function, "__self__", None), *args, *kwargs.values())
        take = _number if is_torchs else _plain
        given, keywords = _taken(args, take), {name: _taken(item, take) for name, item in kwargs.items()}
        if function not in _OPERATORS:
            return interpreter.call(function, given, keywords)
        return interpreter.operate(function, *given) if is_torchs else _operate_plain(interpreter, function, given)


def _operate_plain(interpreter: TracingInterpreter, function: Any, numbers: Arguments) -> Any:
    """An operator of the numbers of this call, where one is NumPy's: Python's would raise for a division by zero."""
    plain = tuple(map(plain_numbers, numbers))
    is_known = all(isinstance(item, (int, float, complex, NUMPY.generic)) for item in plain)
    return compute(interpreter, function, plain, {}) if is_known else interpreter.operate(function, *plain)


#: They ask for the type of a number of NumPy's.
_MAKERS = ("tensor", "as_tensor", "asarray", "new_tensor")


def _is_given_tensors(*values: Any) -> bool:
    items = (item for value in values for item in (value if type(value) in (list, tuple) else (value,)))
    return any(isinstance(item, torch.Tensor) for item in items)


def _is_numpys(function: Any) -> bool:
    is_known = function in (NUMPY.clip, NUMPY.round) or function in _TAKING_LISTS
    return function in _OPERATORS or isinstance(function, NUMPY.ufunc) or is_known


def _number(value: Any) -> Any:
    return value.number if type(value) is NumpyFloat else value


def _taken(value: Any, take: Callable[[Any], Any]) -> Any:
    return type(value)([take(item) for item in value]) if type(value) in (list, tuple) else take(value)


@dataclass(frozen=True)
class _Item:
    """The method ``item`` of a number that changes."""

    number: Any


@callable_rule(_Item)
def _item(interpreter: TracingInterpreter, method: Any, args: Arguments, kwargs: Keywords) -> Any:
    if args or kwargs:
        raise CaptureError("item() of a number is called with arguments")
    return method.number


@changing_rule
def _changing(values: Values, value: Any, source: Source) -> Any:
    """A number of NumPy's that was read and has changed since an earlier capture."""
    if NUMPY is None or type(value) is not NUMPY.float64:
        return NotImplemented
    inside = ComputedSource(array_number, (source,), f"the value of {source.name}")
    if values.in_backward or not values.trace.settings.shapes.is_symbolic_number(value.item(), inside.name, False):
        return NotImplemented
    values.guard(source, TypeIs(NUMPY.float64), f"{source.name} was read")
    return NumpyFloat(values.symbolic_number(value.item(), inside))


@operator_rule(
    *_ALIKE, *(getattr(operator, prefix + name) for prefix in ("", "i") for name in ("floordiv", "mod", "pow"))
)
def _compute_alike(interpreter: TracingInterpreter, function: Any, numbers: Arguments) -> Any:
    """A plain number of NumPy's and one that changes, or that the data decides, make a number of NumPy's."""
    scalars = [item for item in numbers if NUMPY is not None and isinstance(item, NUMPY.generic)]
    if not scalars or not any(map(private_sizes.is_symbolic, numbers)):
        return NotImplemented
    if not any(map(private_sizes.is_data_number, numbers)):
        found = compute_number(interpreter, function, numbers)
        return _operate_plain(interpreter, function, numbers) if found is NotImplemented else found
    if not all(type(item) is NUMPY.float64 for item in scalars) or function not in _ALIKE:
        raise Break("NumPy is given a number made of data", "call it outside of the function")
    return compute_number(interpreter, function, numbers)


@operator_rule(max, min)
def _choose(interpreter: TracingInterpreter, function: Any, numbers: Arguments) -> Any:
    """The first number that none of the others is better than, as Python compares them."""
    if not any(type(item) is NumpyFloat for item in numbers):
        return NotImplemented
    chosen, *others = numbers
    for item in others:
        is_better = interpreter.operate(operator.gt if function is max else operator.lt, item, chosen)
        chosen = item if interpreter.truth(is_better) else chosen
    return chosen


def _of_floats(function: Any) -> None:
    @rule(function)
    def handler(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
        """A function of ``math`` makes the same of NumPy's float as of Python's."""
        return interpreter.call_native(function, tuple(map(_number, args)), kwargs)


def _made(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    """``numpy.float64(step)`` of a number that changes."""
    found = NotImplemented if kwargs or len(args) != 1 else compute_number(interpreter, NUMPY.float64, args)
    return interpreter.make_instance(NUMPY.float64, args, kwargs) if found is NotImplemented else found


if NUMPY is not None:
    value_kind(_Kind(), NumpyFloat)
    rule(NUMPY.float64)(_made)
    for _function in PYTHON_ONLY:
        if _function.__module__ == "math":
            _of_floats(_function)
