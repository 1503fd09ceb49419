"""Switches of torch on which no graph depends: a function that leaves one changed does so at every call, and in the rest of it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail

Tensor = torch.Tensor
threads = torch.autograd.set_multithreading_enabled
is_threaded = torch.autograd.is_multithreading_enabled


def state() -> tuple[bool, ...]:
    return is_threaded(), torch.is_warn_always_enabled(), torch._C._is_fwd_grad_enabled()


def threads_off(x: Tensor) -> Any:
    threads(False)
    return x * 2


def threads_off_before_a_break(x: Tensor) -> Any:
    threads(False)
    y = x * 2
    print(end="")
    return y, is_threaded()


def off_in_a_block_and_on_again(x: Tensor) -> Any:
    with threads(False):
        threads(True)
        y = x.exp()
    return y, is_threaded()


def break_in_a_block(x: Tensor) -> Any:
    with threads(False):
        y = x * 2
        print(end="")
        seen = is_threaded()
    return y, seen, is_threaded()


def warnings_always(x: Tensor) -> Any:
    torch.set_warn_always(True)
    return x + 1


def forward_gradients_off(x: Tensor) -> Any:
    torch.autograd.forward_ad._set_fwd_grad_enabled(False)
    return x + 1


@pytest.mark.parametrize(
    "function",
    [
        threads_off,
        threads_off_before_a_break,
        off_in_a_block_and_on_again,
        break_in_a_block,
        warnings_always,
        forward_gradients_off,
    ],
)
def test_a_switch_is_left_as_eager_leaves_it(function: Callable[[Tensor], Any]) -> None:
    before = state()

    def calls(run: Callable[[Tensor], Any]) -> list[Any]:
        found = []
        for _ in range(3):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    found.append((str(run(torch.ones(2))), state()))
                finally:
                    threads(before[0])
                    torch.set_warn_always(before[1])
                    torch.autograd.forward_ad._set_fwd_grad_enabled(before[2])
        return found

    assert calls(function) == calls(dovetail.compile(function, backend="aten"))
    assert state() == before


def test_a_block_around_the_whole_is_one_graph() -> None:
    def function(x: Tensor) -> Tensor:
        with threads(False):
            return x.exp() * 2

    x = torch.ones(2)
    assert torch.equal(dovetail.compile(function, backend="aten", fullgraph=True)(x), function(x))
