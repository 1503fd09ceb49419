"""The stages of ahead-of-time autograd: create a state, capture the joint graph, compile or export it."""

from __future__ import annotations

import importlib
from typing import Any

from dovetail.aot import passes
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

_ELSEWHERE = {"export_joint": "dovetail.artefacts.export"}
"""Stages of wings, by the module that is loaded when they are first asked for."""


def __getattr__(name: str) -> Any:
    if name in _ELSEWHERE:
        return getattr(importlib.import_module(_ELSEWHERE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
