"""Scenarios with ``torch.autograd.Function``, checkpointing and saved-tensor hooks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.backward_capture.scenarios import Run, grads, leaf, scenario


class Scale(torch.autograd.Function):
    """A tensor times a number that is not a tensor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * ctx.factor, None


class TwoResults(torch.autograd.Function):
    """Two results; a program may use one of them."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        ctx.save_for_backward(x, y)
        return x * y, x + y

    @staticmethod
    def backward(ctx: Any, first: torch.Tensor, second: torch.Tensor) -> Any:
        x, y = ctx.saved_tensors
        assert ctx.needs_input_grad[0]
        return first * y + second, first * x + second


class Unmaterialized(torch.autograd.Function):
    """Gradients that nobody gave stay None."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, first: Any, second: Any) -> Any:
        if first is None:
            return second * 3
        return first * 2 if second is None else first * 2 + second * 3


class InPlace(torch.autograd.Function):
    """Writes to its argument."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.mul_(3)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * 3


class ArgumentMax(torch.autograd.Function):
    """One of its results has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        values, indices = x.max(1)
        ctx.mark_non_differentiable(indices)
        ctx.save_for_backward(indices)
        ctx.size = x.shape
        return values, indices

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: Any) -> Any:
        (indices,) = ctx.saved_tensors
        return torch.zeros(ctx.size).scatter_(1, indices[:, None], gradient[:, None])


class StraightThrough(torch.autograd.Function):
    """Another gradient than that of its operators."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.sign()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * ctx.saved_tensors[0].abs()


class Bad(torch.autograd.Function):
    """Returns what it is told to."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, what: Any) -> torch.Tensor:
        ctx.what = what
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.what(gradient)


@scenario
def function_that_asks_what_its_context_is(run: Run) -> Any:
    class Asks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            (x,) = ctx.saved_variables  # deprecated
            return gradient * x * (2 if isinstance(ctx, torch.autograd.graph.Node) else 3)

    x = leaf(run.size)
    Asks.apply(x).sum().backward()
    return grads(x)


@scenario
def once_differentiable_function_in_a_graph(run: Run) -> Any:
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, factor: int) -> torch.Tensor:
            ctx.factor = factor
            ctx.save_for_backward(x)
            return x * x * factor

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            return 2 * gradient * ctx.saved_tensors[0] * ctx.factor, None

    x, weight = leaf(run.size), torch.ones((), requires_grad=True)
    Once.apply(x, 3).sum().backward(weight, create_graph=True)
    run.note(x.grad.requires_grad)
    return [x.grad.detach()]


@scenario
def function_with_a_number(run: Run) -> Any:
    x = leaf(run.size)
    (Scale.apply(x, 2.5) + Scale.apply(x, float(run.size))).sum().backward()
    return grads(x)


@scenario
def function_with_two_results(run: Run) -> Any:
    x, y = leaf(run.size), leaf(run.size)
    a, b = TwoResults.apply(x, y)
    (a * b).sum().backward()
    first, _ = TwoResults.apply(x, y)
    first.sum().backward()
    return grads(x, y)


@scenario
def function_with_the_same_argument_twice(run: Run) -> Any:
    x = leaf(run.size)
    a, b = TwoResults.apply(x, x)
    (a.sin() * b).sum().backward()
    return grads(x)


@scenario
def function_with_one_frozen_argument(run: Run) -> Any:
    x, y = leaf(run.size), torch.randn(run.size)
    a, b = TwoResults.apply(x, y)
    (a * b).sum().backward()
    return grads(x)


@scenario
def function_without_materialized_gradients(run: Run) -> Any:
    x = leaf(run.size)
    first, second = Unmaterialized.apply(x)
    first.sum().backward()
    _, second = Unmaterialized.apply(x)
    second.sum().backward()
    first, second = Unmaterialized.apply(x)
    (first * second).sum().backward()
    return grads(x)


@scenario
def function_in_place(run: Run) -> Any:
    x = leaf(run.size)
    h = x * 1
    InPlace.apply(h)
    h.sin().sum().backward()
    return grads(x)


@scenario
def function_in_place_on_a_view(run: Run) -> Any:
    x = leaf(run.size, 3)
    base = x * 1
    InPlace.apply(base[:, 1])
    base.sin().sum().backward()
    return grads(x)


@scenario
def function_with_a_plain_result(run: Run) -> Any:
    x = leaf(run.size, 3)
    values, indices = ArgumentMax.apply(x)
    (values * indices).sum().backward()
    return grads(x)


@scenario
def function_with_setup_context(run: Run) -> Any:
    x = leaf(run.size)
    (StraightThrough.apply(x.sin()) * x).sum().backward()
    return grads(x)


@scenario
def function_with_hooks(run: Run) -> Any:
    x = leaf(run.size)
    h = Scale.apply(x, 2.0)
    h.register_hook(lambda gradient: gradient * 2)
    h.grad_fn.register_hook(lambda results, gradients: run.note(*gradients, results[0]))
    h.sin().sum().backward()
    return grads(x)


@scenario
def function_results_of_every_kind(run: Run) -> Any:
    x = leaf(run.size)
    for what in (
        lambda gradient: gradient,
        lambda gradient: (gradient, None),
        lambda gradient: (gradient, None, None),
        lambda gradient: (None, None),
        lambda gradient: (gradient, gradient),
        lambda gradient: ("no", None),
        lambda gradient: (gradient.sum(), None),
        lambda gradient: (torch.ones(7, 7), None),
        lambda gradient: (gradient.double(), None),
        lambda gradient: 1 / 0,
    ):
        try:
            Bad.apply(x, what).sum().backward()
        except (RuntimeError, TypeError, ZeroDivisionError) as error:
            run.note(type(error).__name__, str(error))
    return grads(x)


