"""The standard library."""

# ruff: noqa: E501, F821, F841

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import itertools
import logging
import math
import operator
import typing
import warnings
from dataclasses import dataclass
from typing import Any, NamedTuple

from tests.frontend.language.cases import case
from tests.frontend.language.expressions import Shade


@functools.lru_cache(maxsize=None)
def cached_square(n: int) -> int:
    """A cached pure function."""
    return n * n


class Lazy:
    def __init__(self, x: Any) -> None:
        self.x = x
        self.runs = 0

    @functools.cached_property
    def doubled(self) -> Any:
        self.runs += 1
        return self.x * 2

    def scale(self, x: Any, factor: int = 2) -> Any:
        return x * factor

    triple = functools.partialmethod(scale, factor=3)


@functools.singledispatch
def describe_type(value: Any) -> str:
    """A generic function."""
    return "other"


@describe_type.register
def _(value: int) -> str:
    return "int"


@describe_type.register(list)
def _(value: Any) -> str:
    return f"list of {describe_type(value[0])}"


@functools.total_ordering
class Ordered:
    def __init__(self, value: int) -> None:
        self.value = value

    def __eq__(self, other: Any) -> bool:
        return bool(self.value == other.value)

    def __lt__(self, other: Any) -> bool:
        return bool(self.value < other.value)

    __hash__ = None  # type: ignore[assignment]


@case
def functools_functions(x: Any) -> Any:
    bound = functools.partial(lambda a, b, c=0: (a, b, c), 1, c=x)
    return (
        bound(2), functools.partial(bound, 5)(), functools.reduce(operator.add, [1, 2, x]), cached_square(3), cached_square(3),
        describe_type(1), describe_type([2]), describe_type("s"), Ordered(1) <= Ordered(2), Ordered(3) > Ordered(2),
        sorted([3, 1, 2], key=functools.cmp_to_key(lambda a, b: b - a)),
    )  # fmt: skip


@case
def functions_of_integers(x: Any) -> Any:
    n = 6
    return x * math.gcd(n, 9), math.isqrt(n), math.factorial(3), math.lcm(n, 4), math.comb(n, 2), math.perm(n, 2)


@case
def cached_property_and_partialmethod(x: Any) -> Any:
    item = Lazy(x)
    return item.doubled, item.doubled, item.runs, item.triple(x), item.scale(x)


@case
def cache_inside(x: Any) -> Any:
    runs: list[int] = []

    @functools.cache
    def work(n: int) -> int:
        runs.append(n)
        return n * 2

    return x * work(2), work(2), work(3), len(set(runs))


@case
def itertools_functions(x: Any) -> Any:
    counter = itertools.count(5, 2)
    return (
        list(itertools.chain([1], [x])), list(itertools.chain.from_iterable([[1], [2]])), list(itertools.islice(counter, 2)),
        next(counter), list(itertools.product([1, 2], "a")), list(itertools.permutations([1, 2])),
        list(itertools.combinations([1, 2, 3], 2)), list(itertools.accumulate([1, 2, x])), list(itertools.pairwise("abc")),
        list(itertools.zip_longest([1, 2], [3], fillvalue=0)), [(k, list(g)) for k, g in itertools.groupby([1, 1, 2])],
        list(itertools.takewhile(lambda v: v < 3, [1, 2, 3, 1])), list(itertools.dropwhile(lambda v: v < 3, [1, 2, 3, 1])),
        list(itertools.starmap(lambda a, b: a * b, [(1, 2), (x, 4)])), list(itertools.repeat(x, 2)),
        list(itertools.compress("abc", [1, 0, 1])), [list(part) for part in itertools.tee([1, 2])],
        list(itertools.filterfalse(lambda v: v, [0, 1])), list(itertools.islice(itertools.cycle([1, 2]), 3)),
    )  # fmt: skip


class Flagged(enum.Flag):
    A = enum.auto()
    B = enum.auto()


@case
def enums(x: Any) -> Any:
    return (
        Shade.RED.name, Shade(2).value, Shade["BLUE"] is Shade.BLUE, list(Shade), Shade.RED.other.name, Shade.BLUE.scaled(x),
        Shade.RED in {Shade.RED: 1}, len(Shade), (Flagged.A | Flagged.B).value, Flagged.A in (Flagged.A | Flagged.B),
        isinstance(Shade.RED, Shade), repr(Shade.RED), Shade.RED == Shade.BLUE, Shade.RED is Shade(1),
    )  # fmt: skip


@dataclass
class Config:
    """A dataclass with factories."""

    a: Any
    items: list[Any] = dataclasses.field(default_factory=list)
    hidden: int = dataclasses.field(default=3, repr=False, compare=False)
    total: Any = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.total = self.a * self.hidden


@dataclass(frozen=True, order=True)
class Frozen:
    a: int
    b: tuple[int, ...] = ()


@dataclass(slots=True, kw_only=True)
class Compact:
    a: Any
    b: int = 1


@dataclass
class Derived(Config):
    extra: int = 9


