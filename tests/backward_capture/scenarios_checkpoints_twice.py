"""Backward scenarios that differentiate again what went through saved-tensor hooks, checkpoints among them."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.backward_capture.scenarios import Run, grads, leaf, scenario


def twice(run: Run, y: torch.Tensor, *wanted: torch.Tensor) -> list[Any]:
    """The first and the second derivatives."""
    first = torch.autograd.grad(y.sum(), wanted, create_graph=True)
    run.note(*(item.requires_grad for item in first))
    total = sum(item.square().sum() for item in first)
    return [*(item.detach() for item in first), *torch.autograd.grad(total, wanted, allow_unused=True)]


class Packed:
    """What a hook of these scenarios makes of a tensor."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value.detach()


@scenario(eager="saved-tensor hooks")
def hooks_of_the_users_twice(run: Run) -> Any:
    x = leaf(run.size)
    with saved_tensors_hooks(Packed, lambda packed: run.note("unpack") or packed.value * 1):
        h = x.exp()
        y = (h * h).sin() * x
    return twice(run, y, x)


@scenario(eager="saved-tensor hooks")
def hooks_that_scale_twice(run: Run) -> Any:
    x = leaf(run.size)
    with saved_tensors_hooks(lambda value: value * 2, lambda packed: packed / 4):
        y = x.tanh() * x.exp()
    return twice(run, y, x)


class Product(torch.autograd.Function):
    """Saves an input, an output, a None and a tensor without a gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        result = x.exp() * y
        ctx.save_for_backward(x, result, None, torch.full_like(x, 2.0))
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, result, _, two = ctx.saved_tensors
        return gradient * result, gradient * x.exp() * two / 2


@scenario(eager="saved-tensor hooks")
def functions_of_the_users_through_hooks_twice(run: Run) -> Any:
    x, y = leaf(run.size), leaf(run.size)
    with saved_tensors_hooks(Packed, lambda packed: run.note("unpack") or packed.value):
        z = Product.apply(x.sin(), y) * Product.apply(y, x)
    return twice(run, z, x, y)


@scenario(eager="saved-tensor hooks")
def lists_through_hooks_twice(run: Run) -> Any:
    x, where = leaf(run.size, 3), torch.tensor([0, 2])
    with saved_tensors_hooks(Packed, lambda packed: run.note("unpack") or packed.value):
        h = torch.cat([x.exp(), x.sin()])[where]
        y = torch.stack([h, h * h]).prod(0)
    return twice(run, y, x)


@scenario(eager="saved-tensor hooks")
def third_order_over_a_checkpoint(run: Run) -> Any:
    x = leaf(run.size, dtype=torch.float64)
    found = [checkpoint(lambda v: v.sin().exp(), x, use_reentrant=False).sum()]
    for _ in range(3):
        found.append(torch.autograd.grad(found[-1].sum(), [x], create_graph=True)[0])
    return [item.detach() for item in found]


@scenario(eager="saved-tensor hooks")
def checkpoints_in_checkpoints_twice(run: Run) -> Any:
    x = leaf(run.size)

    def inner(value: torch.Tensor) -> torch.Tensor:
        return value.sin() * value

    def outer(value: torch.Tensor) -> torch.Tensor:
        return checkpoint(inner, value.exp(), use_reentrant=False).tanh() * value

    return twice(run, checkpoint(outer, x, use_reentrant=False), x)


@scenario(eager="saved-tensor hooks")
def checkpointed_layers_twice(run: Run) -> Any:
    layers = [nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Dropout(0.5)).double() for _ in range(3)]
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    x = leaf(run.size, 3, dtype=torch.float64)
    h = x
    for layer in layers:
        h = checkpoint(layer, h, use_reentrant=False)
    (slope,) = torch.autograd.grad(h.square().sum(), [x], create_graph=True)
    (h.sum() + slope.square().sum()).backward()
    return [slope.detach(), *grads(x, *parameters)]


@scenario(eager="saved-tensor hooks")
def backward_over_a_checkpoint_twice(run: Run) -> Any:
    x, weight = leaf(run.size), leaf(run.size)
    y = checkpoint(lambda v: (v * weight).sin() * v, x, use_reentrant=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        y.sum().backward(create_graph=True)
    first = grads(x, weight)
    x.grad = weight.grad = None
    (first[0].square().sum() + first[1].exp().sum()).backward()
    return [*(item.detach() for item in first), *grads(x, weight)]


@scenario
def reentrant_checkpoint_with_create_graph(run: Run) -> Any:
    x, weight = leaf(run.size), leaf(run.size)
    y = checkpoint(lambda v: (v * weight).sin() * v, x * 2, use_reentrant=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (y.exp() * x).sum().backward(create_graph=True)
    first = grads(x, weight)
    run.note(*(item.requires_grad for item in first))
    x.grad = weight.grad = None
    first[0].square().sum().backward()
    return [*(item.detach() for item in first), *grads(x, weight)]


@scenario
def reentrant_checkpoint_with_inputs(run: Run) -> Any:
    x = leaf(run.size)
    y = checkpoint(lambda v: v.sin() * v, x * 2, use_reentrant=True)
    try:
        torch.autograd.grad(y.sum(), [x], create_graph=True)
    except RuntimeError as error:
        run.note("use_reentrant" in str(error))
    return y.detach()


@scenario
def selective_checkpoint_twice(run: Run) -> Any:
    def keep(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saved = operator is torch.ops.aten.mm.default
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    x, weight = leaf(run.size, 3), leaf(3, 3)
    contexts = functools.partial(create_selective_checkpoint_contexts, keep, allow_cache_entry_mutation=True)
    y = checkpoint(lambda v: (v @ weight).sin() * v, x, use_reentrant=False, context_fn=contexts)
    first = torch.autograd.grad(y.sum(), [x, weight])
    return list(first)


@scenario(eager="saved-tensor hooks")
def saved_on_cpu_twice(run: Run) -> Any:
    x = leaf(run.size, 3)
    with save_on_cpu():
        y = (x @ x.t()).softmax(-1).log() @ x
    return twice(run, y, x)


@scenario(eager="saved-tensor hooks")
def kept_graph_over_a_checkpoint(run: Run) -> Any:
    x = leaf(run.size)
    y = checkpoint(lambda v: v.sin().exp() * v, x, use_reentrant=False).sum()
    found = [torch.autograd.grad(y, [x], create_graph=True)[0] for _ in range(2)]
    return [*(item.detach() for item in found), *torch.autograd.grad((found[0] * found[1]).sum(), [x])]


@scenario(eager="saved-tensor hooks")
def written_view_through_hooks_twice(run: Run) -> Any:
    x = leaf(run.size, 3)
    with saved_tensors_hooks(Packed, lambda packed: packed.value):
        base = x.sin()
        base[:, 1].exp_()
        y = base * x
    return twice(run, y, x)


@scenario
def unpack_hook_that_raises_twice(run: Run) -> Any:
    def fail(packed: Any) -> torch.Tensor:
        raise ValueError("lost")

    x = leaf(run.size)
    with saved_tensors_hooks(Packed, fail):
        y = x.exp() * x
    for create_graph in (True, False):
        try:
            torch.autograd.grad(y.sum(), [x], create_graph=create_graph, retain_graph=True)
        except ValueError as error:
            run.note(str(error))
    return twice(run, x.exp(), x)
