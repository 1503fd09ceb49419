"""How a call's result is built from the graph's tensors: a tree made once at capture, walked at every call.

Objects are made with ``__new__`` and filled, so that shared objects stay shared and cycles close.
"""

from __future__ import annotations

import collections
import functools
import itertools
import operator
import sys
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.errors import CaptureError, ModuleMadeError, UnbuildableError
from dovetail.runtime.shown_frames import is_shown_frame, shown_part

Fetch = Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Any]


@dataclass(frozen=True)
class Recipe:
    """Base of all recipe nodes."""


@dataclass(frozen=True)
class TensorItem(Recipe):
    """Tensor ``index`` of the runtime function's results."""

    index: int


@dataclass(frozen=True)
class NumberItem(Recipe):
    """A number computed from the sizes of the inputs: number ``index`` from the end of the runtime function's results."""

    index: int


@dataclass(frozen=True)
class DataNumberItem(Recipe):
    """The number in tensor ``index`` of the runtime function's results, which has no dimensions."""

    index: int


@dataclass(frozen=True)
class SourceItem(Recipe):
    """An object that existed before the call, found again by its source."""

    fetch: Fetch


@dataclass(frozen=True)
class ConstantItem(Recipe):
    """A value that is the same at every call."""

    value: Any


@dataclass(frozen=True)
class TupleItem(Recipe):
    """A tuple, a named tuple or one of torch's return types."""

    cls: type
    items: tuple[Recipe, ...]
    number: int = -1


@dataclass(frozen=True)
class SliceItem(Recipe):
    """A slice whose parts are built."""

    parts: tuple[Recipe, Recipe, Recipe]


@dataclass(frozen=True)
class ObjectItem(Recipe):
    """A mutable object: contents of a list, set, deque or dictionary (or a subclass), and attributes."""

    cls: type
    number: int
    items: tuple[Recipe, ...] = ()
    pairs: tuple[tuple[Recipe, Recipe], ...] = ()
    attributes: tuple[tuple[str, Recipe], ...] = ()


@dataclass(frozen=True)
class CallItem(Recipe):
    """What ``function(*items)`` returns: iterators, bound methods, partial functions, suspended generators."""

    function: ConstantItem
    items: tuple[Recipe, ...]
    number: int
    state: Recipe | None = None


@dataclass(frozen=True)
class CellItem(Recipe):
    """A closure cell; what it holds may lead back to it."""

    content: Recipe | None
    number: int


@dataclass(frozen=True)
class FunctionItem(Recipe):
    """A function that was defined inside."""

    code: types.CodeType
    globals: dict[str, Any]
    closure: tuple[CellItem | SharedItem | SourceItem, ...] | None
    parts: tuple[Recipe, ...]
    number: int


@dataclass(frozen=True)
class ExceptionItem(Recipe):
    """An exception: arguments, attributes, the exceptions that it is chained to, and the program's lines of its traceback."""

    cls: type
    items: tuple[Recipe, ...]
    attributes: tuple[tuple[str, Recipe], ...]
    chain: tuple[Recipe, Recipe, bool]
    traceback: types.TracebackType | None
    number: int


@dataclass(frozen=True)
class SharedItem(Recipe):
    """The object that was built as ``number`` already."""

    number: int


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


def _make_defaultdict(kind: type, factory: Any, pairs: Iterable[Any], attributes: Mapping[str, Any]) -> Any:
    made: Any = collections.defaultdict.__new__(kind)
    collections.defaultdict.__init__(made, factory, pairs)
    if attributes:
        made.__dict__.update(attributes)
    return made


def _make_deque(kind: type, maximum: int, items: Iterable[Any], attributes: Mapping[str, Any]) -> Any:
    made: Any = collections.deque.__new__(kind)
    collections.deque.__init__(made, items, maximum)
    if attributes:
        made.__dict__.update(attributes)
    return made


