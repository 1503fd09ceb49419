"""Backends: what turns a flat ATen graph into something that runs.

``lookup_backend`` finds one by name, ``compile_with`` runs it and checks its result, ``register_backend`` adds one,
``guarded`` puts a net under one that may fail.
"""

from dovetail.backends.aten import ATEN
from dovetail.backends.cudagraphs import CUDAGRAPHS
from dovetail.backends.eager import EAGER
from dovetail.backends.guarded import guarded
from dovetail.backends.inductor import INDUCTOR
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
