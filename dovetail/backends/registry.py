"""Finding backends by name: Dovetail's own, those registered in code, entry points, and torch's own.

>>> from dovetail.backends import lookup_backend, register_backend
>>> lookup_backend("aten").numerics
'bitwise'
>>> @register_backend("mine")
... def mine(graph, example_inputs, *, kind, options):
...     return lambda inputs: list(graph(*inputs))
>>> lookup_backend("mine").name
'mine'
>>> unregister_backend("mine")
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
import threading
import warnings
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any, overload

from dovetail.backends.aten import ATEN
from dovetail.backends.eager import EAGER
from dovetail.backends.protocol import KINDS, Backend, Kind, Numerics
from dovetail.errors import BackendError, UnknownBackendError
from dovetail.torch_private import tensors as private

ENTRY_POINT_GROUP = "dovetail.backends"

_lock = threading.Lock()
_CORE: dict[str, Backend] = {backend.name: backend for backend in (ATEN, EAGER)}
#: Dovetail's other backends, each loaded when it is first asked for by its name.
_WINGS: dict[str, str] = {
    "bisect": "dovetail.backends.debug.bisect:BISECT",
    "check_operators": "dovetail.backends.debug.check_operators:CHECK_OPERATORS",
    "cudagraphs": "dovetail.backends.cudagraphs.backend:CUDAGRAPHS",
    "float64": "dovetail.backends.debug.float64:FLOAT64",
    "inductor": "dovetail.backends.inductor.backend:INDUCTOR",
    "onnxruntime": "dovetail.backends.foreign.inference_only:ONNXRUNTIME",
    "openvino": "dovetail.backends.foreign.inference_only:OPENVINO",
}
_FOREIGN = "dovetail.backends.foreign.torch_registered"
_registered: dict[str, Backend] = {}
_warned_no_compiler = False


@overload
def register_backend(
    name: str,
    backend: None = None,
    *,
    decompositions: Callable[[], dict[Any, Callable[..., Any]] | None] | None = None,
    takes_program: bool = False,
    numerics: Numerics = "tolerance",
    description: str = "",
    tolerances: tuple[float, float] = (1e-4, 1e-5),
    takes_symbolic_shapes: bool = True,
    kinds: tuple[Kind, ...] = KINDS,
    replace: bool = False,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]: ...


@overload
def register_backend(
    name: str,
    backend: Backend | Callable[..., Any],
    *,
    decompositions: Callable[[], dict[Any, Callable[..., Any]] | None] | None = None,
    takes_program: bool = False,
    numerics: Numerics = "tolerance",
    description: str = "",
    tolerances: tuple[float, float] = (1e-4, 1e-5),
    takes_symbolic_shapes: bool = True,
    kinds: tuple[Kind, ...] = KINDS,
    replace: bool = False,
) -> Backend: ...


def register_backend(
    name: str,
    backend: Backend | Callable[..., Any] | None = None,
    *,
    decompositions: Callable[[], dict[Any, Callable[..., Any]] | None] | None = None,
    takes_program: bool = False,
    numerics: Numerics = "tolerance",
    description: str = "",
    tolerances: tuple[float, float] = (1e-4, 1e-5),
    takes_symbolic_shapes: bool = True,
    kinds: tuple[Kind, ...] = KINDS,
    replace: bool = False,
) -> Any:
    """Register a backend under ``name``; without ``backend`` it is a decorator.

    A callable takes ``(graph, example_inputs, *, kind, options)``; one written for ``torch.compile``, which takes
    ``(graph, example_inputs)``, works too. What the other arguments say is described at :class:`Backend`. A name that is
    taken is an error unless ``replace`` is true.
    """
    if not isinstance(name, str) or not name:
        raise BackendError(f"a backend's name must be a string that is not empty, not {name!r}")
    if backend is None:

        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            register_backend(
                name,
                function,
                decompositions=decompositions,
                takes_program=takes_program,
                numerics=numerics,
                description=description,
                tolerances=tolerances,
                takes_symbolic_shapes=takes_symbolic_shapes,
                kinds=kinds,
                replace=replace,
            )
            return function

        return decorate
    if isinstance(backend, Backend):
        made = dataclasses.replace(backend, name=name, description=description or backend.description)
    else:
        base = _from_callable(name, backend)
        made = Backend(
            name,
            base.compile,
            decompositions or base.decompositions,
            takes_program,
            numerics,
            description or inspect.getdoc(backend) or "",
            tolerances=tolerances,
            takes_symbolic_shapes=takes_symbolic_shapes,
            kinds=kinds,
        )
    with _lock:
        if name in _CORE or name in _WINGS:
            raise BackendError(f"{name!r} is one of Dovetail's own backends", advice="choose another name")
        if name in _registered and not replace:
            raise BackendError(
                f"a backend named {name!r} is registered already", advice="choose another name, or pass replace=True"
            )
        _registered[name] = made
    return made


def unregister_backend(name: str) -> None:
    """Forget a backend that was registered in code; Dovetail's own stay."""
    with _lock:
        if _registered.pop(name, None) is None:
            raise UnknownBackendError(f"no backend was registered under {name!r}")


