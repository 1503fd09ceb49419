"""Torch's C++ guard managers, and the versions of dictionaries, for fast guards. Checked on torch 2.13, Python 3.11.

Every function of this module that depends on how a version of torch or Python behaves is tried out once before it is used:
:func:`sees_changed_dictionaries`, :func:`has_native_guards`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dovetail.torch_private import autograd as private_autograd
from dovetail.torch_private import state as private_state

#: Functions in Python that read state, each as an expression that says the same without a call, and the names in it.
INLINED: dict[Callable[[], Any], tuple[str, dict[str, Any]]] = {
    private_state.forward_ad_level: ("levels._current_level", {"levels": torch.autograd.forward_ad}),
    private_autograd.has_saved_tensor_hooks: (
        "(hooks(True) is not None)",
        {"hooks": torch._C._autograd._top_saved_tensors_default_hooks},
    ),
}
if hasattr(torch.compiler, "_is_compiling_flag"):
    INLINED[torch.compiler.is_compiling] = "compiler._is_compiling_flag", {"compiler": torch.compiler}

_version: Callable[[dict[Any, Any]], int] = torch._C._dynamo.guards.dict_version


def kernel_readers() -> tuple[Callable[[], Any], ...]:
    """Functions that say together what ``kernel_flags`` says, each at once where torch lets them be read one by one."""
    try:
        [read() for read in private_state.KERNEL_READERS]
    except RuntimeError:
        return (private_state.kernel_flags,)
    return private_state.KERNEL_READERS


def global_state_check() -> Callable[[], bool]:
    """A C++ check that grad mode, autocast, default dtype, deterministic flags, TF32, thread count are as now."""
    return torch._C._dynamo.guards.GlobalStateGuard().check


def dictionary_versions(tables: Sequence[dict[Any, Any]]) -> list[tuple[int, int]]:
    """For each dictionary its count of writes, a number that no other dictionary has, and its length.

    Reading the count makes the dictionary keep it from then on. The length is part of it because from Python 3.12 on the count
    misses one kind of write: an update of an empty dictionary from another one.
    """
    return list(zip(map(_version, tables), map(dict.__len__, tables), strict=True))


def flat_versions(tables: Sequence[dict[Any, Any]]) -> list[int]:
    """The same numbers in one list, which is made faster."""
    return [*map(_version, tables), *map(len, tables)]


def unchanged_check(
    owners: Sequence[object], typed: Sequence[object], tables: Sequence[dict[Any, Any]]
) -> Callable[[], bool]:
    """A C++ check that nothing of this has changed since now: the contents of ``tables``, the types of ``typed``, and of
    ``owners`` the types, the identities of their ``__dict__`` and its contents.

    About 15 ns for each of them, and some 10 us each to make (checked on 2.13). The check holds on to all of them.
    Use it only where :func:`sees_changed_dictionaries`.
    """
    from torch._dynamo.guards import GuardManagerType

    kind = GuardManagerType.GUARD_MANAGER
    # The types come along so that none of them can go and leave its address to another one.
    watched = (*owners, *typed, *tables, *map(type, owners), *map(type, typed))
    root = torch._C._dynamo.guards.RootGuardManager()

    def is_unchanged(manager: Any, table: dict[Any, Any], name: str) -> None:
        manager.add_dict_version_guard(table, [name], None)
        if not dict.__len__(table):
            # From Python 3.12 on, torch is not told of an update of an empty dictionary from another one.
            manager.add_dict_length_check_guard(0, [name], None)

    for index, value in enumerate(watched[: len(owners) + len(typed) + len(tables)]):
        name = f"v{index}"
        manager = root.tuple_getitem_manager(index, name, value, kind)
        if index < len(owners):
            own = object.__getattribute__(value, "__dict__")
            manager.add_type_match_guard(id(type(value)), [name], None)
            is_unchanged(manager.get_generic_dict_manager(name, own, kind), own, name)
        elif index < len(owners) + len(typed):
            manager.add_type_match_guard(id(type(value)), [name], None)
        else:
            is_unchanged(manager, tables[index - len(owners) - len(typed)], name)
    return functools.partial(root.check, watched)


@functools.cache
def sees_changed_dictionaries() -> bool:
    """Whether :func:`unchanged_check` exists in this torch and sees every kind of write in this Python (tried out once)."""

    class Owner:
        """Something with attributes."""

    class Other:
        """Another type, of the same layout."""

    def attribute(owner: Any) -> None:
        owner.value = object()

    def own_dict(owner: Any) -> None:
        owner.__dict__ = dict(owner.__dict__)

    def own_type(owner: Any) -> None:
        owner.__class__ = Other

    changes: list[Callable[[Any], None]] = [
        attribute,
        own_dict,
        own_type,
        lambda owner: owner.table.__setitem__("key", object()),
        lambda owner: owner.table.pop("key"),
        lambda owner: owner.table.update(new=1),
        lambda owner: owner.table.clear(),
        lambda owner: delattr(owner, "value"),
        lambda owner: owner.empty.update({"absent": 0}),  # not counted from Python 3.12 on
        lambda owner: owner.bare.__dict__.update({"absent": 0}),
        lambda owner: setattr(owner.bare, "absent", 0),
    ]
    try:
        for change in changes:
            # Often enough for the interpreter to specialise its instructions, which once wrote past the watchers. To watch takes
            # 50 us each time: the instructions as they are at first, and as they have become.
            for number in range(20):
                owner = Owner()
                owner.value, owner.table, owner.empty, owner.bare = 1, {"key": number}, {}, Owner()
                watched = [owner, owner.bare], [owner], [owner.table, owner.empty]
                check = unchanged_check(*watched) if number < 2 or number > 17 else None
                if check is not None and not (check() and check()):
                    return False
                change(owner)
                if check is not None and check():
                    return False
    except (AttributeError, TypeError, RuntimeError, ImportError):
        return False
    return True


class NativeGuards:
    """Guards on fixed objects and what is reached from them, asked in C++.

    Nobody's Python code runs but the ``__eq__`` of built-in constants. What is guarded is held on to until the check goes.
    """

    def __init__(self) -> None:
        self._root = torch._C._dynamo.guards.RootGuardManager()
        self._fixed: list[Any] = []
        self._found: dict[int, NativeStep] = {}
        self._expected: list[Any] = []

    def at(self, value: Any) -> NativeStep:
        """Guards on a fixed object."""
        found = self._found.get(id(value))
        if found is None:
            name, index = f"v{len(self._fixed)}", len(self._fixed)
            self._fixed.append(value)
            manager = self._root.tuple_getitem_manager(index, name, value, _manager_kind())
            found = self._found[id(value)] = NativeStep(manager, name, self._expected)
        return found

    def make_check(self) -> Callable[[], bool]:
        """Whether all of the guards hold."""
        return functools.partial(self._root.check, (*self._fixed, *self._expected))


class NativeStep:
    """A place to add :class:`NativeGuards`: a value, reached from a fixed object. ``value`` is always the present one."""

    def __init__(self, manager: Any, name: str, expected: list[Any]) -> None:
        self._manager = manager
        self._name = name
        self._expected = expected

    def _step(self, manager: Any) -> NativeStep:
        return NativeStep(manager, self._name, self._expected)

    def attribute(self, name: str, value: Any) -> NativeStep:
        """An attribute as ``object`` itself finds it: a slot, or one of a function."""
        return self._step(self._manager.generic_getattr_manager(name, self._name, _example(value), _manager_kind()))

    def own_dict(self, value: Any) -> NativeStep:
        """The ``__dict__`` of an instance."""
        return self._step(self._manager.get_generic_dict_manager(self._name, value, _manager_kind()))

    def class_dict(self, value: Any) -> NativeStep:
        """A class's own dictionary."""
        return self._step(self._manager.type_dict_manager(self._name, value, _manager_kind()))

    def class_order(self, value: Any) -> NativeStep:
        """A class's ``__mro__``."""
        return self._step(self._manager.type_mro_manager(self._name, value, _manager_kind()))

    def item(self, container: type, key: Any, value: Any) -> NativeStep:
        """An item of a dictionary, list or tuple; ``container`` is that built-in type."""
        take: dict[Any, Any] = {
            dict: self._manager.dict_getitem_manager,
            list: self._manager.list_getitem_manager,
            tuple: self._manager.tuple_getitem_manager,
        }
        return self._step(take[container](key, self._name, _example(value), _manager_kind()))

    def is_same_as(self, other: NativeStep) -> None:
        """It is the very object that is found there."""
        torch._C._dynamo.guards.install_object_aliasing_guard(self._manager, other._manager, [self._name], None)

    def is_object(self, value: Any) -> None:
        """It is this very object."""
        self._expected.append(value)
        self._manager.add_id_match_guard(id(value), [self._name], None)

    def has_type(self, kind: type) -> None:
        """It is exactly of this type."""
        self._expected.append(kind)
        self._manager.add_type_match_guard(id(kind), [self._name], None)

    def equals(self, value: Any) -> None:
        """It has the type of a constant and is equal to it."""
        self.has_type(type(value))
        self._manager.add_equals_match_guard(value, [self._name], None)

    def has_length(self, length: int, is_dict: bool) -> None:
        """A built-in container has this many items."""
        add = self._manager.add_dict_length_check_guard if is_dict else self._manager.add_length_check_guard
        add(length, [self._name], None)

    def lacks(self, key: Any) -> None:
        """A dictionary does not have this key."""
        self._manager.add_dict_contains_guard(False, key, [self._name], None)


