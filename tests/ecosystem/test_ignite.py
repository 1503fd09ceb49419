"""PyTorch-Ignite: its engine around a compiled model, and around a compiled step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ecosystem.training import Wrap, compare

engines = pytest.importorskip("ignite.engine", reason="PyTorch-Ignite is not installed")
pytestmark = pytest.mark.usefixtures("quiet")


def batches(count: int = 3) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(4, 3, generator=generator), torch.randn(4, 1, generator=generator)) for _ in range(count)]


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.2), torch.nn.ReLU(), torch.nn.Linear(8, 1))


def test_a_supervised_trainer_with_a_compiled_model() -> None:
    def run(wrap: Wrap) -> tuple[Any, Any]:
        net = model()
        call, seen = wrap(net), []
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
        trainer = engines.create_supervised_trainer(call, optimizer, torch.nn.functional.mse_loss)
        trainer.add_event_handler(engines.Events.ITERATION_COMPLETED, lambda engine: seen.append(engine.state.output))
        trainer.run(batches(), max_epochs=2)
        return [seen, dict(net.state_dict())], call

    compare(run, captures=1)


def test_a_compiled_step_in_an_engine() -> None:
    def run(wrap: Wrap) -> tuple[Any, Any]:
        net = model()
        optimizer = torch.optim.AdamW(net.parameters(), 0.01)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(net(x), y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        call, seen = wrap(step), []
        trainer = engines.Engine(lambda engine, batch: call(*batch))
        trainer.add_event_handler(engines.Events.ITERATION_COMPLETED, lambda engine: seen.append(engine.state.output))
        trainer.run(batches(), max_epochs=2)
        return [seen, dict(net.state_dict())], call

    compare(run)
