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
from collections.abc import Mapping
from typing import Any

import torch

from dovetail.frontend.code.frame import Break, Frame
from dovetail.frontend.interpreter.call_tables import IMPURE_TORCH
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.values.leaves import is_leaf_value
from dovetail.guards import InstanceDictSource, Length, NoHooks
from dovetail.rules.sizes.region_values import (
    Constant,
    FunctionValue,
    GivenTensors,
    ObjectValue,
    RefusedError,
    Skeleton,
    Value,
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
    *(
        "RESUME",
        "CALL_FUNCTION_EX",
        "LIST_TO_TUPLE",
        "CALL_INTRINSIC_1",
        "RETURN_CONST",
        "BUILD_MAP",
        "DICT_MERGE",
        "CACHE",
    ),
    *("UNPACK_EX", "BUILD_CONST_KEY_MAP", "LOAD_ASSERTION_ERROR", "EXTENDED_ARG"),
}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_ALLOWED_BUILTINS = (min, max, len, abs, range, zip, enumerate, reversed, sum, int, bool, float, tuple, list, divmod)
# Methods of tensors that are written in Python.
_PYTHON_METHODS = frozenset({"split", "norm", "unflatten"})
LIST_METHODS = frozenset({"append", "extend"})
_TENSOR_ATTRIBUTES = frozenset({"dtype", "device", "shape", "ndim", "T", "mT", "H", "mH"})
# Methods in C that do something else than compute.
_NO_COMPUTATION = frozenset({"data_ptr", "untyped_storage", "storage", "tolist", "numpy", "item", "record_stream"})


def is_plain(opname: str, plain: frozenset[str] = PLAIN) -> bool:
    """Whether an instruction does nothing but compute, or jump."""
    return opname in plain or opname.startswith(("LOAD_FAST", "STORE_FAST", "POP_JUMP_"))


