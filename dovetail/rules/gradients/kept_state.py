"""State that a hook or a custom backward keeps in the program's own objects for the next one: a counter, a list, ``ctx.x``.

A second backward of one call (``retain_graph=True``) finds in eager what the first one has left there. A compiled backward
repeats that of the capture. So eager runs a function with a hook or a custom backward that changes objects of the forward.
It may let go of something (``del ctx.saved``, ``ctx.saved = None``), since in eager a second backward could not read that.
Objects that existed before the call are looked after by the journal of writes.
"""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

from dovetail.frontend.code.frame import Break
from dovetail.frontend.code.points import is_bound
from dovetail.frontend.interpreter.lookup import instance_dict
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.values.leaves import is_leaf_value
from dovetail.guards.reading import plain_items

#: So many objects are looked at; where there are more, the capture breaks.
_MOST = 1000
_ADVICE = "return it in tensors, or register the hook outside of the function"
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_OPAQUE = (torch.Tensor, torch.nn.Module, type, types.ModuleType, types.BuiltinFunctionType, *_SYMBOLIC)
_GONE = object()


def keeping_nothing(interpreter: TracingInterpreter, called: Callable[..., Any], function: Any) -> Callable[..., Any]:
    """A hook, or a custom backward, that breaks the capture where it changes what it finds again in the next backward.

    ``function`` is the program's own, in whose place ``called`` is given to torch.
    """

    @functools.wraps(called)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not interpreter.values.in_backward:
            return called(*args, **kwargs)
        before = [(item, _content(item)) for item in _reached(interpreter, (function, *args))]
        result = called(*args, **kwargs)
        for item, content in before:
            if _keeps(content, _content(item)):
                raise Break(
                    "a hook or the backward of a custom autograd.Function keeps something for the next backward"
                    f" (in an object of the class {type(item).__name__})",
                    _ADVICE,
                )
        return result

    return run


def _reached(interpreter: TracingInterpreter, roots: tuple[Any, ...]) -> Iterator[Any]:
    """The objects of the program's own that can be written to, and that are reached from these."""
    seen: dict[int, Any] = {}
    waiting = deque(roots)
    while waiting:
        item = waiting.popleft()
        if id(item) in seen or isinstance(item, _OPAQUE) or is_leaf_value(item):
            continue
        if interpreter.values.source_of(item) is not None:
            continue
        if len(seen) == _MOST:
            raise Break(f"a hook or a custom backward reaches more than {_MOST} objects of the call", _ADVICE)
        seen[id(item)] = item
        yield item
        waiting.extend(_content(item).values())


def _content(item: Any) -> dict[Any, Any]:
    """The contents of an object, by key, attribute or place."""
    if isinstance(item, dict):
        return dict(dict.items(item))
    if isinstance(item, (list, tuple, deque, set, frozenset)):
        items = plain_items(item)
        places = map(id, items) if isinstance(item, (set, frozenset)) else range(len(items))
        return {**dict(zip(places, items)), "length": len(items) or None}
    if isinstance(item, types.CellType):
        return {"cell_contents": item.cell_contents} if is_bound(item) else {}
    if isinstance(item, types.FunctionType):
        return dict(enumerate((*(item.__closure__ or ()), *(item.__defaults__ or ()))))
    if isinstance(item, types.MethodType):
        return {"__self__": item.__self__, "__func__": item.__func__}
    if isinstance(item, functools.partial):
        return {"func": item.func, "args": item.args, "keywords": item.keywords}
    found = dict(instance_dict(item) or {})
    for kind in type(item).__mro__:
        for name, member in vars(kind).items():
            if isinstance(member, types.MemberDescriptorType) and not kind.__module__.startswith("torch"):
                found[name] = getattr(item, name, _GONE)
    if hasattr(type(item), "__next__") and type(item).__module__ in ("builtins", "itertools"):
        found.update(_position(item))
    return found


def _position(iterator: Any) -> dict[Any, Any]:
    """Where an iterator of Python's stands; a new object, equal to no other, where that cannot be said."""
    try:
        _, given, *state = iterator.__reduce__()
    except (AttributeError, TypeError, ValueError):
        return {"position": object()}
    return dict(enumerate((*given, *state)))


def _keeps(before: dict[Any, Any], after: dict[Any, Any]) -> bool:
    """Whether something is there that was not there before."""
    return any(
        value is not None and value is not _GONE and not _is_same(before.get(key, _GONE), value)
        for key, value in after.items()
    )


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and is_leaf_value(one) and bool(one == other))
