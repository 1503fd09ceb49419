"""A backend that is slow to compile, and a background process that answers when a test says so."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from dovetail.backends import Backend
from dovetail.backends.aten import compile_aten
from dovetail.tiers.process import Answer

COMPILED = Answer("compiled", seconds=1.0)


class FakeJob:
    """A job of the fake process; ``given`` is what it will answer."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data
        self.given: Answer | None = None
        self.is_cancelled = False
        self.stage = "graph 1 of 2"

    def answer(self) -> Answer | None:
        CACHE.is_filled = CACHE.is_filled or self.given is not None
        return self.given

    def let_it_work(self) -> None:
        """Nothing computes here."""

    def cancel(self) -> None:
        self.is_cancelled = True


class FakeWorker:
    """Takes jobs, and does nothing with them."""

    def __init__(self) -> None:
        self.jobs: list[FakeJob] = []
        self.fails: type[OSError] | None = None
        self.fails_to_start = False

    def start(self) -> None:
        if self.fails_to_start:
            raise OSError("no process")

    def submit(self, data: dict[str, Any]) -> FakeJob:
        if self.fails is not None:
            raise self.fails(28, "No space left on device")
        self.jobs.append(FakeJob(data))
        return self.jobs[-1]

    def answer_all(self, answer: Answer = COMPILED) -> None:
        for job in self.jobs:
            job.given = job.given or answer


@contextlib.contextmanager
def only_from_cache(*, ours: bool = False) -> Iterator[None]:
    """What was answered to be compiled can be taken once."""
    CACHE.is_open = True
    try:
        yield
    finally:
        CACHE.is_open = CACHE.is_filled = False


#: Stands for what knows the cache on disk.
CACHE = types.SimpleNamespace(
    cache_folder=lambda: "nowhere",
    settings_as_data=dict,
    only_from_cache=only_from_cache,
    is_open=False,
    is_filled=False,
)


def _silu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x)


class SlowBackend:
    """Its kernels are operators; ``ran`` says which of them ran, ``change`` makes them wrong, ``assume`` is told of the inputs,
    ``tell`` of the options of the kernels that run.
    """

    def __init__(self, name: str) -> None:
        self.compiled: list[str] = []
        self.ran: list[str] = []
        self.change: Callable[[list[Any]], list[Any]] = list
        self.assume: Callable[[list[Any]], object] = list
        self.tell: Callable[[Mapping[str, Any]], object] = dict
        self.error: Exception | None = None
        self.backend = Backend(
            name,
            self._compile,
            decompositions=lambda: {torch.ops.aten.silu.default: _silu},
            writes_back=False,
            data_sizes=True,
            slow_to_compile=True,
        )

    def _compile(
        self, graph: torch.fx.GraphModule, example_inputs: Sequence[Any], *, kind: Any, options: Mapping[str, Any]
    ) -> Callable[[list[Any]], list[Any]]:
        if self.error is not None:
            raise self.error
        if CACHE.is_open and not CACHE.is_filled:
            raise LookupError("not in the cache")
        self.compiled.append(kind)
        self.assume([node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")])
        run = compile_aten(graph, example_inputs, kind=kind, options=options)

        def kernels(inputs: list[Any]) -> list[Any]:
            self.ran.append(kind)
            self.tell(options)
            return self.change(run(inputs))

        return kernels
