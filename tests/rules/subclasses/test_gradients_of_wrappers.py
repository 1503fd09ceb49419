"""``.grad`` of parameters that are tensor subclasses: read, dropped and used by optimizers inside of compiled functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import dovetail
from dovetail.errors import EagerFallbackWarning


def wrapper(first: float, second: float) -> Any:
    return TwoTensor(torch.full((3,), first), torch.full((3,), second))


def parameter(with_gradient: bool) -> Any:
    made = nn.Parameter(wrapper(1.0, 2.0))
    made.grad = wrapper(0.5, 0.25) if with_gradient else None
    return made


def read(p: Any) -> Any:
    return None if p.grad is None else p.grad * 2


def dropped(p: Any) -> Any:
    before = p.grad
    p.grad = None
    return before, p.grad is None, p.is_leaf


def replaced(p: Any) -> Any:
    p.grad = p.detach() * 3
    return p.grad + 1


def norms(p: Any) -> Any:
    return nn.utils.clip_grad_norm_([p], 0.1)


def step(p: Any) -> Any:
    torch.optim.SGD([p], lr=0.1).step()


def cleared(p: Any) -> Any:
    torch.optim.SGD([p], lr=0.1).zero_grad()


def trained(p: Any) -> Any:
    loss = (p * p).sum()
    loss.backward()
    found = p.grad * 2
    p.grad = None
    return found


PROGRAMS: dict[str, Callable[[Any], Any]] = {
    "read": read,
    "dropped": dropped,
    "replaced": replaced,
    "clipped": norms,
    "step": step,
    "cleared": cleared,
    "backward inside": trained,
}


def shown(value: Any) -> str:
    return str(value.detach() if isinstance(value, torch.Tensor) else value)


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.filterwarnings("ignore")
def test_the_gradient_of_a_wrapper_is_the_real_one(name: str) -> None:
    program = PROGRAMS[name]

    def run(call: Callable[[Any], Any]) -> list[str]:
        found = []
        # There is a gradient, none, and one again: the answer is guarded.
        for with_gradient in (True, False, True):
            p = parameter(with_gradient)
            result = call(p)
            found += [shown(result), shown(p), shown(p.grad)]
        return found

    assert run(dovetail.compile(program, backend="aten")) == run(program)


def test_an_optimizer_over_wrappers_that_exists_before() -> None:
    def run(compiles: bool) -> list[str]:
        p = parameter(True)
        optimizer = torch.optim.AdamW([p], lr=0.1)
        chosen = (
            dovetail.compile(optimizer.step, backend="aten"),
            dovetail.compile(optimizer.zero_grad, backend="aten"),
        )
        update, clear = chosen if compiles else (optimizer.step, optimizer.zero_grad)
        found = []
        for _ in range(3):
            update()
            found += [shown(p), shown(p.grad)]
            clear()
            found.append(shown(p.grad))
            p.grad = wrapper(1.0, -1.0)
        return found

    with pytest.warns(EagerFallbackWarning):
        found = run(True)
    assert found == run(False)
