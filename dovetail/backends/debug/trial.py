"""A trial run of a backend on one graph in another process, before this process takes the risk.

A fork knows everything that this process knows. A process that uses CUDA cannot be forked; it starts a new interpreter, which
finds the backend by its name, or by importing the module that registers it.

>>> import torch
>>> from dovetail.backends import ATEN
>>> class Sine(torch.nn.Module):
...     def forward(self, x):
...         return [torch.ops.aten.sin.default(x)]
>>> try_apart(ATEN, torch.fx.symbolic_trace(Sine()), [torch.ones(2)], "inference", {}, seconds=60)
''
"""

from __future__ import annotations

import importlib
import inspect
import pickle
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dovetail.backends.aten import ATEN
from dovetail.backends.common.outputs import own_copy
from dovetail.backends.debug import processes
from dovetail.backends.debug.subgraphs import Subgraph
from dovetail.backends.protocol import Backend, Kind, compile_with
from dovetail.backends.registry import defined_in_this_process, lookup_backend
from dovetail.torch_private import sizes as private_sizes


def try_apart(
    backend: Backend,
    graph: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    kind: Kind,
    options: Mapping[str, Any],
    *,
    seconds: float,
) -> str:
    """Compile the graph and run it on zeros in another process; return the problem in words, empty if there is none.

    Empty as well where no trial is possible: a size computed from data has no example, and a new interpreter knows neither a
    backend that only this process has, nor symbolic sizes.
    """
    if not all(map(_has_example, example_inputs)):
        return ""
    if processes.can_fork():

        def attempt() -> None:
            zeros = [
                _zeros(*_layout(item)) if isinstance(item, torch.Tensor) else _hint(item) for item in example_inputs
            ]
            compile_with(backend, graph, example_inputs, kind, options)(zeros)

        return _problem_in(processes.rows_of_fork(lambda write: write({"problem": _error_of(attempt)}), seconds))
    module = _module_that_registers(backend)
    if module is None or not all(isinstance(value, torch.Tensor) for value in example_inputs):
        return ""
    with tempfile.TemporaryDirectory(prefix="dovetail-") as folder:
        path = Path(folder, "graph")
        try:
            _save(path, graph, example_inputs, options)
        except Exception:  # noqa: BLE001  (an option or a constant may refuse to be pickled in any way)
            return ""
        job = {"graph": str(path), "backend": backend.name, "module": module, "kind": kind}
        return _problem_in(processes.rows_of_interpreter(f"{__name__}:run_job", job, seconds))


def words(error: BaseException) -> str:
    """Return an error in one sentence, without advice."""
    return f"{type(error).__name__}: {error}".split("\n  what to do")[0]


def _error_of(attempt: Callable[[], Any]) -> str:
    try:
        attempt()
    except Exception as error:  # noqa: BLE001  (a backend may raise anything)
        return words(error)
    return ""


def _problem_in(rows: Iterable[processes.Row | processes.Lost]) -> str:
    for row in rows:
        if isinstance(row, processes.Lost):
            return f"it {row}"
        if "problem" in row:
            return str(row["problem"])
    return "it ended the process without a word"


def _module_that_registers(backend: Backend) -> str | None:
    """Return the module that a new interpreter must import to find the backend by name: "" for none, None if there is none."""
    if not defined_in_this_process(backend.name):
        try:
            found = lookup_backend(backend.name)
        except Exception:  # noqa: BLE001  (loading an entry point runs anybody's code)
            return None
        makers = [(item.compile.__module__, getattr(item.compile, "__qualname__", "")) for item in (found, backend)]
        return "" if makers[0] == makers[1] else None
    module = inspect.getmodule(backend.compile)
    name = "__main__" if module is None else module.__name__
    return None if name == "__main__" or name.startswith("dovetail.") else name


def _save(path: Path, graph: torch.fx.GraphModule, example_inputs: Sequence[Any], options: Mapping[str, Any]) -> None:
    own = own_copy(graph)
    for node in own.graph.nodes:
        node.meta = {}
    own.meta = {}
    path.write_bytes(pickle.dumps((own, list(map(_layout, example_inputs)), dict(options), list(sys.path))))


def _layout(value: torch.Tensor) -> tuple[Any, ...]:
    sizes, strides = (tuple(map(private_sizes.hint, numbers)) for numbers in (value.shape, value.stride()))
    return sizes, strides, value.dtype, str(value.device)


def _has_example(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.layout is torch.strided and all(map(_has_example, (*value.shape, *value.stride())))
    return type(_hint(value)) in (int, float, bool)


def _hint(value: Any) -> Any:
    return value.node.hint if isinstance(value, (torch.SymInt, torch.SymFloat)) else value


def _zeros(sizes: Any, strides: Any, dtype: torch.dtype, device: str) -> torch.Tensor:
    # Zeros are valid indices, and no arithmetic on them overflows.
    return torch.empty_strided(sizes, strides, dtype=dtype, device=device).zero_()


def run_job(job: processes.Row, write: processes.Write) -> None:
    """Try a backend in the new interpreter."""
    # The time limit begins when this graph has made torch import its tracer and its fake kernels.
    sine = torch.fx.symbolic_trace(lambda x: [torch.ops.aten.sin.default(x)])
    Subgraph(sine, [torch.zeros(2)]).compile(ATEN, {})
    write({"started": True})
    graph, layouts, options, paths = pickle.loads(Path(job["graph"]).read_bytes())
    sys.path.extend(path for path in paths if path not in sys.path)
    try:
        if job["module"]:
            importlib.import_module(job["module"])
        backend = lookup_backend(job["backend"]).with_options(options)
    except Exception:  # noqa: BLE001  (the parent has this backend, so this says nothing about it)
        write({"problem": ""})
        return
    inputs = [_zeros(*layout) for layout in layouts]
    attempt = Subgraph(graph, inputs, kind=job["kind"])
    write({"problem": _error_of(lambda: attempt.compile(backend, options)(list(inputs)))})
