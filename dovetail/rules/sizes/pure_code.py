"""Modules and functions that a region calls (:mod:`dovetail.rules.sizes.regions`): whether all that they do is to compute.

They run for real, at Python's own speed, when the graph runs and again for its derivative. So their code may write to nothing
but its own variables, and what it reads of the module is guarded, or given: parameters and buffers. Code that is not seen
through is refused.
"""

from __future__ import annotations

import builtins
import functools
import inspect
import math
import types
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from dovetail.frontend.code.frame import Break, Frame
from dovetail.frontend.interpreter.call_tables import IMPURE_TORCH
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.values.leaves import is_leaf_value
from dovetail.guards import InstanceDictSource, Length, NoHooks
from dovetail.rules.sizes.region_values import (
    GivenTensors,
    ObjectValue,
    RefusedError,
    Value,
    constant,
    functional_module,
)
from dovetail.torch_private import calls as private_calls

PLAIN = frozenset(
    {
        *("NOP", "PUSH_NULL", "PRECALL", "CALL", "KW_NAMES", "CALL_KW", "LOAD_CONST", "COPY", "SWAP", "POP_TOP"),
        *("BINARY_OP", "BINARY_SUBSCR", "BINARY_SLICE", "BUILD_SLICE", "UNARY_NEGATIVE", "RETURN_VALUE", "NOT_TAKEN"),
        *("BUILD_TUPLE", "BUILD_LIST", "COMPARE_OP", "UNPACK_SEQUENCE", "UNARY_NOT", "IS_OP", "CONTAINS_OP"),
        *("GET_ITER", "FOR_ITER", "END_FOR", "POP_ITER", "LIST_APPEND", "LIST_EXTEND", "BUILD_STRING", "FORMAT_VALUE"),
        *("FORMAT_SIMPLE", "CONVERT_VALUE", "RAISE_VARARGS", "TO_BOOL", "JUMP_FORWARD", "JUMP_BACKWARD"),
        *("JUMP_IF_TRUE_OR_POP", "JUMP_IF_FALSE_OR_POP", "LOAD_GLOBAL", "LOAD_ATTR", "LOAD_METHOD"),
    }
)
"""Instructions that compute, beside those for local variables."""

_IN_FUNCTIONS = PLAIN | {
    *("RESUME", "CALL_FUNCTION_EX", "LIST_TO_TUPLE", "CALL_INTRINSIC_1", "RETURN_CONST", "BUILD_MAP", "DICT_MERGE"),
    *("CACHE", "UNPACK_EX", "BUILD_CONST_KEY_MAP", "LOAD_ASSERTION_ERROR", "EXTENDED_ARG", "LOAD_DEREF"),
    *("COPY_FREE_VARS",),
}
_NO_FUNCTION = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_ALLOWED_BUILTINS = (min, max, len, abs, range, zip, enumerate, reversed, sum, int, bool, float, tuple, list, divmod)
# Of tensors and of lists, beside the methods of tensors that are written in C.
_ATTRIBUTES = frozenset(
    {
        *("dtype", "device", "shape", "ndim", "T", "mT", "H", "mH", "split", "norm", "unflatten"),
        *("append", "extend"),
    }
)
# Methods in C that do something else than compute.
_NO_COMPUTATION = frozenset({"data_ptr", "untyped_storage", "storage", "tolist", "numpy", "item", "record_stream"})


def is_plain(opname: str, plain: frozenset[str] = PLAIN) -> bool:
    """Whether an instruction does nothing but compute, or jump."""
    return opname in plain or opname.startswith(("LOAD_FAST", "STORE_FAST", "POP_JUMP_"))


