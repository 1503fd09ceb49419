"""What a call does: inline, run natively under the trace's modes, follow a rule of its own, or break."""

from __future__ import annotations

import dataclasses
import decimal
import enum
import functools
import itertools
import logging
import math
import operator
import re
import threading
import types
import typing
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from dovetail import torch_private as private
from dovetail.compiled_autograd.operations import NodeFunction
from dovetail.frontend.aliases import guard_equality
from dovetail.frontend.attributes import MISSING, class_attribute, instance_dict
from dovetail.frontend.classes import call_metaclass
from dovetail.frontend.frame import Break, DataSize, LockTaken
from dovetail.frontend.gradients import Gradients
from dovetail.frontend.numbers import is_exact_only_in_python
from dovetail.frontend.opaque_calls import call_whole, stays_whole, with_known_values
from dovetail.frontend.sparse import call_sparse, given_sparse
from dovetail.frontend.values import is_bound_builtin, is_extension_record, is_leaf_value, plain_numbers
from dovetail.guards import (
    AttributeSource,
    HasNoKey,
    Identity,
    InstanceDictSource,
    ItemSource,
    Length,
    NoHooks,
    ReferentSource,
)
from dovetail.runtime.recipe import interpreted_of, stands_for
from dovetail.trace import OverlapError

# Python code of torch that is interpreted like the user's: it reads module state that must be guarded.
INLINED_TORCH = (
    "torch.testing",
    "torch.nn.modules",
    "torch.utils._contextlib",
    "torch.autograd.grad_mode",
    "torch.amp.autocast_mode",
    "torch.optim",
    "torch.nn.parallel.distributed",
    # They read .grad, which a traced parameter has only where the interpreter reads it.
    "torch.nn.utils.clip_grad",
    "torch.amp.grad_scaler",
    "torch.nn.utils.parametrize",
    "torch.nn.utils.parametrizations",
    "torch.nn.utils.stateless",
    "torch.nn.utils._named_member_accessor",
    "torch._functorch.functional_call",
    "torch.utils._pytree",
)
# Python code of the standard library that runs natively: it is pure, or (warnings, logging) kept once.
NATIVE_PYTHON = (
    "re",
    "inspect",
    "typing",
    "warnings",
    "logging",
    "abc",
    "copyreg",
    "importlib",
    "weakref",
    "textwrap",
    "enum",
    "numbers",
)
PURE_MODULES = frozenset(
    {
        "builtins",
        "math",
        "cmath",
        "_operator",
        "operator",
        "itertools",
        "_functools",
        "functools",
        "_collections",
        "collections",
        "_abc",
        "abc",
        "typing",
        "types",
        "re",
        "_struct",
        "numbers",
        "enum",
        "string",
        "_string",
        "copy",
        "inspect",
        "_typing",
    }
)
# Hashed by identity, and no state of theirs is what a cached result depends on.
CACHE_KEYS = (logging.Logger, types.FunctionType, types.ModuleType, type)
IMPURE_BUILTINS: dict[Any, str] = {
    print: "print writes to the terminal",
    input: "input reads from the terminal",
    open: "open reads or writes a file",
    exec: "exec runs code from a string",
    eval: "eval runs code from a string",
    compile: "compile makes code",
    globals: "globals() hands out the module's dictionary",
    locals: "locals() hands out the frame's variables",
    dir: "dir() lists what nobody guards",
    breakpoint: "breakpoint stops the program",
    id: "id() is another number at every call",
    decimal.getcontext: "decimal.getcontext() hands out state that nobody guards",
    decimal.localcontext: "decimal.localcontext() hands out state that nobody guards",
}
IMPURE_TORCH = frozenset(
    {
        "manual_seed",
        "seed",
        "set_rng_state",
        "get_rng_state",
        "initial_seed",
        "get_num_threads",
        "get_num_interop_threads",
        "set_default_dtype",
        "set_default_device",
        "set_default_tensor_type",
        "save",
        "load",
        "set_num_threads",
        "use_deterministic_algorithms",
        "set_printoptions",
        "synchronize",
        "compile",
        "from_numpy",
        "from_file",
        "frombuffer",
        "set_float32_matmul_precision",
        "fork_rng",
        "backward",
        "retain_grad",
        "Generator",
    }
)
LOCKS = (type(threading.Lock()), type(threading.RLock()))
# Methods of a tensor that hand out its memory or its values.
DATA_METHODS = frozenset(
    {"data_ptr", "storage", "untyped_storage", "_typed_storage", "numpy", "tolist", "__array__", "__dlpack__"}
)
# torch 2.13 aborts the process where one of these is traced: the call stays whole.
COMPRESSED_LAYOUTS = frozenset({torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc})
MAKES_COMPRESSED = frozenset(
    {
        *(f"to_sparse_{kind}" for kind in ("csr", "csc", "bsr", "bsc")),
        *(f"sparse_{kind}_tensor" for kind in ("csr", "csc", "bsr", "bsc", "compressed")),
    }
)
# Functions that give a symbolic number for a symbolic number.
SYMBOLIC_FUNCTIONS = frozenset({math.floor, math.ceil, math.trunc, operator.index, slice})
LIST_WRITERS = frozenset(
    {
        "append",
        "extend",
        "insert",
        "pop",
        "remove",
        "clear",
        "sort",
        "reverse",
        "__setitem__",
        "__delitem__",
        "__iadd__",
        "__imul__",
        "__init__",
    }
)
# Methods of lists and tuples that compare their items.
SEARCHES = frozenset({"count", "index", "remove"})
DICT_WRITERS = frozenset(
    {
        "update",
        "pop",
        "popitem",
        "clear",
        "setdefault",
        "__setitem__",
        "__delitem__",
        "move_to_end",
        "__ior__",
        "__init__",
        "__missing__",
    }
)
SET_WRITERS = frozenset(
    {
        "add",
        "remove",
        "discard",
        "pop",
        "clear",
        "update",
        "difference_update",
        "intersection_update",
        "symmetric_difference_update",
        "__ior__",
        "__iand__",
        "__isub__",
        "__ixor__",
        "__init__",
    }
)
# Functions that compare what they are given, or its items, by ``==`` or by hash.
COMPARING = frozenset({itertools.groupby, operator.countOf, operator.indexOf, dict.fromkeys})
CALLED_BY_RULE = frozenset({types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial})
# Which positional argument a function of the standard library calls.
CALLS_ARGUMENT: tuple[tuple[Any, int], ...] = (
    (functools.reduce, 0),
    (itertools.starmap, 0),
    (itertools.filterfalse, 0),
    (itertools.takewhile, 0),
    (itertools.dropwhile, 0),
    (itertools.accumulate, 1),
    (itertools.groupby, 1),
)
NATIVE_CALLABLES = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
    types.ClassMethodDescriptorType,
)


