"""Objects of the standard library that are called: caches, weak references, getters, new types."""

from __future__ import annotations

import functools
import gc
import inspect
import logging
import operator
import os
import sys
import types
import typing
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dovetail.errors import UnbuildableError
from dovetail.frontend.code.frame import Break, LetGo
from dovetail.frontend.interpreter.call_tables import LOOKING, runs_natively
from dovetail.frontend.interpreter.opaque import guard_deep
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, Keywords, callable_rule, called_rule, rule, wrapper_rule
from dovetail.frontend.values.leaves import is_leaf_value, plain_numbers
from dovetail.frontend.values.values import Values
from dovetail.guards import Answers, ComputedSource, DictKeys, Equals, ItemSource, Length, Source
from dovetail.guards.writer import Writer
from dovetail.runtime.recipe_builder import MADE_BY_CALL, interpreted_of
from dovetail.torch_private import checkpoints as private_checkpoints
from dovetail.torch_private import libraries as private_libraries
from dovetail.torch_private import sizes as private_sizes
from dovetail.torch_private import tracing as private_tracing
from dovetail.torch_private import trees as private_trees
from dovetail.trace.repeats import draws_random_numbers

LOOKING.update(
    (types.SimpleNamespace, weakref.ref), filter(inspect.isfunction, map(vars(inspect).get, inspect.__all__))
)
# These call a function that they are given.
LOOKING.difference_update((inspect.getmembers, inspect.unwrap, vars(inspect).get("getmembers_static")))


def _referent(reference: Any) -> Any:
    """The object that a weak reference refers to; None once that is gone."""
    if type(reference) is not weakref.ReferenceType:
        raise TypeError("no weak reference")
    return reference()


@callable_rule(weakref.ReferenceType)
def _reference(interpreter: TracingInterpreter, function: Any, args: Arguments, kwargs: Keywords) -> Any:
    source, referent = interpreter.values.source_of(function), function()
    if source is None and isinstance(referent, torch.Tensor) and interpreter.trace.input_of(referent) is None:
        # The capture keeps its tensors alive.
        raise Break(
            "a weak reference to a tensor of the function's own is asked whether it lives", "keep the tensor itself"
        )
    place = None if source is None else ComputedSource(_referent, (source,), f"{source.name}()")
    return interpreter.values.read(referent, place)


