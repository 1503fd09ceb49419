"""Classes and objects."""

# ruff: noqa: E501, F821, F841

from __future__ import annotations

import abc
import dataclasses
import enum
import functools
import itertools
import os
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from tests.frontend.language.cases import case
from tests.frontend.language.expressions import PointOf


@case(breaks="a class is defined")
def class_in_a_function(x: Any) -> Any:
    scale = 3

    class Base:
        factor = scale * 2
        table: typing.ClassVar[dict[str, int]] = {name: len(name) for name in ("a", "bb")}

        def __init__(self, value: Any) -> None:
            self.value = value

        def work(self) -> Any:
            return self.value * self.factor + scale

        @property
        def twice(self) -> Any:
            return self.value * 2

        @classmethod
        def make(cls, value: Any) -> Any:
            return cls(value)

        @staticmethod
        def add(a: Any, b: Any) -> Any:
            return a + b

    class Child(Base):
        factor = Base.factor + 1

        def work(self) -> Any:
            return super().work() + 1

        @classmethod
        def make(cls, value: Any) -> Any:
            return super().make(value * 2)

    child = Child.make(x)
    return (
        child.work(),
        child.twice,
        Child.add(1, x),
        Base.table,
        isinstance(child, Base),
        Child.__name__,
        Child.__mro__[1] is Base,
    )


class Columns:
    first = 1

    @classmethod
    @property
    def place(cls) -> int:
        return cls.first

    @classmethod
    @property
    def both(cls) -> slice:
        return slice(cls.first, cls.first + 2)


class LaterColumns(Columns):
    first = 0


@case
def properties_of_classes(x: Any) -> Any:
    # Python 3.11 and 3.12 bind what a class method holds; later ones make a method of it.
    found = [kind.place for kind in (Columns, LaterColumns)], Columns().place, LaterColumns.both
    return x * (found[0][0] + 1 if isinstance(found[0][0], int) else 3), isinstance(found[1], int), found[0][1] == 0


@case(breaks="a class is defined")
def class_body_names(x: Any) -> Any:
    enclosing = "outer"

    class Body:
        first = enclosing
        name = "inner"
        second = name
        third = [i for i in range(2)]
        for index in range(3):
            pass
        del index
        try:
            fourth = missing  # type: ignore[name-defined]  # noqa: F821
        except NameError:
            fourth = "caught"
        annotated: int = 3
        only: str

    return x, Body.first, Body.second, Body.third, Body.fourth, hasattr(Body, "index"), sorted(Body.__annotations__)


@case(breaks="a class is defined")
def class_decorator_and_metaclass(x: Any) -> Any:
    log: list[Any] = []

    class Meta(type):
        @classmethod
        def __prepare__(mcs, name: str, bases: Any, **kwargs: Any) -> Any:
            log.append(("prepare", name, kwargs))
            return {"prepared": 1}

        def __new__(mcs, name: str, bases: Any, namespace: Any, **kwargs: Any) -> Any:
            log.append(("new", name))
            return super().__new__(mcs, name, bases, namespace)

        def __init__(cls, name: str, bases: Any, namespace: Any, **kwargs: Any) -> None:
            log.append(("init", name, kwargs))
            super().__init__(name, bases, namespace)

        def __call__(cls, *args: Any) -> Any:
            log.append("call")
            return super().__call__(*args)

    def tagged(cls: Any) -> Any:
        cls.tag = "t"
        return cls

    @tagged
    class Thing(metaclass=Meta, flag=1):
        def __init__(self, value: Any) -> None:
            self.value = value

    thing = Thing(x)
    return thing.value * 2, Thing.tag, Thing.prepared, type(Thing).__name__, log


