"""Calls that run natively under the trace's modes: functions of torch, builtins, methods of containers, custom Functions."""

from __future__ import annotations

import dataclasses
import enum
import functools
import logging
import math
import operator
import re
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import torch

from dovetail.frontend import native_errors
from dovetail.frontend.code.frame import Break, LockTaken
from dovetail.frontend.effects.left_open import LeftOpen
from dovetail.frontend.interpreter.attributes import class_attribute, instance_dict
from dovetail.frontend.interpreter.call_tables import (
    CALLS_ARGUMENT,
    COMPARING,
    COMPRESSED_LAYOUTS,
    DATA_METHODS,
    DICT_WRITERS,
    IMPURE_BUILTINS,
    IMPURE_TORCH,
    LIST_WRITERS,
    LOCKS,
    MAKES_COMPRESSED,
    NATIVE_CALLABLES,
    PURE_MODULES,
    SEARCHES,
    SET_WRITERS,
    SYMBOLIC_FUNCTIONS,
    runs_natively,
    stores_its_arguments,
)
from dovetail.frontend.interpreter.callbacks import callback_codes, watched
from dovetail.frontend.interpreter.shown_frames import LOOK_AT_CALLERS, call_for
from dovetail.frontend.interpreter.shown_names import tell_shown_names
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import CALLS, DATA, LAYOUTS, METHODS, kind_among
from dovetail.frontend.sizes.numbers import is_exact_only_in_python
from dovetail.frontend.values.aliases import guard_equality
from dovetail.frontend.values.leaves import (
    LEAF_TYPES,
    is_array_number,
    is_bound_builtin,
    is_extension_record,
    is_leaf_value,
    plain_numbers,
)
from dovetail.guards import (
    AttributeSource,
    HasNoKey,
    Identity,
    InstanceDictSource,
    ItemSource,
)
from dovetail.runtime.recipe_builder import interpreted_of, stands_for
from dovetail.torch_private import sizes as private_sizes
from dovetail.torch_private import tensors as private_tensors
from dovetail.torch_private import tracing as private_tracing
from dovetail.torch_private import trees as private_trees
from dovetail.trace import CaptureSettings, RefusedOperatorError, Retry

# What these find out about a key is guarded (see :mod:`dovetail.frontend.values.aliases`).
_HASHING = frozenset({"__hash__", "__eq__"})
# Those that raise where their number is greater than the largest one of the tensor's dtype.
_FILLING = frozenset(
    {"full", "full_like", "new_full", "fill", "fill_", "masked_fill", "masked_fill_", "scalar_tensor", "pad"}
)
_TAKING_INDICES = frozenset({range, bin, hex, oct, chr, operator.mul, operator.imul})
_SHOWING = frozenset({str, repr, ascii, format})
# An object of these is what its class and its arguments say, for ever, or is guarded as a tensor or a module.
_FIXED = (
    type,
    types.FunctionType,
    types.MethodType,
    types.ModuleType,
    torch.Tensor,
    torch.nn.Module,
    *NATIVE_CALLABLES,
)
# What is in these are attributes and items, which are guarded one by one.
_OPEN = (object, list, tuple, dict, set, frozenset, deque, OrderedDict, defaultdict)


def _hides_state(value: Any) -> bool:
    """Whether an object of a native class, or of a subclass of one, has a state that is no attribute and no item."""
    kind = type(value)
    if kind is object or is_leaf_value(value) or isinstance(value, _FIXED) or kind.__module__.startswith("torch"):
        return False
    makers = (owner.__dict__.get("__new__") for owner in kind.__mro__)
    maker = next((item for item in makers if isinstance(item, types.BuiltinFunctionType)), None)
    return getattr(maker, "__self__", object) not in _OPEN


def _sets_attribute(function: Any, args: tuple[Any, ...]) -> bool:
    """Whether this is ``object.__setattr__``, called for an object that is no class."""
    if getattr(function, "__name__", "") != "__setattr__":
        return False
    if isinstance(function, types.MethodWrapperType):
        return not isinstance(function.__self__, type)
    return function is object.__setattr__ and not (args and isinstance(args[0], type))


def _program_sees(value: Any) -> Any:
    return interpreted_of(value) if type(value) is types.FunctionType else value


