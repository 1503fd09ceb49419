"""Operators, truth and containment: the operands' own Python methods are interpreted, all else runs natively."""

from __future__ import annotations

import collections
import operator
import types
from collections.abc import Callable
from typing import Any

import torch

from dovetail.frontend.code.frame import Break, Frame
from dovetail.frontend.interpreter.attributes import MISSING, class_attribute
from dovetail.frontend.interpreter.call_tables import runs_natively
from dovetail.frontend.interpreter.shown_names import shown_name
from dovetail.frontend.rules import BRANCHES, OPERATORS, Jump, kind_among
from dovetail.frontend.sizes.numbers import Numbers, is_exact_only_in_python
from dovetail.frontend.values.aliases import guard_equality
from dovetail.frontend.values.leaves import is_leaf_value, plain_numbers
from dovetail.guards import Length
from dovetail.guards.reading import plain_length
from dovetail.torch_private import sizes as private_sizes
from dovetail.torch_private import tracing as private_tracing

SYMBOLIC_NUMBERS = (torch.SymInt, torch.SymFloat)
_MOST_KEYS = 64

BINARY_NAMES: dict[Any, tuple[str, str]] = {
    operator.add: ("add", "+"),
    operator.sub: ("sub", "-"),
    operator.mul: ("mul", "*"),
    operator.truediv: ("truediv", "/"),
    operator.floordiv: ("floordiv", "//"),
    operator.mod: ("mod", "%"),
    operator.pow: ("pow", "** or pow()"),
    operator.matmul: ("matmul", "@"),
    operator.and_: ("and", "&"),
    operator.or_: ("or", "|"),
    operator.xor: ("xor", "^"),
    operator.lshift: ("lshift", "<<"),
    operator.rshift: ("rshift", ">>"),
}
IN_PLACE: dict[Any, Any] = {getattr(operator, f"i{name}"): function for function, (name, _) in BINARY_NAMES.items()}
COMPARISONS: dict[Any, tuple[str, str, str]] = {
    operator.eq: ("__eq__", "__eq__", "=="),
    operator.ne: ("__ne__", "__ne__", "!="),
    operator.lt: ("__lt__", "__gt__", "<"),
    operator.le: ("__le__", "__ge__", "<="),
    operator.gt: ("__gt__", "__lt__", ">"),
    operator.ge: ("__ge__", "__le__", ">="),
}
UNARY: dict[Any, str] = {operator.neg: "__neg__", operator.pos: "__pos__", operator.invert: "__invert__"}
SIMPLE_OPERANDS = frozenset({int, float, str, bool, type(None), torch.SymInt, torch.SymFloat, torch.SymBool})
_NUMBERS = (int, float, complex, bool)
OLD_CONTAINERS = (list, tuple, dict, set, frozenset)


def python_method(value: Any, name: str) -> types.FunctionType | None:
    """A special method that is Python code to interpret, or None."""
    method, _ = class_attribute(type(value), name)
    if isinstance(method, types.FunctionType) and not runs_natively(method.__globals__.get("__name__") or ""):
        return method
    return None


def _native_method(value: Any, name: str) -> bool:
    """Whether a special method is native code that does more than ``object`` does."""
    method, owner = class_attribute(type(value), name)
    return method is not MISSING and owner is not object and python_method(value, name) is None


def _takes(item: Any, name: str, other: Any) -> bool:
    """Whether a plain number or a tensor knows what to do with a number of the user's own class, without asking it."""
    if not isinstance(other, _NUMBERS) or type(other) in _NUMBERS:
        return False
    if isinstance(item, torch.Tensor):
        return True
    method = getattr(item, name, None) if type(item) in _NUMBERS else None
    return method is not None and method(other) is not NotImplemented


def _order(left: Any, right: Any, names: tuple[str, str], comparison: bool) -> list[tuple[Any, str, Any]]:
    """Who is asked, by which method, about whom: the right operand first where it is of a subclass that has a say."""
    candidates = [(left, names[0], right), (right, names[1], left)]
    if not comparison and type(left) is type(right):
        return candidates[:1]
    if type(left) is not type(right) and issubclass(type(right), type(left)):
        own, inherited = (class_attribute(kind, names[1])[0] for kind in (type(right), type(left)))
        if comparison or own is not inherited:
            candidates.reverse()
    return candidates


