"""Derivatives of any order through compiled functions from outside, each against eager in float64."""

from __future__ import annotations

import copy
import gc
import itertools
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import dovetail
from dovetail.errors import GraphBreakWarning, HigherOrderGradientError
from dovetail.versions import parse
from tests.differential import Rule, same

Function = Callable[..., Any]
BOTH = pytest.mark.parametrize("backend", ["aten", "inductor"])
#: Inductor has the same graphs to compile: a second order is enough by default.
BACKENDS = pytest.mark.parametrize("backend", ["aten", pytest.param("inductor", marks=pytest.mark.slow)])


def leaf(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()


def network() -> torch.nn.Sequential:
    torch.manual_seed(3)
    layers = [torch.nn.Linear(3, 6), torch.nn.Tanh(), torch.nn.Linear(6, 6), torch.nn.SiLU(), torch.nn.Linear(6, 1)]
    return torch.nn.Sequential(*layers).double()


#: The engine adds gradients up in another order, into memory that is laid out in another way.
ROUNDED = Rule("close", tolerance=(1e-10, 1e-12), ignored=frozenset({"strides", "is_leaf", "type"}))


def close(expected: Any, actual: Any) -> None:
    same(expected, actual, exact=ROUNDED)


def both(
    style: Callable[[Function], Any], function: Function, backend: str = "aten", fullgraph: bool = True
) -> Function:
    """A way of taking derivatives, over the function and over the compiled one."""
    compiled = dovetail.compile(function, backend=backend, fullgraph=fullgraph)
    for _ in range(2):
        torch.manual_seed(5)
        expected = style(function)
        torch.manual_seed(5)
        close(expected, style(compiled))
    return compiled


# --- calling styles ---------------------------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@BOTH
def test_gradient_of_gradient(backend: str) -> None:
    def style(f: Function) -> Any:
        x = leaf(4, seed=1)
        y = f(x)
        (g,) = torch.autograd.grad(y, x, create_graph=True)
        return [y, g, *torch.autograd.grad(g.sum(), x)]

    both(style, lambda x: (x.sin() * x.exp()).sum(), backend)


@BACKENDS
def test_third_and_fourth_order(backend: str) -> None:
    def style(f: Function) -> Any:
        x = leaf(3, seed=2)
        values = [f(x)]
        for _ in range(4):
            (gradient,) = torch.autograd.grad(values[-1].sum(), x, create_graph=True)
            values.append(gradient)
        return values

    both(style, lambda x: (x.pow(4) * x.cos()).sum(), backend)


@BOTH
@pytest.mark.sampled(2)
def test_forces_and_a_loss_on_them(backend: str) -> None:
    def style(f: Function) -> Any:
        positions = leaf(5, 3)
        energy = f(positions)
        (forces,) = torch.autograd.grad(energy, positions, create_graph=True)
        loss = (forces - 0.5).pow(2).sum() + energy.pow(2)
        for parameter in model.parameters():
            parameter.grad = None
        loss.backward()
        return [energy, forces, loss, positions.grad, [parameter.grad for parameter in model.parameters()]]

    model = network()
    both(style, lambda x: model(x).sum(), backend)


def test_backward_with_create_graph() -> None:
    def style(f: Function) -> Any:
        x = leaf(3)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            f(x).backward(create_graph=True)
        first = x.grad
        assert first is not None
        x.grad = None
        first.pow(2).sum().backward()
        return [first, x.grad]

    both(style, lambda x: x.exp().sum() * x.sum())


def test_backward_with_inputs() -> None:
    def style(f: Function) -> Any:
        x, w = leaf(3), leaf(3, seed=1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            f(x, w).backward(inputs=[x], create_graph=True)
        first = x.grad
        assert first is not None and w.grad is None
        x.grad = None
        first.pow(2).sum().backward(inputs=[w])
        return [first, x.grad, w.grad]

    both(style, lambda x, w: (x * w).sin().sum() * w.sum())


def test_outer_loss_over_plain_tensors() -> None:
    """torch.compile 2.13 was silently wrong here: second order outside over a compiled function of plain tensors."""

    def style(f: Function) -> Any:
        w, b, x = leaf(3, 3), leaf(3, seed=1), leaf(4, 3, seed=2)
        (gx,) = torch.autograd.grad(f(w, b, x).sum(), x, create_graph=True)
        loss = (gx.norm(dim=1) - 1).pow(2).mean()
        by_grad = torch.autograd.grad(loss, [w, b, x], retain_graph=True, allow_unused=True)
        loss.backward(inputs=[w, b])
        return [gx, *by_grad, w.grad, b.grad]

    both(style, lambda w, b, x: torch.tanh(x @ w + b).pow(2))


def test_non_leaf_inputs() -> None:
    def style(f: Function) -> Any:
        x, w = leaf(3), leaf(3, seed=1)
        y, v = x.sin(), w * 2
        (g,) = torch.autograd.grad(f(y, v), x, create_graph=True)
        return [g, *torch.autograd.grad(g.pow(2).sum(), [x, w])]

    both(style, lambda y, v: (y * v).exp().sum())


def test_an_input_from_a_function_that_keeps_a_variable() -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.variable = torch.ones(3)  # the name under which a leaf's node has its tensor
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return gradient * 2

    def style(f: Function) -> Any:
        x, y = leaf(3), leaf(3, seed=1)
        between = Doubled.apply(x)  # type: ignore[no-untyped-call]
        first = torch.autograd.grad(f(between, y), (x, y), create_graph=True)
        return [*first, *torch.autograd.grad(first[0].sum() + first[1].sum(), (x, y))]

    both(style, lambda x, y: (x.square() * y.sin()).sum())


def test_functional_style() -> None:
    parameters = {"weight": leaf(3, 3), "bias": leaf(3, seed=1)}

    def function(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, parameters["weight"], parameters["bias"]).tanh().sum()

    def style(f: Function) -> Any:
        x = leaf(4, 3)
        (g,) = torch.autograd.grad(f(parameters, x), x, create_graph=True)
        return [g, *torch.autograd.grad(g.pow(2).sum(), list(parameters.values()), allow_unused=True)]

    both(style, function)


def test_several_outputs_and_undefined_tangents() -> None:
    def style(f: Function) -> Any:
        x, w = leaf(3), leaf(3, seed=1)
        a, b, c = f(x, w)
        (one,) = torch.autograd.grad(a.sum(), x, create_graph=True)
        two = torch.autograd.grad((b * a).sum(), [x, w], create_graph=True)
        total = one.sum() * two[0].sum() + two[1].pow(3).sum()
        return [a, b, c, one, two, *torch.autograd.grad(total, [x, w])]

    both(style, lambda x, w: (x.sin() * w, (x * w).exp(), x.detach() * 2))


def test_tangents_that_require_gradients() -> None:
    """The tangent is an input of the backward: a vector-Jacobian product twice is a Jacobian-vector product."""

    def style(f: Function) -> Any:
        x, v = leaf(4), leaf(4, seed=1)
        u = torch.zeros(4, dtype=torch.float64, requires_grad=True)
        (vjp,) = torch.autograd.grad(f(x), x, u, create_graph=True)
        (jvp,) = torch.autograd.grad(vjp, u, v, create_graph=True)
        return [vjp, jvp, *torch.autograd.grad(jvp.sum(), [x, v])]

    both(style, lambda x: x.sin() * x.cumsum(0))


def test_one_tangent_for_two_outputs_and_a_tangent_that_is_an_input() -> None:
    def style(f: Function) -> Any:
        x = leaf(3)
        a, b = f(x)
        (g,) = torch.autograd.grad([a, b], x, [x, x], create_graph=True)
        return [g, *torch.autograd.grad(g.sum(), x)]

    both(style, lambda x: (x.exp(), x.sin()))


def test_hessian_vector_product() -> None:
    def style(f: Function) -> Any:
        x, v = leaf(5), leaf(5, seed=1).detach()
        (g,) = torch.autograd.grad(f(x), x, create_graph=True)
        return torch.autograd.grad(g, x, v)

    both(style, lambda x: x.outer(x).cos().sum())


def test_hessian_by_torch_autograd_functional() -> None:
    def style(f: Function) -> Any:
        return torch.autograd.functional.hessian(f, leaf(3).detach())

    both(style, lambda x: x.pow(3).sum() * x.sin().sum())


@BACKENDS
def test_finite_differences(backend: str) -> None:
    model = network()
    compiled = dovetail.compile(lambda x: model(x).sum(1), backend=backend, fullgraph=True)
    assert torch.autograd.gradgradcheck(compiled, (leaf(2, 3),))


def test_finite_differences_of_third_order() -> None:
    compiled = dovetail.compile(lambda x: (x.pow(3) * x.sin()).sum(), backend="aten")

    def second(x: torch.Tensor) -> torch.Tensor:
        (g,) = torch.autograd.grad(compiled(x), x, create_graph=True)
        return torch.autograd.grad(g.sum(), x, create_graph=True)[0]

    assert torch.autograd.gradcheck(second, (leaf(3),))


# --- what programs contain --------------------------------------------------------------------------------------------


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        # Not the derivative: whoever differentiates the forward instead is found out.
        return g * x * x * 10


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = ctx.saved_tensors
        return g * b * b * 10, g * a * a * 100


def twice(f: Function, *inputs: torch.Tensor) -> Any:
    """First and second order of a function's sum."""
    result = f(*inputs)
    first = torch.autograd.grad(result.sum(), inputs, create_graph=True, allow_unused=True)
    total = sum((g * g).sum() for g in first if g is not None and g.requires_grad)
    assert isinstance(total, torch.Tensor)
    return [result, first, torch.autograd.grad(total, inputs, allow_unused=True)]


@BACKENDS
def test_custom_function(backend: str) -> None:
    both(lambda f: twice(f, leaf(3)), lambda x: Cube.apply(x.sin()) * 2, backend)


def test_custom_function_with_the_same_tensor_twice() -> None:
    both(lambda f: twice(f, leaf(3)), lambda x: Product.apply(x, x))
    both(lambda f: twice(f, leaf(3)), lambda x: Product.apply(x.sin(), x))


def test_nested_compiled_functions() -> None:
    inner = dovetail.compile(lambda x: x.sin() * x, backend="aten")
    both(lambda f: twice(f, leaf(3)), lambda x: inner(x).exp() + inner(x * 2))

    def eager_around_compiled(x: torch.Tensor) -> torch.Tensor:
        return inner(inner(x).exp())

    def plain(x: torch.Tensor) -> torch.Tensor:
        y = (x.sin() * x).exp()
        return y.sin() * y

    close(twice(plain, leaf(3)), twice(eager_around_compiled, leaf(3)))


def test_graph_breaks() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        scale = float(y.sum().item())
        z = (y * y).exp()
        print("", end="")
        return z * scale + x

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GraphBreakWarning)
        compiled = both(lambda f: twice(f, leaf(3)), function, fullgraph=False)
    assert compiled.continuations()  # type: ignore[attr-defined]


def test_detach_and_no_grad() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = x.exp()
        return (x * x.detach()).sin() * scale + x.pow(2).detach() * x

    both(lambda f: twice(f, leaf(3)), function)


@BACKENDS
def test_dropout_draws_the_same_mask(backend: str) -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout((x * w).tanh(), 0.5).exp() * torch.rand(64, dtype=torch.float64)

    def style(f: Function) -> Any:
        x, w = leaf(64), leaf(64, seed=1)
        result = f(x, w)
        torch.rand(7)  # the generator moves on between forward and backward
        before = torch.get_rng_state()
        (gx,) = torch.autograd.grad(result.sum(), x, create_graph=True)
        assert torch.equal(before, torch.get_rng_state())
        (gw,) = torch.autograd.grad(gx.pow(2).sum(), w, create_graph=True)
        return [result, gx, gw, *torch.autograd.grad(gw.sum(), [x, w])]

    both(style, function, backend)


def test_autocast() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = x @ w
        return y.float().sin()

    def style(f: Function) -> Any:
        x, w = leaf(3, 3).detach().float().requires_grad_(), leaf(3, 3, seed=1).detach().float().requires_grad_()
        return twice(f, x, w)

    both(style, function)


def test_in_place_writes_inside() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        y.mul_(x)
        y[0] = x[1] * x[2]
        y += y.clone()
        return y

    both(lambda f: twice(f, leaf(3)), function)


def test_views_that_are_returned() -> None:
    def style(f: Function) -> Any:
        x = leaf(4, 3)
        a, b, c = f(x)
        total = (a.sin() * b.t()[:1].exp()).sum() + c.pow(2).sum()
        (g,) = torch.autograd.grad(total, x, create_graph=True)
        return [a, b, c, g, *torch.autograd.grad(g.pow(2).sum(), x)]

    def function(x: torch.Tensor) -> Any:
        y = x * x
        return y[0], y.t(), x[1:]

    both(style, function)


def test_an_input_that_is_written_to() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        x.mul_(w)
        return y * w + x.sin()

    def style(f: Function) -> Any:
        x, w = leaf(3), leaf(3, seed=1)
        z = x * 2
        result = f(z, w)
        (g,) = torch.autograd.grad((result * z).sum(), x, create_graph=True)
        return [result, z, g, *torch.autograd.grad(g.pow(2).sum(), [x, w])]

    both(style, function)


def test_batch_norm_statistics_are_written_once() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Tanh()).double()
    twin = copy.deepcopy(model)
    compiled = dovetail.compile(twin, backend="aten", fullgraph=True)
    for step in range(2):
        expected, actual = twice(model, leaf(6, 3, seed=step)), twice(compiled, leaf(6, 3, seed=step))
        close(expected, actual)
    for left, right in zip(model.buffers(), twin.buffers(), strict=True):
        assert torch.equal(left, right)


