"""Checkpoints of torch.compile's modules, which have ``_orig_mod`` in their keys: compiled modules load them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from dovetail.face.module import METHODS

_MARK = "_orig_mod"


def _load_state(method: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
    """``load_state_dict`` of the original; nothing is renamed where its own keys have the mark too."""
    keys = list(state) if isinstance(state, Mapping) else []
    if any(_is_marked(key) for key in keys) and not any(_is_marked(key) for key in method.__self__.state_dict()):
        given, state = state, OrderedDict((_without_mark(key), state[key]) for key in keys)
        # What BatchNorm and others say of their version.
        metadata = getattr(given, "_metadata", {})
        state._metadata = {_without_mark(key): value for key, value in metadata.items()}  # type: ignore[attr-defined]
    return method(state, *args, **kwargs)


METHODS["load_state_dict"] = _load_state


def _is_marked(key: Any) -> bool:
    return _MARK in str(key).split(".")


def _without_mark(key: str) -> str:
    return ".".join(part for part in key.split(".") if part != _MARK)
