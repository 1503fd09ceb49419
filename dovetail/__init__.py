"""Dovetail: a training compiler for PyTorch programs. See the README for a tour.

>>> import torch, dovetail
>>> square = dovetail.compile(lambda x: x * x, backend="aten")
>>> square(torch.tensor(3.0))
tensor(9.)

Importing the package checks versions, tells its name to its neighbours, and loads nothing else, not even torch: each name
below is loaded on first use. ``__init__.pyi`` declares the same names for type checkers.
"""

from __future__ import annotations

import importlib
from typing import Any

from dovetail.versions import __version__, check_versions

check_versions()
importlib.import_module("dovetail.neighbours")

#: The module of each public name.
_PLACES: dict[str, str] = {
    "JointGraph": "dovetail.aot.joint_graph",
    "Options": "dovetail.options",
    "capture": "dovetail.face.compile",
    "compare": "dovetail.backends.debug.compare",
    "compile": "dovetail.surface.compile",
    "compiled_autograd": "dovetail.backward_capture.block",
    "disable": "dovetail.switches.disabled",
    "events_of": "dovetail.reports.explanation",
    "explain": "dovetail.reports.explanation",
    "list_backends": "dovetail.surface.backends",
    "load": "dovetail.artefacts.load",
    "mark_dynamic": "dovetail.trace",
    "register_backend": "dovetail.backends",
    "report": "dovetail.reports.write",
    "reset": "dovetail.switches.resets",
    "set_logs": "dovetail.switches.logs",
    "set_stance": "dovetail.switches.stances",
    "torch_backend": "dovetail.backends.foreign.torch_compile",
    "wait": "dovetail.tiers.swap",
}
#: Modules that are attributes of the package without being imported first.
_MODULES = ("aot", "backends", "cache", "distributed", "errors", "testing")

__all__ = ["__version__", "aot", "errors", *_PLACES]


def __getattr__(name: str) -> Any:
    """Load a public name, and with it all others of its module."""
    if name in _MODULES:
        return importlib.import_module(f"dovetail.{name}")
    place = _PLACES.get(name)
    if place is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(place)
    globals().update({other: getattr(module, other) for other, its_place in _PLACES.items() if its_place == place})
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *_PLACES, *_MODULES})