def test_checkpointed_regions() -> None:
    model = network()

    def function(x: torch.Tensor) -> torch.Tensor:
        result = checkpoint(model, x, use_reentrant=False)
        assert isinstance(result, torch.Tensor)
        return result

    both(lambda f: twice(f, leaf(4, 3)), function)


def test_tensors_made_inside() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        scale = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
        return (x * scale + torch.arange(3) + torch.ones_like(x)).pow(3)

    both(lambda f: twice(f, leaf(3)), function)


def test_complex_numbers() -> None:
    def style(f: Function) -> Any:
        x = leaf(3)
        (g,) = torch.autograd.grad(f(x), x, create_graph=True)
        return [g, *torch.autograd.grad(g.pow(2).sum(), x)]

    both(style, lambda x: torch.fft.fft(x * torch.exp(1j * x)).abs().pow(2).sum())


@pytest.mark.slow
@BACKENDS
def test_another_size_at_the_next_call(backend: str) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        return y.view(y.shape[0]) * x[: y.size(0)].sum(1) / x.shape[0] + torch.arange(x.size(0))

    model = network()
    compiled = dovetail.compile(function, backend=backend, fullgraph=True)
    for size in (4, 6, 7, 4, 9, 1, 12):
        x = leaf(size, 3, seed=size)
        close(twice(function, x), twice(compiled, x))
    # Once for four, once for four and more as a symbol, and the first graph with symbols: static, then symbolic.
    assert compiled.events.count("compile the next order") <= 5


