"""What was compiled is saved, copied and sent to other processes like what it was made of: models, functions, whole trainings."""

from __future__ import annotations

import copy
import io
import os
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import dovetail
from tests.differential import same

Ways = Callable[[Any], Any]


def through_save(thing: Any) -> Any:
    stream = io.BytesIO()
    torch.save(thing, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


def through_pickle(thing: Any) -> Any:
    return pickle.loads(pickle.dumps(thing))


WAYS: tuple[Ways, ...] = (through_save, through_pickle, copy.deepcopy)


class Network(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


class Training:
    """A model, its optimizer and schedule, and the step, as one object that is saved as a whole."""

    def __init__(self, wrap: Callable[[Any], Any]) -> None:
        torch.manual_seed(0)
        self.model = wrap(Network())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 0.1)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)

    def step(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.model(torch.arange(12.0).reshape(4, 3))
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        return loss.detach()


def compiled_by_aten(function: Any) -> Any:
    return dovetail.compile(function, backend="aten")


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_training_goes_on_where_it_was_saved(way: Ways) -> None:
    results = []
    for wrap in (lambda model: model, compiled_by_aten):
        training = Training(wrap)
        losses = [training.step()]
        twin = way(training)
        assert twin.optimizer.param_groups[0]["params"][0] is next(twin.model.parameters())
        losses += [twin.step(), training.step(), twin.step()]
        results.append([losses, dict(twin.model.state_dict()), dict(training.model.state_dict())])
    same(*results)


def scaled(x: torch.Tensor) -> torch.Tensor:
    return x.sin() * 2


@dovetail.compile(backend="aten")
def augmented(x: torch.Tensor) -> torch.Tensor:
    return (x * 2).sin() + x.mean()


def plain(x: torch.Tensor) -> torch.Tensor:
    return (x * 2).sin() + x.mean()


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_functions(way: Ways) -> None:
    x = torch.ones(2)
    assert way(augmented) is augmented
    other = way(compiled_by_aten(scaled))
    same(scaled(x), other(x))
    assert len(other.entries) == 1
    held = way({"step": augmented, "model": compiled_by_aten(torch.nn.Linear(2, 1))})
    same(held["model"]._orig_mod(x), held["model"](x))
    same(plain(x), held["step"](x))


def test_an_average_of_weights_and_frozen_copies() -> None:
    """As exponential averages and reference models are made: a deep copy that trains no more."""
    model = compiled_by_aten(Network())
    x = torch.arange(12.0).reshape(4, 3)
    model(x).backward()
    average = torch.optim.swa_utils.AveragedModel(model)
    frozen = copy.deepcopy(model).requires_grad_(False).eval()
    with torch.no_grad():
        next(model.parameters()).add_(1)
    average.update_parameters(model)
    same(frozen._orig_mod(x), frozen(x))
    same(dict(model.named_parameters()).keys(), dict(average.module.named_parameters()).keys())
    assert not frozen(x).requires_grad and model(x).requires_grad


# --- workers of a loader ----------------------------------------------------------------------------------------------


class Rows(Dataset[Any]):
    def __init__(self, function: Any = None) -> None:
        self.function = function

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        row = torch.full((3,), float(index))
        return row if self.function is None else self.function(row)


class Collate:
    """Says too in which process it ran, and how many entries the function has there."""

    def __init__(self, function: Any = None) -> None:
        self.function = function

    def __call__(self, rows: list[torch.Tensor]) -> Any:
        batch = torch.stack(rows)
        found = batch if self.function is None else self.function(batch)
        return found, os.getpid(), len(augmented.entries)


@pytest.mark.parametrize("place", ("data set", "collate"))
@pytest.mark.parametrize("is_warm", (False, True))
@pytest.mark.parametrize("way", ("fork", pytest.param("spawn", marks=pytest.mark.slow)))
def test_in_the_workers_of_a_loader(way: str, is_warm: bool, place: str) -> None:
    dovetail.reset()
    if is_warm:
        augmented(torch.ones(2, 3))
    results = []
    for function, workers in ((plain, 0), (augmented, 2)):
        parts = (Rows(function), Collate()) if place == "data set" else (Rows(), Collate(function))
        options = {"num_workers": workers, "multiprocessing_context": way if workers else None}
        loader = DataLoader(parts[0], batch_size=2, collate_fn=parts[1], timeout=300 if workers else 0, **options)
        results.append(list(loader))
    same([found for found, *_ in results[0]], [found for found, *_ in results[1]])
    assert os.getpid() not in [process for _, process, _ in results[1]]
    assert all(entries for *_, entries in results[1])
