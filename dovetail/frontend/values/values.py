"""Where values came from, and the guards that reading them needs.

A side table keyed by identity gives the :class:`Source` of an object that existed before the capture. Leaves are guarded by
equality when they are read from a source and flow as constants from there; functions, classes and modules are guarded by
identity, containers and objects by their type and by what is read from them.
"""

from __future__ import annotations

import operator
import types
import weakref
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from dovetail.errors import CaptureError, UserLocation
from dovetail.frontend.code.frame import Break
from dovetail.frontend.effects.journal import EffectJournal
from dovetail.frontend.interpreter.call_tables import runs_natively
from dovetail.frontend.rules import KINDS, ValueKind, changing_rule, content_of, whole_rule
from dovetail.frontend.values.leaves import (
    IDENTITY_TYPES,
    LEAF_TYPES,
    impostor_break,
    is_bound_builtin,
    is_impostor,
    is_leaf_value,
    plain_numbers,
)
from dovetail.guards import (
    Answers,
    ArgumentSource,
    AttributeSource,
    ComputedSource,
    DictKeys,
    Equals,
    FloatSource,
    Guard,
    GuardSet,
    HasNoKey,
    HasNoSlot,
    Identity,
    ItemSource,
    KeywordSource,
    Length,
    NumberSource,
    Pinned,
    PinnedSource,
    SameObject,
    SetEquals,
    Source,
    TensorMatch,
    TypeIs,
)
from dovetail.guards.reading import are_constants, plain_items, plain_keys, plain_length, read_item
from dovetail.runtime.recipe_builder import bind_native, interpreted_of, plain_content
from dovetail.torch_private import calls as private_calls
from dovetail.torch_private import state as private_state
from dovetail.torch_private import tensors as private_tensors
from dovetail.torch_private import tracing as private_tracing
from dovetail.trace import Trace

_NUMBERS_AND_TEXTS = (int, float, complex, str, bytes)
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
_MANY = 1000  # Lists of more numbers and texts are guarded as a whole.
_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_FORM = operator.attrgetter("__class__.__qualname__", "layout", "is_nested", "is_quantized")


class ReadWatcher(Protocol):
    """Refuses reads that would come too early, by raising :class:`Break`."""

    def check_read(self, source: Source) -> None:
        """Something is read at a source."""

    def check_native(self, value: Any) -> None:
        """Native code is given a value, and may read all of it."""


@dataclass(frozen=True)
class StandIn:
    """A value that the program has in the place of a tensor that the graph cannot hold."""

    real: torch.Tensor
    value: Any
    source: Source
    kind: ValueKind


