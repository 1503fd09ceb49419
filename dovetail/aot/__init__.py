"""The stages of ahead-of-time autograd: create a state, capture the joint graph, compile or export it."""

from __future__ import annotations

import importlib
from typing import Any

from dovetail.aot.capture_joint import capture_joint
from dovetail.aot.compile_joint import compile_joint
from dovetail.aot.compiled_graph import CompiledGraph
from dovetail.aot.joint_graph import JointGraph
from dovetail.aot.state import AOTState, create_state

__all__ = [
    "AOTState",
    "CompiledGraph",
    "JointGraph",
    "capture_joint",
    "compile_joint",
    "create_state",
    "export_joint",
    "passes",
]


def __getattr__(name: str) -> Any:
    """Wings, loaded when they are first asked for."""
    if name == "export_joint":
        return importlib.import_module("dovetail.artefacts.export").export_joint
    if name == "passes":
        return importlib.import_module("dovetail.passes")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
