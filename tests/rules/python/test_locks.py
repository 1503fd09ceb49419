"""Locks: what is done once under one runs eagerly, once; a lock that is taken at every call breaks the graph."""

from __future__ import annotations

import threading

import pytest
import torch

import dovetail
from dovetail.reports.explanation import compiled_function
from tests.differential import same


def test_what_is_prepared_once_under_a_lock_is_prepared_by_an_eager_call() -> None:
    lock = threading.Lock()

    class Model(torch.nn.Module):
        ready = False

        def prepare(self) -> None:
            if self.ready:
                return
            with lock:
                if not self.ready:
                    self.scale = 3.0
                    self.ready = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.prepare()
            return x * self.scale

    model = Model()
    compiled = dovetail.compile(model, backend="aten", fullgraph=True)
    for _ in range(3):
        same(torch.full((2,), 3.0), compiled(torch.ones(2)))
    assert [event.name for event in dovetail.events_of(compiled).events].count("initialisation") == 1
    (entry,) = compiled_function(compiled).entries
    assert entry.run is not None
    assert not lock.locked()


@pytest.mark.parametrize("kind", [threading.Lock, threading.RLock])
def test_a_lock_taken_at_every_call_breaks_the_graph(kind: type) -> None:
    lock = kind()
    seen: list[int] = []

    def program(x: torch.Tensor) -> torch.Tensor:
        with lock:
            seen.append(len(seen))
        return x * 2

    compiled = dovetail.compile(program, backend="aten", fullgraph=True)
    same(torch.full((2,), 2.0), compiled(torch.ones(2)))
    with pytest.raises(dovetail.errors.GraphBreakError, match="a lock is taken at every call"):
        compiled(torch.ones(2))
    broken = dovetail.compile(program, backend="aten")
    with pytest.warns(dovetail.errors.GraphBreakWarning):
        results = [broken(torch.ones(2)) for _ in range(3)]
    same([torch.full((2,), 2.0)] * 3, results)
    assert seen == [0, 1, 2, 3]
