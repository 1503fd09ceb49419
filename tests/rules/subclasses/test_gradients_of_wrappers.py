"""``.grad`` of parameters that are tensor subclasses: read, dropped and used by optimizers inside of compiled functions."""

from __future__ import annotations

import warnings
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


@pytest.mark.sampled(2)
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


class Boxed(torch.Tensor):
    """A wrapper of one tensor; what is computed with it is boxed too."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Boxed:
        made = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, requires_grad=inner.requires_grad
        )
        made.inner = inner
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: None, size: Any, stride: Any) -> Boxed:
        return Boxed(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, TwoTensor) for kind in types):
            return NotImplemented
        opened = torch.utils._pytree.tree_map_only(Boxed, lambda box: box.inner, (args, kwargs or {}))
        return torch.utils._pytree.tree_map_only(torch.Tensor, Boxed, function(*opened[0], **opened[1]))


@pytest.mark.parametrize("outer", [False, True])
def test_a_gradient_of_another_class_is_left_to_eager(outer: bool) -> None:
    def function(boxed: Any, pair: Any) -> Any:
        return boxed * pair * 2 if outer else boxed.detach() * pair * boxed.sin()

    def inputs() -> Any:
        pair = wrapper(1.0, 2.0)
        return Boxed(torch.full((3,), 0.5, requires_grad=True)), pair

    found = []
    for f in (function, dovetail.compile(function, backend="aten")):
        boxed, pair = inputs()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", EagerFallbackWarning)
            result = f(boxed, pair)
        result.sum().backward()
        found.append((type(result), type(boxed.grad), type(boxed.grad.a), result.a.inner, boxed.grad.b.inner))
    assert found[0][:3] == found[1][:3] == (TwoTensor, TwoTensor, Boxed)
    assert all(torch.equal(left, right) for left, right in zip(found[0][3:], found[1][3:], strict=True))