#: How to read the content of a subclass of an immutable class past what the subclass has redefined.
_CONTENTS: dict[type, Callable[[Any], Any]] = {
    int: int.__pos__,
    float: float.__pos__,
    complex: complex.__pos__,
    str: str.__str__,
    bytes: lambda value: bytes.__getitem__(value, slice(None)),
    frozenset: lambda value: frozenset(frozenset.__iter__(value)),
}


def _is_array_scalar(value: Any) -> bool:
    """Whether a value is a number or truth value of NumPy's."""
    if type(value).__module__ != "numpy":
        return False
    numpy: Any = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.number, numpy.bool_))


def plain_content(value: Any) -> Any:
    """What an object of a subclass of a number, a text or a frozen set holds; None for all else."""
    kind = next((kind for kind in _CONTENTS if isinstance(value, kind)), None)
    return None if kind is None or type(value) is kind else _CONTENTS[kind](value)


def _make_immutable(kind: type, content: Any, attributes: Mapping[str, Any]) -> Any:
    made = native_new(kind)(kind, content)
    if attributes:
        made.__dict__.update(attributes)
    return made


def _make_partial(function: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    return functools.partial(function, *args, **keywords)


_INTERPRETED: weakref.WeakKeyDictionary[types.FunctionType, Any] = weakref.WeakKeyDictionary()


def stands_for(function: types.FunctionType, interpreted: Any) -> None:
    """Remember that native code was given ``function`` in the place of an interpreted one."""
    _INTERPRETED[function] = interpreted


def interpreted_of(function: types.FunctionType) -> Any:
    """The function that native code was given this one for; itself where it is none of these."""
    return _INTERPRETED.get(function, function)


def holds_interpreted(function: types.FunctionType, seen: frozenset[int] = frozenset()) -> bool:
    """Whether the closure of a function that native code has made leads to one that stands for an interpreted one."""
    seen |= {id(function)}
    for cell in function.__closure__ or ():
        try:
            inside = cell.cell_contents
        except ValueError:
            continue
        is_new = type(inside) is types.FunctionType and id(inside) not in seen
        if is_new and (inside in _INTERPRETED or holds_interpreted(inside, seen)):
            return True
    return False


#: What a missing name, attribute or module is told by, beside the arguments of the exception.
_WITH_MEMBERS = (AttributeError, NameError, ImportError)
_MEMBERS = ("name", "path", "name_from")


def _own_members(error: BaseException) -> Iterable[tuple[str, Any]]:
    if isinstance(error, _WITH_MEMBERS):
        yield from ((name, getattr(error, name)) for name in _MEMBERS if getattr(error, name, None) is not None)


def _slots(value: Any) -> Iterable[tuple[str, Any, bool]]:
    """What an object holds in its slots, by the names that the compiler gives them, and whether a subclass has that name too."""
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


class RecipeBuilder:
    """Builds the recipes of one call; objects that several of them share stay shared, if they are rebuilt in this order.

    ``classify`` says what a tensor, constant or pre-existing object is; None means: walk into it.
    """

    def __init__(self, classify: Callable[[Any], Recipe | None]) -> None:
        self._classify = classify
        self._numbers: dict[int, int] = {}
        self._alive: list[Any] = []
        self._unfinished: set[int] = set()

    def build(self, value: Any) -> Recipe:
        """The recipe of a value; raises :class:`CaptureError` for an object that cannot be built again."""
        if type(value) is types.FunctionType:
            value = interpreted_of(value)
        found = self._classify(value)
        if found is not None:
            return found
        number = self._numbers.get(id(value))
        if number in self._unfinished:
            raise self._refuse(value)
        if number is not None:
            return SharedItem(number)
        if type(value) is torch.Size:
            return CallItem(ConstantItem(torch.Size), (TupleItem(tuple, tuple(map(self.build, value))),), -1)
        if _is_array_scalar(value):
            # Immutable, and never handed on as an input of the graph.
            return ConstantItem(value)
        if isinstance(value, slice):
            return SliceItem((self.build(value.start), self.build(value.stop), self.build(value.step)))
        number = self._numbers[id(value)] = len(self._alive)
        self._alive.append(value)
        kind = type(value)
        if isinstance(value, tuple) and getattr(value, "__dict__", None):
            return self._call(number, functools.partial(_make_immutable, kind), (tuple(value), value.__dict__))
        if isinstance(value, tuple):
            self._unfinished.add(number)
            items = tuple(self.build(item) for item in tuple.__iter__(value))
            self._unfinished.discard(number)
            return TupleItem(kind, items, number)
        special = self._special(value, kind, number)
        return special if special is not None else self._object(value, kind, number)

    def made(self, value: Any, maker: Callable[..., Any], items: Iterable[Any]) -> Recipe:
        """The recipe of a value that ``maker(*items)`` makes again, once."""
        number = self._numbers.get(id(value))
        if number is not None:
            return SharedItem(number)
        number = self._numbers[id(value)] = len(self._alive)
        self._alive.append(value)
        return self._call(number, maker, items)

    def holds(self, value: Any) -> bool:
        """Whether an object is part of a recipe built so far."""
        return id(value) in self._numbers

    def _call(self, number: int, function: Any, items: Iterable[Any], state: Any = None) -> CallItem:
        self._unfinished.add(number)
        built = tuple(self.build(item) for item in items)
        made = CallItem(ConstantItem(function), built, number, None if state is None else self.build(state))
        self._unfinished.discard(number)
        return made

    def _special(self, value: Any, kind: type, number: int) -> Recipe | None:
        """Values of the interpreter and of Python itself that are made by a call."""
        parts = getattr(kind, "__recipe__", None)
        if parts is not None:
            function, items = parts(value)
            return self._call(number, function, items)
        if kind in ITERATOR_TYPES:
            with warnings.catch_warnings():
                # Python 3.12 deprecates copying itertools; it still works in 3.13.
                warnings.simplefilter("ignore", DeprecationWarning)
                try:
                    parts = value.__reduce__()[:3]
                except TypeError:
                    # Those that are newer, as batched.
                    raise self._refuse(value) from None
            return self._call(number, *parts)
        if kind is types.MethodType and isinstance(value.__self__, torch.Tensor):
            # A traced tensor is of a class of its own, with methods of its own.
            return self._call(number, getattr, (value.__self__, value.__name__))
        if kind is types.MethodType:
            return self._call(number, types.MethodType, (value.__func__, value.__self__))
        if kind in (types.BuiltinFunctionType, types.MethodWrapperType):
            return self._call(number, getattr, (value.__self__, value.__name__))
        if kind is super:
            return self._call(number, super, (value.__thisclass__, value.__self__))
        if isinstance(value, collections.defaultdict):
            maker = functools.partial(_make_defaultdict, kind)
            own = getattr(value, "__dict__", {})
            return self._call(number, maker, (value.default_factory, tuple(dict.items(value)), own))
        if isinstance(value, collections.deque) and value.maxlen is not None:
            maker = functools.partial(_make_deque, kind, value.maxlen)
            return self._call(number, maker, (tuple(value), getattr(value, "__dict__", {})))
        plain = plain_content(value)
        if plain is not None:
            return self._call(number, functools.partial(_make_immutable, kind), (plain, getattr(value, "__dict__", {})))
        if kind in (operator.attrgetter, operator.itemgetter, operator.methodcaller):
            return self._call(number, *value.__reduce__())
        if kind is functools.partial:
            return self._call(number, _make_partial, (value.func, value.args, value.keywords))
        if kind is types.CellType:
            try:
                return CellItem(self.build(value.cell_contents), number)
            except ValueError:
                return CellItem(None, number)
        if kind is types.FunctionType:
            # The cells first, as when it is built again: what they hold may lead back to the function.
            closure: Any = None if value.__closure__ is None else tuple(self.build(cell) for cell in value.__closure__)
            parts = (value.__defaults__, value.__kwdefaults__, value.__dict__, value.__annotations__)
            names = (value.__name__, value.__qualname__, value.__doc__, value.__module__)
            made = tuple(self.build(item) for item in (*parts, names))
            return FunctionItem(value.__code__, value.__globals__, closure, made, number)
        if kind is types.TracebackType:
            return ConstantItem(shown_part(value))
        if kind is types.FrameType and is_shown_frame(value):
            return ConstantItem(value)
        if isinstance(value, BaseException):
            return ExceptionItem(
                kind,
                tuple(self.build(item) for item in value.args),
                tuple((name, self.build(item)) for name, item in (*value.__dict__.items(), *_own_members(value))),
                (self.build(value.__cause__), self.build(value.__context__), value.__suppress_context__),
                shown_part(value.__traceback__),
                number,
            )
        return None

    def _object(self, value: Any, kind: type, number: int) -> ObjectItem:
        items: tuple[Recipe, ...] = ()
        pairs: tuple[tuple[Recipe, Recipe], ...] = ()
        if isinstance(value, dict):
            base = collections.OrderedDict if isinstance(value, collections.OrderedDict) else dict
            pairs = tuple((self.build(key), self.build(item)) for key, item in base.items(value))
        elif isinstance(value, (list, set, collections.deque)):
            items = tuple(self.build(item) for item in value)
        elif isinstance(value, (torch.nn.Module, types.GeneratorType, types.TracebackType, types.FrameType, type)):
            raise self._refuse(value)
        attributes = []
        own = getattr(value, "__dict__", None)
        if isinstance(own, dict):
            attributes += [(name, self.build(item)) for name, item in own.items()]
        for name, item, is_shadowed in _slots(value):
            if is_shadowed:
                raise self._refuse(value)
            attributes.append((name, self.build(item)))
        builtin = isinstance(value, (dict, list, set, collections.deque))
        if not builtin and (getattr(native_new(kind), "__self__", object) is not object or not _can_be_made(kind)):
            # The state of a native class is neither items nor attributes.
            raise self._refuse(value)
        if not builtin and not isinstance(own, dict) and not attributes and kind is not object:
            raise self._refuse(value)
        return ObjectItem(kind, number, items, pairs, tuple(attributes))

    @staticmethod
    def _refuse(value: Any) -> CaptureError:
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


def build_recipe(value: Any, classify: Callable[[Any], Recipe | None]) -> Recipe:
    """The recipe for a result. ``classify`` says what a tensor, constant or pre-existing object is; None means: walk into it.

    Raises :class:`CaptureError` for an object that cannot be built again.

    >>> rebuild(build_recipe([1, (2, 3)], lambda v: ConstantItem(v) if isinstance(v, int) else None), [], None, (), {})
    [1, (2, 3)]
    """
    return RecipeBuilder(classify).build(value)


def rebuild(
    recipe: Recipe,
    tensors: list[torch.Tensor],
    callee: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    memo: dict[int, Any] | None = None,
) -> Any:
    """Build the result of one call. ``memo`` is handed on where several recipes of one call share objects; whoever does so
    calls :func:`set_states` in the end.
    """
    kind = type(recipe)
    if kind is TensorItem:
        return tensors[recipe.index]  # type: ignore[attr-defined]
    if kind is ConstantItem:
        return recipe.value  # type: ignore[attr-defined]
    if memo is not None:
        return _rebuild(recipe, tensors, callee, args, kwargs, memo)
    memo = {}
    result = _rebuild(recipe, tensors, callee, args, kwargs, memo)
    set_states(memo)
    return result


#: Where the ``memo`` of a call keeps the states that are to be set last.
_STATES = -(1 << 40)


def set_states(memo: dict[int, Any]) -> None:
    """Put iterators where they stood, as the last step of a call: that of a list goes no further than the list is long."""
    for made, state in memo.pop(_STATES, ()):
        made.__setstate__(state)


def _rebuild(recipe: Any, tensors: Any, callee: Any, args: Any, kwargs: Any, memo: dict[int, Any]) -> Any:
    kind = type(recipe)
    if kind is TensorItem:
        return tensors[recipe.index]
    if kind is ConstantItem:
        return recipe.value
    if kind is SourceItem:
        return recipe.fetch(callee, args, kwargs)
    if kind is DataNumberItem:
        return tensors[recipe.index].item()
    if kind is NumberItem:
        return tensors[-1 - recipe.index]
    if kind is SharedItem:
        return memo[recipe.number]

    def make(item: Any) -> Any:
        kind = type(item)
        if kind is ConstantItem:
            return item.value
        if kind is TensorItem:
            return tensors[item.index]
        return _rebuild(item, tensors, callee, args, kwargs, memo)

    if kind is SliceItem:
        return slice(*[make(item) for item in recipe.parts])
    if kind is TupleItem:
        items = [make(item) for item in recipe.items]
        cls = recipe.cls
        # torch's return types (of max, sort, ...) are made by their own constructor only.
        built = cls(items) if hasattr(cls, "n_sequence_fields") else tuple.__new__(cls, items)
        memo[recipe.number] = built
        return built
    if kind is CellItem:
        cell = memo[recipe.number] = types.CellType()
        if recipe.content is not None:
            cell.cell_contents = make(recipe.content)
        return cell
    if kind is CallItem:
        made = memo[recipe.number] = recipe.function.value(*[make(item) for item in recipe.items])
        if recipe.state is not None:
            memo.setdefault(_STATES, []).append((made, make(recipe.state)))
        return made
    if kind is FunctionItem:
        return _rebuild_function(recipe, make, memo)
    if kind is ExceptionItem:
        return _rebuild_exception(recipe, make, memo)
    cls = recipe.cls
    result = memo[recipe.number] = native_new(cls)(cls)
    if recipe.pairs or isinstance(result, dict):
        base: Any = collections.OrderedDict if isinstance(result, collections.OrderedDict) else dict
        for key, item in recipe.pairs:
            base.__setitem__(result, make(key), make(item))
    for item in recipe.items:
        if isinstance(result, set):
            set.add(result, make(item))
        else:
            result.append(make(item))
    for name, item in recipe.attributes:
        object.__setattr__(result, name, make(item))
    return result


@functools.lru_cache(maxsize=256)
def native_new(cls: type) -> Any:
    """The ``__new__`` of the nearest builtin base of a class: its own would run the user's code."""
    for owner in cls.__mro__:
        maker = owner.__dict__.get("__new__")
        if maker is not None and not isinstance(maker, staticmethod):
            return maker
    return object.__new__


def _rebuild_function(recipe: FunctionItem, make: Callable[[Any], Any], memo: dict[int, Any]) -> types.FunctionType:
    defaults, kwdefaults, attributes, annotations, names = recipe.parts
    cells: list[types.CellType] = []
    for item in recipe.closure or ():
        if isinstance(item, CellItem):
            memo[item.number] = types.CellType()
            cells.append(memo[item.number])
        else:
            cells.append(make(item))
    function = types.FunctionType(recipe.code, recipe.globals, closure=None if recipe.closure is None else tuple(cells))
    memo[recipe.number] = function
    for item, cell in zip(recipe.closure or (), cells, strict=True):
        if isinstance(item, CellItem) and item.content is not None:
            cell.cell_contents = make(item.content)
    function.__defaults__ = make(defaults)
    function.__kwdefaults__ = make(kwdefaults)
    function.__dict__.update(make(attributes))
    function.__annotations__ = make(annotations)
    function.__name__, function.__qualname__, function.__doc__, function.__module__ = make(names)
    return function


def _rebuild_exception(recipe: ExceptionItem, make: Callable[[Any], Any], memo: dict[int, Any]) -> BaseException:
    error: BaseException = recipe.cls.__new__(recipe.cls, *[make(item) for item in recipe.items])
    memo[recipe.number] = error
    for name, item in recipe.attributes:
        if name in _MEMBERS and isinstance(error, _WITH_MEMBERS):
            setattr(error, name, make(item))
        else:
            error.__dict__[name] = make(item)
    cause, context, suppress = recipe.chain
    error.__cause__, error.__context__ = make(cause), make(context)
    error.__suppress_context__ = suppress
    error.__traceback__ = recipe.traceback
    return error
