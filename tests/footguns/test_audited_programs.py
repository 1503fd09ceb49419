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
    "a module is another one at the next import": """
import sys, types
def change(i):
    module = types.ModuleType("audited_module")
    module.k = i
    sys.modules["audited_module"] = module
def function(x):
    import audited_module
    from audited_module import k
    return x * audited_module.k + k
""",
    "a cache and a dispatch that are made inside": """
def change(i): pass
import functools
def function(x):
    @functools.lru_cache(maxsize=None)
    def fib(n): return n if n < 2 else fib(n - 1) + fib(n - 2)
    @functools.wraps(fib)
    def g(n): return fib(n)
    @functools.singledispatch
    def h(a): return 1
    @h.register(int)
    def _(a): return a
    return x * g(7) + h(3) + h("s") + len(g.__name__)
""",
    "a cache that is made inside is kept on an object and asked later": """
import functools
class A: pass
thing, later = A(), []
def change(i):
    if i: later.append(thing.times(4))
def function(x):
    @functools.lru_cache(maxsize=3)
    def times(n): return n * 3
    thing.times = times
    return x * times(2) + sum(later)
""",
    "caches that are made inside go over a graph break": """
import functools
def top(n): return n + 1
def change(i): pass
def function(x):
    @functools.cache
    def inner(n): return n * 3
    caches = {"inner": inner, "top": functools.lru_cache(top)}
    k = inner(2)
    if x.sum().item() < 0: return x
    return x * caches["inner"](2) + caches["top"](k)
""",
    "a key for sorting that is made inside goes over a graph break": """
import functools
def change(i): pass
def function(x):
    key = functools.cmp_to_key(lambda a, b: b - a)
    first = key(1)
    if x.sum().item() < 0: return x
    return x * sorted([1, 3, 2], key=key)[0] + (first < key(2))
""",
    "errors have the text and the names of Python's": """
def change(i): pass
log = []
def bad():
    yield 1
    raise KeyError("z")
def function(x):
    try: x = x + sum(bad())
    except KeyError as e: log.append(e.args); x = x * 2
    try: a, b = bad()
    except KeyError: x = x + 3
    try: a, b = (1, 2, 3)
    except ValueError as e: log.append(str(e))
    try: dict([(1, 2), (3,)])
    except ValueError as e: log.append(str(e))
    try: [][0]
    except IndexError as e: log.append(str(e))
    try: int("x")
    except ValueError as e: log.append(str(e))
    try: None.foo
    except AttributeError as e: log.append((str(e), e.name, e.obj))
    try: undefined_thing
    except NameError as e: log.append((str(e), e.name))
    try: "a" + 1
    except TypeError as e: log.append(str(e))
    try: x.foo_bar
    except AttributeError as e: log.append(str(e))
    try: len(5)
    except TypeError as e: log.append(str(e))
    try: (lambda a: a)()
    except TypeError as e: log.append(str(e))
    try: torch.ones(2) + torch.ones(3)
    except RuntimeError as e: log.append("rt")
    try: {}[[]]
    except TypeError as e: log.append(str(e))
    try: import_nothing()
    except NameError as e: log.append(str(e))
    try:
        import nothing_here_x
    except ImportError as e: log.append((str(e), e.name))
    try: from_x = __import__("os").nope
    except AttributeError as e: log.append(str(e))
    return x
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


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", PROGRAMS)
def test_it_is_as_in_eager(name: str) -> None:
    outcome = run_program("import torch\n" + PROGRAMS[name] + CALLS)
    assert outcome.has_begun and outcome.raised == 0
    assert not outcome.failure, outcome.failure