class Typed:
    """A descriptor that is told its name."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = "_" + name

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self
        return getattr(instance, self.name, "unset")

    def __set__(self, instance: Any, value: Any) -> None:
        setattr(instance, self.name, value)


@case(breaks="a class is defined")
def set_name_and_descriptors(x: Any) -> Any:
    class Holder:
        one = Typed()
        two = Typed()

        def __init__(self, one: Any) -> None:
            self.one = one

    holder = Holder(x)
    before = holder.two
    holder.two = 2
    return holder.one, before, holder.two, Holder.__dict__["two"].name, sorted(vars(holder))


class Registered:
    """A class that keeps track of its subclasses."""

    known: typing.ClassVar[list[str]] = []

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__()
        cls.option = kwargs.get("option")


@case(breaks="a class is defined")
def init_subclass(x: Any) -> Any:
    class Child(Registered, option=3):
        pass

    return x * 2, Child.option


@case(breaks="a class is defined")
def abstract_class_in_a_function(x: Any) -> Any:
    class Shape(abc.ABC):
        @abc.abstractmethod
        def area(self) -> Any: ...

    class Square(Shape):
        def area(self) -> Any:
            return x * 2

    try:
        Shape()  # type: ignore[abstract]
    except TypeError:
        return Square().area(), isinstance(Square(), Shape)


@case(breaks="a class is defined")
def dataclass_in_a_function(x: Any) -> Any:
    @dataclass
    class Pair:
        a: Any
        b: int = 2

        def total(self) -> Any:
            return self.a * self.b

    return Pair(x).total(), Pair(1, 2) == Pair(1, 2), [item.name for item in dataclasses.fields(Pair)]


@case(breaks="a class is defined")
def enum_in_a_function(x: Any) -> Any:
    class Level(enum.IntEnum):
        LOW = 1
        HIGH = 2

    return x * Level.HIGH, Level(1).name, [item.value for item in Level], Level["LOW"] < Level.HIGH


@case(breaks="a class is defined")
def named_tuple_in_a_function(x: Any) -> Any:
    class Pair(NamedTuple):
        a: Any
        b: int = 2

    pair = Pair(x)
    a, b = pair
    return a * b, pair.b, pair._fields, pair._replace(b=5)[1]


@case(breaks="a class is defined")
def type_with_three_arguments(x: Any) -> Any:
    made = type("Made", (PointOf,), {"c": 3, "total": lambda self: self.a * self.c})
    return made(x, 1).total(), made.__name__, issubclass(made, PointOf)


@case(breaks="a class is defined")
def exception_class_in_a_function(x: Any) -> Any:
    class Stop(Exception):
        pass

    try:
        for index in itertools.count():
            x = x + index
            if index == 3:
                raise Stop
    except Stop:
        return x


class Cooperative:
    def work(self, x: Any) -> list[Any]:
        return ["root"]


class Left(Cooperative):
    def work(self, x: Any) -> list[Any]:
        return ["left", x * 2, *super().work(x)]


class Right(Cooperative):
    value = 4

    def work(self, x: Any) -> list[Any]:
        return ["right", *super(Right, self).work(x)]


class Bottom(Left, Right):
    """A diamond."""

    @property
    def value(self) -> Any:  # type: ignore[override]
        return super().value + 1

    def work(self, x: Any) -> list[Any]:
        parent = super()
        return ["bottom", *parent.work(x)]


@case
def super_in_a_diamond(x: Any) -> Any:
    item = Bottom()
    try:
        super(Left, item).nothing  # noqa: B018
    except AttributeError as error:
        return item.work(x), item.value, type(error).__name__


class Dynamic:
    """Attributes that are computed."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.real = 1

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        self.log.append(name)
        return len(name)


class Intercepting:
    def __init__(self, x: Any) -> None:
        self.x = x

    def __getattribute__(self, name: str) -> Any:
        if name == "double":
            return object.__getattribute__(self, "x") * 2
        return super().__getattribute__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        super().__setattr__("last", name)


@case
def attribute_hooks(x: Any) -> Any:
    item = Dynamic()
    other = Intercepting(x)
    other.y = 3  # type: ignore[attr-defined]
    return (
        item.abc, item.real, getattr(item, "_no", "default"), hasattr(item, "_no"), item.log, other.double, other.x,
        other.last,  # type: ignore[attr-defined]
    )  # fmt: skip


class Tracked:
    """A property with all three functions."""

    def __init__(self, x: Any) -> None:
        self._x = x
        self.deleted = False

    @property
    def x(self) -> Any:
        return self._x

    @x.setter
    def x(self, value: Any) -> None:
        self._x = value * 2

    @x.deleter
    def x(self) -> None:
        self.deleted = True


@case(breaks="is deleted")
def properties(x: Any) -> Any:
    item = Tracked(x)
    item.x = x + 1
    item.x += 1
    del item.x
    try:
        type("P", (), {"p": property(lambda self: 1)})().p = 3
    except AttributeError:
        return item.x, item.deleted


class Meta(type):
    """A metaclass with behaviour on its classes."""

    instances = 0

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        made = super().__call__(*args, **kwargs)
        made.tagged = True
        return made

    def __len__(cls) -> int:
        return 7

    def __getitem__(cls, key: Any) -> Any:
        return (cls.__name__, key)

    def __contains__(cls, item: Any) -> bool:
        return item == "member"

    def __iter__(cls) -> Iterator[int]:
        return iter((1, 2))

    @property
    def label(cls) -> str:
        return "label " + cls.__name__


class WithMeta(metaclass=Meta):
    def __init__(self, x: Any) -> None:
        self.x = x

    def __class_getitem__(cls, key: Any) -> Any:
        return "not reached: the metaclass goes first"


@case
def metaclass_behaviour(x: Any) -> Any:
    item = WithMeta(x)
    return item.x * 2, item.tagged, len(WithMeta), WithMeta["k"], "member" in WithMeta, list(WithMeta), WithMeta.label  # type: ignore[attr-defined]


