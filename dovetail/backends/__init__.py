"""Backends turn a flat ATen graph into a callable.

``lookup_backend`` finds a backend by name, ``compile_with`` runs it and checks its result, ``register_backend`` adds one,
``guarded`` falls back to ATen's operators where one fails, ``guard_outputs`` makes the outputs of compiled code safe for
autograd. ``aten`` and ``eager`` are always loaded, all others on first use.
"""

import importlib
from typing import Any

from dovetail.backends.aten import ATEN
from dovetail.backends.eager import EAGER
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

#: Names of other rooms, by module.
_LAZY = {
    "CUDAGRAPHS": "dovetail.backends.cudagraphs.backend",
    "INDUCTOR": "dovetail.backends.inductor.backend",
    "guard_outputs": "dovetail.backends.common.outputs",
    "guarded": "dovetail.backends.debug.guarded",
}


def __getattr__(name: str) -> Any:
    """Load a name that is not loaded with the package."""
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
