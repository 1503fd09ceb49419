"""A compiled module that is used like the original: same parameters, same ``state_dict``, same attributes."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

_OWN = frozenset({"original", "compiled_call", "_make_call"})
_SHARED = frozenset({"__dict__", "__class__"})


class CompiledModule(torch.nn.Module):
    """Wraps a module; ``make_call(module)`` gives the callable that runs it compiled.

    Everything but calling goes to :attr:`original`, so that both always agree. Only calling the module runs compiled: another
    method of it (a trainer's ``training_step``) is compiled by ``module.training_step = compile(module.training_step)``.
    ``isinstance(compiled, type(original))`` holds, which is what trainers ask.
    """

    original: torch.nn.Module
    compiled_call: Callable[..., Any]

    def __init__(self, original: torch.nn.Module, make_call: Callable[[torch.nn.Module], Callable[..., Any]]) -> None:
        # torch.nn.Module.__init__ would give the wrapper tables of its own; it uses the original's.
        object.__setattr__(self, "original", original)
        object.__setattr__(self, "_make_call", make_call)
        object.__setattr__(self, "compiled_call", make_call(original))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module compiled."""
        # Past __getattribute__, which takes a third of a microsecond.
        return object.__getattribute__(self, "compiled_call")(*args, **kwargs)

    def __getattribute__(self, name: str) -> Any:
        """Own names and methods defined here are the wrapper's; all else is the original's."""
        if name in _OWN or name in CompiledModule.__dict__ or (name.startswith("__") and name not in _SHARED):
            return object.__getattribute__(self, name)
        return getattr(object.__getattribute__(self, "original"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the original; a method bound to the wrapper becomes the original's."""
        if isinstance(value, types.MethodType) and value.__self__ is self:
            # Accelerate replaces ``forward`` like this; bound to the wrapper, the original's own forward would need the wrapper.
            value = types.MethodType(value.__func__, self.original)
        setattr(self.original, name, value)

    def __delattr__(self, name: str) -> None:
        """Delete an attribute of the original."""
        delattr(self.original, name)

    def __dir__(self) -> list[str]:
        """The names of the original and the wrapper's own."""
        return sorted({*dir(self.original), *_OWN})

    def __repr__(self) -> str:
        """The original, marked as compiled."""
        return f"CompiledModule({self.original!r})"

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the original."""
        return iter(self.original)  # type: ignore[call-overload,no-any-return]

    def __len__(self) -> int:
        """Length of the original."""
        return len(self.original)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        """A module is true even if it is empty."""
        return True

    def __getitem__(self, key: Any) -> Any:
        """An item of the original."""
        return self.original[key]  # type: ignore[index]

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledModule:
        """A wrapper around a deep copy of the original, with no entries yet."""
        return CompiledModule(copy.deepcopy(self.original, memo), self._make_call)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled as the original and the options; compiled entries are made again when they are needed."""
        return CompiledModule, (self.original, self._make_call)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> CompiledModule:
        self.original._apply(fn, recurse)
        return self

    def train(self, mode: bool = True) -> CompiledModule:
        """Set the original's mode."""
        self.original.train(mode)
        return self

    def eval(self) -> CompiledModule:
        """Set the original's mode."""
        return self.train(False)

    def requires_grad_(self, requires_grad: bool = True) -> CompiledModule:
        """Set it on the original's parameters."""
        self.original.requires_grad_(requires_grad)
        return self

    def to(self, *args: Any, **kwargs: Any) -> CompiledModule:
        """Move the original."""
        self.original.to(*args, **kwargs)
        return self
