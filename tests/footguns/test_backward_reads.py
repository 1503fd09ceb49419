"""Hooks and custom backwards read Python values when the backward runs: one that was changed since the call is never stale."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import dovetail
from dovetail.errors import ChangedReadError

SCALE = 2.0
WEIGHT = torch.tensor(2.0)
SETTINGS = SimpleNamespace(scale=2.0)
TABLE = {"scale": 2.0}


class Settings:
    """An object that can be referred to weakly."""

    scale = 2.0
    shift = 1.0


def by_closure() -> tuple[Callable[..., Any], Callable[[float], None]]:
    scale = 2.0

    def change(value: float) -> None:
        nonlocal scale
        scale = value

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        return gradient * scale

    def program(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y.register_hook(hook)
        return y.sin().sum()

    return program, change


def by_global() -> tuple[Callable[..., Any], Callable[[float], None]]:
    def change(value: float) -> None:
        globals()["SCALE"] = value

    def program(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y.register_hook(lambda gradient: gradient * SCALE)
        return y.sin().sum()

    return program, change


def by_attribute() -> tuple[Callable[..., Any], Callable[[float], None]]:
    def program(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y.register_hook(lambda gradient: gradient * SETTINGS.scale)
        return y.sin().sum()

    return program, lambda value: setattr(SETTINGS, "scale", value)


def read_by_the_forward_too() -> tuple[Callable[..., Any], Callable[[float], None]]:
    def program(x: torch.Tensor) -> torch.Tensor:
        y = x * 2 * SCALE * TABLE["scale"]
        y.register_hook(lambda gradient: gradient * SCALE * TABLE["scale"])
        return y.sin().sum()

    return program, lambda value: TABLE.update(scale=value)


def by_custom_function() -> tuple[Callable[..., Any], Callable[[float], None]]:
    settings = SimpleNamespace(scale=2.0)

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * settings.scale

    return lambda x: (Scaled.apply(x) ** 2).sum(), lambda value: setattr(settings, "scale", value)


def by_tensor_written() -> tuple[Callable[..., Any], Callable[[float], None]]:
    def program(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y.register_hook(lambda gradient: gradient * WEIGHT)
        return (y * WEIGHT.cos()).sin().sum()

    def change(value: float) -> None:
        WEIGHT.fill_(value)

    return program, change


def by_tensor_replaced() -> tuple[Callable[..., Any], Callable[[float], None]]:
    settings = SimpleNamespace(weight=torch.tensor(2.0))

    def program(x: torch.Tensor) -> torch.Tensor:
        y = x * 2 + settings.weight
        y.register_hook(lambda gradient: gradient * settings.weight)
        return y.sin().sum()

    return program, lambda value: setattr(settings, "weight", torch.tensor(value))


CASES = [
    by_closure,
    by_global,
    by_attribute,
    read_by_the_forward_too,
    by_custom_function,
    by_tensor_written,
    by_tensor_replaced,
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_value_changed_between_forward_and_backward(case: Any, create_graph: bool) -> None:
    program, change = case()
    compiled = dovetail.compile(program, backend="aten", fullgraph=True)
    x = torch.randn(3, dtype=torch.float64, requires_grad=True)

    def gradient(function: Any) -> torch.Tensor:
        return torch.autograd.grad(function(x), x, create_graph=create_graph)[0]

    for value in (2.0, 3.0, 2.0):
        change(value)
        assert torch.equal(gradient(compiled), gradient(program))
        loss = compiled(x)
        change(value + 2)
        with pytest.raises(ChangedReadError, match="changed since"):
            torch.autograd.grad(loss, x, create_graph=create_graph)
    change(2.0)


def test_a_method_replaced_between_forward_and_backward() -> None:
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * 2

    compiled = dovetail.compile(lambda x: (Scaled.apply(x) ** 2).sum(), backend="aten", fullgraph=True)
    x = torch.randn(3, requires_grad=True)
    loss = compiled(x)
    Scaled.backward = staticmethod(lambda ctx, gradient: gradient * 5)  # type: ignore[method-assign]
    with pytest.raises(ChangedReadError):
        loss.backward()


def test_an_argument_is_kept_only_if_the_backward_reads_it() -> None:
    def program(x: torch.Tensor, settings: Any, unused: Any) -> torch.Tensor:
        y = x * 2 + unused.shift
        y.register_hook(lambda gradient: gradient * settings.scale)
        return y.sin().sum()

    compiled = dovetail.compile(program, backend="aten", fullgraph=True)
    x = torch.randn(3, requires_grad=True)
    compiled(x, Settings(), Settings())
    settings, unused = Settings(), Settings()
    loss = compiled(x, settings, unused)
    kept, gone = weakref.ref(settings), weakref.ref(unused)
    del unused
    gc.collect()
    assert gone() is None
    settings.scale = 3.0
    with pytest.raises(ChangedReadError, match="settings"):
        loss.backward()
    del settings, loss
    gc.collect()
    assert kept() is None


def test_a_tensor_that_only_the_hook_reads_is_left_to_eager() -> None:
    settings = SimpleNamespace(weight=torch.tensor(2.0))

    def program(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y.register_hook(lambda gradient: gradient * settings.weight)
        return y.sin().sum()

    compiled = dovetail.compile(program, backend="aten")
    x = torch.randn(3, requires_grad=True)
    with pytest.warns(dovetail.errors.EagerFallbackWarning, match="the forward has not read"):
        loss = compiled(x)
    settings.weight = torch.tensor(5.0)
    (found,) = torch.autograd.grad(loss, x)
    (expected,) = torch.autograd.grad(program(x), x)
    assert torch.equal(found, expected)


def test_what_the_backward_does_not_read_may_change() -> None:
    settings = SimpleNamespace(scale=2.0, shift=1.0)

    def program(x: torch.Tensor) -> torch.Tensor:
        y = x * 2 + settings.shift
        y.register_hook(lambda gradient: gradient * settings.scale)
        return y.sin().sum()

    compiled = dovetail.compile(program, backend="aten", fullgraph=True)
    x = torch.randn(3, requires_grad=True)
    for shift in (1.0, 2.0):
        losses = compiled(x), program(x)
        settings.shift = shift + 1
        found, expected = (torch.autograd.grad(loss, x)[0] for loss in losses)
        assert torch.equal(found, expected)


def test_a_checkpointed_region_that_would_compute_something_else() -> None:
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(3, 3)
            self.scale = 2.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.linear(x) * self.scale).sin()

    block = Block()
    compiled = dovetail.compile(
        lambda x: torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False).sum(), backend="aten", fullgraph=True
    )
    x = torch.randn(2, 3, requires_grad=True)
    compiled(x).backward()
    loss = compiled(x)
    block.scale = 3.0
    with pytest.raises(ChangedReadError):
        loss.backward()


def holds_input(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = x * 2
    y.register_hook(lambda gradient: gradient * x.cos())
    return y.sum(), x


def holds_result(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y, other = x * 2, x.sin()
    y.register_hook(lambda gradient: gradient * other.cos())
    return y.sum(), other


def holds_base_of_result(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y, other = x * 2, x.sin()
    y.register_hook(lambda gradient: gradient * other.cos())
    return y.sum(), other[1:]


class HeldByContext(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        ctx.other = other
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * ctx.other.cos(), None


def holds_by_context(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    other = x.detach().exp()
    return HeldByContext.apply(x, other).sum(), other


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("program", [holds_input, holds_result, holds_base_of_result, holds_by_context])
def test_a_tensor_that_a_hook_holds_is_written_to(program: Any, create_graph: bool) -> None:
    """Eager's hook computes with the new content, which a compiled backward does not have: refused."""
    compiled = dovetail.compile(program, backend="aten", fullgraph=True)
    for _ in range(2):
        found = []
        for function in (program, compiled):
            x = torch.linspace(0.1, 1, 4, dtype=torch.float64).requires_grad_()
            found.append(torch.autograd.grad(function(x)[0], x, create_graph=create_graph)[0])
        assert torch.equal(*found)
        x = torch.linspace(0.1, 1, 4, dtype=torch.float64).requires_grad_()
        loss, held = compiled(x)
        with torch.no_grad():
            held.mul_(3)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(loss, x, create_graph=create_graph)