@BACKENDS
def test_sizes_that_are_symbolic_from_the_start(backend: str) -> None:
    compiled = dovetail.compile(lambda x: (x.flatten() / x.shape[0]).pow(3), backend=backend, dynamic=True)
    for size in (4, 6, 7):
        x = leaf(size, 3, seed=size)
        close(twice(lambda x: (x.flatten() / x.shape[0]).pow(3), x), twice(compiled, x))


def test_numbers_that_change() -> None:
    def function(x: torch.Tensor, scale: float, power: int) -> torch.Tensor:
        return x.sin() * scale + x.pow(power)

    compiled = dovetail.compile(function, backend="aten", fullgraph=True)
    for step in range(6):
        x = leaf(3, seed=step)
        scale, power = 0.5 + step, 2 + step
        close(twice(lambda x: function(x, scale, power), x), twice(lambda x: compiled(x, scale, power), x))  # noqa: B023


def test_the_first_order_is_still_the_ordinary_backward() -> None:
    compiled = dovetail.compile(lambda x: x.pow(3).sum(), backend="aten")
    compiled(leaf(3)).backward()
    assert compiled.events.count("compile the next order") == 0


def test_captured_once() -> None:
    compiled = dovetail.compile(lambda x: x.pow(3).sum(), backend="aten")
    for seed in range(3):
        twice(compiled, leaf(3, seed=seed))
    assert compiled.events.count("compile the next order") == 1


