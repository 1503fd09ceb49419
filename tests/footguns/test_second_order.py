"""Second derivatives that torch.compile 2.13 was seen to get silently wrong, or to refuse."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail
from dovetail.errors import EagerFallbackWarning

Function = Callable[..., Any]


def vector(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


class Scaled(torch.autograd.Function):
    """Its backward is ten times its derivative: a compiler that differentiates the forward again is found out."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return g * 30 * x**2


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = ctx.saved_tensors
        return g * b * 10, g * a * 100


@pytest.mark.parametrize("backend", ["aten", pytest.param("inductor", marks=pytest.mark.slow)])
def test_custom_function_inside(backend: str) -> None:
    compiled = dovetail.compile(lambda x: Scaled.apply(x).sum(), backend=backend, fullgraph=True)
    x = vector(1.0, 2.0)
    (g,) = torch.autograd.grad(compiled(x), x, create_graph=True)
    assert g.tolist() == [30.0, 120.0]
    assert torch.autograd.grad(g.sum(), x)[0].tolist() == [60.0, 120.0]


def test_custom_function_inside_with_both_orders_inside() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        (g,) = torch.autograd.grad(Scaled.apply(x).sum(), x, create_graph=True)
        (h,) = torch.autograd.grad(g.sum(), x)
        return h

    compiled = dovetail.compile(function, backend="aten", fullgraph=True)
    assert compiled(vector(1.0, 2.0)).tolist() == [60.0, 120.0]


def test_plain_tensors_and_grad_outside() -> None:
    compiled = dovetail.compile(lambda w, x: (w * x).pow(2).sum(), backend="aten", fullgraph=True)
    w, x = vector(3.0), vector(2.0)
    (gx,) = torch.autograd.grad(compiled(w, x), x, create_graph=True)
    # gx = 2 w^2 x = 36; d(gx^2)/dw = 2 gx * 4 w x
    loss = gx.pow(2).sum()
    assert torch.autograd.grad(loss, [w], retain_graph=True)[0].tolist() == [2 * 36 * 4 * 3 * 2]
    loss.backward(inputs=[w])
    assert w.grad is not None and w.grad.tolist() == [2 * 36 * 4 * 3 * 2]
    assert x.grad is None


def test_the_same_tensor_twice_to_a_custom_function() -> None:
    compiled = dovetail.compile(lambda x: Product.apply(x, x).sum(), backend="aten", fullgraph=True)
    x = vector(1.0)
    (g,) = torch.autograd.grad(compiled(x), x, create_graph=True)
    assert g.tolist() == [110.0]
    assert torch.autograd.grad(g.sum(), x)[0].tolist() == [110.0]


def test_a_joint_graph_in_the_hand_is_differentiated_again() -> None:
    x = vector(2.0)
    step = dovetail.capture(lambda x: (x.detach() * x.pow(2)).sum(), (x,)).compile("aten")
    (g,) = torch.autograd.grad(step(x), x, create_graph=True)
    # The user's detach is a constant in every order: 2 x * detach(x), and its derivative 2 * detach(x).
    assert g.tolist() == [8.0]
    assert torch.autograd.grad(g.sum(), x)[0].tolist() == [4.0]


@pytest.mark.slow
def test_dropout_has_one_mask_in_all_orders() -> None:
    compiled = dovetail.compile(
        lambda x: torch.nn.functional.dropout(x.pow(3), 0.5).sum(), backend="inductor", fullgraph=True
    )
    x = torch.ones(200, dtype=torch.float64, requires_grad=True)
    result = compiled(x)
    kept = int(result.item()) // 2
    (g,) = torch.autograd.grad(result, x, create_graph=True)
    assert int((g != 0).sum()) == kept
    (h,) = torch.autograd.grad(g.sum(), x)
    assert torch.equal(h != 0, g != 0) and float(h.sum()) == 12.0 * kept


def test_a_global_that_changes_between_two_backwards() -> None:
    """What the backward of a custom Function reads is guarded by the call that it belongs to."""
    compiled = dovetail.compile(lambda x: (x * FACTOR["value"]).pow(3).sum(), backend="aten", fullgraph=True)
    for factor in (1.0, 2.0, 1.0):
        FACTOR["value"] = factor
        x = vector(1.0)
        (g,) = torch.autograd.grad(compiled(x), x, create_graph=True)
        FACTOR["value"] = 100.0
        assert torch.autograd.grad(g.sum(), x)[0].tolist() == [6.0 * factor**3]


