"""Where values came from, and the guards that reading them needs.

A side table keyed by identity gives the :class:`Source` of a pre-existing object. Immutable leaves are guarded by equality when
they are read from a source and then flow as constants; functions, classes and modules by identity; containers and objects by
type and by what is read from them.
"""

from __future__ import annotations

import enum
import functools
import operator
import re
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, KeysView
from typing import Any

import torch

from dovetail.errors import UserLocation
from dovetail.frontend.code.frame import Break
from dovetail.guards import (
    SPARSE_LAYOUTS,
    ArgumentSource,
    AttributeSource,
    ComputedSource,
    DictKeys,
    Equals,
    FloatSource,
    GradientForm,
    Guard,
    GuardSet,
    HasNoKey,
    HasNoSlot,
    Identity,
    InnerSource,
    ItemSource,
    KeywordSource,
    Length,
    NumberSource,
    Pinned,
    PinnedSource,
    SameObject,
    SetEquals,
    Source,
    SparseMatch,
    TensorMatch,
    TicketSource,
    TypeIs,
    WrapperMaker,
    WrapperMatch,
    inner_tensor,
)
from dovetail.guards.source import plain_items, plain_keys, plain_length, read_item
from dovetail.rules.sparse.value import SPARSE_TYPES, SparseValue
from dovetail.runtime.recipe import plain_content
from dovetail.torch_private import calls as private_calls
from dovetail.torch_private import operators as private_operators
from dovetail.torch_private import sizes as private_sizes
from dovetail.torch_private import tensors as private_tensors
from dovetail.torch_private import tracing as private_tracing
from dovetail.trace import CaptureSettings, Retry, Trace

LEAF_TYPES: frozenset[type] = frozenset(
    {
        int,
        float,
        complex,
        str,
        bytes,
        bool,
        type(None),
        type(Ellipsis),
        type(NotImplemented),
        torch.dtype,
        torch.device,
        torch.memory_format,
        torch.layout,
        range,
    }
)
IDENTITY_TYPES = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
    types.ModuleType,
    types.CodeType,
    functools._lru_cache_wrapper,
    type,
    private_operators.OpOverload,
    # Immutable, and what native code makes of them depends on all that they hold.
    re.Pattern,
    re.Match,
    types.GenericAlias,
    types.UnionType,
    type(functools.cmp_to_key(operator.sub)),
)
TRUSTED_PREFIXES = (
    "torch",
    "builtins",
    "math",
    "operator",
    "functools",
    "itertools",
    "collections",
    "contextlib",
    "typing",
)


_NUMBERS_AND_TEXTS = (int, float, complex, str, bytes)


def is_array_number(value: object) -> bool:
    """Whether a value is a number of NumPy's, such as ``numpy.float64(0.5)``: immutable, and known by what it holds."""
    kind = type(value)
    if kind.__module__ != "numpy":
        return False
    base = getattr(sys.modules.get("numpy"), "number", None)
    return base is not None and isinstance(value, base) and array_number(value) is not None


def array_number(value: Any) -> int | float | complex | None:
    """What a number of NumPy's holds; None for one that Python has no number for."""
    found = value.item() if hasattr(value, "item") else None
    return found if type(found) in (int, float, complex) else None


def is_bound_builtin(value: object) -> bool:
    """Whether a value is a method of a builtin object, such as ``items.append``."""
    if not isinstance(value, (types.BuiltinFunctionType, types.MethodWrapperType)):
        return False
    owner = value.__self__
    return not is_extension_record(owner) and not isinstance(owner, (types.ModuleType, type, types.NoneType))


def is_extension_record(owner: object) -> bool:
    """Whether this is what pybind11 binds the functions of an extension to; it knows nothing of them."""
    return type(owner).__module__.startswith("pybind11")


def is_impostor(value: object) -> bool:
    """Whether an object's ``__class__`` is not its type: ``isinstance`` believes it, and C++ would read its memory as such."""
    kind = type(value)
    if kind in LEAF_TYPES or kind is torch.Tensor:
        return False
    try:
        return value.__class__ is not kind
    except Exception:  # noqa: BLE001  (any error of the object's own __class__ says enough)
        return True


