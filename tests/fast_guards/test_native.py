"""Guards that are asked in C++ see what the full check sees."""

from __future__ import annotations

import collections
import dataclasses
import enum
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail
from dovetail.fast_guards import generator
from dovetail.fast_guards.native import NativeWriter
from dovetail.fast_guards.remembered import Recorder
from dovetail.guards import checker
from dovetail.guards.source import AttributeSource
from dovetail.reports.explanation import compiled_function
from dovetail.torch_private import guard_managers as private_guard_managers
from dovetail.torch_private.state import torch_function_switches

pytestmark = pytest.mark.skipif(
    not (private_guard_managers.sees_changed_dictionaries() and private_guard_managers.has_native_guards()),
    reason="this torch or Python cannot remember hits, or has no C++ guards of this kind",
)

MANY = tuple(f"absent_{number}" for number in range(30))


def program() -> types.SimpleNamespace:
    """A function that reads a bit of everything, and what it reads; all of it fresh, because it gets changed."""
    amount = [2.0]

    class Base:
        rate: Any = 2.0
        table: Any = {"a": 1.0, "b": 2.0}  # noqa: RUF012
        order: Any = collections.OrderedDict(a=1.0)

        @staticmethod
        def scale(x: torch.Tensor, by: Any = 3.0, /, *, more: Any = 1.0) -> torch.Tensor:
            return x * by * more

    class Middle(Base):
        pass

    class Derived(Middle):
        def mix(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.rate + len(self.table)

    @dataclasses.dataclass
    class Record:
        first: Any = 1.0
        second: Any = 2.0

    class Settings:
        level: Any = 1.0

    def helper(x: torch.Tensor, by: Any = 2.0) -> torch.Tensor:
        return x * by + amount[0]

    shared, settings = helper, Settings()
    # It hides the one of the class, of which only the type matters: a descriptor would come first.
    settings.level = 3.0

    def function(x: torch.Tensor) -> torch.Tensor:
        x = helper(x) + Derived().mix(x) + Base.scale(x)
        for name in MANY:
            if name in Derived.table or hasattr(Derived, name):
                x = x + 1
        if "c" not in Base.order:
            x = x * 2
        x = x + len(dataclasses.fields(Record)) + Derived.table["a"] + settings.level
        return x * 3 if shared is helper else x

    return types.SimpleNamespace(
        **{name: value for name, value in locals().items() if name != "function"}, run=function
    )


def _cell(function: Callable[..., Any], name: str) -> Any:
    return function.__closure__[function.__code__.co_freevars.index(name)]  # type: ignore[index]


def _other_helper(p: Any) -> None:
    _cell(p.run, "helper").cell_contents = lambda x: x * 7


CHANGES: dict[str, Callable[[Any], None]] = {
    "code": lambda p: setattr(p.Derived.mix, "__code__", (lambda self, x: x * 5).__code__),
    "default": lambda p: setattr(p.helper, "__defaults__", (4.0,)),
    "default of another type": lambda p: setattr(p.helper, "__defaults__", (2,)),
    "keyword default": lambda p: setattr(p.Base.scale, "__kwdefaults__", {"more": 2.0}),
    "content of a cell": lambda p: p.amount.__setitem__(0, 5.0),
    "another cell content": _other_helper,
    "attribute of a base": lambda p: setattr(p.Base, "rate", 4.0),
    "attribute in between": lambda p: setattr(p.Middle, "rate", 5.0),
    "late attribute": lambda p: setattr(p.Derived, MANY[3], True),
    "late attribute of a base": lambda p: setattr(p.Base, MANY[-1], True),
    "item of a class's table": lambda p: p.Base.table.__setitem__("a", 3.0),
    "late item of a class's table": lambda p: p.Base.table.__setitem__(MANY[0], 3.0),
    "order of a class's table": lambda p: p.Base.table.__setitem__("b", p.Base.table.pop("b")),
    "late item of an ordered table": lambda p: p.Base.order.__setitem__("c", 3.0),
    "another static method": lambda p: setattr(p.Base, "scale", staticmethod(lambda x: x)),
    "bases": lambda p: setattr(p.Derived, "__bases__", (type("Other", (p.Middle,), {"rate": 9.0}),)),
    "fields": lambda p: p.Record.__dataclass_fields__.pop("second"),
    "value behind an attribute": lambda p: setattr(p.Settings, "level", 7.0),
    "descriptor before an attribute": lambda p: setattr(p.Settings, "level", property(lambda self: 9.0)),
    "slot of a field": lambda p: setattr(p.Record.__dataclass_fields__["first"], "_field_type", None),
}


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[NativeWriter]:
    """The writers that were used."""
    writers: list[NativeWriter] = []

    class Noted(NativeWriter):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            writers.append(self)

    monkeypatch.setattr(generator, "NativeWriter", Noted)
    return writers


@pytest.mark.sampled(2)
@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_is_seen(change: str, taken: list[NativeWriter]) -> None:
    p = program()
    compiled: Any = dovetail.compile(p.run, backend="aten")
    x = torch.arange(3.0)
    for _ in range(6):
        assert torch.equal(compiled(x), p.run(x))
    assert taken and taken[-1].count >= 3
    assert taken[-1].make_check()(), "a guard that C++ cannot ask leaves all of them to Python"
    CHANGES[change](p)
    for _ in range(6):
        assert torch.equal(compiled(x), p.run(x))


OTHER_PROGRAM = """
class Above(type): pass
class Beside(type):
    other = property(lambda cls: 8.0)
class Meta(Above): pass
class Later(Meta):
    own = property(lambda cls: 9.0)
class Base(metaclass=Meta):
    other = 2.0
    table = {"a": 1.0, "b": 2.0}
    @staticmethod
    def scale(x): return x * 3
class Derived(Base):
    own = 3
class Marker: pass
class Mode(Marker, enum.Enum):
    FIRST = "first"
    SECOND = "second"
class OtherMode(Marker):
    def __get__(self, *of): return None
class OtherModule(types.ModuleType):
    amount = property(lambda module: 6.0)
chosen = [Mode.FIRST]
module = types.ModuleType("module")
module.inner, module.inner.amount = types.ModuleType("inner"), 2.0
def helper(x): return x + module.inner.amount
def run(x):
    x = helper(x) * Derived.own + Derived.other + Base.other * Derived.table["a"]
    x = x + 1 if chosen[0] is Mode.FIRST else x - 1
    return Derived.scale(x) * len(helper.__name__)
"""


def other_program() -> types.SimpleNamespace:
    """A function that reads attributes of classes with a metaclass, of an enumeration and of a module, and the name of a function.

    All of it is global, and so at hand as constants.
    """
    names: dict[str, Any] = {"enum": enum, "types": types, "__name__": "program"}
    exec(OTHER_PROGRAM, names)
    return types.SimpleNamespace(**names)


OTHER_CHANGES: dict[str, Callable[[Any], None]] = {
    "nothing": lambda p: None,
    "property of the metaclass": lambda p: setattr(p.Meta, "own", property(lambda cls: 5.0)),
    "property of the metaclass for an inherited one": lambda p: setattr(p.Meta, "other", property(lambda cls: 5.0)),
    "property of a base of the metaclass": lambda p: setattr(p.Above, "own", property(lambda cls: 5.0)),
    "property of the metaclass in place of a table": lambda p: setattr(
        p.Meta, "table", property(lambda cls: {"a": 7.0})
    ),
    "property of the metaclass in place of a function": lambda p: setattr(
        p.Meta, "scale", property(lambda cls: torch.neg)
    ),
    "plain attribute of the metaclass": lambda p: setattr(p.Meta, "own", 5.0),
    "another metaclass": lambda p: setattr(p.Derived, "__class__", p.Later),
    "another base of the metaclass": lambda p: setattr(p.Meta, "__bases__", (p.Beside, p.Above)),
    "the class's own": lambda p: setattr(p.Derived, "own", 7.0),
    "the base's": lambda p: setattr(p.Base, "other", 7.0),
    "in front of the base's": lambda p: setattr(p.Derived, "other", 7.0),
    "item of a table": lambda p: p.Base.table.__setitem__("a", 7.0),
    "name of a function": lambda p: setattr(p.helper, "__name__", "other name"),
    "chosen member": lambda p: p.chosen.__setitem__(0, p.Mode.SECOND),
    "member": lambda p: type.__setattr__(p.Mode, "FIRST", p.Mode.SECOND),
    "binding of a member": lambda p: setattr(p.Mode, "__get__", lambda *of: None),
    "binding of a member by a base": lambda p: setattr(p.Marker, "__get__", lambda *of: None),
    "class of a member": lambda p: setattr(p.Mode.FIRST, "__class__", p.OtherMode),
    "attribute of a module": lambda p: setattr(p.module.inner, "amount", 7.0),
    "another module": lambda p: setattr(p.module, "inner", types.SimpleNamespace(amount=7.0)),
    "class of a module": lambda p: setattr(p.module.inner, "__class__", p.OtherModule),
}


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore:.*runs eagerly")
@pytest.mark.parametrize("change", OTHER_CHANGES)
@pytest.mark.parametrize("remembers", [True, False])
def test_what_changes_in_classes_and_modules_is_seen(
    change: str, remembers: bool, taken: list[NativeWriter], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by the full check: it is the one that decides where nothing is remembered."""
    monkeypatch.setattr(Recorder, "is_worth_it", lambda self: True)
    if not remembers:
        monkeypatch.setattr(checker, "ACCELERATORS", [])
    p = other_program()
    compiled: Any = dovetail.compile(p.run, backend="aten")
    x = torch.arange(3.0)
    for _ in range(6):
        assert torch.equal(compiled(x), p.run(x))
    assert bool(taken) is remembers
    (entry,) = compiled_function(compiled).entries
    owners = [getattr(value, "__self__", None) for value in entry.checker.check.__globals__.values()]
    slowly = {owner.attribute for owner in owners if isinstance(owner, AttributeSource)}
    assert slowly <= {"scale"} | ({"FIRST"} if not remembers else set()), "read by a function in Python"
    OTHER_CHANGES[change](p)
    for _ in range(6):
        assert torch.equal(compiled(x), p.run(x))


def test_a_changed_default_is_a_recompile_with_its_reason() -> None:
    p = program()
    compiled: Any = dovetail.compile(p.run, backend="aten")
    x = torch.arange(3.0)
    for _ in range(6):
        compiled(x)
    p.helper.__defaults__ = (8.0,)
    assert torch.equal(compiled(x), p.run(x))
    assert len(compiled_function(compiled).entries) == 2


def test_two_sources_of_one_object() -> None:
    guards = private_guard_managers.NativeGuards()
    one = object()
    pair, table = [one], {"key": one}
    guards.at(pair).item(list, 0, one).is_same_as(guards.at(table).item(dict, "key", one))
    holds = guards.make_check()
    assert holds() and holds()
    table["key"] = object()
    assert not holds() and not holds()
    pair[0] = table["key"]
    assert holds()


def test_a_missing_value_is_a_miss_and_no_error() -> None:
    def function(number: Any = 1) -> Any:
        return number

    guards = private_guard_managers.NativeGuards()
    guards.at(function).attribute("__defaults__", function.__defaults__).item(tuple, 0, 1).equals(1)
    holds = guards.make_check()
    for defaults in (None, (), (True,), (1.0,), ([],)):
        function.__defaults__ = defaults
        assert not holds()
    function.__defaults__ = (1,)
    assert holds()


def test_what_is_compared_by_address_stays_alive() -> None:
    def function() -> None:
        """Has a code object of its own."""

    guards = private_guard_managers.NativeGuards()
    guards.at(function).attribute("__code__", function.__code__).is_object(function.__code__)
    holds = guards.make_check()
    address = id(function.__code__)
    del guards
    others = []
    for number in range(50):
        function.__code__ = eval(f"lambda: {number}").__code__
        others.append(function.__code__)
        assert id(function.__code__) != address
        assert not holds()


@pytest.mark.parametrize("later", [None, 3, [1], (("key", "text"),)])
def test_what_was_a_dictionary_is_none_any_more(later: Any) -> None:
    """Torch's own check raises there from Python 3.12 on, and leaves torch functions disabled."""
    owner, items = types.SimpleNamespace(place={"key": "text"}), [{"key": "text"}]
    guards = private_guard_managers.NativeGuards()
    at = guards.at(owner).own_dict(vars(owner)).item(dict, "place", owner.place)
    at.item(dict, "key", "text").equals("text")
    guards.at(items).item(list, 0, items[0]).item(dict, "key", "text").equals("text")
    holds = guards.make_check()
    assert holds() and holds()
    items[0] = later
    assert not holds() and torch_function_switches() == (True, False)
    owner.place = later
    assert not holds() and torch_function_switches() == (True, False)


@pytest.mark.parametrize(
    ("change", "undo"),
    [
        (lambda tables: tables["empty"].update(late=1), lambda tables: tables["empty"].clear()),
        (lambda tables: tables["filled"].update(rate=3.0), lambda tables: tables["filled"].update(rate=2.0)),
        (lambda tables: tables["filled"].update(late=1), lambda tables: tables["filled"].pop("late")),
        (lambda tables: tables["filled"]["inner"].update(late=1), lambda tables: tables["filled"]["inner"].clear()),
        (lambda tables: tables["items"].append(3), lambda tables: tables["items"].pop()),
        (lambda tables: setattr(tables["text"], "rate", 3.0), lambda tables: setattr(tables["text"], "rate", 2.0)),
        (
            lambda tables: setattr(tables["pair"][0], "rate", 3.0),
            lambda tables: setattr(tables["pair"][0], "rate", 2.0),
        ),
    ],
)
def test_containers_in_globals_change(
    change: Callable[[dict[str, Any]], Any], undo: Callable[[dict[str, Any]], Any]
) -> None:
    helpers = "".join(f"def helper_{number}(x):\n    return x + {number}\n" for number in range(12))
    calls = "".join(f"    x = helper_{number}(x)\n" for number in range(12))
    source = f"""
class Text(str):
    rate = 2.0

text, pair, empty, filled, items = Text(), (Text(),), {{}}, {{"rate": 2.0, "inner": {{}}}}, [1]
text.rate = pair[0].rate = 2.0
{helpers}
def function(x):
{calls}
    rates = filled["rate"], text.rate, pair[0].rate
    return [x * filled["rate"], rates, dict(empty), "late" in filled, list(filled["inner"].values()), len(items)]
"""
    scope: dict[str, Any] = {"__name__": __name__}
    exec(source, scope)
    function = scope["function"]
    compiled = dovetail.compile(function, backend="aten")
    x = torch.ones(3)
    for _ in range(2):
        for _ in range(4):
            compiled(x)
        change(scope)
        found, expected = compiled(x), function(x)
        assert found[1:] == expected[1:]
        assert torch.equal(found[0], expected[0])
        undo(scope)
