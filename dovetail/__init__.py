"""Dovetail: a training compiler for PyTorch programs. See the README for a tour.

>>> import torch, dovetail
>>> square = dovetail.compile(lambda x: x * x, backend="aten")
>>> square(torch.tensor(3.0))
tensor(9.)
"""

from __future__ import annotations

import importlib
from typing import Any

from dovetail.versions import check_versions

check_versions()

from dovetail import aot, errors  # noqa: E402
from dovetail.aot.joint_graph import JointGraph  # noqa: E402
from dovetail.artefacts.load_joint import load  # noqa: E402
from dovetail.backends import list_backends, register_backend  # noqa: E402
from dovetail.backends.foreign.torch_compile import torch_backend  # noqa: E402
from dovetail.face.compile import capture, compile, compiled_autograd, events_of, explain  # noqa: E402
from dovetail.options import Options  # noqa: E402
from dovetail.trace import mark_dynamic  # noqa: E402
from dovetail.versions import __version__  # noqa: E402

__all__ = [
    "JointGraph",
    "Options",
    "__version__",
    "aot",
    "capture",
    "compile",
    "compiled_autograd",
    "errors",
    "events_of",
    "explain",
    "list_backends",
    "load",
    "mark_dynamic",
    "register_backend",
    "torch_backend",
]


def __getattr__(name: str) -> Any:
    """``dovetail.testing`` and ``dovetail.distributed`` are loaded when they are first asked for: not all training needs them."""
    if name in ("testing", "distributed"):
        return importlib.import_module(f"dovetail.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
