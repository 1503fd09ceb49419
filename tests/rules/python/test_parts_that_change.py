"""Code after a graph break that reads something else at each call: it runs for real up to there, and what follows is compiled."""

from __future__ import annotations

import collections
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail
from dovetail.errors import RecompileLimitError, RecompileLimitWarning
from tests.differential import captures, same

Tensor = torch.Tensor
quiet = pytest.mark.usefixtures("quiet")


class Transition(collections.namedtuple("Transition", "state action following reward")):
    """A step of an environment."""


def agent() -> tuple[Callable[[random.Random, Any], Any], torch.nn.Module]:
    """The update of a deep Q network, with its sample of the buffer."""
    torch.manual_seed(0)
    network = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(network.parameters(), 0.01)

    def update(source: random.Random, buffer: Any) -> Any:
        transitions = source.sample(buffer, 6)
        batch = Transition(*zip(*transitions, strict=True))
        mask = torch.tensor(tuple(map(lambda item: item is not None, batch.following)))
        following = torch.stack([item for item in batch.following if item is not None])
        states = torch.stack(batch.state)
        actions = torch.tensor(batch.action)
        rewards = torch.tensor(batch.reward)
        values = torch.zeros(6)
        with torch.no_grad():
            values[mask] = network(following).max(1).values
        chosen = network(states).gather(1, actions[:, None])[:, 0]
        loss = torch.nn.functional.smooth_l1_loss(chosen, values * 0.9 + rewards)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return update, network


def filled(buffer: Any, source: random.Random, count: int, state: Tensor) -> Tensor:
    for _ in range(count):
        following = None if source.random() < 0.2 else state * 0.9 + source.random()
        buffer.append(Transition(state, source.randrange(2), following, source.random()))
        state = torch.zeros(3) if following is None else following
    return state


@pytest.mark.slow
@quiet
def test_a_sample_of_a_replay_buffer() -> None:
    (eager, twin), (update, network) = agent(), agent()
    compiled = dovetail.compile(update, backend="aten", recompile_limit=6)
    buffer: collections.deque[Transition] = collections.deque(maxlen=60)
    source = random.Random(1)
    state, found = torch.zeros(3), []
    for number in range(45):
        state = filled(buffer, source, 3 if number else 20, state)
        same(eager(random.Random(number), buffer), compiled(random.Random(number), buffer))
        same(list(twin.parameters()), list(network.parameters()))
        found.append(captures(compiled))
    assert found[-1] == found[35] < 35
    # What follows the sample is a part of its own.
    assert len(compiled.continuations()) > 2


def checked(function: Callable[..., Any], calls: list[tuple[Any, ...]], most: int | None = None) -> Any:
    """Compare calls with few entries for each part."""
    compiled = dovetail.compile(function, backend="aten", recompile_limit=2)
    for args in calls:
        try:
            expected: Any = function(*args)
        except ArithmeticError as error:
            with pytest.raises(type(error), match=str(error)):
                compiled(*args)
        else:
            same(expected, compiled(*args))
    assert most is None or captures(compiled) <= most
    return compiled


def flags(number: int) -> list[Any]:
    """Texts and truths that are others at each call. Where the programs slice a text, they need the text itself."""
    return [f"t{number}", bool(number & 1), bool(number & 2), bool(number & 4), number]


def straight(items: Any, x: Tensor) -> Any:
    y = x * 2
    print(end="")
    first = items[0][:] + "!"
    second = len(first) + items[1]
    z = y * second
    return z.relu() + 1, first


def raising(items: Any, x: Tensor) -> Any:
    print(end="")
    name = items[0][:]
    if items[1] and items[2]:
        raise ArithmeticError(name)
    return x + 1, name


def handling(items: Any, x: Tensor) -> Any:
    print(end="")
    try:
        name = items[0][:]
        if items[1]:
            raise KeyError(name)
        y = x * 3
    except KeyError as error:
        y = x - 1
        name = str(error)
    finally:
        x = x + 1
    return y * x, name


def in_a_with(items: Any, x: Tensor) -> Any:
    with torch.no_grad():
        print(end="")
        name = items[0][:]
        y = x * (2 if items[1] else 3)
    return y + x, name, torch.is_grad_enabled()


def in_a_loop(items: Any, x: Tensor) -> Any:
    names = []
    for number in range(3):
        print(end="")
        names.append(items[0][:] + str(number))
        if items[2]:
            continue
        x = x * 1.5
    return x, names


def called(items: Any, x: Tensor) -> Any:
    def inner(y: Tensor) -> Any:
        print(end="")
        name = items[0][:]
        if items[3]:
            return y * 5, name
        return y - 1, name

    y, name = inner(x + 1)
    return y.sum() * x, name


def in_a_closure(items: Any, x: Tensor) -> Any:
    total = 0.0

    def add(number: float) -> None:
        nonlocal total
        total += number

    print(end="")
    add(len(items[0][:]))
    add(items[4])
    name = items[0][:]
    add(2.0)
    return x * total, name


def over_several_lines(items: Any, x: Tensor) -> Any:
    print(end="")
    found = dict(name=items[0][:], first=x * 2, flags=[items[1], items[2]])
    return found, x + 1


def drawing(items: Any, x: Tensor) -> Any:
    print(end="")
    name = items[0][:]
    noise = torch.rand(2)
    return x * noise, name


