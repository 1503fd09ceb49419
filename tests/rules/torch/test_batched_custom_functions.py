"""The ``vmap`` of a custom ``autograd.Function`` is code of the program: its reads are guarded, its writes made at each call."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dovetail
from tests.differential import backward, check_calls, same

FACTOR = 2.0
log: list[Any] = []


class Tripled(torch.autograd.Function):
    """A custom function with a batched form of its own."""

    @staticmethod
    def forward(x: torch.Tensor, number: int) -> torch.Tensor:
        return x * 3 * number

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.number = inputs[1]
        log.append("context")

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * 3 * ctx.number, None

    @staticmethod
    def vmap(info: Any, dims: Any, x: torch.Tensor, number: int) -> Any:
        log.append((info.batch_size, dims))
        return Tripled.apply(x, number) * FACTOR, dims[0]


class Refusing(Tripled):
    """Its batched form raises."""

    @staticmethod
    def vmap(info: Any, dims: Any, x: torch.Tensor, number: int) -> Any:
        log.append("refused")
        raise ValueError(f"no batch of {info.batch_size}")


def _batched(x: torch.Tensor) -> torch.Tensor:
    return torch.vmap(Tripled.apply, in_dims=(0, None))(x, 2)


def _along_the_last(x: torch.Tensor) -> torch.Tensor:
    return torch.vmap(Tripled.apply, in_dims=(1, None), out_dims=1)(x, x.shape[0])


def _twice(x: torch.Tensor) -> torch.Tensor:
    return torch.vmap(torch.vmap(lambda y: Tripled.apply(y, 2) + 1))(x)


def _gradients(x: torch.Tensor) -> torch.Tensor:
    return torch.vmap(torch.func.grad(lambda y: Tripled.apply(y, 2).square().sum()))(x)


def _refused(x: torch.Tensor) -> torch.Tensor:
    try:
        return torch.vmap(Refusing.apply, in_dims=(0, None))(x, 2)
    except ValueError as error:
        return x * len(str(error))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("program", [_batched, _along_the_last, _twice, _gradients, _refused])
def test_the_batched_form_reads_and_writes(program: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def outcomes(function: Any) -> list[Any]:
        log.clear()
        found: list[Any] = []
        for factor, rows in ((2.0, 3), (2.0, 3), (5.0, 3), (5.0, 2), (2.0, 3)):
            monkeypatch.setattr(f"{__name__}.FACTOR", factor)
            x = torch.arange(rows * 2.0).reshape(rows, 2).requires_grad_()
            result = function(x)
            if result.requires_grad:
                backward(result)
            found += [result.detach(), x.grad]
        return [*found, list(log)]

    expected = outcomes(program)
    same(expected, outcomes(dovetail.compile(program, backend="aten", fullgraph=program is not _refused)))


def test_another_batched_form(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, x = dovetail.compile(_batched, backend="aten", fullgraph=True), torch.ones(2, 2)
    same(_batched(x), compiled(x))
    monkeypatch.setattr(Tripled, "vmap", staticmethod(lambda info, dims, y, number: (y * 100, 0)))
    same(_batched(x), compiled(x))


class Waved(torch.autograd.Function):
    """A custom function whose batched form torch generates; ``backward`` is linear in its gradients."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, weight: torch.Tensor) -> Any:
        return x * weight.sin(), weight.sum()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, other: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return gradient * weight.sin(), gradient * x * weight.cos() + other.expand(x.shape)


class Clipped(Waved):
    """The gradient that it gives is not linear in those that it gets."""

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, other: torch.Tensor) -> Any:
        return gradient.clamp(-0.5, 0.5), other.expand(gradient.shape)


GENERATED = {
    "one batch": lambda kind: lambda x: torch.vmap(kind.apply, in_dims=(0, None))(x, x[0]),
    "both batched": lambda kind: lambda x: torch.vmap(kind.apply, in_dims=1, out_dims=(1, 0))(x, x.cos()),
    "inside of a function": lambda kind: lambda x: torch.vmap(lambda y: kind.apply(y * 2, y)[0].exp())(x).sum(),
    "twice": lambda kind: lambda x: torch.vmap(torch.vmap(kind.apply))(x, x.cos()),
    "its gradient inside": lambda kind: (
        lambda x: torch.autograd.grad(torch.vmap(kind.apply)(x.sin(), x)[0].sum(), x)[0]
    ),
}


@pytest.mark.parametrize("name", GENERATED)
@pytest.mark.parametrize("kind", [Waved, Clipped])
@pytest.mark.filterwarnings("ignore::dovetail.errors.GraphBreakWarning", "ignore::dovetail.errors.EagerFallbackWarning")
def test_the_batched_form_that_torch_generates(name: str, kind: Any) -> None:
    calls = [(torch.randn(rows, 3, requires_grad=True),) for rows in (4, 4, 2)]
    check_calls(GENERATED[name](kind), calls, fullgraph=kind is Waved)
