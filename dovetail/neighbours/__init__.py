"""Libraries that have a list of the backends of torch.compile: Accelerate, and with it the Trainer of transformers.

Theirs lacks Dovetail, and a name that is not in it is refused before torch is asked. ``import dovetail`` adds the name: at once
where the library is imported already, else when it is.
"""

from __future__ import annotations

import enum
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any

_NAME = "DOVETAIL"
_PLACE = "accelerate.utils.dataclasses"


def add_name(module: Any) -> None:
    """Make the name a member of the enumeration of backends, where the module has it as it is known."""
    backends: Any = getattr(module, "DynamoBackend", None)
    if not isinstance(backends, enum.EnumMeta) or not issubclass(backends, str):
        return
    names: Any = backends
    if _NAME in names.__members__:
        return
    member: Any = str.__new__(names, _NAME)
    member._name_ = member._value_ = _NAME
    names._member_map_[_NAME] = names._value2member_map_[_NAME] = member
    names._member_names_.append(_NAME)
    type.__setattr__(names, _NAME, member)


class _Follower:
    """A finder that finds nothing by itself, and adds the name once the library's module has run."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _PLACE:
            return None
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            execute = loader.exec_module

            def and_add(module: types.ModuleType) -> None:
                execute(module)
                add_name(module)

            loader.exec_module = and_add
        return spec


def follow() -> None:
    """Add the name now, or when the library is imported."""
    if _PLACE in sys.modules:
        add_name(sys.modules[_PLACE])
    else:
        sys.meta_path.insert(0, _Follower())


follow()