class Slotted:
    __slots__ = ("a", "b")

    def __init__(self, a: Any) -> None:
        self.a = a


@case
def slots(x: Any) -> Any:
    item = Slotted(x)
    item.a = item.a * 2
    seen: list[Any] = []
    for name in ("b", "c"):
        try:
            seen.append(getattr(item, name))
        except AttributeError:
            seen.append("unset")
    try:
        item.c = 1  # type: ignore[attr-defined]
    except AttributeError:
        seen.append("refused")
    return item.a, seen


class Number:
    """All the special methods of a number and a container."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __index__(self) -> int:
        return int(self.value)

    def __bool__(self) -> bool:
        return self.value != 0

    def __len__(self) -> int:
        return 3

    def __contains__(self, item: Any) -> bool:
        return bool(item == self.value)

    def __iter__(self) -> Iterator[Any]:
        yield self.value
        yield self.value + 1

    def __reversed__(self) -> Iterator[Any]:
        yield "reversed"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.value, args, kwargs

    def __hash__(self) -> int:
        return hash(self.value)

    def __eq__(self, other: Any) -> Any:
        return isinstance(other, Number) and self.value == other.value

    def __lt__(self, other: Any) -> Any:
        return self.value < getattr(other, "value", other)

    def __add__(self, other: Any) -> Any:
        return NotImplemented if isinstance(other, str) else Number(self.value + getattr(other, "value", other))

    def __radd__(self, other: Any) -> Any:
        return Number(other + self.value)

    def __sub__(self, other: Any) -> Any:
        return ("sub", other)

    def __rsub__(self, other: Any) -> Any:
        return ("rsub", other)

    def __iadd__(self, other: Any) -> Any:
        self.value = self.value + other
        return self

    def __neg__(self) -> Any:
        return Number(-self.value)

    def __invert__(self) -> Any:
        return "inverted"

    def __abs__(self) -> Any:
        return "abs"

    def __round__(self, digits: int | None = None) -> Any:
        return ("round", digits)

    def __getitem__(self, key: Any) -> Any:
        return ("get", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.set = (key, value)

    def __delitem__(self, key: Any) -> None:
        self.deleted = key

    def __matmul__(self, other: Any) -> Any:
        return ("matmul", other)

    def __rmatmul__(self, other: Any) -> Any:
        return ("rmatmul", other)

    def __floordiv__(self, other: Any) -> Any:
        return ("floordiv", other)

    def __ifloordiv__(self, other: Any) -> Any:
        return ("ifloordiv", other)

    def __xor__(self, other: Any) -> Any:
        return ("xor", other)

    def __rpow__(self, other: Any) -> Any:
        return ("rpow", other)

    def __divmod__(self, other: Any) -> Any:
        return ("divmod", other)

    def __int__(self) -> int:
        return 40

    def __float__(self) -> float:
        return 4.5

    def __complex__(self) -> complex:
        return 1j

    def __str__(self) -> str:
        return "number"


@case
def special_methods(x: Any) -> Any:
    a, b = Number(2), Number(5)
    c = Number(1)
    c += 4
    c[1:2] = "v"
    c["k"] = x
    del c["d"]
    d = Number(1)
    d //= 3
    return (
        [10, 20, 30, 40][a], bool(Number(0)), len(a), 2 in a, list(a), list(reversed(a)), a(1, k=x),  # type: ignore[call-overload]
        hash(a) == hash(2), a == Number(2), a != b, a < b, a > b, (a + b).value, (a + 1).value, (1 + a).value, sum([a, b]).value,  # type: ignore[operator, type-var, attr-defined]
        a - 1, 1 - a, c.value, c.set, c.deleted, (-a).value, ~a, abs(a), round(a), round(a, 2), a["key"], a[1:2], a @ 3, 3 @ a,  # type: ignore[call-overload]
        a // 2, d, a ^ 1, 2 ** a, divmod(a, 3), int(a), float(a), complex(a), str(a), "1" + str(a), {a: 1}[Number(2)],
        sorted([b, a])[0].value, max(a, b).value, not a, a and 1, range(a), "x" * a, bin(a),
    )  # fmt: skip


@case(breaks="a class is defined")
def reflected_on_failure(x: Any) -> Any:
    try:
        Number(1) + "text"  # noqa: B018
    except TypeError as error:
        kind = type(error).__name__

    class Base:
        def __add__(self, other: Any) -> str:
            return "base add"

        def __radd__(self, other: Any) -> str:
            return "base radd"

    class Derived(Base):
        def __radd__(self, other: Any) -> str:
            return "derived radd"

    return x, kind, Base() + Derived(), Derived() + Base(), 1 + Base()


class SequenceByItem:
    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


class Counted:
    def __init__(self, limit: int) -> None:
        self.left = limit

    def __iter__(self) -> Counted:
        return self

    def __next__(self) -> int:
        if not self.left:
            raise StopIteration
        self.left -= 1
        return self.left


@case
def iteration_protocols(x: Any) -> Any:
    old = SequenceByItem([1, x, 3])
    a, b, c = Counted(3)
    return (
        list(old), 3 in SequenceByItem([1, 3]), list(Counted(2)), a, b, c, list(zip(Counted(2), old, strict=False)), [*Counted(3)],
        dict(enumerate("ab")), list(map(lambda p, q: p * q, [1, 2], [x, x])), list(filter(None, [0, 1, 2])), sum(Counted(4)),
        min([3, 1, 2], key=lambda v: -v), sorted("bca", reverse=True), tuple(reversed([1, 2])), iter([1]).__next__(),
        list(iter(functools.partial(next, iter([1, 2, 9, 3])), 9)), next(iter([]), "default"),
    )  # fmt: skip


class Bunch:
    """Its properties have the names of what is in the object, as in SciPy's results."""

    __slots__ = ("__dict__", "place")

    def __init__(self, first: Any, second: Any) -> None:
        self.__dict__["first"] = first
        self.__dict__["second"] = second
        self.place = 3

    @property
    def first(self) -> Any:
        return self.__dict__["first"]

    @property
    def second(self) -> Any:
        return self.__dict__["second"] * 2

    @second.setter
    def second(self, value: Any) -> None:
        raise AssertionError("set")