class Operators(Numbers):
    """The part of the interpreter that does operators, truth and containment."""

    def operate(self, function: Callable[..., Any], *operands: Any) -> Any:
        """An operator, with the operands' own Python methods interpreted."""
        simple = True
        for item in operands:
            if type(item) in SIMPLE_OPERANDS or (isinstance(item, torch.Tensor) and type(operands[0]) is not str):
                continue
            simple = False
            break
        if simple:
            if any(type(item) is str for item in operands):
                operands = tuple(plain_numbers(item) for item in operands)
            if is_exact_only_in_python(function, operands):
                return self.derive(function, operands)
            return self.native(function, operands, {})
        kind = kind_among(operands)
        if kind is not None:
            result = kind.call(self, function, operands, {})
            if result is not NotImplemented:
                return result
        for handler in OPERATORS.get(function, ()):
            result = handler(self, function, operands)
            if result is not NotImplemented:
                return result
        if function is operator.contains:
            return self._contains(*operands)
        handled, result = self._operate_python(function, operands)
        if handled:
            return result
        left = operands[0]
        if function in IN_PLACE and isinstance(left, (list, dict, set)):
            method = getattr(left, f"__{function.__name__}__", None)
            if method is not None:
                return self.call_container_method(left, method, operands[1:], {})
        for item in operands:
            if isinstance(item, OLD_CONTAINERS):
                self.values.whole_deep(item)
        self.values.check_keys(operands)
        if function in (operator.eq, operator.ne) and not any(isinstance(item, torch.Tensor) for item in operands):
            equal = self._equal_containers(*operands)
            if equal is not None:
                return equal is (function is operator.eq)
            for item in operands:
                guard_equality(self.values, item)
            return function(*operands)
        return self.native(function, operands, {})

    def _operate_python(self, function: Any, operands: tuple[Any, ...]) -> tuple[bool, Any]:
        """Ask the operands' Python methods; False where the native operator is to decide."""
        if function in UNARY:
            method = python_method(operands[0], UNARY[function])
            return (False, None) if method is None else (True, self._ask(method, operands[0]))
        left, right = operands
        if function in IN_PLACE:
            name = f"__{function.__name__}__"
            method = python_method(left, name)
            if method is not None:
                result = self._ask(method, left, right)
                if result is not NotImplemented:
                    return True, result
            elif _native_method(left, name):
                return False, None
            handled, result = self._operate_python(IN_PLACE[function], operands)
            return handled, result
        comparison = function in COMPARISONS
        if comparison:
            first, second, symbol = COMPARISONS[function]
        elif function in BINARY_NAMES:
            base, symbol = BINARY_NAMES[function]
            first, second = f"__{base}__", f"__r{base}__"
        else:
            return False, None
        candidates = _order(left, right, (first, second), comparison)
        asked = False
        for item, name, other in candidates:
            if isinstance(item, torch.Tensor) or is_leaf_value(item):
                if _takes(item, name, other):
                    return False, None
                if function is operator.mod and item is left and isinstance(left, (str, bytes)):
                    return False, None
                continue
            method = python_method(item, name)
            negate = False
            if method is None and name == "__ne__" and not _native_method(item, name):
                method, negate = python_method(item, "__eq__"), True
            if method is None:
                continue
            asked = True
            result = self._ask(method, item, other)
            if result is not NotImplemented:
                return True, not self.truth(result) if negate else result
        if not asked or any(_native_method(item, name) for item, name, _ in candidates):
            return False, None
        # Everybody has been asked: the native operator would ask again.
        if function in (operator.eq, operator.ne):
            return True, (left is right) is (function is operator.eq)
        kinds = f"{shown_name(left)!r} and {shown_name(right)!r}"
        if comparison:
            raise TypeError(f"{symbol!r} not supported between instances of {kinds}")
        raise TypeError(f"unsupported operand type(s) for {symbol}: {kinds}")

    def _ask(self, method: types.FunctionType, item: Any, *others: Any) -> Any:
        return self.call(types.MethodType(method, item), others, {})

    def _same(self, left: Any, right: Any) -> bool:
        return left is right or self.truth(self.operate(operator.eq, left, right))

    def _equal_containers(self, left: Any, right: Any) -> bool | None:
        """Whether two containers hold the same, item by item; None where no item has a say of its own."""
        kind = type(left)
        if kind is not type(right) or kind not in (list, tuple, dict):
            return None
        mine, other = (list(item.values()) if kind is dict else list(item) for item in (left, right))
        if all(is_leaf_value(item) for item in (*mine, *other)):
            return None
        if len(mine) != len(other):
            return False
        if kind is dict:
            if left.keys() != right.keys():
                return False
            other = [right[key] for key in left]
        wrap = self.values.wrap
        return all(self._same(wrap(a), wrap(b)) for a, b in zip(mine, other, strict=True))

    def _contains(self, container: Any, item: Any) -> bool:
        method = python_method(container, "__contains__")
        if method is not None:
            return self.truth(self._ask(method, container, item))
        if type(item) in SYMBOLIC_NUMBERS and isinstance(container, (dict, set, frozenset)):
            keys = list(container)
            if len(keys) <= _MOST_KEYS and all(type(key) in (int, float, bool, str) for key in keys):
                # Number by number: a hash would hold the entry to the number of today.
                self.values.whole(container)
                return any(type(key) is not str and self.truth(self.operate(operator.eq, item, key)) for key in keys)
        if isinstance(container, dict):
            return bool(self.call_container_method(container, container.__contains__, (item,), {}))
        if isinstance(container, OLD_CONTAINERS):
            if isinstance(container, (dict, set, frozenset)):
                item = self.as_key(item, container)
            else:
                guard_equality(self.values, item)
            self.values.whole(container)
            if isinstance(container, (set, frozenset)) and (
                self.values.source_of(container) is None or isinstance(item, torch.Tensor)
            ):
                # A tensor's hash is its identity: no two are ever compared.
                return item in container
            if isinstance(container, (set, frozenset)) and is_leaf_value(item):
                base: Any = set if isinstance(container, set) else frozenset
                return bool(base.__contains__(container, item))
            for entry in container:
                if entry is item or self.values.wrap(entry) is item:
                    return True
                if isinstance(entry, torch.Tensor) or isinstance(item, torch.Tensor):
                    raise Break("a container of tensors is searched", "compare with `is` in a loop")
                in_order = isinstance(container, (list, tuple)) and not (is_leaf_value(entry) and is_leaf_value(item))
                if in_order and self._same(entry, item):
                    return True
            if isinstance(container, (set, frozenset)):
                return item in container
            # Among leaves, which compare natively; all others have been compared.
            return is_leaf_value(item) and any(is_leaf_value(entry) and entry == item for entry in container)
        found, _ = class_attribute(type(container), "__contains__")
        is_iterable = hasattr(type(container), "__iter__") or hasattr(type(container), "__getitem__")
        if is_iterable and (found is None or not hasattr(type(container), "__contains__")):
            # Item by item: the search ends at the first that fits.
            iterator = self.iterate(container)
            while True:
                done, entry = self.advance(iterator)
                if done:
                    return False
                if entry is item or self.truth(self.operate(operator.eq, entry, item)):
                    return True
        return bool(self.native(operator.contains, (container, item), {}))

    def search(self, container: Any, name: str, args: tuple[Any, ...]) -> Any:
        """``count``, ``index`` or ``remove`` of a list or tuple, with the items' own methods interpreted."""
        item, *bounds = (plain_numbers(given) for given in args)
        self.values.whole(container)
        kind: Any = list if isinstance(container, list) else tuple
        entries = [self.values.wrap(entry) for entry in kind.__iter__(container)]
        if all(map(is_leaf_value, (item, *entries))):
            found = [entry == item for entry in entries]
        else:
            if any(isinstance(entry, torch.Tensor) and entry is not item for entry in (item, *entries)):
                raise Break("a container of tensors is searched", "compare with `is` in a loop")
            found = []
            for entry in entries:
                found.append(entry is item or self._same(entry, item))
                if found[-1] and name != "count" and not bounds:
                    break
        if name == "count":
            return sum(found)
        try:
            place = found.index(True, *bounds)
        except ValueError:
            if kind is list and name == "index":
                raise ValueError(f"{item!r} is not in list") from None
            raise ValueError(f"{kind.__name__}.{name}(x): x not in {kind.__name__}") from None
        if name == "remove":
            self.effects.delete_item(container, place)
        return place if name == "index" else None

    def truth(self, value: Any) -> bool:
        """``bool(value)``; the truth of a tensor is not known while tracing."""
        if value is True or value is False or value is None:
            return bool(value)
        if isinstance(value, torch.Tensor) or private_sizes.is_data_number(value):
            return self._truth_of_data(value, None)
        return self._truth_of_object(value)

    def truth_at_jump(self, frame: Frame, value: Any, target: int, wanted: bool) -> bool:
        """The truth of a value for a jump to ``target`` where it is ``wanted``."""
        if isinstance(value, torch.Tensor) or private_sizes.is_data_number(value):
            return self._truth_of_data(value, Jump(frame, target, wanted))
        return self.truth(value)

    def _truth_of_data(self, value: Any, jump: Jump | None) -> bool:
        trace = self.values.trace
        error: BaseException | None = None
        if isinstance(value, torch.Tensor):
            data_symbols = trace.data_symbols()
            _check_truth(value)
            try:
                # A constant tensor knows its truth.
                return bool(value)
            except private_tracing.DATA_DEPENDENT_ERRORS as raised:
                # The question itself has made a number out of data.
                trace.forgive_data_symbols(data_symbols)
                error = raised
        for handler in BRANCHES:
            known = handler(self, value, jump)
            if known is not NotImplemented:
                return bool(known)
        if error is None and not private_sizes.is_made_of_data_float(value):
            return bool(value)
        raise Break(
            "a branch depends on the values of a tensor", "use torch.where, or branch outside of the function"
        ) from error

    def _truth_of_object(self, value: Any) -> bool:
        kind = type(value)
        for name in ("__bool__", "__len__"):
            method, _ = class_attribute(kind, name)
            if isinstance(method, types.FunctionType):
                if name == "__len__":
                    return bool(self.called_length(method, value))
                result = self.call(types.MethodType(method, value), (), {})
                if type(result) is not bool:
                    raise TypeError(f"__bool__ should return bool, returned {type(result).__name__}")
                return result
            if hasattr(kind, name):
                break
        if isinstance(value, (*OLD_CONTAINERS, collections.deque)):
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
        """What a class's own ``__len__`` says, which may be symbolic; raises what ``len`` raises for what is no length."""
        result = self.call(types.MethodType(method, value), (), {})
        if private_sizes.is_symbolic(result) and result >= 0:
            return result
        return len(_Says(result))

    def as_index(self, key: Any) -> Any:
        """An index of a list, or a slice of indices, with the user's own ``__index__`` interpreted."""
        if isinstance(key, slice):
            return slice(self.as_index(key.start), self.as_index(key.stop), self.as_index(key.step))
        # Of an int of the user's own class, Python takes the number that it is.
        method = None if isinstance(key, int) else python_method(key, "__index__")
        return key if method is None else operator.index(_Says(self.call(types.MethodType(method, key), (), {})))

    def guard_length(self, value: Any) -> None:
        """Guard how many items a container has."""
        source = self.values.source_of(value)
        if source is not None and isinstance(value, dict) and self.effects.written(value):
            # How many there are after a write depends on which there were.
            self.values.guard_keys(value)
        elif source is not None and not self.effects.written(value):
            if not isinstance(value, (*OLD_CONTAINERS, collections.deque, str, bytes, range)):
                raise Break(
                    f"the length of a {type(value).__qualname__} object is asked for, which nobody guards",
                    "ask for it outside of the function, or keep the items in a list or dictionary",
                )
            self.values.guard(source, Length(plain_length(value)), f"the length of {source.name} was read")


class _Says:
    """Something of a given length, or an index: Python itself decides whether it is one, and what to raise."""

    def __init__(self, number: Any) -> None:
        self._number = number

    def __len__(self) -> int:
        return self._number  # type: ignore[no-any-return]

    __index__ = __len__


def _check_truth(value: torch.Tensor) -> None:
    """Raise what eager raises for the truth of several values, or of none; fake tensors speak of scalars."""
    count = value.numel() if value.layout is torch.strided else 1
    if type(count) is int and count != 1:
        with private_tracing.disable_current_modes():
            bool(torch.zeros(min(count, 2)))
