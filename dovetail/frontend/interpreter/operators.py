"""Operators and truth: the operands' own Python methods are interpreted, all else runs natively."""

from __future__ import annotations

import operator
import types
from collections.abc import Callable
from typing import Any

import torch

from dovetail.frontend.code.frame import Break, Frame
from dovetail.frontend.instructions.operations import BINARY, COMPARE, SYMBOLS
from dovetail.frontend.interpreter.containers import CONTAINERS, Containers
from dovetail.frontend.interpreter.lookup import class_attribute, has_native_method, python_method
from dovetail.frontend.rules import Jump, branch_rule, kind_among, number_rule, operator_rule
from dovetail.frontend.values.aliases import guard_equality
from dovetail.frontend.values.leaves import PLAIN, is_leaf_value, plain_numbers
from dovetail.torch_private import sizes as private_sizes
from dovetail.torch_private import tracing as private_tracing

BINARY_NAMES: dict[Any, tuple[str, str]] = dict(zip(BINARY, SYMBOLS.items(), strict=False))
IN_PLACE: dict[Any, Any] = dict(zip(BINARY[len(SYMBOLS) :], BINARY, strict=False))
_MIRRORED = str.maketrans("<>", "><")
#: The method of the left operand, that of the right one, and the symbol.
COMPARISONS: dict[Any, tuple[str, str, str]] = {
    function: (f"__{function.__name__}__", f"__{COMPARE[symbol.translate(_MIRRORED)].__name__}__", symbol)
    for symbol, function in COMPARE.items()
}
UNARY: dict[Any, str] = {operator.neg: "__neg__", operator.pos: "__pos__", operator.invert: "__invert__"}
_SYMBOLIC = (torch.SymInt, torch.SymFloat)
_SIMPLE = frozenset({int, float, str, bool, type(None), torch.SymInt, torch.SymFloat, torch.SymBool})
_NUMBERS = (int, float, complex, bool)


class Operators(Containers):
    """The part of the interpreter that does operators and truth."""

    def operate(self, function: Callable[..., Any], *operands: Any) -> Any:
        is_text = type(operands[0]) is str
        has_rule = is_text and bool(operator_rule.get(function))
        for item in operands:
            if has_rule or (type(item) not in _SIMPLE and not (isinstance(item, torch.Tensor) and not is_text)):
                return self._operate_on_objects(function, operands)
        if any(type(item) is str for item in operands):
            operands = tuple(plain_numbers(item) for item in operands)
        number = self.derive(function, operands)
        return self.native(function, operands, {}) if number is NotImplemented else number

    def derive(self, function: Callable[..., Any], numbers: tuple[Any, ...]) -> Any:
        kinds = tuple(PLAIN) if function is operator.is_ else _SYMBOLIC
        if function is operator.getitem or any(type(item) in kinds for item in numbers):
            for handler in number_rule:
                if (result := handler(self, function, numbers)) is not NotImplemented:
                    return result
        return NotImplemented

    def _operate_on_objects(self, function: Any, operands: tuple[Any, ...]) -> Any:
        kind = kind_among(operands)
        result = NotImplemented if kind is None else kind.call(self, function, operands, {})
        if result is not NotImplemented:
            return result
        for handler in operator_rule.get(function, ()):
            if (result := handler(self, function, operands)) is not NotImplemented:
                return result
        if function is operator.contains:
            return self.contains(*operands)
        is_handled, result = self._operate_python(function, operands)
        if is_handled:
            return result
        left = operands[0]
        if function in IN_PLACE and isinstance(left, (list, dict, set)):
            method = getattr(left, f"__{function.__name__}__", None)
            result = self.call_container_method(left, method, operands[1:], {}) if method else NotImplemented
            if result is not NotImplemented:
                return result
        for item in operands:
            self.values.whole_deep(item)
        if function in (operator.eq, operator.ne) and not any(isinstance(item, torch.Tensor) for item in operands):
            is_equal = self.equal_containers(*operands)
            if is_equal is not None:
                return is_equal is (function is operator.eq)
            for item in operands:
                guard_equality(self.values, item)
            return function(*operands)
        return self.native(function, operands, {})

    def _operate_python(self, function: Any, operands: tuple[Any, ...]) -> tuple[bool, Any]:
        """Ask the operands' Python methods; False where the native operator is to decide."""
        if function in UNARY:
            method = python_method(operands[0], UNARY[function])
            return (False, None) if method is None else (True, self.ask(method, operands[0]))
        left, right = operands
        if function in IN_PLACE:
            name = f"__{function.__name__}__"
            method = python_method(left, name)
            result = NotImplemented if method is None else self.ask(method, left, right)
            if result is not NotImplemented:
                return True, result
            if method is None and has_native_method(left, name):
                return False, None
            function = IN_PLACE[function]
        is_comparison = function in COMPARISONS
        if is_comparison:
            first, second, symbol = COMPARISONS[function]
        elif function in BINARY_NAMES:
            base, symbol = BINARY_NAMES[function]
            first, second = f"__{base}__", f"__r{base}__"
        else:
            return False, None
        candidates = _order(left, right, (first, second), is_comparison)
        is_asked = False
        for item, name, other in candidates:
            if isinstance(item, torch.Tensor) or is_leaf_value(item):
                is_formatting = function is operator.mod and item is left and isinstance(left, (str, bytes))
                if is_formatting or _takes(item, name, other):
                    return False, None
                continue
            method, negate = _method_of(item, name)
            if method is None:
                continue
            is_asked = True
            result = self.ask(method, item, other)
            if result is not NotImplemented:
                return True, not self.truth(result) if negate else result
        if not is_asked or any(has_native_method(item, name) for item, name, _ in candidates):
            return False, None
        # Everybody has been asked: the native operator would ask again.
        if function in (operator.eq, operator.ne):
            return True, (left is right) is (function is operator.eq)
        kinds = " and ".join(repr(self.call(type, (item,), {}).__name__) for item in (left, right))
        if is_comparison:
            raise TypeError(f"{symbol!r} not supported between instances of {kinds}")
        raise TypeError(f"unsupported operand type(s) for {symbol}: {kinds}")

    # --- truth --------------------------------------------------------------------------------------------------------

    def truth(self, value: Any) -> bool:
        if value is True or value is False or value is None:
            return bool(value)
        if isinstance(value, torch.Tensor) or private_sizes.is_data_number(value):
            return self._truth_of_data(value, None)
        return self._truth_of_object(value)

    def truth_at_jump(self, frame: Frame, value: Any, target: int, wanted: bool) -> bool:
        if isinstance(value, torch.Tensor) or private_sizes.is_data_number(value):
            return self._truth_of_data(value, Jump(frame, target, wanted))
        return self.truth(value)

    def _truth_of_data(self, value: Any, jump: Jump | None) -> bool:
        """The truth of a tensor, which is not known while tracing, or of a number made of one."""
        error: BaseException | None = None
        if isinstance(value, torch.Tensor):
            data_symbols = self.trace.data_symbols()
            _check_truth(value)
            try:
                # A constant tensor knows its truth.
                return bool(value)
            except private_tracing.DATA_DEPENDENT_ERRORS as raised:
                # The question itself has made a number out of data.
                self.trace.forgive_data_symbols(data_symbols)
                error = raised
        for handler in branch_rule:
            known = handler(self, value, jump)
            if known is not NotImplemented:
                return bool(known)
        if error is None and not private_sizes.is_made_of_data_float(value) and private_sizes.is_settled(value):
            return bool(value)
        raise Break(
            "a branch depends on the values of a tensor",
            "use torch.where, or branch outside of the function",
            is_clean=True,
        ) from error

    def _truth_of_object(self, value: Any) -> bool:
        kind = type(value)
        for name in ("__bool__", "__len__"):
            method, _ = class_attribute(kind, name)
            if isinstance(method, types.FunctionType):
                if name == "__len__":
                    return bool(self.called_length(method, value))
                result = self.ask(method, value)
                if type(result) is not bool:
                    raise TypeError(f"__bool__ should return bool, returned {type(result).__name__}")
                return result
            if hasattr(kind, name):
                break
        if isinstance(value, CONTAINERS):
            self.guard_length(value)
        elif (
            (hasattr(kind, "__bool__") or hasattr(kind, "__len__"))
            and self.values.source_of(value) is not None
            and not is_leaf_value(value)
            and not isinstance(value, type)
        ):
            raise Break(
                f"the truth of a {kind.__qualname__} object is asked for, which nobody guards",
                "ask for it outside of the function, or keep the items in a list or dictionary",
            )
        return bool(value)

    def called_length(self, method: types.FunctionType, value: Any) -> Any:
        """The length that a class's own ``__len__`` gives, which may be symbolic; raises what ``len`` raises for others."""
        result = self.ask(method, value)
        if private_sizes.is_symbolic(result) and result >= 0:
            return result
        return len(_Says(result))

    def as_index(self, key: Any) -> Any:
        if isinstance(key, slice):
            return slice(self.as_index(key.start), self.as_index(key.stop), self.as_index(key.step))
        # Of an int of the user's own class, Python takes the number that it is.
        method = None if isinstance(key, int) else python_method(key, "__index__")
        return key if method is None else operator.index(_Says(self.ask(method, key)))


