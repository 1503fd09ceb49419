"""Backward scenarios: small programs that return what a user can look at after a backward.

Each is called with a ``Run``: ``run.size`` is the batch size, ``run.log`` takes notes that must come in eager's order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

Scenario = Callable[["Run"], Any]
SCENARIOS: dict[str, Scenario] = {}
#: Scenarios whose backward (or part of it) is eager's, by the word that the reason must contain.
LEFT_TO_EAGER: dict[str, str] = {}


@dataclass
class Run:
    """One run of a scenario."""

    size: int
    log: list[Any] = field(default_factory=list)

    def note(self, *items: Any) -> None:
        """Remember values as they are now."""
        self.log.append([item.detach().clone() if isinstance(item, torch.Tensor) else item for item in items])


def scenario(function: Scenario | None = None, *, eager: str | None = None) -> Any:
    """Register a scenario; ``eager`` is a part of the reason why its backward is left to eager."""

    def register(item: Scenario) -> Scenario:
        SCENARIOS[item.__name__] = item
        if eager is not None:
            LEFT_TO_EAGER[item.__name__] = eager
        return item

    return register if function is None else register(function)


def leaf(*shape: int, **options: Any) -> torch.Tensor:
    """A random leaf that requires a gradient."""
    return torch.randn(shape, **options).requires_grad_()


def grads(*tensors: torch.Tensor) -> list[Any]:
    """The gradients of leaves."""
    return [tensor.grad for tensor in tensors]


# --- plain graphs -----------------------------------------------------------------------------------------------------


@scenario
def elementwise(run: Run) -> Any:
    x = leaf(run.size, 4)
    ((x * 2.5).sin() / 3 - x.exp().log1p() ** 2).sum().backward()
    return grads(x)


@scenario
def linear_layers(run: Run) -> Any:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    model(torch.randn(run.size, 4)).pow(2).mean().backward()
    return grads(*model.parameters())


@scenario
def convolution(run: Run) -> Any:
    model = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2))
    model(torch.randn(run.size, 2, 8, 8)).square().sum().backward()
    return [*grads(*model.parameters()), *model.buffers()]


@scenario
def channels_last(run: Run) -> Any:
    model = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
    x = leaf(run.size, 2, 6, 6).detach().to(memory_format=torch.channels_last).requires_grad_()
    model(x).square().sum().backward()
    return grads(*model.parameters(), x)


@scenario
def attention(run: Run) -> Any:
    layer = nn.MultiheadAttention(8, 2, batch_first=True)
    x = leaf(run.size, 5, 8)
    layer(x, x, x)[0].square().sum().backward()
    return grads(*layer.parameters(), x)


@scenario
def fused_attention(run: Run) -> Any:
    q, k, v = leaf(run.size, 2, 5, 8), leaf(run.size, 2, 5, 8), leaf(run.size, 2, 5, 8)
    nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).square().sum().backward()
    return grads(q, k, v)


@scenario
def layer_norm_and_gelu(run: Run) -> Any:
    norm = nn.LayerNorm(6)
    x = leaf(run.size, 6)
    nn.functional.gelu(norm(x)).sum().backward()
    return grads(x, *norm.parameters())


@scenario
def dense_gradient_of_a_sparse_leaf(run: Run) -> Any:
    matrix = torch.randn(run.size, 3).to_sparse().requires_grad_()
    y = leaf(3, 2)
    for _ in range(2):
        (matrix @ y).sum().backward()
    return grads(matrix, y)


@scenario
def embedding(run: Run) -> Any:
    table = nn.Embedding(10, 4)
    table(torch.arange(run.size) % 7).square().sum().backward()
    return grads(table.weight)


@scenario
def cross_entropy(run: Run) -> Any:
    x = leaf(run.size, 5)
    nn.functional.cross_entropy(x, torch.arange(run.size) % 5).backward()
    return grads(x)


@scenario
def dropout(run: Run) -> Any:
    x = leaf(run.size, 40)
    nn.functional.dropout(x * 2, 0.4).sum().backward()
    return [*grads(x), torch.randn(2)]


@scenario
def lstm(run: Run) -> Any:
    layer = nn.LSTM(3, 4, batch_first=True)
    layer(torch.randn(run.size, 3, 3))[0].square().sum().backward()
    return grads(*layer.parameters())


@scenario
def complex_numbers(run: Run) -> Any:
    x = leaf(run.size, 3, dtype=torch.complex64)
    (x * x.conj() + x.exp()).abs().sum().backward()
    return grads(x)


@scenario
def mixed_precision(run: Run) -> Any:
    model = nn.Linear(4, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(torch.randn(run.size, 4)).relu().sum()
    loss.backward()
    return grads(*model.parameters())


@scenario
def half_precision(run: Run) -> Any:
    x = leaf(run.size, 4, dtype=torch.bfloat16)
    (x * 3.3 / 7 + x * torch.tensor(2.0)).sum().backward()
    return grads(x)


@scenario
def scalar_tensors(run: Run) -> Any:
    x, y = leaf(), leaf()
    (x * 1.1 * y + x / 3 + y**2).backward()
    return grads(x, y)


@scenario
def double_scalars(run: Run) -> Any:
    x = leaf(dtype=torch.float64)
    y = leaf()
    (x * y * 1.7).backward()
    return grads(x, y)


@scenario
def broadcasting(run: Run) -> Any:
    x, b = leaf(run.size, 4), leaf(4)
    (x * b + b).sum().backward()
    return grads(x, b)


@scenario
def reductions(run: Run) -> Any:
    x = leaf(run.size, 4)
    (x.mean(0).sum() + x.max(1).values.sum() + x.std() + x.prod() + x.logsumexp(0).sum() + x.norm()).backward()
    return grads(x)


@scenario
def indexing(run: Run) -> Any:
    x = leaf(run.size, 4)
    index = torch.tensor([0, 1, 0])
    (
        x[index].sum() + x[:, 1:3].square().sum() + x.gather(1, torch.zeros(run.size, 2, dtype=torch.long)).sum()
    ).backward()
    return grads(x)


@scenario
def concatenation(run: Run) -> Any:
    x, y = leaf(run.size, 2), leaf(run.size, 3)
    parts = torch.cat([x, y, x], 1).split([3, 4], 1)
    (parts[0].sin().sum() + torch.stack([x, x]).square().sum()).backward()
    return grads(x, y)


@scenario
def unused_output_of_a_node(run: Run) -> Any:
    x = leaf(run.size, 6)
    first, _, third = x.chunk(3, 1)
    (first * third).sum().backward()
    return grads(x)


@scenario
def linear_algebra(run: Run) -> Any:
    x = leaf(run.size, 3, 3)
    (
        torch.linalg.inv(x @ x.mT + torch.eye(3)).sum() + torch.linalg.qr(x)[0].sum() + torch.linalg.det(x).sum()
    ).backward()
    return grads(x)


@scenario
def fft(run: Run) -> Any:
    x = leaf(run.size, 8)
    torch.fft.rfft(x).abs().sum().backward()
    return grads(x)


@scenario
def gradient_given(run: Run) -> Any:
    x = leaf(run.size, 3)
    y = x.sin()
    y.backward(torch.arange(run.size * 3.0).view(run.size, 3))
    return grads(x)


@scenario
def several_roots(run: Run) -> Any:
    x = leaf(run.size)
    a, b = x.sin(), x.cos()
    torch.autograd.backward([a, b, a], [torch.ones(run.size), torch.full((run.size,), 2.0), torch.ones(run.size)])
    return grads(x)


@scenario
def leaf_as_root(run: Run) -> Any:
    x = leaf(run.size)
    x.backward(torch.ones(run.size))
    torch.autograd.backward([x, x.sin()], [torch.ones(run.size)] * 2)
    return grads(x)


@scenario
def nothing_requires_grad(run: Run) -> Any:
    x = torch.randn(run.size)
    try:
        x.sum().backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


# --- accumulation and .grad -------------------------------------------------------------------------------------------


@scenario
def accumulates_in_place(run: Run) -> Any:
    x = leaf(run.size)
    x.sin().sum().backward()
    first = x.grad
    x.cos().sum().backward()
    return [x.grad, first is x.grad]


@scenario
def many_uses(run: Run) -> Any:
    x = leaf(run.size, 50)
    parts = [(x * scale).sin() * 10.0**scale for scale in range(-3, 4)]
    sum(parts).sum().backward()
    return grads(x)


@scenario
def many_uses_in_another_order(run: Run) -> Any:
    x = leaf(run.size, 50)
    parts = [(x * scale).sin() * 10.0**scale for scale in range(-3, 4)]
    total = parts[3]
    for index in (6, 0, 2, 5, 1, 4):
        total = parts[index] + total
    total.sum().backward()
    return grads(x)


@scenario
def tied_weights(run: Run) -> Any:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    second(first(torch.randn(run.size, 4)).relu()).sum().backward()
    return grads(first.weight, first.bias, second.bias)


@scenario
def micro_batches(run: Run) -> Any:
    model = nn.Linear(3, 2)
    for _ in range(3):
        (model(torch.randn(run.size, 3)).square().mean() / 3).backward()
    return grads(*model.parameters())


@scenario
def expanded_gradient(run: Run) -> Any:
    x = leaf(run.size, 3)
    x.sum().backward()
    return [x.grad, x.grad.stride()]


@scenario
def transposed_leaf(run: Run) -> Any:
    x = torch.randn(3, run.size + 1).t().requires_grad_()
    (x * torch.randn(run.size + 1, 3)).sum().backward()
    return [x.grad, x.grad.stride()]


@scenario
def overlapping_leaf(run: Run) -> Any:
    x = torch.randn(1, 3).expand(run.size + 1, 3).requires_grad_()
    x.sin().sum().backward()
    return [x.grad, x.grad.stride()]


@scenario
def one_gradient_for_two_leaves(run: Run) -> Any:
    x, y = leaf(run.size), leaf(run.size)
    (x + y).sum().backward()
    x.grad.add_(1)
    return grads(x, y)


@scenario
def gradient_kept_by_the_caller(run: Run) -> Any:
    x = leaf(run.size)
    given = torch.ones(run.size)
    (x + 0).backward(given)
    x.grad.mul_(5)
    return [x.grad, given]


@scenario
def sparse_embedding(run: Run) -> Any:
    table = nn.Embedding(10, 4, sparse=True)
    table(torch.arange(run.size)).sum().backward()
    table(torch.arange(run.size) + 1).sum().backward()
    return [table.weight.grad.is_sparse, table.weight.grad.to_dense()]


@scenario
def sparse_and_dense(run: Run) -> Any:
    table = nn.Embedding(10, 4, sparse=True)
    (table(torch.arange(run.size)).sum() + table.weight.square().sum()).backward()
    return [table.weight.grad.is_sparse, table.weight.grad.to_dense()]


@scenario
def grad_set_to_none_between(run: Run) -> Any:
    x = leaf(run.size)
    x.sin().sum().backward()
    x.grad = None
    x.cos().sum().backward()
    return grads(x)


@scenario
def training_steps(run: Run) -> Any:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(run.size, 3)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return list(model.parameters())


@scenario
def frozen_between_steps(run: Run) -> Any:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    model(torch.randn(run.size, 3)).sum().backward()
    model[0].weight.requires_grad_(False)
    model(torch.randn(run.size, 3)).sum().backward()
    model[0].weight.requires_grad_(True)
    model(torch.randn(run.size, 3)).sum().backward()
    return grads(*model.parameters())


# --- grad(), inputs=, retain_graph ------------------------------------------------------------------------------------


@scenario
def grad_of_leaves(run: Run) -> Any:
    x, y = leaf(run.size), leaf(run.size)
    result = torch.autograd.grad((x.sin() * y).sum(), [x, y])
    return [*result, x.grad, y.grad]


@scenario
def grad_of_inner_values(run: Run) -> Any:
    x = leaf(run.size)
    h = x.sin()
    z = h.exp() * h
    return [*torch.autograd.grad(z.sum(), [h, z, x]), x.grad]


@scenario
def grad_of_one_of_many(run: Run) -> Any:
    x, y, z = leaf(run.size), leaf(run.size), leaf(run.size)
    return [*torch.autograd.grad((x * y * z + y.sin()).sum(), [y]), x.grad, y.grad, z.grad]


@scenario
def grad_of_unused(run: Run) -> Any:
    x, y = leaf(run.size), leaf(run.size)
    results = torch.autograd.grad(x.sin().sum(), [x, y], allow_unused=True)
    try:
        torch.autograd.grad(x.sin().sum(), [x, y])
    except RuntimeError as error:
        run.note(str(error))
    return [results[0], results[1] is None]


@scenario
def grad_materialized(run: Run) -> Any:
    x, y = leaf(run.size), leaf(run.size)
    return list(torch.autograd.grad(x.sin().sum(), [x, y], materialize_grads=True))


@scenario
def backward_with_inputs(run: Run) -> Any:
    x, y = leaf(run.size), leaf(run.size)
    (x.sin() * y).sum().backward(inputs=[x])
    return grads(x, y)


@scenario(eager="hooks of native code")
def backward_with_an_inner_input(run: Run) -> Any:
    x = leaf(run.size)
    h = x.sin()
    (h * h).sum().backward(inputs=[h])
    return [x.grad, h.grad]


@scenario
def the_same_input_twice(run: Run) -> Any:
    x = leaf(run.size)
    return list(torch.autograd.grad(x.sin().sum(), [x, x]))


@scenario
def retained_graph(run: Run) -> Any:
    x = leaf(run.size)
    y = (x.sin() * x).sum()
    y.backward(retain_graph=True)
    y.backward()
    try:
        y.backward()
    except RuntimeError as error:
        run.note(str(error))
    return grads(x)


@scenario
def two_roots_with_a_common_part(run: Run) -> Any:
    x = leaf(run.size)
    h = x.sin()
    h.exp().sum().backward(retain_graph=True)
    h.cos().sum().backward()
    return grads(x)


@scenario
def gradient_edges(run: Run) -> Any:
    x = leaf(run.size)
    h = x.sin()
    edge = torch.autograd.graph.get_gradient_edge(h)
    return list(torch.autograd.grad(h.exp().sum(), [edge]))


@scenario(eager="vmap")
def batched_gradients(run: Run) -> Any:
    x = leaf(3)
    y = x.sin() * 2
    return list(torch.autograd.grad(y, [x], torch.eye(3), is_grads_batched=True))


@scenario
def saved_value_was_written_to(run: Run) -> Any:
    x = leaf(run.size)
    h = x.exp()
    y = h.sum()
    h.detach().mul_(2)
    try:
        y.backward()
    except RuntimeError as error:
        run.note("modified by an inplace operation" in str(error))
    y = (h * h).sum()
    with torch.no_grad():
        h.mul_(2)
    try:
        y.backward()
    except RuntimeError as error:
        run.note("modified by an inplace operation" in str(error))
    return grads(x)


# --- higher order -----------------------------------------------------------------------------------------------------


@scenario
def double_backward(run: Run) -> Any:
    x = leaf(run.size)
    (first,) = torch.autograd.grad(x.pow(4).sum(), [x], create_graph=True)
    first.square().sum().backward()
    return [first, x.grad]


@scenario
def gradient_penalty(run: Run) -> Any:
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    x = leaf(run.size, 3)
    (slope,) = torch.autograd.grad(model(x).sum(), [x], create_graph=True)
    (slope.norm(dim=1) - 1).square().mean().backward()
    return grads(*model.parameters(), x)


@scenario
def third_order(run: Run) -> Any:
    x = leaf(run.size, dtype=torch.float64)
    value = x.sin().sum()
    for _ in range(3):
        (gradient,) = torch.autograd.grad(value, [x], create_graph=True)
        value = gradient.sum()
    value.backward()
    return grads(x)
