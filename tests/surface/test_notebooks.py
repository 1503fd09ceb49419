"""A cell that is run again defines its classes and functions anew: new entries, and nothing of the old ones stays."""

from __future__ import annotations

import gc
import sys
import types
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import dovetail
from tests.differential import same

_CELL = """
import torch, dovetail
scale = {number}

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)

    def forward(self, x):
        return shifted(self.layer(x)) * scale

def shifted(x):
    return x + {number}

@dovetail.compile(backend="aten")
def step(model, x):
    return model(x).sum()

net = Net()
compiled = dovetail.compile(net, backend="aten")
"""


@pytest.fixture
def notebook() -> Iterator[Any]:
    module: Any = types.ModuleType("a_notebook")
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


def run_cell(notebook: Any, text: str, number: int) -> None:
    exec(compile(text, f"<ipython-input-{number}>", "exec"), notebook.__dict__)


def test_a_cell_that_is_run_again(notebook: Any) -> None:
    x, old = torch.ones(1, 2), []
    for number in range(4):
        run_cell(notebook, _CELL.format(number=number), number)
        same(notebook.net(x), notebook.compiled(x))
        same(notebook.net(x).sum(), notebook.step(notebook.net, x))
        old.append([weakref.ref(notebook.net), weakref.ref(notebook.step), weakref.ref(notebook.Net)])
    gc.collect()
    assert [sum(item() is not None for item in group) for group in old] == [0, 0, 0, 3]


def test_a_cell_that_changes_what_a_compiled_function_calls(notebook: Any) -> None:
    x = torch.ones(1, 2)
    run_cell(notebook, _CELL.format(number=1), 1)
    before = notebook.compiled(x)
    run_cell(notebook, "def shifted(x):\n    return x - 7\n", 2)
    same(notebook.net(x), notebook.compiled(x))
    assert not torch.equal(before, notebook.compiled(x))
    run_cell(notebook, "scale = 5\nNet.forward = lambda self, x: self.layer(x) * scale\n", 3)
    same(notebook.net(x), notebook.compiled(x))
    same(notebook.net(x).sum(), notebook.step(notebook.net, x))
    assert len(dovetail.events_of(notebook.compiled).events) > 0
