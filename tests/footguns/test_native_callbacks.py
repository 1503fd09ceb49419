"""Native code that calls methods of the user's objects, native objects that hold state, and results of native classes.

Each program is called three times, and what it reads is changed before the third call.
"""

from __future__ import annotations

import array
import collections
import copy
import functools
import io
import itertools
import operator
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail

LOG: list[str] = []


class Iterable:
    """Items, and how many there are, by Python methods."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __iter__(self) -> Any:
        LOG.append("iter")
        return iter(self.value)

    def __len__(self) -> int:
        LOG.append("len")
        return len(self.value)


class Sequence:
    """Items by number only."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __getitem__(self, position: int) -> Any:
        LOG.append("item")
        return self.value[position]


class Number:
    """An index, and things that can be compared, added and shown."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __index__(self) -> int:
        LOG.append("index")
        return len(self.value)

    def __lt__(self, other: Number) -> bool:
        LOG.append("lt")
        return len(self.value) < len(other.value)

    def __gt__(self, other: Number) -> bool:
        LOG.append("gt")
        return len(self.value) > len(other.value)

    def __radd__(self, other: int) -> int:
        LOG.append("radd")
        return other + len(self.value)

    def __str__(self) -> str:
        LOG.append("str")
        return str(len(self.value))

    def __float__(self) -> float:
        LOG.append("float")
        return float(len(self.value))


def _extended(items: Any) -> list[Any]:
    result = [0]
    result.extend(items)
    return result


def _added(items: Any) -> list[Any]:
    result = [0]
    result += items
    return result


def _in_deque(items: Any) -> list[Any]:
    result = collections.deque([0])
    result.extend(items)
    return list(result)


def _spread(*items: Any) -> tuple[Any, ...]:
    return items


LETTERS = list("abcdefgh")
ITERATING: list[Callable[[Any], Any]] = [
    _extended,
    _added,
    _in_deque,
    lambda items: list(items),
    lambda items: (*items, 3),
    lambda items: _spread(*items),
    lambda items: sorted(items),
    lambda items: {9}.union(items),
    lambda items: {9}.isdisjoint(items),
    lambda items: list(map(str, items)),
    lambda items: dict.fromkeys(items),
    lambda items: max(items),
    lambda items: torch.tensor(list(items)).tolist(),
]
COUNTING: list[Callable[[Any], Any]] = [
    lambda number: LETTERS[number],
    lambda number: LETTERS[number:],
    lambda number: LETTERS[:number],
    lambda number: list(LETTERS).pop(number),
    lambda number: range(number),
    lambda number: "ab" * number,
    lambda number: [1] * number,
    lambda number: bin(number),
    lambda number: slice(number).indices(9),
    lambda number: torch.zeros(number).shape,
    lambda number: sum([number, number]),
    lambda number: sorted([number, Number("a")])[0].value,
    lambda number: max(number, Number("a")).value,
    lambda number: min([number, Number("abcdef")], key=lambda item: item).value,
    lambda number: [number] < [Number("abcd")],
    lambda number: list(map(str, [number])),
    lambda number: complex(number),
]


def _outcome(function: Callable[..., Any], *args: Any) -> tuple[str, list[str]]:
    LOG.clear()
    try:
        result = repr(function(*args))
    except (TypeError, ValueError, IndexError, OverflowError, AttributeError) as error:
        result = repr(error)
    return result, list(LOG)


def _compare(program: Callable[[Any], Any], make: Callable[[], Any], change: Callable[[Any], Any]) -> None:
    compiled = dovetail.compile(program, backend="aten")
    mine, plain = make(), make()
    for number in range(3):
        if number == 2:
            change(mine)
            change(plain)
        assert _outcome(compiled, mine) == _outcome(program, plain), number


@pytest.mark.filterwarnings("ignore::dovetail.errors.GraphBreakWarning")
@pytest.mark.parametrize("program", range(len(ITERATING)))
@pytest.mark.parametrize("kind", [Iterable, Sequence])
def test_native_code_goes_through_an_object(kind: type, program: int) -> None:
    _compare(ITERATING[program], lambda: kind([1, 2, 3]), lambda item: setattr(item, "value", [4, 5]))


@pytest.mark.filterwarnings("ignore::dovetail.errors.GraphBreakWarning")
@pytest.mark.parametrize("program", range(len(COUNTING)))
def test_native_code_asks_an_object_for_a_number(program: int) -> None:
    _compare(COUNTING[program], lambda: Number("abc"), lambda item: setattr(item, "value", "ab"))


@pytest.mark.parametrize("length", [0, 3, -2, 1.5, True, 2**70, None, "a"])
@pytest.mark.parametrize(
    "program", [len, bool, lambda item: not item, lambda item: 1 if item else 2, lambda item: [*item]]
)
def test_a_length_that_is_none(program: Callable[[Any], Any], length: Any) -> None:
    class Odd:
        def __len__(self) -> Any:
            return length

        def __iter__(self) -> Any:
            return iter((1, 2))

    compiled = dovetail.compile(lambda item: program(item), backend="aten")
    expected = _outcome(lambda item: program(item), Odd())
    assert _outcome(compiled, Odd()) == _outcome(compiled, Odd()) == expected


def _views(name: str) -> Callable[[], Any]:
    def make() -> Any:
        table = {"a": 1}
        return types.SimpleNamespace(view=getattr(table, name)(), table=table)

    return make


CHANGING: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "deque": (lambda: collections.deque([1, 2]), lambda item: item.append(3), lambda item: list(item)),
    "deque copied": (lambda: collections.deque([1, 2]), lambda item: item.append(3), lambda item: copy.deepcopy(item)),
    "bytearray": (lambda: bytearray(b"abc"), lambda item: item.append(3), lambda item: [one + 1 for one in item]),
    "array": (lambda: array.array("i", [1, 2]), lambda item: item.append(3), lambda item: sum(item)),
    "array copied": (lambda: array.array("i", [1]), lambda item: item.append(3), lambda item: copy.deepcopy([item])),
    "memoryview": (lambda: memoryview(bytearray(b"ab")), lambda item: item.__setitem__(0, 9), lambda item: max(item)),
    "keys": (_views("keys"), lambda item: item.table.update(b=2), lambda item: list(item.view)),
    "values": (_views("values"), lambda item: item.table.update(a=2), lambda item: list(item.view)),
    "items": (_views("items"), lambda item: item.table.update(a=2), lambda item: dict(item.view)),
    "user list": (
        lambda: collections.UserList([1, 2]),
        lambda item: item.append(3),
        lambda item: [one for one in item],
    ),
    "ordered": (
        lambda: collections.OrderedDict(a=1, b=2),
        lambda item: item.move_to_end("a"),
        lambda item: (list(dict(item)), list({**item})),
    ),
    "getter": (
        lambda: [operator.attrgetter("real")],
        lambda item: item.__setitem__(0, operator.attrgetter("imag")),
        lambda item: item[0](1j),
    ),
    "getter shown": (
        lambda: [operator.attrgetter("real")],
        lambda item: item.__setitem__(0, operator.attrgetter("imag")),
        lambda item: f"{item}",
    ),
    "partial shown": (lambda: functools.partial(max, 2), lambda item: None, lambda item: str(item)),
    "text file": (
        lambda: [io.StringIO("abc")],
        lambda item: item[0].read(1),
        lambda item: copy.deepcopy(item)[0].read(),
    ),
    "nested": (lambda: type("Pair", (tuple,), {})([1, [2]]), lambda item: item[1].append(3), lambda item: str(item)),
}


@pytest.mark.filterwarnings("ignore::dovetail.errors.GraphBreakWarning", "ignore::dovetail.errors.EagerFallbackWarning")
@pytest.mark.parametrize("name", CHANGING)
def test_an_object_with_a_state_of_its_own_has_changed(name: str) -> None:
    make, change, program = CHANGING[name]
    _compare(lambda item: program(item), make, change)


def test_an_item_that_is_missing_today() -> None:
    def at(items: list[int], x: torch.Tensor) -> torch.Tensor:
        try:
            return x * items[2]
        except IndexError:
            return x

    compiled = dovetail.compile(at, backend="aten", fullgraph=True)
    items, x = [1, 2], torch.ones(2)
    assert compiled(items, x).tolist() == [1, 1]
    items.append(7)
    assert compiled(items, x).tolist() == [7, 7]


class Count(int): ...


class Share(float): ...


class Name(str): ...


class Raw(bytes): ...


class Complex(complex): ...


class Members(frozenset): ...  # type: ignore[type-arg]


class Pair(tuple): ...  # type: ignore[type-arg]


class Table(collections.defaultdict): ...  # type: ignore[type-arg]


class Recent(collections.deque): ...  # type: ignore[type-arg]


def _labelled(value: Any) -> Any:
    value.label = "made"
    return value


MAKING: list[Callable[[torch.Tensor], Any]] = [
    lambda x: Count(x.shape[0]),
    lambda x: Share(-0.0),
    lambda x: Name(f"{x.shape[0]}"),
    lambda x: Raw(b"ab"),
    lambda x: Complex(1j),
    lambda x: Members((1, 2)),
    lambda x: _labelled(Pair((1, 2))),
    lambda x: Table(int, a=1),
    lambda x: Recent((1, 2), 3),
    lambda x: collections.deque([1, 2], maxlen=2),
    lambda x: _labelled(Count(3)),
    lambda x: _labelled(Name("a")),
    lambda x: _labelled(Table(int, a=1)),
    lambda x: _labelled(Recent((1,), 1)),
    lambda x: {Count(3): 1},
    lambda x: copy.deepcopy([Count(3), Name("b")]),
]


def _described(value: Any) -> Any:
    if type(value) in (list, dict):
        return [_described(item) for item in value]
    facts = (getattr(value, "maxlen", None), getattr(value, "default_factory", None), getattr(value, "label", None))
    return type(value), repr(value), facts


@pytest.mark.parametrize("program", range(len(MAKING)))
def test_results_of_subclasses_of_builtin_classes(program: int) -> None:
    compiled = dovetail.compile(MAKING[program], backend="aten")
    for size in (3, 4, 5):
        x = torch.ones(size)
        assert _described(compiled(x)) == _described(MAKING[program](x))


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore::dovetail.errors.GraphBreakWarning")
@pytest.mark.parametrize("backend", ["aten", "inductor"])
@pytest.mark.parametrize(
    "fill",
    [
        lambda scale, x: (torch.full((), scale), x)[1],
        lambda scale, x: x + torch.full((2,), scale),
        lambda scale, x: (x.clone().fill_(scale), x)[1],
        lambda scale, x: (torch.full((), scale * scale), x)[1],
    ],
)
@pytest.mark.once("inductor")
def test_a_number_that_is_too_great_for_the_tensor_it_fills(fill: Callable[..., Any], backend: str) -> None:
    """Eager raises at once, also where nobody reads the tensor."""

    def outcome(function: Callable[..., Any], scale: float) -> Any:
        try:
            return function(scale, torch.ones(2)).tolist()
        except RuntimeError as error:
            return str(error)

    compiled = dovetail.compile(lambda scale, x: fill(scale, x), backend=backend)
    for scale in (1.5, 2.5, 1e30, 1e60, -1e60, float("inf"), 3.5):
        assert outcome(compiled, scale) == pytest.approx(outcome(fill, scale)), scale


FACTOR = {"value": 2.0}


def _factor(name: str) -> float:
    LOG.append(name)
    return FACTOR["value"]


class Copied:
    def __init__(self, value: float) -> None:
        self.value = value

    def __deepcopy__(self, memo: Any) -> Copied:
        return Copied(self.value * _factor("deepcopy"))


class Answering:
    """Tells torch by itself what its functions mean."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> torch.Tensor:
        return torch.ones(2) * _factor("torch function")


