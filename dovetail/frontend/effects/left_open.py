"""Ends what native code has begun when a capture stops half-way: ``with`` blocks of torch's, and its generators.

A capture ends at every graph break, and where the program raises: inside of ``with torch.inference_mode():``, say. Nobody runs
the rest of the program then, and torch would stay in the mode of that place.
"""

from __future__ import annotations

import contextlib
import inspect
import types
import weakref
from typing import Any

from dovetail.torch_private import state as private_state


class LeftOpen:
    """Watches native calls. :meth:`end` leaves what is still open and sets torch back to what it was at the beginning.

    >>> import torch
    >>> left_open = LeftOpen()
    >>> block = torch.inference_mode()
    >>> left_open.called(block.__enter__, (), block.__enter__())
    >>> left_open.end()
    >>> torch.is_inference_mode_enabled()
    False
    """

    def __init__(self) -> None:
        self._before = private_state.StateOfTorch.now()
        self._blocks: list[Any] = []
        self._generators: list[weakref.ReferenceType[types.GeneratorType[Any, Any, Any]]] = []

    def called(self, function: Any, arguments: tuple[Any, ...], result: Any) -> None:
        """Native code was called: it may have entered a block, left one, or made a generator."""
        if type(result) is types.GeneratorType:
            self._generators.append(weakref.ref(result))
        name = getattr(function, "__name__", "")
        if name == "__enter__":
            self._blocks.append(_block(function, arguments))
        elif name == "__exit__":
            left = _block(function, arguments)
            if places := [at for at, block in enumerate(self._blocks) if block is left]:
                del self._blocks[places[-1]]

    def end(self) -> None:
        """Leave the blocks and close the generators that are open, innermost first; then set torch back."""
        # Leaving them runs torch's own code; nobody could handle an exception of it.
        for block in reversed(self._blocks):
            with contextlib.suppress(Exception):
                type(block).__exit__(block, None, None, None)
        for generator in filter(None, [reference() for reference in reversed(self._generators)]):
            if inspect.getgeneratorstate(generator) == inspect.GEN_SUSPENDED:
                with contextlib.suppress(Exception):
                    generator.close()
        self._blocks.clear()
        self._generators.clear()
        self._before.restore()


def _block(function: Any, arguments: tuple[Any, ...]) -> Any:
    """The object that an ``__enter__`` or ``__exit__`` belongs to."""
    # A method of a class of torch's C++ code is given its object first, and has something else for its owner.
    if arguments and hasattr(type(arguments[0]), "__exit__"):
        return arguments[0]
    return getattr(function, "__self__", None)
