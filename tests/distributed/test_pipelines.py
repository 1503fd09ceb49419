"""Stages of a pipeline (``torch.distributed.pipelining``) with compiled modules in them, against one process on whole batches."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import dovetail
from tests.distributed.models import batches
from tests.distributed.test_fully_sharded import KINDS, same, whole
from tests.distributed.world import run

_compile = functools.partial(dovetail.compile, backend="aten", fullgraph=True)


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))  # type: ignore[no-any-return]


class ComputedAgain(Block):
    """One whose values the backward computes again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-any-return]


def layers() -> list[nn.Module]:
    """Those of the whole model."""
    torch.manual_seed(0)
    return [*(kind() for kind in (Block, ComputedAgain, Block, ComputedAgain)), nn.Linear(4, 2)]


def stage_of(rank: int, size: int, number: int, place: str) -> Any:
    """The part of the model with this number of the stages that there are."""
    from torch.distributed.pipelining import PipelineStage

    found = layers()
    start, end = len(found) * number // size, len(found) * (number + 1) // size
    part: nn.Module = nn.Sequential(*((_compile(item) if place == "blocks" else item) for item in found[start:end]))
    if place == "method":
        part.compile(backend="dovetail", options={"inner": "aten"})
    return PipelineStage(_compile(part) if place == "stage" else part, number, size, torch.device("cpu"))


def trained(rank: int, place: str, schedule: str) -> Any:
    """Losses of the last stage, names and parameters of this rank's stages after training."""
    from torch.distributed import pipelining

    several = schedule.startswith("Interleaved")
    ranks = torch.distributed.get_world_size()
    numbers = (rank, rank + ranks) if several else (rank,)
    stages = [stage_of(rank, ranks * len(numbers), number, place) for number in numbers]
    optimizer = torch.optim.SGD([item for stage in stages for item in stage.submod.parameters()], lr=0.1, momentum=0.9)
    kind = getattr(pipelining, f"Schedule{schedule}")
    plan = kind(stages if several else stages[0], n_microbatches=4, loss_fn=nn.functional.mse_loss)
    found: list[float] = []
    for x, y in batches(3):
        losses: list[torch.Tensor] = []
        # Each rank gives what its stages read of the batch.
        given = (x,) if rank == 0 else ()
        plan.step(*given, **({"target": y, "losses": losses} if rank == ranks - 1 else {}))
        found += [loss.item() for loss in losses]
        optimizer.step()
        optimizer.zero_grad()
    states = [stage.submod.state_dict() for stage in stages]
    return found, [list(state) for state in states], [whole(state.values()) for state in states]


def compared(rank: int, schedules: tuple[str, ...], places: tuple[str, ...]) -> Any:
    """What differs from eager stages, the losses and parameters of these, and all warnings."""
    wrong, numbers, texts = [], {}, []
    for schedule in schedules:
        wanted = numbers[schedule] = trained(rank, "eager", schedule)
        for place in places:
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                found = trained(rank, place, schedule)
            wrong += [] if same(found, wanted) else [(schedule, place)]
            texts += [str(item.message) for item in seen if issubclass(item.category, KINDS)]
    return wrong, numbers, texts


def alone() -> list[torch.Tensor]:
    """The parameters after training in one process."""
    model = nn.Sequential(*layers())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for x, y in batches(3):
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole(model.parameters())


def check(found: list[Any]) -> None:
    """Nothing differs from eager stages, these from one process by rounding only, and nothing is left to eager."""
    for wrong, _, texts in found:
        assert not wrong
        assert not texts
    for schedule, (losses, _, first) in found[0][1].items():
        _, _, second = found[1][1][schedule]
        pairs = zip(first, second, strict=True)
        values = [value for pair in pairs for stage in pair for value in stage]
        assert not losses and len(found[1][1][schedule][0]) == 12
        for value, wanted in zip(values, alone(), strict=True):
            torch.testing.assert_close(value, wanted, rtol=1e-5, atol=1e-6)


def test_a_compiled_stage() -> None:
    check(run(compared, 2, ("1F1B",), ("stage",)))


@pytest.mark.slow
def test_every_schedule_at_every_place() -> None:
    check(run(compared, 2, ("GPipe", "1F1B", "Interleaved1F1B"), ("stage", "blocks", "method"), seconds=300.0))


class _Joined(torch.autograd.Function):
    """Its arguments. Gradients of what is computed from them are added up here, as they are in the node of a compiled stage."""

    @staticmethod
    def forward(ctx: Any, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(item.view_as(item) for item in given)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return gradients


class Skipping(nn.Module):
    """A stage that uses a skip connection several times, and hands it on as it is."""

    def __init__(self, number: int, ends: bool, joins: bool) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.up, self.gate, self.ends, self.joins = nn.Linear(4, 4), nn.Linear(4, 4), ends, joins

    def forward(self, x: torch.Tensor, skip: torch.Tensor | None = None) -> Any:
        handed = self.up(x).sin() if skip is None else skip
        if skip is not None and self.joins:
            x, skip = _Joined.apply(x, skip)
        skip = handed if skip is None else skip
        found = torch.tanh(self.up(x)) + self.gate(skip) * x * torch.sin(skip) + skip * 1.3
        return found if self.ends else (found, handed)


def skipping(rank: int, schedule: str, place: str) -> list[torch.Tensor]:
    """Gradients of this rank's two stages of four."""
    from torch.distributed import pipelining

    stages = []
    for number in (rank, 3 - rank if schedule.startswith("ZBV") else rank + 2):
        module: Any = Skipping(number, number == 3, place == "joined")
        module = _compile(module) if place == "compiled" else module
        stages.append(pipelining.PipelineStage(module, number, 4, torch.device("cpu")))
    plan = getattr(pipelining, f"Schedule{schedule}")(stages, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    generator = torch.Generator().manual_seed(5)
    x, y = (torch.randn(8, 4, generator=generator) for _ in range(2))
    plan.step(*((x,) if rank == 0 else ()), **({"target": y} if any(stage.is_last for stage in stages) else {}))
    return whole(parameter.grad for stage in stages for parameter in stage.submod.parameters())


def all_skipping(rank: int) -> dict[str, tuple[bool, bool]]:
    """By schedule, whether compiled stages have the gradients of joined ones, and whether those of eager are close to them."""
    found = {}
    for schedule in ("Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"):
        compiled, joined, eager = (skipping(rank, schedule, place) for place in ("compiled", "joined", "eager"))
        pairs = zip(compiled, eager, strict=True)
        found[schedule] = same(compiled, joined), all(torch.allclose(*pair, rtol=1e-6, atol=1e-6) for pair in pairs)
    return found


@pytest.mark.slow
def test_a_skip_connection_differs_from_eager_by_the_order_of_its_gradients_sum_alone() -> None:
    for found in run(all_skipping, 2, seconds=300.0):
        assert len(found) == 3 and all(pair == (True, True) for pair in found.values()), found