class NativeCalls(TracingInterpreter):
    """The part of the interpreter that runs native code, below :class:`Calls`."""

    left_open: LeftOpen
    _function_classes: dict[type, type]

    # --- native code --------------------------------------------------------------------------------------------------

    def call_torch(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A function, method or class of torch, under the trace's modes."""
        given = (*args, *kwargs.values())
        kind = kind_among(given)
        if kind is not None:
            found = kind.call(self, function, args, kwargs)
            if found is not NotImplemented:
                return found
        name = getattr(function, "__name__", "")
        module = getattr(function, "__module__", None) or ""
        for handler in METHODS.get(name, ()):
            found = handler(self, function, args, kwargs)
            if found is not NotImplemented:
                return found
        if name in DATA_METHODS:
            raise Break(f".{name} needs the tensor's data", "do this outside of the compiled function")
        if function in (torch.Tensor.backward, torch.autograd.backward):
            return self.gradients.backward(function, args, kwargs)
        if function is torch.autograd.grad:
            return self.gradients.grad(args, kwargs)
        if name in IMPURE_TORCH and (module.startswith("torch") or not module):
            raise Break(
                f"torch's {name} changes or reads state outside of the graph", "call it outside of the function"
            )
        layouts = [item for item in given if type(item) is torch.layout]
        for layout in layouts:
            if layout in LAYOUTS:
                return LAYOUTS[layout](self, function, args, kwargs)
        if name in MAKES_COMPRESSED or not COMPRESSED_LAYOUTS.isdisjoint(layouts):
            raise Break(f"{name} makes a compressed sparse tensor", "make it outside of the function")
        return self.native(function, args, kwargs)

    def call_native(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A builtin function, a method of a builtin type, or a builtin class."""
        if not kwargs and is_exact_only_in_python(function, args):
            return self.derive(function, args)
        keeps_symbols = (
            function in SYMBOLIC_FUNCTIONS or stores_its_arguments(function) or _sets_attribute(function, args)
        )
        if not keeps_symbols and not self._is_tensor_method(function, args):
            args = tuple(plain_numbers(item) for item in args)
            kwargs = {key: plain_numbers(item) for key, item in kwargs.items()}
        owner = getattr(function, "__self__", None)
        name = getattr(function, "__name__", "")
        if isinstance(
            function, (types.MethodDescriptorType, types.WrapperDescriptorType, types.ClassMethodDescriptorType)
        ):
            if args:
                bound_owner = args[0]
                objclass = function.__objclass__
                if isinstance(bound_owner, (list, dict, set)) and issubclass(objclass, (list, dict, set)):
                    return self.call_container_method(bound_owner, function.__get__(bound_owner), args[1:], kwargs)
                if isinstance(bound_owner, torch.Tensor) or issubclass(objclass, private_tensors.TensorBase):
                    return self.call_torch(function, args, kwargs)
                if name == "__setattr__" and objclass is object:
                    self.store_default_attribute(bound_owner, *args[1:])
                    return None
                if name == "__getattribute__" and objclass is object:
                    return self.load_default_attribute(bound_owner, *args[1:])
                if name == "__init__" and objclass is object:
                    return None
            return self.native(function, args, kwargs)
        if isinstance(owner, torch.Tensor):
            return self.call_torch(function, args, kwargs)
        if isinstance(owner, (list, dict, set)):
            return self.call_container_method(owner, function, args, kwargs)
        handler = CALLS.get(type(owner).__dict__.get(name)) if type(owner) in LEAF_TYPES else None
        if handler is not None:
            return handler(self, (owner, *args), kwargs)
        if isinstance(owner, types.GeneratorType):
            raise Break("a generator that existed before the call is advanced", "make a list of it first")
        reason = IMPURE_BUILTINS.get(function) if isinstance(function, types.BuiltinFunctionType) else None
        if reason is not None:
            raise Break(reason, "do this outside of the compiled function")
        module = getattr(function, "__module__", None)
        if isinstance(function, types.MethodWrapperType):
            if name == "__init__" and class_attribute(type(owner), "__init__")[1] is object:
                return None
            if name == "__setattr__" and not isinstance(owner, type):
                self.store_default_attribute(owner, *args)
                return None
            if name == "__getattribute__":
                return self.load_default_attribute(owner, *args)
            if name == "__get__" and type(owner) is types.FunctionType and args:
                return owner if args[0] is None else types.MethodType(owner, args[0])
            return self.native(function, args, kwargs)
        if is_extension_record(owner) and module is not None and not module.startswith("torch"):
            raise Break(f"{module}.{name} is not known to be pure", "call it outside of the compiled function")
        if owner is not None and not isinstance(owner, (types.ModuleType, type)):
            if isinstance(owner, tuple) and name in SEARCHES and args:
                return self.search(owner, name, args)
            if isinstance(owner, torch.Size) and name == "numel" and not args and not kwargs:
                # torch's own gives a plain number.
                return math.prod(owner)
            if isinstance(owner, (frozenset, deque)):
                args = tuple(self.as_key(item, owner) for item in args)
            if (
                is_leaf_value(owner)
                or isinstance(owner, (tuple, frozenset, re.Pattern, re.Match))
                or self.values.source_of(owner) is None
            ):
                return self.native(function, args, kwargs)
            if isinstance(owner, LOCKS) and name in ("__enter__", "acquire"):
                raise LockTaken("a lock is taken at every call", "take it outside of the function")
            raise Break(
                f"{type(owner).__qualname__}.{name} may read or change state that nobody guards",
                "call it outside of the function",
            )
        if module is None or module in PURE_MODULES:
            return self.native(function, args, kwargs)
        if module == "torch" or module.startswith("torch."):
            return self.call_torch(function, args, kwargs)
        if isinstance(function, type):
            return self.native(function, args, kwargs)
        raise Break(f"{module}.{name} is not known to be pure", "call it outside of the compiled function")

    @staticmethod
    def _is_tensor_method(function: Any, args: tuple[Any, ...]) -> bool:
        if isinstance(getattr(function, "__self__", None), torch.Tensor):
            return True
        module = getattr(function, "__module__", None) or ""
        return module.startswith("torch") or (bool(args) and isinstance(args[0], torch.Tensor))

    def call_container_method(self, owner: Any, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A method of a list, dictionary or set; a write is journalled, a read guards the whole container."""
        name = function.__name__
        if name in SEARCHES and isinstance(owner, list) and args and not kwargs:
            return self.search(owner, name, args)
        if isinstance(owner, dict):
            args = (self.as_key(args[0], owner), *args[1:]) if args and name != "update" else args
        elif isinstance(owner, set):
            args = tuple(self.as_key(item, owner) for item in args)
        elif name in ("insert", "pop", "__getitem__", "__setitem__", "__delitem__"):
            args = (plain_numbers(args[0]), *args[1:]) if args else args
        writers = LIST_WRITERS if isinstance(owner, list) else DICT_WRITERS if isinstance(owner, dict) else SET_WRITERS
        if isinstance(owner, dict) and name in ("get", "__getitem__", "__contains__") and args:
            return self._dict_lookup(owner, name, args)
        if name == "__setitem__" and isinstance(owner, (list, dict)):
            self._set_container_item(owner, *args)
            return None
        if name == "append" and type(owner) is list and len(args) == 1:
            self.effects.append(owner, args[0])
            return None
        if name == "pop" and isinstance(owner, set) and self.values.source_of(owner) is not None:
            raise Break("set.pop takes whichever item comes first in memory", "take a certain item")
        self.values.whole(owner)
        if name in writers:
            self.effects.touch_all(owner)
            if isinstance(owner, list):
                for position, item in enumerate(owner):
                    if isinstance(item, torch.Tensor):
                        list.__setitem__(owner, position, self.values.wrap(item))
        is_table = isinstance(owner, (dict, set))
        # A tensor is a key there, and the container has the real ones.
        arguments = tuple(
            item
            if is_table and isinstance(item, torch.Tensor) and at == 0
            else self.values.keyed_for(owner, self.native_argument(item))
            if is_table
            else self.native_argument(item)
            for at, item in enumerate(args)
        )
        keywords = {
            name: self.called_argument(item) if name == "key" else self.native_argument(item)
            for name, item in kwargs.items()
        }
        codes = callback_codes((*arguments, *keywords.values(), *(owner if isinstance(owner, list) else ())), _HASHING)
        with watched(function, codes):
            result = function(*arguments, **keywords)
        if name in writers and isinstance(owner, dict):
            self.effects.touch_all(owner)
        return self.values.wrap(result)

    def _set_container_item(self, owner: Any, key: Any, value: Any) -> None:
        if isinstance(owner, list):
            self.values.whole(owner)
        self.effects.set_item(owner, key, value)

    def _dict_lookup(self, owner: Any, name: str, args: tuple[Any, ...]) -> Any:
        key = args[0]
        if dict.__contains__(owner, key):
            value = self.values.read(dict.__getitem__(owner, key), self.values.item_source(owner, key))
            return True if name == "__contains__" else value
        self.guard_missing_key(owner, key)
        if name == "__contains__":
            return False
        if name == "get":
            return args[1] if len(args) > 1 else None
        raise KeyError(key)

    def guard_missing_key(self, owner: Any, key: Any) -> None:
        """Guard that a dictionary has no such key."""
        source = self.values.source_of(owner)
        if source is not None and not self.effects.written(owner, key):
            self.values.guard(source, HasNoKey(key), f"{source.name} has no key {key!r}")

    def native_argument(self, value: Any) -> Any:
        """A value as native code may have it: what it could call goes through the interpreter."""
        kind = type(value)
        if kind is types.FunctionType:
            if not runs_natively(value.__globals__.get("__name__") or ""):
                return self.trampoline(value)
            return value
        if kind is types.MethodType and isinstance(value.__func__, types.FunctionType):
            if not runs_natively(value.__func__.__globals__.get("__name__") or ""):
                return self.trampoline(value)
            return value
        if kind is functools.partial or isinstance(value, torch.nn.Module):
            return self.trampoline(value) if kind is functools.partial else value
        if kind is types.BuiltinFunctionType:
            # What native code calls must be journalled, guarded or refused like what the program calls.
            writes = is_bound_builtin(value) and isinstance(value.__self__, (list, dict, set, deque))
            return self.trampoline(value) if writes or value in IMPURE_BUILTINS else value
        return self.values.for_native(value)

    def called_argument(self, value: Any) -> Any:
        """An argument that native code calls: modules, classes and callable objects are interpreted too."""
        if isinstance(value, type):
            starters = (class_attribute(value, "__init__")[0], class_attribute(value, "__new__")[0])
            is_python = any(isinstance(item, (types.FunctionType, staticmethod)) for item in starters)
        else:
            is_python = isinstance(class_attribute(type(value), "__call__")[0], types.FunctionType)
        return self.trampoline(value) if is_python else self.native_argument(value)

    def trampoline(self, function: Any) -> Callable[..., Any]:
        """A plain function that native code may call: it goes through the interpreter."""

        def enter(*args: Any, **kwargs: Any) -> Any:
            # What native code was given in the place of an object, the program is not to see.
            args = tuple(map(_program_sees, args))
            kwargs = {name: _program_sees(item) for name, item in kwargs.items()}
            if not self.values.in_backward:
                return self.call(function, args, kwargs)
            trace = self.values.trace
            outer, trace.user_backward = trace.user_backward, True
            try:
                return self.call(function, args, kwargs)
            finally:
                trace.user_backward = outer

        if isinstance(function, (types.FunctionType, types.MethodType)):
            functools.update_wrapper(enter, function)
        else:
            enter.__name__ = type(function).__name__
        stands_for(enter, function)  # type: ignore[arg-type]
        return enter

    def _check_shown(self, value: Any, depth: int = 3) -> None:
        """A text is made of a container: what native objects in it look like is nobody's to guard."""
        if isinstance(value, dict):
            value = (*dict.keys(value), *dict.values(value))
        if isinstance(value, (list, tuple, set, frozenset, deque)) and depth:
            for item in value:
                self._check_shown(item, depth - 1)
        elif type(value) is functools.partial or (_hides_state(value) and self.values.source_of(value) is not None):
            raise Break(
                f"a text is made of a {type(value).__qualname__} object", "make the text outside of the function"
            )

    def native(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run native code that is known to be pure."""
        if isinstance(function, (type, types.BuiltinFunctionType)):
            if function in _SHOWING:
                for item in args[:1]:
                    self._check_shown(item)
            elif function in _TAKING_INDICES:
                args = tuple(map(self.as_index, args))
        module = getattr(function, "__module__", None) or ""
        if function in COMPARING:
            for item in args:
                guard_equality(self.values, item)
        if module in ("itertools", "_functools", "functools"):
            called: Any = next((at for native, at in CALLS_ARGUMENT if native is function), None)
        else:
            called = "all" if module.startswith("torch") else None
        owner = getattr(function, "__self__", None)
        is_custom = isinstance(owner, type) and issubclass(owner, torch.autograd.Function)
        if is_custom:
            # Only its own methods see them, which are interpreted.
            arguments = tuple(item if callable(item) else self.native_argument(item) for item in args)
            keywords = {key: item if callable(item) else self.native_argument(item) for key, item in kwargs.items()}
        elif called is None:
            arguments = tuple(map(self.native_argument, args))
            keywords = {key: self.native_argument(item) for key, item in kwargs.items()} if kwargs else {}
        else:
            arguments = tuple(
                self.called_argument(item) if called in ("all", at) else self.native_argument(item)
                for at, item in enumerate(args)
            )
            # Those of itertools and functools that take objects take them by position only.
            keywords = {key: self.called_argument(item) for key, item in kwargs.items()}
        for item in (*arguments, *keywords.values()):
            if not (is_custom and callable(item)):
                self._check_opaque(function, item)
        trace = self.values.trace
        data_symbols = trace.data_symbols() if trace.settings.one_graph else set()
        owners = (owner,) if isinstance(owner, (slice, tuple, deque)) else ()
        codes = callback_codes(
            (*owners, *arguments, *keywords.values()), _HASHING if function in COMPARING else frozenset()
        )
        try:
            with watched(function, codes):
                if module in LOOK_AT_CALLERS:
                    result = call_for(self, function, *arguments, **keywords)
                else:
                    result = function(*arguments, **keywords)
        except private_tracing.DATA_DEPENDENT_ERRORS as error:
            if not trace.settings.one_graph or not self._is_tensor_method(function, args):
                name = getattr(function, "__name__", str(function))
                raise Break(
                    f"{name} needs the values of a tensor ({type(error).__name__})",
                    "keep the value in a tensor, or do this outside of the compiled function",
                ) from error
            trace.forgive_data_symbols(data_symbols)
            result = self._with_data(function, arguments, keywords, NotImplemented)
        except RefusedOperatorError as error:
            raise Break(error.what, error.advice) from error
        except RuntimeError as error:
            if not arguments and not keywords and (owner is None or isinstance(owner, types.ModuleType)):
                native_errors.mark_independent(error)
                raise
            if not trace.settings.one_graph or not private_tracing.needs_real_data(error):
                native_errors.mark_native(error)
                raise
            trace.forgive_data_symbols(data_symbols)
            result = self._with_data(function, arguments, keywords, NotImplemented)
        except (IndexError, TypeError, ValueError) as error:
            tell_shown_names(error, (*args, *kwargs.values()))
            # The text is that of the kernel for fake tensors, which need not be eager's.
            if self._is_tensor_method(function, args):
                native_errors.mark_native(error)
            raise
        if getattr(function, "__name__", "") in _FILLING and isinstance(result, torch.Tensor):
            self._check_filled(result, (*arguments, *keywords.values()))
        if trace.settings.one_graph and any(map(private_sizes.has_data_geometry, private_trees.tree_leaves(result))):
            # A view that lies where data says cannot leave the graph.
            found = self._with_data(function, arguments, keywords, result)
            if found is not result:
                trace.forgive_data_symbols(data_symbols)
                result = found
        self.left_open.called(function, arguments, result)
        data_sizes = self.values.trace.settings.shapes.data_sizes
        if data_sizes != "keep" and self.values.trace.has_unbacked_sizes():
            name = getattr(function, "__name__", str(function))
            reason = f"{name} makes a size from a tensor's data"
            if data_sizes == "ask":
                raise Retry(reason, change=CaptureSettings.with_data_sizes)
            raise Break(reason, "keep sizes independent of the data")
        return self.values.wrap(result)

    @staticmethod
    def _check_filled(result: torch.Tensor, given: tuple[Any, ...]) -> None:
        """Fake tensors take any number, and a tensor that nobody reads is not filled when the graph runs."""
        if not result.dtype.is_floating_point:
            return
        largest = torch.finfo(result.dtype).max
        if any(type(item) is float and largest < abs(item) < math.inf for item in given):
            raise Break(
                f"a tensor of {result.dtype} is filled with a number that it cannot hold",
                "use a number that fits, or a tensor of float64",
            )

    def _with_data(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        """Ask the rules for a call that needs the data of tensors."""
        refusal: Break | None = None
        for handler in DATA:
            try:
                found = handler(self, function, args, kwargs, result)
            except Break as stop:
                refusal = refusal or stop
                continue
            if found is not NotImplemented:
                return found
        if result is NotImplemented:
            name = getattr(function, "__name__", str(function))
            raise refusal or Break(f"{name} needs the values of a tensor", "keep the value in a tensor")
        return result

    def _guard_settings(self, value: Any) -> None:
        """An object of torch's own, such as ``torch.autocast(...)``, made before the call: its settings are guarded."""
        source = self.values.source_of(value)
        attributes = instance_dict(value)
        if source is None or attributes is None:
            return
        for name, item in attributes.items():
            # What such an object remembers between enter and exit is no setting.
            if not name.startswith("prev"):
                self.values.read(item, ItemSource(InstanceDictSource(source), name))

    def _check_opaque(self, function: Any, value: Any) -> None:
        """An object of the user's with a source must not reach native code that could read it unguarded."""
        if type(value).__module__.startswith("torch.") and not isinstance(
            value, (torch.nn.Module, torch.Tensor, type, enum.Enum)
        ):
            self._guard_settings(value)
            if dataclasses.is_dataclass(value):
                # Options of a function of torch's.
                self.guard_deep(value, set())
                return
        if (
            self.values.source_of(value) is not None
            and callable(value)
            and instance_dict(value) is not None
            and not isinstance(value, (type, types.FunctionType, types.MethodType, torch.nn.Module))
        ):
            self.guard_deep(value, set())
            return
        if isinstance(value, torch.nn.Module) or (
            self.values.source_of(value) is not None
            and not isinstance(value, (list, tuple, dict, set, frozenset, type, types.ModuleType))
            and not callable(value)
            and not isinstance(value, logging.Logger)
            and not is_leaf_value(value)
            and not is_array_number(value)
        ):
            name = getattr(function, "__name__", str(function))
            raise Break(
                f"a {type(value).__qualname__} object is handed to {name}, which could read state that nobody guards",
                "hand over the values it needs instead",
            )

    def guard_deep(self, value: Any, seen: set[int]) -> None:
        """Guard all that a copy of ``value`` would read; a tensor or module inside cannot be copied in a trace."""
        if id(value) in seen or is_leaf_value(value) or isinstance(value, (type, types.FunctionType, types.ModuleType)):
            return
        seen.add(id(value))
        if isinstance(value, (torch.Tensor, torch.nn.Module)):
            raise Break(
                f"a {type(value).__name__} is copied by copy.deepcopy", "use .clone(), or copy outside of the function"
            )
        if isinstance(value, (list, tuple, set, frozenset, deque)):
            self.values.whole(value)
            children = list(value)
        elif isinstance(value, dict):
            self.values.whole(value)
            children = list(dict.values(value))
        else:
            children = []
        attributes = instance_dict(value)
        if not children and _hides_state(value) and self.values.source_of(value) is not None:
            raise Break(
                f"a {type(value).__qualname__} object is copied, and nobody guards what is in it",
                "copy it outside of the function",
            )
        if attributes is not None:
            source = self.values.source_of(value)
            if source is not None:
                self.values.note(attributes, InstanceDictSource(source))
            self.values.whole(attributes)
            children += attributes.values()
        for child in children:
            self.guard_deep(child, seen)

    def _call_autograd_function(self, owner: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        derived = self._function_classes.get(owner)
        if derived is None:
            body: dict[str, Any] = {}
            for name in ("forward", "backward", "setup_context", "vjp", "jvp"):
                found, holder = class_attribute(owner, name)
                if holder is not None and not (holder.__module__ or "").startswith("torch.autograd"):
                    inner = found.__func__ if isinstance(found, staticmethod) else found
                    if isinstance(inner, types.FunctionType):
                        found_at = self._static_source(holder, name)
                        self.values.read(inner, found_at)
                        if name in ("backward", "vjp"):
                            self.values.note_backward_read(found_at, Identity(inner), f"{name} was called", always=True)
                        body[name] = staticmethod(self.trampoline(inner))
            derived = self._function_classes[owner] = types.new_class(
                owner.__name__, (owner,), {}, lambda namespace: namespace.update(body)
            )
        recorder = self.values.trace.recorder
        writes = self.effects.writes
        with recorder.paused():
            result = self.native(derived.apply, args, kwargs)  # type: ignore[attr-defined]
        recorder.record(owner.apply, args, kwargs, result)  # type: ignore[attr-defined]
        if self.effects.writes != writes:
            recorder.unreplayable = recorder.unreplayable or "a custom autograd.Function in it writes to Python objects"
        return result

    def _static_source(self, holder: type, name: str) -> Any:
        return AttributeSource(self.values.pin(holder, holder.__qualname__), name)
