"""Arithmetic on symbolic numbers that only Python itself computes to the last bit.

Torch's symbolic integers add, multiply and divide as Python's ints do. Its symbolic floats are sympy expressions, which are
put in another order and rounded in another way: ``n / 3 * 0.1`` was seen to differ in its last bit. So a result that is a
float, and everything else on the list below, is computed by Python at every call and is a symbolic number of its own. So are
comparisons of floats: torch 2.13 says of a float symbol that it is less than itself, and equal to itself though it may be NaN.

>>> is_exact_only_in_python(operator.truediv, (3, 4))
False
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch

from dovetail.errors import OutgrownError
from dovetail.frontend.code.frame import Break
from dovetail.frontend.instructions.operations import BINARY, COMPARE, SYMBOLS
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, number_rule
from dovetail.frontend.values.leaves import plain_numbers
from dovetail.guards import ComputedSource, Equals, FloatSource, NumberSource, Source
from dovetail.torch_private import numbers as private_numbers
from dovetail.torch_private import sizes as private_sizes
from dovetail.trace import CaptureSettings, Retry, Trace, can_be_symbolic

EXACT_ON_INTEGERS = frozenset(
    {
        *(operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.neg),
        *(operator.pos, operator.iadd, operator.isub, operator.imul, operator.ifloordiv, operator.imod),
        *(operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne),
    }
)


def sum_of(start: Any, *numbers: Any) -> Any:
    """The builtin's own sum: since Python 3.12 it is not the sum of one after the other.

    >>> sum_of(0.5, 1, 2)
    3.5
    """
    return sum(numbers, start)


PYTHON_ONLY = EXACT_ON_INTEGERS | frozenset(
    {
        *(operator.truediv, operator.pow, operator.itruediv, operator.ipow, operator.lshift, operator.rshift),
        *(operator.and_, operator.or_, operator.xor, int, float, abs, round, pow, math.sqrt, math.isqrt),
        *(math.exp, math.log, math.log2, math.log10, math.log1p, math.sin, math.cos, math.tan, math.tanh),
        *(math.atan, math.pow, math.floor, math.ceil, math.trunc, math.fabs, math.gcd, math.erf, sum_of, max),
        min,
    }
)
"""Pure functions of numbers that give a number."""
_MARKS = {function: mark for mark, function in COMPARE.items()}
_MARKS |= {function: mark.split()[0] for function, mark in zip(BINARY, SYMBOLS.values(), strict=False)}


class Formula:
    """A whole number over other ones, as Python text; two of the same text are equal.

    >>> Formula(("n", "m"), "n * m + 1")(2, 3)
    7
    """

    def __init__(self, names: tuple[str, ...], text: str) -> None:
        self.names = names
        self.text = text
        code = compile(f"lambda {', '.join(names)}: {text}", "<size>", "eval")
        self._compute: Callable[..., Any] = eval(code, private_sizes.python_text_globals())

    def __call__(self, *values: int) -> Any:
        """The number."""
        return self._compute(*values)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Formula) and (self.names, self.text) == (other.names, other.text)

    def __hash__(self) -> int:
        return hash((self.names, self.text))


def is_exact_only_in_python(function: Any, arguments: tuple[Any, ...]) -> bool:
    """Whether this is arithmetic on numbers, at least one symbolic, that torch's symbols would not do as Python does."""
    if not any(type(item) in (torch.SymInt, torch.SymFloat) for item in arguments):
        return False
    try:
        if function not in PYTHON_ONLY:
            return False
    except TypeError:
        return False
    if not all(type(item) in (int, float, bool, torch.SymInt, torch.SymFloat) for item in arguments):
        return False
    has_float = any(type(item) in (float, torch.SymFloat) for item in arguments)
    if function in (operator.mod, operator.imod) and not private_numbers.is_surely_positive(arguments[1]):
        # torch 2.13 takes the remainder of a number below a negative divisor for the number itself.
        return True
    return has_float or function not in EXACT_ON_INTEGERS


_NO_FLOAT = (int, round, operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne)


def gives_a_float(function: Any, arguments: tuple[Any, ...]) -> bool:
    """Whether a pure function of numbers has a float for its result, whatever the numbers' values are."""
    floats = [type(item) in (float, torch.SymFloat) for item in arguments]
    if function in (max, min):
        return len(floats) > 1 and all(floats)
    if function in (operator.truediv, operator.itruediv) or getattr(function, "__module__", None) == "math":
        return function not in (math.floor, math.ceil, math.trunc, math.gcd, math.isqrt)
    return any(floats) and function not in _NO_FLOAT


def real_power(base: float, exponent: float) -> float:
    """``base ** exponent`` as Python computes it. Raises :class:`OutgrownError` for a complex result.

    >>> real_power(4.0, 0.5)
    2.0
    """
    result = base**exponent
    if isinstance(result, complex):
        raise OutgrownError(
            f"{base!r} ** {exponent!r} is a complex number; the graph was compiled for real ones",
            advice="keep this number out of the compiled function",
        )
    return result  # type: ignore[no-any-return]


_DIVIDING = (operator.floordiv, operator.ifloordiv, operator.mod, operator.imod)


def _is_zero(number: Any) -> bool:
    """Whether a symbolic integer is zero; a guard holds it to the answer."""
    return type(number) is torch.SymInt and not private_sizes.is_data_number(number) and bool(number == 0)


