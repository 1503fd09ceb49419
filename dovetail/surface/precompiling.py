"""The method ``precompile`` of compiled functions and modules, which loads its wing when it is called."""

from __future__ import annotations

import importlib
from typing import Any

from dovetail.face.compiled_function import CompiledFunction
from dovetail.face.module import CompiledModule


class _Precompile:
    """Bound to a compiled function or module; a method of this name that the original has wins."""

    def __get__(self, compiled: Any, owner: type | None = None) -> Any:
        """The method."""
        if compiled is None:
            return self
        own = getattr(object.__getattribute__(compiled, "original"), "precompile", None)

        def precompile(*args: Any, **kwargs: Any) -> bool:
            """Compile for a call with these arguments, which does not happen; see :func:`dovetail.tiers.ahead.precompile`."""
            found: bool = importlib.import_module("dovetail.tiers.ahead").precompile(compiled, args, kwargs)
            return found

        return precompile if own is None else own


for _class in (CompiledFunction, CompiledModule):
    setattr(_class, "precompile", _Precompile())  # noqa: B010  (the core has no such method)
