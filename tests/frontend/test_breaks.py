"""Graph breaks with continuations: what cannot be captured runs for real between graphs, and everything is as in eager."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import dovetail
from dovetail.errors import EagerFallbackWarning, GraphBreakError, GraphBreakWarning
from dovetail.versions import parse
from tests.differential import check, same

LOG: list[Any] = []


def note(*items: Any) -> None:
    """A side effect that cannot be captured: print flushes standard output."""
    LOG.extend(items)
    print(end="")


def x() -> torch.Tensor:
    return (torch.arange(6.0).reshape(2, 3) / 3 - 0.7).requires_grad_()


def in_the_middle(a: torch.Tensor) -> torch.Tensor:
    b = a.sin()
    print("middle")
    return b.cos()


def first_and_last(a: torch.Tensor) -> torch.Tensor:
    print("first")
    b = a * 2
    print("last")
    return b


def deep_helper(a: torch.Tensor, scale: float) -> torch.Tensor:
    def inner(b: torch.Tensor) -> torch.Tensor:
        c = b * scale
        print("deep")
        return c + b

    return inner(a).exp()


def deep(a: torch.Tensor) -> torch.Tensor:
    return deep_helper(a.sin(), 2.0) + deep_helper(a, 3.0)


def loop(a: torch.Tensor) -> torch.Tensor:
    total = a
    for row in (1.0, 2.0, 3.0):
        total = total * row
        print("row", row)
        total = total.sin()
    return total


def while_loop(a: torch.Tensor) -> torch.Tensor:
    while a.sum().item() < 20:
        a = a.abs() * 2 + 1
    return a


def data_branch(a: torch.Tensor) -> torch.Tensor:
    b = a * 3
    if b.sum() > 0:
        return b.sin()
    return b.cos()


def with_block(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad():
        b = a * 2
        print("grad is", torch.is_grad_enabled())
        c = b.sin()
    d = a.sin()
    print("grad is", torch.is_grad_enabled())
    return c, d


def autocast_block(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # Eager keeps the bfloat16 copy of a leaf for the whole block; over a break it is made anew, and gradients round twice.
    a = a * 1
    with torch.autocast("cpu", torch.bfloat16):
        b = a @ a.t()
        print("autocast", torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled())
        c = a @ a.t()
    print("autocast", torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled())
    return b, c


class Manager:
    """Logs how it is used."""

    def __enter__(self) -> Manager:
        print("enter")
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> bool:
        print("exit", kind.__name__ if kind else None)
        return kind is ValueError


@contextlib.contextmanager
def generator_manager(name: str) -> Iterator[str]:
    print("in", name)
    try:
        yield name
    finally:
        print("out", name)


def managers(a: torch.Tensor) -> torch.Tensor:
    with Manager(), generator_manager("outer") as name:
        a = a.sin()
        print("inside", name)
        with generator_manager("inner"):
            a = a + 1
            raise ValueError("swallowed by Manager")
    return a.cos()


def try_block(a: torch.Tensor) -> torch.Tensor:
    try:
        a = a * 2
        print("trying")
        if a.sum().item() < 1e9:
            raise KeyError("small")
        a = a * 100
    except KeyError as error:
        print("caught", error, sys.exc_info()[0], sys.exc_info()[1] is error)
        a = a + 1
    except ValueError:
        a = a + 2
    else:
        a = a + 3
    finally:
        print("finally")
        a = a.sin()
    return a


def raised_by_break(a: torch.Tensor) -> torch.Tensor:
    b = a * 2
    try:
        open("/nonexistent/file")
    except OSError as error:
        return b + error.errno
    return b


def chained(a: torch.Tensor) -> torch.Tensor:
    try:
        try:
            print("go")
            raise KeyError("first")
        except KeyError as error:
            print("again")
            raise ValueError("second") from error
    except ValueError as error:
        print(repr(error), repr(error.__cause__), repr(error.__context__))
        return a.sin()


def comprehension(a: torch.Tensor) -> torch.Tensor:
    parts = [(note("item", i), a * i)[1] for i in (1.0, 2.0, 3.0)]
    return sum(parts)


def generator(a: torch.Tensor) -> torch.Tensor:
    def parts() -> Iterator[torch.Tensor]:
        b = a
        for i in (1.0, 2.0, 3.0):
            b = b * i
            print("yield", i)
            yield b

    total = a
    for part in parts():
        total = total + part
    return total


def generator_across(a: torch.Tensor) -> torch.Tensor:
    parts = (a * i for i in (1.0, 2.0, 3.0))
    total = next(parts)
    print("across")
    for part in parts:
        total = total + part
    return total


def closure_cell(a: torch.Tensor) -> tuple[torch.Tensor, int]:
    count = 0

    def step(b: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        print("count", count)
        return b * count

    a = step(a)
    a = step(a)
    return a, count


def recursive_closure(a: torch.Tensor) -> torch.Tensor:
    def down(b: torch.Tensor, depth: int) -> torch.Tensor:
        print("depth", depth)
        return b if depth == 0 else down(b * 2, depth - 1)

    return down(a.sin(), 3)


def containers(a: torch.Tensor) -> dict[str, Any]:
    shared = [a.sin()]
    result = {"a": shared, "b": shared, "c": (a, {1, 2})}
    print(len(shared))
    shared.append(a.cos())
    assert result["a"] is result["b"]
    return result


def views(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    b = a.clone()
    row = b[0]
    print("views")
    row.mul_(3)
    return b, row


def iterators(a: torch.Tensor) -> torch.Tensor:
    numbers = iter([1.0, 2.0, 3.0, 4.0])
    pairs = zip(numbers, enumerate(["a", "b"]), strict=False)
    a = a * next(pairs)[0]
    print("iterators")
    for number, (index, letter) in pairs:
        print(number, index, letter)
        a = a + number
    return a


def bound_conversions(a: torch.Tensor) -> torch.Tensor:
    single, whole = (a * 2).float, a.long
    print(end="")
    return single() + whole()


def bound_methods(a: torch.Tensor) -> torch.Tensor:
    items: list[torch.Tensor] = []
    append = items.append
    scale = a.mul
    half = functools.partial(torch.mul, other=0.5)
    print("methods")
    append(scale(3))
    append(half(a))
    return items[0] + items[1]


@dataclasses.dataclass
class Point:
    """Made inside and taken over a break."""

    x: torch.Tensor
    tag: str = "point"


def objects(a: torch.Tensor) -> Point:
    point = Point(a * 2)
    print(point.tag)
    point.x = point.x.sin()
    point.tag = "moved"
    return point


def random_numbers(a: torch.Tensor) -> torch.Tensor:
    b = torch.nn.functional.dropout(a, 0.5)
    random.seed(3)
    factor = random.random()
    return torch.nn.functional.dropout(b * factor, 0.5)


def numpy_round_trip(a: torch.Tensor) -> torch.Tensor:
    b = (a.detach() * 2).numpy().sum()
    return a * float(b)


def sorting(a: torch.Tensor) -> list[torch.Tensor]:
    seen = []

    def key(row: torch.Tensor) -> float:
        seen.append(1)
        return row.sum().item()

    rows = sorted([a[0], a[1]], key=key)
    return [*rows, a * len(seen)]


def frame_builtins(a: torch.Tensor) -> torch.Tensor:
    b = a * 2
    names = sorted(locals())
    c = eval("b + 1")
    return c * len(names)


def loop_else(a: torch.Tensor) -> torch.Tensor:
    for i in (1.0, 2.0):
        print("i", i)
        if i > 5:
            break
        a = a * i
        continue
    else:
        a = a + 100
    return a


def keywords(a: torch.Tensor) -> torch.Tensor:
    def inner(b: torch.Tensor, *rest: float, scale: float = 2.0, **more: float) -> torch.Tensor:
        print(rest, scale, sorted(more))
        return b * scale + sum(rest) + more["shift"]

    return inner(a, 1.0, scale=3.0, shift=4.0) + inner(*(a, 2.0), **{"shift": 1.0})


def generator_methods(a: torch.Tensor) -> torch.Tensor:
    def parts() -> Iterator[torch.Tensor]:
        try:
            for i in range(3):
                yield a * i
                print("after", i)
        finally:
            print("closed")

    running = parts()
    first = next(running)
    second = running.send(None)
    running.close()
    return first + second


def python_numbers(a: torch.Tensor) -> torch.Tensor:
    total = 0.0
    for value in a.detach().flatten().tolist():
        total += value
    return a * total


class Noisy:
    """Prints in every special method."""

    def __init__(self, a: torch.Tensor) -> None:
        print("init")
        self.a = a

    def __getattr__(self, name: str) -> int:
        print("getattr", name)
        return 5

    @property
    def twice(self) -> torch.Tensor:
        print("property")
        return self.a * 2

    def __add__(self, other: int) -> Noisy:
        print("add")
        return Noisy(self.a + other)

    def __iter__(self) -> Iterator[torch.Tensor]:
        for i in range(2):
            print("iter", i)
            yield self.a * i


def special_methods(a: torch.Tensor) -> torch.Tensor:
    noisy = Noisy(a) + 1
    return noisy.twice * noisy.missing + sum(noisy)


def matched(a: torch.Tensor) -> torch.Tensor:
    assert a.sum().item() > -100, "no"
    match a.shape:
        case (rows, columns) if rows == 2:
            b = a * columns
        case _:
            b = a
    print(f"{b.shape} {columns=}")
    return b


def retained(a: torch.Tensor) -> torch.Tensor | None:
    b = a * 2
    b.retain_grad()
    print("retained")
    (b * 3).sum().backward(inputs=[b])
    return b.grad


PROGRAMS = [
    in_the_middle,
    first_and_last,
    deep,
    loop,
    while_loop,
    data_branch,
    with_block,
    autocast_block,
    managers,
    try_block,
    raised_by_break,
    chained,
    comprehension,
    generator,
    generator_across,
    closure_cell,
    recursive_closure,
    containers,
    iterators,
    bound_conversions,
    bound_methods,
    objects,
    random_numbers,
    numpy_round_trip,
    sorting,
    frame_builtins,
    loop_else,
    keywords,
    generator_methods,
    python_numbers,
    special_methods,
    matched,
    retained,
]


def _whole_fall_backs(record: list[warnings.WarningMessage]) -> list[str]:
    return [
        str(item.message)
        for item in record
        if issubclass(item.category, EagerFallbackWarning) and not issubclass(item.category, GraphBreakWarning)
    ]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@pytest.mark.parametrize("backend", ["aten", "eager"])
def test_program(program: Callable[..., Any], backend: str, capsys: pytest.CaptureFixture[str]) -> None:
    LOG.clear()
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        compiled = check(program, x(), backend=backend, fullgraph=False, calls=3)
    lines = capsys.readouterr().out.splitlines()
    assert lines[: len(lines) // 2] == lines[len(lines) // 2 :] or _interleaved(lines)
    assert not _whole_fall_backs(record)
    assert any(issubclass(item.category, GraphBreakWarning) for item in record)
    assert compiled.entries[0].resume_point is not None


def _interleaved(lines: list[str]) -> bool:
    # Each of three calls prints once eagerly and once compiled.
    size = len(lines) // 6
    calls = [lines[start : start + size] for start in range(0, len(lines), size)]
    return all(call == calls[0] for call in calls)


def test_writing_to_a_view_after_a_break() -> None:
    # Two inputs of the continuation share memory, and one is written to: refused, so that it runs eagerly.
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        check(views, x(), fullgraph=False)
    assert len(_whole_fall_backs(record)) == 1


def test_loops_reuse_their_entries() -> None:
    def program(a: torch.Tensor, items: list[float]) -> torch.Tensor:
        for _ in items:
            a = a.sin()
            print(end="")
        return a

    compiled = dovetail.compile(program, backend="aten")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for length in (3, 50, 200):
            items = [0.0] * length
            same(program(x(), items), compiled(x(), items))
    counts = [len(item.entries) for item in compiled.continuations()]
    assert max(counts) <= 2, counts


def test_layers_share_a_continuation() -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(3, 3)

        def forward(self, a: torch.Tensor) -> torch.Tensor:
            a = self.linear(a)
            print(end="")
            return a.relu()

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList([Layer() for _ in range(8)])

        def forward(self, a: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                a = layer(a)
            return a

    model = Model()
    compiled = dovetail.compile(model, backend="aten")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = compiled(x())
    same(model(x()), result)
    result.sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    model(x()).sum().backward()
    same([parameter.grad for parameter in model.parameters()], gradients)
    assert sum(len(item.entries) for item in compiled.compiled_call.continuations()) <= 4


def test_one_warning_for_each_place() -> None:
    compiled = dovetail.compile(first_and_last, backend="aten")
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        for size in (2, 3, 4):
            compiled(torch.ones(size))
    texts = [str(item.message) for item in record if issubclass(item.category, GraphBreakWarning)]
    # The second break is a consequence of the same call.
    assert len(texts) == 1 and texts[0].endswith("1 more in this call: DOVETAIL_LOG=breaks shows it")
    assert 'print("first")' in texts[0] and "what to do" in texts[0]
    assert record[0].filename == __file__


def test_fullgraph_refuses() -> None:
    with pytest.raises(GraphBreakError, match="print writes to the terminal"):
        dovetail.compile(in_the_middle, backend="aten", fullgraph=True)(x())


def test_user_exception_after_a_break() -> None:
    log: list[str] = []

    def program(a: torch.Tensor) -> torch.Tensor:
        log.append("start")
        print(end="")
        log.append("end")
        raise ArithmeticError("mine")

    compiled = dovetail.compile(program, backend="aten")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for count in (1, 2):
            with pytest.raises(ArithmeticError, match="mine"):
                compiled(x())
            assert log == ["start", "end"] * count


def test_effects_come_before_the_break() -> None:
    state: dict[str, Any] = {"seen": []}

    def program(a: torch.Tensor) -> torch.Tensor:
        state["a"] = a * 2
        fresh = [1]
        state["fresh"] = fresh
        state["seen"].append(len(state))
        observe()
        fresh.append(2)
        return a.sin()

    def observe() -> None:
        print(end="")
        observed.append((state["a"].sum().item(), list(state["fresh"]), list(state["seen"])))

    observed: list[Any] = []
    expected = program(x())
    eager_state, eager_observed = dict(state), list(observed)
    state.clear()
    state["seen"] = []
    observed.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = dovetail.compile(program, backend="aten")(x())
    same(expected, result)
    assert observed == eager_observed
    assert list(state) == list(eager_state) or set(state) == set(eager_state)
    assert state["fresh"] == [1, 2]
    assert state["seen"] == eager_state["seen"]


def test_state_changes_between_calls_are_seen() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = 2.0
            self.weight = torch.nn.Parameter(torch.ones(3))

        def forward(self, a: torch.Tensor) -> torch.Tensor:
            a = a * self.scale
            print(end="")
            return a * self.weight * self.scale

    model = Model()
    compiled = dovetail.compile(model, backend="aten")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for scale in (2.0, 3.0, 2.0):
            model.scale = scale
            same(model(x()), compiled(x()))
        model.weight = torch.nn.Parameter(torch.full((3,), 5.0))
        same(model(x()), compiled(x()))
        with torch.no_grad():
            same(model(x()), compiled(x()))


def test_training_step_with_backward_inside() -> None:
    def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, a: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = model(a).square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    eager, ours = make(), make()
    compiled = dovetail.compile(step, backend="aten")
    a = x().detach()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(4):
            assert step(*eager, a) == compiled(*ours, a)
    for left, right in zip(eager[0].parameters(), ours[0].parameters(), strict=True):
        assert torch.equal(left, right)


def test_differentiating_through_what_was_computed_before_is_not_cut_off() -> None:
    def program(a: torch.Tensor) -> Any:
        b = a.sin().sum()
        print(end="")
        return torch.autograd.grad(b, a, allow_unused=True)[0]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = dovetail.compile(program, backend="aten")
        a = x()
        same(program(a), compiled(a))


def test_super_after_a_break_finds_the_object() -> None:
    class Doubled(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    class Printed(Doubled):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            print(end="")
            return super().forward(x) + 1

    compiled = dovetail.compile(Printed(), backend="aten")
    for _ in range(2):
        same(torch.full((2,), 3.0), compiled(torch.ones(2)))


# --- how many captures breaks cost ------------------------------------------------------------------------------------


def _pairs(x: torch.Tensor) -> torch.Tensor:
    found = []
    for _, (left, right) in enumerate(zip(x.unbind(0), x.unbind(1), strict=True)):
        scale = (left * right).mean().tolist()
        found.append(left * scale + right)
    return torch.stack(found)


def _branches(x: torch.Tensor) -> torch.Tensor:
    for _ in range(5):
        x = x - 1 if x.sum() > 0 else x * 2
    return x


def _comprehension(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([row * row.sum().tolist() for row in x.unbind(0)])


def _prints(x: torch.Tensor) -> torch.Tensor:
    for name in ("a", "b", "c"):
        x = x * len(name) + 1
        print(end="")
    return x


def _in_a_block(x: torch.Tensor) -> torch.Tensor:
    for _ in range(4):
        with torch.no_grad():
            y = x * 2
            print(end="")
            y = y + 1
        try:
            x = x + y.square().sum().sqrt() if y.sum() > 0 else x
        finally:
            x = x + 1
    return x


@pytest.mark.parametrize(
    ("program", "most"), [(_pairs, 4), (_branches, 5), (_comprehension, 4), (_prints, 4), (_in_a_block, 7)]
)
def test_one_capture_for_each_break(program: Any, most: int) -> None:
    compiled = dovetail.compile(program, backend="aten")
    events = dovetail.events_of(compiled)
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    leaf, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    same(program(leaf), compiled(other))
    captures = events.count("capture")
    assert captures <= min(most, events.count("graph break") + 1)
    for call in (compiled, program):
        call(leaf if call is program else other).sum().backward()
    same(leaf.grad, other.grad)


def test_an_operand_of_a_break_is_there_again() -> None:
    def program(x: torch.Tensor, seen: list[float]) -> torch.Tensor:
        seen.append(1.0 + x.sum().item() * 2)
        text = dict(value=x.mean().item(), other=seen)
        return x * text["value"] + len(seen)

    x = torch.arange(4.0)
    compiled, expected, found = dovetail.compile(program, backend="aten"), [], []
    for _ in range(3):
        same(program(x, expected), compiled(x, found))
    assert found == expected


def checked_by_torch(a: torch.Tensor) -> torch.Tensor:
    b = a.detach().sin().square()
    return torch.nn.functional.gaussian_nll_loss(a * 2, a.detach(), b) * 3  # asks whether any variance is negative


def drawn_by_torch(a: torch.Tensor) -> torch.Tensor:
    return torch.lobpcg(torch.diag(torch.arange(1.0, 10.0)), 1)[1] * a.sum()  # starts at random numbers, and asks


def filled_by_torch(a: torch.Tensor) -> torch.Tensor:
    b = a.detach() * 1
    torch.nn.init.trunc_normal_(b, std=2.0)
    return b * a


@pytest.mark.parametrize("backend", ["aten", "eager"])
@pytest.mark.parametrize(
    "function",
    [
        checked_by_torch,
        drawn_by_torch,
        pytest.param(
            filled_by_torch,
            marks=pytest.mark.skipif(parse(torch.__version__) < (2, 13), reason="torch 2.13 and newer ask the data"),
        ),
    ],
)
def test_what_a_call_had_done_when_it_failed_at_the_data_is_not_done_twice(
    function: Callable[..., Any], backend: str
) -> None:
    with pytest.warns(GraphBreakWarning, match="needs the values of a tensor"):
        compiled = check(function, x(), fullgraph=False, backend=backend)
    assert compiled.entries and all(entry.run is not None for entry in compiled.entries)


def test_what_such_a_call_raises_is_eagers() -> None:
    compiled = dovetail.compile(torch.nn.functional.gaussian_nll_loss, backend="aten")
    with pytest.raises(ValueError, match="negative entry"):
        compiled(x(), x().detach(), -torch.ones(2, 3))


def _has_a_number(a: torch.Tensor) -> Any:
    return a * 2, 3 in a, a + 1


def _has_an_item(a: torch.Tensor) -> Any:
    return a * 2, a[0] in a, a + 1


def _branches_on_it(a: torch.Tensor) -> Any:
    b = a * 2
    return b.sin() if 4 in b else b.cos()


@pytest.mark.parametrize("function", [_has_a_number, _has_an_item, _branches_on_it])
def test_a_search_in_a_tensor_breaks_the_graph(function: Callable[..., Any]) -> None:
    compiled = dovetail.compile(function, backend="aten")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for a in (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0]), torch.tensor([0.0])):
            same(function(a), compiled(a))
    assert {item.category for item in caught} == {GraphBreakWarning}


class Tripled(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {})) * 3


def _exchanged(a: torch.Tensor) -> Any:
    return a.sin(), torch.from_dlpack(a.cos().detach()) + 1


def _applied(a: torch.Tensor) -> Any:
    b = a.sin()
    return b, b.detach().clone().apply_(lambda item: item * 2)


def _in_a_mode(a: torch.Tensor) -> Any:
    with Tripled():
        return torch.sin(a.detach()) + 1


@pytest.mark.parametrize("function", [_exchanged, _applied, _in_a_mode])
def test_a_reason_is_given_that_is_no_error_of_torch(function: Callable[..., Any]) -> None:
    compiled = dovetail.compile(function, backend="aten")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            same(function(x()), compiled(x()))
    assert caught
    assert not [item for item in caught if "capture failed" in str(item.message)]


def _doubled(a: torch.Tensor) -> torch.Tensor:
    note(1)
    return a * 2


def _written_through_data(weight: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        weight.data.copy_(_doubled(a))
        twice = weight * 2
        note(2)
        return twice + weight


def _writing(weight: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    return (_written_through_data(weight, a) * weight).sum()


def test_a_frame_that_has_not_gone_on_yet_ends_no_graph() -> None:
    """Two views of one memory cross a break, and the calling frame waits: the rest runs eagerly, at the first attempt."""
    compiled = dovetail.compile(_writing, backend="aten")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            weights = [torch.ones(2, 3, requires_grad=True) for _ in range(2)]
            results = [
                function(weight, x().detach()) for function, weight in zip((_writing, compiled), weights, strict=True)
            ]
            for result in results:
                result.backward()
            same([results[0], weights[0], weights[0].grad], [results[1], weights[1], weights[1].grad])
    assert dovetail.events_of(compiled).count("capture") <= 3
    assert not [item for item in caught if "report this as a bug" in str(item.message)]