# --- memory and errors as in eager ------------------------------------------------------------------------------------


def test_freed_graph_is_eagers_error() -> None:
    for function in (lambda x: x.pow(3).sum(), dovetail.compile(lambda x: x.pow(3).sum(), backend="aten")):
        x = leaf(3)
        result = function(x)
        result.backward()
        with pytest.raises(RuntimeError, match="a second time"):
            torch.autograd.grad(result, x, create_graph=True)
        result = function(x)
        (g,) = torch.autograd.grad(result, x, create_graph=True)
        torch.autograd.grad(g.sum(), x)
        with pytest.raises(RuntimeError, match="a second time"):
            torch.autograd.grad(g.sum(), x)


def test_inputs_are_freed_with_the_graph() -> None:
    def lives(function: Function) -> list[bool]:
        middle = leaf(3) * 2
        alive = weakref.ref(middle.untyped_storage())
        result = function(middle)
        found = []
        del middle
        result.backward()
        gc.collect()
        found.append(alive() is not None)
        x = leaf(3)
        middle = x * 2
        alive = weakref.ref(middle.untyped_storage())
        result = function(middle)
        del middle
        (g,) = torch.autograd.grad(result, x, create_graph=True)
        found.append(alive() is not None)
        g.sum().backward()
        gc.collect()
        found.append(alive() is not None)
        del g, result
        gc.collect()
        found.append(alive() is not None)
        return found

    assert lives(lambda x: x.pow(3).sum()) == lives(dovetail.compile(lambda x: x.pow(3).sum(), backend="aten"))