class _ByMethod(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * x.cos()


def _with_a_hook(x: torch.Tensor) -> torch.Tensor:
    y = x.sin()
    y.register_hook(lambda gradient: gradient * 2)
    return y.sum()


@pytest.mark.parametrize("name", ["cos", "__mul__"])
@pytest.mark.parametrize("program", [lambda x: _ByMethod.apply(x).sum(), _with_a_hook])
def test_a_method_of_tensors_that_is_replaced_before_the_backward(
    monkeypatch: Any, program: Callable[..., Any], name: str
) -> None:
    compiled = dovetail.compile(program, backend="aten", fullgraph=True)
    x = torch.ones(2, requires_grad=True)
    compiled(x).backward()
    loss = compiled(x)
    monkeypatch.setattr(torch.Tensor, name, lambda *values: torch.zeros(2))
    with pytest.raises(ChangedReadError, match="replaced_methods"):
        loss.backward()


class ByTable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, table: Any) -> torch.Tensor:
        ctx.table = table
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * ctx.table[0], None


@pytest.mark.parametrize("table", [{0: 2.0}, [2.0]], ids=["dictionary", "list"])
def test_a_container_that_a_custom_function_is_handed_is_read_by_its_backward(table: Any) -> None:
    compiled = dovetail.compile(lambda x: ByTable.apply(x, table), backend="eager")
    for scale in (5.0, 7.0):
        x = torch.ones(2, requires_grad=True)
        result = compiled(x)
        table[0] = scale
        result.sum().backward()
        assert x.grad is not None
        assert x.grad.tolist() == [scale, scale]
