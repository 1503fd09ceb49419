"""Custom operators that write to arguments (``mutates_args``), and operators that autograd has no kernel for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import dovetail
from dovetail.errors import GraphBreakWarning
from tests.differential import same

LIBRARY = torch.library.Library("dovetail_writes", "FRAGMENT")
WEIGHT = torch.nn.Parameter(torch.linspace(0.5, 1.5, 3))
BUFFER = torch.zeros(3)


@torch.library.custom_op("dovetail_writes::tripled_", mutates_args={"x"})
def tripled_(x: torch.Tensor) -> None:
    x.mul_(3)


tripled_.register_fake(lambda x: None)


@torch.library.custom_op("dovetail_writes::sines_into", mutates_args={"out"})
def sines_into(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x.sin())


sines_into.register_fake(lambda x, out: None)


@torch.library.custom_op("dovetail_writes::both", mutates_args={"a", "b"})
def both(a: torch.Tensor, b: torch.Tensor, shift: float) -> torch.Tensor:
    a.add_(shift)
    b.mul_(2)
    return a + b


both.register_fake(lambda a, b, shift: torch.empty_like(a))


@torch.library.custom_op("dovetail_writes::counted", mutates_args={"count", "others"})
def counted(x: torch.Tensor, count: torch.Tensor | None, others: list[torch.Tensor]) -> torch.Tensor:
    if count is not None:
        count.add_(x.sum())
    for number, other in enumerate(others):
        other.add_(x * number)
    return x * 2


counted.register_fake(lambda x, count, others: torch.empty_like(x))
LIBRARY.define("added_(Tensor(a!) x, Tensor y) -> ()")
LIBRARY.impl("added_", lambda x, y: (x.add_(y), None)[1], "CPU")
LIBRARY.impl("added_", lambda x, y: None, "Meta")
LIBRARY.define("itself_(Tensor(a!) x) -> Tensor(a!)")
LIBRARY.impl("itself_", lambda x: x.mul_(5), "CPU")
LIBRARY.impl("itself_", lambda x: x, "Meta")
LIBRARY.define("product(Tensor x, Tensor y) -> Tensor")
LIBRARY.impl("product", lambda x, y: (x * y).sin(), "CompositeExplicitAutograd")
OPERATORS = torch.ops.dovetail_writes


class Counting(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return counted(x, count, [])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return gradient * 2 + x, None


def an_input(x: torch.Tensor) -> Any:
    tripled_(x)
    return x + 1


def views_of_an_input(x: torch.Tensor) -> Any:
    tripled_(x[0])
    column = x[:, 1]
    tripled_(column)
    return column, x * 1


def an_empty_result(x: torch.Tensor) -> Any:
    out = torch.empty_like(x)
    sines_into(x, out)
    return out + 1


def the_same_memory_again(x: torch.Tensor) -> Any:
    y = torch.zeros_like(x)
    for number in range(4):
        sines_into(x * number, y)
        x = x + y
    return x, y


def several_arguments(x: torch.Tensor) -> Any:
    y = x.clone()
    return both(x, y, 1.5), y, both(y, y, 0.5), both(y[0], y[1], 2.0)


def an_input_and_its_view(x: torch.Tensor) -> Any:
    return both(x, x[:], 2.0)


def optional_and_lists(x: torch.Tensor) -> Any:
    y, z, count = x.clone(), x.sin(), torch.zeros(())
    return counted(x, None, []), counted(x, count, [y, z]), count, y, z


def a_buffer(x: torch.Tensor) -> Any:
    sines_into(BUFFER + 1, BUFFER)
    return BUFFER * x


def a_parameter_without_gradients(x: torch.Tensor) -> Any:
    with torch.no_grad():
        tripled_(WEIGHT)
    return x * WEIGHT


def behind_a_custom_function(x: torch.Tensor) -> Any:
    result = Counting.apply((x * WEIGHT).sin(), BUFFER[0])
    return (result * BUFFER).sum()


def a_detached_copy(x: torch.Tensor) -> Any:
    y = x * WEIGHT
    z = y.detach().clone()
    tripled_(z)
    return (y * z).sum()


def a_step(x: torch.Tensor) -> Any:
    WEIGHT.grad = None
    loss = (x * WEIGHT).square().sum()
    loss.backward()
    tripled_(WEIGHT.grad)
    with torch.no_grad():
        WEIGHT.sub_(WEIGHT.grad * 0.01)
    return loss.detach()


def defined_by_hand(x: torch.Tensor) -> Any:
    y = x.sin()
    OPERATORS.added_(y, x)
    OPERATORS.added_(x, y)
    return y


def differentiated_inside(x: torch.Tensor) -> Any:
    y = x * 1
    OPERATORS.added_(y, WEIGHT * 2)
    return OPERATORS.product(y, WEIGHT * 3).sum()


def returns_its_argument(x: torch.Tensor) -> Any:
    y = x.clone()
    z = OPERATORS.itself_(y)
    return z, y, z is y


ONE_GRAPH = [
    an_input,
    views_of_an_input,
    an_empty_result,
    the_same_memory_again,
    several_arguments,
    an_input_and_its_view,
    optional_and_lists,
    a_buffer,
    a_parameter_without_gradients,
    behind_a_custom_function,
    a_detached_copy,
    a_step,
    defined_by_hand,
]
WITH_BREAKS = [differentiated_inside, returns_its_argument]


@contextlib.contextmanager
def _state() -> Iterator[None]:
    before = WEIGHT.detach().clone()
    yield
    WEIGHT.data = before
    WEIGHT.grad = None
    BUFFER.zero_()


def _outcome(function: Callable[..., Any], mode: Callable[[], Any] = contextlib.nullcontext) -> Any:
    x = torch.linspace(0.1, 1, 9).view(3, 3).clone()
    with _state():
        versions = x._version, WEIGHT._version, BUFFER._version
        with mode():
            result = function(x)
        written = [now > before for now, before in zip((x._version, WEIGHT._version, BUFFER._version), versions)]
        gradient = None
        if isinstance(result, torch.Tensor) and result.requires_grad:
            gradient = torch.autograd.grad(result.sum(), WEIGHT)[0]
        values = [
            item.detach().clone() if isinstance(item, torch.Tensor) else item
            for item in (*(result if isinstance(result, tuple) else (result,)), x, WEIGHT, WEIGHT.grad, BUFFER)
        ]
        return values, written, gradient


@pytest.mark.parametrize("program", ONE_GRAPH, ids=lambda item: item.__name__)
def test_one_graph(program: Callable[..., Any]) -> None:
    compiled = dovetail.compile(program, backend="aten", fullgraph=True)
    for _ in range(2):
        same(_outcome(program), _outcome(compiled))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("program", [*ONE_GRAPH[:8], *WITH_BREAKS], ids=lambda item: item.__name__)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
@pytest.mark.filterwarnings("ignore")
def test_without_gradients(program: Callable[..., Any], mode: Callable[[], Any]) -> None:
    compiled = dovetail.compile(program, backend="aten")
    for _ in range(2):
        same(_outcome(program, mode), _outcome(compiled, mode))


@pytest.mark.parametrize("program", WITH_BREAKS, ids=lambda item: item.__name__)
@pytest.mark.filterwarnings("ignore:dovetail_writes")
def test_what_breaks_the_graph(program: Callable[..., Any]) -> None:
    compiled = dovetail.compile(program, backend="aten")
    with pytest.warns(GraphBreakWarning, match="has no gradient of its own|writes to an argument and returns it"):
        same(_outcome(program), _outcome(compiled))
    same(_outcome(program), _outcome(compiled))
