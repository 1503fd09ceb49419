"""``torch.cond`` on data is a node of the graph; ``flex_attention`` breaks it. Gradients, closures and modules are as in eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention
from torch.utils._pytree import tree_leaves

import dovetail
from dovetail.errors import GraphBreakError
from tests.differential import check_calls

LINEAR = torch.nn.Linear(2, 2)


def by_data(x: torch.Tensor) -> Any:
    return torch.cond(x.sum() > 0, lambda x: x.cos(), lambda x: x.sin(), [x * 2]) + 1


def with_a_module(x: torch.Tensor) -> Any:
    y, shift = LINEAR(x), x.exp()
    return torch.cond(x.sum() > 0, lambda z: LINEAR(z) + shift, lambda z: z * shift, (y,)).sum()


def inside_of_a_helper(x: torch.Tensor) -> Any:
    def choose(y: torch.Tensor) -> torch.Tensor:
        def first(z: torch.Tensor) -> torch.Tensor:
            return z.tanh()

        return torch.cond(pred=y.sum() > 0, true_fn=first, false_fn=torch.exp, operands=(y,))

    return choose(x * 2) * choose(x - 1)


def _nested(x: torch.Tensor) -> Any:
    return torch.cond(x.sum() > 0, lambda x: torch.cond(x.sum() > 1, torch.cos, torch.sin, [x]), torch.tanh, [x])


def _one_uses_what_the_other_does_not(x: torch.Tensor) -> Any:
    scaled = torch.cond((x * 2).sum() > 0, lambda y: (y * LINEAR.weight).exp(), lambda y: y - LINEAR.bias, [x * 3])
    return scaled.sum() * x


def _several_results(x: torch.Tensor) -> Any:
    first = lambda x: (x * 2, {"sum": x.sum(), "row": x[0].clone()})  # noqa: E731
    found = torch.cond(x.sum() > 0, first, lambda x: (x.sin(), {"sum": x.mean(), "row": x[1] + 1}), [x])
    return found[0] + 1, found[1]["sum"], found[1]["row"]


def _nested_operands(x: torch.Tensor) -> Any:
    first = lambda pair, named: pair[0] * pair[1][0] + named["shift"]  # noqa: E731
    second = lambda pair, named: (pair[1][0] - named["shift"]).exp()  # noqa: E731
    return torch.cond(x.sum() > 0, first, second, ((x, [LINEAR(x)]), {"shift": x.sin()}))


def _in_a_loop(x: torch.Tensor) -> Any:
    for step in range(3):
        x = torch.cond(x.sum() > 0, lambda z, step=step: z.clone().sub_(step), lambda z, step=step: z + step + 1, (x,))
    return x


def _not_differentiable_there(x: torch.Tensor) -> Any:
    return torch.cond(x.sum() > 0, lambda x: x.sqrt(), lambda x: x.abs().log(), [x - 1])


NODES = [
    by_data,
    with_a_module,
    inside_of_a_helper,
    _nested,
    _one_uses_what_the_other_does_not,
    _several_results,
    _nested_operands,
    _in_a_loop,
]


def _plain(pred: Any, true_fn: Any, false_fn: Any, operands: Any = ()) -> Any:
    return (true_fn if pred else false_fn)(*operands)


def _results(function: Callable[..., Any]) -> list[Any]:
    """Results and gradients for both sides; a gradient that does not exist is zero."""
    found: list[Any] = []
    for sign in (1, -1, 0, 1):
        LINEAR.zero_grad()
        x = (sign * torch.tensor([[1.0, 2.0], [3.0, 4.0]])).requires_grad_()
        results = tree_leaves(function(x))
        torch.stack([item.square().sum() for item in results]).sum().backward()
        gradients = [
            torch.zeros_like(item) if item.grad is None else item.grad.clone() for item in (x, *LINEAR.parameters())
        ]
        found.append([*(item.detach() for item in results), *gradients])
    return found


@pytest.mark.parametrize("program", [*NODES, _not_differentiable_there], ids=lambda item: item.__name__)
def test_a_condition_on_data_is_one_node(program: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own ``cond`` compiles what it is given, which takes seconds: here a plain ``if`` is the oracle."""
    compiled = dovetail.compile(program, backend="aten", fullgraph=True)
    actual = _results(compiled)
    assert len(compiled.entries) == 1
    monkeypatch.setattr(torch, "cond", _plain)
    torch.testing.assert_close(actual, _results(program), equal_nan=True)


@pytest.mark.slow
@pytest.mark.parametrize("program", NODES, ids=lambda item: item.__name__)
def test_a_condition_on_data_is_as_torchs(program: Callable[..., Any]) -> None:
    inputs = [(sign * torch.tensor([[1.0, 2.0], [3.0, 4.0]])).requires_grad_() for sign in (1, -1, 0, 1)]
    check_calls(program, [(x,) for x in inputs], backend="aten", fullgraph=True, exact="close")


