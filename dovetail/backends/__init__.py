"""Backends: what turns a flat ATen graph into something that runs.

``lookup_backend`` finds one by name, ``compile_with`` runs it and checks its result, ``register_backend`` adds one,
``guarded`` puts a net under one that may fail. ``aten`` and ``eager`` are always loaded, the others by their names.
"""

import importlib
from typing import Any

from dovetail.backends.aten import ATEN
from dovetail.backends.eager import EAGER
from dovetail.backends.outputs import guard_outputs
from dovetail.backends.protocol import Backend, CompiledCallable, CompileFunction, Kind, compile_with
from dovetail.backends.registry import (
    default_backend,
    list_backends,
    lookup_backend,
    register_backend,
    unregister_backend,
)

__all__ = [
    "ATEN",
    "CUDAGRAPHS",
    "EAGER",
    "INDUCTOR",
    "Backend",
    "CompileFunction",
    "CompiledCallable",
    "Kind",
    "compile_with",
    "default_backend",
    "guard_outputs",
    "guarded",
    "list_backends",
    "lookup_backend",
    "register_backend",
    "unregister_backend",
]

_LAZY = {
    "CUDAGRAPHS": "dovetail.backends.cudagraphs.backend",
    "INDUCTOR": "dovetail.backends.inductor.backend",
    "guarded": "dovetail.backends.debug.guarded",
}


def __getattr__(name: str) -> Any:
    """Load a backend that is not loaded with the package."""
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
