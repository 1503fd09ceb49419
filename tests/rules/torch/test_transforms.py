"""What ``torch.func`` returns has the name, the text and the attributes of the function that it was made of."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail
from dovetail.errors import GraphBreakError


def slope_of(x: torch.Tensor, power: int = 2) -> torch.Tensor:
    """Sum up powers."""
    return (x**power).sum()


slope_of.unit = "metre"  # type: ignore[attr-defined]


@pytest.mark.parametrize("transform", [torch.vmap, torch.func.grad, torch.func.grad_and_value, torch.func.jacrev])
def test_a_transformed_function_is_named_as_in_eager(transform: Callable[..., Any]) -> None:
    def program(x: torch.Tensor) -> Any:
        return transform(slope_of), x + 1

    compiled = dovetail.compile(program, backend="aten", fullgraph=True)
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    expected, _ = program(x)
    for _ in range(2):
        actual, _ = compiled(x)
        assert (actual.__name__, actual.__doc__, actual.__module__) == (
            expected.__name__,
            expected.__doc__,
            expected.__module__,
        )
        assert inspect.signature(actual) == inspect.signature(expected)
        assert getattr(actual, "__wrapped__", None) is getattr(expected, "__wrapped__", None)
        assert vars(actual).get("unit") == vars(expected).get("unit")
        torch.testing.assert_close(actual(x), expected(x))


def test_a_function_made_inside_keeps_its_name_through_two_transforms() -> None:
    def program(x: torch.Tensor) -> Any:
        def inner(row: torch.Tensor) -> torch.Tensor:
            return row.sin().sum() * x.shape[0]

        return torch.vmap(torch.func.grad(inner)), x * 2

    compiled = dovetail.compile(program, backend="aten")
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    function, doubled = compiled(x)
    assert function.__name__ == function.__wrapped__.__name__ == "inner"
    torch.testing.assert_close(function(x), x.cos() * 2)
    torch.testing.assert_close(doubled, x * 2)


def _pulled(x: torch.Tensor) -> Any:
    y, pull = torch.func.vjp(lambda t: t.sin() * t, x)
    print(end="")
    return y, pull(torch.ones_like(y))[0]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "program",
    [_pulled, lambda x: torch.func.vjp(torch.sin, x)[1], lambda x: functools.partial(torch.func.vjp(torch.sin, x)[1])],
)
def test_a_pull_back_that_keeps_tensors_of_the_graph_does_not_leave_it(program: Callable[..., Any]) -> None:
    x = torch.ones(3)
    expected, found = program(x), dovetail.compile(program, backend="aten")(x)
    if program is not _pulled:
        expected, found = expected(x), found(x)
    torch.testing.assert_close(found, expected)
    with pytest.raises(GraphBreakError, match="keeps tensors of the graph|print writes"):
        dovetail.compile(program, backend="aten", fullgraph=True)(x)


_FACTOR = {"now": 1.0}
_SEEN: list[int] = []


def _cube(x: torch.Tensor) -> torch.Tensor:
    _SEEN.append(x.dim())
    return (x**3 * _FACTOR["now"]).sum()


MADE_OUTSIDE = {
    "grad": torch.func.grad(_cube),
    "vmap of grad": torch.vmap(torch.func.grad(_cube)),
    "jacobian of vmap": torch.func.jacrev(torch.vmap(_cube)),
    "vmap of vmap": torch.vmap(torch.vmap(torch.func.grad(_cube))),
    "grad without autocast": torch.func.grad(torch.autocast("cpu", enabled=False)(_cube)),
}


@pytest.mark.parametrize("name", MADE_OUTSIDE)
def test_a_transform_of_a_transform_that_was_made_outside(name: str) -> None:
    """What the function inside reads is guarded, and what it writes is written at each call."""
    made = MADE_OUTSIDE[name]
    x = torch.randn(2, 2, 3)[: 2 if "vmap of vmap" in name else 1].squeeze(0)
    x = x[0] if name.startswith("grad") else x

    def function(x: torch.Tensor) -> torch.Tensor:
        return made(x * 2)

    compiled = dovetail.compile(function, backend="aten", fullgraph=True)
    for factor in (1.0, 1.0, 2.0, 3.0):
        _FACTOR["now"] = factor
        found = []
        for run in (function, compiled):
            _SEEN.clear()
            found.append((run(x), list(_SEEN)))
        assert torch.equal(found[0][0], found[1][0]) and found[0][1] == found[1][1]
