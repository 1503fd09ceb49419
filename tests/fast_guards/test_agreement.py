"""On random objects and random changes of them, the generated check, the fast check and the explanation give one answer."""

from __future__ import annotations

import collections
import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dovetail import fast_guards
from dovetail.fast_guards import remembered
from dovetail.guards import (
    ArgumentSource,
    AttributeSource,
    Checker,
    DictKeys,
    Equals,
    GuardSet,
    HasNoKey,
    Identity,
    InstanceDictSource,
    ItemSource,
    Length,
    SetEquals,
    Source,
    TypeIs,
    compile_checker,
)
from dovetail.guards.checker import ACCELERATORS

ROOT = ArgumentSource(0, "L['x']")


class Plain:
    """An object with attributes."""


class Slotted:
    """An object with a slot."""

    __slots__ = ("slot",)


class List(list):
    """A list that runs code of the program's where it is asked plainly."""

    def __len__(self) -> int:
        raise AssertionError("user code was run")

    def __getitem__(self, position: Any) -> Any:
        raise AssertionError("user code was run")


def plain(**attributes: Any) -> Plain:
    made = Plain()
    made.__dict__.update(attributes)
    return made


def slotted(value: Any) -> Slotted:
    made = Slotted()
    made.slot = value
    return made


NAMES = ["a", "b", "c"]
leaves = st.one_of(
    st.integers(-1, 2), st.booleans(), st.none(), st.sampled_from([0.0, -0.0, 1.5, float("nan")]), st.sampled_from(NAMES),
    st.sampled_from([torch.float32, torch.Size([2]), (1, 2), frozenset({1})]),
    st.integers(1, 2).map(lambda size: torch.zeros(size, 2)),
)  # fmt: skip
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.dictionaries(st.sampled_from([*NAMES, 0, 1]), inner, max_size=3),
        st.dictionaries(st.sampled_from(NAMES), inner, max_size=3).map(collections.OrderedDict),
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(List),
        st.lists(inner, max_size=2).map(tuple),
        st.dictionaries(st.sampled_from(NAMES), inner, min_size=1, max_size=3).map(lambda found: plain(**found)),
        inner.map(slotted),
        st.sets(st.integers(0, 3), max_size=2),
    ),
    max_leaves=12,
)


#: Values that a careless comparison takes for one another.
ALIKE = [
    [0, False, 0.0, -0.0],
    [1, True, 1.0],
    ["a", b"a"],
    [(1, 2), (1, 2.0), torch.Size([1, 2])],
    [None, float("nan")],
]
alike = st.sampled_from(ALIKE).flatmap(st.sampled_from)
#: Small containers of leaves that differ in one place or in their kind.
small = st.one_of(
    st.lists(alike, min_size=1, max_size=3),
    st.dictionaries(st.sampled_from(NAMES), alike, min_size=1, max_size=3),
    st.dictionaries(st.sampled_from(NAMES), alike, min_size=1, max_size=3).map(lambda found: plain(**found)),
    st.sets(st.integers(0, 3), max_size=2),
)
inner = st.one_of(small, values)
#: Half of them are objects with a ``__dict__``, below which the fast check remembers.
roots = st.one_of(
    st.dictionaries(st.sampled_from(NAMES), inner, min_size=1).map(lambda found: plain(**found)),
    st.one_of(
        small, st.dictionaries(st.sampled_from(NAMES), inner, min_size=1), st.lists(inner, min_size=1, max_size=3)
    ),
)


def parts(value: Any, source: Source) -> Iterator[tuple[Any, Source]]:
    """The values one step below, with their sources."""
    if isinstance(value, dict):
        yield from ((item, ItemSource(source, key)) for key, item in dict.items(value))
    elif isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        walk = list.__iter__ if isinstance(value, list) else tuple.__iter__
        yield from ((item, ItemSource(source, position)) for position, item in enumerate(walk(value)))
    elif isinstance(value, Plain):
        yield from ((item, ItemSource(InstanceDictSource(source), key)) for key, item in vars(value).items())
    elif isinstance(value, Slotted):
        yield value.slot, AttributeSource(source, "slot")