@functools.lru_cache(maxsize=8192)
def runs_natively(module_name: str) -> bool:
    """Whether Python functions of a module run natively instead of being interpreted."""
    if module_name == "torch" or module_name.startswith("torch."):
        return not any(module_name == prefix or module_name.startswith(prefix + ".") for prefix in INLINED_TORCH)
    # The interpreter's own generators and iterators.
    return module_name.split(".", 1)[0] in NATIVE_PYTHON or module_name.startswith("dovetail.frontend")


def wraps_user_code(function: types.FunctionType, seen: frozenset[int] = frozenset()) -> bool:
    """Whether a decorator of torch's (``torch.autocast(...)``) wraps a function that must be interpreted."""
    if interpreted_of(function) is not function or id(function) in seen:
        return False
    # A decorated function may hold itself in a cell, as that of ``Tensor.__rsub__`` does.
    seen |= {id(function)}
    for cell in function.__closure__ or ():
        try:
            inside = cell.cell_contents
        except ValueError:
            continue
        inside = inside.__func__ if type(inside) is types.MethodType else inside
        if type(inside) is types.FunctionType:
            if not runs_natively(inside.__globals__.get("__name__") or "") or wraps_user_code(inside, seen):
                return True
        elif isinstance(inside, torch.nn.Module) or is_user_callable(inside):
            return True
    return False


