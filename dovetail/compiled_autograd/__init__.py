"""Compiled autograd: the autograd graph as it is at run time, captured when ``backward()`` or ``grad()`` runs."""

from __future__ import annotations

from dovetail.compiled_autograd.graph import CapturedBackward
from dovetail.compiled_autograd.session import BackwardSession, GraphCompiler, open_session

__all__ = ["BackwardSession", "CapturedBackward", "GraphCompiler", "open_session"]
