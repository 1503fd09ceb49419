"""Functions of torch and builtins: which of them run natively, what they are given, what their errors and results mean."""

from __future__ import annotations

import enum
import functools
import operator
import re
import types
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from dovetail.frontend.code.frame import Break, LockTaken, mark_native
from dovetail.frontend.effects.left_open import LeftOpen
from dovetail.frontend.interpreter.call_tables import (
    COMPARING,
    DATA_METHODS,
    IMPURE_BUILTINS,
    IMPURE_TORCH,
    LOCKS,
    LOOKING,
    PURE_MODULES,
    SEARCHES,
    SYMBOLIC_FUNCTIONS,
    stores_its_arguments,
)
from dovetail.frontend.interpreter.callbacks import callback_codes, watched
from dovetail.frontend.interpreter.containers import HASHING
from dovetail.frontend.interpreter.lookup import class_attribute
from dovetail.frontend.interpreter.opaque import check_opaque, check_shown, hides_state
from dovetail.frontend.interpreter.operators import IN_PLACE
from dovetail.frontend.interpreter.user_code import calls_user_code, is_user_function
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import (
    callable_rule,
    content_of,
    data_rule,
    error_rule,
    keyword_rule,
    kind_among,
    layout_rule,
    method_rule,
    native_rule,
    rule,
)
from dovetail.frontend.values.aliases import guard_equality
from dovetail.frontend.values.leaves import (
    HOLDING_FUNCTIONS,
    is_bound_builtin,
    is_extension_record,
    is_leaf_value,
    plain_flag,
    plain_numbers,
)
from dovetail.runtime.recipe_builder import stands_for
from dovetail.torch_private import operators as private_operators
from dovetail.torch_private import sizes as private_sizes
from dovetail.torch_private import tensors as private_tensors
from dovetail.torch_private import tracing as private_tracing
from dovetail.trace import CaptureSettings, RefusedOperatorError, Retry

_TAKING_INDICES = frozenset({range, bin, hex, oct, chr, operator.mul, operator.imul})
_SHOWING = frozenset({str, repr, ascii, format})
_UNBOUND_METHODS = (types.MethodDescriptorType, types.WrapperDescriptorType, types.ClassMethodDescriptorType)
_WRITING_SLOTS = frozenset(
    ("__init__", "__setattr__", "__delattr__", "__setitem__", "__delitem__", "__set__", "__delete__", "__next__")
) | {f"__{function.__name__}__" for function in IN_PLACE}
_IMMUTABLE = (tuple, frozenset, re.Pattern, re.Match)


def is_tensor_method(function: Any, args: tuple[Any, ...]) -> bool:
    """Whether a call is torch's: of a function of its, or of anything that is given a tensor first."""
    if isinstance(getattr(function, "__self__", None), torch.Tensor):
        return True
    module = getattr(function, "__module__", None) or ""
    return module.startswith("torch") or (bool(args) and isinstance(args[0], torch.Tensor))