FACTOR = {"value": 1.0}


def _packed(x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 0, lambda t: t):
        return x.pow(3).sum()


def _packed_in_part(x: torch.Tensor) -> torch.Tensor:
    y = x.cos()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: ("packed", t * 2), lambda packed: packed[1]):
        y = y * x.sin()
    return y.pow(3).sum()


@pytest.mark.parametrize("function", [_packed, _packed_in_part])
def test_saved_tensor_hooks_that_change_values_are_not_forgotten(function: Any) -> None:
    results = []
    compiled = dovetail.compile(function, backend="aten")
    with pytest.warns(EagerFallbackWarning, match="saved-tensor hooks"):
        compiled(vector(2.0))
    for f in (function, compiled):
        x = vector(2.0)
        (g,) = torch.autograd.grad(f(x), x, create_graph=True)
        results.append([g.item(), torch.autograd.grad(g.sum(), x)[0].item()])
    assert results[0] == results[1]
    one_graph = dovetail.compile(function, backend="aten", fullgraph=True)
    (g,) = torch.autograd.grad(one_graph(x), x, create_graph=True)
    assert g.item() == results[0][0]
    with pytest.raises(dovetail.errors.HigherOrderGradientError, match="saved-tensor hooks"):
        torch.autograd.grad(g, x)


LOG: list[str] = []


class Logged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        LOG.append("forward")
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 3 * g * x**2


class LoggedBackward(Logged):
    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        LOG.append("backward")
        (x,) = ctx.saved_tensors
        return 3 * g * x**2


@pytest.mark.parametrize("function", [Logged, LoggedBackward])
def test_side_effects_of_a_custom_function_happen_as_often_as_in_eager(function: Any) -> None:
    logs = []
    for f in (function.apply, dovetail.compile(lambda x: function.apply(x), backend="aten")):
        LOG.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", dovetail.errors.EagerFallbackWarning)
            for _ in range(2):
                x = vector(1.0)
                torch.autograd.grad(f(x).sum(), x, create_graph=True)
        logs.append(list(LOG))
    assert logs[0] == logs[1]


def test_a_hook_that_writes_to_a_list_keeps_no_traced_tensor() -> None:
    found = []

    def function(x: torch.Tensor, seen: list[torch.Tensor]) -> torch.Tensor:
        y = x.sin()
        y.register_hook(lambda g: seen.append(g))
        return y.sum()

    for f in (function, dovetail.compile(function, backend="aten")):
        seen: list[torch.Tensor] = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", dovetail.errors.EagerFallbackWarning)
            f(vector(1.0), seen).backward()
        found.append([type(item) for item in seen])
    assert found[0] == found[1] == [torch.Tensor]


