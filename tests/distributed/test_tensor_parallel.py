"""Modules that ``parallelize_module`` has spread over the ranks, compiled in parts and as a whole; a mesh of two dimensions."""

from __future__ import annotations

import contextlib
import functools
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import dovetail
from tests.distributed.test_fully_sharded import KINDS, same, whole
from tests.distributed.world import run

_compile = functools.partial(dovetail.compile, backend="aten", fullgraph=True)


class Attention(nn.Module):
    """Heads of two numbers each, of which a rank may have some only."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, 2)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        found = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(found.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Block(nn.Module):
    """One of a transformer's."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(2))
        self.attention = Attention()
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))  # type: ignore[no-any-return]


class Model(nn.Module):
    """A small GPT."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm, self.head = nn.Embedding(10, 8), nn.LayerNorm(8), nn.Linear(8, 10, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def spread(model: Any, mesh: Any, plan: str) -> None:
    """Spread a model as a plan says: the layers, also the sequence, also the loss, also with blocks that are computed again."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    between = Replicate() if plan == "layers" else Shard(1)
    gathers = PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),))
    heads, gathered = "attention.", ("q", "k", "v")
    plans: dict[str, Any] = {
        **{heads + name: ColwiseParallel() for name in gathered},
        **{name: RowwiseParallel(output_layouts=between) for name in ("attention.out", "mlp.2")},
        "mlp.0": ColwiseParallel(),
    }
    if plan != "layers":
        plans.update(
            {"attention": gathers, "mlp": gathers, "norms.0": SequenceParallel(), "norms.1": SequenceParallel()}
        )
    for block in model.blocks:
        parallelize_module(block, mesh, plans)
    if plan != "layers":
        results = (
            {"output_layouts": Shard(-1), "use_local_output": False}
            if plan == "loss"
            else {"output_layouts": Replicate()}
        )
        around = {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=between, **results),
        }
        parallelize_module(model, mesh, around)
    if plan == "recomputed":
        model.blocks = nn.ModuleList(map(checkpoint_wrapper, model.blocks))


def compiled_at(place: str, model: Any) -> Any:
    """What is called, with a part of the model compiled."""
    if place == "blocks":
        model.blocks = nn.ModuleList(_compile(block) for block in model.blocks)
    if place == "one block":
        model.blocks[0] = _compile(model.blocks[0])
    if place == "parts":
        for block in model.blocks:
            block.attention, block.mlp[1], block.norms[1] = map(
                _compile, (block.attention, block.mlp[1], block.norms[1])
            )
    return _compile(model, fullgraph=False) if place == "whole" else model


def batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(10, (4, 7), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def trained(place: str, plan: str = "", replicas: int = 1, clips: bool = False) -> Any:
    """Losses, names and parameters after training; with replicas a mesh of two dimensions, each with a part of the batch."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import loss_parallel

    model, forward, part = Model(), None, 0
    if plan:
        size = torch.distributed.get_world_size() // replicas
        mesh = torch.distributed.init_device_mesh("cpu", (replicas, size), mesh_dim_names=("data", "model"))
        part = mesh["data"].get_local_rank()
        spread(model, mesh["model"], plan)
        forward = compiled_at(place, model)
        if replicas > 1:
            for layer in (*model.blocks, model):
                fully_shard(layer, mesh=mesh["data"])
    forward = forward or model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)

    def step(tokens: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        with loss_parallel() if plan == "loss" else contextlib.nullcontext():
            loss = nn.functional.cross_entropy(forward(tokens).flatten(0, 1), wanted.flatten())
            loss.backward()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=False)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    chosen = _compile(step) if place == "step" else step
    generator = torch.Generator().manual_seed(3)
    batches = [batch(generator) for _ in range(3)]
    losses = whole(chosen(*(value.chunk(replicas)[part] for value in values)) for values in batches)
    return losses, list(model.state_dict()), whole(model.state_dict().values())


def compared(rank: int, plans: tuple[str, ...], places: tuple[str, ...], replicas: int = 1) -> Any:
    """What differs from eager training, eager's parameters by plan, and the warnings by place."""
    wrong, parameters, texts = [], {}, {}
    for plan in plans:
        clips = plan != "layers"  # eager clips no gradients of which some are DTensor only
        wanted = trained("eager", plan, replicas, clips)
        parameters[plan] = wanted[2]
        for place in places:
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                found = trained(place, plan, replicas, clips)
            wrong += [] if same(found, wanted) else [(plan, place)]
            texts[plan, place] = [str(item.message) for item in seen if issubclass(item.category, KINDS)]
    return wrong, parameters, texts


def check(found: list[Any]) -> None:
    """Nothing differs from eager on the same ranks, and rounding only from one process that trains on whole batches."""
    for wrong, parameters, _ in found:
        assert not wrong
        for plan, values in parameters.items():
            for value, alone in zip(values, trained("eager", clips=plan != "layers")[2], strict=True):
                torch.testing.assert_close(value, alone, rtol=1e-4, atol=1e-6)


def exchanges(rank: int) -> list[str]:
    """The exchanges in the graph of a compiled block."""
    model = Model()
    spread(model, torch.distributed.init_device_mesh("cpu", (2,)), "sequence")
    block = _compile(model.blocks[0])
    block(torch.ones(2, 3, 8)).sum().backward()
    (entry,) = block.compiled_call.entries
    names = [str(node.target).split(".")[1] for node in entry.compiled.joint.graph.nodes if "c10d" in str(node.target)]
    return sorted(set(names))


def together(rank: int) -> Any:
    """In one world, as each process takes seconds to load what it needs."""
    return compared(rank, ("sequence",), ("blocks",)), exchanges(rank)


def test_blocks_whose_layers_and_sequence_are_spread() -> None:
    found = run(together, 2, seconds=120.0)
    check([item for item, _ in found])
    for (_, _, texts), names in found:
        assert not any(texts.values())
        assert names == ["all_gather_into_tensor", "reduce_scatter_tensor", "wait_tensor"]


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["layers", "sequence", "loss"])
def test_every_place(plan: str) -> None:
    found = run(compared, 2, (plan,), ("blocks", "one block", "parts", "whole", "step"), seconds=400.0)
    check(found)
    for _, _, texts in found:
        for (plan, place), said in texts.items():
            if place in ("blocks", "one block", "parts", "step") or (plan, place) == ("layers", "whole"):
                assert not said
            elif place == "whole":
                assert len(said) == 1 and "rows of an embedding's table are spread" in said[0]


@pytest.mark.slow
def test_a_mesh_of_two_dimensions() -> None:
    found = run(compared, 4, ("layers", "sequence"), ("blocks", "parts", "step"), 2, seconds=400.0)
    check(found)
    assert not any(any(texts.values()) for _, _, texts in found)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "replicas"), [(2, 1), (4, 2)])
def test_blocks_that_are_computed_again(ranks: int, replicas: int) -> None:
    found = run(compared, ranks, ("recomputed",), ("blocks", "step"), replicas, seconds=400.0)
    check(found)
    assert not any(any(texts.values()) for _, _, texts in found)


class Parts(nn.Module):
    """Plain modules around two layers that are spread over the ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.up, self.down = nn.Sequential(nn.Linear(8, 8), nn.GELU()), nn.Linear(8, 16), nn.Linear(16, 8)
        self.last = nn.Sequential(nn.LayerNorm(8), nn.GELU())


def pending(rank: int, backend: str) -> Any:
    """Gradients with compiled modules around spread ones, and the kinds of tensors that they were given."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    kinds, worst = set(), 0.0
    for layout in (Replicate(), Shard(1)):
        results = []
        for compiles in (False, True):
            model, found = Parts(), []
            plan = {"up": ColwiseParallel(input_layouts=layout), "down": RowwiseParallel(output_layouts=layout)}
            parallelize_module(model, mesh, plan)
            first, last = model.first, model.last
            if compiles:
                first, last = (_compile(part, backend=backend) for part in (first, last))
            for seed in range(2):
                x = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(seed), requires_grad=True)
                hidden = first(x)
                hidden.register_hook(lambda gradient: kinds.add(("gradient", type(gradient).__name__)))
                given = model.down(model.up(hidden))
                kinds.add(("argument", type(given).__name__))
                last(given).square().sum().backward()
                found.append(x.grad)
            results.append([*found, *whole(parameter.grad for parameter in model.parameters())])
        worst = max(worst, *(float((left - right).norm() / left.norm()) for left, right in zip(*results, strict=True)))
    return worst, kinds


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aten", "inductor"])
def test_arguments_and_gradients_that_an_exchange_has_yet_to_bring(backend: str) -> None:
    for worst, kinds in run(pending, 2, backend, seconds=200.0):
        assert worst <= (0.0 if backend == "aten" else 1e-5)
        assert {("argument", "AsyncCollectiveTensor"), ("gradient", "AsyncCollectiveTensor")} <= kinds