class NativeCalls(TracingInterpreter):
    """The part of the interpreter that calls functions of torch and builtins."""

    left_open: LeftOpen

    def native(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], hands_on: bool = False) -> Any:
        if function in COMPARING:
            for item in args:
                guard_equality(self.values, item)
        arguments, keywords = self._arguments(function, args, kwargs, hands_on)
        looks_inside = is_tensor_method(function, arguments)
        for item in (*arguments, *keywords.values()):
            if not (hands_on and callable(item)):
                check_opaque(self.values, function, item, looks_inside)
        result = self._run(function, arguments, keywords)
        self.left_open.called(function, arguments, result)
        self._check_sizes(function)
        if isinstance(result, HOLDING_FUNCTIONS):
            self.created(result)
        return self.values.wrap(result)

    def _run(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        trace = self.trace
        trace.note_line()
        data_symbols, recorded = trace.data_symbols(), len(trace.graph.nodes)
        owner = getattr(function, "__self__", None)
        try:
            with watched(function, self._callbacks(function, owner, args, kwargs)):
                runner = native_rule.get(getattr(function, "__module__", None))
                result = function(*args, **kwargs) if runner is None else runner(self, function, args, kwargs)
        except private_tracing.DATA_DEPENDENT_ERRORS as error:
            trace.forgive_data_symbols(data_symbols)
            if not trace.settings.one_graph or not is_tensor_method(function, args):
                raise Break(
                    f"{_name(function)} needs the values of a tensor",
                    "keep the value in a tensor, or do this outside of the compiled function",
                    # Python code that ran by then may have drawn numbers, or written.
                    is_clean=not hasattr(function, "__code__") or len(trace.graph.nodes) == recorded,
                ) from error
        except RefusedOperatorError as error:
            raise Break(error.what, error.advice) from error
        except AttributeError as error:
            if self.values.own(error.obj) is error.obj:
                raise
            what = f"{_name(function)} reads .{error.name} of an object that it is given to call"
            raise Break(what, "call it outside of the compiled function") from error
        except RuntimeError as error:
            for handler in error_rule:
                handler(self, error, (*args, *kwargs.values()))
            # One of a call without arguments depends on no tensor: the program may handle it.
            is_independent = not args and not kwargs and (owner is None or isinstance(owner, types.ModuleType))
            if not is_independent:
                mark_native(error)
            if is_independent or not private_tracing.needs_real_data(error):
                raise
            trace.forgive_data_symbols(data_symbols)
            if not trace.settings.one_graph:
                raise Break(f"{_name(function)} needs the values of a tensor", "do this outside") from error
        except (AssertionError, IndexError, TypeError, ValueError) as error:
            for handler in error_rule:
                handler(self, error, (*args, *kwargs.values()))
            # The text is that of the kernel for fake tensors, which need not be eager's.
            if is_tensor_method(function, args):
                mark_native(error)
            raise
        else:
            return result
        for whole in data_rule:
            if (found := whole(self, function, args, kwargs)) is not NotImplemented:
                return found
        raise Break(f"{_name(function)} needs the values of a tensor", "keep the value in a tensor")

    def _callbacks(self, function: Any, owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        owners = () if owner is None or isinstance(owner, (types.ModuleType, type)) else (owner,)
        codes = callback_codes((*owners, *args, *kwargs.values()), HASHING if function in COMPARING else frozenset())
        missing: Any = class_attribute(function, "_missing_")[0] if isinstance(function, enum.EnumMeta) else None
        if missing is not None and is_user_function(missing.__func__):
            codes[missing.__func__.__code__] = f"{function.__name__}._missing_"
        return codes

    def _check_sizes(self, function: Any) -> None:
        data_sizes = self.trace.settings.shapes.data_sizes
        if data_sizes != "keep" and self.trace.data_symbols():
            name = _name(function)
            reason = f"{name} makes a {'number' if name == 'item' else 'size'} from a tensor's data"
            if data_sizes == "ask":
                raise Retry(reason, change=CaptureSettings.with_data_sizes)
            raise Break(reason, "keep it in a tensor, or independent of the data")

    # --- arguments ----------------------------------------------------------------------------------------------------

    def _arguments(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], hands_on: bool
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if hands_on or function in LOOKING:
            given = [item if callable(item) else self.native_argument(item) for item in (*args, *kwargs.values())]
            return tuple(given[: len(args)]), dict(zip(kwargs, given[len(args) :], strict=True))
        if isinstance(function, (type, types.BuiltinFunctionType)):
            if function in _SHOWING:
                for item in args[:1]:
                    check_shown(self.values, item)
            elif function in _TAKING_INDICES:
                args = tuple(map(self.as_index, args))
        if is_tensor_method(function, args):
            args, kwargs = tuple(map(self._numbers, args)), {key: self._numbers(item) for key, item in kwargs.items()}
        is_torchs = (getattr(function, "__module__", None) or "").startswith("torch")
        handed = self.called_argument if is_torchs else self.native_argument
        if is_torchs and args and class_attribute(type(args[0]), _name(function))[0] is function:
            # A method reads its own object, of which nothing else stands in its place.
            return (self.native_argument(args[0]), *map(handed, args[1:])), {key: handed(kwargs[key]) for key in kwargs}
        return tuple(map(handed, args)), {key: handed(item) for key, item in kwargs.items()}

    def native_argument(self, value: Any) -> Any:
        kind = type(value)
        function = value.__func__ if kind is types.MethodType else value
        if type(function) is types.FunctionType:
            return self.trampoline(value) if calls_user_code(value) else value
        if kind is functools.partial:
            return self.trampoline(value)
        if kind is types.BuiltinFunctionType:
            # A call by native code is journalled, guarded or refused like a call by the program.
            writes = is_bound_builtin(value) and isinstance(value.__self__, (list, dict, set, deque))
            return self.trampoline(value) if writes or value in IMPURE_BUILTINS or calls_user_code(value) else value
        return value if isinstance(value, torch.nn.Module) else self.values.for_native(value)

    def _numbers(self, value: Any) -> Any:
        """An argument of torch's with its numbers: those that change from call to call stay symbolic (the sizes of a split)."""
        if type(value) in (list, tuple) and value and type(value[0]) in (int, float):
            items = [self.load_item(value, position) for position in range(len(value))]
            if any(map(private_sizes.is_symbolic, items)):
                self.guard_length(value)
                return items
        return value

    def called_argument(self, value: Any) -> Any:
        if isinstance(value, type):
            starters = (class_attribute(value, "__init__")[0], class_attribute(value, "__new__")[0])
            is_python = any(isinstance(item, (types.FunctionType, staticmethod)) for item in starters)
        else:
            of_class = class_attribute(type(value), "__call__")[0]
            is_python = isinstance(of_class, types.FunctionType) or type(value) in callable_rule
        return self.trampoline(value) if is_python else self.native_argument(plain_flag(value))

    def trampoline(self, function: Any) -> Callable[..., Any]:

        def enter(*args: Any, **kwargs: Any) -> Any:
            self.effects.moves += 1
            # The program is not to see what native code was given in the place of an object.
            args = tuple(map(self.values.own, args))
            kwargs = {name: self.values.own(item) for name, item in kwargs.items()}
            if not self.values.in_backward:
                return self.call(function, args, kwargs)
            with self.trace.in_user_backward():
                return self.call(function, args, kwargs)

        if isinstance(function, (types.FunctionType, types.MethodType)):
            functools.update_wrapper(enter, function)
        else:
            enter.__name__ = type(function).__name__
        stands_for(enter, function)  # type: ignore[arg-type]
        return enter

    # --- which function is it? ------------------------------------------------------------------------------------------

    def call_torch(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = (*args, *kwargs.values())
        if (kind := kind_among(given)) is not None:
            found = kind.call(self, function, args, kwargs)
            if found is not NotImplemented:
                return found
        module = getattr(function, "__module__", None) or ""
        # An operator of a library may have the name of a method of tensors.
        is_library = module.startswith(private_operators.NAMESPACES) and not module.endswith(".aten")
        name = "" if is_library else getattr(function, "__name__", "")
        for handler in method_rule.get(name, ()):
            found = handler(self, function, args, kwargs)
            if found is not NotImplemented:
                return found
        if name in DATA_METHODS:
            raise Break(f".{name} needs the tensor's data", "do this outside of the compiled function", is_clean=True)
        if name in IMPURE_TORCH and (module.startswith("torch") or not module):
            raise Break(
                f"torch's {name} changes or reads state outside of the graph", "call it outside of the function"
            )
        for item in given:
            if type(item) is torch.layout and item in layout_rule:
                return layout_rule[item](self, function, args, kwargs)
        for key in kwargs.keys() & keyword_rule.keys():
            found = keyword_rule[key](self, function, args, kwargs)
            if found is not NotImplemented:
                return found
        return self.native(function, args, kwargs)

    def call_native(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not kwargs and (number := self.derive(function, args)) is not NotImplemented:
            return number
        reason = IMPURE_BUILTINS.get(function) if isinstance(function, types.BuiltinFunctionType) else None
        if reason is not None:
            raise Break(reason, "do this outside of the compiled function", is_clean=True)
        if not (function in SYMBOLIC_FUNCTIONS or stores_its_arguments(function) or _sets_attribute(function, args)):
            plain = plain_flag if is_tensor_method(function, args) else plain_numbers
            args, kwargs = tuple(map(plain, args)), {key: plain(item) for key, item in kwargs.items()}
        if isinstance(function, _UNBOUND_METHODS):
            return self._call_unbound(function, args, kwargs)
        owner = getattr(function, "__self__", None)
        if isinstance(owner, torch.Tensor):
            return self.call_torch(function, args, kwargs)
        is_container = isinstance(owner, (dict, list))
        if is_container and (known := rule.get(class_attribute(type(owner), function.__name__)[0])) is not None:
            return known(self, (owner, *args), kwargs)
        if isinstance(owner, (list, dict, set)) or (type(owner) is deque and function.__name__ not in SEARCHES):
            return self.call_container_method(owner, function, args, kwargs)
        if isinstance(owner, types.GeneratorType):
            raise Break("a generator that existed before the call is advanced", "make a list of it first")
        if isinstance(function, types.MethodWrapperType):
            return self._call_slot(owner, function, args, kwargs)
        if owner is None or isinstance(owner, (types.ModuleType, type)) or is_extension_record(owner):
            return self._call_builtin(function, args, kwargs)
        return self._call_bound(owner, function, args, kwargs)

    def _call_unbound(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A method of a builtin class, found on the class."""
        if args:
            owner, *rest = args
            kind, name = function.__objclass__, function.__name__
            if isinstance(owner, (list, dict, set)) and issubclass(kind, (list, dict, set)):
                return self.call_container_method(owner, function.__get__(owner), tuple(rest), kwargs)
            if isinstance(owner, torch.Tensor) or issubclass(kind, private_tensors.TensorBase):
                return self.call_torch(function, args, kwargs)
            if kind is object:
                found = self._call_slot_of_object(owner, name, rest)
                if found is not NotImplemented:
                    return found
            self._check_slot(owner, name)
        return self.native(function, args, kwargs)

    def _call_slot(self, owner: Any, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A special method of a builtin class, bound to an object."""
        name = function.__name__
        if name == "__call__" and isinstance(owner, type):
            return self.make_instance(owner, args, kwargs)
        is_own = name != "__init__" or class_attribute(type(owner), "__init__")[1] is object
        if is_own and not (name == "__setattr__" and isinstance(owner, type)):
            found = self._call_slot_of_object(owner, name, args)
            if found is not NotImplemented:
                return found
        if name == "__get__" and type(owner) is types.FunctionType and args:
            return owner if args[0] is None else types.MethodType(owner, args[0])
        if name == "__get__" and isinstance(owner, property) and args and args[0] is not None:
            return self.call(self.load_attribute(owner, "fget"), args[:1], {})
        self._check_slot(owner, name)
        return self.native(function, args, kwargs)

    def _check_slot(self, owner: Any, name: str) -> None:
        writes = name in _WRITING_SLOTS
        hides = hides_state(owner) and not isinstance(owner, _IMMUTABLE) and content_of(owner) is None
        if (writes or hides) and self.values.source_of(owner) is not None and not is_leaf_value(owner):
            what = "writes to an object that existed before the call" if writes else "may read state that nobody guards"
            raise Break(f"{type(owner).__qualname__}.{name} {what}", "call it outside of the function")

    def _call_slot_of_object(self, owner: Any, name: str, args: Any) -> Any:
        """``object.__setattr__``, ``__getattribute__`` or ``__init__``; NotImplemented for other special methods."""
        if name == "__setattr__":
            self.store_default_attribute(owner, *args)
            return None
        if name == "__getattribute__":
            return self.load_default_attribute(owner, *args)
        return None if name == "__init__" else NotImplemented

    def _call_bound(self, owner: Any, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A method of an object of a builtin class that is no list, dictionary or set."""
        name = function.__name__
        if (handler := rule.get(class_attribute(type(owner), name)[0])) is not None:
            return handler(self, (owner, *args), kwargs)
        if isinstance(owner, tuple) and not kwargs and 0 < len(args) <= SEARCHES.get(name, 0):
            return self.search(owner, name, args)
        if isinstance(owner, (frozenset, deque)):
            args = tuple(self.as_key(item, owner) for item in args)
        if is_leaf_value(owner) or isinstance(owner, _IMMUTABLE) or self.values.source_of(owner) is None:
            return self.native(function, args, kwargs)
        if isinstance(owner, LOCKS) and name in ("__enter__", "acquire"):
            raise LockTaken("a lock is taken at every call", "take it outside of the function")
        what = f"{type(owner).__qualname__}.{name} may read or change state that nobody guards"
        raise Break(what, "call it outside of the function")

    def _call_builtin(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A builtin function or class."""
        owner = getattr(function, "__self__", None)
        kinds = (owner, type(owner)) if isinstance(owner, type) else ()
        known = next(filter(None, (rule.get(class_attribute(kind, function.__name__)[0]) for kind in kinds)), None)
        if known is not None:
            return known(self, (owner, *args), kwargs)
        module = getattr(function, "__module__", None)
        if module is not None and (module == "torch" or module.startswith("torch.")):
            return self.call_guarded(function, args, kwargs)
        is_pure = module in PURE_MODULES and not is_extension_record(owner)
        if is_pure or module is None or isinstance(function, type):
            return self.native(function, args, kwargs)
        raise Break(f"{module}.{function.__name__} is not known to be pure", "call it outside of the compiled function")


def _name(function: Any) -> str:
    return getattr(function, "__name__", str(function))


def _sets_attribute(function: Any, args: tuple[Any, ...]) -> bool:
    """Whether this is ``object.__setattr__``, called for an object that is no class."""
    if isinstance(function, types.MethodWrapperType):
        return function.__name__ == "__setattr__" and not isinstance(function.__self__, type)
    return function is object.__setattr__ and not (args and isinstance(args[0], type))