_CONSTANTS = (int, float, bool, str, type(None))


def _example(value: Any) -> Any:
    """The example of a value for torch. Where it is shown a dictionary, it asks later values for their count of writes before it
    asks for their types; from Python 3.12 on it raises where a value is no dictionary, and leaves torch functions disabled.
    Nor is it shown a text or number that may have attributes, nor a tuple: torch asks nothing below what it takes for a
    constant, as long as nobody writes to the dictionary that it is in.
    """
    is_shown = type(value) in _CONSTANTS or not isinstance(value, (dict, tuple, int, float, str))
    return value if is_shown else object()


def _manager_kind() -> Any:
    from torch._dynamo.guards import GuardManagerType  # takes seconds where torch.compile was never used

    return GuardManagerType.GUARD_MANAGER


@functools.cache
def has_native_guards() -> bool:
    """Whether :class:`NativeGuards` exist in this torch, and every kind of them sees what it should (tried out once)."""

    class Slotted:
        """An object with a slot."""

        __slots__ = ("place",)

    class Base:
        """A class with an attribute."""

        attribute: Any = 1

    class Derived(Base):
        """A class whose bases change."""

    class Other(Base):
        """Another base."""

    def function(number: Any = None) -> Any:
        return number

    slotted, owner, items = Slotted(), Derived(), [1, 2]
    table: dict[str, Any] = {"key": "text", "inner": {}}
    pair, code, other = [items, items], function.__code__, (lambda number=None: 1).__code__
    slotted.place = 1

    def add(guards: NativeGuards) -> None:
        at = guards.at
        at(function).attribute("__code__", function.__code__).is_object(function.__code__)
        defaults = at(function).attribute("__defaults__", function.__defaults__)
        defaults.item(tuple, 0, None).is_object(None)
        at(slotted).attribute("place", 1).equals(1)
        at(owner).has_type(Derived)
        at(owner).own_dict(owner.__dict__).lacks("late")
        at(Base).class_dict(Base.__dict__).item(dict, "attribute", 1).equals(1)
        at(Derived).class_order(Derived.__mro__).is_object(Derived.__mro__)
        at(table).item(dict, "key", "text").equals("text")
        at(items).has_length(2, False)
        at(items).item(list, 1, 2).is_object(items[1])
        at(table).has_length(2, True)
        at(table).item(dict, "inner", table["inner"]).has_length(0, True)
        at(pair).item(list, 0, pair[0]).is_same_as(at(pair).item(list, 1, pair[1]))

    changes: list[tuple[Callable[[], None], Callable[[], None]]] = [
        (lambda: setattr(function, "__defaults__", (3,)), lambda: setattr(function, "__defaults__", (None,))),
        (lambda: setattr(function, "__defaults__", None), lambda: setattr(function, "__defaults__", (None,))),
        (lambda: setattr(slotted, "place", True), lambda: setattr(slotted, "place", 1)),
        (lambda: delattr(slotted, "place"), lambda: setattr(slotted, "place", 1)),
        (lambda: setattr(owner, "late", 1), lambda: delattr(owner, "late")),
        (lambda: setattr(Base, "attribute", 1.0), lambda: setattr(Base, "attribute", 1)),
        (lambda: delattr(Base, "attribute"), lambda: setattr(Base, "attribute", 1)),
        (lambda: table.__setitem__("key", "other"), lambda: table.__setitem__("key", "text")),
        (lambda: table.__setitem__("late", "text"), lambda: table.__delitem__("late")),
        (lambda: table["inner"].update(late=1), lambda: table["inner"].clear()),
        (table.clear, lambda: table.update(key="text", inner={})),
        (lambda: items.append(3), lambda: items.__delitem__(2)),
        (lambda: pair.__setitem__(0, []), lambda: pair.__setitem__(0, items)),
        (lambda: pair.__setitem__(1, []), lambda: pair.__setitem__(1, items)),
        (items.clear, lambda: items.extend([1, 2])),
        (lambda: items.__setitem__(1, 3), lambda: items.__setitem__(1, 2)),
        (lambda: setattr(owner, "__class__", Other), lambda: setattr(owner, "__class__", Derived)),
        (lambda: setattr(function, "__code__", other), lambda: setattr(function, "__code__", code)),
        # Not to be undone: the order of bases is another object then.
        (lambda: setattr(Derived, "__bases__", (Other,)), lambda: None),
    ]
    try:
        guards = NativeGuards()
        add(guards)
        holds = guards.make_check()
        for change, undo in changes:
            if not holds():
                return False
            change()
            if holds():
                return False
            undo()
    except (AttributeError, TypeError, RuntimeError, ImportError):
        return False
    return True