@pytest.mark.slow
def test_gradients_of_parameters_exist_on_both_sides() -> None:
    def gradients(function: Callable[..., Any]) -> Any:
        found = []
        for sign in (1, -1, 1):
            LINEAR.zero_grad()
            x = (sign * torch.ones(2, 2)).requires_grad_()
            function(x).sum().backward()
            found.append(
                [None if item is None else item.tolist() for item in (x.grad, LINEAR.weight.grad, LINEAR.bias.grad)]
            )
        return found

    compiled = dovetail.compile(_one_uses_what_the_other_does_not, backend="aten", fullgraph=True)
    assert gradients(compiled) == gradients(_one_uses_what_the_other_does_not)


def _a_module_or_none(x: torch.Tensor) -> Any:
    return torch.cond(x.sum() > 0, LINEAR, lambda z: z.sin(), (x.detach(),))


def _a_gradient_or_none(x: torch.Tensor) -> Any:
    return torch.cond(x.sum() > 0, lambda z: z.detach().cos(), lambda z: z.sin(), (x,))


def _no_gradient_on_either_side(x: torch.Tensor) -> Any:
    return torch.cond(x.sum() > 0, lambda z: z.detach().cos(), lambda z: z.detach().sin(), (x,))


def _one_result_without_gradient(x: torch.Tensor) -> Any:
    def first(z: torch.Tensor) -> Any:
        return z.sin(), z.detach().cos()

    return torch.cond(x.sum() > 0, first, lambda z: (z.cos(), LINEAR(z)), (x,))


GRADIENTS_DIFFER = [
    *(_a_module_or_none, _a_gradient_or_none, _no_gradient_on_either_side, _one_result_without_gradient)
]


def _results_and_gradients(function: Callable[..., Any], sign: int) -> list[Any]:
    LINEAR.zero_grad()
    x = (sign * torch.ones(2, 2)).requires_grad_()
    results = tree_leaves(function(x))
    sum(item.sum() for item in results if item.requires_grad).backward()
    found = [(item.requires_grad, item.tolist()) for item in results]
    return [found, *(None if item.grad is None else item.grad.tolist() for item in (x, LINEAR.weight, LINEAR.bias))]


@pytest.mark.slow
@pytest.mark.parametrize("program", GRADIENTS_DIFFER)
def test_functions_that_differ_in_who_has_a_gradient(program: Callable[..., Any]) -> None:
    compiled = dovetail.compile(program, backend="aten", fullgraph=True)
    for sign in (1, -1, 1):
        assert _results_and_gradients(compiled, sign) == _results_and_gradients(program, sign)
    assert len(compiled.entries) == 1


def test_a_function_without_gradients_gives_zeros() -> None:
    compiled = dovetail.compile(_a_module_or_none, backend="aten", fullgraph=True)
    zeros, twos = [[0.0, 0.0], [0.0, 0.0]], [[2.0, 2.0], [2.0, 2.0]]
    assert _results_and_gradients(compiled, -1)[1:] == [None, zeros, zeros[0]]
    assert _results_and_gradients(compiled, 1)[1:] == [None, twos, twos[0]]
    found = _results_and_gradients(dovetail.compile(_a_gradient_or_none, backend="aten", fullgraph=True), 1)
    assert found[0] == [(True, torch.ones(2, 2).cos().tolist())] and found[1] == zeros


@pytest.mark.slow
def test_a_derivative_is_a_constant_as_in_eager() -> None:
    for function in (_nested, dovetail.compile(_nested, backend="aten", fullgraph=True)):
        x = torch.ones(2, requires_grad=True)
        (slope,) = torch.autograd.grad(function(x).square().sum(), x, create_graph=True)
        assert not slope.requires_grad


LOG: list[int] = []


def _writes_to_a_list(x: torch.Tensor) -> Any:
    return torch.cond(x.sum() > 0, lambda x: (LOG.append(1), x.sin())[1], lambda x: x.cos(), [x])


def _writes_to_its_own_list(x: torch.Tensor) -> Any:
    log: list[int] = []
    y = torch.cond(x.sum() > 0, lambda x: (log.append(1), x.sin())[1], lambda x: x.cos(), [x])
    return y * len(log)