@scenario(eager="has run before")
def function_that_gives_no_gradient(run: Run) -> Any:
    x, y = leaf(run.size), leaf(run.size)
    for gives in (True, False, True):

        def what(gradient: torch.Tensor, gives: bool = gives) -> Any:
            return gradient if gives else None, None

        h = Scale.apply(x, 2.0)
        h.register_hook(lambda gradient: run.note(gradient))
        first, second = Unmaterialized.apply(h)
        (Bad.apply(first, what) * y + second).sum().backward()
        Bad.apply(h.sin() * y, what).sum().backward()
        (Bad.apply(Scale.apply(x, 3.0), what).sum() + Bad.apply(x.exp(), what).sum() + x.sum()).backward()
        values, _ = TwoResults.apply(x, y)
        Bad.apply(values, what).sum().backward()
    return grads(x, y)


@scenario
def function_that_keeps_state(run: Run) -> Any:
    x = leaf(run.size)
    seen: list[float] = []

    def what(gradient: torch.Tensor) -> Any:
        seen.append(gradient.sum().item())
        return gradient * len(seen), None

    Bad.apply(x, what).sum().backward()
    Bad.apply(x, what).sum().backward()
    return [seen, x.grad]


@scenario
def function_in_a_function(run: Run) -> Any:
    x = leaf(run.size)

    def what(gradient: torch.Tensor) -> Any:
        with torch.enable_grad():
            inner = gradient.detach().requires_grad_()
            (result,) = torch.autograd.grad(Scale.apply(inner.sin(), 2.0).sum(), [inner])
        return result, None

    Bad.apply(x, what).sum().backward()
    return grads(x)


@scenario
def function_whose_context_is_used_afterwards(run: Run) -> Any:
    x = leaf(run.size)
    h = Scale.apply(x, 2.0)
    node = h.grad_fn

    def what(gradient: torch.Tensor) -> Any:
        node.factor = 5.0
        return gradient, None

    Bad.apply(h, what).sum().backward()
    return [x.grad, node.factor]


@scenario
def double_backward_through_a_function(run: Run) -> Any:
    x, y = leaf(run.size), leaf(run.size)
    a, b = TwoResults.apply(x, y)
    (first,) = torch.autograd.grad((a * b).sum(), [x], create_graph=True)
    first.square().sum().backward()
    return grads(x, y)


# --- checkpoints and saved-tensor hooks -------------------------------------------------------------------------------


@scenario
def checkpointed(run: Run) -> Any:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(0.3), nn.Linear(4, 2))
    x = leaf(run.size, 3)
    checkpoint(model, x, use_reentrant=False).square().sum().backward()
    return [*grads(*model.parameters(), x), torch.randn(2)]


@scenario
def checkpointed_reentrant(run: Run) -> Any:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(0.3), nn.Linear(4, 2))
    x = leaf(run.size, 3)
    checkpoint(model, x, use_reentrant=True).square().sum().backward()
    return [*grads(*model.parameters(), x), torch.randn(2)]


@scenario
def nested_checkpoints(run: Run) -> Any:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    x = leaf(run.size, 3)

    def inner(value: torch.Tensor) -> torch.Tensor:
        run.note("inner")
        return second(value).sin()

    def outer(value: torch.Tensor) -> torch.Tensor:
        run.note("outer")
        return checkpoint(inner, first(value).cos(), use_reentrant=False) * 2

    checkpoint(outer, x, use_reentrant=False).sum().backward()
    return grads(x, *first.parameters(), *second.parameters())


@scenario
def recomputation_is_done_once(run: Run) -> Any:
    x = leaf(run.size)

    def block(value: torch.Tensor) -> torch.Tensor:
        run.note("block")
        return value.sin().cos().exp().tanh()

    checkpoint(block, checkpoint(block, x, use_reentrant=False), use_reentrant=False).sum().backward()
    return grads(x)


@scenario
def checkpointed_sequence(run: Run) -> Any:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(3, 3), nn.ReLU()) for _ in range(4)])
    x = leaf(run.size, 3)
    checkpoint_sequential(model, 2, x, use_reentrant=False).sum().backward()
    return grads(x, *model.parameters())


@scenario
def saved_tensor_hooks(run: Run) -> Any:
    x = leaf(run.size)

    def unpack(packed: Any) -> torch.Tensor:
        run.note("unpack", packed[0])
        return packed[1] * 1

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: ("packed", tensor.detach()), unpack):
        y = (x.sin() * x.cos()).exp()
    y.sum().backward()
    return grads(x)


@scenario
def saved_on_the_cpu(run: Run) -> Any:
    x = leaf(run.size)
    with torch.autograd.graph.save_on_cpu():
        y = (x.sin() * x).exp()
    y.sum().backward()
    return grads(x)


@scenario
def unpack_that_raises(run: Run) -> Any:
    x = leaf(run.size)

    def unpack(packed: Any) -> torch.Tensor:
        raise ValueError("gone")

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
        y = x.sin()
    try:
        y.sum().backward()
    except ValueError as error:
        run.note(str(error))
    return grads(x)


@scenario(eager="anomaly mode")
def anomaly_mode(run: Run) -> Any:
    x = leaf(run.size)
    with torch.autograd.detect_anomaly(check_nan=True):
        try:
            (x * 0).sqrt().mul(0).sum().backward()
        except RuntimeError as error:
            run.note(str(error))
        x.sin().sum().backward()
    return grads(x)
