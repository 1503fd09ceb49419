"""Operators in place that write nothing are counted as eager counts them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dovetail


def a_row(x: torch.Tensor) -> torch.Tensor:
    y = x[0]
    y.unsqueeze_(0)
    y.squeeze_(0)
    return y + 1


def real_numbers(x: torch.Tensor) -> torch.Tensor:
    return x.conj_physical_() + 1


def itself_and_a_view(x: torch.Tensor) -> torch.Tensor:
    x.t_()
    x.view_as(x).t_()
    return x * 1


def then_a_write(x: torch.Tensor) -> torch.Tensor:
    x.view(6).unsqueeze_(0)
    x.add_(1)
    return x * 1


def of_something_new(x: torch.Tensor) -> torch.Tensor:
    y = x.sin()
    y.view_as(y).t_()
    return y


def detached(x: torch.Tensor) -> torch.Tensor:
    x.detach().t_()
    return x * 2


def around_a_break(x: torch.Tensor) -> torch.Tensor:
    x[0].unsqueeze_(0)
    print(end="")
    x[1].unsqueeze_(0)
    return x + 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", ["aten", "eager"])
@pytest.mark.parametrize(
    "function", [a_row, real_numbers, itself_and_a_view, then_a_write, of_something_new, detached, around_a_break]
)
def test_counts_are_eagers(function: Any, backend: str) -> None:
    def counts(call: Any) -> list[int]:
        found = []
        for _ in range(3):
            x = torch.arange(6.0).reshape(2, 3)
            before = x._version
            call(x)
            found.append(x._version - before)
        return found

    if backend == "eager" and function is around_a_break:
        pytest.xfail("a part of a program that computes nothing does not run call by call")
    assert counts(dovetail.compile(function, backend=backend)) == counts(function)


def test_a_saved_value_that_is_counted_is_refused() -> None:
    def backward(call: Any) -> str:
        x = torch.ones(2, 3, requires_grad=True)
        y = x * 2
        loss = y.sin().sum()
        call(y)
        with pytest.raises(RuntimeError) as raised:
            loss.backward()
        return str(raised.value)[:60]

    assert backward(dovetail.compile(a_row, backend="aten")) == backward(a_row)


def test_inference_tensors_have_no_count() -> None:
    with torch.inference_mode():
        x = torch.ones(2, 3)
        assert dovetail.compile(a_row, backend="aten")(x).equal(a_row(x))


def test_memory_given_twice_is_counted_once() -> None:
    def call(x: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        x[0].unsqueeze_(0)
        return x + row

    x = torch.ones(2, 3)
    for compiled in (dovetail.compile(call, backend="aten"), call):
        before = x._version
        compiled(x, x[1])
        assert x._version == before + 1
