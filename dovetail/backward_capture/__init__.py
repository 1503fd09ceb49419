"""Compiled autograd: the autograd graph as it is at run time, captured when ``backward()`` or ``grad()`` runs."""

from __future__ import annotations

from dovetail.backward_capture import rules  # noqa: F401  (registers itself)
from dovetail.backward_capture.graph import CapturedBackward
from dovetail.backward_capture.session import BackwardSession, GraphCompiler, open_session

__all__ = ["BackwardSession", "CapturedBackward", "GraphCompiler", "open_session"]
