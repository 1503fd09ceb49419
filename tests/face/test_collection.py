"""Nothing of a call is left in circles when its capture has ended."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dovetail
from dovetail.trace.trace import Trace


@pytest.fixture(autouse=True)
def collecting_goes_on() -> Iterator[None]:
    yield
    gc.enable()


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


SEEN: list[Any] = []


def _hooked(model: nn.Module, x: Tensor) -> Tensor:
    y = model(x)
    y.register_hook(lambda gradient: gradient * 3)
    return y


def _appended(model: nn.Module, x: Tensor) -> Tensor:
    SEEN.append(x.shape)
    return model(x)


def _broken(model: nn.Module, x: Tensor) -> Tensor:
    y = model(x)
    print(end="")
    return y * 2


def _cleaned_up(model: nn.Module, x: Tensor) -> Tensor:
    """The backward stops computing it again at an operator, by an exception that passes the ``finally``."""
    try:
        return model(x)
    finally:
        x.numel()


PROGRAMS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "plain": lambda model, x: model(x),
    "function": lambda model, x: Doubled.apply(model(x)),
    "checkpoint": lambda model, x: checkpoint(model, x, use_reentrant=False),
    "checkpoint that cleans up": lambda model, x: checkpoint(_cleaned_up, model, x, use_reentrant=False),
    "hook": _hooked,
    "effect": _appended,
    "break": _broken,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_nothing_of_a_call_is_left_in_circles(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    traces: list[weakref.ref[Trace]] = []
    opened = Trace.open

    def noting(self: Trace, stack: Any) -> Trace:
        traces.append(weakref.ref(self))
        return opened(self, stack)

    monkeypatch.setattr(Trace, "open", noting)
    for _ in range(2):  # Once for what is learned.
        traces.clear()
        model, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), torch.ones(2, 3)
        compiled = dovetail.compile(PROGRAMS[name], backend="aten")
        gc.collect()
        gc.disable()
        compiled(model, x).sum().backward()
        # Those of attempts that have failed are in tracebacks, and young.
        assert traces and traces[-1]() is None
        gc.collect(0)
        assert not any(trace() for trace in traces)
        alive = [weakref.ref(model), weakref.ref(x)]
        del model, x
    assert not any(item() for item in alive)


def test_what_is_cleared_lives_until_it_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """An object that goes while ``vars(object).clear()`` runs makes Python 3.13.0 write to freed memory."""
    cleared: list[Any] = []
    closed = Trace._close

    def noting(self: Trace) -> None:
        cleared.extend(self.at_close)
        closed(self)

    monkeypatch.setattr(Trace, "_close", noting)
    dovetail.compile(lambda x: x + 1, backend="aten")(torch.ones(2))
    assert cleared
    assert not [function for function in cleared if isinstance(getattr(function, "__self__", None), dict)]