def test_an_input_that_no_gradient_needs_is_not_kept() -> None:
    for function in (lambda x: (x + 1).sum(), dovetail.compile(lambda x: (x + 1).sum(), backend="aten")):
        middle = leaf(3) * 2
        alive = weakref.ref(middle)
        result = function(middle)
        del middle
        gc.collect()  # a capture leaves cycles behind
        assert alive() is None
        assert result.requires_grad


@pytest.mark.parametrize("write", ["parameter", "non-leaf"])
def test_write_between_forward_and_backward_is_eagers_error(write: str) -> None:
    for function in (lambda a, b: (a * b).sum(), dovetail.compile(lambda a, b: (a * b).sum(), backend="aten")):
        x, w = leaf(3), leaf(3, seed=1)
        middle = x * 2
        result = function(middle, w)
        with torch.no_grad():
            (w if write == "parameter" else middle).add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(result, [x, w], create_graph=True)


def test_tangents_of_many_layouts() -> None:
    """A backward is captured for a few; then it runs eagerly."""

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x.sin() * x @ w

    compiled = dovetail.compile(function, backend="aten")
    for order in itertools.islice(itertools.permutations(range(4)), 12):
        tangent = torch.arange(16.0, dtype=torch.float64).reshape(2, 2, 2, 2).permute(order)
        found = []
        for run in (function, compiled):
            x = torch.linspace(0.1, 1, 16, dtype=torch.float64).reshape(2, 2, 2, 2).requires_grad_()
            w = torch.ones(2, 2, dtype=torch.float64, requires_grad=True)
            (slope,) = torch.autograd.grad(run(x, w), x, tangent, create_graph=True)
            found.append([slope.detach(), *torch.autograd.grad(slope.square().sum(), [x, w])])
        close(*found)


