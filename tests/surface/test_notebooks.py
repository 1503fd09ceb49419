"""A cell that is run again defines its classes and functions anew: new entries, and nothing of the old ones stays."""

from __future__ import annotations

import gc
import linecache
import sys
import types
import weakref
from collections.abc import Iterator
from pathlib import Path
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


class _Shell:
    """What of IPython knows its cells (``IPython.core.compilerop.CachingCompiler``)."""

    def __init__(self) -> None:
        self.compile = self

    def format_code_name(self, file: str) -> tuple[str, str] | None:
        return ("Cell", "In[7]") if file == "/tmp/ipykernel_11/1234.py" else None


def test_places_are_cells(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file, text = "/tmp/ipykernel_11/1234.py", "def step(x):\n    return x if x.sum() > 0 else -x\n"
    monkeypatch.setitem(linecache.cache, file, (len(text), None, text.splitlines(True), file))
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: _Shell()))
    names: dict[str, Any] = {}
    exec(compile(text, file, "exec"), names)
    with pytest.raises(dovetail.errors.GraphBreakError, match=r"at Cell In\[7\]:2 `return x if"):
        dovetail.compile(names["step"], backend="aten", fullgraph=True)(torch.ones(2))
    compiled = dovetail.compile(names["step"], backend="aten")
    with pytest.warns(dovetail.errors.GraphBreakWarning, match=r"at Cell In\[7\]:2 `return x if"):
        compiled(torch.ones(2))
    assert "Cell In[7]:2" in str(compiled.events) and "# Cell In[7]:2 " in str(compiled.entries[0].compiled.joint)
    for kind in ("html", "json"):
        page = dovetail.report(compiled, tmp_path / f"report.{kind}").read_text(encoding="utf-8")
        assert "Cell In[7]" in page and "ipykernel" not in page


@pytest.mark.parametrize("shell", (None, types.SimpleNamespace(get_ipython=lambda: None), _Shell()))
def test_places_elsewhere_are_files(shell: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.SimpleNamespace(get_ipython=lambda: shell) if isinstance(shell, _Shell) else shell
    monkeypatch.setitem(sys.modules, "IPython", module)
    with pytest.raises(dovetail.errors.GraphBreakError, match=r"at .*test_notebooks\.py:\d+ `"):
        dovetail.compile(lambda x: x if x.sum() > 0 else -x, backend="aten", fullgraph=True)(torch.ones(2))
