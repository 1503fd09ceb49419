"""Programs on ``cuda:0``, each in eager and compiled.

``python -m tests.gpu.emulated.programs [BACKEND ...] [PROGRAM ...]`` runs them on the emulated device.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

if __name__ == "__main__":
    from tests.gpu.emulated import device, interpreted

    (interpreted if "inductor" in sys.argv else device).load()

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import dovetail
from dovetail.cli.gpt import GPT, GPTConfig

Compile = Callable[..., Any]
PROGRAMS: dict[str, Callable[[Compile], list[torch.Tensor]]] = {}


def program(run: Callable[[Compile], list[torch.Tensor]]) -> Callable[[Compile], list[torch.Tensor]]:
    PROGRAMS[run.__name__] = run
    return run


def convolutions() -> nn.Module:
    layers = [nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.Dropout(0.3)]
    return nn.Sequential(*layers, nn.Linear(144, 5)).cuda()


def state(model: nn.Module, *others: torch.Tensor) -> list[torch.Tensor]:
    return [*others, *model.state_dict().values(), *(p.grad for p in model.parameters() if p.grad is not None)]


@program
def model_compiled(compiled: Compile) -> list[torch.Tensor]:
    model, losses = convolutions(), []
    run = compiled(model)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for rows in (2, 2, 4):
        loss = F.cross_entropy(run(torch.randn(rows, 3, 8, 8, device="cuda")), torch.arange(rows, device="cuda"))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    return state(model, *losses)


def whole_step(**options: Any) -> Callable[[Compile], list[torch.Tensor]]:
    def run(compiled: Compile) -> list[torch.Tensor]:
        model = convolutions()
        optimizer = torch.optim.AdamW(model.parameters(), **options)

        @compiled
        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(x).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            return loss.detach()

        losses = [step(torch.randn(2, 3, 8, 8, device="cuda")) for _ in range(3)]
        moments = [value for state in optimizer.state.values() for value in state.values()]
        return state(model, *losses, *moments)

    return run


PROGRAMS["step_foreach"] = whole_step(foreach=True)
PROGRAMS["step_capturable"] = whole_step(capturable=True)
PROGRAMS["step_fused"] = whole_step(fused=True)


@program
def autocast_and_scaler(compiled: Compile) -> list[torch.Tensor]:
    model = GPT(GPTConfig(17, block=8, layers=2, heads=2, width=16)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cuda", init_scale=64.0, growth_interval=2)

    @compiled
    def loss_of(tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(tokens)
        return F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())

    losses = []
    for _ in range(3):
        loss = loss_of(torch.randint(0, 17, (2, 8), device="cuda"))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss)
    return state(model, *losses)


@program
def backward_inside_of_autocast(compiled: Compile) -> list[torch.Tensor]:
    """Where no derivative of it is asked for, dropout's backward rounds otherwise on a GPU."""
    model = nn.ModuleList([nn.Linear(8, 16), nn.Linear(16, 4)]).cuda()

    @compiled
    def run(x: torch.Tensor) -> torch.Tensor:
        hidden = F.dropout(model[0](x), 0.1)
        with torch.autocast("cuda", enabled=False):
            result: torch.Tensor = model[1](hidden.float())
        return result.square().sum()

    found = []
    for _ in range(2):
        x = torch.randn(6, 8, device="cuda", requires_grad=True)
        with torch.autocast("cuda", torch.bfloat16):
            for twice in (False, True, False):
                found += torch.autograd.grad(run(x), x, create_graph=twice)
            run(x).backward()
    return state(model, *found)


@program
def channels_last_norm(compiled: Compile) -> list[torch.Tensor]:
    """A norm keeps the layout of a dense input, and its backward does."""
    norm = nn.BatchNorm1d(6).cuda()
    run = compiled(lambda x: norm(x.transpose(1, 2)).transpose(1, 2).view(-1, 6))
    found = []
    for rows in (2, 3):
        x = torch.randn(rows, 5, 6, device="cuda", requires_grad=True)
        result = run(x)
        result.square().sum().backward()
        assert x.grad is not None
        found += [result, x.grad]
    return state(norm, *found)


@program
def second_order(compiled: Compile) -> list[torch.Tensor]:
    weight = torch.randn(4, 4, device="cuda", requires_grad=True)
    energy = compiled(lambda x: (x @ weight).tanh().pow(3).sum())
    found = []
    for rows in (2, 3, 3):
        x = torch.randn(rows, 4, device="cuda", requires_grad=True)
        (force,) = torch.autograd.grad(energy(x), x, create_graph=True)
        force.square().sum().backward()
        assert x.grad is not None and weight.grad is not None
        found += [force, x.grad, weight.grad.clone()]
    return found


@program
def checkpointed_dropout(compiled: Compile) -> list[torch.Tensor]:
    inner = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.GELU()).cuda()
    run = compiled(lambda x: checkpoint(inner, x, use_reentrant=False).sum())
    found = []
    for _ in range(3):
        x = torch.randn(4, 6, device="cuda", requires_grad=True)
        run(x).backward()
        assert x.grad is not None
        found += [x.grad, torch.rand(2, device="cuda"), torch.rand(2)]
    return state(inner, *found)