# --- refused, not wrong -----------------------------------------------------------------------------------------------


def refused(function: Function, match: str, *inputs: torch.Tensor) -> None:
    """The first order with ``create_graph=True`` is right; the derivative of it is refused with a reason."""
    compiled = dovetail.compile(function, backend="aten", fullgraph=True)
    expected = torch.autograd.grad(function(*inputs).sum(), inputs, create_graph=True)
    actual = torch.autograd.grad(compiled(*inputs).sum(), inputs, create_graph=True)
    close([item.detach() for item in expected], [item.detach() for item in actual])
    with pytest.raises(HigherOrderGradientError, match=match):
        torch.autograd.grad(actual[0].sum(), inputs)


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return g * x.exp()


def test_a_function_that_is_differentiable_once() -> None:
    refused(lambda x: Once.apply(x).pow(2), "once_differentiable", leaf(3))


def test_an_edited_graph() -> None:
    compiled = dovetail.compile(lambda x: x.pow(3).sum(), backend="aten", passes=(lambda joint: None,))
    x = leaf(3)
    (g,) = torch.autograd.grad(compiled(x), x, create_graph=True)
    with pytest.raises(HigherOrderGradientError, match="edited"):
        torch.autograd.grad(g.sum(), x)


# --- derivatives inside, and through them from outside ----------------------------------------------------------------


@BACKENDS
def test_gradient_inside_and_outside(backend: str) -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        (g,) = torch.autograd.grad((x * w).sin().sum() * w.sum(), x, create_graph=True)
        (h,) = torch.autograd.grad(g.pow(2).sum(), w, create_graph=True)
        return h * x

    both(lambda f: twice(f, leaf(3), leaf(3, seed=1)), function, backend)


def test_backward_inside_and_outside() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x.detach().clone().requires_grad_()
        (y * w).sin().sum().backward(create_graph=True, inputs=[y])
        assert y.grad is not None
        return y.grad * w * x

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        both(lambda f: twice(f, leaf(3), leaf(3, seed=1)), function)


def test_custom_function_inside_a_gradient_inside() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        (g,) = torch.autograd.grad(Product.apply(Cube.apply(x), x.sin()).sum(), x, create_graph=True)
        return g * x

    both(lambda f: twice(f, leaf(3)), function)


# --- attention --------------------------------------------------------------------------------------------------------


def attention(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(x, x.sin(), x * 2, is_causal=True)


def attention_by_parts(x: torch.Tensor) -> torch.Tensor:
    with torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.MATH]):
        return attention(x)


@BACKENDS
def test_attention_has_a_second_derivative_outside(backend: str) -> None:
    """Eager has none for the fused kernel: the oracle is eager with attention by its parts."""
    x = leaf(1, 2, 5, 4)
    with pytest.raises(RuntimeError, match="not implemented"):
        twice(attention, x)
    compiled = dovetail.compile(attention, backend=backend, fullgraph=True)
    close(twice(attention_by_parts, x), twice(compiled, x))