def _counts(x: torch.Tensor) -> Any:
    count = 0

    def first(x: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        return x.sin()

    return torch.cond(x.sum() > 0, first, lambda x: x.cos(), [x]) * count


def _writes_deep_inside(x: torch.Tensor) -> Any:
    box = [[[[[[0]]]]]]

    def first(x: torch.Tensor) -> torch.Tensor:
        box[0][0][0][0][0][0] += 1
        return x.sin()

    return torch.cond(x.sum() > 0, first, lambda x: x.cos(), [x]) * box[0][0][0][0][0][0]


class _Counter:
    def __init__(self, depth: int) -> None:
        self.count = 0
        self.next = _Counter(depth - 1) if depth else self

    def called(self, x: torch.Tensor) -> torch.Tensor:
        self.next.next.next.next.next.next.count += 1
        return x.sin()


def _writes_to_a_far_object(x: torch.Tensor) -> Any:
    counter = _Counter(6)
    y = torch.cond(x.sum() > 0, counter.called, lambda x: x.cos(), [x])
    return y * counter.next.next.next.next.next.next.count


def _writes_to_a_list_that_it_is_given(x: torch.Tensor) -> Any:
    rows = [x, x + 1]
    y = torch.cond(x.sum() > 0, lambda rows: rows.pop().sin(), lambda rows: rows[0].cos(), [rows])
    return y * len(rows)


@pytest.mark.parametrize(
    "function",
    [
        _writes_to_its_own_list,
        _writes_deep_inside,
        _writes_to_a_far_object,
        _writes_to_a_list_that_it_is_given,
    ],
)
def test_writes_are_seen_however_deep(function: Callable[[torch.Tensor], Any]) -> None:
    with pytest.raises(GraphBreakError, match="writes to what exists outside"):
        dovetail.compile(function, backend="aten", fullgraph=True)(torch.ones(2, 2))


REFUSED: dict[str, Callable[[torch.Tensor], Any]] = {
    "writes to an operand": lambda x: torch.cond(x.sum() > 0, lambda x: x.add_(1), lambda x: x.sin(), [x.detach() + 1]),
    "a list": _writes_to_a_list,
    "a list of its own": _writes_to_its_own_list,
    "a variable": _counts,
    "a list in lists": _writes_deep_inside,
    "an object of objects": _writes_to_a_far_object,
    "a list that it is given": _writes_to_a_list_that_it_is_given,
    "an operand in a list": lambda x: torch.cond(x.sum() > 0, lambda rows: rows[0], lambda rows: rows[0] + 1, [[x]]),
    "a number in a list": lambda x: torch.cond(x.sum() > 0, lambda p: p[0] * p[1], lambda p: p[0].cos(), [[x, 2]]),
    "the operand": lambda x: torch.cond(x.sum() > 0, lambda x: x, lambda x: x.cos(), [x]),
    "a view": lambda x: torch.cond(x.sum() > 0, lambda x: x.t(), lambda x: x.cos(), [x]),
    "two shapes": lambda x: torch.cond(x.sum() > 0, lambda x: x.sum(0), lambda x: x.cos(), [x]),
    "two structures": lambda x: torch.cond(x.sum() > 0, lambda x: (x.sin(),), lambda x: x.cos(), [x]),
    "random numbers": lambda x: torch.cond(
        x.sum() > 0, lambda x: torch.nn.functional.dropout(x), lambda x: x.cos(), [x]
    ),
    "a branch": lambda x: torch.cond(
        x.sum() > 0, lambda x: x.cos() if x.sum() > 1 else x.sin(), lambda x: x.cos(), [x]
    ),
    "a constant": lambda x: torch.cond(x.sum() > 0, lambda x: torch.ones(2, 2), lambda x: x.cos(), [x]),
    "no gradient": lambda x: torch.cond(x.sum() > 0, lambda x: x.detach().cos(), lambda x: x.detach().sin(), [x]),
    "two elements": lambda x: torch.cond(x[0] > 0, lambda x: x.cos(), lambda x: x.sin(), [x]),
    "numbers": lambda x: torch.cond(x.sum() > 0, lambda x, n: x * n, lambda x, n: x, [x, 2]),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_what_torch_may_refuse_is_left_to_it(name: str) -> None:
    def outcomes(function: Callable[..., Any]) -> list[Any]:
        found = []
        for sign in (1, -1):
            LOG.clear()
            torch.manual_seed(0)
            try:
                result = function((sign * torch.ones(2, 2)).requires_grad_())
                found.append((result.tolist(), result.requires_grad))
            except Exception as error:  # noqa: BLE001
                found.append(type(error).__name__)
        return found

    assert outcomes(dovetail.compile(REFUSED[name], backend="aten")) == outcomes(REFUSED[name])


def test_one_graph_is_refused_in_words() -> None:
    with pytest.raises(GraphBreakError, match="flex_attention compiles the functions .*\n.*flex_attention"):
        dovetail.compile(lambda x: flex_attention(x, x, x), backend="aten", fullgraph=True)(torch.ones(1, 1, 2, 16))
    with pytest.raises(GraphBreakError, match="returns something else than new tensors(.*\n)*.*torch.where"):
        dovetail.compile(REFUSED["a view"], backend="aten", fullgraph=True)(torch.ones(2, 2))


def test_a_plain_condition_is_part_of_the_graph() -> None:
    def program(x: torch.Tensor, flag: bool) -> Any:
        return torch.cond(flag, lambda x: x.cos(), lambda x: x.sin(), [x]) * 2

    x = torch.ones(3, requires_grad=True)
    check_calls(program, [(x, True), (x, False), (x, True)], backend="aten", fullgraph=True)