def defined_in_this_process(name: str) -> bool:
    """Whether another process would not find this name: it was registered in code."""
    return name in _registered


def list_backends(*, torch_backends: bool = True) -> list[str]:
    """Names of all backends that can be used, sorted; ``torch_backends=False`` leaves torch's own out.

    >>> {"aten", "eager", "inductor"} <= set(list_backends(torch_backends=False))
    True
    """
    names = {*_CORE, *_WINGS, *_registered, *_entry_points()}
    if torch_backends:
        names.update(private.torch_backend_names())
    return sorted(names)


def lookup_backend(backend: str | Backend | Callable[..., Any] | None) -> Backend:
    """The backend of this name, or one around this callable; None gives :func:`default_backend`.

    Dovetail's own names win over registered ones, those over entry points, those over torch's own backends.
    Raises :class:`UnknownBackendError` with names near an unknown one.
    """
    if backend is None:
        return default_backend()
    if isinstance(backend, Backend):
        return backend
    if not isinstance(backend, str):
        if not callable(backend):
            raise UnknownBackendError(
                f"a backend is a name or a callable, not {type(backend).__name__}",
                advice=f"the names are: {', '.join(list_backends(torch_backends=False))}",
            )
        return _from_callable(getattr(backend, "__name__", type(backend).__name__), backend)
    found = _CORE.get(backend) or _wing(backend) or _registered.get(backend) or _from_entry_point(backend)
    found = found or _load(_FOREIGN, "torch_registered_backend")(backend)
    if found is not None:
        return found
    near = difflib.get_close_matches(backend, list_backends(), n=3, cutoff=0.5)
    raise UnknownBackendError(
        f"there is no backend named {backend!r}",
        advice=f"did you mean {', '.join(map(repr, near))}?"
        if near
        else f"use one of {', '.join(list_backends(torch_backends=False))}, or register it with register_backend",
    )


def default_backend() -> Backend:
    """``inductor`` where a C++ compiler, or a GPU with Triton, is found; else ``aten``, with one warning."""
    global _warned_no_compiler
    if private.cpp_compiler() is not None or private.has_triton():
        return lookup_backend("inductor")
    if not _warned_no_compiler:
        _warned_no_compiler = True
        warnings.warn(
            "no C++ compiler and no Triton was found, so Dovetail runs the captured ATen operators one by one "
            '(backend="aten"); what to do: install g++ or clang++, or set CXX',
            stacklevel=2,
        )
    return ATEN


def _takes_kind(function: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(item.name == "kind" or item.kind is inspect.Parameter.VAR_KEYWORD for item in parameters)


def _from_callable(name: str, function: Callable[..., Any]) -> Backend:
    if _takes_kind(function):
        return Backend(name, function, description=inspect.getdoc(function) or "")
    adapted: Backend = _load(_FOREIGN, "adapt_torch_backend")(name, function)
    return adapted


def _load(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def _wing(name: str) -> Backend | None:
    place = _WINGS.get(name)
    if place is None:
        return None
    found: Backend = _load(*place.split(":"))
    return found


def _entry_points() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}


def _from_entry_point(name: str) -> Backend | None:
    point = _entry_points().get(name)
    if point is None:
        return None
    try:
        loaded = point.load()
    except Exception as error:
        raise BackendError(
            f"the entry point {point.value!r} of backend {name!r} cannot be loaded: {type(error).__name__}: {error}",
            advice="repair or uninstall the package that declares it",
        ) from error
    if isinstance(loaded, Backend):
        return loaded
    if not callable(loaded):
        raise BackendError(
            f"the entry point {point.value!r} of backend {name!r} gives {type(loaded).__name__}",
            advice="it must give a Backend or a callable",
        )
    return _from_callable(name, loaded)
