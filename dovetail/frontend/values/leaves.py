"""Kinds of plain Python value: leaves, which are guarded by equality, and things that are guarded by identity."""

from __future__ import annotations

import enum
import functools
import operator
import re
import types
from collections.abc import Callable
from typing import Any

import torch

from dovetail.frontend.code.frame import Break
from dovetail.torch_private import operators as private_operators
from dovetail.torch_private import sizes as private_sizes

LEAF_TYPES: frozenset[type] = frozenset(
    {
        *(int, float, complex, str, bytes, bool, range, type(None), type(Ellipsis), type(NotImplemented)),
        *(torch.dtype, torch.device, torch.memory_format, torch.layout),
    }
)
#: Native objects that keep a function where nobody can read it: one that the program makes leads to the interpreter.
HOLDING_FUNCTIONS = (functools._lru_cache_wrapper, type(functools.cmp_to_key(operator.sub)))
IDENTITY_TYPES = (
    *(type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, types.CodeType, *HOLDING_FUNCTIONS),
    *(types.MethodDescriptorType, types.WrapperDescriptorType, types.ClassMethodDescriptorType),
    *(types.MethodWrapperType, types.GetSetDescriptorType, types.MemberDescriptorType),
    *(private_operators.OpOverload, private_operators.OpOverloadPacket),
    # Immutable, and what native code makes of them depends on all that they hold.
    *(re.Pattern, re.Match, types.GenericAlias, types.UnionType),
)
TRUSTED_PREFIXES = (
    *("torch", "builtins", "math", "operator", "functools", "itertools", "collections", "contextlib", "typing"),
)


def is_bound_builtin(value: object) -> bool:
    """Whether a value is a method of a builtin object, such as ``items.append``."""
    if not isinstance(value, (types.BuiltinFunctionType, types.MethodWrapperType)):
        return False
    owner = value.__self__
    return not is_extension_record(owner) and not isinstance(owner, (types.ModuleType, type, types.NoneType))


def is_extension_record(owner: object) -> bool:
    """Whether this is what pybind11 binds the functions of an extension to; it knows nothing of them."""
    return type(owner).__module__.startswith("pybind11")


def is_impostor(value: object) -> bool:
    """Whether an object's ``__class__`` is not its type: ``isinstance`` believes it, and C++ would read its memory as such.

    Modules are Python objects whatever they say: what a wrapper says is read like any attribute.
    """
    kind = type(value)
    if kind in LEAF_TYPES or kind is torch.Tensor or issubclass(kind, torch.nn.Module):
        return False
    try:
        return value.__class__ not in (kind, types.GeneratorType)  # No C++ reads generators.
    except Exception:  # noqa: BLE001  (any error of the object's own __class__ says enough)
        return True


def impostor_break(value: object) -> Break:
    """The :class:`Break` at an object for which :func:`is_impostor` holds."""
    return Break(
        f"a {type(value).__qualname__} object says by __class__ that it is something else",
        "hand over what it stands for, or keep such objects outside of the function",
    )


def is_leaf_value(value: object) -> bool:
    """Whether a value is an immutable leaf, or a tuple or frozenset of them."""
    kind = type(value)
    if kind in LEAF_TYPES or isinstance(value, enum.Enum):
        return True
    if kind is tuple or kind is frozenset or kind is torch.Size:
        return all(is_leaf_value(item) for item in value)  # type: ignore[attr-defined]
    if kind is slice:
        return all(is_leaf_value(item) for item in (value.start, value.stop, value.step))  # type: ignore[attr-defined]
    return False


#: For the types of stand-ins for a plain value, what makes the value of this call out of one.
PLAIN: dict[type, Callable[[Any], Any]] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}


def plain_flag(value: Any) -> Any:
    """A symbolic truth value as it is in this call: torch takes none for a flag (``training=epoch > 1``). Data's stays."""
    return bool(value) if type(value) is torch.SymBool and not private_sizes.is_data_number(value) else value


def plain_numbers(value: Any) -> Any:
    """Symbolic numbers as they are in this call, in containers too: code that wants plain ones then holds for these only."""
    kind = type(value)
    if kind in PLAIN:
        return PLAIN[kind](value)
    if kind in (tuple, list, torch.Size):
        items = [plain_numbers(item) for item in value]
        return value if all(one is other for one, other in zip(items, value, strict=True)) else kind(items)
    if kind is slice:
        return slice(plain_numbers(value.start), plain_numbers(value.stop), plain_numbers(value.step))
    return value


@functools.lru_cache(maxsize=4096)
def is_trusted(module_name: str | None) -> bool:
    """Whether a module's own globals and classes are taken as fixed: torch and the parts of the standard library we call."""
    return module_name is not None and module_name.split(".", 1)[0] in TRUSTED_PREFIXES


#: Types of objects that somebody may replace by others.
_PATCHED = (types.FunctionType, types.BuiltinFunctionType, type)


def is_patched_like_the_users(module_name: str | None) -> bool:
    """Whether functions of a module are guarded though it is trusted: torch's Python code, which programs patch."""
    return module_name is not None and (module_name == "torch" or module_name.startswith(("torch.", "torch_")))


#: Classes of globals that torch may change while the program runs; names in capitals are constants.
_SWITCHES = frozenset({bool, int, float, str, type(None), dict, list, set})


def may_be_switched(module_name: str | None, name: str, value: object) -> bool:
    """Whether a global of a trusted module is a switch of torch's, a function that may be patched, or a table of hooks.

    >>> may_be_switched("torch.backends.mha", "_is_fastpath_enabled", True), may_be_switched("math", "pi", 3.14)
    (True, False)
    """
    if not is_patched_like_the_users(module_name):
        return False
    if isinstance(value, _PATCHED):
        return True
    is_constant = (name.isupper() and type(value) is not dict) or name.startswith("__")
    return (type(value) in _SWITCHES and not is_constant) or name.startswith("_global_")
