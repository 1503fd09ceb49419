"""Functions whose native meaning is not enough: each has a rule of its own that guards what it reads."""

from __future__ import annotations

import collections
import copy
import functools
import operator
import sys
import types
from typing import Any

import torch

from dovetail.frontend.code.frame import Break
from dovetail.frontend.instructions.shared import BINARY
from dovetail.frontend.interpreter.attributes import class_attribute
from dovetail.frontend.interpreter.call_tables import NATIVE_CALLABLES
from dovetail.frontend.interpreter.callbacks import callback_codes, watched
from dovetail.frontend.interpreter.generator import shown_type
from dovetail.frontend.interpreter.operators import python_method
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import CALLS, INSTANCES, OPERATORS, kind_of, method_rule, rule
from dovetail.frontend.sizes.number_tensors import number_of
from dovetail.frontend.sizes.numbers import is_exact_only_in_python, sum_of
from dovetail.frontend.values.aliases import guard_hash
from dovetail.frontend.values.leaves import plain_numbers
from dovetail.torch_private import calls as private_calls
from dovetail.torch_private import sizes as private_sizes
from dovetail.torch_private import tracing as private_tracing
from dovetail.torch_private import trees as private_trees
from dovetail.trace.overrides import requested_gradients


@rule(getattr)
def _getattr(interpreter: TracingInterpreter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) == 2:
        return interpreter.load_attribute(*args)
    try:
        return interpreter.load_attribute(args[0], args[1])
    except AttributeError:
        return args[2]