def impostor_break(value: object) -> Break:
    """The :class:`Break` at an object for which :func:`is_impostor` holds."""
    return Break(
        f"a {type(value).__qualname__} object says by __class__ that it is something else",
        "hand over what it stands for, or keep such objects outside of the function",
    )


def is_leaf_value(value: object) -> bool:
    """Whether a value is an immutable leaf, or a tuple or frozenset of them."""
    kind = type(value)
    if kind in LEAF_TYPES or isinstance(value, enum.Enum):
        return True
    if kind is tuple or kind is frozenset or kind is torch.Size:
        return all(is_leaf_value(item) for item in value)  # type: ignore[attr-defined]
    if kind is slice:
        return all(is_leaf_value(item) for item in (value.start, value.stop, value.step))  # type: ignore[attr-defined]
    return False


def plain_numbers(value: Any) -> Any:
    """Symbolic numbers as they are in this call, in containers too: code that wants plain ones then holds for these only."""
    kind = type(value)
    if kind is torch.SymInt:
        return int(value)
    if kind is torch.SymFloat:
        return float(value)
    if kind is torch.SymBool:
        return bool(value)
    if kind is tuple or kind is torch.Size:
        items = [plain_numbers(item) for item in value]
        return value if all(one is other for one, other in zip(items, value, strict=True)) else kind(items)
    if kind is list:
        items = [plain_numbers(item) for item in value]
        return value if all(one is other for one, other in zip(items, value, strict=True)) else items
    if kind is slice:
        return slice(plain_numbers(value.start), plain_numbers(value.stop), plain_numbers(value.step))
    return value


@functools.lru_cache(maxsize=4096)
def is_trusted(module_name: str | None) -> bool:
    """Whether a module's own globals and classes are taken as fixed: torch and the parts of the standard library we call."""
    return module_name is not None and module_name.split(".", 1)[0] in TRUSTED_PREFIXES


def may_be_switched(module_name: str | None, name: str, value: object) -> bool:
    """Whether a global of a trusted module is a switch of torch's, or a table of hooks for all modules or optimizers.

    >>> may_be_switched("torch.backends.mha", "_is_fastpath_enabled", True), may_be_switched("math", "pi", 3.14)
    (True, False)
    """
    if module_name is None or module_name.split(".", 1)[0] != "torch":
        return False
    return (type(value) is bool and not name.isupper()) or name.startswith("_global_")