def test_attention_has_a_second_derivative_inside() -> None:
    def through(f: Function) -> Function:
        def function(x: torch.Tensor) -> torch.Tensor:
            (g,) = torch.autograd.grad(f(x).pow(2).sum(), x, create_graph=True)
            return g.pow(2).sum()

        return function

    x = leaf(1, 2, 5, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled = dovetail.compile(through(attention), backend="aten", fullgraph=True)
        close(twice(through(attention_by_parts), x), twice(compiled, x))


def test_attention_of_the_first_order_stays_fused() -> None:
    compiled = dovetail.compile(attention, backend="aten", fullgraph=True)
    compiled(leaf(1, 2, 5, 4)).sum().backward()
    targets = {str(node.target) for node in compiled.entries[0].compiled.joint.graph.nodes}
    assert any("flash_attention" in target for target in targets)


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return gradient * x * x * 3


def test_four_derivatives_of_a_custom_function() -> None:
    def style(function: Function) -> Any:
        x = leaf(5)
        found = [function(x)]
        for _ in range(4):
            found += torch.autograd.grad(found[-1].sum(), x, create_graph=True)
        return found

    both(style, lambda x: _Cube.apply(x.sin()).cos())


def test_zeros_where_a_decomposition_does_not_read_the_input() -> None:
    def decomposed(gradient: torch.Tensor, x: torch.Tensor, padding: list[int]) -> torch.Tensor:
        pad = torch.nn.functional.pad
        return gradient[..., 1:-1] + pad(gradient[..., :1], (1, 3)) + pad(gradient[..., -1:], (3, 1))

    operator = torch.ops.aten.reflection_pad1d_backward.default

    @dovetail.register_backend("decomposed_padding", decompositions=lambda: {operator: decomposed})
    def run(graph: torch.fx.GraphModule, inputs: Any, *, kind: Any, options: Any) -> Any:
        assert not graph.graph.find_nodes(op="call_function", target=operator)
        return lambda values: list(graph(*values))

    def style(f: Function) -> Any:
        x, tangent = leaf(2, 5), leaf(2, 7, seed=1)
        (g,) = torch.autograd.grad(f(x), x, tangent, create_graph=True)
        return [g, *torch.autograd.grad(g.square().sum(), [x, tangent])]

    try:
        both(style, lambda x: torch.nn.functional.pad(x, (1, 1), mode="reflect"), "decomposed_padding")
    finally:
        dovetail.backends.registry.unregister_backend("decomposed_padding")


def test_the_third_derivative_of_a_determinant() -> None:
    """It was not a number, and is refused since."""
    weights = torch.arange(9.0, dtype=torch.float64).view(3, 3)
    x = torch.diag(torch.tensor([1.0, 2.0, 0.0], dtype=torch.float64)).requires_grad_()
    found = []
    for run in (torch.linalg.det, dovetail.compile(torch.linalg.det, backend="aten")):
        (first,) = torch.autograd.grad(run(x), x, create_graph=True)
        (second,) = torch.autograd.grad((first * weights).sum(), x, create_graph=True)
        found.append(second)
    torch.testing.assert_close(found[1], found[0])
    if parse(torch.__version__) >= (2, 15):
        # Torch has another formula from here on.
        third = [torch.autograd.grad((second * weights).sum(), x)[0] for second in found]
        torch.testing.assert_close(third[1], third[0])
        return
    with pytest.raises(dovetail.errors.HigherOrderGradientError, match="determinant"):
        torch.autograd.grad((found[1] * weights).sum(), x)


class DrawsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * torch.rand_like(gradient)


def test_random_numbers_of_a_custom_backward_are_drawn_at_the_backward() -> None:
    """With ``create_graph=True`` they were drawn again from the state of the forward, which left the generator as it was."""
    found = []
    for run in (
        DrawsInBackward.apply,
        dovetail.compile(lambda x: DrawsInBackward.apply(x), backend="aten", fullgraph=True),
    ):
        torch.manual_seed(0)
        x = torch.ones(3, requires_grad=True)
        for _ in range(3):
            y = run(x)
            torch.rand(2)
            (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            found.append((first.detach(), torch.get_rng_state()))
    same(found[:3], found[3:])
    with pytest.raises(HigherOrderGradientError, match="draws random numbers"):
        first.sum().backward()
