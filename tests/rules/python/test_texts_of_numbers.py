"""Texts of numbers that change, and texts that change: eager's texts, and no graph for each of them."""

from __future__ import annotations

import collections
import copy
import itertools
import json
import operator
import os
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import dovetail
from tests.differential import captures, clone_inputs, entries_of, same

pytestmark = pytest.mark.usefixtures("quiet")
Tensor = torch.Tensor
CALLS = 10


@dataclass
class State:
    name: str = "a"
    step: int = 0
    log: list[Any] = field(default_factory=list)
    table: dict[str, Any] = field(default_factory=dict)

    known = 3


Named = collections.namedtuple("Named", "name number")  # noqa: PYI024  (a class of the standard library's making)


class _Doubled(torch.autograd.Function):
    seen: list[Any] = []  # noqa: RUF012  (the test reads it)

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.name = name
        return x * 2

    @staticmethod
    def backward(ctx: Any, tangent: Tensor) -> tuple[Tensor, None]:
        _Doubled.seen.append(ctx.name)
        return tangent * 2, None


class _Named(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.name = name
        return x * 2

    @staticmethod
    def backward(ctx: Any, tangent: Tensor) -> tuple[Tensor, None]:
        return tangent * (3 if ctx.name else 2), None


def spliced(x: Tensor, s: str, n: int, state: State) -> Any:
    return x * n, f"step {n:03d} of {s!r:>6}", f"{n / 7:.3e}|{n * 0.1!r}"


def percent(x: Tensor, s: str, n: int, state: State) -> Any:
    return x * 2, "step %d" % n, "%s %5.2f %x" % (s, n * 0.5 if n > 100 else 0.5, n)


def braces(x: Tensor, s: str, n: int, state: State) -> Any:
    return x * 2, "{} {:>4} {}".format(s, n, n + 1), "{0}{0!r}".format(n)  # noqa: UP032


def converted(x: Tensor, s: str, n: int, state: State) -> Any:
    return x * 2, str(n) + repr(n), format(n, "+d"), ",".join([s, str(n)]), str(s)


def handed_on(x: Tensor, s: str, n: int, state: State) -> Any:
    def inner(text: str, number: int) -> list[str]:
        return [text, f"{text}-{number}"]

    return x * 2, inner(s, n), (s, [s, {"s": s}]), Named(f"{n}", s)


def stored(x: Tensor, s: str, n: int, state: State) -> Any:
    old, state.name = state.name, f"epoch-{n}.pt"
    state.step = n
    state.log.append({"name": s, "text": f"{state.step}"})
    state.table["last"] = state.log[-1]["text"]
    return x * 2, old, state.name


def of_data(x: Tensor, s: str, n: int, state: State) -> Any:
    loss = (x * x).sum()
    text = f"loss {loss.item():.3f}"
    x.add_(1)
    return x * 2, text, "%.2f" % loss.item()


def of_sizes(x: Tensor, s: str, n: int, state: State) -> Any:
    return x * 2, f"{x.shape[0]} {x.numel()} {len(x)}", f"{x.dtype}"


def over_a_break(x: Tensor, s: str, n: int, state: State) -> Any:
    text = f"{n}-{s}"
    torch._dynamo.graph_break()
    return x * 2, text, text + "!"


def shared(x: Tensor, s: str, n: int, state: State) -> Any:
    text = f"{n}"
    both = [text, text]
    return x * 2, both[0] is both[1], s is None, text is not None, isinstance(s, str), type(text), s.__class__


def in_a_closure(x: Tensor, s: str, n: int, state: State) -> Any:
    text = f"{n}"
    state.log.append(lambda: text + s)
    return x * 2, state.log.pop()(), (lambda name=text: name)()


def in_a_generator(x: Tensor, s: str, n: int, state: State) -> Any:
    def texts() -> Any:
        yield f"{n}"
        yield s

    found = texts()
    return x * 2, next(found), list(found)


def in_a_backward(x: Tensor, s: str, n: int, state: State) -> Any:
    y = _Doubled.apply(x.requires_grad_(), f"{n}{s}")
    y.sum().backward()
    return y, x.grad, _Doubled.seen.pop()


#: Texts that only go through: a capture for constants, one for changed numbers, and a few for sizes or parts.
GOES_THROUGH: tuple[Callable[..., Any], ...] = (
    *(spliced, percent, braces, converted, handed_on, stored, of_data, of_sizes, over_a_break, shared, in_a_closure),
    in_a_generator,
)


def results(function: Callable[..., Any]) -> list[Any]:
    state, found = State(), []
    for n in range(CALLS):
        x = torch.arange(3.0 + (n % 2 if function.__name__ == "of_sizes" else 0)) + n
        try:
            found.append((function(x, f"n{n}", n, state), copy.deepcopy(vars(state))))
        except Exception as error:  # noqa: BLE001  (eager's error is the expected one)
            found.append((type(error), str(error)))
    return clone_inputs(found)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("program", [*GOES_THROUGH, in_a_backward])
def test_a_text_goes_through(program: Callable[..., Any]) -> None:
    compiled = dovetail.compile(program, backend="aten")
    same(results(program), results(compiled))
    if program is not in_a_backward:
        assert captures(compiled) <= (8 if program is over_a_break else 4)


#: Uses that need the text itself: ``s`` is ``"n0"``, ``"n1"`` ... and ``n`` 0, 1 ...
USES = (
    *("s == 'n1'", "s != f'n{n}'", "s in ('n1', 'n2')", "s in TABLE", "TABLE.get(s, s)", "'1' in s", "s < 'n3'"),
    *(
        "len(s)",
        "s[0] + s[-1]",
        "s[1:]",
        "[c for c in s]",
        "s.upper()",
        "s * 2",
        "s or 'none'",
        "not s",
        "bool(f'{n}')",
    ),
    *("sorted([s, 'n2'])", "max(s, 'n2')", "hash(s) == hash(str(s))", "json.dumps({'a': [s, f'{n}']})", "repr([s])"),
    *("f'{[s]}'", "f'{s:>{n + 3}}'", "f'{n / 7:.{n}f}'", "'%*d' % (n, n)", "'%c' % (n + 65)", "'%d' % (n * 1.5)"),
    *("'{:>{w}}'.format(s, w=n)", "'{0.real}'.format(n)", "'{n}'.format(n=n)", "re.sub('n', s, 'xnx')", "int(s[1:])"),
    *("str(Path('d') / s)", "getattr(STATE, 'known' if s else s)", "[s].index(s)", "[s, 'n1'].count('n1')", "{s: n}"),
    *("{s, 'n1'}", "frozenset([s])", "(s, n) == ('n1', 1)", "{'a': s} == {'a': 'n1'}", "s.join(['a', 'b'])"),
    *(
        "s.encode()",
        "eval(s, {f'n{i}': i for i in range(9)})",
        "int(str(n))",
        "''.join(c for c in s)",
        "str(n).zfill(3)",
    ),
    *(
        "'%s' % [s]",
        "'%(a)s' % {'a': s}",
        "f'{n}'.isdigit()",
        "copy.deepcopy([s])",
        "State(s).name",
        "KeyError(s).args",
    ),
    *(
        "{**{'a': s}, s: 1}",
        "x.to('cpu' if s else s).dtype",
        "'%d' % s",
        "f'{s:d}'",
        "s + n",
        "f'{n:.2q}'",
        "s.nothing",
    ),
    *("print(s, f'{n}', sep='-')", "sum(ord(c) for c in f'{n}')", "[*map(str.upper, [s])]", "getattr(torch, s)"),
)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("use", USES)
def test_a_text_is_used(use: str, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {
        **globals(),
        "TABLE": {"n0": 0, "n1": 1},
        "STATE": State(),
        "json": json,
        "re": re,
        "Path": Path,
    }
    exec(f"def program(x, s, n, state):\n    y = x.sin()\n    found = {use}\n    return y * 2, found, s, str(n)", names)
    program = names["program"]
    eager, written = results(program), capsys.readouterr().out
    compiled = dovetail.compile(program, backend="aten")
    for before, after in zip(eager, results(compiled), strict=True):
        # Errors of operators name the example's type in other words at most; exceptions compare by their arguments.
        same(before[:1] if isinstance(before[0], type) else before, after[:1] if isinstance(before[0], type) else after)
    assert capsys.readouterr().out == written


def test_one_graph() -> None:
    def program(x: Tensor, s: str, n: int) -> Any:
        return x * n, [c for c in s], not s, s[0], f"{n}"[0], s == "n2", f"{s}{n}"

    compiled = dovetail.compile(program, backend="aten", fullgraph=True)
    for n in range(4):
        same(program(torch.ones(2), f"n{n}", n), compiled(torch.ones(2), f"n{n}", n))


def test_one_object() -> None:
    """Texts that were read and are one object at some calls."""

    def program(x: Tensor, one: Any, other: Any) -> Any:
        return x * 2, one is other, one is not other, one is None, "n1" is one, f"{x.shape[0]}" is one  # noqa: F632

    compiled = dovetail.compile(program, backend="aten")
    for n in range(9):
        one = "".join(["n", str(n)])
        other = one if n % 2 else "".join(["n", str(n)])
        for pair in ((one, other), ("n1", "n1"), (one, None)):
            same(program(torch.ones(n % 3 + 1), *pair), compiled(torch.ones(n % 3 + 1), *pair))


def test_a_mode_has_a_graph_for_each_value() -> None:
    def program(x: Tensor, mode: str) -> Tensor:
        return x * 2 if mode == "train" else x + 1

    compiled = dovetail.compile(program, backend="aten")
    for mode in ("train", "eval", "train", "eval", "other", "other"):
        same(program(torch.ones(2), mode), compiled(torch.ones(2), mode))
    assert entries_of(compiled) <= 4


def test_a_message_in_a_warning() -> None:
    def program(x: Tensor, n: int) -> Tensor:
        text = f"seen {n}"
        warnings.warn(text, stacklevel=1)
        return x * 2

    compiled = dovetail.compile(program, backend="aten")
    for n in range(4):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            compiled(torch.ones(2), n)
        assert [str(item.message) for item in seen if "seen" in str(item.message)] == [f"seen {n}"]


def test_a_real_text_is_stored() -> None:
    state = State()

    def program(x: Tensor, n: int) -> Any:
        state.name = f"{n}"
        return x * 2, state.name

    compiled = dovetail.compile(program, backend="aten")
    for n in range(4):
        assert compiled(torch.ones(2), n)[1] == state.name == str(n)
        assert type(state.name) is str


class Shown:
    """An object whose methods make texts."""

    def __init__(self, name: str, number: int) -> None:
        self.name, self.number = name, number

    def __repr__(self) -> str:
        return f"Shown({self.number})"

    def __format__(self, specification: str) -> str:
        return f"{self.name}:{specification}"

    def __fspath__(self) -> str:
        return f"{self.name}.pt"

    def __eq__(self, other: object) -> bool:
        return self.name == other

    def __hash__(self) -> int:
        return hash(self.name)


#: Containers with a text in them that native code is given, and that change or are compared afterwards; objects that make texts.
KEPT = (
    "state.log.append(s); found = ','.join(state.log)",
    "state.log[:0] = [s]; state.log.sort(); found = '-'.join(state.log)",
    "items = [f'{n}']; queue = collections.deque(); queue.append(items); items.append(1); found = queue, queue[0] is items",
    "items = [f'{n}']; list.append(items, s); list.insert(items, 0, s); found = items",
    "items = [s, f'{n}']; steps = iter(items); items.append('z'); found = list(steps)",
    "items = [s]; steps = enumerate(items); items.append('z'); found = list(steps)",
    "items = [s]; steps = zip(items, [1, 2]); items.append('z'); found = list(steps)",
    "items = [s]; steps = itertools.chain(items, 'a'); items.append('z'); found = list(steps)",
    "inner = {'a': [s]}; other = copy.copy(inner); inner['a'].append(n); found = other, other['a'] is inner['a']",
    "items = [s]; object.__setattr__(state, 'name', items); items.append(n); found = state.name is items",
    "items = [s]; error = ValueError(items); items.append(n); found = error.args, error.args[0] is items",
    "items = [s]; items.insert(0, items); found = len(copy.copy(items)), items[0] is items",
    "pair = (s, [n]); state.log.append(pair); pair[1].append(n); found = state.log[-1] == pair",
    "state.name, state.step = state.step, state.name; found = state.name",
    "state.log.append(s); found = state.log.pop(0) if n > 2 else s",
    "setattr(state, s, n); found = getattr(state, s), vars(state)[s]",
    "found = operator.attrgetter('known' if s else s)(state), operator.methodcaller('upper')(s)",
    "found = ','.join(f'{i}{s}' for i in range(3)), ','.join(map(str, [n, s])), ','.join({'a': s}.values())",
    "found = str.join('-', (f'{n}' for _ in range(2))), s.join(reversed(['a', 'b']))",
    "found = str(Shown(s, n)), f'{Shown(s, n)!r} {Shown(s, n):x}', '%s' % Shown(s, n), repr([Shown(s, n)])",
    "found = '{0.number} {1[0]}'.format(Shown(s, n), [s])",
    "found = os.fspath(Shown(s, n)), Shown(s, n) == s, {s: n}[Shown(s, n)], sum([Shown(s, n) == s])",
    "found = re.sub('a', lambda match: s, 'xax'), sorted('ba', key=lambda item: item + s)",
    "found = sum([Shown(s, n)], '')",
)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("body", KEPT)
def test_a_container_of_texts_is_the_same_object(body: str) -> None:
    names: dict[str, Any] = {
        **globals(),
        "copy": copy,
        "itertools": itertools,
        "operator": operator,
        "os": os,
        "re": re,
    }
    exec(f"def program(x, s, n, state):\n    y = x.sin()\n    {body}\n    return y * 2, found, s", names)
    compiled = dovetail.compile(names["program"], backend="aten")
    expected, found = results(names["program"]), results(compiled)
    assert repr(expected) == repr(found)


def by_text(x: Tensor, s: str, n: int, state: State) -> Any:
    state.table[f"loss/{n}"] = x.sum()
    return x * 2


def by_changing_text(x: Tensor, s: str, n: int, state: State) -> Any:
    state.table[s] = n
    return x * 2


def by_number(x: Tensor, s: str, n: int, state: State) -> Any:
    state.table[n] = [x, s]  # type: ignore[index]
    return x * 2


@pytest.mark.parametrize("program", [by_text, by_changing_text, by_number])
def test_keys(program: Callable[..., Any]) -> None:
    """A few keys have a graph each; then the graph ends before the item is set."""
    compiled = dovetail.compile(program, backend="aten")
    same(results(program), results(compiled))
    assert captures(compiled) <= 8


def test_three_keys_have_a_graph_each() -> None:
    table: dict[str, int] = {}

    def program(x: Tensor, n: int) -> Tensor:
        table[f"{n % 3}"] = n
        return x * 2

    compiled = dovetail.compile(program, backend="aten", fullgraph=True)
    for n in range(9):
        same(program(torch.ones(2), n), compiled(torch.ones(2), n))
    assert table == {"0": 6, "1": 7, "2": 8}
    assert entries_of(compiled) <= 5


def test_an_array_in_a_dictionary() -> None:
    numpy = pytest.importorskip("numpy")

    def program(x: Tensor, table: dict[str, Any]) -> Tensor:
        table["array"] = numpy.arange(3) + 1
        return x * table["array"][1].item()

    compiled = dovetail.compile(program, backend="aten")
    for _ in range(2):
        table: dict[str, Any] = {}
        same(program(torch.ones(2), {}), compiled(torch.ones(2), table))
        assert table["array"].tolist() == [1, 2, 3]


def test_a_custom_function_that_keeps_a_name() -> None:
    """The attribute hides the method of that name of autograd's node."""

    def program(x: Tensor, n: int) -> Tensor:
        return _Named.apply(x, f"n{n}")

    compiled = dovetail.compile(program, backend="aten", fullgraph=True)
    for n in range(6):
        one, other = (torch.arange(3.0, requires_grad=True) for _ in range(2))
        program(one, n).sum().backward()
        compiled(other, n).sum().backward()
        same(one.grad, other.grad)
