"""Scenarios with hooks of every kind, views and in-place writes, and bad input."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import nn

from tests.backward_capture.scenarios import Run, grads, leaf, scenario


@scenario
def hook_on_a_leaf(run: Run) -> Any:
    x = leaf(run.size)
    x.register_hook(lambda gradient: run.note("leaf", gradient))
    (x.sin() + x.cos()).sum().backward()
    return grads(x)


@scenario
def hook_that_replaces(run: Run) -> Any:
    x = leaf(run.size)
    h = x.sin()
    h.register_hook(lambda gradient: gradient * 3)
    h.register_hook(lambda gradient: gradient + 1)
    x.register_hook(lambda gradient: gradient.clamp(max=0.5))
    (h * h.exp()).sum().backward()
    return grads(x)


@scenario
def hook_that_is_removed(run: Run) -> Any:
    x = leaf(run.size)
    handle = x.register_hook(lambda gradient: gradient * 2)
    x.sin().sum().backward()
    handle.remove()
    x.sin().sum().backward()
    return grads(x)


@scenario
def hooks_of_every_kind(run: Run) -> Any:
    x, y = leaf(run.size), leaf(run.size)
    h = x.sin()
    h.register_hook(lambda gradient: run.note("tensor", gradient))
    h.grad_fn.register_prehook(lambda gradients: run.note("pre", *gradients))
    h.grad_fn.register_hook(lambda results, gradients: run.note("post", *results, *gradients))
    x.register_post_accumulate_grad_hook(lambda leaf: run.note("accumulated", leaf.grad))
    x.register_hook(lambda gradient: run.note("x", gradient))
    y.register_hook(lambda gradient: run.note("y", gradient))
    z = h * y
    z.grad_fn.register_hook(lambda results, gradients: run.note("z post", *results, *gradients))
    z.register_hook(lambda gradient: run.note("z", gradient))
    z.sum().backward()
    return grads(x, y)


@scenario
def node_hooks_that_replace(run: Run) -> Any:
    x, y = leaf(run.size), leaf(run.size)
    h = x * y
    h.grad_fn.register_prehook(lambda gradients: (gradients[0] * 2,))
    h.grad_fn.register_hook(lambda results, gradients: (results[0] + 1, results[1] * 0.5))
    h.sin().sum().backward()
    return grads(x, y)


@scenario
def hooks_on_accumulate_grad(run: Run) -> Any:
    x = leaf(run.size)
    node = x.view_as(x).grad_fn.next_functions[0][0]
    node.register_prehook(lambda gradients: (gradients[0] * 2,))
    node.register_hook(lambda results, gradients: run.note("post", x.grad, *gradients))
    x.register_post_accumulate_grad_hook(lambda leaf: run.note("accumulated", leaf.grad))
    (x.sin() * x).sum().backward()
    return grads(x)


@scenario
def order_of_hooks_on_branches(run: Run) -> Any:
    x, y, z = leaf(run.size), leaf(run.size), leaf(run.size)
    a = x.sin()
    b = y.cos()
    c = z.exp()
    d = a * b
    e = c + a
    for name, tensor in {"a": a, "b": b, "c": c, "d": d, "e": e, "x": x, "y": y, "z": z}.items():
        tensor.register_hook(lambda gradient, name=name: run.note(name, gradient))
    (d + e * b).sum().backward()
    return grads(x, y, z)


@scenario
def order_of_leaves(run: Run) -> Any:
    leaves = [leaf(run.size) for _ in range(9)]
    for index, tensor in enumerate(leaves):
        tensor.register_hook(lambda gradient, index=index: run.note(index))
    first = torch.cat(leaves[:7]).sum()
    second = torch.stack(leaves[3:]).prod()
    (first * second).backward()
    return grads(*leaves)


@scenario
def order_follows_the_forward(run: Run) -> Any:
    x = leaf(run.size)
    swap = run.size % 2 == 0
    first, second = (x.cos, x.sin) if swap else (x.sin, x.cos)
    p = first()
    q = second()
    sine, cosine = (q, p) if swap else (p, q)
    sine.register_hook(lambda gradient: run.note("sine", gradient))
    cosine.register_hook(lambda gradient: run.note("cosine", gradient))
    (sine * cosine).sum().backward()
    return grads(x)


@scenario
def module_backward_hooks(run: Run) -> Any:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    model[0].register_full_backward_hook(lambda module, inputs, outputs: run.note("first", *outputs))
    model[2].register_full_backward_pre_hook(lambda module, outputs: (outputs[0] * 2,))
    model[1].register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 0.5,))
    model(torch.randn(run.size, 3)).square().sum().backward()
    return grads(*model.parameters())


@scenario(eager="hooks of native code")
def retained_gradients(run: Run) -> Any:
    x = leaf(run.size)
    h = x.sin()
    z = h.exp()
    h.retain_grad()
    z.retain_grad()
    h.register_hook(lambda gradient: gradient * 2)
    (z * h).sum().backward()
    return [x.grad, h.grad, z.grad]


@scenario
def optimizer_in_backward(run: Run) -> Any:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for _ in range(2):
        model(torch.randn(run.size, 3)).square().sum().backward()
    return [*model.parameters(), *grads(*model.parameters())]


@scenario
def hook_that_counts(run: Run) -> Any:
    x = leaf(run.size)
    calls = []
    x.register_hook(lambda gradient: calls.append(gradient.sum().item()))
    for _ in range(3):
        (x * 2).sum().backward()
    return [calls, x.grad]


@scenario
def hook_that_writes_to_its_gradient(run: Run) -> Any:
    x = leaf(run.size)
    h = x.sin()

    def double(gradient: torch.Tensor) -> None:
        gradient.mul_(2)

    (h * 1.5).register_hook(double)
    h.register_hook(double)
    (h * h).sum().backward()
    return grads(x)


@scenario
def hook_that_raises(run: Run) -> Any:
    x, y = leaf(run.size), leaf(run.size)

    def fail(gradient: torch.Tensor) -> None:
        raise ValueError("not today")

    h = x.sin()
    handle = h.register_hook(fail)
    try:
        (h * y).sum().backward()
    except ValueError as error:
        run.note(str(error))
    handle.remove()
    (x * y).sum().backward()
    return grads(x, y)


@scenario
def hook_that_writes_to_a_saved_tensor(run: Run) -> Any:
    x = leaf(run.size)
    h = x.exp()
    z = h.sin()
    z.register_hook(lambda gradient: h.detach().mul_(2).sum() * 0 + gradient)
    try:
        z.sum().backward()
    except RuntimeError as error:
        run.note("one of the variables needed for gradient computation has been modified" in str(error))
    w = leaf(run.size)
    (x * w).sum().backward()
    return grads(x, w)


@scenario
def leaf_is_updated_in_its_hook(run: Run) -> Any:
    x, w = leaf(run.size), leaf(run.size)

    def update(parameter: torch.Tensor) -> None:
        with torch.no_grad():
            parameter.sub_(parameter.grad)

    x.register_post_accumulate_grad_hook(update)
    w.register_post_accumulate_grad_hook(update)
    (x.sin() * w).sum().backward()
    return [*grads(x, w), x, w]


@scenario
def hook_with_the_wrong_shape(run: Run) -> Any:
    x = leaf(run.size)
    h = x.sin()

    def bad_hook(gradient: torch.Tensor) -> torch.Tensor:
        return gradient.sum()

    h.register_hook(bad_hook)
    try:
        h.sum().backward()
    except RuntimeError as error:
        run.note(str(error))
    return grads(x)


@scenario
def hook_with_the_wrong_type(run: Run) -> Any:
    x = leaf(run.size)
    for bad in (lambda gradient: gradient.double(), lambda gradient: "no", lambda gradient: (gradient,)):
        h = x.sin()
        h.register_hook(bad)
        try:
            h.sum().backward()
        except (RuntimeError, TypeError) as error:
            run.note(type(error).__name__, str(error))
    return grads(x)


@scenario
def node_hooks_with_wrong_results(run: Run) -> Any:
    x = leaf(run.size)
    for bad in (lambda gradients: gradients * 2, lambda gradients: gradients[0], lambda gradients: (None,)):
        h = x.sin()
        h.grad_fn.register_prehook(bad)
        try:
            h.sum().backward()
        except (RuntimeError, TypeError) as error:
            run.note(type(error).__name__, str(error))
    for bad_post in (lambda results, gradients: (), lambda results, gradients: results[0].sum()):
        h = x.sin()
        h.grad_fn.register_hook(bad_post)
        try:
            h.sum().backward()
        except (RuntimeError, TypeError) as error:
            run.note(type(error).__name__, str(error))
    return grads(x)


@scenario
def post_accumulate_hook_that_returns(run: Run) -> Any:
    x = leaf(run.size)
    x.register_post_accumulate_grad_hook(lambda leaf: leaf)
    x.sin().sum().backward()
    x.register_post_accumulate_grad_hook(lambda leaf: leaf.grad)
    try:
        x.sin().sum().backward()
    except RuntimeError as error:
        run.note(str(error))
    return grads(x)


@scenario
def hook_that_runs_a_backward(run: Run) -> Any:
    x, y = leaf(run.size), leaf(run.size)

    def inner(gradient: torch.Tensor) -> None:
        with torch.enable_grad():
            (y * gradient).sum().backward()

    h = x.sin()
    h.register_hook(inner)
    h.sum().backward()
    return grads(x, y)


@scenario
def queued_callback(run: Run) -> Any:
    x, y = leaf(run.size), leaf(run.size)
    engine = torch.autograd.Variable._execution_engine
    h = x.sin()
    h.register_hook(lambda gradient: engine.queue_callback(lambda: run.note("at the end", x.grad, y.grad)))
    (h * y).sum().backward()
    return grads(x, y)


@scenario
def hook_that_changes_grad(run: Run) -> Any:
    x = leaf(run.size)
    x.register_post_accumulate_grad_hook(lambda leaf: run.note(leaf.grad.zero_()))
    x.sin().sum().backward()
    return grads(x)


@scenario
def hook_that_reads_another_grad(run: Run) -> Any:
    x, y = leaf(run.size), leaf(run.size)
    x.register_hook(lambda gradient: gradient if y.grad is None else gradient + y.grad)
    (x.sin() * y).sum().backward()
    (x.sin() * y).sum().backward()
    return grads(x, y)


@scenario
def grad_mode_in_hooks(run: Run) -> Any:
    x = leaf(run.size)
    x.register_hook(lambda gradient: run.note(torch.is_grad_enabled(), gradient.requires_grad))
    x.sin().sum().backward()
    return grads(x)


@scenario
def multi_gradient_hook(run: Run) -> Any:
    x, y = leaf(run.size), leaf(run.size)
    a, b = x.sin(), y.cos()
    torch.autograd.graph.register_multi_grad_hook([a, b], lambda gradients: run.note(*gradients))
    (a * b).sum().backward()
    return grads(x, y)


@scenario
def hook_on_undefined_gradients(run: Run) -> Any:
    x = leaf(run.size, 4)
    values, indices = x.max(1)
    first, second = x.chunk(2, 1)
    second.register_hook(lambda gradient: run.note("second", gradient))
    first.grad_fn.register_prehook(lambda gradients: run.note(*(item is None for item in gradients)))
    (values.sum() + first.sum()).backward()
    return grads(x)


# --- views and in-place writes ----------------------------------------------------------------------------------------


@scenario
def write_to_a_view(run: Run) -> Any:
    x, y = leaf(run.size, 4), leaf(run.size)
    base = x * 1
    base[:, 1].mul_(y)
    base[0] = 3.0
    base.sin().sum().backward()
    return grads(x, y)


@scenario
def write_to_a_view_of_a_view(run: Run) -> Any:
    x, y = leaf(run.size, 4), leaf(run.size)
    base = x * 1
    base.t()[1:3][0].copy_(y)
    base.t()[2].exp_()
    (base * base).sum().backward()
    return grads(x, y)


@scenario
def write_to_a_plain_tensor(run: Run) -> Any:
    x = leaf(run.size)
    h = x * 2
    h.add_(1).sin_()
    h[0] *= 2
    h.sum().backward()
    return grads(x)


@scenario
def unbound_and_written(run: Run) -> Any:
    x = leaf(3, run.size)
    base = x.sin()
    parts = [part * 2 for part in base.unbind(0)]
    torch.stack(parts).prod(0).sum().backward()
    return grads(x)


@scenario
def masked_write(run: Run) -> Any:
    x = leaf(run.size, 3)
    h = x * 2
    h[h > 0] = 0.5
    h.masked_fill_(h < -1, 2.0)
    h.square().sum().backward()
    return grads(x)


@scenario
def hook_on_a_written_view(run: Run) -> Any:
    x, y = leaf(run.size, 4), leaf(run.size)
    base = x * 1
    view = base[:, 0]
    base.register_hook(lambda gradient: run.note("before", gradient))
    view.mul_(y)
    view.register_hook(lambda gradient: run.note("view", gradient))
    base.register_hook(lambda gradient: run.note("after", gradient))
    (base.sum() + view.sin().sum()).backward()
    return grads(x, y)


@scenario
def strided_views(run: Run) -> Any:
    x = leaf(run.size, 6)
    h = x * 2
    (h.as_strided((run.size, 2), (6, 3)).sum() + h.unfold(1, 2, 2).square().sum() + h.diagonal().sum()).backward()
    return grads(x)


# --- the session itself -----------------------------------------------------------------------------------------------


@scenario
def backward_in_a_thread(run: Run) -> Any:
    x, y = leaf(run.size), leaf(run.size)
    thread = threading.Thread(target=lambda: x.sin().sum().backward())
    thread.start()
    y.cos().sum().backward()
    thread.join()
    return grads(x, y)


@scenario
def sizes_that_change(run: Run) -> Any:
    w = leaf(3)
    for size in (run.size, run.size + 4, 1, run.size):
        x = torch.randn(size, 3)
        (x * w).exp().mean(0).sum().backward()
    return grads(w)


@scenario
def empty_batch(run: Run) -> Any:
    w = leaf(3)
    (torch.randn(0, 3) * w).sum().backward()
    return grads(w)