@functools.lru_cache(maxsize=1024)
def is_overridable(function: types.FunctionType) -> bool:
    """Whether a Python function of torch's hands its call to tensor subclasses and modes first, and is plain torch calls below.

    Interpreted, its parts are on the program tape; as one call it is not if it calls user code, which no replay may run.
    Methods of tensors do not count: they keep what they are given (hooks) for later.
    """
    is_method = getattr(torch.Tensor, function.__name__, None) is function
    return "handle_torch_function" in function.__code__.co_names and not is_method


def calls_user_code(value: Any) -> bool:
    """Whether an argument is user code that the function which is given it will call."""
    value = value.__func__ if type(value) is types.MethodType else value
    if type(value) is types.FunctionType:
        return not runs_natively(value.__globals__.get("__name__") or "")
    return type(value) is functools.partial or isinstance(value, torch.nn.Module) or is_user_callable(value)


def is_user_callable(value: Any) -> bool:
    """Whether a value is an object with a ``__call__`` in Python that is interpreted when it is called."""
    kind = type(value)
    if kind in CALLED_BY_RULE or isinstance(value, type) or kind.__module__.split(".", 1)[0] == "torch":
        return False
    caller, _ = class_attribute(kind, "__call__")
    return isinstance(caller, types.FunctionType) and not runs_natively(caller.__globals__.get("__name__") or "")