class Reader:
    """Reads, with their guards, the names and attributes that code uses, and refuses code that does something else than compute.

    Code runs in one of two ways. A region runs on stand-ins (:class:`ObjectValue`), which have the attributes that are read here.
    Functions and modules that it calls run as they are: an object that they read is followed by itself.
    """

    def __init__(self, interpreter: TracingInterpreter, given: GivenTensors) -> None:
        self._interpreter = interpreter
        self._given = given
        self._seen: set[tuple[int, types.CodeType]] = set()

    def walk(self, frame: Frame, positions: Iterable[int], names: Mapping[str, Any]) -> None:
        """Follow what instructions read of the objects in the variables ``names``. Raises :class:`RefusedError`."""
        instructions = frame.decoded.instructions
        current: Any = None
        for at in positions:
            name, argument = instructions[at].opname, instructions[at].argval
            following: Any = None
            if name.startswith("LOAD_FAST"):
                following = names.get(_parts(argument)[-1])
                is_read = instructions[at + 1].opname in ("LOAD_ATTR", "LOAD_METHOD")
                if isinstance(following, ObjectValue) and isinstance(following.value, torch.nn.Module) and not is_read:
                    self.module(following)
            elif name == "LOAD_GLOBAL":
                following = self._global_name(frame, argument)
            elif name in ("LOAD_ATTR", "LOAD_METHOD"):
                is_real = isinstance(current, torch.nn.Module)
                following = self._real_attribute(current, argument) if is_real else self._attribute(current, argument)
            current = following

    def _global_name(self, frame: Frame, name: str) -> Any:
        value = self._read(self._interpreter.load_global, frame, name)
        if isinstance(value, types.FunctionType) and not _is_functional(value):
            self.function(value)
            return value
        is_error = isinstance(value, type) and issubclass(value, Exception) and value.__module__ == builtins.__name__
        if not (is_error or _is_torch_module(value) or value is math or _computes(value) or is_leaf_value(value)):
            raise RefusedError
        return value

    def _attribute(self, owner: Any, name: str) -> Any:
        """An attribute of a stand-in, or of a module of torch; None where it is computed."""
        if isinstance(owner, ObjectValue):
            value = self._read(self._interpreter.load_attribute, owner.value, name)
            if _computes(value):
                owner.attributes[name] = constant(value)
                return None
            found = owner.attributes[name] = self._given.value(value)
            if isinstance(value, torch.nn.Module) and isinstance(found, ObjectValue):
                self.module(found)
            return found
        if not isinstance(owner, types.ModuleType):
            method = getattr(torch.Tensor, name, None)
            is_method = isinstance(method, types.MethodDescriptorType) and name not in _NO_COMPUTATION
            if not is_method and name not in _ATTRIBUTES:
                raise RefusedError
            return None
        if name.startswith("_"):
            # torch's own switches are among these.
            raise RefusedError
        value = self._read(self._interpreter.load_attribute, owner, name)
        is_value = isinstance(value, (torch.dtype, float)) or value in (torch.finfo, torch.iinfo)
        if not (_computes(value) or is_value or _is_torch_module(value)):
            raise RefusedError
        return value

    def _real_attribute(self, owner: torch.nn.Module, name: str) -> Any:
        """An attribute of a module in code that runs as it is."""
        value = self._read(self._interpreter.load_attribute, owner, name)
        if name in owner._modules:
            # The whole tree of modules is looked at.
            return value
        if isinstance(value, types.MethodType) and value.__self__ is owner:
            self.function(value.__func__, owner)
        elif not (name in owner._parameters or name in owner._buffers or is_leaf_value(value) or _computes(value)):
            raise RefusedError
        return None

    def callee(self, value: Any) -> Value:
        """A function of torch, or a module, that is about to be called."""
        if not isinstance(value, torch.nn.Module):
            if not _computes(value):
                raise RefusedError
            return constant(value)
        found = self._given.value(value)
        if isinstance(found, ObjectValue):
            self.module(found)
        return found

    def module(self, value: ObjectValue) -> None:
        """Let a module be called with its parameters and buffers given, if calling it does nothing but compute."""
        module = value.value
        if value.call is not None:
            return
        load = functools.partial(self._read, self._interpreter.load_attribute)
        tree = dict(module.named_modules(remove_duplicate=False))
        tensors: dict[str, Value] = {}
        for path, part in tree.items():
            if part is not module:
                *parents, name = path.split(".")
                if load(tree[".".join(parents)], name) is not part:
                    raise RefusedError
            self._check_hooks(part)
            for name, item in list(vars(part).items()):
                if name == "training" or (not name.startswith("_") and is_leaf_value(item)):
                    load(part, name)
            for name in (*part._parameters, *part._buffers):
                tensor = load(part, name)
                if tensor is not None:
                    tensors[f"{path}.{name}" if path else name] = self._given.value(tensor)
            kind = type(part)
            if kind.__module__.startswith("torch.nn.utils") or kind.__call__ is not torch.nn.Module.__call__:
                raise RefusedError
            if not kind.__module__.startswith("torch.nn.modules"):
                self.function(kind.forward, part)
        value.call = functional_module(module, tensors)

    def _check_hooks(self, module: torch.nn.Module) -> None:
        values = self._interpreter.values
        source = values.source_of(module)
        tables = private_calls.global_module_hooks()
        has_hooks = any(vars(module).get(table) for table in _HOOKS) or any(tables.values())
        if source is None or has_hooks or "forward" in vars(module):
            raise RefusedError
        values.guard(InstanceDictSource(source), NoHooks(), f"{source.name} has no hooks")
        for name, hooks in tables.items():
            values.guard(values.pin(hooks, name), Length(0), "global module hooks")

    def function(self, function: Any, owner: torch.nn.Module | None = None, *, has_plain_cells: bool = False) -> None:
        """Refuse a function of Python that writes to something, or calls something that is not known to compute.

        ``owner``: it is a method of this module. ``has_plain_cells``: its closure may hold values that cannot be changed; its
        defaults always may.
        """
        if type(function) is not types.FunctionType:
            raise RefusedError
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
        kept = [*cells, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        code = function.__code__
        if (cells and not has_plain_cells) or not all(map(is_leaf_value, kept)) or code.co_flags & _NO_FUNCTION:
            raise RefusedError
        if (id(owner), code) in self._seen:
            return
        self._seen.add((id(owner), code))
        frame = Frame(function, {})
        own = code.co_varnames[0] if owner is not None else None
        instructions = frame.decoded.instructions
        is_plain_code = all(is_plain(item.opname, _IN_FUNCTIONS) for item in instructions)
        writes_own = any(item.opname.startswith("STORE_FAST") and own in _parts(item.argval) for item in instructions)
        if frame.decoded.exceptions or not is_plain_code or writes_own:
            raise RefusedError
        self.walk(frame, range(len(instructions)), {} if own is None else {own: owner})

    def _read(self, load: Any, owner: Any, name: str) -> Any:
        try:
            return load(owner, name)
        except (Break, AttributeError, NameError) as error:
            raise RefusedError from error


def _is_functional(value: Any) -> bool:
    return isinstance(value, types.FunctionType) and value.__globals__.get("__name__") == "torch.nn.functional"


def _computes(value: Any) -> bool:
    """Whether something is a builtin, or a function of torch or of :mod:`math`, that computes."""
    if any(value is item for item in _ALLOWED_BUILTINS):
        return True
    if not isinstance(value, types.BuiltinFunctionType):
        return _is_functional(value)
    module = getattr(value, "__module__", None) or ""
    return (module in ("math", "") or module.split(".")[0] == "torch") and value.__name__ not in IMPURE_TORCH


def _parts(argument: Any) -> tuple[Any, ...]:
    return argument if isinstance(argument, tuple) else (argument,)


def _is_torch_module(value: object) -> bool:
    return isinstance(value, types.ModuleType) and value.__name__.split(".")[0] == "torch"