class Values:
    """The side table of one capture; with the journal of what it writes."""

    def __init__(self, trace: Trace, guards: GuardSet) -> None:
        self.trace = trace
        self.guards = guards
        self.journal = EffectJournal(self.source_of, self.read_items)
        #: The types of the objects that were compared by identity.
        self.compared_kinds: set[type] = set()
        #: The forward has ended: eager reads what is read now when the backward runs.
        self.in_backward = False
        #: The attributes that the program has set on tensors of its own, by the tensor's id.
        self.tensor_attributes: dict[int, tuple[torch.Tensor, dict[str, Any]]] = {}
        self._sources: dict[int, tuple[Any, Source]] = {}
        self._created: dict[int, Any] = {}
        self._pins: dict[int, PinnedSource] = {}
        self._whole: set[int] = set()
        #: The copies of containers that native code was given, by id, each with its original.
        self._given: dict[int, tuple[Any, Any]] = {}
        #: Functions that are guarded by their code, by id.
        self.by_code: set[int] = set()
        self._numbers: dict[Source, Any] = {}
        self._stand_ins: dict[int, StandIn] = {}
        self._stand_in_sources: dict[int, StandIn] = {}
        self._watchers: list[ReadWatcher] = []

    def forget(self) -> None:
        """Let go of all objects; the capture is over."""
        self.journal.forget()
        tables: tuple[Any, ...] = (self._sources, self._created, self._pins, self._numbers)
        for table in (*tables, self._given, self._stand_ins, self._stand_in_sources, self._watchers):
            table.clear()

    # --- what is known of an object -----------------------------------------------------------------------------------

    def where(self) -> UserLocation | None:
        """The user's line now."""
        return self.trace.locate()

    def source_of(self, value: Any) -> Source | None:
        """The source of an object that existed before the capture, or None."""
        found = self._sources.get(id(value))
        return found[1] if found is not None else None

    def pin(self, value: Any, display: str) -> Source:
        """A source for an object that the entry holds on to: a globals dictionary, a class, a function."""
        if (source := self.source_of(value)) is not None:
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
        stand_ins = ((item.real, item.source) for item in self._stand_ins.values())
        return [*self._sources.values(), *stand_ins]

    def note_created(self, value: Any) -> None:
        """Remember that an object was made by the program."""
        self._created[id(value)] = value

    def is_created(self, value: Any) -> bool:
        """Whether an object was made by the program."""
        return id(value) in self._created

    def type_at(self, source: Source) -> type:
        """The type of the object that came from a source."""
        if isinstance(source, PinnedSource):
            return type(source.pinned.value)
        return next((type(value) for value, known in self.noted() if known == source), object)

    # --- guards -------------------------------------------------------------------------------------------------------

    def watch(self, watcher: ReadWatcher) -> None:
        """Ask a watcher at each read from here on."""
        self._watchers.append(watcher)

    def guard(self, source: Source, predicate: Any, reason: str) -> None:
        """Add a guard at the current user line."""
        if not isinstance(predicate, (TypeIs, HasNoKey, HasNoSlot)):
            for watcher in self._watchers:
                watcher.check_read(source)
        self.note_backward_read(source, predicate, reason)
        try:
            self.guards.add(source, predicate, self.where(), reason)
        except ValueError as error:
            # Not an exception of the program: its handlers must not see it.
            raise Break(str(error), "report this as a bug of Dovetail") from error

    def begin_backward(self) -> None:
        """The forward has ended: reads of hooks and custom backwards are noted anew."""
        self.in_backward = True
        self._whole.clear()

    def note_backward_read(self, source: Source, predicate: Any, reason: str, always: bool = False) -> None:
        """Have a value checked again when the backward runs, if the forward has ended or ``always``."""
        if self.in_backward or always:
            self.guards.add_backward_read(Guard(source, predicate, self.where(), reason))

    # --- reading ------------------------------------------------------------------------------------------------------

    def read(self, value: Any, source: Source | None, plain: bool = False) -> Any:
        """A value as the program sees it, with the guards that reading it needs.

        ``plain``: the value is used as it stands in its container, so that a number cannot be symbolic.
        """
        if source is not None:
            for watcher in self._watchers:
                watcher.check_read(source)
        if is_impostor(value):
            if source is not None:
                self.guard(source, TypeIs(type(value)), f"{source.name} was read")
            raise impostor_break(value)
        if isinstance(value, torch.Tensor):
            return self._read_tensor(value, source)
        kind = type(value)
        if source is None:
            return interpreted_of(value) if kind is types.FunctionType else value
        if not plain:
            if kind is int or kind is float:
                is_argument = isinstance(source, (ArgumentSource, KeywordSource))
                may_change = not self.in_backward or source in self._numbers
                if may_change and self.trace.settings.shapes.is_symbolic_number(value, source.name, is_argument):
                    return self.symbolic_number(value, source)
            elif self.trace.settings.shapes.has_symbolic_items(kind, source.name) and is_leaf_value(value):
                self.guard(source, TypeIs(kind), f"{source.name} was read")
                self.guard(source, Length(len(value)), f"{source.name} was read")
                return kind([self.read(item, ItemSource(source, position)) for position, item in enumerate(value)])
            for handler in changing_rule:
                if (stand_in := handler(self, value, source)) is not NotImplemented:
                    return stand_in
        if kind in LEAF_TYPES or is_leaf_value(value):
            self.guard(source, Equals(value), f"{source.name} was read")
            return value
        if is_bound_builtin(value):
            # A new object at each look-up: what it is bound to, and its name, say all.
            self.guard(source, TypeIs(kind), f"{source.name} was read")
            self.guard(AttributeSource(source, "__name__"), Equals(value.__name__), f"{source.name} was read")
            return bind_native(value, self.read(value.__self__, AttributeSource(source, "__self__")))
        is_users = isinstance(value, types.FunctionType) and not runs_natively(value.__globals__.get("__name__") or "")
        if is_users and self.trace.changes(("function", source.name), weakref.ref(value)):
            return self.read_closure(value, source)
        if isinstance(value, IDENTITY_TYPES):
            self.hold(value)
            self.guard(source, Identity(value), f"{source.name} was read")
            self.note(value, source)
            return value
        return self._read_object(value, source)

    def read_closure(self, value: types.FunctionType, source: Source) -> Any:
        """A function that is another object at each call: its code and globals are guarded in the place of its identity."""
        if (known := self.source_of(value)) is not None and known != source:
            self.guard(source, SameObject((known,)), f"{source.name} and {known.name} are one object")
            return value
        self.guard(source, TypeIs(types.FunctionType), f"{source.name} was read")
        for name in ("__code__", "__globals__"):
            self.guard(AttributeSource(source, name), Identity(getattr(value, name)), "the function's code")
        self.by_code.add(id(value))
        self.note(value, source)
        return value

    def hold(self, value: Any) -> None:
        """Guard that a function is this very object: it is compared, looked up or shown."""
        source = self.source_of(value) if id(value) in self.by_code else None
        if source is not None:
            self.guard(source, Identity(value), f"{source.name} was compared")

    def _read_object(self, value: Any, source: Source) -> Any:
        """An object that is known by its type, and by what will be read from it."""
        kind = type(value)
        known = self._sources.get(id(value))
        if known is not None:
            if known[1] != source:
                self.guard(source, SameObject((known[1],)), f"{source.name} and {known[1].name} are one object")
            self.note_backward_read(source, TypeIs(kind), f"{source.name} was read")
            return value
        self.guard(source, TypeIs(kind), f"{source.name} was read")
        # Native code takes the number or the text that it is, whatever its class defines besides.
        content = content_of(value) or (plain_content if isinstance(value, _NUMBERS_AND_TEXTS) else None)
        if content is not None:
            inside = ComputedSource(content, (source,), f"the value of {source.name}")
            self.guard(inside, Equals(content(value)), f"{source.name} was read")
        self.note(value, source)
        return value

    def _read_tensor(self, value: torch.Tensor, source: Source | None) -> Any:
        if private_tensors.is_traced(value):
            return value
        if source is None:
            return self.wrap(value)
        with private_calls.no_torch_function():
            is_plain = type(value) in _PLAIN_TENSORS and value.layout is torch.strided
            kind = None if is_plain else next((item for item in KINDS if item.claims(value)), None)
        if kind is not None:
            return self._read_stand_in(value, source, kind)
        if self.in_backward and self.trace.known(value) is None:
            raise Break(
                f"a hook or the backward of a custom autograd.Function reads {source.name}, which the forward has not read",
                "read it in the forward, and hand it over as a closure variable or by ctx.save_for_backward",
            )
        with private_calls.no_torch_function():
            try:
                traced = self.trace.input(value, source.name)
            except CaptureError:
                # Eager takes the calls with such a tensor only.
                form = ComputedSource(_form_of, (source,), f"the form of {source.name}")
                self.guard(form, Equals(_form_of(value)), f"{source.name} was read")
                raise
            index = self.guards.add_tensor(source, value, self.where(), traced.node.meta["val"])
            if index != traced.index:
                raise Break(f"{source.name} was seen under another number", "report this as a bug of Dovetail")
            self.note_backward_read(source, TensorMatch(index), f"{source.name} was read")
            return traced.value

    def _read_stand_in(self, value: torch.Tensor, source: Source, kind: ValueKind) -> Any:
        known = self._stand_ins.get(id(value))
        if known is None:
            known = StandIn(value, kind.stand_in(self, value, source), source, kind)
            self._stand_ins[id(value)] = self._stand_in_sources[id(known.value)] = known
        elif known.source != source:
            self.guard(source, SameObject((known.source,)), f"{source.name} and {known.source.name} are one object")
        self.note_backward_read(source, TensorMatch(-1), f"{source.name} was read")
        return known.value

    def stood_for(self, value: Any) -> StandIn | None:
        """The tensor that a stand-in was made for when it was read; None for one that the program has computed."""
        return self._stand_in_sources.get(id(value))

    def symbolic_number(self, value: int | float, source: Source) -> Any:
        """A whole number as the size of an empty tensor that is an input of the graph, a float as a tensor's only value."""
        found = self._numbers.get(source)
        if found is None:
            carrier = FloatSource(source) if type(value) is float else NumberSource(source, least=2 if value > 1 else 0)
            # Where the call begins, nothing is transformed, and a number belongs to no transform.
            with private_state.outside_of_transforms(), private_calls.no_torch_function():
                with private_tracing.disable_current_modes():
                    real = carrier.read(value)
                traced = self.trace.input(real, carrier.name)
                self.guards.add_tensor(carrier, traced.real, self.where(), traced.node.meta["val"])
                is_whole = type(value) is int
                found = traced.value.shape[1] if is_whole else torch.ops.aten._local_scalar_dense.default(traced.value)
            self._numbers[source] = found
        self.note_backward_read(source, TensorMatch(-1), f"{source.name} was read")
        return found

    def wrap(self, value: Any) -> Any:
        """A value that native code handed back: real tensors become traced ones, containers of them the program's own again."""
        if is_impostor(value):
            raise impostor_break(value)
        if isinstance(value, torch.Tensor):
            return value if private_tensors.is_traced(value) else self._known_tensor(value)
        if id(value) in self._given or type(value) is types.FunctionType:
            return self.own(value)
        kind = type(value)
        if isinstance(value, tuple) and self.source_of(value) is None:
            items = [self.wrap(item) if kind is tuple else self.own(item) for item in tuple.__iter__(value)]
            return value if all(map(operator.is_, items, tuple.__iter__(value))) else tuple.__new__(kind, items)
        content = vars(value) if kind is types.SimpleNamespace else value
        if isinstance(content, (list, dict, deque)) and self.source_of(value) is None:
            self.put_back(content, type(content) in (list, dict))
        return value

    def own(self, value: Any) -> Any:
        """The program's own function or container, in whose place native code was given another one."""
        if type(value) is types.FunctionType:
            return interpreted_of(value)
        return self._given.get(id(value), (value, value))[1]

    def put_back(self, container: Any, has_all: bool = True) -> None:
        """Put the program's own containers, and with ``has_all`` traced tensors, where native code has put others."""
        base: Any = next(kind for kind in (list, dict, deque) if isinstance(container, kind))
        for key, item in base.items(container) if base is dict else enumerate(base.__iter__(container)):
            if id(item) in self._given or (has_all and isinstance(item, (torch.Tensor, tuple))):
                base.__setitem__(container, key, self.wrap(item))

    def _known_tensor(self, value: torch.Tensor) -> Any:
        if (known := self.trace.known(value)) is not None:
            return known.value
        if id(value) in self._stand_ins:
            return self._stand_ins[id(value)].value
        raise Break(
            "a tensor turned up that was not read from an argument, an attribute, a closure or a global",
            "pass the tensor to the function, or keep it in an attribute of a module",
        )

    # --- containers ---------------------------------------------------------------------------------------------------

    def item_source(self, container: Any, key: Any) -> Source | None:
        """The source of one item, or None if the program has made the container or the item."""
        source = self.source_of(container)
        return None if source is None or self.journal.written(container, key) else ItemSource(source, key)

    def whole(self, container: Any, but: int | None = None) -> None:
        """Guard a container's length or keys, and read all items; of a list all but item ``but``, which is about to be set."""
        source = self.source_of(container)
        if source is None or id(container) in self._whole:
            return
        # Items that the program wrote need no guard; the items of before decide what the writes lead to.
        before = self.journal.before(container)
        if isinstance(container, (list, tuple, deque)):
            self.read_items(container, source, before, None if but is None else but % max(plain_length(before), 1))
        elif isinstance(container, dict):
            self.guard_keys(container)
            for key in tuple(plain_keys(before)):
                self.read(dict.__getitem__(before, key), ItemSource(source, key), plain=True)
        elif isinstance(container, (set, frozenset)):
            items = tuple(plain_items(before))
            self.guard(source, SetEquals(items), f"{source.name} was gone through")
            self._hold(items)
        self._whole.add(id(container))

    def read_items(self, container: Any, source: Source, items: Any, but: int | None = None) -> None:
        """Guard the length of a list or tuple and read its items."""
        for check in whole_rule:
            check(self, container, source, items)
        self._whole.add(id(container))
        length = plain_length(items)
        self.guard(source, Length(length), f"{source.name} was gone through")
        if type(container) is deque:
            self.read(container.maxlen, AttributeSource(source, "maxlen"), plain=True)
        plain = tuple(plain_items(items)) if length > _MANY and but is None else ()
        if plain and {*map(type, plain)} <= {int, float, str, bool}:
            # A guard for each would take time with the square of their number: torch's managers search a list for each.
            self.guard(source, Answers(are_constants, (plain,), True), f"{source.name} was gone through")
            return
        for position in range(length):
            if position != but:
                self.read(read_item(items, position), ItemSource(source, position), plain=True)

    def whole_deep(self, container: Any) -> None:
        """Guard a container as deep as native code can reach containers."""
        self.whole(container)
        if isinstance(container, (list, tuple, deque)):
            for item in container:
                self.whole_deep(item)
        elif isinstance(container, dict):
            for item in dict.values(container):
                self.whole_deep(item)

    def guard_keys(self, container: dict[Any, Any]) -> None:
        """Guard which keys a dictionary had before the capture, and nothing of what it held."""
        source = self.source_of(container)
        if source is not None and id(container) not in self._whole:
            keys = tuple(plain_keys(self.journal.before(container)))
            self.guard(source, DictKeys(keys), f"the keys of {source.name} were read")
            self._hold(keys)

    def _hold(self, items: Iterable[Any]) -> None:
        """Keys, and items of sets, are guarded by identity: the objects among them are found again by holding them."""
        for item in items:
            if not isinstance(item, torch.Tensor) and not is_leaf_value(item) and self.source_of(item) is None:
                self.note(item, self.pin(item, f"<{type(item).__qualname__}>"))

    def key_in(self, container: Any, key: Any) -> Any:
        """A key as a dictionary or set has it: one that existed before has the real tensors, not the traced ones."""
        key = plain_numbers(key)
        if not isinstance(key, torch.Tensor) or not isinstance(container, (dict, set, frozenset)):
            return key
        found = self.trace.input_of(key) or self.stood_for(key)
        has: Any = (dict if isinstance(container, dict) else type(container)).__contains__
        if found is None or has(container, key) or not (self.source_of(container) or has(container, found.real)):
            return key
        # The guards and effects of the container hold for this very tensor.
        source = found.source if isinstance(found, StandIn) else self.guards.tensor_source(found.index)
        self.guard(source, Identity(found.real), f"{source.name} is a key of a container")
        return found.real

    def check_merged(self, container: Any) -> None:
        """Refuse to put all items of a container with tensors for keys into another one, which may have the real tensors."""
        if isinstance(container, (dict, set, frozenset)) and any(isinstance(key, torch.Tensor) for key in container):
            raise Break("all items of a container of tensors are put into another one", "add the items one by one")

    def for_native(self, value: Any) -> Any:
        """An argument for native code: real tensors inside containers replaced, contents guarded."""
        for watcher in self._watchers:
            watcher.check_native(value)
        if isinstance(value, torch.Tensor):
            return value if private_tensors.is_traced(value) else self.wrap(value)
        if isinstance(value, (list, tuple, dict)):
            self.whole(value)
            if (kind := type(value)) not in (list, tuple, dict):
                self.whole_deep(value)
            elif isinstance(value, dict):
                pairs = {key: self.for_native(item) for key, item in value.items()}
                return self._copied(value, pairs, pairs.values(), value.values())
            elif any(isinstance(item, (torch.Tensor, *_CONTAINERS)) for item in value):
                items = [self.for_native(item) for item in value]
                return self._copied(value, kind(items), items, value)
        elif isinstance(value, (set, frozenset, deque)):
            self.whole(value)
        return value

    def _copied(self, value: Any, copy: Any, items: Iterable[Any], before: Iterable[Any]) -> Any:
        if all(map(operator.is_, items, before)):
            return value
        self._given[id(copy)] = (copy, value)
        return copy


def _form_of(value: Any) -> Any:
    with private_calls.no_torch_function():
        return _FORM(value)