@case
def properties_over_attributes(x: Any) -> Any:
    bunch = Bunch(x + 1, 3)
    bunch.__dict__["first"] = x * 2
    return bunch.first, bunch.second, bunch.place, bunch


class Doubling:
    """A descriptor that is written to, and never asked."""

    def __set__(self, owner: Any, value: Any) -> None:
        owner.__dict__["field"] = owner.__dict__.get("field", 0) + value * 2


class Undeletable:
    """A data descriptor without ``__set__``: it comes before the object's dictionary."""

    def __get__(self, owner: Any, kind: Any) -> int:
        return 5

    def __delete__(self, owner: Any) -> None:
        raise AssertionError("deleted")


class Described:
    field = Doubling()
    fixed = Undeletable()

    def __init__(self) -> None:
        self.__dict__["fixed"] = 7


DESCRIBED = Described()


@case
def descriptors_with_one_half(x: Any) -> Any:
    new = Described()
    new.field = 3
    new.field = x
    DESCRIBED.__dict__["field"] = 1
    DESCRIBED.field = 10
    return new.field + 1, new.fixed, new.__dict__["fixed"], new, DESCRIBED.field, DESCRIBED.fixed


class Answers:
    """Its own methods answer with what it was given."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def __int__(self) -> Any:
        return self.answer

    __float__ = __complex__ = __bytes__ = __hash__ = __iter__ = __fspath__ = __int__  # type: ignore[assignment]

    def __format__(self, specification: str) -> Any:
        return self.answer


@case
def answers_of_own_methods(x: Any) -> Any:
    """What builtin functions make of them: hashes are folded into a word, wrong types are errors."""
    found: list[Any] = [x]
    for function in (int, float, complex, bytes, hash, iter, os.fspath, format, lambda item: f"{item}"):
        for answer in (3, -1, 2**70, 2.5, 2j, b"b", "text", None, [1]):
            try:
                made = function(Answers(answer))
                found.append(made if function is not iter else list(made))
            except TypeError as error:
                found.append(str(error))
    return found


class Unhashable(int):
    def __eq__(self, other: object) -> bool:
        return isinstance(other, int) and int(self) + 1 == other

    __hash__ = None  # type: ignore[assignment]


@case(breaks="print")
def numbers_without_a_hash(x: Any) -> Any:
    number, numbers = Unhashable(3), [Unhashable(4), 5]
    print(end="")
    return x * int(number), number == 4, number != 3, numbers[0] == numbers[1], type(number).__name__


OLD_TUPLE, OLD_SET = (1, [2]), frozenset({1, 2})


@case
def copies_of_what_cannot_change(x: Any) -> Any:
    """Python hands out the same object."""
    new, made = (x, 1), frozenset({3, 4})
    copies = [tuple(new) is new, frozenset(made) is made, tuple(OLD_TUPLE) is OLD_TUPLE, frozenset(OLD_SET) is OLD_SET]
    others = [tuple([1]) == (1,), set(made) == made, list(new) is new, tuple(list(new)) is new]
    return copies, others, tuple(OLD_TUPLE)[1] is OLD_TUPLE[1], tuple(new)[0], frozenset(OLD_SET) | made
