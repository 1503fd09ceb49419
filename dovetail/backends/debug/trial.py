"""Trying a backend on one graph in a process of its own, before this one takes the risk.

A fork knows everything that this process knows. Where CUDA is in use there can be none; a new interpreter is started then,
and finds the backend by its name, or by importing the module that registers it.

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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dovetail.backends.common.outputs import own_copy
from dovetail.backends.debug import children
from dovetail.backends.debug.pieces import Piece
from dovetail.backends.protocol import Backend, Kind, compile_with
from dovetail.backends.registry import defined_in_this_process, lookup_backend
from dovetail.torch_private import sizes as private_sizes

_ENDED = "it ended the process without a word"


def try_apart(
    backend: Backend,
    graph: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    kind: Kind,
    options: Mapping[str, Any],
    *,
    seconds: float,
) -> str:
    """What goes wrong when the graph is compiled, and run on zeros, in another process; empty if nothing does.

    Empty as well where it cannot be tried: a size that is made of data has no example, and a new interpreter knows neither a
    backend that only this process has, nor symbolic sizes.
    """
    if not all(map(_can_be_made_up, example_inputs)):
        return ""
    if children.can_fork():

        def work(write: children.Write) -> None:
            write({"problem": _problem(backend, graph, example_inputs, kind, options)})

        return _said(children.rows_of_fork(work, seconds))
    module = _module_that_knows(backend)
    if module is None or not all(isinstance(value, torch.Tensor) for value in example_inputs):
        return ""
    with tempfile.TemporaryDirectory(prefix="dovetail-") as folder:
        path = Path(folder, "graph")
        try:
            _save(path, graph, example_inputs, options)
        except Exception:  # noqa: BLE001  (an option or a constant may refuse to be pickled in any way)
            return ""
        job = {"graph": str(path), "backend": backend.name, "module": module, "kind": kind}
        return _said(children.rows_of_module("dovetail.backends.debug.trial", job, seconds))


def words(error: BaseException) -> str:
    """An error in one sentence, without advice."""
    return f"{type(error).__name__}: {error}".split("\n  what to do")[0]


def _said(rows: Any) -> str:
    for row in rows:
        if isinstance(row, children.Lost):
            return f"it {row}"
        if "problem" in row:
            return str(row["problem"])
    return _ENDED


def _problem(
    backend: Backend,
    graph: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    kind: Kind,
    options: Mapping[str, Any],
) -> str:
    try:
        run = compile_with(backend, graph, example_inputs, kind, options)
        run([_made_up(value) for value in example_inputs])
    except Exception as error:  # noqa: BLE001  (a backend may raise anything)
        return words(error)
    return ""


def _module_that_knows(backend: Backend) -> str | None:
    """What a new interpreter imports to find the backend by its name; empty for nothing, None if there is no such module."""
    if not defined_in_this_process(backend.name):
        try:
            found = lookup_backend(backend.name)
        except Exception:  # noqa: BLE001  (loading an entry point runs anybody's code)
            return None
        return "" if _maker(found) == _maker(backend) else None
    module = inspect.getmodule(backend.compile)
    name = "__main__" if module is None else module.__name__
    return None if name == "__main__" or name.startswith("dovetail.") else name


def _maker(backend: Backend) -> tuple[Any, Any]:
    return getattr(backend.compile, "__module__", None), getattr(backend.compile, "__qualname__", None)


def _save(path: Path, graph: torch.fx.GraphModule, example_inputs: Sequence[Any], options: Mapping[str, Any]) -> None:
    own = own_copy(graph)
    for node in own.graph.nodes:
        node.meta = {}
    own.meta = {}
    shapes = [
        (
            tuple(map(private_sizes.hint, value.shape)),
            tuple(map(private_sizes.hint, value.stride())),
            value.dtype,
            str(value.device),
        )
        for value in example_inputs
    ]
    with path.open("wb") as stream:
        pickle.dump((own, shapes, dict(options), list(sys.path)), stream)


def _can_be_made_up(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.layout is torch.strided and all(map(_has_example, (*value.shape, *value.stride())))
    return type(value) in (int, float, bool) or (
        isinstance(value, (torch.SymInt, torch.SymFloat)) and _has_example(value)
    )


def _has_example(number: Any) -> bool:
    return type(number) in (int, float) or number.node.hint is not None


def _made_up(value: Any) -> Any:
    if isinstance(value, (torch.SymInt, torch.SymFloat)):
        return value.node.hint
    if not isinstance(value, torch.Tensor):
        return value
    sizes, strides = (tuple(map(private_sizes.hint, numbers)) for numbers in (value.shape, value.stride()))
    return _zeros(sizes, strides, value.dtype, value.device)


def _zeros(sizes: Any, strides: Any, dtype: torch.dtype, device: Any) -> torch.Tensor:
    made = torch.empty_strided(sizes, strides, dtype=dtype, device=device)
    # Zeros are good indices, and nothing overflows.
    return made.zero_()


def _run_job(job: children.Row) -> str:
    """What the new interpreter does."""
    with Path(job["graph"]).open("rb") as stream:
        graph, shapes, options, paths = pickle.load(stream)
    sys.path.extend(path for path in paths if path not in sys.path)
    try:
        if job["module"]:
            importlib.import_module(job["module"])
        backend = lookup_backend(job["backend"]).with_options(options)
    except Exception:  # noqa: BLE001  (the parent has this backend, so there is nothing to be said about it)
        return ""
    inputs = [_zeros(*shape) for shape in shapes]
    try:
        Piece(graph, inputs, (), job["kind"]).compile(backend, options)(list(inputs))
    except Exception as error:  # noqa: BLE001  (a backend may raise anything)
        return words(error)
    return ""


if __name__ == "__main__":
    import json

    write = children.writer(Path(sys.argv[2]))
    # The time limit begins when everything is imported.
    write({"started": True})
    write({"problem": _run_job(json.loads(sys.argv[1]))})
