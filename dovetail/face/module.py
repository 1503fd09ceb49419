"""A compiled module that is used like the original: same parameters, same ``state_dict``, same attributes."""

from __future__ import annotations

import copy
import functools
import operator
import types
from collections.abc import Callable
from typing import Any

import torch

from dovetail.face.warnings import messages

_OWN = frozenset({"original", "compiled_call", "_make_call"})
_SHARED = frozenset({"__dict__", "__class__", "__module__", "__doc__"})
#: Methods by which a program keeps what they return: ``model = model.to("cuda")``.
_RETURNING_SELF = frozenset(
    {"apply", "bfloat16", "cpu", "cuda", "double", "eval", "float", "half", "requires_grad_", "share_memory", "to"}
    | {"_apply", "to_empty", "train", "type", "xpu"}
)
#: Functions called in the place of a method of the original, with the method in front of its arguments.
METHODS: dict[str, Callable[..., Any]] = {}


class CompiledModule(torch.nn.Module):
    """Wraps a module; ``make_call(module)`` gives the callable that runs it compiled.

    Everything but calling goes to :attr:`original`, so that both always agree. Only calling the module runs compiled: another
    method of it (a trainer's ``training_step``) is compiled by ``module.training_step = compile(module.training_step)``.
    ``isinstance(compiled, type(original))`` holds, which is what trainers ask.
    """

    original: torch.nn.Module
    compiled_call: Callable[..., Any]
    #: The original, by the name that torch.compile gives it.
    _orig_mod = property(operator.attrgetter("original"))

    def __init__(self, original: torch.nn.Module, make_call: Callable[[torch.nn.Module], Callable[..., Any]]) -> None:
        # torch.nn.Module.__init__ would give the wrapper tables of its own; it uses the original's.
        object.__setattr__(self, "original", original)
        object.__setattr__(self, "_make_call", make_call)
        object.__setattr__(self, "compiled_call", make_call(original))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module compiled."""
        # Past __getattribute__, which takes a third of a microsecond.
        try:
            return object.__getattribute__(self, "compiled_call")(*args, **kwargs)
        except Exception as error:
            messages().without_internals(error)
            raise

    def __getattribute__(self, name: str) -> Any:
        """Own names and methods defined here are the wrapper's; all else is the original's."""
        if is_own(name):
            return object.__getattribute__(self, name)
        return of_original(self, name, getattr(object.__getattribute__(self, "original"), name))

    def __getattr__(self, name: str) -> Any:
        """Look up attributes that the original lacks: ``cost``, of the compiled function."""
        return getattr(object.__getattribute__(self, "compiled_call" if name == "cost" else "original"), name)

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

    def __bool__(self) -> bool:
        """A module is true even if it is empty."""
        return True

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledModule:
        """A wrapper around a deep copy of the original, with no entries yet."""
        return CompiledModule(copy.deepcopy(self.original, memo), self._make_call)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled as the original and the options; compiled entries are made again when they are needed."""
        return CompiledModule, (self.original, self._make_call)


def is_own(name: str) -> bool:
    """Whether an attribute is the wrapper's own, and not the original's."""
    return name in _OWN or (name not in _SHARED and (name in CompiledModule.__dict__ or name.startswith("__")))


def of_original(wrapper: CompiledModule, name: str, found: Any) -> Any:
    """An attribute of the original as the wrapper hands it out."""
    if isinstance(found, types.MethodType) and name in _RETURNING_SELF:
        return functools.partial(_keeping_the_wrapper, wrapper, found)
    return functools.partial(METHODS[name], found) if isinstance(found, types.MethodType) and name in METHODS else found


def _keeping_the_wrapper(wrapper: CompiledModule, method: types.MethodType, *args: Any, **kwargs: Any) -> Any:
    """Call a method of the original; where that returns the original, return the wrapper."""
    result = method(*args, **kwargs)
    return wrapper if result is method.__self__ else result


for _function in (iter, len, operator.contains, operator.getitem, operator.setitem, operator.delitem):
    # Python looks these up on the class.
    setattr(CompiledModule, f"__{_function.__name__}__", lambda self, *args, call=_function: call(self.original, *args))
