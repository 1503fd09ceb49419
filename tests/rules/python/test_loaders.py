"""Data loaders inside of a compiled function: loading is never a part of a capture, so no batch is lost or taken for a constant."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

import dovetail
from dovetail.errors import GraphBreakError
from tests.differential import same


class Stream(IterableDataset[float]):
    """Numbers that can be read once."""

    def __init__(self) -> None:
        self.taken = 0

    def __iter__(self) -> Iterator[float]:
        while self.taken < 6:
            self.taken += 1
            yield float(self.taken)


def one_batch(batches: Any) -> Any:
    return next(batches) * 2


def all_batches(loader: Any) -> Any:
    found = []
    for batch in loader:
        found.append(batch * 2)
    return found


def numbered(loader: Any) -> Any:
    return [batch * number for number, batch in enumerate(loader)]


@pytest.mark.parametrize("function", [all_batches, numbered], ids=lambda item: item.__name__)
def test_a_stream_is_gone_through_once(function: Callable[[Any], Any]) -> None:
    """Its first batches were taken by the capture, and were lost."""
    found = []
    for run in (function, dovetail.compile(function, backend="aten")):
        stream = Stream()
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found.append([run(DataLoader(stream, batch_size=2)), stream.taken, torch.get_rng_state()])
    same(*found)


def test_a_loader_that_was_begun_before() -> None:
    """The batch of the first call was returned by all later ones."""
    compiled = dovetail.compile(one_batch, backend="aten")
    batches = iter(DataLoader(Stream(), batch_size=2))
    with pytest.warns(dovetail.errors.GraphBreakWarning, match="a DataLoader loads data"):
        found = [compiled(batches).tolist() for _ in range(3)]
    assert found == [[2.0, 4.0], [6.0, 8.0], [10.0, 12.0]]
    with pytest.raises(StopIteration):
        compiled(batches)


def test_one_graph_is_refused() -> None:
    stream = Stream()
    with pytest.raises(GraphBreakError, match="a DataLoader loads data"):
        dovetail.compile(all_batches, backend="aten", fullgraph=True)(DataLoader(stream, batch_size=2))
    assert stream.taken == 0


def test_an_epoch_is_compiled_between_the_batches() -> None:
    """The update was in pieces: one graph break for each parameter."""
    found = []
    for compiles in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
        optimizer = torch.optim.AdamW(model.parameters())
        loader = DataLoader(TensorDataset(torch.randn(12, 4), torch.randn(12, 3)), batch_size=4, shuffle=True)

        def epoch(model: Any = model, optimizer: Any = optimizer, loader: Any = loader) -> Any:
            losses = []
            for x, y in loader:
                optimizer.zero_grad()
                loss = torch.nn.functional.mse_loss(model(x), y)
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
            return losses

        run = dovetail.compile(epoch, backend="aten") if compiles else epoch
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            losses = [run() for _ in range(3)]
        found.append([losses, dict(model.state_dict()), optimizer.state_dict(), torch.get_rng_state()])
    same(*found)
    rest = [item for item in dovetail.events_of(run).events if item.name == "graph break"]
    assert {item.details["reason"] for item in rest} == {"a DataLoader loads data"}


def test_data_sets_are_read_in_the_graph() -> None:
    def pick(items: Dataset[Any], which: int) -> Any:
        return items[which][0] * 2

    compiled = dovetail.compile(pick, backend="aten", fullgraph=True)
    items = Subset(TensorDataset(torch.arange(12.0).view(6, 2)), [4, 1])
    for which in (0, 1, 0):
        same(pick(items, which), compiled(items, which))
