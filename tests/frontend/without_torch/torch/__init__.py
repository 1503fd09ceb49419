"""A stand-in for torch, for Pythons that have none: the names that the frame machine looks at, with nothing in them."""

from __future__ import annotations

from types import SimpleNamespace


class Tensor:
    """No value is one."""


class Size(tuple[int, ...]):
    """No value is one."""


class Module:
    """No value is one."""


nn = SimpleNamespace(Module=Module)