def guard(guards: GuardSet, value: Any, source: Source, draw: Any) -> None:
    """Guards on a value and on everything below it: of its type or not, and one other that is drawn; more would hide each other."""
    if isinstance(value, torch.Tensor):
        guards.add_tensor(source, value)
        return
    asked: list[Any] = [None]
    if isinstance(value, dict):
        asked += [DictKeys(tuple(value)), HasNoKey("absent"), Length(len(value))]
    elif isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        asked.append(Length(len(list(parts(value, source)))))
    elif isinstance(value, set):
        asked.append(SetEquals(value))
    elif isinstance(value, Slotted):
        asked.append(Identity(value))
    elif isinstance(value, Plain):
        guards.add(InstanceDictSource(source), HasNoKey("absent"))
    else:
        asked.append(Equals(value))
    if isinstance(value, Plain) or draw(st.booleans()):
        guards.add(source, TypeIs(type(value)))
    predicate = draw(st.sampled_from(asked[::-1]))
    if predicate is not None:
        guards.add(source, predicate)
    for item, place in parts(value, source):
        guard(guards, item, place, draw)


def containers(value: Any) -> list[Any]:
    """Everything in a value that can be changed, the value included."""
    found = [value] if isinstance(value, (dict, list, set, Plain, Slotted)) else []
    for item, _ in parts(value, ROOT):
        found += containers(item)
    return found


def changes(container: Any) -> Iterator[bool]:
    """Change a container in place in many small ways. Yields True after each change, False when it is taken back."""
    others = [item for items in ALIKE for item in items]
    if isinstance(container, Slotted):
        before = container.slot
        for new in others:
            container.slot = new
            yield True
            container.slot = before
            yield False
    elif isinstance(container, set):
        container.add(7)
        yield True
        container.remove(7)
        yield False
    elif isinstance(container, list):
        items = [*list.__iter__(container)]
        one_by_one = [[*items[:at], new, *items[at + 1 :]] for at in range(len(items)) for new in others]
        for changed in (*one_by_one, items[:-1], [*items, 0], items[::-1]):
            list.__setitem__(container, slice(None), changed)
            yield True
            list.__setitem__(container, slice(None), items)
            yield False
    else:
        table = vars(container) if isinstance(container, Plain) else container
        before = dict(table)
        for key in before:
            for new in others:
                table[key] = new
                yield True
                table[key] = before[key]
                yield False
        for changed in ({**before, "absent": 0}, dict(reversed(before.items())), dict([*before.items()][1:])):
            table.clear()
            table.update(changed)
            yield True
            table.clear()
            table.update(before)
            yield False


def answers(checkers: list[Checker], value: Any) -> set[bool]:
    """The answers of all checks, each asked twice, and the explanation; one answer, if they agree."""
    found = {checker.check(None, (value,), {}) is not None for checker in checkers for _ in range(2)}
    return found | {not checkers[0].explain(None, (value,), {})}


@pytest.fixture(scope="module", autouse=True)
def keeps_remembering() -> Iterator[None]:
    """The fast check remembers again after each change, however soon it comes."""
    assert fast_guards.remember_hits in ACCELERATORS
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remembered, "_SHORT_LIFE", 0.0)
        patch.setattr(remembered, "_WORTH_IT", 1)
        yield


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(roots, st.data())
def test_all_checks_agree(value: Any, data: Any) -> None:
    guards = GuardSet()
    try:
        guard(guards, value, ROOT, data.draw)
    except ValueError:
        return  # one tensor at two places of a value that was drawn
    guards.set_call_shape(1, ())
    frozen = guards.freeze()
    known, ACCELERATORS[:] = list(ACCELERATORS), []
    try:
        full = compile_checker(frozen)
    finally:
        ACCELERATORS[:] = known
    checkers = [full, compile_checker(frozen)]
    for _ in range(4):  # until the fast check remembers
        assert answers(checkers, value) == {True}, full.explain(None, (value,), {})
    for container in containers(value):
        for is_changed in changes(container):
            found = answers(checkers, value)
            assert found == {True} if not is_changed else len(found) == 1, full.source_code
    assert len(answers(checkers, copy.copy(value))) == 1
    assert len(answers(checkers, data.draw(values))) == 1