class Calls:
    """Mixed into the interpreter: the call table."""

    values: Any
    effects: Any
    frames: list[Any]
    _function_classes: dict[type, type]

    if TYPE_CHECKING:
        gradients: Gradients

        def run_function(
            self, function: types.FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any], direct: bool = False
        ) -> Any:
            """See :class:`Interpreter` and :class:`Attributes`."""

        def format_text(self, template: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
            """See :class:`Interpreter` and :class:`Attributes`."""

        def as_key(self, value: Any, table: Any = None) -> Any:
            """See :class:`Interpreter`."""

        def search(self, container: Any, name: str, args: tuple[Any, ...]) -> Any:
            """See :class:`Operators`."""

        def load_attribute(self, target: Any, name: str) -> Any:
            """See :class:`Interpreter` and :class:`Attributes`."""

        def load_default_attribute(self, target: Any, name: str) -> Any:
            """See :class:`Interpreter` and :class:`Attributes`."""

        def derive(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
            """See :class:`Numbers`."""

        def store_default_attribute(self, target: Any, name: str, value: Any) -> None:
            """See :class:`Interpreter` and :class:`Attributes`."""

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], direct: bool = False) -> Any:
        """Call anything. ``direct``: the caller does nothing with the result but push it on the stack of its frame."""
        rule = (
            RULES.get(function) if isinstance(function, (types.BuiltinFunctionType, type, types.FunctionType)) else None
        )
        if rule is not None:
            return rule(self, args, kwargs)
        kind = type(function)
        if kind is types.FunctionType:
            interpreted = private.without_dynamo_guard(interpreted_of(function))
            if interpreted is not function:
                return self.call(interpreted, args, kwargs, direct)
            if (function.__globals__.get("__name__") or "").startswith("dovetail.frontend."):
                # A method of the interpreter's own generators and iterators; one that existed before must not be advanced.
                for item in args:
                    self._check_opaque(function, item)
                return self.values.wrap(function(*args, **kwargs))
            if function.__module__ == "dovetail.compile" and function.__name__ in ("compile", "capture", "explain"):
                raise Break(
                    f"dovetail.{function.__name__} is called inside of a compiled function",
                    "call it outside: what a compiled function calls is compiled along with it",
                )
            if (
                runs_natively(function.__globals__.get("__name__") or "")
                and not wraps_user_code(function)
                and not (is_overridable(function) and any(map(calls_user_code, (*args, *kwargs.values()))))
            ):
                return self.call_torch(function, args, kwargs)
            return self.run_function(function, args, kwargs, direct)
        if kind is types.MethodType:
            return self._call_method(function, args, kwargs, direct)
        if isinstance(function, torch.nn.Module):
            return self.call_module(function, args, kwargs, direct)
        if kind is functools.partial:
            return self._call_partial(function, args, kwargs, direct)
        if isinstance(function, type):
            return self.call_class(function, args, kwargs)
        if isinstance(function, NATIVE_CALLABLES):
            return self.call_native(function, args, kwargs)
        if isinstance(function, functools._lru_cache_wrapper):
            return self._call_cached(function, args, kwargs)
        if isinstance(function, (private.OpOverload, private.OpOverloadPacket)) or kind.__module__.startswith("torch."):
            return self.call_torch(function, args, kwargs)
        if isinstance(function, NodeFunction):
            return self._native(function, args, kwargs)
        if kind is weakref.ReferenceType:
            source = self.values.source_of(function)
            return self.values.read(function(), None if source is None else ReferentSource(source))
        caller, _ = class_attribute(kind, "__call__")
        if isinstance(caller, types.FunctionType):
            return self.call(types.MethodType(caller, function), args, kwargs, direct)
        if caller is MISSING:
            raise TypeError(f"{kind.__name__!r} object is not callable")
        if kind.__module__ in ("typing", "types", "operator", "functools"):
            return self.call_native(function, args, kwargs)
        raise Break(f"a {kind.__module__}.{kind.__qualname__} object is called", "call it outside of the function")

    def _call_cached(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A function with a cache: for constants ask the cache, which may hold what nobody would compute today."""
        given = [*args, *kwargs.values()]
        if any(isinstance(item, torch.Tensor) for item in given) or runs_natively(function.__module__ or ""):
            return self.call(function.__wrapped__, args, kwargs)
        is_of_library = _is_of_library(function.__wrapped__)
        if is_of_library and any(map(private.is_symbolic, private.tree_leaves(given))):
            return self.call(function.__wrapped__, args, kwargs)
        given = [plain_numbers(item) for item in given]
        if not all(is_leaf_value(item) or isinstance(item, CACHE_KEYS) for item in given):
            if is_of_library:
                return self.call(function.__wrapped__, args, kwargs)
            raise Break(f"the cache of {function.__qualname__} is asked for an object", "call it outside")
        with private.disable_current_modes():
            result = function(*given[: len(args)], **dict(zip(kwargs, given[len(args) :], strict=True)))
        if is_leaf_value(result):
            return result
        if is_of_library and not isinstance(result, (torch.Tensor, torch.nn.Module, Iterator)):
            # The object in the cache itself: what is read from it is guarded.
            return self.values.read(result, self.values.pin(result, f"result of {function.__qualname__}"))
        raise Break(f"{function.__qualname__} has a cache, and its result is no constant", "call it outside")

    def _call_method(self, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any], direct: bool) -> Any:
        owner = method.__self__
        source = self.values.source_of(method)
        if source is not None:
            self.values.guard(
                AttributeSource(source, "__func__"), Identity(method.__func__), f"{source.name} was called"
            )
            owner = self.values.read(owner, AttributeSource(source, "__self__"))
        if isinstance(owner, type) and issubclass(owner, torch.autograd.Function) and method.__name__ == "apply":
            return self._call_autograd_function(owner, args, kwargs)
        return self.call(method.__func__, (owner, *args), kwargs, direct)

    def _call_partial(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], direct: bool) -> Any:
        source = self.values.source_of(function)
        inner = self.load_attribute(function, "func")
        if source is None:
            return self.call(inner, function.args + args, {**function.keywords, **kwargs}, direct)
        bound = self.load_attribute(function, "args")
        bound_kwargs = self.load_attribute(function, "keywords")
        self.values.whole(bound)
        self.values.whole(bound_kwargs)
        items = tuple(self.values.wrap(item) for item in bound)
        keywords = {key: self.values.wrap(item) for key, item in bound_kwargs.items()}
        return self.call(inner, items + args, {**keywords, **kwargs}, direct)

    # --- modules ------------------------------------------------------------------------------------------------------

    def call_module(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], direct: bool = False
    ) -> Any:
        """``module(*args, **kwargs)``: straight to ``forward`` where there are no hooks, which is guarded."""
        caller, _ = class_attribute(type(module), "__call__")
        if caller is not torch.nn.Module.__call__ and not private.is_graph_module_call(module, caller):
            return self.call(types.MethodType(caller, module), args, kwargs, direct)
        return self.call_plain_module(module, args, kwargs, direct)

    def call_plain_module(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], direct: bool = False
    ) -> Any:
        """``torch.nn.Module.__call__(module, ...)``, whatever the module's own class makes of a call."""
        attributes = instance_dict(module) or {}
        if attributes.get("_backward_hooks") or attributes.get("_backward_pre_hooks"):
            raise Break("a module has backward hooks", "register the hooks on tensors, or run this module outside")
        for name, hooks in private.global_module_hooks().items():
            self.values.guard(self.values.pin(hooks, name), Length(len(hooks)), "global module hooks")
        has_global = any(private.global_module_hooks().values())
        if has_global or attributes.get("_forward_hooks") or attributes.get("_forward_pre_hooks"):
            return self.run_function(private.module_call_with_hooks(), (module, *args), kwargs, direct)
        source = self.values.source_of(module)
        if source is not None:
            self.values.guard(source, NoHooks(), f"{source.name} has no hooks")
        return self.call(self.load_attribute(module, "forward"), args, kwargs, direct)

    # --- classes ------------------------------------------------------------------------------------------------------

    def call_class(self, kind: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make an instance."""
        meta_call, _ = class_attribute(type(kind), "__call__")
        if isinstance(meta_call, types.FunctionType) and not isinstance(kind, enum.EnumMeta):
            if not (kind.__module__ or "").startswith("torch"):
                return self.call(meta_call, (kind, *args), kwargs)
            return self.call_torch(kind, args, kwargs)
        return self.make_instance(kind, args, kwargs)

    def make_instance(self, kind: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What ``type.__call__`` does."""
        if issubclass(kind, type):
            return call_metaclass(self, kind, args, kwargs)
        module = kind.__module__ or ""
        if isinstance(kind, enum.EnumMeta) or issubclass(kind, BaseException):
            return self.call_native(kind, args, kwargs)
        maker, _ = class_attribute(kind, "__new__")
        starter, starter_owner = class_attribute(kind, "__init__")
        if runs_natively(module) and not issubclass(kind, torch.nn.Module):
            return self.call_torch(kind, args, kwargs)
        maker = maker.__func__ if isinstance(maker, staticmethod) else maker
        if not isinstance(maker, types.FunctionType) and not isinstance(starter, types.FunctionType):
            if module in PURE_MODULES or kind in (typing.Any,) or module in ("contextlib", "dataclasses"):
                return self.call_native(kind, args, kwargs)
            if (
                isinstance(starter, types.FunctionType)
                or starter_owner is object
                or issubclass(kind, (dict, list, tuple, set))
            ):
                return self.call_native(kind, args, kwargs)
            raise Break(f"an object of {module}.{kind.__qualname__} is made", "make it outside of the function")
        if isinstance(maker, types.FunctionType):
            instance = self.call(maker, (kind, *args), kwargs)
            if not isinstance(instance, kind):
                return instance
        elif maker is object.__new__:
            instance = object.__new__(kind)
        else:
            immutable = issubclass(kind, (tuple, frozenset, str, int, float))
            build: Any = kind.__new__
            instance = build(kind, *[self.values.for_native(item) for item in args]) if immutable else build(kind)
        if isinstance(starter, types.FunctionType):
            self.call(starter, (instance, *args), kwargs)
        elif starter_owner is not object:
            self.call_native(starter, (instance, *args), kwargs)
        return instance

    # --- native code --------------------------------------------------------------------------------------------------

    def call_torch(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A function, method or class of torch, under the trace's modes."""
        if given_sparse(args, kwargs):
            return call_sparse(self.values.trace, function, args, kwargs)
        name = getattr(function, "__name__", "")
        module = getattr(function, "__module__", None) or ""
        if name in METHOD_RULES:
            found = METHOD_RULES[name](self, function, args, kwargs)
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
        if name in MAKES_COMPRESSED or any(
            item in COMPRESSED_LAYOUTS for item in (*args, *kwargs.values()) if isinstance(item, torch.layout)
        ):
            return call_sparse(self.values.trace, function, args, kwargs)
        if stays_whole(function, args, kwargs, self.values.trace.is_exact):
            for item in (*args, *kwargs.values()):
                self._check_opaque(function, item)
            return self.values.wrap(call_whole(self.values.trace, function, args, kwargs))
        return self._native(function, args, kwargs)

    def call_native(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A builtin function, a method of a builtin type, or a builtin class."""
        if not kwargs and is_exact_only_in_python(function, args):
            return self.derive(function, args)
        keeps_symbols = function in SYMBOLIC_FUNCTIONS or _stores_its_arguments(function)
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
                if isinstance(bound_owner, torch.Tensor) or issubclass(objclass, private.TensorBase):
                    return self.call_torch(function, args, kwargs)
                if name == "__setattr__" and objclass is object:
                    self.store_default_attribute(bound_owner, *args[1:])
                    return None
                if name == "__getattribute__" and objclass is object:
                    return self.load_default_attribute(bound_owner, *args[1:])
                if name == "__init__" and objclass is object:
                    return None
            return self._native(function, args, kwargs)
        if isinstance(owner, torch.Tensor):
            return self.call_torch(function, args, kwargs)
        if isinstance(owner, (list, dict, set)):
            return self.call_container_method(owner, function, args, kwargs)
        if type(owner) is str and name == "format":
            return self.format_text(owner, args, kwargs)
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
            return self._native(function, args, kwargs)
        if is_extension_record(owner) and module is not None and not module.startswith("torch"):
            raise Break(f"{module}.{name} is not known to be pure", "call it outside of the compiled function")
        if owner is not None and not isinstance(owner, (types.ModuleType, type)):
            if isinstance(owner, tuple) and name in SEARCHES and args:
                return self.search(owner, name, args)
            if isinstance(owner, (frozenset, deque)):
                args = tuple(self.as_key(item, owner) for item in args)
            if (
                is_leaf_value(owner)
                or isinstance(owner, (tuple, frozenset, re.Pattern, re.Match))
                or self.values.source_of(owner) is None
            ):
                return self._native(function, args, kwargs)
            if isinstance(owner, LOCKS) and name in ("__enter__", "acquire"):
                raise LockTaken("a lock is taken at every call", "take it outside of the function")
            raise Break(
                f"{type(owner).__qualname__}.{name} may read or change state that nobody guards",
                "call it outside of the function",
            )
        if module is None or module in PURE_MODULES:
            return self._native(function, args, kwargs)
        if module == "torch" or module.startswith("torch."):
            return self.call_torch(function, args, kwargs)
        if isinstance(function, type):
            return self._native(function, args, kwargs)
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
            else self.values.keyed_for(owner, self._native_argument(item))
            if is_table
            else self._native_argument(item)
            for at, item in enumerate(args)
        )
        keywords = {
            name: self.called_argument(item) if name == "key" else self._native_argument(item)
            for name, item in kwargs.items()
        }
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

    def _native_argument(self, value: Any) -> Any:
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
        return self.trampoline(value) if is_python else self._native_argument(value)

    def trampoline(self, function: Any) -> Callable[..., Any]:
        """A plain function that native code may call: it goes through the interpreter."""

        def enter(*args: Any, **kwargs: Any) -> Any:
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

    def _native(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module = getattr(function, "__module__", None) or ""
        if function in COMPARING:
            for item in args:
                guard_equality(self.values, item)
        if module in ("itertools", "_functools", "functools"):
            called: Any = next((at for native, at in CALLS_ARGUMENT if native is function), None)
        else:
            called = "all" if module.startswith("torch") else None
        if called is None:
            arguments = tuple(map(self._native_argument, args))
            keywords = {key: self._native_argument(item) for key, item in kwargs.items()} if kwargs else {}
        else:
            arguments = tuple(
                self.called_argument(item) if called in ("all", at) else self._native_argument(item)
                for at, item in enumerate(args)
            )
            # Those of itertools and functools that take objects take them by position only.
            keywords = {key: self.called_argument(item) for key, item in kwargs.items()}
        for item in arguments:
            self._check_opaque(function, item)
        for item in keywords.values():
            self._check_opaque(function, item)
        trace = self.values.trace
        data_symbols = trace.data_symbols() if trace.avoids_breaks else set()
        try:
            result = function(*arguments, **keywords)
        except private.DATA_DEPENDENT_ERRORS as error:
            if not trace.avoids_breaks or not self._is_tensor_method(function, args):
                name = getattr(function, "__name__", str(function))
                raise Break(
                    f"{name} needs the values of a tensor ({type(error).__name__})",
                    "keep the value in a tensor, or do this outside of the compiled function",
                ) from error
            trace.forgive_data_symbols(data_symbols)
            result = self._call_untraceable(function, arguments, keywords)
        except OverlapError as error:
            raise Break(error.what, error.advice) from error
        except RuntimeError as error:
            if not trace.avoids_breaks or not private.needs_real_data(error):
                private.mark_native(error)
                raise
            trace.forgive_data_symbols(data_symbols)
            result = self._call_untraceable(function, arguments, keywords)
        except (IndexError, TypeError, ValueError) as error:
            # The text is that of the kernel for fake tensors, which need not be eager's.
            if self._is_tensor_method(function, args):
                private.mark_native(error)
            raise
        if trace.avoids_breaks and any(map(private.has_data_geometry, private.tree_leaves(result))):
            # A view whose place depends on data cannot leave the graph; with the numbers known it is a plain one.
            known = with_known_values(self.values, arguments, keywords, f"{function.__name__} was given it")
            if known is not None:
                trace.forgive_data_symbols(data_symbols)
                result = function(*known[0], **known[1])
        data_sizes = self.values.trace.policy.data_sizes
        if data_sizes != "keep" and self.values.trace.has_unbacked_sizes():
            name = getattr(function, "__name__", str(function))
            kind = DataSize if data_sizes == "ask" else Break
            raise kind(f"{name} makes a size from a tensor's data", "keep sizes independent of the data")
        return self.values.wrap(result)

    def _call_untraceable(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A function that needs the values of tensors: as one operator, or for the values that small inputs have now."""
        try:
            return call_whole(self.values.trace, function, args, kwargs)
        except Break:
            known = with_known_values(self.values, args, kwargs, f"{function.__name__} was given it")
            if known is None:
                raise
            return function(*known[0], **known[1])

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
        if isinstance(value, (list, tuple, set, frozenset)):
            self.values.whole(value)
            children = list(value)
        elif isinstance(value, dict):
            self.values.whole(value)
            children = list(dict.values(value))
        else:
            children = []
        attributes = instance_dict(value)
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
            result = self._native(derived.apply, args, kwargs)  # type: ignore[attr-defined]
        recorder.record(owner.apply, args, kwargs, result)  # type: ignore[attr-defined]
        if self.effects.writes != writes:
            recorder.unreplayable = recorder.unreplayable or "a custom autograd.Function in it writes to Python objects"
        return result

    def _static_source(self, holder: type, name: str) -> Any:
        return AttributeSource(self.values.pin(holder, holder.__qualname__), name)


# --- rules ------------------------------------------------------------------------------------------------------------

RULES: dict[Any, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]] = {}
METHOD_RULES: dict[str, Callable[[Any, Any, tuple[Any, ...], dict[str, Any]], Any]] = {}
"""Rules for methods of tensors by name; NotImplemented where the method's native meaning is enough."""


_STORING_METHODS: dict[type | None, frozenset[str]] = {
    list: frozenset({"append", "extend", "insert"}),
    dict: frozenset({"get", "pop", "setdefault", "update"}),
}


def _stores_its_arguments(function: Any) -> bool:
    """Whether a bound method of a list or dictionary puts its arguments there as they are; keys become plain by themselves."""
    owner = getattr(function, "__self__", None)
    if owner is tuple:
        # What a named tuple is made by.
        return getattr(function, "__name__", "") == "__new__"
    return getattr(function, "__name__", "") in _STORING_METHODS.get(type(owner), frozenset())


_LIBRARIES = ("site-packages", "dist-packages")


def _is_of_library(function: Any) -> bool:
    """Whether a function belongs to an installed package: what it keeps in a cache is taken to follow from its arguments."""
    code = getattr(function, "__code__", None)
    return code is not None and any(place in code.co_filename for place in _LIBRARIES)


def rule(*functions: Any) -> Callable[[Any], Any]:
    """Register a rule for functions whose native meaning is not enough."""

    def register(handler: Any) -> Any:
        for function in functions:
            RULES[function] = handler
        return handler

    return register
