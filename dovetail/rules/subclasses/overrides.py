"""``__torch_function__`` of tensor subclasses: calls of torch that are given such a tensor are handed to its class, interpreted.

Torch itself says what a class is told of a call: the call is made once with empty tensors in the place of the real ones, while a
mode of torch's catches what a ``__torch_function__`` would be given.
"""

from __future__ import annotations

import inspect
import types
from typing import Any, NoReturn

import torch

from dovetail.errors import UnbuildableError
from dovetail.frontend.code.frame import Break
from dovetail.frontend.interpreter.call_tables import NATIVE_CALLABLES
from dovetail.frontend.interpreter.lookup import class_attribute
from dovetail.frontend.interpreter.operators import BINARY_NAMES, COMPARISONS, IN_PLACE, UNARY
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, Keywords, rule
from dovetail.guards import AttributeSource, Equals
from dovetail.rules.gradients.apart import GradientsApart
from dovetail.rules.subclasses.overriding_values import OverridingValue, mapped
from dovetail.rules.subclasses.probes import Probes
from dovetail.torch_private import calls as private_calls
from dovetail.torch_private import libraries as private_libraries
from dovetail.torch_private import trees as private_trees

DEFAULT = torch.Tensor.__torch_function__.__func__  # type: ignore[attr-defined]
_SIGNATURE = inspect.signature(DEFAULT)
#: Questions that a stand-in of an input cannot answer: the graph has another tensor in the same memory.
_STATE_OF_INPUTS = frozenset({"grad_fn", "_version", "_base", "retains_grad", "output_nr", "_backward_hooks"})
_NEVER_OVERRIDDEN = frozenset({"as_subclass", "_make_subclass", "__new__"})


class Overrides:
    """Whether classes are asked now: not while one of them has switched that off."""

    def __init__(self, interpreter: TracingInterpreter) -> None:
        self.off = 0

    @property
    def asks_classes(self) -> bool:
        """Whether a call of torch is handed to classes."""
        return not self.off and private_libraries.asks_subclasses()


class SubclassesOff:
    """A block of a captured program in which no class is asked."""

    def __init__(self, overrides: Overrides) -> None:
        self._overrides = overrides

    def __enter__(self) -> None:
        self._overrides.off += 1

    def __exit__(self, *error: object) -> None:
        self._overrides.off -= 1

    def __recipe__(self) -> NoReturn:
        """No graph may end while it is open."""
        raise UnbuildableError("a graph break where __torch_function__ is switched off", advice="break before or after")


