"""Backends that installed packages offer by an entry point."""

from __future__ import annotations

from importlib.metadata import EntryPoint

from dovetail.backends.protocol import Backend
from dovetail.backends.registry import backend_around
from dovetail.errors import BackendError


def backend_at(name: str, point: EntryPoint) -> Backend:
    """The backend of an entry point; raises :class:`BackendError` where there is none."""
    subject = f"the entry point {point.value!r} of backend {name!r}"
    try:
        loaded = point.load()
    except Exception as error:
        raise BackendError(
            f"{subject} cannot be loaded: {type(error).__name__}: {error}",
            advice="repair or uninstall the package that declares it",
        ) from error
    if isinstance(loaded, Backend):
        return loaded
    if not callable(loaded):
        raise BackendError(f"{subject} gives {type(loaded).__name__}", advice="it must give a Backend or a callable")
    return backend_around(name, loaded)
