"""Small programs of kinds that code bases have, which were once compiled to something stale: one for each cause."""

from __future__ import annotations

import pytest

from tests.fuzz.runner import run_program

CALLS = """
def call_0(run): change(0); return run(torch.arange(4.0, requires_grad=True))
def call_1(run): change(1); return run(torch.arange(4.0, requires_grad=True))
def call_2(run): change(2); return run(torch.arange(4.0, requires_grad=True))
def call_3(run): change(3); return run(torch.arange(4.0, requires_grad=True))
"""

PROGRAMS = {
    "a member of a protocol appears on an object": """
import typing
@typing.runtime_checkable
class Going(typing.Protocol):
    def go(self): ...
class A:
    def go(self): return 2
class B: pass
thing = A()
def change(i):
    global thing
    thing = [A(), B(), B(), B()][i]
    if i == 2: thing.go = lambda: 5
    if i == 3: B.go = lambda self: 11
def function(x): return x * thing.go() if isinstance(thing, Going) else x + 1
""",
    "a protocol of data": """
import typing
@typing.runtime_checkable
class Sized(typing.Protocol):
    size: int
    def go(self): ...
class A:
    def go(self): return 2
class B(A):
    @property
    def size(self): return self._size
thing = A()
def change(i):
    global thing
    thing = A() if i < 3 else B()
    if i == 1: thing.size = 3
    if i == 2: A.size = 4
    if i == 3: del A.size; thing._size = 9
def function(x): return x * thing.size if isinstance(thing, Sized) else x + 1
""",
    "a protocol and a __getattr__": """
import typing
@typing.runtime_checkable
class Sized(typing.Protocol):
    size: int
class A:
    def __getattr__(self, name):
        if name == "size" and self.__dict__.get("on"): return 5
        raise AttributeError(name)
thing = A()
def change(i):
    if i == 1: thing.on = True
    if i == 2: thing.size = 8
def function(x): return x * thing.size if isinstance(thing, Sized) else x + 1
""",
    "the cache of a function is cleared": """
import functools
base = [2]
@functools.lru_cache
def times(n, *, k=1):
    print("computed")
    return n * base[0] * k
def change(i):
    base[0] = i + 5
    if i == 2: times.cache_clear()
def function(x): return x * times(3) + times(2, k=5)
""",
    "a small cache forgets": """
import functools
base = [2]
@functools.lru_cache(maxsize=1)
def times(n): return n * base[0]
def change(i):
    base[0] = i + 5
    if i == 2: times(7)
def function(x): return x * times(3)
""",
    "a thread-local object has an attribute": """
import threading
state = threading.local()
def change(i): state.k = i
def function(x):
    try:
        k = state.k
    except AttributeError:
        k = 77
    return x * k + getattr(state, "k", 5) + hasattr(state, "k")
""",
    "getters of operator": """
import operator, typing
Number = typing.NewType("Number", int)
items = [3, 1, 2]
class A:
    def m(self, a, *, k): return a + k + self.z
things = [A(), A()]
for place, thing in enumerate(things):
    thing.a = A()
    thing.a.b, thing.z = 3 - place, place
def change(i):
    items.append(i)
    things[0].a.b = i
    things[1].z = i + 4
def function(x):
    k = operator.attrgetter("a.b", "z")(things[0])[0] + operator.itemgetter(0, -1)(items)[1]
    k += operator.methodcaller("m", 1, k=2)(things[1])
    least = min(things, key=operator.attrgetter("z"))
    return x * Number(k) + least.z + operator.itemgetter(slice(1, None))(items)[0]
""",
    "what is kept on a member of an enumeration": """
import enum
class Kind(enum.Enum):
    A = 1
    B = 2
    def __init__(self, value): self.extra = value * 10
def change(i): Kind.A.extra = i
def function(x):
    Kind.B.count = getattr(Kind.B, "count", 0) + 1
    return x * Kind.A.extra + Kind.B.count
""",
    "a property of no name has no setter": """
class A:
    @property
    def named(self): return 1
thing = A()
said = []
def change(i):
    if i == 1: A.nameless = property(lambda self: 5)
def function(x):
    for name in ("named", "nameless"):
        try:
            setattr(thing, name, 3)
        except AttributeError as error:
            said.append(str(error))
    return x * len(said)
""",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_is_as_in_eager(name: str) -> None:
    outcome = run_program("import torch\n" + PROGRAMS[name] + CALLS)
    assert outcome.has_begun and outcome.raised == 0
    assert not outcome.failure, outcome.failure