@rule(weakref.ref)
def _make_reference(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    if len(args) > 1 and args[1] is not None:
        # The callback runs when the object is gone, maybe long after the capture, which keeps its tensors alive.
        raise LetGo("a weak reference has a callback", "make the reference outside of the function", resumable=False)
    if args and isinstance(args[0], torch.Tensor) and _is_held(interpreter, args[0]):
        _HELD[id(args[0])] = args[0]
    return interpreter.native(weakref.ref, args, kwargs)


#: Tensors that something holds when a weak reference to them leaves; of others nobody knows whether the autograd graph does.
_HELD: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()


def _is_held(interpreter: TracingInterpreter, value: torch.Tensor) -> bool:
    """Whether a tensor existed before, or is a weight to which its recurrent network refers."""
    code = interpreter.frames[-1].code
    return private_libraries.refers_to_weights(code) or interpreter.trace.input_of(value) is not None


def _leaving(reference: weakref.ReferenceType[Any]) -> tuple[Any, ...]:
    referent = reference()
    if referent is None or _HELD.get(id(referent)) is not referent:
        raise UnbuildableError(
            "a weak reference made by the function leaves it", advice="return the object that it refers to"
        )
    return weakref.ref, (referent,)


MADE_BY_CALL[weakref.ReferenceType] = _leaving

_CONTAINERS = (weakref.WeakSet, weakref.WeakValueDictionary, weakref.WeakKeyDictionary)
_NAMES = ("add", "update", "setdefault", "__init__", "__setitem__", "__ior__")
_STORES = frozenset(getattr(kind, name) for kind in _CONTAINERS for name in _NAMES if name in vars(kind))


@wrapper_rule
def _kept_weakly(interpreter: TracingInterpreter, function: Any, args: Arguments, kwargs: Keywords) -> None:
    """A container of weak references forgets tensors that the program lets go of, which the capture keeps alive."""
    if type(function) is types.FunctionType and function in _STORES:
        for item in private_trees.tree_leaves([*args, kwargs]):
            if isinstance(item, torch.Tensor) and interpreter.trace.input_of(item) is None:
                raise LetGo("a weak reference to a tensor of its own", "keep the tensor itself", resumable=False)


@rule(weakref.proxy)
def _proxy(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    raise LetGo("weakref.proxy stands for an object, a weak reference to it", "use the object itself", resumable=False)


@callable_rule(typing.NewType)
def _new_type(interpreter: TracingInterpreter, function: Any, args: Arguments, kwargs: Keywords) -> Any:
    return args[0] if len(args) == 1 and not kwargs else function(*args, **kwargs)


# --- getters ----------------------------------------------------------------------------------------------------------

GETTERS: tuple[type, ...] = (operator.attrgetter, operator.itemgetter, operator.methodcaller)


def _held_by(getter: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments that a getter was made with, by position and by name.

    >>> _held_by(operator.methodcaller("sort", reverse=True))
    (('sort',), {'reverse': True})
    """
    maker, items = getter.__reduce__()
    # A method called with keywords: they are in a partial function.
    return (items, {}) if maker in GETTERS else ((*maker.args, *items), maker.keywords)


def _made_anew(getter: Any) -> tuple[Any, ...]:
    items, keywords = _held_by(getter)
    return CachedCall(len(items), tuple(keywords)), (type(getter), *items, *keywords.values())


def _makes(kind: type) -> None:
    MADE_BY_CALL[kind] = _made_anew

    @rule(kind)
    def made(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
        """It keeps what it is given, tensors of the graph too."""
        getter = kind(*args, **kwargs)
        interpreter.created(getter)
        return getter


for _kind in GETTERS:
    _makes(_kind)


def _read_what_is_held(values: Values, getter: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A getter's arguments as the program sees them; one that existed before never changes, but may be another one."""
    items, keywords = _held_by(getter)
    if (source := values.source_of(getter)) is None:
        return items, keywords
    held = ComputedSource(_held_by, (source,), f"what {source.name} was made with")
    first, second, reason = ItemSource(held, 0), ItemSource(held, 1), f"{source.name} was called"
    values.guard(first, Length(len(items)), reason)
    values.guard(second, DictKeys(tuple(keywords)), reason)
    given = tuple(values.read(item, ItemSource(first, place)) for place, item in enumerate(items))
    return given, {name: values.read(item, ItemSource(second, name)) for name, item in keywords.items()}


@callable_rule(*GETTERS)
def _get(interpreter: TracingInterpreter, getter: Any, args: Arguments, kwargs: Keywords) -> Any:
    if len(args) != 1 or kwargs:
        return interpreter.call_native(getter, args, kwargs)
    items, keywords = _read_what_is_held(interpreter.values, getter)
    (target,) = args
    if type(getter) is operator.methodcaller:
        return interpreter.call(interpreter.load_attribute(target, items[0]), items[1:], dict(keywords))
    found = tuple(_get_one(interpreter, type(getter), target, item) for item in items)
    return found if len(found) > 1 else found[0]


def _get_one(interpreter: TracingInterpreter, kind: type, target: Any, item: Any) -> Any:
    if kind is operator.itemgetter:
        return interpreter.load_item(target, item)
    for name in item.split("."):
        target = interpreter.load_attribute(target, name)
    return target


# --- caches -----------------------------------------------------------------------------------------------------------


_LIBRARIES = ("site-packages", "dist-packages")


@functools.cache
def _has_packages(folder: str) -> bool:
    """Whether packages were installed into a folder (``pip install --target``)."""
    return any(Path(folder).glob("*.dist-info"))


def is_in_library(path: str | None) -> bool:
    """Whether a file belongs to an installed package."""
    if path is None or any(place in path for place in _LIBRARIES):
        return path is not None
    return any(path.startswith(folder + os.sep) and _has_packages(folder) for folder in sys.path if folder)


# Hashed by identity, and no state of theirs is what a cached result depends on.
_CACHE_KEYS = (logging.Logger, types.FunctionType, types.ModuleType, type)


@dataclass(frozen=True)
class CachedCall:
    """A call of a function with a cache, by the number of its positional arguments and the names of the others.

    >>> CachedCall(1, ("default",))(functools.cache(max), (), 7)
    7
    """

    positional: int
    names: tuple[str, ...]

    def __call__(self, function: Any, *given: Any) -> Any:
        """Return the result that the function has now."""
        keywords = zip(self.names, given[self.positional :], strict=True)
        return function(*given[: self.positional], **dict(keywords))


class CheckedSource(ComputedSource):
    """A cache's present value, read by the check of an entry alone.

    To ask a cache may run the program's function: one that no check has come to is not asked why the entry does not hold.
    """

    def fetch(self, callee: Any, args: Arguments, kwargs: Mapping[str, Any]) -> Any:
        """Raise ValueError."""
        raise ValueError("the program's cache is asked by a check alone")

    def expression(self, writer: Writer, base: str) -> str:
        """Python that asks the cache."""
        return f"{writer.constant(super().fetch, 'ask_')}(callee, args, kwargs)"


def keeps_its_results(function: Any) -> bool:
    """Whether a cache has room, so that it forgets nothing while it is asked.

    >>> keeps_its_results(functools.lru_cache(maxsize=0)(max))
    False
    """
    info = function.cache_info()
    return info.maxsize is None or info.currsize < info.maxsize


def has_forgotten(function: Any) -> bool:
    """Whether a cache with an end has let go of a result since it was cleared: asking it may compute something again.

    >>> has_forgotten(functools.lru_cache(maxsize=0)(max))
    False
    """
    info = function.cache_info()
    return info.maxsize is not None and info.misses > info.currsize


@callable_rule(functools._lru_cache_wrapper)
def _cached(interpreter: TracingInterpreter, function: Any, args: Arguments, kwargs: Keywords) -> Any:
    """A function with a cache: for constants the cache is asked, which may hold what nobody would compute today."""
    # A cache around a partial function has neither name nor module.
    name = getattr(function, "__qualname__", "a function")
    given = [*args, *kwargs.values()]
    # A library is taken to keep in a cache what follows from the arguments.
    inner = function.__wrapped__
    while isinstance(inner, functools.partial):
        inner = inner.func
    has_library_code = is_in_library(getattr(getattr(inner, "__code__", None), "co_filename", None))
    has_tensors = any(isinstance(item, torch.Tensor) for item in given)
    is_symbolic = any(map(private_sizes.is_symbolic, private_trees.tree_leaves(given)))
    if runs_natively(getattr(function, "__module__", None) or "") or (
        has_library_code and (has_tensors or is_symbolic)
    ):
        return interpreter.call(function.__wrapped__, args, kwargs)
    if has_tensors:
        # It may hold a result of before: a tensor is looked up by its identity, not by its numbers.
        raise Break(f"the cache of {name} is asked for a tensor", "call it outside")
    given = [plain_numbers(item) for item in given]
    places = [_place_of_key(interpreter, item) for item in given]
    if not all(is_leaf_value(place) or isinstance(place, (*_CACHE_KEYS, Source)) for place in places):
        if not has_library_code:
            raise Break(f"the cache of {name} is asked for an object", "call it outside")
        if inner is function.__wrapped__:
            return interpreter.call(inner, args, kwargs)
        _refuse_traced(interpreter, given)
        for item in given:
            guard_deep(interpreter.values, item, {})
    call = CachedCall(len(args), tuple(kwargs))
    if not has_library_code and not keeps_its_results(function):
        # Whether this result is still there, nobody can ask without having another one forgotten.
        raise Break(f"the cache of {name} has no room left, and may compute results again", "give it more (maxsize)")
    was_empty, state = function.cache_info().currsize == 0, torch.default_generator.get_state()
    is_unseen = private_tracing.disable_current_modes(), interpreter.trace.recorder.paused()
    with is_unseen[0], is_unseen[1], private_checkpoints.the_default_generator():
        result = call(function, *given)
    if was_empty and not torch.equal(state, torch.default_generator.get_state()):
        _check_order(interpreter, function, name, state)
    values = interpreter.values
    if has_library_code and not isinstance(result, (torch.Tensor, torch.nn.Module, Iterator)):
        # The object in the cache itself: what is read from it is guarded.
        return result if is_leaf_value(result) else values.read(result, values.pin(result, f"result of {name}"))
    wrapped = function.__wrapped__
    is_made_before = interpreted_of(wrapped) is wrapped and not values.is_created(wrapped)
    # A cache that was cleared computes again, so it is asked in each call, as in eager.
    source = ComputedSource(call, (values.pin(function, name), *places), f"result of {name}")
    if is_leaf_value(result):
        if is_made_before:
            if not has_library_code:
                values.guard(
                    values.pin(function, name), Answers(has_forgotten, (), False), f"the cache of {name} was asked"
                )
            asked = source if values.in_backward else CheckedSource(source.function, source.arguments, source.display)
            values.guard(asked, Equals(result), f"the cache of {name} was asked")
        return result
    if isinstance(result, Iterator) or not (has_library_code or (is_made_before and keeps_its_results(function))):
        raise Break(f"{name} has a cache, and its result is no constant", "call it outside")
    if not has_library_code:
        values.guard(values.pin(function, name), Answers(keeps_its_results, (), True), f"the cache of {name} was asked")
    return values.read(result, source)


def _refuse_traced(interpreter: TracingInterpreter, given: list[Any]) -> None:
    """Refuse what a library must not keep of a capture: tensors, and functions that the program has just made."""
    waiting, seen = list(given), set()
    while waiting:
        item = waiting.pop()
        if isinstance(item, torch.Tensor) or (isinstance(item, types.FunctionType) and interpreter.is_created(item)):
            raise Break(
                "a cache is asked for an object that holds a tensor, or a function made inside", "call it outside"
            )
        if id(item) not in seen and not isinstance(item, (type, types.ModuleType, types.FunctionType)):
            seen.add(id(item))
            waiting += gc.get_referents(item)


def _check_order(interpreter: TracingInterpreter, function: Any, name: str, state: torch.Tensor) -> None:
    """Have a function that draws random numbers run after what was drawn before it, which is only recorded so far."""
    if any(draws_random_numbers(node.target) for node in interpreter.trace.graph.nodes):
        torch.default_generator.set_state(state)
        function.cache_clear()
        raise Break(f"{name} has a cache, and draws random numbers the first time", "call it before")


def _place_of_key(interpreter: TracingInterpreter, item: Any) -> Any:
    """A constant, or the source of an object that is hashed by its identity."""
    kind: Any = type(item)
    is_by_identity = kind.__hash__ is object.__hash__ and kind.__eq__ is object.__eq__
    if is_leaf_value(item) or isinstance(item, _CACHE_KEYS) or not is_by_identity:
        return item
    return interpreter.values.source_of(item) or item


@called_rule
def _described(interpreter: TracingInterpreter, function: Any, args: Arguments, kwargs: Keywords, result: Any) -> None:
    """The answers of ``inspect`` about a function follow from attributes that the program may set."""
    values = interpreter.values
    for item in (*args, *kwargs.values()) if function in LOOKING else ():
        inner = item.__func__ if type(item) is types.MethodType else item
        if type(inner) is types.FunctionType and values.source_of(inner) is not None:
            for name in ("__code__", "__defaults__", "__kwdefaults__", "__annotations__"):
                values.whole_deep(interpreter.load_attribute(inner, name))
