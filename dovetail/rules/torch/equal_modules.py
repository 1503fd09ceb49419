"""Modules of one class that are compiled one by one share what was compiled for the first of them.

``for block in model.blocks: block.forward = dovetail.compile(block.forward)`` and ``[dovetail.compile(block) for block in blocks]``
make a compiled function for each block. The guards of an entry start at the callee and hold no module by its identity; the graph
takes parameters and buffers as inputs, found from the callee at each call. So an entry is right for another module if its
guards hold there, as it is right for the first module after any change: both are the same question. Code that depends on the
identity of a module (a table with modules as keys, ``id``) is guarded by identity, and that guard fails for the other one.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import types
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from dovetail.face.compiled_function import CompiledFunction
from dovetail.face.dispatcher import SURROUNDINGS, Dispatcher, Run, compile_lock
from dovetail.guards import compile_checker
from dovetail.runtime.entry import Entry

#: The compiled functions of modules of each class.
_COMPILED: weakref.WeakKeyDictionary[type, weakref.WeakSet[CompiledFunction]] = weakref.WeakKeyDictionary()
#: Backends whose compiled graphs keep the addresses of the parameters that they have seen.
_KEEP_ADDRESSES = frozenset({"cudagraphs"})
#: Of how many entries the guards are checked: modules that differ, each in another number, are captured for themselves.
_MOST = 16


def by_entry_of_equal_module(dispatcher: Dispatcher, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Run | None:
    """The call by an entry that was compiled for another module of the class; None where no such entry takes it."""
    module = _module_of(dispatcher.original)
    if module is None or type(dispatcher) is not CompiledFunction:
        return None
    with compile_lock:
        alike = _COMPILED.setdefault(type(module), weakref.WeakSet())
        others = [other for other in alike if other is not dispatcher and _are_compiled_alike(other, dispatcher)]
        alike.add(dispatcher)
        if len(dispatcher.entries) >= dispatcher.options.recompile_limit:
            return None
        for entry in itertools.islice(_distinct(others, dispatcher.entries), _MOST):
            if entry.checker.explain(dispatcher.original, args, kwargs):
                continue
            checker = compile_checker(entry.checker.guards, ambient=entry.checker.ambient)
            tensors = checker.check(dispatcher.original, args, kwargs)
            if tensors is not None:
                # With a check of its own: an accelerator remembers what it has found at one callee.
                shared = dataclasses.replace(entry, checker=checker)
                dispatcher.entries = [shared, *dispatcher.entries]
                dispatcher.events.note("entry of an equal module", module=type(module).__qualname__)
                return functools.partial(shared.call, dispatcher.original, args, kwargs, tensors)
    return None


SURROUNDINGS.append(by_entry_of_equal_module)


def _module_of(original: Any) -> torch.nn.Module | None:
    owner = original.__self__ if isinstance(original, types.MethodType) else original
    return owner if isinstance(owner, torch.nn.Module) else None


def _are_compiled_alike(one: CompiledFunction, other: CompiledFunction) -> bool:
    """Whether an entry of the one may be one of the other: the same method, options and backend, and one answer about compiling."""
    mine, its = one.original, other.original
    return (
        getattr(mine, "__func__", None) is getattr(its, "__func__", None)
        and one.options == other.options
        # A pass may know the parameters of its module.
        and not one.options.passes
        and one.backend == other.backend
        and one.backend.name not in _KEEP_ADDRESSES
        and one._says_compiling == other._says_compiling
    )


def _distinct(others: list[CompiledFunction], own: list[Entry]) -> Iterator[Entry]:
    """Each compiled whole call of the others once, without those that are here already."""
    seen = {entry.compiled for entry in own}
    for other in others:
        for entry in other.entries:
            if (
                entry.run is None
                or entry.resume_point is not None
                or entry.compiled in seen
                or entry.checker.guards.is_dead
            ):
                continue
            seen.add(entry.compiled)
            yield entry