class _Says:
    """Something of a given length, or an index: Python itself decides whether it is one, and what to raise."""

    def __init__(self, number: Any) -> None:
        self._number = number

    def __len__(self) -> int:
        return self._number  # type: ignore[no-any-return]

    __index__ = __len__


def _method_of(item: Any, name: str) -> tuple[types.FunctionType | None, bool]:
    """The Python method that is asked, and whether its answer is negated: Python derives ``!=`` from ``==``."""
    method = python_method(item, name)
    if method is None and name == "__ne__" and not has_native_method(item, name):
        return python_method(item, "__eq__"), True
    return method, False


def _takes(item: Any, name: str, other: Any) -> bool:
    """Whether a plain number or a tensor knows what to do with a number of the user's own class, without asking it."""
    if not isinstance(other, _NUMBERS) or type(other) in _NUMBERS:
        return False
    method = getattr(type(item)(1), name, None) if type(item) in _NUMBERS else None
    # The types decide, and NumPy's numbers may be divided by 0.
    one = next(kind(1) for kind in _NUMBERS if isinstance(other, kind))
    return isinstance(item, torch.Tensor) or (method is not None and method(one) is not NotImplemented)


def _order(left: Any, right: Any, names: tuple[str, str], is_comparison: bool) -> list[tuple[Any, str, Any]]:
    """The questions in their order (object, method, operand): to the right operand first where its subclass has a say."""
    candidates = [(left, names[0], right), (right, names[1], left)]
    if not is_comparison and type(left) is type(right):
        return candidates[:1]
    if type(left) is not type(right) and type(left) in type(right).__mro__:
        own, inherited = (class_attribute(kind, names[1])[0] for kind in (type(right), type(left)))
        if is_comparison or own is not inherited:
            candidates.reverse()
    return candidates


def _check_truth(value: torch.Tensor) -> None:
    """Raise eager's error for the truth of several values, or of none; fake tensors speak of scalars."""
    count = value.numel() if value.layout is torch.strided else 1
    if type(count) is int and count != 1:
        with private_tracing.disable_current_modes():
            bool(torch.zeros(min(count, 2)))
