"""Names of backends: Dovetail's own, those registered in code, entry points, and torch's own.

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
import inspect
import pkgutil
import threading
import warnings
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypedDict, TypeVar, Unpack, overload

import torch

from dovetail.backends.aten import ATEN
from dovetail.backends.eager import EAGER
from dovetail.backends.protocol import Backend, Kind, Numerics
from dovetail.errors import BackendError, UnknownBackendError, did_you_mean
from dovetail.torch_private import compilers as private_compilers

ENTRY_POINT_GROUP = "dovetail.backends"
Function = TypeVar("Function", bound=Callable[..., Any])

_CORE: dict[str, Backend] = {backend.name: backend for backend in (ATEN, EAGER)}
#: Dovetail's other backends, as ``module:attribute``; looking up the name loads the module.
_WINGS: dict[str, str] = {
    "bisect": "dovetail.backends.debug.bisect:BISECT",
    "check_operators": "dovetail.backends.debug.check_operators:CHECK_OPERATORS",
    "cudagraphs": "dovetail.backends.cudagraphs.backend:CUDAGRAPHS",
    "float64": "dovetail.backends.debug.float64:FLOAT64",
    "inductor": "dovetail.backends.inductor.backend:INDUCTOR",
    "onnxruntime": "dovetail.backends.foreign.inference_only:ONNXRUNTIME",
    "openvino": "dovetail.backends.foreign.inference_only:OPENVINO",
}
_FOREIGN = "dovetail.backends.foreign"
_lock = threading.Lock()
_registered: dict[str, Backend] = {}
_warned_no_compiler = False


class BackendFacts(TypedDict, total=False):
    """The facts about a backend that :func:`register_backend` takes by keyword; :class:`Backend` describes them."""

    decompositions: Callable[[], dict[Any, Callable[..., Any]] | None] | None
    takes_program: bool
    numerics: Numerics
    description: str
    tolerances: tuple[float, float]
    takes_symbolic_shapes: bool
    kinds: tuple[Kind, ...]


@overload
def register_backend(
    name: str, backend: None = None, *, replace: bool = False, **facts: Unpack[BackendFacts]
) -> Callable[[Function], Function]: ...


@overload
def register_backend(
    name: str, backend: Backend | Callable[..., Any], *, replace: bool = False, **facts: Unpack[BackendFacts]
) -> Backend: ...


def register_backend(
    name: str,
    backend: Backend | Callable[..., Any] | None = None,
    *,
    replace: bool = False,
    **facts: Unpack[BackendFacts],
) -> Any:
    """Register a backend under ``name``; without ``backend``, return a decorator that does.

    A callable takes ``(graph, example_inputs, *, kind, options)``, or ``(graph, example_inputs)`` as ``torch.compile``'s
    backends do. ``facts`` are the fields of :class:`Backend` that users may set: ``decompositions``, ``numerics``,
    ``tolerances``, ``takes_symbolic_shapes``, ``kinds``, ``takes_program`` and ``description``. A taken name is an error
    unless ``replace`` is true.
    """
    if not isinstance(name, str) or not name:
        raise BackendError(f"a backend's name must be a string that is not empty, not {name!r}")
    unknown = sorted(facts.keys() - BackendFacts.__annotations__.keys())
    if unknown:
        raise TypeError(f"register_backend() got an unexpected keyword argument {unknown[0]!r}")
    if backend is None:

        def decorate(function: Function) -> Function:
            register_backend(name, function, replace=replace, **facts)
            return function

        return decorate
    if not callable(backend) and not isinstance(backend, Backend):
        raise BackendError(f"a backend is a callable, not {type(backend).__name__}")
    made = backend if isinstance(backend, Backend) else backend_around(name, backend)
    given: dict[str, Any] = {key: value for key, value in facts.items() if value is not None}
    made = dataclasses.replace(made, name=name, **given)
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
    """Remove a backend that was registered in code; Dovetail's own cannot be removed."""
    with _lock:
        if _registered.pop(name, None) is None:
            raise UnknownBackendError(f"no backend was registered under {name!r}")


def defined_in_this_process(name: str) -> bool:
    """Return whether the name was registered in code, so that another process does not know it."""
    return name in _registered


def list_backends(*, torch_backends: bool = True) -> list[str]:
    """Return the sorted names of all backends; ``torch_backends=False`` leaves torch's own out. Loads none of them.

    >>> {"aten", "eager", "inductor"} <= set(list_backends(torch_backends=False))
    True
    """
    names = {*_CORE, *_WINGS, *_registered, *_entry_points()}
    if torch_backends:
        names.update(torch.compiler.list_backends(None))
    return sorted(names)


def lookup_backend(backend: str | Backend | Callable[..., Any] | None) -> Backend:
    """Return the backend of this name, or one around this callable; None gives :func:`default_backend`.

    Dovetail's own names win over registered ones, those over entry points, those over torch's own backends. An unknown
    name raises :class:`UnknownBackendError`, which suggests similar names.
    """
    if backend is None:
        return default_backend()
    if isinstance(backend, Backend):
        return backend
    if isinstance(backend, str):
        return _by_name(backend)
    if callable(backend):
        return backend_around(getattr(backend, "__name__", type(backend).__name__), backend)
    raise UnknownBackendError(
        f"a backend is a name or a callable, not {type(backend).__name__}",
        advice=f"the names are: {', '.join(list_backends(torch_backends=False))}",
    )


def default_backend() -> Backend:
    """Return ``inductor`` where a C++ compiler, or a GPU with Triton, is found; else ``aten``, with one warning."""
    global _warned_no_compiler
    if private_compilers.cpp_compiler() is not None or private_compilers.has_triton():
        return lookup_backend("inductor")
    if not _warned_no_compiler:
        _warned_no_compiler = True
        warnings.warn(
            "no C++ compiler and no Triton was found, so Dovetail runs the captured ATen operators one by one "
            '(backend="aten"); what to do: install g++ or clang++, or set CXX',
            stacklevel=2,
        )
    return ATEN


def _by_name(name: str) -> Backend:
    found = _CORE.get(name) or _wing(name) or _registered.get(name)
    if found is None and (point := _entry_points().get(name)) is not None:
        found = pkgutil.resolve_name(f"{_FOREIGN}.entry_points:backend_at")(name, point)
    if found is None and name in torch.compiler.list_backends(None):
        found = pkgutil.resolve_name(f"{_FOREIGN}.torch_registered:torch_registered_backend")(name)
    if found is not None:
        return found
    others = f"use one of {', '.join(list_backends(torch_backends=False))}, or register it with register_backend"
    advice = did_you_mean(name, list_backends(), others)
    raise UnknownBackendError(f"there is no backend named {name!r}", advice=advice)


def backend_around(name: str, function: Callable[..., Any]) -> Backend:
    """A backend around a callable of this protocol, or of torch's."""
    description = inspect.getdoc(function) or ""
    if _takes_kind(function):
        return Backend(name, function, description=description)
    return pkgutil.resolve_name(f"{_FOREIGN}.torch_registered:adapt_torch_backend")(name, function, description)


def _takes_kind(function: Callable[..., Any]) -> bool:
    """Return whether the callable has the signature of Dovetail's backends, not that of torch's."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(item.name == "kind" or item.kind is inspect.Parameter.VAR_KEYWORD for item in parameters)


def _wing(name: str) -> Backend | None:
    return pkgutil.resolve_name(_WINGS[name]) if name in _WINGS else None


def _entry_points() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