class Doubling(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        return result * _factor("mode") if function is torch.sin else result


class Numbered:
    def __class_getitem__(cls, number: int) -> float:
        return number * _factor("class item")


class Default(dict[str, float]):
    def __getitem__(self, key: str) -> float:
        return super().__getitem__(key) + 1

    def __missing__(self, key: str) -> float:
        return _factor("missing")


class Items(list[Any]):
    """Goes through other items than it holds."""

    def __iter__(self) -> Any:
        return iter([item * _factor("iter") for item in list.__iter__(self)])

    def __len__(self) -> int:
        return int(_factor("len"))


class Counted:
    """An iterator."""

    def __init__(self) -> None:
        self.number = 0

    def __iter__(self) -> Counted:
        return self

    def __next__(self) -> float:
        self.number += 1
        if self.number > _factor("next"):
            raise StopIteration
        return float(self.number)


class Several:
    def __iter__(self) -> Any:
        yield from range(int(_factor("several")))


class AtPlaces:
    def __getitem__(self, place: int) -> float:
        if place >= _factor("place"):
            raise IndexError
        return place + 1.0


def _in_mode(x: torch.Tensor) -> torch.Tensor:
    with Doubling():
        y = torch.sin(x)
    return y + torch.sin(x)


def _appended(x: torch.Tensor) -> Any:
    items = Items([x])
    items.append(x + 1)
    return items[0], items[1], sum(items), len(items)


def _returned(x: torch.Tensor) -> Any:
    items = Items([x, x + 1])
    items.insert(0, x * 3)
    return items


THROUGH: dict[str, Callable[[Any], Any]] = {
    "a chain": lambda kind: itertools.chain(kind(), [1.0], kind()),
    "a chain of all": lambda kind: itertools.chain.from_iterable([kind(), (1.0,)]),
    "an endless chain": lambda kind: itertools.islice(
        itertools.chain.from_iterable(kind() for _ in itertools.count()), 5
    ),
    "pairs": lambda kind: (one * other for one, other in itertools.zip_longest(kind(), [3.0], fillvalue=2.0)),
    "some": lambda kind: itertools.compress(kind(), itertools.cycle([1, 0, 1])),
    "sums": lambda kind: itertools.accumulate(kind()),
    "groups": lambda kind: [key for key, _ in itertools.groupby(kind(), lambda item: item // 2)],
    "a cycle": lambda kind: itertools.islice(itertools.cycle(kind()), 7),
    "the first ones": lambda kind: itertools.takewhile(lambda item: item < 3, kind()),
    "a reduction": lambda kind: [functools.reduce(lambda one, other: one * 2 + other, kind())],
}
OWN_CODE: dict[str, Callable[[torch.Tensor], Any]] = {
    "a copy": lambda x: x * copy.deepcopy([Copied(1.0)])[0].value,
    "a copy in an object": lambda x: x * copy.deepcopy(types.SimpleNamespace(item=Copied(1.0))).item.value,
    "an object that torch asks": lambda x: torch.add(Answering(), x),  # type: ignore[call-overload]
    "a mode": _in_mode,
    "an item of a class": lambda x: x * Numbered[3],  # type: ignore[type-arg]
    "a missing key": lambda x: x * Default(a=1.0)["b"] + Default(a=1.0)["a"],
    "a missing key of a chain": lambda x: x * collections.ChainMap(Default(), Default(a=3.0))["a"],
    "items of its own": _appended,
    **{
        f"{kind.__name__} in {name}": lambda x, kind=kind, through=through: x * sum(through(kind))  # type: ignore[misc]
        for kind in (Counted, Several, AtPlaces)
        for name, through in THROUGH.items()
    },
    "items of its own are returned": _returned,
}


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore::dovetail.errors.GraphBreakWarning", "ignore::dovetail.errors.EagerFallbackWarning")
@pytest.mark.parametrize("name", OWN_CODE)
def test_code_of_the_programs_own_reads_what_has_changed_and_writes(name: str) -> None:
    program, x = OWN_CODE[name], torch.tensor([0.5, 1.5])

    def outcomes(run: Callable[[torch.Tensor], Any]) -> list[Any]:
        found = []
        for FACTOR["value"] in (2.0, 2.0, 3.0, 2.0):
            LOG.clear()
            result = run(x)
            found.append((type(result), list.__str__(result) if isinstance(result, list) else str(result), list(LOG)))
        return found

    assert outcomes(dovetail.compile(program, backend="aten")) == outcomes(program)
