"""Training loops that other libraries own, around a compiled model: the same losses and weights as eager, bit for bit."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dovetail
from dovetail.reports.explanation import compiled_function
from tests.differential import same

WIDTH = 6
STEPS = 5
LAST = 3
ALL_STEPS = 2 * (STEPS + 1)


class Network(nn.Module):
    """Buffers that change, dropout, a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.25)
        self.second = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.drop(torch.relu(self.norm(self.first(x)))))


def batches() -> torch.utils.data.DataLoader:
    """Two epochs fill the steps: batches of four rows, and a smaller one at the end of each epoch."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(4 * STEPS + LAST, WIDTH, generator=generator)
    y = torch.randn(4 * STEPS + LAST, 1, generator=generator)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=4)


@pytest.fixture(autouse=True)
def _no_eager_fall_back() -> Iterator[None]:
    """A model that runs eagerly would be equal to eager without proving anything."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", dovetail.errors.EagerFallbackWarning)
        yield


def compile_whole(function: Any) -> Any:
    return dovetail.compile(function, backend="aten", fullgraph=True)


def assert_graphs(compiled: Any, count: int = 1) -> None:
    entries = compiled_function(compiled).entries
    assert len(entries) == count and all(entry.run is not None for entry in entries)


def assert_same_weights(left: nn.Module, right: nn.Module) -> None:
    same(dict(left.state_dict()), dict(right.state_dict()), "state_dict")


# Lightning


def make_lightning_module(lightning: Any, inner: nn.Module) -> Any:
    class Lit(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner
            self.losses: list[torch.Tensor] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            x, y = batch
            return nn.functional.mse_loss(self(x), y)

        def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
            self.losses.append(outputs["loss"].clone())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    return Lit()


def fit(lightning: Any, module: Any, path: Path) -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(0)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_steps=ALL_STEPS,
        gradient_clip_val=0.5,
        default_root_dir=path,
    )
    trainer.fit(module, batches())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("what", ["inner", "whole", "step"])
def test_lightning(what: str, tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning", reason="PyTorch Lightning is not installed")
    network = Network()
    expected = make_lightning_module(lightning, copy.deepcopy(network))
    fit(lightning, expected, tmp_path)
    inner = copy.deepcopy(network)
    if what == "inner":
        compiled = compile_whole(inner)
        actual = make_lightning_module(lightning, compiled)
    else:
        actual = make_lightning_module(lightning, inner)
        if what == "whole":
            actual = compiled = compile_whole(actual)
        else:
            actual.training_step = compiled = compile_whole(actual.training_step)
    fit(lightning, actual, tmp_path)
    assert len(actual.losses) == ALL_STEPS
    same(expected.losses, actual.losses)
    assert_same_weights(expected.inner, inner)
    if what == "whole":
        # The trainer calls training_step, which is not what was compiled; calling the module is.
        expected.eval(), actual.eval()
        same(expected(torch.ones(4, WIDTH)), actual(torch.ones(4, WIDTH)))
    # One graph for the first size and one for all sizes; the step does not read the index of its batch.
    assert_graphs(compiled, {"inner": 2, "whole": 1, "step": 2}[what])


# Accelerate


def accelerate_loop(
    accelerator: Any, model: nn.Module, before: Callable[[Any], Any], after: Callable[[Any], Any]
) -> tuple[list[torch.Tensor], nn.Module]:
    torch.manual_seed(0)
    model = before(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, batches())
    model = after(model)
    losses = []
    for _ in range(2):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach().clone())
    return losses, model


def leave(module: nn.Module) -> nn.Module:
    return module


@pytest.mark.sampled(4)
@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("when", ["before prepare", "after prepare"])
def test_accelerate(precision: str, when: str) -> None:
    accelerate = pytest.importorskip("accelerate", reason="Accelerate is not installed")
    # A class of its own: an equal module that another test has compiled would lend it its entries.
    network = type("Network", (Network,), {})()
    results: list[tuple[list[torch.Tensor], nn.Module]] = []
    wraps = (compile_whole, leave) if when == "before prepare" else (leave, compile_whole)
    for before, after in ((leave, leave), wraps):
        accelerate.state.AcceleratorState._reset_state(True)
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision=precision)
        model = copy.deepcopy(network)
        losses, wrapped = accelerate_loop(accelerator, model, before, after)
        results.append((losses, model))
    accelerate.state.AcceleratorState._reset_state(True)
    same(results[0][0], results[1][0])
    assert_same_weights(results[0][1], results[1][1])
    assert len(losses) == ALL_STEPS
    assert_graphs(wrapped, 2)


@pytest.mark.parametrize("regional", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_accelerates_own_compilation(regional: bool) -> None:
    """Accelerate calls ``torch.compile`` itself, with the name of the backend."""
    accelerate = pytest.importorskip("accelerate", reason="Accelerate is not installed")
    network = Network()
    results = []
    for name in ("no", "dovetail"):
        accelerate.state.AcceleratorState._reset_state(True)
        plugin = accelerate.utils.TorchDynamoPlugin(
            backend=name, options={"inner": "aten"}, use_regional_compilation=regional
        )
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2, dynamo_plugin=plugin)
        model = copy.deepcopy(network)
        losses, wrapped = accelerate_loop(accelerator, model, leave, leave)
        assert accelerator.unwrap_model(wrapped, keep_torch_compile=False) is model
        results.append((losses, dict(model.state_dict())))
    accelerate.state.AcceleratorState._reset_state(True)
    torch._dynamo.reset()
    same(*results)


# Hugging Face


@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_hugging_face_trainer(accumulate: int, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="Accelerate, which transformers.Trainer needs, is not installed")
    config = transformers.GPT2Config(
        vocab_size=50,
        n_positions=16,
        n_embd=16,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        loss_type="ForCausalLM",
    )
    model = transformers.GPT2LMHeadModel(config)
    tokens = torch.randint(0, 50, (4 * STEPS * accumulate, 8), generator=torch.Generator().manual_seed(1))
    examples = [{"input_ids": row, "labels": row} for row in tokens]

    def run(module: nn.Module) -> list[torch.Tensor]:
        losses: list[torch.Tensor] = []

        class Recording(transformers.Trainer):
            def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
                loss = super().training_step(*args, **kwargs)
                losses.append(loss.clone())
                return loss

        torch.manual_seed(0)
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=STEPS,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=accumulate,
            max_grad_norm=0.5,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
        )
        Recording(model=module, args=arguments, train_dataset=examples).train()
        return losses

    expected, actual = copy.deepcopy(model), copy.deepcopy(model)
    compiled = compile_whole(actual)
    assert isinstance(compiled, transformers.PreTrainedModel)
    expected_losses, actual_losses = run(expected), run(compiled)
    assert len(actual_losses) == STEPS * accumulate
    same(expected_losses, actual_losses)
    assert_same_weights(expected, actual)
    assert_graphs(compiled)