class Reader:
    """Reads, with their guards, the names and attributes that code uses, and refuses what does something else than compute."""

    def __init__(self, interpreter: TracingInterpreter, given: GivenTensors) -> None:
        self._interpreter = interpreter
        self._given = given
        self._seen: set[tuple[int, types.CodeType]] = set()

    def global_name(self, frame: Frame, name: str) -> Any:
        """What a global name stands for."""
        value = self._read(self._interpreter.load_global, frame, name)
        if isinstance(value, types.FunctionType) and not self._is_functional(value):
            self._check_function(value, None)
            return value
        is_error = isinstance(value, type) and issubclass(value, Exception) and value.__module__ == builtins.__name__
        is_builtin = any(value is item for item in _ALLOWED_BUILTINS)
        is_known = _is_torch_module(value) or value is math or is_builtin or is_error or self._is_functional(value)
        if not (is_known or is_leaf_value(value)):
            raise RefusedError
        return value

    def attribute(self, owner: Any, name: str) -> Any:
        """An attribute: of an object that is given, of a module of torch; None where it is computed."""
        if isinstance(owner, ObjectValue):
            value = self._read(self._interpreter.load_attribute, owner.value, name)
            if isinstance(value, (types.BuiltinFunctionType, types.FunctionType)) and self._computes(value, name):
                owner.attributes[name] = Constant(value)
                return None
            found = owner.attributes[name] = self._given.value(value)
            if isinstance(value, torch.nn.Module) and isinstance(found, ObjectValue):
                self.module(found)
            return found
        if owner is None or not isinstance(owner, types.ModuleType):
            method = getattr(torch.Tensor, name, None)
            is_method = isinstance(method, types.MethodDescriptorType) and name not in _NO_COMPUTATION
            is_method = is_method or name in _PYTHON_METHODS
            if name not in _TENSOR_ATTRIBUTES and not is_method and name not in LIST_METHODS:
                raise RefusedError
            return None
        if name.startswith("_"):
            # torch's own switches are among these.
            raise RefusedError
        value = self._read(self._interpreter.load_attribute, owner, name)
        is_value = isinstance(value, (torch.dtype, float)) or value in (torch.finfo, torch.iinfo)
        if not (self._computes(value, name) or is_value or _is_torch_module(value)):
            raise RefusedError
        return value

    def module(self, value: ObjectValue) -> None:
        """Let a module be called with its parameters and buffers given, if calling it does nothing but compute."""
        module = value.value
        if value.module is not None:
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
            self._check_forward(part)
        value.module = Skeleton(module, tensors)

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

    def _check_forward(self, module: torch.nn.Module) -> None:
        kind = type(module).__module__
        if kind.startswith("torch.nn.utils") or type(module).__call__ is not torch.nn.Module.__call__:
            raise RefusedError
        if not kind.startswith("torch.nn.modules"):
            self._check_function(type(module).forward, module)

    def comprehension(self, function: types.FunctionType, value: FunctionValue) -> None:
        """Read what the function of a comprehension reads of objects that its closure holds."""
        names = function.__code__.co_freevars
        self._check_function(function, None, dict(zip(names, value.closure, strict=True)))

    def function(self, value: types.FunctionType) -> None:
        """Refuse a function that does something else than compute, or whose closure holds something that can change."""
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        if not all(is_leaf_value(item) for item in cells):
            raise RefusedError
        self._check_function(value, None, dict(zip(value.__code__.co_freevars, map(Constant, cells), strict=True)))

    def called(self, value: ObjectValue) -> None:
        """Note that an object may be called: a module is given its tensors."""
        if isinstance(value.value, torch.nn.Module):
            self.module(value)

    def callee(self, value: Any) -> Value:
        """A function of torch, or a module, that is about to be called."""
        if isinstance(value, torch.nn.Module):
            found = self._given.value(value)
            if isinstance(found, ObjectValue):
                self.module(found)
            return found
        is_builtin = any(value is item for item in _ALLOWED_BUILTINS)
        if not is_builtin and not self._computes(value, getattr(value, "__name__", "")):
            raise RefusedError
        return Constant(value)

    def _check_function(
        self, function: Any, owner: torch.nn.Module | None, closure: Mapping[str, Value] | None = None
    ) -> None:
        """Refuse a function of Python that writes to something, or calls what is not known to compute."""
        if type(function) is not types.FunctionType or (function.__closure__ and closure is None):
            raise RefusedError
        code = function.__code__
        if code.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR):
            raise RefusedError
        if (id(owner), code) in self._seen:
            return
        self._seen.add((id(owner), code))
        frame = Frame(function, {})
        own = code.co_varnames[0] if owner is not None else None
        if frame.decoded.exceptions:
            raise RefusedError
        current: Any = None
        for position, instruction in enumerate(frame.decoded.instructions):
            name, argument = instruction.opname, instruction.argval
            following: Any = None
            is_known = is_plain(name, _IN_FUNCTIONS) or (
                closure is not None and name in ("LOAD_DEREF", "COPY_FREE_VARS")
            )
            if not is_known or (name.startswith("STORE_FAST") and own in _parts(argument)):
                raise RefusedError
            if name.startswith("LOAD_FAST"):
                following = owner if own is not None and _parts(argument)[-1] == own else None
            elif name == "LOAD_DEREF":
                following = (closure or {})[argument]
                if isinstance(following, ObjectValue) and not _reads_attribute(frame, position + 1):
                    self.called(following)
            elif name == "LOAD_GLOBAL":
                following = self.global_name(frame, argument)
            elif name in ("LOAD_ATTR", "LOAD_METHOD"):
                following = self._own_attribute(current, argument)
            current = following

    def _own_attribute(self, owner: Any, name: str) -> Any:
        """An attribute in a function that runs for real: what is read of a module, or of an object that it has."""
        if isinstance(owner, Value):
            return self.attribute(owner if isinstance(owner, ObjectValue) else None, name)
        if (
            owner is None
            or isinstance(owner, types.ModuleType)
            or not hasattr(owner, "__dict__")
            or isinstance(owner, type)
        ):
            return self.attribute(owner, name)
        value = self._read(self._interpreter.load_attribute, owner, name)
        if isinstance(owner, torch.nn.Module):
            if isinstance(value, torch.Tensor) and (name in owner._parameters or name in owner._buffers):
                return None
            if isinstance(value, torch.nn.Module) and name in owner._modules:
                # The whole tree of modules is looked at.
                return value
            if isinstance(value, types.MethodType) and value.__self__ is owner:
                self._check_function(value.__func__, owner)
                return None
        if is_leaf_value(value) or self._computes(value, name):
            return None
        if isinstance(value, (torch.Tensor, type, list, dict, set, tuple)) or callable(value):
            raise RefusedError
        return value

    def _read(self, load: Any, owner: Any, name: str) -> Any:
        try:
            return load(owner, name)
        except (Break, AttributeError, NameError) as error:
            raise RefusedError from error

    @staticmethod
    def _is_functional(value: Any) -> bool:
        return isinstance(value, types.FunctionType) and value.__globals__.get("__name__") == "torch.nn.functional"

    def _computes(self, value: Any, name: str) -> bool:
        """Whether something is a function of torch, or of :mod:`math`, that computes."""
        if isinstance(value, types.BuiltinFunctionType):
            module = getattr(value, "__module__", None) or ""
            is_known = module in ("math", "") or module.split(".")[0] == "torch"
            return is_known and name not in IMPURE_TORCH and value.__name__ not in IMPURE_TORCH
        return self._is_functional(value)


def _reads_attribute(frame: Frame, position: int) -> bool:
    return frame.decoded.instructions[position].opname in ("LOAD_ATTR", "LOAD_METHOD")


def _parts(argument: Any) -> tuple[Any, ...]:
    return argument if isinstance(argument, tuple) else (argument,)


def _is_torch_module(value: object) -> bool:
    return isinstance(value, types.ModuleType) and value.__name__.split(".")[0] == "torch"
