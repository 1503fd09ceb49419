"""A LightningModule: the trainer calls its steps, so these are compiled along with it."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dovetail
from dovetail.face.compiled_function import CompiledFunction
from tests.differential import same


class LightningModule(nn.Module):
    """What counts is the name of the class."""

    def validation_step(self, batch: Tensor, index: int) -> None:
        """A trainer's own, which does nothing."""


LightningModule.validation_step.__module__ = "lightning.pytorch.core.module"


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(4, 1)
        self.seen = 0

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        self.seen += 1
        return self(batch).square().mean()

    def forward(self, batch: Tensor) -> Tensor:
        return self.net(batch).sin()


def test_the_steps_are_compiled() -> None:
    expected, actual = Model(), Model()
    compiled = dovetail.compile(actual, backend="aten", fullgraph=True)
    assert isinstance(actual.training_step, CompiledFunction)
    assert not isinstance(actual.validation_step, CompiledFunction)
    for index in range(4):
        batch = torch.full((3, 4), float(index))
        loss = compiled.training_step(batch, index)
        loss.backward()
        other = expected.training_step(batch, index)
        other.backward()
        same(other, loss)
    same(expected.net.weight.grad, actual.net.weight.grad)
    assert expected.seen == actual.seen == 4
    assert dovetail.events_of(actual.training_step).count("compile forward") >= 1
    assert list(compiled.state_dict()) == list(expected.state_dict())


@pytest.mark.parametrize("way", ("copy", "save"))
def test_copies_have_steps_of_their_own(way: str) -> None:
    model = Model()
    dovetail.compile(model, backend="aten")
    twin: Any
    if way == "copy":
        twin = copy.deepcopy(model)
    else:
        stream = io.BytesIO()
        torch.save(model, stream)
        stream.seek(0)
        twin = torch.load(stream, weights_only=False)
    with torch.no_grad():
        twin.net.weight.zero_()
        twin.net.bias.zero_()
    assert twin.training_step(torch.ones(1, 4), 0).item() == 0 != model.training_step(torch.ones(1, 4), 0).item()
    assert (twin.seen, model.seen) == (1, 1)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ("aten", "inductor"))
def test_with_the_real_trainer(backend: str) -> None:
    lightning = pytest.importorskip("lightning")

    class Real(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

        def training_step(self, batch: Any, index: int) -> Tensor:
            loss = self.net(batch[0]).square().mean()
            self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
            self.log_dict({"twice": loss * 2, "three": 3.0})
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("validation", self.net(batch[0]).mean())

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    def fit(module: Any) -> Any:
        data = torch.utils.data.TensorDataset(torch.arange(64.0).view(16, 4) / 64)
        batches = torch.utils.data.DataLoader(data, batch_size=4)
        quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
        trainer = lightning.Trainer(max_epochs=2, accelerator="cpu", devices=1, **dict.fromkeys(quiet, False))
        trainer.fit(module, batches, batches)
        return trainer

    expected, actual = Real(), Real()
    metrics = [
        fit(module).callback_metrics
        for module in (expected, dovetail.compile(actual, backend=backend, fullgraph=True, tiers="wait"))
    ]
    assert list(metrics[0]) == list(metrics[1]) and len(metrics[0]) == 6
    if backend == "aten":
        same((metrics[0], list(expected.parameters())), (metrics[1], list(actual.parameters())))
    torch.testing.assert_close(metrics[0], metrics[1])
    torch.testing.assert_close(list(expected.parameters()), list(actual.parameters()))
    # All of it, the metrics that are logged included, is one graph.
    events = dovetail.events_of(actual.training_step)
    assert (events.count("compile forward"), events.count("compile backward"), events.count("graph break")) == (1, 1, 0)
