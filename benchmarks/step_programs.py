"""The training steps that ``benchmarks/step.py`` measures, and the ways to run each of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from measuring import load_example
from torch import Tensor, nn
from torch.nn import functional

import dovetail
from dovetail.cli.gpt import GPT, GPTConfig

Loss = Callable[..., Tensor]
Step = Callable[[int], float]


@dataclass
class Program:
    """A model, a loss and batches; ``loss(*batches[number])`` is differentiated and the optimizer's step follows."""

    model: nn.Module
    loss: Loss
    batches: list[tuple[Tensor, ...]]
    learning_rate: float = 1e-3


class Residual(nn.Module):
    """Two convolutions with batch norms beside a path that changes the size where that is asked for."""

    def __init__(self, inward: int, outward: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inward, outward, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(outward)
        self.second = nn.Conv2d(outward, outward, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(outward)
        self.beside: nn.Module = nn.Identity()
        if stride != 1 or inward != outward:
            self.beside = nn.Sequential(nn.Conv2d(inward, outward, 1, stride, bias=False), nn.BatchNorm2d(outward))

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block."""
        inner = self.second_norm(self.second(functional.relu(self.first_norm(self.first(x)))))
        return functional.relu(inner + self.beside(x))


def gpt() -> Program:
    """A decoder-only transformer on random tokens."""
    model = GPT(GPTConfig(vocabulary=65, block=64, layers=3, heads=6, width=192))
    batches = [tuple(torch.randint(65, (8, 64)) for _ in range(2)) for _ in range(4)]
    return Program(model, model, batches)


def resnet() -> Program:
    """Six residual blocks on images of 32 x 32."""
    widths = [(16, 16, 1), (16, 16, 1), (16, 32, 2), (32, 32, 1), (32, 64, 2), (64, 64, 1)]
    stem = nn.Sequential(nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    model = nn.Sequential(stem, *[Residual(*each) for each in widths], head)
    batches: list[tuple[Tensor, ...]] = [(torch.randn(16, 3, 32, 32), torch.randint(10, (16,))) for _ in range(4)]
    return Program(model, lambda x, y: functional.cross_entropy(model(x), y), batches)


def bert() -> Program:
    """Hugging Face's BERT with four small layers, which learns to fill in tokens."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=500,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=512,
        max_position_embeddings=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = BertForMaskedLM(config)
    batches = [tuple(torch.randint(500, (8, 48)) for _ in range(2)) for _ in range(4)]

    def loss(tokens: Tensor, labels: Tensor) -> Tensor:
        result: Tensor = model(input_ids=tokens, labels=labels).loss
        return result

    return Program(model, loss, batches)


def mlp() -> Program:
    """Forty narrow layers: the time goes to what is between the kernels."""
    layers = [layer for _ in range(40) for layer in (nn.Linear(32, 32), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Linear(32, 4))
    batches: list[tuple[Tensor, ...]] = [(torch.randn(32, 32), torch.randn(32, 4)) for _ in range(4)]
    return Program(model, lambda x, y: functional.mse_loss(model(x), y), batches)


def forces() -> Program:
    """Message passing between atoms; the loss holds forces, which are gradients, so that it is of the second order."""
    example = load_example("energy_and_forces")
    model = example.MessagePassing().double()
    # Structures of one size, so that all engines run what they compiled for it.
    batches = [example.structures(1, 10, model.cutoff)[0]] * 4

    def loss(elements: Tensor, positions: Tensor, edges: Tensor, energy: Tensor, wanted: Tensor) -> Tensor:
        positions = positions.clone().requires_grad_()
        predicted = model(elements, positions, edges)
        (gradient,) = torch.autograd.grad(predicted, positions, create_graph=True)
        result: Tensor = (predicted - energy).pow(2) / 10 + (-gradient - wanted).pow(2).mean()
        return result

    return Program(model, loss, batches)


PROGRAMS: dict[str, Callable[[], Program]] = {"gpt": gpt, "resnet": resnet, "bert": bert, "mlp": mlp, "forces": forces}


def in_bfloat16(program: Program) -> Program:
    """The program with its loss computed under autocast."""
    loss = program.loss

    def cast(*batch: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return loss(*batch)

    return replace(program, loss=cast)


def make_step(program: Program, optimizer: torch.optim.Optimizer, loss: Loss, update: Callable[[], Any]) -> Step:
    """A step in Python around whatever was compiled."""

    def step(number: int) -> float:
        optimizer.zero_grad()
        value = loss(*program.batches[number % len(program.batches)])
        value.backward()
        update()
        return value.item()

    return step


def whole_step(program: Program, optimizer: torch.optim.Optimizer, compiler: Callable[[Any], Any]) -> Step:
    """A step that is compiled as one function."""
    loss = program.loss

    @compiler
    def step(*batch: Tensor) -> Tensor:
        optimizer.zero_grad()
        value = loss(*batch)
        value.backward()
        optimizer.step()
        return value.detach()

    def run(number: int) -> float:
        result: float = step(*program.batches[number % len(program.batches)]).item()
        return result

    return run


def _adam(program: Program, **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(program.model.parameters(), lr=program.learning_rate, **settings)


def eager(program: Program) -> Step:
    """Eager, with the optimizer that torch picks by itself."""
    optimizer = _adam(program)
    return make_step(program, optimizer, program.loss, optimizer.step)


def eager_foreach(program: Program) -> Step:
    """Eager, with the optimizer that takes lists of tensors."""
    optimizer = _adam(program, foreach=True)
    return make_step(program, optimizer, program.loss, optimizer.step)


def eager_fused(program: Program) -> Step:
    """Eager, with the optimizer in one kernel."""
    optimizer = _adam(program, fused=True)
    return make_step(program, optimizer, program.loss, optimizer.step)


def torch_model(program: Program) -> Step:
    """torch.compile of the loss, and the optimizer in one kernel."""
    optimizer = _adam(program, fused=True)
    return make_step(program, optimizer, torch.compile(program.loss), optimizer.step)


def torch_parts(program: Program) -> Step:
    """torch.compile of the loss and of the optimizer's step."""
    optimizer = _adam(program)
    return make_step(program, optimizer, torch.compile(program.loss), torch.compile(optimizer.step))


def torch_whole(program: Program) -> Step:
    """torch.compile of the whole step, which it breaks up as it likes."""
    return whole_step(program, _adam(program, fused=True), torch.compile)


def dovetail_model(program: Program) -> Step:
    """Dovetail's compile of the loss, and the optimizer in one kernel."""
    optimizer = _adam(program, fused=True)
    return make_step(program, optimizer, dovetail.compile(program.loss, backend="inductor"), optimizer.step)


def dovetail_parts(program: Program) -> Step:
    """Dovetail's compile of the loss and of the optimizer's step."""
    optimizer = _adam(program)
    update = dovetail.compile(optimizer.step, backend="inductor")
    return make_step(program, optimizer, dovetail.compile(program.loss, backend="inductor"), update)


def dovetail_whole(program: Program) -> Step:
    """Dovetail's whole step in one graph."""
    return whole_step(program, _adam(program), dovetail.compile(backend="inductor", fullgraph=True))


def dovetail_fused(program: Program) -> Step:
    """Dovetail's whole step in one graph, where the optimizer asks for one kernel."""
    return whole_step(program, _adam(program, fused=True), dovetail.compile(backend="inductor", fullgraph=True))


VARIANTS: dict[str, Callable[[Program], Step]] = {
    "eager": eager,
    "eager, foreach": eager_foreach,
    "eager, fused": eager_fused,
    "torch.compile, model": torch_model,
    "torch.compile, parts": torch_parts,
    "torch.compile, whole": torch_whole,
    "Dovetail, model": dovetail_model,
    "Dovetail, parts": dovetail_parts,
    "Dovetail, whole": dovetail_whole,
    "Dovetail, whole, fused": dovetail_fused,
}
