"""``self.log`` of a LightningModule: called after the graph at every step, with the values at the time of the program's call."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dovetail
from tests.differential import same

pytestmark = [
    pytest.mark.usefixtures("quiet"),
    pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="PyTorch Lightning is not installed"),
]

Step = Callable[[Any, Any, int], Any]


def plain(self: Any, batch: Any, index: int) -> Tensor:
    out = self.net(batch[0])
    loss = out.square().mean()
    self.log("loss", loss, prog_bar=True)
    self.log_dict({"mean": out.mean(), "rate": 0.5}, on_step=True, on_epoch=True)
    return loss


def written_later(self: Any, batch: Any, index: int) -> Tensor:
    total = batch[0].sum()
    self.log("total", total)
    total += 1
    with torch.no_grad():
        self.log("above", total)
        self.net.bias.mul_(0.5)
        self.log("bias", self.net.bias.sum(), batch_size=len(batch[0]))
    return self.net(batch[0]).square().mean() * total


def counted(self: Any, batch: Any, index: int) -> Tensor:
    self.log("index", float(index), reduce_fx="max")
    self.log("rows", batch[0].shape[0])
    return self.net(batch[0]).square().sum()


def reduced_by_a_function(self: Any, batch: Any, index: int) -> Tensor:
    loss = self.net(batch[0]).square().sum()
    self.log("largest", loss, reduce_fx=torch.max)
    return loss


def by_a_method_of_its_own(self: Any, batch: Any, index: int) -> Tensor:
    loss = self.net(batch[0]).square().sum()
    self.logged(loss)
    return loss


class Methods:
    """Those of all modules here. The library is large: it is loaded when the first module is made."""

    log: Any
    parameters: Any

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(4, 1)

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("score", self.net(batch[0]).sum())

    def logged(self, value: Tensor) -> None:
        for name in ("one", "two"):
            self.log(name, value)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def make(step: Step) -> Any:
    module = importlib.import_module("lightning").LightningModule
    return type("Own", (Methods, module), {"training_step": step})()


def fit(model: Any) -> dict[str, Tensor]:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    data = torch.utils.data.TensorDataset(torch.arange(64.0).view(16, 4) / 64)
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = importlib.import_module("lightning").Trainer(
        max_epochs=2, accelerator="cpu", devices=1, **dict.fromkeys(quiet, False)
    )
    trainer.fit(model, loader, loader)
    return dict(trainer.callback_metrics)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("step", "captures"),
    [(plain, 1), (written_later, 1), (counted, None), (reduced_by_a_function, None), (by_a_method_of_its_own, 1)],
)
def test_a_trainer_sees_eagers_numbers(step: Step, captures: int | None) -> None:
    expected, actual = make(step), make(step)
    before = fit(expected)
    after = fit(dovetail.compile(actual, backend="aten"))
    same(before, after)
    assert list(before) == list(after)
    same(dict(expected.state_dict()), dict(actual.state_dict()))
    if captures is not None:
        log = dovetail.events_of(actual.training_step)
        assert (log.count("capture"), log.count("graph break")) == (captures, 0)


def test_a_tensor_that_keeps_its_history_breaks_the_graph() -> None:
    model = make(lambda self, batch, index: self.log("loss", self.net(batch[0]).sum(), enable_graph=True))
    with pytest.raises(dovetail.errors.GraphBreakError, match="enable_graph"):
        dovetail.compile(model.training_step, backend="aten", fullgraph=True)((torch.ones(1, 4),), 0)


def test_without_a_trainer_it_says_so_at_each_call() -> None:
    model = make(plain)
    compiled = dovetail.compile(model.training_step, backend="aten", fullgraph=True)
    for _ in range(3):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            compiled((torch.ones(1, 4),), 0)
        assert [
            item
            for item in caught
            if "no `Trainer` reference" in str(item.message) or "self.trainer" in str(item.message)
        ]