@case
def dataclasses_of_all_kinds(x: Any) -> Any:
    config = Config(x, hidden=4)
    config.items.append(1)
    frozen = Frozen(1, (2,))
    compact = Compact(a=x)
    compact.b += 1
    try:
        frozen.a = 5  # type: ignore[misc]
    except dataclasses.FrozenInstanceError:
        kind = "frozen"
    return (
        config.total, config.items, Config(1).items, frozen == Frozen(1, (2,)), frozen < Frozen(2), hash(frozen) == hash(Frozen(1, (2,))),
        dataclasses.replace(frozen, a=7).a, compact.a, compact.b, kind, Derived(2).extra, [f.name for f in dataclasses.fields(config)],
        dataclasses.asdict(frozen), dataclasses.astuple(frozen), repr(frozen), dataclasses.is_dataclass(config),
    )  # fmt: skip


class Named(NamedTuple):
    a: Any
    b: int = 2

    def total(self) -> Any:
        return self.a * self.b


Old = collections.namedtuple("Old", "p q", defaults=[5])


@case
def named_tuples(x: Any) -> Any:
    item = Named(x)
    a, b = item
    return (
        a, b, item.total(), item[0], item._replace(b=5).b, item._fields, Old(1), Old(1, q=2)._asdict(), Old._make([3, 4]),
        isinstance(item, tuple), len(item), Named(a=1, b=2) == (1, 2), Old(1) + (2,),
    )  # fmt: skip


T = typing.TypeVar("T")


class Box(typing.Generic[T]):
    def __init__(self, item: T) -> None:
        self.item = item

    def get(self) -> T:
        return self.item


@typing.runtime_checkable
class HasGet(typing.Protocol):
    def get(self) -> Any: ...


class Settings(typing.TypedDict, total=False):
    a: int


@case(breaks="looks for the members")
def typing_machinery(x: Any) -> Any:
    box: Box[int] = Box(x)
    alias = Box[int]
    settings: Settings = {"a": 1}
    value = typing.cast("int", x)
    made = alias(x)
    return (
        value, box.get(), made.get(), isinstance(box, HasGet), isinstance(3, HasGet), settings, typing.get_origin(alias) is Box,
        typing.get_args(alias), Settings(a=2), typing.Optional[int] == (int | None), isinstance(3, int | str),
    )  # fmt: skip


@case(breaks="a class is defined")
def generic_class_in_a_function(x: Any) -> Any:
    class Local(typing.Generic[T]):
        def __init__(self, item: T) -> None:
            self.item = item

    class Sub(Local[int]):
        pass

    return Sub(x).item * 2, Sub.__orig_bases__[0].__args__  # type: ignore[attr-defined]


@case
def collections_types(x: Any) -> Any:
    counts = collections.Counter("abca")
    counts.update("a")
    queue = collections.deque([1, 2], maxlen=2)
    queue.append(x)
    table = collections.defaultdict(list)
    table["k"].append(1)
    ordered = collections.OrderedDict(a=1, b=2)
    ordered.move_to_end("a")
    chain = collections.ChainMap({"a": 1}, {"a": 2, "b": 3})
    return counts["a"], counts.most_common(1), list(queue), dict(table), list(ordered), chain["a"], chain["b"]


@case
def builtin_methods(x: Any) -> Any:
    items = [3, 1, 2]
    items.sort()
    items.extend([5])
    items.insert(0, 9)
    popped = items.pop()
    table = {"a": 1}
    table.setdefault("b", 2)
    table.update(c=x)
    numbers = {1, 2} | {3}
    numbers.discard(1)
    return (
        items, popped, items.index(2), items.count(9), table.pop("a"), list(table.items()), table.get("zz", 0), numbers, (1, 2).count(1),
        "a-b".split("-"), "abc".upper().startswith("AB"), b"ab".decode(), "{}".format(3), dict.fromkeys("ab", 0), [].copy(),
        type(x) is type(x), isinstance(3, (int, str)), issubclass(bool, int), callable(len), divmod(7, 2), list(zip(*[(1, 2), (3, 4)])),
        int("12", 16), chr(97), ord("a"), hex(255), round(3.7), all([]), any([0, 1]), dict(a=1), tuple("ab"), set("aa"), frozenset([1]),
        bytes([65]), float("1.5"), bool([]), slice(1, 2).stop, range(3)[1], memoryview(b"ab")[0], id(x) == id(x) if False else 1,
    )  # fmt: skip


logger = logging.getLogger("dovetail.tests.language")


@case
def warnings_and_logging(x: Any) -> Any:
    logger.debug("not shown %s", 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.warn("quiet", stacklevel=1)
    return x * 2, logger.isEnabledFor(logging.DEBUG)


@case(breaks="print")
def printing(x: Any) -> Any:
    y = x * 2
    print(end="")
    return y + 1


@case(breaks="locals")
def locals_and_comprehensions(x: Any) -> Any:
    a = x * 2
    names = sorted(locals())
    return a, names, [i for i in range(2)]


@case(breaks="async")
def coroutine_is_made(x: Any) -> Any:
    async def work() -> Any:
        return x * 2

    coroutine = work()
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    finally:
        coroutine.close()
