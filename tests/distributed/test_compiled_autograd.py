"""Backwards of models in DistributedDataParallel, captured: the gradients, and when they are exchanged, are eager's."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import dovetail
from dovetail.backward_capture import BackwardSession, open_session
from tests.distributed.models import batches
from tests.distributed.world import run


class Model(nn.Module):
    """Layers with a hook inside, a shared weight, and one that is left out at times."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.extra = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.last = nn.Linear(6, 2)
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor, extra: bool = True) -> torch.Tensor:
        x = self.first(x).tanh()
        x = checkpoint(self._middle, x, use_reentrant=False) if self.checkpointed else self._middle(x)
        return self.last(self.extra(x) if extra else x)

    def _middle(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.second(x).sin())


def _plain(model: Any, x: torch.Tensor, y: torch.Tensor, note: Callable[..., None]) -> None:
    nn.functional.mse_loss(model(x), y).backward()


def _two_micro_batches(model: Any, x: torch.Tensor, y: torch.Tensor, note: Callable[..., None]) -> None:
    with model.no_sync():
        nn.functional.mse_loss(model(x[:2]), y[:2]).backward()
    note(*(parameter.grad.clone() for parameter in model.parameters()))
    nn.functional.mse_loss(model(x[2:]), y[2:]).backward()


def _some_unused(model: Any, x: torch.Tensor, y: torch.Tensor, note: Callable[..., None]) -> None:
    nn.functional.mse_loss(model(x, extra=False), y).backward()


def _hooks(model: Any, x: torch.Tensor, y: torch.Tensor, note: Callable[..., None]) -> None:
    out = model(x)
    out.register_hook(lambda gradient: gradient * 2)
    weight = model.module.second.weight
    handles = [
        weight.register_hook(lambda gradient: note("arrives", gradient.clone())),
        weight.register_post_accumulate_grad_hook(lambda parameter: note("added", parameter.grad.clone())),
    ]
    nn.functional.mse_loss(out, y).backward()
    for handle in handles:
        handle.remove()


def _kept_graph(model: Any, x: torch.Tensor, y: torch.Tensor, note: Callable[..., None]) -> None:
    loss = nn.functional.mse_loss(model(x), y)
    note(*torch.autograd.grad(loss, list(model.module.last.parameters()), retain_graph=True))
    loss.backward()


def _with_penalty(model: Any, x: torch.Tensor, y: torch.Tensor, note: Callable[..., None]) -> None:
    x = x.clone().requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), [x], create_graph=True)
    (nn.functional.mse_loss(out, y) + slope.square().sum()).backward()


def _clipped(model: Any, x: torch.Tensor, y: torch.Tensor, note: Callable[..., None]) -> None:
    nn.functional.mse_loss(model(x), y).backward()
    note(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))


PROGRAMS: dict[str, tuple[Callable[..., None], dict[str, Any], bool]] = {
    "plain": (_plain, {}, False),
    "small buckets": (_plain, {"bucket_cap_mb": 1e-4}, False),
    "gradients are views of buckets": (_two_micro_batches, {"gradient_as_bucket_view": True}, False),
    "two micro-batches": (_two_micro_batches, {}, False),
    "unused parameters": (_some_unused, {"find_unused_parameters": True}, False),
    "static graph": (_some_unused, {"static_graph": True}, False),
    "hooks": (_hooks, {}, False),
    "kept graph": (_kept_graph, {}, False),
    "a gradient penalty": (_with_penalty, {}, False),
    "a checkpoint": (_plain, {}, True),
    "a compressing hook": (_clipped, {}, False),
}


def train(rank: int, name: str, session: BackwardSession | None) -> list[Any]:
    """What the gradients and weights are on the way."""
    program, options, checkpointed = PROGRAMS[name]
    torch.manual_seed(1)
    model = DistributedDataParallel(Model(checkpointed), **options)
    if name == "a compressing hook":
        model.register_comm_hook(None, fp16_compress_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[Any] = []
    for index, (x, y) in enumerate(batches(4, rank, 2)):
        optimizer.zero_grad()
        if session is None or index == 3:
            program(model, x, y, lambda *items: found.extend(items))  # the hooks work outside of a session too
        else:
            with open_session(session):
                program(model, x, y, lambda *items: found.extend(items))
        found += [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        optimizer.step()
    return found + [parameter.detach().clone() for parameter in model.parameters()]


def every_program(rank: int) -> dict[str, str]:
    """What is wrong with each program, on one rank."""
    wrong = {}
    for name in PROGRAMS:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = train(rank, name, None)
            session = BackwardSession(lambda function: dovetail.compile(function, backend="aten"))
            found = train(rank, name, session)
        if len(expected) != len(found):
            wrong[name] = f"{len(found)} notes, not {len(expected)}"
        for left, right in zip(expected, found, strict=False):
            same = torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right
            if not same:
                wrong.setdefault(name, f"{right} is not {left}")
        if session.fallbacks or not session.runs:
            wrong.setdefault(name, f"{session.runs} runs, left to eager: {session.fallbacks}")
    return wrong


@pytest.mark.slow
def test_wrapped_models_are_captured() -> None:
    assert run(every_program, 2) == [{}, {}]
