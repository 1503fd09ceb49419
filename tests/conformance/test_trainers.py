"""Training loops of other people around a compiled model: PyTorch Lightning and Accelerate, bitwise eager's."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import dovetail
from dovetail.errors import EagerFallbackWarning


def _network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(4, 8),
        torch.nn.BatchNorm1d(8),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.2),
        torch.nn.Linear(8, 2),
    )


def _batches() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(20, 4, generator=generator)
    # The last batch is smaller than the others.
    return DataLoader(TensorDataset(inputs, torch.randint(0, 2, (20,), generator=generator)), batch_size=6)


def _compile(module: torch.nn.Module) -> torch.nn.Module:
    compiled: torch.nn.Module = dovetail.compile(module, backend="aten", fullgraph=True)
    return compiled


def _as_it_is(module: torch.nn.Module) -> torch.nn.Module:
    return module


Result = tuple[torch.Tensor, dict[str, torch.Tensor]]


def _same(left: Result, right: Result) -> None:
    assert torch.equal(left[0], right[0])
    assert list(left[1]) == list(right[1])
    for name, value in left[1].items():
        assert torch.equal(value, right[1][name]), name


@pytest.mark.filterwarnings("ignore")
def test_lightning(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning", reason="PyTorch Lightning is not installed")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Classifier(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self, network: torch.nn.Module) -> None:
            super().__init__()
            self.network = network
            self.losses: list[torch.Tensor] = []

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            inputs, labels = batch
            loss = torch.nn.functional.cross_entropy(self.network(inputs), labels)
            self.losses.append(loss.detach())
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            inputs, labels = batch
            self.log("validation", torch.nn.functional.cross_entropy(self.network(inputs), labels))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def fit(prepare: Callable[[torch.nn.Module], torch.nn.Module]) -> Result:
        module = Classifier(prepare(_network()))
        trainer = lightning.Trainer(
            max_epochs=2,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            gradient_clip_val=0.5,
            accumulate_grad_batches=2,
            default_root_dir=tmp_path,
        )
        torch.manual_seed(3)
        trainer.fit(module, _batches(), _batches())
        return torch.stack(module.losses), module.state_dict()

    _same(fit(_as_it_is), fit(_compile))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.filterwarnings(f"error::{EagerFallbackWarning.__module__}.{EagerFallbackWarning.__name__}")
@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("when", ["before prepare", "after prepare"])
def test_accelerate(precision: str, when: str) -> None:
    accelerate = pytest.importorskip("accelerate", reason="Accelerate is not installed")

    def fit(prepare: Callable[[torch.nn.Module], torch.nn.Module]) -> Result:
        accelerate.state.AcceleratorState._reset_state(True)
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision=precision)
        model = _network()
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if when == "before prepare":
            model = prepare(model)
        model, optimizer, batches = accelerator.prepare(model, optimizer, _batches())
        if when == "after prepare":
            model = prepare(model)
        torch.manual_seed(3)
        losses = []
        for _ in range(2):
            for inputs, labels in batches:
                with accelerator.accumulate(model):
                    loss = torch.nn.functional.cross_entropy(model(inputs), labels)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    optimizer.step()
                    optimizer.zero_grad()
                losses.append(loss.detach())
        return torch.stack(losses), accelerator.unwrap_model(model).state_dict()

    _same(fit(_as_it_is), fit(_compile))
