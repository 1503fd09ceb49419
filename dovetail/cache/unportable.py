"""The error of a graph that only this process can compile; in a module of its own, which needs no torch."""

from __future__ import annotations


class UnportableError(Exception):
    """The graph cannot be written as data, or does not mean the same in another process."""