class Moody(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return g * x**2 * (3 if MOOD["name"] == "good" else 30)


MOOD = {"name": "good"}


def test_what_a_backward_reads_changes_before_it_is_captured_again() -> None:
    """Eager asks at the backward: refused there. The second derivative is of the same mood as the first, or refused too."""
    compiled = dovetail.compile(lambda x: Moody.apply(x).sum(), backend="aten", fullgraph=True)
    x = vector(1.0)
    MOOD["name"] = "good"
    result = compiled(x)
    MOOD["name"] = "bad"
    with pytest.raises(dovetail.errors.ChangedReadError):
        torch.autograd.grad(result, x, create_graph=True)
    MOOD["name"] = "good"
    (g,) = torch.autograd.grad(result, x, create_graph=True)
    assert g.tolist() == [3.0]
    MOOD["name"] = "bad"
    with pytest.raises(dovetail.errors.ChangedReadError):
        torch.autograd.grad(g.sum(), x)
    MOOD["name"] = "good"


def copying(graph: torch.fx.GraphModule, example_inputs: Any, *, kind: str, options: Any) -> Any:
    """A backend of which no result is an input, whatever the graph says."""
    return lambda inputs: [value.clone() if isinstance(value, torch.Tensor) else value for value in graph(*inputs)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("backend", ["aten", copying], ids=["aten", "copying"])
@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize("call", [0, 1, 2])
def test_a_parameter_written_to_before_the_second_derivative_is_an_error(name: str, backend: Any, call: int) -> None:
    # One of the two is saved by the graph itself, which autograd checks; of the other the version is noted.
    layer = torch.nn.Linear(3, 3)
    compiled = dovetail.compile(lambda x: layer(x).sin().sum(), backend=backend, fullgraph=True)
    for number in range(3):
        x = torch.randn(2, 3, requires_grad=True)
        result = compiled(x)
        (gradient,) = torch.autograd.grad(result, x, create_graph=True)
        if number == call:
            result = compiled(x)
            with torch.no_grad():
                getattr(layer, name).mul_(2)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                torch.autograd.grad(result, x, create_graph=True)
        else:
            gradient.sum().backward()
            layer.zero_grad()


@pytest.mark.parametrize("order", [("first", "second"), ("second", "first")])
@pytest.mark.parametrize("written", ["first", "second", None])
def test_independent_outputs_feel_writes_to_their_own_parameters_only(
    written: str | None, order: tuple[str, str]
) -> None:
    outcomes: list[list[Any]] = []
    for compiles in (False, True):
        weights = {key: torch.full((3,), 0.5, requires_grad=True) for key in order}

        def function(x: torch.Tensor, weights: dict[str, torch.Tensor] = weights) -> dict[str, torch.Tensor]:
            return {"first": (x * weights["first"]).sin().sum(), "second": (x * weights["second"]).cos().sum()}

        run = dovetail.compile(function, backend="aten", fullgraph=True) if compiles else function
        outcomes.append([])
        for _ in range(3):
            x = torch.ones(3, requires_grad=True)
            outputs = run(x)
            if written is not None:
                with torch.no_grad():
                    weights[written].mul_(1.5)
            # The first frees what it has used; the derivative of the other one must know of the write all the same.
            for name, create in zip(order, (False, True), strict=True):
                try:
                    (gradient,) = torch.autograd.grad(outputs[name], x, create_graph=create)
                    outcomes[-1].append(gradient.detach())
                except RuntimeError as error:
                    outcomes[-1].append(str(error)[:40])
    for expected, actual in zip(*outcomes, strict=True):
        assert torch.equal(expected, actual) if isinstance(expected, torch.Tensor) else expected == actual


class OfBackward(torch.autograd.Function):
    """The derivative of :class:`ByParts`, with one of its own."""

    @staticmethod
    def forward(ctx: Any, g: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(g, x)
        return g * x.exp()

    @staticmethod
    def backward(ctx: Any, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        g, x = ctx.saved_tensors
        return h * x.exp(), h * g * x.exp() * 7


class ByParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        found: torch.Tensor = OfBackward.apply(g, x)
        return found


def _orders(function: Function, count: int) -> list[torch.Tensor]:
    x = vector(0.5, 1.5, -0.75)
    value, found = function(x), []
    for _ in range(count):
        (value,) = torch.autograd.grad(value.sum(), x, create_graph=True)
        found.append(value.detach())
    return found


CALLED_IN_A_BACKWARD = {
    "apply": ByParts.apply,
    "twice": lambda x: ByParts.apply(ByParts.apply(x) * x),
    "beside others": lambda x: ByParts.apply(x.sin()) + Scaled.apply(x),
}


@pytest.mark.parametrize("backend", ["aten", "eager"])
@pytest.mark.parametrize("name", CALLED_IN_A_BACKWARD)
def test_custom_function_in_the_backward_of_another(name: str, backend: str) -> None:
    function = CALLED_IN_A_BACKWARD[name]
    compiled = dovetail.compile(function, backend=backend, fullgraph=True)
    for expected, actual in zip(_orders(function, 2), _orders(compiled, 2), strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    "function",
    [torch.prod, lambda x: x.sin().prod(0), lambda x: torch.stack([x, x * 2]).prod(1)],
    ids=("all", "one", "rows"),
)
def test_third_derivative_of_a_product(function: Function) -> None:
    compiled = dovetail.compile(function, backend="aten")
    for expected, actual in zip(_orders(function, 3), _orders(compiled, 3), strict=True):
        torch.testing.assert_close(actual, expected)