@rule(private_libraries.asks_subclasses)
def _asks(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> bool:
    return interpreter.state(Overrides).asks_classes


@rule(private_libraries.no_subclasses)
def _switch_off(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> SubclassesOff:
    return SubclassesOff(interpreter.state(Overrides))


# --- calls ------------------------------------------------------------------------------------------------------------

#: Methods of native code; to bind one is no call of torch.
_METHODS = (types.MethodDescriptorType, types.WrapperDescriptorType)


def override(interpreter: TracingInterpreter, function: Any, args: Arguments, kwargs: Keywords) -> Any:
    """A call of torch that is given a stand-in: by the classes where they are asked, else with the plain tensors."""
    descriptor = getattr(function, "__self__", None)
    if isinstance(descriptor, _METHODS) and function.__name__ == "__get__" and type(args[0]) is OverridingValue:
        return types.MethodType(descriptor, args[0])
    args = tuple(map(interpreter.values.for_native, args))
    kwargs = {name: interpreter.values.for_native(item) for name, item in kwargs.items()}
    if getattr(function, "__module__", None) == "_operator":
        found = _by_own_methods(interpreter, function, args)
        if found is not NotImplemented:
            return found
    if not interpreter.state(Overrides).asks_classes or getattr(function, "__name__", "") in _NEVER_OVERRIDDEN:
        return call_plainly(interpreter, function, args, kwargs)
    probes = Probes()
    told = probes.ask(function, args, kwargs)
    if told is None:
        return call_plainly(interpreter, function, args, kwargs)
    found = _ask_classes(interpreter, *told)
    return probes.refuse(function, args, kwargs) if found is NotImplemented else found


def _ask_classes(interpreter: TracingInterpreter, function: Any, kinds: tuple[type, ...], *given: Any) -> Any:
    for kind in kinds:
        if isinstance(class_attribute(kind, "__torch_function__")[0], types.FunctionType):
            raise Break(f"__torch_function__ of {kind.__name__} is no class method", "make it a classmethod")
        method = interpreter.load_attribute(kind, "__torch_function__")
        result = interpreter.call(method, (function, kinds, *given), {})
        if result is not NotImplemented:
            return result
    return NotImplemented if kinds else call_plainly(interpreter, function, *given, *[{}] * (2 - len(given)))


def override_attribute(interpreter: TracingInterpreter, found: Any, value: OverridingValue) -> Any:
    """``value.name`` for an attribute of torch's."""
    if interpreter.state(Overrides).asks_classes and private_libraries.overrides_functions(value.kind):
        result = _ask_classes(interpreter, found.__get__, (value.kind,), (value,))
        if result is not NotImplemented:
            return result
        raise Break(f"no __torch_function__ takes .{found.__name__}", "read it outside of the function")
    return _plain_attribute(interpreter, value, found.__name__)


def _plain_attribute(interpreter: TracingInterpreter, value: OverridingValue, name: str) -> Any:
    known = interpreter.values.stood_for(value)
    if known is None or (name not in _STATE_OF_INPUTS and name not in ("grad", "_grad", "is_leaf")):
        return interpreter.load_attribute(value.tensor, name)
    if name in ("grad", "_grad"):
        return interpreter.state(GradientsApart).read(known)
    with private_calls.no_torch_function():
        answer = known.real.is_leaf
    if name in _STATE_OF_INPUTS and not (name == "grad_fn" and answer):
        raise Break(f".{name} of an input is read", "read it outside of the compiled function")
    interpreter.values.guard(AttributeSource(known.source, "is_leaf"), Equals(answer), f"{known.source.name} was read")
    return answer if name == "is_leaf" else None


def call_plainly(interpreter: TracingInterpreter, function: Any, args: Arguments, kwargs: Keywords) -> Any:
    """A call with the plain tensors in the place of their stand-ins; what it hands back of them are the stand-ins again."""
    stand_ins: dict[int, OverridingValue] = {}

    def bare(value: Any) -> Any:
        if type(value) is not OverridingValue:
            return value
        stand_ins[id(value.tensor)] = value
        return value.tensor

    slot = getattr(function, "__self__", None)
    if isinstance(function, types.MethodWrapperType) and isinstance(slot, types.GetSetDescriptorType):
        if function.__name__ == "__get__" and type(args[0]) is OverridingValue:
            return _plain_attribute(interpreter, args[0], slot.__name__)
        if interpreter.values.stood_for(args[0]) is not None:
            raise Break(f".{slot.__name__} of an input is set", "set it outside of the compiled function")
        return interpreter.store_attribute(bare(args[0]), slot.__name__, mapped(args[1], bare))
    args, kwargs = mapped(args, bare), mapped(kwargs, bare)
    known = _PLAINLY.get(function) if isinstance(function, NATIVE_CALLABLES) else None
    if known is not None:
        result = getattr(interpreter, known)(*args)
    elif getattr(function, "__module__", None) == "_operator":
        result = interpreter.operate(function, *args)
    else:
        result = interpreter.call(function, args, kwargs)
    return mapped(result, lambda item: stand_ins.get(id(item), item))


_PLAINLY: dict[Any, str] = {
    torch.Tensor.__bool__: "truth",
    torch.Tensor.__getitem__: "load_item",
    torch.Tensor.__setitem__: "store_item",
}


# --- methods of the user's class -----------------------------------------------------------------------------------------


def own_method(interpreter: TracingInterpreter, value: Any, name: str) -> types.MethodType | None:
    """A special method that the user's class defines for a stand-in."""
    if type(value) is not OverridingValue:
        return None
    found, owner = class_attribute(value.kind, name)
    interpreter.guard_not_shadowed(value.kind, owner, name)
    if owner is None or not isinstance(found, types.FunctionType) or owner in torch.Tensor.__mro__:
        return None
    interpreter.guard_class_item(owner, name, found)
    return types.MethodType(found, value)


def _by_own_methods(interpreter: TracingInterpreter, function: Any, operands: Arguments) -> Any:
    """An operator by the methods of the user's classes; NotImplemented where torch's own decide."""
    if function in UNARY:
        method = own_method(interpreter, operands[0], UNARY[function])
        return NotImplemented if method is None else interpreter.call(method, (), {})
    if len(operands) != 2 or (type(operands[0]) is not OverridingValue and type(operands[1]) is not OverridingValue):
        return NotImplemented
    left, right = operands
    questions = []
    if function in IN_PLACE:
        questions.append((left, f"__{function.__name__}__", right))
        function = IN_PLACE[function]
    names = COMPARISONS.get(function)
    if names is None and function in BINARY_NAMES:
        names = (f"__{BINARY_NAMES[function][0]}__", f"__r{BINARY_NAMES[function][0]}__", "")
    if names is None:
        method = own_method(interpreter, left, f"__{function.__name__}__")
        return NotImplemented if method is None else interpreter.call(method, (right,), {})
    pair = [(left, names[0], right), (right, names[1], left)]
    kinds = [item.kind if type(item) is OverridingValue else torch.Tensor for item in operands]
    if kinds[0] is not kinds[1] and issubclass(kinds[1], kinds[0]):
        inherited, own = (class_attribute(kind, names[1])[0] for kind in kinds)
        if function in COMPARISONS or own is not inherited:
            pair.reverse()
    for item, name, other in (*questions, *pair):
        method = own_method(interpreter, item, name)
        if method is None:
            if isinstance(item, (torch.Tensor, OverridingValue)):
                break
            continue
        result = interpreter.call(method, (other,), {})
        if result is not NotImplemented:
            return result
    return NotImplemented


# --- functions that such code calls -------------------------------------------------------------------------------------


def _has_torch_function(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> bool:
    """Asked in interpreted code of torch's: the trace's own mode sees what the function calls, not the function."""
    asks_classes = interpreter.state(Overrides).asks_classes
    kinds = (
        item.kind if type(item) is OverridingValue else type(item)
        for item in private_trees.tree_leaves(args)
        if asks_classes or type(item) is not OverridingValue
    )
    return any(map(private_libraries.overrides_functions, kinds))


for _question in private_libraries.HAS_TORCH_FUNCTION:
    rule[_question] = _has_torch_function


@rule(torch.overrides.handle_torch_function)
def _handle(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    function, relevant, *given = args
    kinds = [item.kind if type(item) is OverridingValue else interpreter.call(type, (item,), {}) for item in relevant]
    found = _ask_classes(interpreter, function, private_libraries.overloaded_types(kinds), tuple(given), kwargs)
    if found is NotImplemented:
        raise TypeError(
            f"no implementation found for '{function.__module__}.{function.__name__}' on types that implement "
            f"__torch_function__: {[*kinds]}"
        )
    return found


@rule(DEFAULT)
def _default(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    """``super().__torch_function__``: the call with plain tensors; those that come back are made tensors of the class."""
    bound = _SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    kind, function, kinds, given, keywords = bound.arguments.values()
    if not all(issubclass(kind, other) for other in interpreter.drain(kinds)):
        return NotImplemented
    given, keywords = tuple(interpreter.drain(given)), {} if keywords is None else interpreter.items_of(keywords)
    result = _switched_off(interpreter, function, given, keywords)
    if function in torch.overrides.get_default_nowrap_functions() or kind is torch.Tensor:
        return result
    return mapped(result, lambda item: as_subclass(interpreter, item, kind))


@rule(private_libraries.disabled_torch_function)
def _disabled(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    function, _, *given = args
    return _switched_off(interpreter, function, *given, *[{}] * (2 - len(given)))


def _switched_off(interpreter: TracingInterpreter, function: Any, args: Arguments, kwargs: Keywords) -> Any:
    with SubclassesOff(interpreter.state(Overrides)):
        return interpreter.call(function, args, kwargs)


def as_subclass(interpreter: TracingInterpreter, value: Any, kind: Any) -> Any:
    """A tensor as one of a class, unless it is one: a view of all of it, as torch makes it."""
    is_stand_in = type(value) is OverridingValue
    if not isinstance(value, torch.Tensor) and not (is_stand_in and not issubclass(value.kind, kind)):
        return value
    tensor = value.tensor if is_stand_in else value
    return OverridingValue(kind, interpreter.call_torch(torch.ops.aten.alias.default, (tensor,), {}), {})
