"""The public passes, under the name that they are known by beside the stages: they live in :mod:`dovetail.passes`."""

from __future__ import annotations

import importlib
from typing import Any

_HOME = "dovetail.passes"


def __getattr__(name: str) -> Any:
    return getattr(importlib.import_module(_HOME), name)


def __dir__() -> list[str]:
    return list(importlib.import_module(_HOME).__all__)
