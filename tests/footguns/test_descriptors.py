"""Descriptors have a state like any other object: it is guarded when it is read, and what is written to it is replayed."""

from __future__ import annotations

import pytest
import torch

from tests.differential import check_calls
from tests.footguns.test_audited_programs import CALLS
from tests.fuzz.runner import run_program

PROGRAMS = {
    "data in a class that the object hides becomes a property": """
class Base: k = 2
class A(Base): pass
a = A()
a.k = 3
def change(i):
    if i == 1: Base.k = property(lambda self: 10)
    if i == 2: Base.k = 5
    if i == 3: del a.k
def function(x): return x * a.k
""",
    "data in a class that the object hides becomes a descriptor": """
class Field:
    def __init__(self, d): self.d = d
class A: k = Field(2)
a = A()
a.k = 3
def change(i):
    if i == 1: Field.__get__ = lambda self, o, t=None: self.d
    if i == 2: Field.__set__ = lambda self, o, v: None
    if i == 3: A.k = 7
def function(x): return x * (a.k if hasattr(a, "k") else 100)
""",
    "data in a class that the program hides becomes a property": """
class A: k = 2
a = A()
def refused(self): raise AttributeError("k")
def change(i):
    if i == 1: A.k = property(lambda self: 7, lambda self, v: self.__dict__.__setitem__("other", v))
    if i == 2: A.k = property(refused, lambda self, v: None)
    if i == 3: A.k = 4
def function(x):
    a.k = 5
    return x * (a.k if hasattr(a, "k") else 100)
""",
    "data in the class of a module that the module hides": """
class Net(torch.nn.Module):
    scale = 1.0
    def __init__(self):
        super().__init__()
        self.scale = 2.0
    def forward(self, x): return x * self.scale
net = Net()
def change(i):
    if i == 1: Net.scale = 4.0
    if i == 2: Net.scale = property(lambda self: 9.0)
    if i == 3: del Net.scale
def function(x): return net(x)
""",
    "state of a descriptor that is read": """
class Field:
    def __init__(self, d): self.d = d; self.reads = 0
    def __get__(self, o, t=None): self.reads += 1; return self.d if o is None else o.__dict__.get("q", self.d) + self.reads
class A:
    f = Field(2)
a = A()
def change(i):
    if i == 1: A.__dict__["f"].d = 10
    if i == 2: A.f = Field(50)
    if i == 3: a.q = 4
def function(x): return x * a.f + A.f
""",
    "state of a descriptor that is written to": """
class Field:
    def __init__(self, k): self.k = k; self.n = 0
    def __set_name__(self, o, n): self.name = n
    def __get__(self, o, t=None): return o.__dict__[self.name]
    def __set__(self, o, v): self.n += 1; o.__dict__[self.name] = v * self.k + self.n
    def __delete__(self, o): self.n += 100; o.__dict__[self.name] = 0
class A:
    f = Field(2)
a = A()
def change(i):
    if i == 1: A.__dict__["f"].k = 10
    if i == 2: A.f = Field(50); A.__dict__["f"].name = "g"
    if i == 3: A.__dict__["f"].n = 40
def function(x):
    a.f = 3
    y = x * a.f
    del a.f
    return y + a.f
""",
    "decorators that are objects with a state": """
import functools
class Count:
    def __init__(self, f): functools.update_wrapper(self, f); self.f = f; self.n = 0
    def __call__(self, *a): self.n += 1; return self.f(*a) * self.n
    def __get__(self, o, t=None): return functools.partial(self, o) if o is not None else self
class A:
    @Count
    def m(self, x): return x + 1
    @staticmethod
    @Count
    def s(x): return x + 2
    @classmethod
    @Count
    def c(cls, x): return x + 3
a = A()
def change(i):
    if i == 2: A.__dict__["m"].n = 7; A.__dict__["s"].__func__.n = 9
    if i == 3: A.__dict__["c"].__func__.n = 20
def function(x): return a.m(x) + a.s(x) + A.s(x) + A.c(x) + a.c(x) + A.m.n
""",
    "a property of what is no function": """
import operator, functools
class G:
    def __init__(self): self.k = 1
    def __call__(self, o): self.k += 1; return o._v * self.k
g = G()
class A:
    p = property(operator.attrgetter("_v"))
    q = property(g)
    r = property(functools.partial(lambda k, o: k["z"] * o._v, {"z": 3}))
a = A(); a._v = 2
def change(i):
    a._v = i + 5
    if i == 2: g.k = 50
    if i == 3: A.r.fget.args[0]["z"] = 9
def function(x): return x * a.p + a.q + a.r
""",
    "a property of a class": """
class classproperty:
    def __init__(self, f): self.f = f
    def __get__(self, o, t): return self.f(t)
class A:
    k = 1
    @classproperty
    def z(cls): return cls.k * 2
class B(A):
    @classproperty
    def z(cls): return super().z + 1
def change(i):
    A.k = i + 2
    if i == 3: B.k = 60
def function(x): return x * A.z + B.z + B().z
""",
    "properties and descriptors of a metaclass": """
class D:
    def __init__(self, k): self.k = k
    def __get__(self, o, t): return o.__name__ + str(self.k)
    def __set__(self, o, v): self.k = v
class ND:
    k = 3
    def __get__(self, o, t): return self.k
class M(type):
    @property
    def size(cls): return cls._s
    @size.setter
    def size(cls, v): cls._s = v * 2
    d = D(1); nd = ND()
    def __getattr__(cls, n): return 11 if n == "dyn" else object.__getattribute__(cls, n)
    def __len__(cls): return 4
    def __contains__(cls, k): return k == 1
class A(metaclass=M): _s = 1
def change(i):
    A.size = i
    if i == 1: M.__dict__["d"].k = 44
    if i == 2: M.size = property(lambda c: 100, lambda c, v: None)
    if i == 3: ND.k = 8
def function(x):
    A.size = A.size + 1
    y = len(A.d)
    A.d = 12345
    return x * A.size + A.dyn + len(A) + (1 in A) + y + A.nd
""",
    "slots with private names, and a name that a subclass has too": """
class P: __slots__ = ("raw", "_t")
class A(P):
    __slots__ = ("__x", "y")
    def __init__(self, x): self.__x = x; self._t = x; self.y = 2
    def get(self): return self.__x
    @property
    def raw(self): return 5
def change(i): pass
def function(x):
    a = A(x)
    print("b")
    return a.get() * a.y + a.raw + a._t, a.get()
""",
    "a metaclass that sets attributes its own way": """
def change(i): pass
class Meta(type):
    def __new__(m, n, b, d):
        d = dict(d); d["added"] = len(d); return super().__new__(m, n, b, d)
    def __setattr__(c, n, v): super().__setattr__(n, v * 2 if isinstance(v, int) else v)
def function(x):
    class A(metaclass=Meta):
        k = 3
        def f(self): return self.k
    A.k = 5
    a = A()
    return x * a.f() + A.added * 0 + isinstance(A, Meta)
""",
    "a property of a class of its own gives something else": """
class Scale: k = 2
class Scaled(property):
    def __get__(self, o, t=None): return self if o is None else super().__get__(o, t) * Scale.k
class A:
    n = 3
    @Scaled
    def k(self): return self.n
a = A()
def change(i):
    if i == 1: Scale.k = 5
    if i == 2: A.n = 4
    if i == 3: A.k = Scaled(lambda self: 7)
def function(x): return x * a.k
""",
    "a property of the class": """
class OfClass(property):
    def __get__(self, o, t=None): return self.fget(t)
class A:
    n = 3
    @OfClass
    def k(cls): return len(cls.__name__) * cls.n
class Longer(A): n = 2
a = Longer()
def change(i):
    if i == 1: A.n = 5
    if i == 2: Longer.n = 4
def function(x): return x * a.k + A.k
""",
    "a property of a class of its own sets something else": """
class Doubling(property):
    def __set__(self, o, v): o.__dict__["_d"] = v * 2
class A:
    @Doubling
    def d(self): return self._d
    @d.setter
    def d(self, v): self._d = v
a = A()
def change(i): pass
def function(x):
    a.d = 3
    return x * a.d
""",
    "a static and a class method of classes of their own": """
class Scale: k = 2
class Static(staticmethod):
    def __get__(self, o, t=None): return lambda x: super(Static, self).__get__(o, t)(x) * Scale.k
class OfClass(classmethod):
    def __get__(self, o, t=None): return super().__get__(o, t)
class A:
    n = 3
    @Static
    def s(x): return x * 2
    @OfClass
    def c(cls, x): return x * cls.n
a = A()
def change(i):
    if i == 1: Scale.k = 5
    if i == 2: A.n = 4
def function(x): return a.s(x) + A.s(x) + a.c(x) + A.c(x)
""",
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", PROGRAMS)
def test_it_is_as_in_eager(name: str) -> None:
    outcome = run_program("import torch\n" + PROGRAMS[name] + CALLS)
    assert outcome.has_begun and outcome.raised == 0
    assert not outcome.failure, outcome.failure


class _Refusing:
    """A descriptor that has no value."""

    def __get__(self, instance: object, owner: type) -> object:
        raise AttributeError("none here")


class _Fallback:
    part = _Refusing()

    def __init__(self) -> None:
        self.asked: list[str] = []

    @property
    def number(self) -> float:
        raise AttributeError("not a property today")

    def __getattr__(self, name: str) -> float:
        if name in ("number", "part", "other"):
            return {"number": 3.0, "part": 5.0, "other": 7.0}[name]
        value: float = object.__getattribute__(self, name)
        return value


class _Intercepting(_Fallback):
    def __getattribute__(self, name: str) -> object:
        if name == "secret":
            raise AttributeError(name)
        return super().__getattribute__(name)

    def __getattr__(self, name: str) -> float:
        return 11.0 if name == "secret" else super().__getattr__(name)


def test_an_attribute_error_of_a_property_asks_getattr() -> None:
    holder, other = _Fallback(), _Intercepting()

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * holder.number + holder.part + holder.other + getattr(holder, "number", 1.0)
        if hasattr(holder, "nothing") or hasattr(other, "nothing"):
            y = y * 100
        return y + other.secret + other.number + other.part

    check_calls(function, [(torch.ones(2),)] * 2, fullgraph=True)


class _Renamed(torch.nn.Linear):
    """Every parameter goes through ``__getattr__``, which here doubles the weight."""

    @property
    def broken(self) -> torch.Tensor:
        return self.weight.not_there

    def __getattr__(self, name: str) -> object:
        found = super().__getattr__(name)
        return found * 2 if name == "weight" else found


def test_getattr_of_a_module_sees_parameters_too() -> None:
    module = _Renamed(2, 2)

    def function(x: torch.Tensor) -> torch.Tensor:
        try:
            return module.broken
        except AttributeError as error:
            return module(x) + len(str(error))

    check_calls(function, [(torch.ones(1, 2),)] * 2, fullgraph=True)
