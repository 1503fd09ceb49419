"""A backend's callable that raises while it runs: ATen's operators finish the graph; the program's errors stay."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dovetail
from dovetail.backends import Backend
from dovetail.errors import BackendError, EagerFallbackWarning
from dovetail.passes.unfinished_runs import draws_numbers


class Broken(RuntimeError):
    """Of a kernel."""


def failing(kinds: set[str], first: int, clears: bool = False, **facts: Any) -> Backend:
    """A backend whose callables for these kinds of graph raise from their run number ``first`` on."""

    def compile_graph(graph: torch.fx.GraphModule, inputs: Any, *, kind: str, options: Any) -> Any:
        runs = [0]

        def run(values: list[Any]) -> list[Any]:
            runs[0] += 1
            given = list(values)
            if clears:
                values.clear()
            if kind in kinds and runs[0] >= first:
                # What a graph that draws numbers may have done by then.
                _ = [torch.rand(1) for node in graph.graph.nodes if "bernoulli" in str(node.target)]
                raise Broken("no kernel")
            return list(graph(*given))

        return run

    return Backend("failing", compile_graph, **facts)


def train(model: nn.Module, call: Callable[[Tensor], Tensor]) -> list[Any]:
    torch.manual_seed(0)
    out: list[Any] = []
    for _ in range(4):
        x = torch.randn(3, 4, requires_grad=True)
        call(x).square().mean().backward()
        out += [x.grad.tolist(), torch.rand(1).item()]  # type: ignore[union-attr]
    with torch.no_grad():
        out.append(call(torch.ones(3, 4)).tolist())
    return [*out, *[value.tolist() for value in model.state_dict().values()], *[p.grad for p in model.parameters()]]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("first", [1, 2])
@pytest.mark.parametrize("kinds", [{"forward"}, {"backward"}, {"inference"}, {"forward", "backward", "inference"}])
@pytest.mark.parametrize("clears", [False, True])
def test_operators_finish_the_run(kinds: set[str], first: int, clears: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())
    twin = copy.deepcopy(model)
    if "backward" in kinds and clears and first > 1:
        pytest.skip("what the backward was given is gone")
    expected = train(model, model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = train(twin, dovetail.compile(twin, backend=failing(kinds, first, clears)))
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(torch.as_tensor(other), torch.as_tensor(one))
    mine = [str(item.message) for item in caught if issubclass(item.category, EagerFallbackWarning)]
    assert len(mine) == len(kinds) - (first > 1 and "inference" in kinds)
    assert all("no kernel" in text and "what to do" in text for text in mine)


@pytest.mark.parametrize("first", [1, 2])
def test_random_numbers_are_eagers_whichever_run_fails(first: int) -> None:
    def program(x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(x, 0.5) * 2

    compiled = dovetail.compile(program, backend=failing({"inference"}, first))
    for number in range(3):
        torch.manual_seed(number)
        expected = program(torch.ones(50)), torch.rand(1)
        torch.manual_seed(number)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert torch.equal(compiled(torch.ones(50)), expected[0])
        assert torch.equal(torch.rand(1), expected[1])


def attention(p: float, more: float = 0.0) -> Callable[[Tensor], Tensor]:
    """Attention with dropout, and dropout by an operator of its own behind it."""

    def program(x: Tensor) -> Tensor:
        return nn.functional.dropout(nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=p), more) * 2

    return program


@pytest.mark.parametrize(("p", "more", "draws"), [(0.0, 0.0, False), (0.5, 0.0, True), (0.0, 0.5, True)])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_attention_without_dropout_draws_no_numbers(p: float, more: float, draws: bool, requires_grad: bool) -> None:
    x = torch.randn(2, 2, 8, 4, requires_grad=requires_grad)
    assert draws_numbers(dovetail.capture(attention(p, more), (x,)).graph_module) is draws


@pytest.mark.parametrize(("p", "more"), [(0.0, 0.0), (0.5, 0.0), (0.0, 0.5)])
@pytest.mark.parametrize("first", [1, 2])
def test_attention_is_eagers_whichever_run_fails(p: float, more: float, first: int) -> None:
    compiled = dovetail.compile(attention(p, more), backend=failing({"forward"}, first))
    x = torch.randn(2, 2, 8, 4, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(3):
            torch.manual_seed(number)
            expected = attention(p, more)(x), torch.rand(1)
            torch.manual_seed(number)
            assert torch.equal(compiled(x), expected[0])
            assert torch.equal(torch.rand(1), expected[1])


def test_an_error_of_the_programs_is_eagers_and_the_backend_stays() -> None:
    runs: list[int] = []

    def compile_graph(graph: torch.fx.GraphModule, inputs: Any, *, kind: str, options: Any) -> Any:
        def run(values: list[Any]) -> list[Any]:
            runs.append(1)
            if int(values[1].max()) > 2:
                raise Broken("an assertion of a kernel")
            return list(graph(*values))

        return run

    compiled = dovetail.compile(lambda x, index: x[index] * 2, backend=compile_graph)
    x = torch.arange(3.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compiled(x, torch.tensor([2])).tolist() == [4]
        with pytest.raises(IndexError) as expected:
            x[torch.tensor([7])]
        with pytest.raises(IndexError) as found:
            compiled(x, torch.tensor([7]))
        assert str(found.value) == str(expected.value)
        assert compiled(x, torch.tensor([1])).tolist() == [2]
    assert len(runs) == 3


def test_what_may_have_been_written_is_not_computed_again() -> None:
    def program(x: Tensor) -> Tensor:
        return x.add_(1).sum()

    compiled = dovetail.compile(program, backend=failing({"inference"}, 1, writes_back=True))
    with pytest.raises(Broken):
        compiled(torch.ones(3))


def test_the_next_order_and_what_a_backend_says_in_words() -> None:
    x = torch.ones(3, requires_grad=True)
    compiled = dovetail.compile(lambda x: x.exp() * x, backend=failing({"forward", "backward"}, 1))
    with pytest.warns(EagerFallbackWarning):
        (slope,) = torch.autograd.grad(compiled(x).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(slope.sum(), x)
    torch.testing.assert_close(second, 3 * torch.ones(3).exp())

    def refusing(graph: Any, inputs: Any, *, kind: str, options: Any) -> Any:
        def run(values: list[Any]) -> list[Any]:
            raise BackendError("this graph differs")

        return run

    with pytest.raises(BackendError, match="differs"):
        dovetail.compile(torch.sin, backend=refusing)(torch.ones(3))


def test_a_backward_for_other_tangents_than_expected_that_cannot_be_compiled() -> None:
    kinds: list[str] = []

    def compile_graph(graph: torch.fx.GraphModule, inputs: Any, *, kind: str, options: Any) -> Any:
        kinds.append(kind)
        if kinds.count("backward") > 1:
            raise Broken("no kernel")
        return lambda values: list(graph(*values))

    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.exp(), x.sin() * x

    compiled = dovetail.compile(program, backend=compile_graph)
    expected, found = (torch.ones(3, requires_grad=True) for _ in range(2))
    program(expected)[0].sum().backward()
    with pytest.warns(EagerFallbackWarning, match="no kernel"):
        compiled(found)[0].sum().backward()
    assert torch.equal(found.grad, expected.grad)  # type: ignore[arg-type]
