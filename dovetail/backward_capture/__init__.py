"""Compiled autograd: captures the autograd graph of a backward when the backward runs.

``dovetail.compiled_autograd`` loads the wing, and so does ``dovetail.compile(..., compiled_autograd=True)``. The way of a backward:
:mod:`.handover` (the call), :mod:`.engine` (torch's engine and its hook), :mod:`.builder` (the engine's walk, node by node),
:mod:`.graph` (the captured backward, in eager's order), :mod:`.segments` and :mod:`.segment_runner` (how it runs).
"""

from __future__ import annotations

from dovetail.backward_capture.graph import CapturedBackward
from dovetail.backward_capture.handover import open_session
from dovetail.backward_capture.session import BackwardSession, GraphCompiler

__all__ = ["BackwardSession", "CapturedBackward", "GraphCompiler", "open_session"]