@program
def devices_within(compiled: Compile) -> list[torch.Tensor]:
    table = nn.Parameter(torch.arange(6.0))  # stays on the CPU
    found = []

    @compiled
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        there = torch.arange(3, device=x.device)
        moved = x.cpu() * table[:3] + torch.ones(3)
        return moved.to(x.device, non_blocking=True).sin() * there, moved.detach(), x[there.cpu()] * torch.tensor(2.0)

    for _ in range(2):
        x = torch.randn(3, device="cuda", requires_grad=True)
        one, two, three = function(x)
        (one.sum() + three.sum()).backward()
        assert x.grad is not None and table.grad is not None
        found += [one, two, three, x.grad, table.grad.clone()]
    return found


@program
def moved_between_calls(compiled: Compile) -> list[torch.Tensor]:
    model = nn.Linear(4, 4)
    run, found = compiled(model), []
    for device in ("cpu", "cuda", "cpu", "cuda"):
        model.to(device)
        result = run(torch.randn(2, 4, device=device))
        result.sum().backward()
        assert model.weight.grad is not None
        found += [result, model.weight.grad.clone()]
    return found


@program
def hooks_and_breaks(compiled: Compile) -> list[torch.Tensor]:
    weight, found = torch.randn(4, 4, device="cuda", requires_grad=True), []

    def function(x: torch.Tensor) -> torch.Tensor:
        hidden = (x @ weight).sin()
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: gradient * 2)
        return hidden * hidden.sum().item()

    run = compiled(function, fullgraph=False)
    for _ in range(2):
        run(torch.randn(2, 4, device="cuda")).sum().backward()
        assert weight.grad is not None
        found.append(weight.grad.clone())
    return found


@program
def generators(compiled: Compile) -> list[torch.Tensor]:
    weight = torch.randn(4, device="cuda", requires_grad=True)
    run = compiled(
        lambda x: (F.dropout(x * weight, 0.5), torch.rand_like(x), torch.randn(2, device="cuda"), torch.rand(2))
    )
    found = []
    for _ in range(3):
        results = run(torch.ones(4, device="cuda"))
        results[0].sum().backward()
        found += [*results, torch.rand(1, device="cuda"), torch.rand(1)]
    return found


class WritesWhatItKeeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.own = x.detach() * 2
        return ctx.own + x

    @staticmethod
    def backward(ctx: Any, tangent: torch.Tensor) -> torch.Tensor:
        return tangent * ctx.own.mul_(2)


@program
def a_backward_that_writes(compiled: Compile) -> list[torch.Tensor]:
    x = torch.arange(3.0, device="cuda", requires_grad=True)
    result = compiled(lambda x: WritesWhatItKeeps.apply(x), fullgraph=False)(x)
    return [torch.autograd.grad(result.sum(), x, retain_graph=True)[0] for _ in range(3)]


@program
def default_device(compiled: Compile) -> list[torch.Tensor]:
    found = []
    torch.set_default_device("cuda")
    try:
        weight = torch.randn(3, 3, requires_grad=True)
        run = compiled(lambda x: ((x @ weight).tanh() * (torch.arange(3) + torch.tensor(1.0))).sum())
        for rows in (2, 3):
            x = torch.randn(rows, 3, requires_grad=True)
            (slope,) = torch.autograd.grad(run(x), x, create_graph=True)
            slope.square().sum().backward()
            assert weight.grad is not None
            found += [slope, weight.grad.clone()]
    finally:
        torch.set_default_device(None)
    return found


def check(name: str, backend: str) -> str:
    """The first difference between eager and compiled; empty where there is none."""
    outcomes = []
    for wrapped in (lambda function, **options: function, _compile(backend)):
        torch.manual_seed(0)
        outcomes.append([value.detach().clone() for value in PROGRAMS[name](wrapped)])
    for index, (wanted, got) in enumerate(zip(*outcomes, strict=True)):
        # Kernels keep in float32 what eager rounds to bfloat16, which has 8 bits.
        near = 4e-3 if "autocast" in name else 1e-5
        same = torch.equal(wanted, got) if backend == "aten" else torch.allclose(wanted, got, 5e-3, near)
        if wanted.device != got.device or wanted.stride() != got.stride() or not same:
            return f"value {index}: {got} on {got.device} for {wanted} on {wanted.device}"
    return ""


def _compile(backend: str) -> Compile:
    def compiled(function: Any, fullgraph: bool = True) -> Any:
        return dovetail.compile(function, backend=backend, fullgraph=fullgraph, tiers="wait")

    return compiled


if __name__ == "__main__":
    kinds = [name for name in sys.argv[1:] if name not in PROGRAMS] or ["aten"]
    for title in [name for name in sys.argv[1:] if name in PROGRAMS] or PROGRAMS:
        for kind in kinds:
            try:
                difference = check(title, kind)
            except Exception as error:  # noqa: BLE001  (said, with its kind, and the next one runs)
                difference = f"{type(error).__name__}: {error}"
            print(f"{title} {kind}: {difference or 'as eager'}", flush=True)
    # The engine's thread of the device may ask for the GIL while the interpreter goes away; Python before 3.14 ends such a thread
    # amid C++ frames, and the process with "terminate called without an active exception".
    os._exit(0)
