"""Methods of compiled modules and functions that other libraries, or users, expect of them."""

from __future__ import annotations

import importlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from dovetail.face import compile as face
from dovetail.face.compiled_function import CompiledFunction
from dovetail.face.module import METHODS, CompiledModule

_MARK = "_orig_mod"


def _load_state(method: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
    """``load_state_dict`` of the original; nothing is renamed where its own keys have the mark too."""
    keys = list(state) if isinstance(state, Mapping) else []
    if any(_is_marked(key) for key in keys) and not any(_is_marked(key) for key in method.__self__.state_dict()):
        given, state = state, OrderedDict((_without_mark(key), state[key]) for key in keys)
        # The version of their state that BatchNorm and others declare.
        metadata = getattr(given, "_metadata", {})
        state._metadata = {_without_mark(key): value for key, value in metadata.items()}  # type: ignore[attr-defined]
    return method(state, *args, **kwargs)


METHODS["load_state_dict"] = _load_state


def _is_marked(key: Any) -> bool:
    return _MARK in str(key).split(".")


def _without_mark(key: str) -> str:
    return ".".join(part for part in key.split(".") if part != _MARK)


def _equals(compiled: CompiledModule, other: object) -> bool:
    return bool(compiled.original == (other.original if type(other) is CompiledModule else other))


def _hash(compiled: CompiledModule) -> int:
    return hash(compiled.original)


def _named_modules(compiled: CompiledModule, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.nn.Module]]:
    """The modules as the original names them, with the compiled module in the place of the original."""
    for name, module in compiled.original.named_modules(*args, **kwargs):
        yield name, compiled if module is compiled.original else module


for _name, _method in (("__eq__", _equals), ("__hash__", _hash), ("named_modules", _named_modules)):
    setattr(CompiledModule, _name, _method)


class _Precompile:
    """Bound to a compiled function or module; a method of this name that the original has wins."""

    def __get__(self, compiled: Any, owner: type | None = None) -> Any:
        """The method."""
        if compiled is None:
            return self
        own = getattr(object.__getattribute__(compiled, "original"), "precompile", None)

        def precompile(*args: Any, **kwargs: Any) -> bool:
            """Compile for a call with these arguments, which does not happen; see :func:`dovetail.tiers.ahead.precompile`."""
            found: bool = importlib.import_module("dovetail.tiers.ahead").precompile(compiled, args, kwargs)
            return found

        return precompile if own is None else own


for _class in (CompiledFunction, CompiledModule):
    setattr(_class, "precompile", _Precompile())  # noqa: B010  (the core has no such method)


_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
_LIBRARIES = ("lightning", "pytorch_lightning", "lightning_fabric")


def compile_steps(module: torch.nn.Module, options: Mapping[str, Any]) -> None:
    """Put compiled steps into a LightningModule, where it has steps of its own that nobody has replaced."""
    if not any(base.__name__ == "LightningModule" for base in type(module).__mro__):
        return
    for name in _STEPS:
        method = getattr(type(module), name, None)
        is_its_own = method is not None and str(method.__module__).split(".", 1)[0] not in _LIBRARIES
        if is_its_own and name not in vars(module):
            setattr(module, name, face.compile(getattr(module, name), **options))
