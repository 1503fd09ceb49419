"""Recipes of results: values that leave a capture are taken apart into parts that can be made again at every call."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from dovetail.errors import CaptureError, ModuleMadeError, UnbuildableError
from dovetail.runtime.recipe import (
    CallItem,
    CellItem,
    ConstantItem,
    FunctionItem,
    ObjectItem,
    Recipe,
    SharedItem,
    TupleItem,
    native_new,
)
from dovetail.runtime.shown_frames import is_shown_frame, shown_part

ITERATOR_TYPES: frozenset[type] = frozenset(
    {
        *map(type, map(iter, ([], (), "", b"", range(0), {}, set(), {}.values(), {}.items()))),
        *map(type, (reversed([]), reversed(range(0)), reversed({}), reversed({}.values()), reversed({}.items()))),
        type(iter(range(1 << 70))),
        type(iter(int, 1)),
        type(iter(collections.deque())),
        *(zip, enumerate, map, filter, reversed),
        *(value for value in vars(itertools).values() if isinstance(value, type) and value is not itertools.tee),
    }
)
"""Iterators that say by themselves how they are made again where they stand."""

#: How to read the content of a subclass of an immutable class past what the subclass has redefined.
_CONTENTS: dict[type, Callable[[Any], Any]] = {
    int: int.__pos__,
    float: float.__pos__,
    complex: complex.__pos__,
    str: str.__str__,
    bytes: lambda value: bytes.__getitem__(value, slice(None)),
    frozenset: lambda value: frozenset(frozenset.__iter__(value)),
}


def plain_content(value: Any) -> Any:
    """The content of an object of a subclass of a number, a text or a frozen set; None for all else."""
    kind = next((kind for kind in _CONTENTS if isinstance(value, kind)), None)
    return None if kind is None or type(value) is kind else _CONTENTS[kind](value)


# --- functions that stand for interpreted ones ------------------------------------------------------------------------

_INTERPRETED: weakref.WeakKeyDictionary[types.FunctionType, Any] = weakref.WeakKeyDictionary()


def stands_for(function: types.FunctionType, interpreted: Any) -> None:
    """Remember that native code was given ``function`` in the place of an interpreted one."""
    _INTERPRETED[function] = interpreted


def interpreted_of(function: types.FunctionType) -> Any:
    """The function that native code was given this one for; itself where it is none of these."""
    return _INTERPRETED.get(function, function)


def closure_contents(function: types.FunctionType, seen: frozenset[int] = frozenset()) -> Iterable[Any]:
    """The objects in the closure of a function, and in the closures of the functions in it."""
    seen |= {id(function)}
    for cell in function.__closure__ or ():
        try:
            inside = cell.cell_contents
        except ValueError:
            continue
        yield inside
        if type(inside) is types.FunctionType and id(inside) not in seen:
            yield from closure_contents(inside, seen)


def holds_interpreted(function: types.FunctionType) -> bool:
    """Whether the closure of a function that native code has made leads to one that stands for an interpreted one."""
    return any(type(item) is types.FunctionType and item in _INTERPRETED for item in closure_contents(function))


# --- makers: what a recipe calls ---------------------------------------------------------------------------------------


def _make(kind: type, arguments: tuple[Any, ...], attributes: Mapping[str, Any]) -> Any:
    """An object of a subclass of an immutable class, or a container that is more than its items, past its own constructor."""
    made: Any = native_new(kind)(kind, *arguments)
    for base in (collections.defaultdict, collections.deque):
        if issubclass(kind, base):
            base.__init__(made, *arguments)
    if attributes:
        made.__dict__.update(attributes)
    return made


@functools.cache
def _members(kind: type) -> tuple[str, ...]:
    """The members of native exceptions beside their ``__dict__`` (``StopIteration.value``), but for the ``obj`` of some."""
    native = (base for base in kind.__mro__ if base.__module__ == "builtins" and base is not BaseExceptionGroup)
    found = [name for base in native for name, item in vars(base).items() if hasattr(type(item), "__set__")]
    return tuple(name for name in found if name[:2] != "__" and name != "obj")


def _fill_exception(error: Any, attributes: Mapping[str, Any], *chain: Any) -> None:
    for name, value in attributes.items():
        if name in _members(error.__class__):
            setattr(error, name, value)
        else:
            error.__dict__[name] = value
    error.__cause__, error.__context__, error.__suppress_context__, error.__traceback__ = chain


def _iterator(value: Any) -> tuple[Any, ...]:
    with warnings.catch_warnings():
        # Python 3.12 deprecates copying itertools; it still works in 3.13.
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            parts: tuple[Any, ...] = value.__reduce__()[:3]
        except TypeError:
            # Those that are newer, as batched.
            raise _refusal(value) from None
    return parts


def _bound_method(value: Any) -> tuple[Any, ...]:
    if isinstance(value.__self__, torch.Tensor):
        # A traced tensor is of a class of its own, with methods of its own; those that convert do not know their names.
        kinds, function = type(value.__self__).__mro__, value.__func__
        names = (name for kind in kinds for name, item in vars(kind).items() if item is function)
        return getattr, (value.__self__, next(names, function.__name__))
    return types.MethodType, (value.__func__, value.__self__)


def native_method(value: Any) -> tuple[Any, tuple[Any, ...]]:
    """The function that binds a native method again, and its arguments: the object first."""
    owner, name = value.__self__, value.__name__
    found = [vars(kind)[name] for kind in type(owner).__mro__ if name in vars(kind)]
    native = next((item for item in found if type(item) is not types.FunctionType), None)
    # A class that derives from a native one may have a method of this name in front of it.
    return (getattr, (owner, name)) if native is None or native is found[0] else (native.__get__, (owner,))


def bind_native(method: Any, owner: Any) -> Any:
    """A native method bound to what stands for its object."""
    bind, (real, *name) = native_method(method)
    if isinstance(real, torch.Tensor) and not isinstance(owner, torch.Tensor):
        # A stand-in, which has none of the methods.
        return types.MethodType(bind.__self__ if not name else getattr(type(real), *name), owner)
    return bind(owner, *name)


MADE_BY_CALL: dict[type, Callable[[Any], tuple[Any, ...]]] = {
    **dict.fromkeys(ITERATOR_TYPES, _iterator),
    types.MethodType: _bound_method,
    **dict.fromkeys((types.BuiltinFunctionType, types.MethodWrapperType), native_method),
    slice: lambda value: (slice, (value.start, value.stop, value.step)),
    torch.Size: lambda value: (torch.Size, (tuple(value),)),
    super: lambda value: (super, (value.__thisclass__, value.__self__)),
    functools.partial: lambda value: value.__reduce__(),
}
"""By class: the function, its arguments and perhaps a state, by which a value is made again."""


def _made_by_call(value: Any, kind: type) -> tuple[Any, ...] | None:
    """The function that makes a value again, its arguments and perhaps a state to be set; None for values that no call makes."""
    own = getattr(kind, "__recipe__", None)
    if own is not None:
        return own(value)
    if kind in MADE_BY_CALL:
        return MADE_BY_CALL[kind](value)
    attributes = getattr(value, "__dict__", {})
    if isinstance(value, tuple):
        arguments: tuple[Any, ...] = (tuple(value),) if attributes else ()
    elif isinstance(value, collections.defaultdict):
        arguments = (value.default_factory, tuple(dict.items(value)))
    elif isinstance(value, collections.deque):
        arguments = () if value.maxlen is None else (tuple(value), value.maxlen)
    else:
        content = plain_content(value)
        arguments = () if content is None else (content,)
    return (functools.partial(_make, kind), (arguments, attributes)) if arguments else None


# --- the builder ------------------------------------------------------------------------------------------------------


class RecipeBuilder:
    """Builds the recipes of one call; objects that several of them share stay shared, if they are rebuilt in this order.

    ``classify`` gives the recipe of a tensor, a constant or an object that existed before; None means: walk into it.
    """

    def __init__(self, classify: Callable[[Any], Recipe | None]) -> None:
        self._classify = classify
        self._numbers: dict[int, int] = {}
        self._alive: list[Any] = []
        self._unfinished: set[int] = set()
        self._owners: dict[int, int] = {}

    def build(self, value: Any) -> Recipe:
        """The recipe of a value; raises :class:`CaptureError` for an object that cannot be built again."""
        if type(value) is types.FunctionType:
            value = interpreted_of(value)
        found = self._classify(value)
        if found is not None:
            return found
        number = self._numbers.get(id(value))
        if number in self._unfinished:
            raise _refusal(value)
        if number is not None:
            return SharedItem(number)
        kind = type(value)
        if kind is types.TracebackType:
            return ConstantItem(shown_part(value))
        if kind is types.FrameType and is_shown_frame(value):
            return ConstantItem(value)
        number, owner = self._number(value), self._owners.get(id(value))
        if owner is not None:
            return CallItem(ConstantItem(vars), (SharedItem(owner),), number, None)
        call = _made_by_call(value, kind)
        if call is not None:
            return self._call(number, *call)
        if isinstance(value, tuple):
            return TupleItem(kind, self._parts(number, tuple.__iter__(value)), number)
        return self._of_python(value, kind, number) or self._object(value, kind, number)

    def made(self, value: Any, maker: Callable[..., Any], items: Iterable[Any]) -> Recipe:
        """The recipe of a value that ``maker(*items)`` makes again, once."""
        number = self._numbers.get(id(value))
        return SharedItem(number) if number is not None else self._call(self._number(value), maker, items)

    def holds(self, value: Any) -> bool:
        """Whether an object is part of a recipe built so far."""
        return id(value) in self._numbers

    def _number(self, value: Any) -> int:
        number = self._numbers[id(value)] = len(self._alive)
        self._alive.append(value)
        return number

    def _call(self, number: int, function: Any, items: Iterable[Any], state: Any = None) -> CallItem:
        *built, last = self._parts(number, (*items, state))
        return CallItem(ConstantItem(function), tuple(built), number, None if state is None else last)

    def _parts(self, number: int, parts: Iterable[Any]) -> tuple[Recipe, ...]:
        """The recipes of parts that must not lead back to the object of this number: it is made after them."""
        self._unfinished.add(number)
        built = tuple(map(self.build, parts))
        self._unfinished.remove(number)
        return built

    def _of_python(self, value: Any, kind: type, number: int) -> Recipe | None:
        """Parts of Python's own machinery: cells, functions, exceptions."""
        if kind is types.CellType:
            try:
                return CellItem(self.build(value.cell_contents), number)
            except ValueError:
                return CellItem(None, number)
        if kind is types.FunctionType:
            # The cells first, as when it is built again: they may lead back to the function.
            closure: Any = None if value.__closure__ is None else tuple(self.build(cell) for cell in value.__closure__)
            # From Python 3.14 on, annotations may not have been computed yet.
            where = "__annotations__" if getattr(value, "__annotate__", None) is None else "__annotate__"
            parts = (value.__defaults__, value.__kwdefaults__, value.__dict__, getattr(value, where))
            names = (value.__name__, value.__qualname__, value.__doc__, value.__module__)
            made = tuple(self.build(item) for item in (*parts, names))
            return FunctionItem(value.__code__, value.__globals__, closure, made, where, number)
        return self._exception(value, kind, number) if isinstance(value, BaseException) else None

    def _exception(self, value: BaseException, kind: type, number: int) -> CallItem:
        """Its arguments first; its attributes and the exceptions that it is chained to may lead back to it."""
        made = self._call(number, functools.partial(kind.__new__, kind), value.args)
        members = {name: getattr(value, name, None) for name in _members(kind)}
        attributes = {**value.__dict__, **{name: item for name, item in members.items() if item is not None}}
        chain = (value.__cause__, value.__context__, value.__suppress_context__, value.__traceback__)
        parts = tuple(map(self.build, (attributes, *chain)))
        return dataclasses.replace(made, fill=ConstantItem(_fill_exception), parts=parts)

    def _object(self, value: Any, kind: type, number: int) -> ObjectItem:
        items: tuple[Recipe, ...] = ()
        pairs: tuple[tuple[Recipe, Recipe], ...] = ()
        is_container = isinstance(value, (dict, list, set, collections.deque))
        if isinstance(value, dict):
            base = collections.OrderedDict if isinstance(value, collections.OrderedDict) else dict
            pairs = tuple((self.build(key), self.build(item)) for key, item in base.items(value))
        elif is_container:
            plain: Any = next(base for base in (list, set, collections.deque) if isinstance(value, base))
            items = tuple(self.build(item) for item in plain.__iter__(value))
        elif isinstance(value, (torch.nn.Module, types.GeneratorType, types.FrameType, type)):
            raise _refusal(value)
        own = object.__getattribute__(value, "__dict__") if kind.__dictoffset__ else None
        if id(own) in self._numbers:
            raise _refusal(value)
        self._owners[id(own)] = number
        attributes = [(name, self.build(item)) for name, item in own.items()] if isinstance(own, dict) else []
        for name, item, is_shadowed in _slots(value):
            if is_shadowed:
                raise _refusal(value)
            attributes.append((name, self.build(item)))
        if not is_container:
            # The state of a native class is neither items nor attributes.
            is_native = getattr(native_new(kind), "__self__", object) is not object or not _can_be_made(kind)
            has_state = isinstance(own, dict) or bool(attributes) or kind is object
            if is_native or not has_state:
                raise _refusal(value)
        return ObjectItem(kind, number, items, pairs, tuple(attributes))


def _refusal(value: Any) -> CaptureError:
    error = ModuleMadeError if isinstance(value, torch.nn.Module) else UnbuildableError
    return error(
        f"a {type(value).__module__}.{type(value).__qualname__} made by the function leaves it",
        advice="return tensors, numbers, containers or plain objects",
    )


def _can_be_made(kind: type) -> bool:
    """Whether ``object.__new__`` makes an instance: it does of no class of an extension that has a structure of its own."""
    if hasattr(kind, "__del__"):
        return True
    try:
        object.__new__(kind)
    except TypeError:
        return False
    return True


def _slots(value: Any) -> Iterable[tuple[str, Any, bool]]:
    """The contents of an object's slots, by the names that the compiler gives them, and whether a subclass has that name too."""
    order = type(value).__mro__
    for place, owner in enumerate(order):
        if "__slots__" not in owner.__dict__:
            continue
        for name, member in owner.__dict__.items():
            if type(member) is types.MemberDescriptorType:
                try:
                    item = member.__get__(value, type(value))
                except AttributeError:
                    continue
                yield name, item, any(name in earlier.__dict__ for earlier in order[:place])