PROGRAMS = [straight, raising, handling, in_a_with, in_a_loop, called, in_a_closure, over_several_lines]


@pytest.mark.sampled(2)
@quiet
@pytest.mark.parametrize("program", PROGRAMS)
def test_what_changes_is_eagers(program: Callable[..., Any]) -> None:
    checked(program, [(flags(number), torch.full((2,), number + 1.0)) for number in range(16)])
    checked(program, [(flags(number), torch.ones(2, requires_grad=True)) for number in range(8)])


@quiet
def test_what_follows_is_compiled() -> None:
    compiled = checked(straight, [(flags(number), torch.full((2,), number + 1.0)) for number in range(30)], most=12)
    assert len(compiled.continuations()) > 1


@quiet
def test_random_numbers_are_drawn_once() -> None:
    compiled = dovetail.compile(drawing, backend="aten", recompile_limit=2)
    for number in range(8):
        torch.manual_seed(number)
        expected, state = drawing(flags(number), torch.ones(2)), torch.get_rng_state()
        torch.manual_seed(number)
        same(expected, compiled(flags(number), torch.ones(2)))
        assert torch.equal(state, torch.get_rng_state())


def test_it_is_said_once() -> None:
    compiled = dovetail.compile(straight, backend="aten", recompile_limit=2)
    with pytest.warns(RecompileLimitWarning, match="runs eagerly up to that") as said:
        for number in range(12):
            compiled(flags(number), torch.ones(2))
    places = [str(item.message).split(" has been")[0] for item in said if item.category is RecompileLimitWarning]
    assert len(places) == len(set(places))


@quiet
def test_an_error_where_that_is_asked_for() -> None:
    compiled = dovetail.compile(straight, backend="aten", recompile_limit=2, at_recompile_limit="error")
    with pytest.raises(RecompileLimitError):
        for number in range(6):
            compiled(flags(number), torch.ones(2))


@pytest.mark.slow
@quiet
def test_a_program_that_changes_everywhere_is_left_to_eager() -> None:
    lines = "\n".join(f"    names.append(items[0][:] + '{number}')\n    x = x * 2 - {number}" for number in range(30))
    space: dict[str, Any] = {}
    exec(f"def program(items, x):\n    names = []\n    print(end='')\n{lines}\n    return x, names", space)
    checked(space["program"], [(flags(number), torch.ones(2)) for number in range(40)], most=60)


# --- from the start of a function ---------------------------------------------------------------------------------------


def with_defaults(items: Any, x: Tensor, *others: Any, scale: float = 2.0, **named: Any) -> Any:
    name = items[0][:]
    offset = 1.0 if items[1] else 3.0
    y = (x * scale + offset).relu()
    return y, name, others, named


def with_a_closure(items: Any, x: Tensor) -> Any:
    total = len(items[0][:])

    def grow(number: int) -> int:
        nonlocal total
        total += number
        return total

    first = items[0][:] + "?"
    grow(3 if items[2] else 5)
    return x * grow(2), first, [item * total for item in (1, 2)]


def with_an_error(items: Any, x: Tensor) -> Any:
    try:
        name = items[0][:]
        if items[1]:
            raise ArithmeticError(name)
    finally:
        items.append("seen")
    return x * 2, name


def with_locals(items: Any, x: Tensor) -> Any:
    name = items[0][:]
    flag = items[1]
    return x * 2, sorted(key for key in locals() if key != "x"), name, flag


class Model(torch.nn.Module):
    """A method with a name of the class in it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.seen: list[str] = []

    def update(self, items: Any, x: Tensor) -> Any:
        name = items[0][:]
        self.seen.append(name)
        y = x * self.weight
        return super().__repr__() == "Model()", y + len(self.seen)


@pytest.mark.sampled(2)
@quiet
@pytest.mark.parametrize("program", [with_defaults, with_a_closure, with_an_error, with_locals])
def test_a_function_from_its_start(program: Callable[..., Any]) -> None:
    for grad in (False, True):
        checked(program, [(flags(number), torch.ones(2, requires_grad=grad) * number) for number in range(14)])


@quiet
def test_arguments_by_name() -> None:
    compiled = dovetail.compile(with_defaults, backend="aten", recompile_limit=2)
    for number in range(8):
        args, named = (flags(number), torch.ones(2)), {"scale": 3.0, "other": number} if number % 2 else {}
        same(with_defaults(*args, *args[:1], **named), compiled(*args, *args[:1], **named))
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'x'"):
        compiled(flags(9))


@quiet
def test_a_method() -> None:
    model, twin = Model(), Model()
    compiled = dovetail.compile(model.update, backend="aten", recompile_limit=2)
    for number in range(8):
        same(twin.update(flags(number), torch.ones(2)), compiled(flags(number), torch.ones(2)))
        assert model.seen == twin.seen
    assert len(compiled.continuations()) > 0


@quiet
def test_one_graph_where_that_is_asked_for() -> None:
    def function(items: Any, x: Tensor) -> Any:
        name = items[0][:]
        return x * 2, name

    compiled = dovetail.compile(function, backend="aten", recompile_limit=2, fullgraph=True)
    for number in range(5):
        same(function(flags(number), torch.ones(2)), compiled(flags(number), torch.ones(2)))
    assert not compiled.continuations()