class Values:
    """The side table of one trace."""

    def __init__(self, trace: Trace, guards: GuardSet) -> None:
        self.trace = trace
        self.guards = guards
        self._sources: dict[int, tuple[Any, Source]] = {}
        self._pins: dict[int, PinnedSource] = {}
        self._whole: set[int] = set()
        self._numbers: dict[Source, Any] = {}
        self._wrappers: dict[int, tuple[torch.Tensor, torch.Tensor, Source]] = {}
        self._wrapper_sources: dict[int, Source] = {}
        self._sparse: dict[int, tuple[torch.Tensor, SparseValue, Source]] = {}
        self.effects: Any = None
        #: Calls that are made when the graph has run; what they write may not be read before.
        self.waiting: Any = None
        #: The types of the objects that were compared by identity.
        self.compared_kinds: set[type] = set()
        #: Whether an object was made by the trace; the interpreter knows.
        self.is_created: Callable[[Any], bool] = lambda value: False
        #: The forward has ended: what is read now, eager reads when the backward runs.
        self.in_backward = False

    def where(self) -> UserLocation | None:
        """The user's line now."""
        return self.trace.locate()

    def source_of(self, value: Any) -> Source | None:
        """The source of an object that existed before the trace, or None."""
        found = self._sources.get(id(value))
        return found[1] if found is not None else None

    def pin(self, value: Any, display: str) -> Source:
        """A source for an object that the entry holds on to: a globals dictionary, a class, a function."""
        source = self.source_of(value)
        if source is not None:
            return source
        pinned = self._pins.get(id(value))
        if pinned is None:
            pinned = self._pins[id(value)] = PinnedSource(Pinned(value, display))
        return pinned

    def note(self, value: Any, source: Source) -> None:
        """Remember where an object came from."""
        self._sources.setdefault(id(value), (value, source))

    def noted(self) -> list[tuple[Any, Source]]:
        """The objects that existed before and were met, with where they came from."""
        return list(self._sources.values())

    def type_at(self, source: Source) -> type:
        """The type of the object that came from a source."""
        if isinstance(source, PinnedSource):
            return type(source.pinned.value)
        return next((type(value) for value, known in self._sources.values() if known == source), object)

    def guard(self, source: Source, predicate: Any, reason: str) -> None:
        """Add a guard at the current user line."""
        if self.waiting is not None and not isinstance(predicate, (TypeIs, HasNoKey, HasNoSlot)):
            self.waiting.check_read(source)
        self.note_backward_read(source, predicate, reason)
        try:
            self.guards.add(source, predicate, self.where(), reason)
        except ValueError as error:
            # Not an exception of the program: its handlers must not see it.
            raise Break(str(error), "report this as a bug of Dovetail") from error
        self.note_backward_read(source, predicate, reason)

    def begin_backward(self) -> None:
        """The forward has ended. What it has read already is noted again where hooks and custom backwards read it."""
        self.in_backward = True
        self._whole.clear()

    def note_backward_read(self, source: Source, predicate: Any, reason: str, always: bool = False) -> None:
        """Have a value checked again when the backward runs, if the forward has ended or ``always``."""
        if self.in_backward or always:
            self.guards.add_backward_read(Guard(source, predicate, self.where(), reason))

    def read(self, value: Any, source: Source | None, plain: bool = False) -> Any:
        """A value as the trace sees it, with the guards that reading it needs.

        ``plain``: the value is used as it stands in its container, so that a number cannot be symbolic.
        """
        if self.waiting is not None and source is not None:
            self.waiting.check_read(source)
        if is_impostor(value):
            if source is not None:
                self.guard(source, TypeIs(type(value)), f"{source.name} was read")
            raise impostor_break(value)
        if isinstance(value, torch.Tensor):
            if private_tensors.is_traced(value):
                return value
            if source is None:
                return self.wrap(value)
            if private_tensors.is_wrapper(value):
                return self.read_wrapper(value, source)
            if value.layout in SPARSE_LAYOUTS and type(value) in SPARSE_TYPES:
                return self._read_sparse(value, source)
            if self.in_backward and self.trace.known(value) is None:
                raise Break(
                    f"a hook or the backward of a custom autograd.Function reads {source.name}, which the forward has not read",
                    "read it in the forward, and hand it over as a closure variable or by ctx.save_for_backward",
                )
            traced = self.trace.input(value, source.name)
            index = self.guards.add_tensor(source, value, self.where(), traced.node.meta["val"])
            if index != traced.index:
                raise Break(f"{source.name} was seen under another number", "report this as a bug of Dovetail")
            self.note_backward_read(source, TensorMatch(index), f"{source.name} was read")
            return traced.value
        if source is None:
            return value
        kind = type(value)
        if (
            (kind is int or kind is float)
            and not plain
            and (not self.in_backward or source in self._numbers)
            and self.trace.settings.shapes.is_symbolic_number(
                value, source.name, isinstance(source, (ArgumentSource, KeywordSource))
            )
        ):
            return self.symbolic_number(value, source)
        if (
            kind in (tuple, torch.Size)
            and not plain
            and self.trace.settings.shapes.has_symbolic_items(value, source.name)
        ):
            self.guard(source, TypeIs(kind), f"{source.name} was read")
            self.guard(source, Length(len(value)), f"{source.name} was read")
            return kind([self.read(item, ItemSource(source, position)) for position, item in enumerate(value)])
        if kind in LEAF_TYPES or is_leaf_value(value):
            self.guard(source, Equals(value), f"{source.name} was read")
            return value
        if is_bound_builtin(value):
            # A new object at each look-up: what it is bound to, and its name, say all.
            self.guard(source, TypeIs(kind), f"{source.name} was read")
            self.guard(AttributeSource(source, "__name__"), Equals(value.__name__), f"{source.name} was read")
            return getattr(self.read(value.__self__, AttributeSource(source, "__self__")), value.__name__)
        if isinstance(value, IDENTITY_TYPES):
            self.guard(source, Identity(value), f"{source.name} was read")
            self.note(value, source)
            return value
        known = self._sources.get(id(value))
        if known is not None:
            if known[1] != source:
                self.guard(source, SameObject(known[1]), f"{source.name} and {known[1].name} are one object")
            self.note_backward_read(source, TypeIs(kind), f"{source.name} was read")
            return value
        self.guard(source, TypeIs(kind), f"{source.name} was read")
        if is_array_number(value):
            inside = ComputedSource(array_number, (source,), f"the value of {source.name}")
            self.guard(inside, Equals(array_number(value)), f"{source.name} was read")
        elif isinstance(value, _NUMBERS_AND_TEXTS):
            # Whatever the class defines besides, native code takes the number or the text that it is.
            inside = ComputedSource(plain_content, (source,), f"the value of {source.name}")
            self.guard(inside, Equals(plain_content(value)), f"{source.name} was read")
        self.note(value, source)
        return value

    def read_wrapper(self, value: torch.Tensor, source: Source) -> torch.Tensor:
        """A tensor subclass that wraps others: its inner tensors are inputs, and a wrapper is made of the traced ones."""
        known = self._wrappers.get(id(value))
        if known is not None:
            if known[2] != source:
                self.guard(source, SameObject(known[2]), f"{source.name} and {known[2].name} are one object")
            self.note_backward_read(source, TensorMatch(-1), f"{source.name} was read")
            return known[1]
        self.guard(source, TypeIs(type(value)), f"{source.name} was read")
        with private_tracing.disable_current_modes():
            maker = WrapperMaker.of(value)
            form = GradientForm()
            inner = {name: inner_tensor(value, name, form) for name in maker.names}
        self.guard(source, WrapperMatch(maker, value.requires_grad), f"{source.name} was read")
        traced = maker(*[self.read(item, InnerSource(source, name, form)) for name, item in inner.items()], form=form)
        if private_sizes.has_symbols(traced):
            reason = f"{source.name} is a tensor subclass of a symbolic size"
            raise Retry(reason, change=CaptureSettings.with_fewer_symbols)
        self.note_backward_read(source, TensorMatch(-1), f"{source.name} was read")
        self._wrappers[id(value)] = (value, traced, source)
        self._wrapper_sources[id(traced)] = source
        return traced

    def _read_sparse(self, value: torch.Tensor, source: Source) -> SparseValue:
        """A sparse tensor: its ticket is an input."""
        known = self._sparse.get(id(value))
        if known is not None:
            if known[2] != source:
                self.guard(source, SameObject(known[2]), f"{source.name} and {known[2].name} are one object")
            return known[1]
        if self.in_backward:
            raise Break(f"a hook or the backward of a custom autograd.Function reads {source.name}, a sparse tensor")
        self.guard(source, SparseMatch.of(value), f"{source.name} was read")
        with private_tracing.disable_current_modes():
            ticket_source = TicketSource(source)
            ticket = ticket_source.read(value)
        found = SparseValue(self.read(ticket, ticket_source), value)
        self._sparse[id(value)] = (value, found, source)
        self.note(found, source)
        return found

    def real_wrapper(self, traced: torch.Tensor) -> torch.Tensor:
        """The tensor subclass that a traced one stands for, or the traced one if the trace has made it."""
        return next((value for value, stands_for, _ in self._wrappers.values() if stands_for is traced), traced)

    def wrapper_source(self, traced: torch.Tensor) -> Source | None:
        """The source of the tensor subclass that a traced one stands for, or None if the trace has made it."""
        return self._wrapper_sources.get(id(traced))

    def symbolic_number(self, value: int | float, source: Source) -> Any:
        """A whole number as the size of an empty tensor that is an input of the graph, a float as a tensor's only value."""
        found = self._numbers.get(source)
        if found is None:
            carrier = NumberSource(source) if type(value) is int else FloatSource(source)
            with private_tracing.disable_current_modes():
                real = carrier.read(value)
            traced = self.trace.input(real, carrier.name)
            self.guards.add_tensor(carrier, traced.real, self.where(), traced.node.meta["val"])
            if type(value) is int:
                found = traced.value.shape[0]
            else:
                with private_calls.no_torch_function():
                    found = torch.ops.aten._local_scalar_dense.default(traced.value)
            self._numbers[source] = found
        self.note_backward_read(source, TensorMatch(-1), f"{source.name} was read")
        return found

    def wrap(self, value: Any) -> Any:
        """A value that native code handed back: real tensors become traced ones."""
        if is_impostor(value):
            raise impostor_break(value)
        if isinstance(value, torch.Tensor):
            if private_tensors.is_traced(value):
                return value
            known = self.trace.known(value)
            if known is not None:
                return known.value
            if id(value) in self._wrappers:
                return self._wrappers[id(value)][1]
            if id(value) in self._sparse:
                return self._sparse[id(value)][1]
            raise Break(
                "a tensor turned up that was not read from an argument, an attribute, a closure or a global",
                "pass the tensor to the function, or keep it in an attribute of a module",
            )
        kind = type(value)
        if kind is tuple:
            if self.source_of(value) is None and any(isinstance(item, (torch.Tensor, tuple, list)) for item in value):
                return tuple(self.wrap(item) for item in value)
        elif kind is list and self.source_of(value) is None:
            for position, item in enumerate(value):
                if isinstance(item, torch.Tensor) and not private_tensors.is_traced(item):
                    value[position] = self.wrap(item)
        elif kind is dict and self.source_of(value) is None:
            for key, item in value.items():
                if isinstance(item, torch.Tensor) and not private_tensors.is_traced(item):
                    value[key] = self.wrap(item)
        return value

    def item_source(self, container: Any, key: Any) -> Source | None:
        """The source of one item, or None if the container or the item is of the trace's own making."""
        source = self.source_of(container)
        if source is None or (self.effects is not None and self.effects.written(container, key)):
            return None
        return ItemSource(source, key)

    def whole(self, container: Any, but: int | None = None) -> None:
        """Guard a container's length or keys, and read all of its items; of a list all but the one that is about to be set."""
        source = self.source_of(container)
        if source is None or id(container) in self._whole:
            return
        # What the trace wrote itself needs no guard; what was there before decides what the writes lead to.
        before = self.effects.before(container) if self.effects is not None else container
        self._whole.add(id(container))
        if isinstance(container, (list, tuple, deque)):
            self.read_items(container, source, before, None if but is None else but % plain_length(before))
        elif isinstance(container, dict):
            keys = tuple(plain_keys(before))
            self.guard(source, DictKeys(keys), f"{source.name} was gone through")
            self._hold(keys)
            for key in keys:
                self.read(dict.__getitem__(before, key), ItemSource(source, key), plain=True)
        elif isinstance(container, (set, frozenset)):
            items = tuple(plain_items(before))
            self.guard(source, SetEquals(items), f"{source.name} was gone through")
            self._hold(items)

    def guard_keys(self, container: dict[Any, Any]) -> None:
        """Guard which keys a dictionary had before the trace, and nothing of what it held."""
        source = self.source_of(container)
        if source is not None and id(container) not in self._whole:
            keys = tuple(plain_keys(self.effects.before(container) if self.effects is not None else container))
            self.guard(source, DictKeys(keys), f"the length of {source.name} was read")
            self._hold(keys)

    def key_in(self, container: Any, key: Any) -> Any:
        """A key as a dictionary or set has it: one that existed before the trace has the real tensors, not the traced ones."""
        key = plain_numbers(key)
        if not isinstance(key, torch.Tensor) or not isinstance(container, (dict, set, frozenset)):
            return key
        traced = self.trace.input_of(key)
        base: Any = dict if isinstance(container, dict) else type(container)
        if traced is None or base.__contains__(container, key):
            return key
        if self.source_of(container) is None and not base.__contains__(container, traced.real):
            return key
        # The guards and effects of the container hold for this very tensor.
        source = self.guards.tensor_source(traced.index)
        self.guard(source, Identity(traced.real), f"{source.name} is a key of a container")
        return traced.real

    def keyed_for(self, owner: Any, container: Any) -> Any:
        """A dictionary or set whose items are to be put into another one, with the keys that the other one has."""
        if not isinstance(container, (dict, set, frozenset)):
            return container
        if not any(isinstance(key, torch.Tensor) for key in container):
            return container

        def chosen(key: Any) -> Any:
            if isinstance(key, torch.Tensor) and not private_tensors.is_traced(key):
                return key if self.source_of(owner) is not None or key in owner else self.wrap(key)
            return self.key_in(owner, key)

        if isinstance(container, dict):
            return {chosen(key): value for key, value in dict.items(container)}
        return {chosen(key) for key in container}

    def check_keys(self, containers: Iterable[Any]) -> None:
        """Refuse an operator on tables of which one has real tensors for its keys and another one traced ones."""
        kinds = {
            private_tensors.is_traced(key)
            for container in containers
            if isinstance(container, (dict, set, frozenset, KeysView))
            for key in container
            if isinstance(key, torch.Tensor)
        }
        if len(kinds) > 1:
            raise Break(
                "an operator is given a container of tensors that existed before and one that did not",
                "add the items one by one",
            )

    def _hold(self, items: Iterable[Any]) -> None:
        """Keys, and items of sets, are guarded by identity: the objects among them are found again by holding them."""
        for item in items:
            if not isinstance(item, torch.Tensor) and not is_leaf_value(item) and self.source_of(item) is None:
                self.note(item, self.pin(item, f"<{type(item).__qualname__}>"))

    def read_items(self, container: Any, source: Source, items: Any, but: int | None = None) -> None:
        """Guard the length of a list or tuple and read its items."""
        self._whole.add(id(container))
        length = plain_length(items)
        self.guard(source, Length(length), f"{source.name} was gone through")
        for position in range(length):
            if position != but:
                self.read(read_item(items, position), ItemSource(source, position), plain=True)

    def whole_deep(self, container: Any) -> None:
        """Guard a container as deep as native code can reach containers."""
        if isinstance(container, (list, tuple, deque)):
            self.whole(container)
            for item in container:
                self.whole_deep(item)
        elif isinstance(container, dict):
            self.whole(container)
            for item in dict.values(container):
                self.whole_deep(item)
        elif isinstance(container, (set, frozenset)):
            self.whole(container)

    def for_native(self, value: Any) -> Any:
        """An argument for native code: real tensors inside containers replaced, contents guarded."""
        if self.waiting is not None:
            self.waiting.check_native(value)
        if isinstance(value, torch.Tensor):
            return value if private_tensors.is_traced(value) else self.wrap(value)
        if isinstance(value, (list, tuple, dict)):
            self.whole(value)
            if type(value) not in (list, tuple, dict):
                self.whole_deep(value)
            if type(value) is list:
                if not any(isinstance(item, (torch.Tensor, list, tuple, dict)) for item in value):
                    return value
                items = [self.for_native(item) for item in value]
                return value if all(a is b for a, b in zip(items, value, strict=True)) else items
            if type(value) is tuple:
                items = [self.for_native(item) for item in value]
                return value if all(a is b for a, b in zip(items, value, strict=True)) else tuple(items)
            if type(value) is dict:
                pairs = {key: self.for_native(item) for key, item in value.items()}
                return value if all(pairs[key] is item for key, item in value.items()) else pairs
        elif isinstance(value, (set, frozenset, deque)):
            self.whole(value)
        return value