@rule(hasattr)
def _hasattr(interpreter: TracingInterpreter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    try:
        interpreter.load_attribute(*args)
    except AttributeError:
        return False
    return True


@rule(setattr)
def _setattr(interpreter: TracingInterpreter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    interpreter.store_attribute(*args)


@rule(delattr)
def _delattr(interpreter: TracingInterpreter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    interpreter.delete_attribute(*args)


@rule(isinstance)
def _isinstance(interpreter: TracingInterpreter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    value, kinds = args
    if isinstance(kinds, tuple):
        interpreter.values.whole_deep(kinds)
        return any(_isinstance(interpreter, (value, kind), {}) for kind in kinds)
    if private_sizes.is_symbolic(value):
        return isinstance(_plain_example(value), kinds)
    stands_for = kind_of(value)
    if stands_for is not None:
        return isinstance(stands_for.example(interpreter.values, value), kinds)
    if isinstance(value, torch.Tensor) and isinstance(kinds, type) and issubclass(kinds, torch.Tensor):
        traced = interpreter.values.trace.input_of(value)
        if traced is not None and kinds is torch.nn.Buffer:
            # A plain tensor with a mark.
            return bool(interpreter.call(getattr, (value, "_is_buffer", False), {}))
        if traced is not None:
            return isinstance(traced.real, kinds)
        if kinds is torch.Tensor:
            return True
        return (
            isinstance(torch.empty(0), kinds) if kinds is not torch.nn.Parameter else getattr(value, "_is_param", False)
        )
    check = _own_check(kinds, "__instancecheck__")
    if check is not None and type(value) is not kinds:
        return bool(interpreter.truth(interpreter.call(check, (kinds, value), {})))
    if isinstance(kinds, type) and kinds is not type(value):
        interpreter.guard_order(type(value))
        handler = INSTANCES.get(type(kinds))
        if handler is not None:
            handler(interpreter, value, kinds)
        else:
            interpreter.guard_registration(type(value), kinds)
    if isinstance(kinds, type) and shown_type(value) is not type(value):
        return isinstance(value, kinds) or issubclass(shown_type(value), kinds)
    return isinstance(value, kinds)


def _own_check(kinds: Any, name: str) -> types.FunctionType | None:
    """The user's own idea of what is an instance or a subclass, if a metaclass has one."""
    method = python_method(kinds, name)
    if method is None or (method.__globals__.get("__name__") or "").split(".", 1)[0] in sys.stdlib_module_names:
        return None
    return method


def _plain_example(value: Any) -> Any:
    """A plain number of the type that a symbolic one stands for."""
    return {torch.SymInt: 2, torch.SymFloat: 2.0, torch.SymBool: True}[type(value)]


@rule(issubclass)
def _issubclass(interpreter: TracingInterpreter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if len(args) != 2 or not isinstance(args[0], type):
        return issubclass(*args)
    kind, kinds = args
    if isinstance(kinds, tuple):
        interpreter.values.whole_deep(kinds)
        return any(_issubclass(interpreter, (kind, item), {}) for item in kinds)
    check = _own_check(kinds, "__subclasscheck__")
    if check is not None:
        return bool(interpreter.truth(interpreter.call(check, (kinds, kind), {})))
    interpreter.guard_order(kind)
    interpreter.guard_registration(kind, kinds)
    return issubclass(kind, kinds)


@rule(callable)
def _callable(interpreter: TracingInterpreter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return callable(*args)


@rule(type)
def _type(interpreter: TracingInterpreter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) != 1:
        return interpreter.make_class(type, args, kwargs)
    if private_sizes.is_symbolic(args[0]):
        return type(_plain_example(args[0]))
    stands_for = kind_of(args[0])
    if stands_for is not None:
        return type(stands_for.example(interpreter.values, args[0]))
    if isinstance(args[0], torch.Tensor):
        traced = interpreter.values.trace.input_of(args[0])
        if traced is not None:
            return type(traced.real)
        return torch.nn.Parameter if getattr(args[0], "_is_param", False) else torch.Tensor
    return shown_type(args[0])


@rule(super)
def _super(interpreter: TracingInterpreter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if args:
        return super(*args)
    frame = interpreter.frames[-1]
    cell = frame.cells.get("__class__")
    first = frame.code.co_varnames[0]
    instance = frame.cells[first].cell_contents if first in frame.cells else frame.locals[first]
    if cell is None:
        raise RuntimeError("super(): __class__ cell not found")
    return super(cell.cell_contents, instance)


@rule(len)
def _len(interpreter: TracingInterpreter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    (value,) = args
    if isinstance(value, torch.Tensor) and value.dim():
        return value.shape[0]
    method, _ = class_attribute(type(value), "__len__")
    if isinstance(method, types.FunctionType) and not isinstance(value, torch.Tensor):
        return interpreter.called_length(method, value)  # type: ignore[no-any-return]
    interpreter.guard_length(value)
    return len(value)


@rule(iter)
def _iter(interpreter: TracingInterpreter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) == 2:
        return iter(interpreter.trampoline(args[0]), args[1])
    return interpreter.iterate(args[0])


@rule(next)
def _next(interpreter: TracingInterpreter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    done, value = interpreter.advance(args[0])
    if not done:
        return value
    if len(args) > 1:
        return args[1]
    raise StopIteration(value)


@rule(bool)
def _bool(interpreter: TracingInterpreter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return bool(args) and interpreter.truth(args[0])


def _conversion(function: Any, method_name: str) -> Any:
    def handler(interpreter: TracingInterpreter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if function is pow and len(args) == 2:
            return interpreter.operate(operator.pow, *args)
        if args:
            value = args[0]
            if private_sizes.is_symbolic(value):
                if (function is int and isinstance(value, torch.SymInt)) or (
                    function is float and isinstance(value, torch.SymFloat)
                ):
                    return value
                if not kwargs and is_exact_only_in_python(function, args):
                    return interpreter.derive(function, args)
                if function not in (abs, divmod, pow):
                    args = tuple(plain_numbers(item) for item in args)
                    value = args[0]
            if isinstance(value, torch.Tensor):
                if function is hash:
                    raise Break("a tensor is hashed", "use an index instead")
                number = number_of(interpreter, value) if function is int and len(args) == 1 else None
                if number is not None:
                    return number
            else:
                method = python_method(value, method_name)
                if method is not None:
                    return interpreter.call(types.MethodType(method, value), args[1:], kwargs)
                if function is hash:
                    guard_hash(interpreter.values, value)
                    return hash(value)
                if isinstance(value, (list, tuple, dict, set)):
                    interpreter.values.whole_deep(value)
        if isinstance(function, type) or function in (abs, divmod, pow):
            return interpreter.native(function, args, kwargs)
        return interpreter.call_native(function, args, kwargs)

    return handler


for _function, _method in (
    (int, "__int__"),
    (float, "__float__"),
    (complex, "__complex__"),
    (hash, "__hash__"),
    (bytes, "__bytes__"),
    (abs, "__abs__"),
    (round, "__round__"),
    (divmod, "__divmod__"),
    (pow, "__pow__"),
    (reversed, "__reversed__"),
):
    CALLS[_function] = _conversion(_function, _method)


def _sequence(kind: Any) -> Any:
    def handler(interpreter: TracingInterpreter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        items = interpreter.drain(args[0], is_hinted=kind in (list, tuple)) if args else []
        return kind(map(interpreter.as_key, items)) if issubclass(kind, (set, frozenset)) else kind(items)

    return handler


for _kind in (list, tuple, set, frozenset):
    CALLS[_kind] = _sequence(_kind)


@rule(dict)
def _dict(interpreter: TracingInterpreter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[Any, Any]:
    if not args:
        return dict(**kwargs)
    source = args[0]
    pairs = interpreter.items_of(source) if hasattr(source, "keys") else interpreter.drain(source)
    if not isinstance(pairs, dict):
        for pair in pairs:
            if isinstance(pair, (tuple, list)) and len(pair) == 2:
                interpreter.as_key(pair[0])
    return dict(pairs, **kwargs)


def _extreme(interpreter: TracingInterpreter, function: Any, numbers: tuple[Any, ...]) -> Any:
    """``max`` or ``min`` where some number is made of data or a tensor, else NotImplemented."""
    if any(isinstance(item, torch.Tensor) or private_sizes.is_data_number(item) for item in numbers):
        for handler in OPERATORS.get(function, ()):
            chosen = handler(interpreter, function, numbers)
            if chosen is not NotImplemented:
                return chosen
        if is_exact_only_in_python(function, numbers):
            return interpreter.derive(function, numbers)
    return NotImplemented


def _iterating(function: Any, first: int) -> Any:
    def handler(interpreter: TracingInterpreter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        converted = list(args)
        if function in (min, max) and len(args) > 1 and not kwargs:
            chosen = _extreme(interpreter, function, args)
            if chosen is not NotImplemented:
                return chosen
        for position in range(first, len(args) if function in (zip, map) else min(len(args), first + 1)):
            if (
                isinstance(args[position], torch.Tensor)
                and function in (min, max, sum, any, all, sorted)
                and len(args) > 1
            ):
                break
            if function in (min, max) and len(args) > 1:
                break
            if function in (sum, min, max, sorted):
                converted[position] = interpreter.drain(args[position], is_hinted=function is sorted)
            else:
                converted[position] = WrappingIterator(interpreter, interpreter.iterate(args[position]))
        # What comes before the items, and the key, is called; the items themselves may be objects that can be called.
        arguments: list[Any] = [
            interpreter.truth if item is None else _called(interpreter, item) for item in converted[:first]
        ]
        arguments += [interpreter.native_argument(item) if callable(item) else item for item in converted[first:]]
        keywords = {
            name: _called(interpreter, item) if name == "key" and item is not None else item
            for name, item in kwargs.items()
        }
        codes = callback_codes((*arguments, *keywords.values()))
        if function is sum and (codes or any(type(item) is torch.SymFloat for item in arguments[0])):
            start: Any = arguments[1] if len(arguments) > 1 else keywords.get("start", 0)
            numbers = (start, *arguments[0])
            if is_exact_only_in_python(sum_of, numbers):
                return interpreter.derive(sum_of, numbers)
            for number in numbers[1:]:
                start = interpreter.operate(operator.add, start, number)
            return start
        if function in (min, max, sorted) and codes:
            keywords["key"] = functools.partial(_Compared, interpreter, keywords.get("key"))
        if function in (any, all):
            # One item after the other: what makes them may have effects, and those after the first hit are never made.
            return function(interpreter.truth(item) for item in arguments[0])
        try:
            with watched(function, {} if "key" in keywords else codes):
                result = function(*arguments, **keywords)
            return interpreter.values.wrap(result)
        except private_tracing.DATA_DEPENDENT_ERRORS as error:
            raise Break(f"{function.__name__} needs the values of a tensor") from error

    return handler


def _called(interpreter: TracingInterpreter, function: Any) -> Any:
    """What native code calls for each item: builtin functions go through the interpreter too, for the items' own methods."""
    if isinstance(function, (type, *NATIVE_CALLABLES)):
        return interpreter.trampoline(function)
    return interpreter.called_argument(function)


class _Compared:
    """What native code orders an item by: the user's own comparisons are interpreted."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, interpreter: TracingInterpreter, key: Any, item: Any) -> None:
        self._interpreter = interpreter
        self._value = item if key is None else key(item)

    def __lt__(self, other: Any) -> bool:
        return bool(self._interpreter.truth(self._interpreter.operate(operator.lt, self._value, other._value)))

    def __gt__(self, other: Any) -> bool:
        return bool(self._interpreter.truth(self._interpreter.operate(operator.gt, self._value, other._value)))


class WrappingIterator:
    """An iterator whose items went through the interpreter."""

    def __init__(self, interpreter: TracingInterpreter, inner: Any) -> None:
        self.interpreter = interpreter
        self.inner = inner

    def __iter__(self) -> WrappingIterator:
        return self

    def __recipe__(self) -> tuple[Any, tuple[Any, ...]]:
        """Outside of the trace it is the iterator itself; see :mod:`dovetail.runtime.recipe_builder`."""
        return iter, (self.inner,)

    def __next__(self) -> Any:
        done, value = self.interpreter.advance(self.inner)
        if done:
            raise StopIteration
        return value


_ITERATING: tuple[tuple[Any, int], ...] = (
    (zip, 0),
    (enumerate, 0),
    (map, 1),
    (filter, 1),
    (sum, 0),
    (any, 0),
    (all, 0),
    (min, 0),
    (max, 0),
    (sorted, 0),
)
for _iterator, _first in _ITERATING:
    CALLS[_iterator] = _iterating(_iterator, _first)


@rule(copy.deepcopy)
def _deepcopy(interpreter: TracingInterpreter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) != 1 or kwargs:
        raise Break("copy.deepcopy is called with a memo", "copy outside of the function")
    interpreter.guard_deep(args[0], set())
    return copy.deepcopy(args[0])


@rule(torch.autograd.grad)
def _autograd_grad(interpreter: TracingInterpreter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    roots = args[0] if args else kwargs.get("outputs", ())
    trace = interpreter.values.trace
    roots = [roots] if isinstance(roots, torch.Tensor) else list(roots)
    for traced in trace.inputs_behind(roots):
        if not traced.real.is_leaf:
            raise Break(
                f"torch.autograd.grad goes back through {traced.name}, which was computed before the graph begins",
                "compute it inside the function",
            )
    with requested_gradients(trace, roots):
        return interpreter.call_torch(torch.autograd.grad, args, kwargs)


@rule(torch.utils.checkpoint.checkpoint)
def _checkpoint(interpreter: TracingInterpreter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs.get("use_reentrant") is not True or len(args) < 2:
        return interpreter.call_torch(torch.utils.checkpoint.checkpoint, args, kwargs)
    # The reentrant kind runs a backward of its own inside of the backward, for the same gradients as the other kind.
    # Where no argument requires a gradient it records nothing, whatever the function uses beside its arguments.
    if torch.is_grad_enabled() and any(isinstance(item, torch.Tensor) and item.requires_grad for item in args[1:]):
        settings = {**kwargs, "use_reentrant": False}
        return interpreter.call_torch(torch.utils.checkpoint.checkpoint, args, settings)
    with torch.no_grad():
        return interpreter.call(args[0], args[1:], {})


@rule(torch.utils.checkpoint.checkpoint_sequential)
def _checkpoint_sequential(interpreter: TracingInterpreter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) != 3 or type(args[1]) is not int or type(kwargs.get("use_reentrant")) is not bool:
        raise Break("checkpoint_sequential is called without use_reentrant", "pass use_reentrant=False")
    functions, segments, value = args
    if isinstance(functions, torch.nn.Sequential):
        functions = interpreter.call(interpreter.load_attribute(functions, "children"), (), {})
    layers = interpreter.drain(functions)

    def run(start: int, stop: int, value: Any) -> Any:
        for layer in layers[start:stop]:
            value = interpreter.call(layer, (value,), {})
        return value

    size, begun = len(layers) // segments, 0
    for start in range(0, size * (segments - 1), size):
        begun = start + size
        value = _checkpoint(interpreter, (functools.partial(run, start, begun), value), kwargs)
    return run(begun, len(layers), value)


@rule(torch.is_grad_enabled)
def _is_grad_enabled(interpreter: TracingInterpreter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return torch.is_grad_enabled()


@rule(torch.nn.Module.__call__)
def _module_call(interpreter: TracingInterpreter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return interpreter.call_plain_module(args[0], args[1:], kwargs)


@rule(type.__call__)
def _type_call(interpreter: TracingInterpreter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return interpreter.make_instance(args[0], args[1:], kwargs)


def _has_torch_function(interpreter: TracingInterpreter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Asked in interpreted code of torch's: the trace's own mode sees what the function calls, not the function."""
    return any(map(private_calls.overrides_torch_function, private_trees.tree_leaves(args)))


for _asking in private_calls.HAS_TORCH_FUNCTION:
    CALLS[_asking] = _has_torch_function


@rule(operator.setitem)
def _setitem(interpreter: TracingInterpreter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    interpreter.store_item(*args)


@rule(operator.delitem)
def _delitem(interpreter: TracingInterpreter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    interpreter.delete_item(*args)


@rule(operator.getitem)
def _getitem(interpreter: TracingInterpreter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return interpreter.load_item(*args)


def _operator(function: Any) -> Any:
    return lambda interpreter, args, kwargs: interpreter.operate(function, *args)


for _function in BINARY:
    CALLS[_function] = _operator(_function)


@rule(collections._count_elements)  # type: ignore[attr-defined]
def _count_elements(interpreter: TracingInterpreter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    counts, items = args
    for item in interpreter.drain(items):
        known = interpreter.call(counts.get, (item, 0), {})
        interpreter.store_item(counts, item, known + 1)


@rule(types.MethodType)
def _method_type(interpreter: TracingInterpreter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> types.MethodType:
    # Binding reads nothing of the object.
    return types.MethodType(*args, **kwargs)


@method_rule("requires_grad_")
def _requires_grad(
    interpreter: TracingInterpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    owner = getattr(function, "__self__", None)
    target, *given = args if owner is None else (owner, *args)
    traced = interpreter.values.trace.input_of(target)
    flag = given[0] if given else kwargs.get("requires_grad", True)
    if traced is None or type(flag) is not bool or len(given) + len(kwargs) > 1:
        return NotImplemented
    interpreter.gradients.flags.set(traced, flag)
    return target