_SMALL = range(-5, 257)
"""The integers that Python has only one object of."""


@number_rule
def is_the_same(interpreter: TracingInterpreter, function: Any, numbers: Arguments) -> Any:
    """Whether two numbers are one object, of which at least one changes from call to call."""
    if function is not operator.is_:
        return NotImplemented
    left, right = numbers
    if {type(left), type(right)} <= {bool, torch.SymBool}:
        return interpreter.truth(left) is interpreter.truth(right)
    for kinds in ((int, torch.SymInt), (float, torch.SymFloat)):
        if type(left) in kinds and type(right) in kinds:
            if not interpreter.truth(interpreter.operate(operator.eq, left, right)):
                return False
            if int in kinds and plain_numbers(left) in _SMALL:
                return True
            raise Retry("equal numbers are compared by identity", change=CaptureSettings.with_fewer_symbols)
    return False


@number_rule
def inverted(interpreter: TracingInterpreter, function: Any, numbers: Arguments) -> Any:
    """``~n``, for which torch has no symbol, as the sum that it is."""
    if function not in (operator.invert, operator.inv) or type(numbers[0]) is not torch.SymInt:
        return NotImplemented
    return interpreter.operate(operator.sub, interpreter.operate(operator.neg, numbers[0]), 1)


@number_rule
def derive(interpreter: TracingInterpreter, function: Any, numbers: Arguments) -> Any:
    """The result of a pure function of numbers as a symbolic number; raises what the function raises."""
    function = sum_of if function is sum else function
    if function in _DIVIDING and _is_zero(numbers[1]):
        return function(*[plain_numbers(item) for item in numbers])
    if not is_exact_only_in_python(function, numbers):
        return NotImplemented
    if any(map(private_sizes.is_data_number, numbers)):
        return _of_data(interpreter.trace, function, numbers)
    hints = [item.node.hint if private_sizes.is_symbolic(item) else item for item in numbers]
    try:
        value = function(*hints)
    except (ArithmeticError, ValueError):
        # Other numbers may raise nothing: what the program does about the error holds for these alone.
        return function(*[plain_numbers(item) for item in numbers])
    sources = tuple(
        source_of_number(interpreter, item) if private_sizes.is_symbolic(item) else item for item in numbers
    )
    if type(value) not in (int, float, bool) or any(source is None for source in sources):
        return function(*[plain_numbers(item) for item in numbers])
    shown = [item.name if isinstance(item, Source) else repr(item) for item in sources]
    mark = _MARKS.get(function)
    name = getattr(function, "__name__", "function")
    text = f"({shown[0]} {mark} {shown[1]})" if mark is not None else f"{name}({', '.join(shown)})"
    source = ComputedSource(function, sources, text)
    if can_be_symbolic(value):
        return interpreter.values.symbolic_number(value, source)
    interpreter.values.guard(source, Equals(value), f"{source.name} was computed")
    return value


def _of_data(trace: Trace, function: Any, numbers: Arguments) -> Any:
    """The result where one of the numbers is made of a tensor's data."""
    if gives_a_float(function, numbers):
        function = real_power if function in (operator.pow, operator.ipow, pow) else function
        return private_numbers.recorded_number(function, numbers, trace.tracer)
    symbolic = [item for item in numbers if private_sizes.is_symbolic(item)]
    if all(private_sizes.is_symbol(private_sizes.first_expression(item)) for item in symbolic):
        # One Python operation, recorded as it is. A longer expression would be simplified as if numbers were real.
        result = function(*numbers)
        # ``x - x`` is no zero and ``x == x`` not true where x is no number.
        if private_sizes.is_data_number(result):
            return result
    raise Break("a Python number is made from a tensor's data", "keep it in a tensor")


def _geometry(tensor: Source, kind: str, dim: int) -> Source:
    """A size, a stride or the storage offset of a tensor."""
    if kind == "size":
        return ComputedSource(torch.Tensor.size, (tensor, dim), f"{tensor.name}.shape[{dim}]")
    if kind == "stride":
        return ComputedSource(torch.Tensor.stride, (tensor, dim), f"{tensor.name}.stride({dim})")
    return ComputedSource(torch.Tensor.storage_offset, (tensor,), f"{tensor.name}.storage_offset()")


def source_of_number(interpreter: TracingInterpreter, number: Any) -> Source | None:
    """The way to find a symbolic number again; None where there is none."""
    expression = private_sizes.first_expression(number)
    bindings = interpreter.trace.bindings()
    symbols = private_sizes.symbols_of(expression)
    if not symbols or any(symbol not in bindings.symbols for symbol in symbols):
        return None
    sources: list[Source] = []
    for symbol in symbols:
        index, kind, dim = bindings.symbols[symbol]
        carrier = interpreter.values.guards.tensor_source(index)
        is_number = isinstance(carrier, (NumberSource, FloatSource))
        sources.append(carrier.base if is_number else _geometry(carrier, kind, dim))  # type: ignore[union-attr,attr-defined]
    if private_sizes.is_symbol(expression):
        return sources[0]
    names = tuple(str(symbol) for symbol in symbols)
    formula = Formula(names, private_sizes.python_text(expression, dict(zip(symbols, names, strict=True))))
    return ComputedSource(formula, tuple(sources), bindings.sentence(expression))
