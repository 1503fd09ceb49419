"""Garbage collection and captures: what a capture makes grows old at once, and nothing of the call is left in circles."""

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
from dovetail.face.attempts import collection_paused
from dovetail.trace.trace import Trace


class Kept:
    """Something to look for."""


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """As in a program: the fixture that keeps collections short has frozen everything."""
    gc.collect()
    gc.unfreeze()
    yield
    gc.enable()
    gc.freeze()


def is_young(item: Any) -> bool:
    return any(item is other for generation in (0, 1) for other in gc.get_objects(generation))


def test_what_was_made_in_the_block_is_old() -> None:
    before = Kept()
    with collection_paused():
        inside = Kept()
    assert gc.isenabled() and not is_young(inside) and not is_young(before)
    assert gc.get_freeze_count() == 0 and is_young(Kept())


def test_after_a_failure_it_is_young() -> None:
    with pytest.raises(ValueError, match="no"), collection_paused():
        inside = Kept()
        raise ValueError("no")
    assert gc.isenabled() and is_young(inside)


def test_garbage_from_before_goes() -> None:
    circle = [Kept()]
    found = weakref.ref(circle[0])
    circle.append(circle)  # type: ignore[arg-type]
    del circle
    with collection_paused():
        assert found() is None


def test_what_the_program_has_frozen_stays_frozen() -> None:
    gc.freeze()
    try:
        count = gc.get_freeze_count()
        with collection_paused():
            inside = Kept()
        assert gc.get_freeze_count() == count and is_young(inside)
    finally:
        gc.unfreeze()


def test_a_second_attempt_leaves_it_young() -> None:
    from_before = Kept()
    with collection_paused(grows_old=False):
        inside = Kept()
    assert gc.isenabled() and is_young(inside) and is_young(from_before)


def test_where_the_program_has_no_collection_there_is_none() -> None:
    gc.disable()
    with collection_paused():
        inside = Kept()
    assert not gc.isenabled() and is_young(inside)


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


PROGRAMS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "plain": lambda model, x: model(x),
    "function": lambda model, x: Doubled.apply(model(x)),
    "checkpoint": lambda model, x: checkpoint(model, x, use_reentrant=False),
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
