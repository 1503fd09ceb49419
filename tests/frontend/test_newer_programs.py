"""Programs in the syntax of Python 3.12 and later: the text is no program for earlier ones."""

from __future__ import annotations

import sys

import pytest

from tests.footguns.test_audited_programs import CALLS
from tests.fuzz.runner import run_program

pytestmark = pytest.mark.skipif(sys.version_info < (3, 12), reason="needs the syntax of Python 3.12")

PROGRAMS = {
    "type parameters": r"""
import typing
def change(i): cfg["k"] = i
cfg = {"k": 0}
class Box[T]:
    made = 0
    def __init__(self, v: T) -> None: self.v = v; Box.made += 0
    def map[U](self, f: "typing.Callable[[T], U]") -> "Box[U]": return Box(f(self.v))
def first[T: (int, float)](l: list[T]) -> T: return l[0]
type Vec[T] = list[T]
def function(x):
    b = Box[torch.Tensor](x).map(lambda v: v * cfg["k"])
    def inner[S](v: S) -> S: return v
    class Loc[K]:
        a: K = 3
        def get[Q](self, q: Q) -> Q: return q
    sizes = len(Box.__type_params__) + len(Vec.__type_params__) + len(Loc.__parameters__)
    return b.v + first([1, 2]) + sizes + inner(x) + Loc[int]().get(2) + (Vec.__name__ == "Vec")
""",
    "scopes of comprehensions": r"""
log = []
def note(v): print(v); log.append(v); return v
def function(x):
    k = 100; i = 7
    a = [i * k for i in range(3)]
    b = [[i + j for i in range(2)] for j in [i for i in range(2)]]
    fs = [lambda: i for i in range(3)]
    c = [note(i) for i in range(2) if note(k) or True]
    d = {q: k for q in range(2)}
    class A:
        k = 5
        l = [k for k in range(3)]
        m = [k for _ in range(2)] if False else k
    try: e = [1 / i for i in [1, 0]]
    except ZeroDivisionError: e = [i]
    loc = sorted(locals())
    return x * sum(a) + sum(map(sum, b)) + fs[0]() + sum(c) + sum(d.values()) + sum(A.l) + A.m + e[0] + i, loc
def change(i): pass
""",
    "quotes within quotes": r"""
def change(i): s["a"] = [i, {"b": "q"}]
s = {"a": [0, {"b": "q"}]}
def function(x):
    w = 8
    t = f"{s["a"][0]} {f"{s["a"][1]["b"]!r:>{w}}"} {'\n'.join(["a", "b"])} {
        s["a"][0] + 1  # comment
    } {x.shape[0]:0{w}d} {(lambda v: v * 2)(3)} {{}} {s['a'][0]=}"
    return x * len(t), t
""",
    "groups that are split and raised again": r"""
log = []
def change(i): n[0] = i
n = [0]
def function(x):
    try:
        try:
            raise ExceptionGroup("a", [ValueError(n[0]), OSError("o"), ExceptionGroup("b", [TypeError("t"), ValueError(2)])])
        except* ValueError as g:
            log.append(len(g.exceptions)); print("v"); x = x * 2
        except* OSError:
            x = x * 3
            if n[0] % 2: raise
    except ExceptionGroup as rest:
        log.append([type(e).__name__ for e in rest.exceptions]); log.append(str(rest.subgroup(TypeError)))
    return x
""",
    "the value of close": r"""
log = []
def g():
    try: yield 1
    except GeneratorExit: return "ret"
def function(x):
    it = g(); next(it)
    log.append(it.close())
    it = g(); log.append(it.close())
    def h():
        r = yield from g()
        log.append(r)
    k = h(); next(k); log.append(k.close())
    return x * 2
def change(i): pass
""",
    "many managers, and breaks in them": r"""
import contextlib
@contextlib.contextmanager
def c(n):
    print("in", n)
    try: yield n
    except ValueError: print("swallow", n)
    finally: print("out", n)
def function(x):
    with (c(1) as a, c(2) as b, contextlib.ExitStack() as s):
        s.enter_context(c(3)); x = x * a * b
        if b == 2: raise ValueError
        x = x * 100
    for k in range(3):
        with c(k):
            if k == 1: continue
            if k == 2: break
            x = x + k + 1
    return x
def change(i): pass
""",
    "guards of match that have effects": r"""
log = []
def eff(v): print("g", v); log.append(v); return v % 2
def change(i): subj[0] = [{"a": 1, "b": [1, {"c": 2}]}, [1, [2, 3], *range(i)], ("x", 3.5), {"a": 2, "z": 0}][i]
subj = [None]
def function(x):
    match subj[0]:
        case {"a": int(v), "b": [_, {"c": c}]} if eff(v): return x * c
        case {"a": v, **rest} if eff(v) or rest: return x * v + len(rest)
        case [1, [a, *b], *c]: return x * a + len(b) + len(c)
        case ("x" | "y" as n, float(f)): return x * f + len(n)
    return x
""",
}
#: Each from its version of Python on.
NEWER = {
    "template strings": (
        (3, 14),
        r"""
def html(t): return "|".join(p if isinstance(p, str) else f"{p.expression}={p.value}:{p.conversion}:{p.format_spec}" for p in t)
state = {"n": 1}
def function(x):
    y = x * state["n"]
    w = 3
    t = t"a {y.shape[0]!r:>{w}} b {state['n']}" t" {t"in {w}".strings[0]}"
    z = y + t.interpolations[1].value
    v = t"{z}".values[0]
    try: u = t"{missing}"
    except NameError: y = v * 7
    return v * z + y + len(t.strings), html(t)
def change(i): state["n"] = i
""",
    ),
    "annotations that are computed when they are asked for": (
        (3, 14),
        r"""
import annotationlib, inspect
state = {"n": 1}
def function(x):
    k = x * state["n"]
    def g(a: Missing, b: Known = 3) -> "str": return a + k * b
    def h(a: int): return g(a)
    return g, h, g(x) + len(h.__annotations__)
def change(i):
    global Known
    state["n"] = i
    Known = [int, float][i % 2]
    g, h, y = function(torch.ones(2))
    print(annotationlib.get_annotations(g, format=annotationlib.Format.STRING), h.__annotations__)
Known = str
""",
    ),
    "lazy imports": (
        (3, 15),
        r"""
lazy import colorsys
lazy from fractions import Fraction as F
state = {"n": 1}
def function(x):
    y = x * colorsys.ONE_THIRD
    if state["n"] > 1: return y + float(F(1, state["n"]))
    return y
def change(i): state["n"] = i
""",
    ),
    "comprehensions with stars": (
        (3, 15),
        r"""
state = {"n": [[1], [2, 3]]}
def function(x):
    a = [*row for row in state["n"]]
    b = {*row for row in state["n"]}
    c = {**{n: x * n} for n in a}
    return x * sum(a) + len(b) + sum(c.values()), sum((*row for row in state["n"]))
def change(i): state["n"] = [[i], [i, 4]]
""",
    ),
}


@pytest.mark.parametrize("name", NEWER)
def test_newer_syntax_is_as_in_eager(name: str) -> None:
    since, text = NEWER[name]
    if sys.version_info < since:
        pytest.skip(f"needs the syntax of Python {since[0]}.{since[1]}")
    outcome = run_program("import torch\n" + text + CALLS)
    assert outcome.has_begun and outcome.raised == 0
    assert not outcome.failure, outcome.failure


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_is_as_in_eager(name: str) -> None:
    outcome = run_program("import torch\n" + PROGRAMS[name] + CALLS)
    assert outcome.has_begun and outcome.raised == 0
    assert not outcome.failure, outcome.failure
