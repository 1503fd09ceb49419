"""``tune=True``: variants of a graph's kernels are compiled in the background, and compete on the program's own calls.

::

    SwappingRun              when its kernels run: tier 1
      Tuning                 one plan for each of its flat graphs, a step of each between two calls
        ask                  the background compiles the next variant
        Contest              its kernels and the best ones so far take turns; the faster ones stay

A variant is the same flat graph with other settings of the backend: its results differ by rounding at most, what is saved for the
backward is the same, and each graph can change hands at any call. What won is kept in the cache on disk for this machine, so
that the next process compiles it at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dovetail import cache
from dovetail.aot.nodes import has_symbolic_sizes
from dovetail.backends import Backend
from dovetail.backends.inductor.generated import Generated, aside, note
from dovetail.cache.unportable import UnportableError
from dovetail.errors import BackendError
from dovetail.events import EventLog
from dovetail.guards.ambient import without_autocast
from dovetail.tiers import process
from dovetail.tiers.choice import CACHES
from dovetail.tiers.compiling import make_job
from dovetail.tiers.contest import Contest
from dovetail.tiers.flat_graph import encode
from dovetail.tiers.later import LaterGraph
from dovetail.torch_private import state as private_state

#: A graph that takes less time than this many seconds has nothing to gain: the call around it takes as long.
SHORTEST = 50e-6
#: So many calls tell how long a graph takes.
_LOOK = 16


@dataclasses.dataclass(frozen=True)
class Variant:
    """Settings of a backend that change how a graph is computed, not what."""

    name: str
    settings: Mapping[str, Any]


def _variants_of_inductor(graph: torch.fx.GraphModule) -> list[Variant]:
    """The variants of a graph that Inductor can make on this CPU.

    Its templates of matrix products are no variant: they are for constant weights, and those of a training step change.
    """
    found = [
        Variant("larger fusions", {"cpp.max_horizontal_fusion_size": 64, "max_fusion_size": 256}),
        Variant("fewer buffers", {"realize_reads_threshold": 16}),
    ]
    if torch.backends.cpu.get_cpu_capability() == "AVX512":
        found.insert(0, Variant("vectors of 256 bits", {"cpp.simdlen": 256}))
    if torch.get_num_threads() > 1:
        found.insert(0, Variant("one thread for short loops", {"cpp.min_chunk_size": 4096}))
        found.append(Variant("one thread", {"cpp.threads": 1}))
    if any(node.target is torch.ops.aten.convolution.default for node in graph.graph.nodes):
        found.append(Variant("layouts as they come", {"layout_optimization": False}))
    return found


#: The variants of a graph, by backend.
VARIANTS: dict[str, Callable[[torch.fx.GraphModule], list[Variant]]] = {"inductor": _variants_of_inductor}


class Tuning:
    """The plans for the flat graphs of one compilation. ``step`` goes on with each; ``is_done`` when nothing is left to try."""

    def __init__(self, graphs: Sequence[LaterGraph], backend: Backend, fake_mode: Any, events: EventLog) -> None:
        self._backend = backend
        self._fake_mode = fake_mode
        self._events = events
        self._states: dict[str, str] = {}
        self._jobs: list[process.Job] = []
        self._plans: list[Iterator[None]] = []
        for item in graphs:
            key = _key_of(item, backend)
            if key is None:
                self._end(item, "not tuned", "its sizes change, or it cannot be written down")
            elif not self._recall(item, key):
                self._plans.append(self._plan(item, key))

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to try."""
        return not self._plans

    def __str__(self) -> str:
        return "".join(f"; {kind}: {state}" for kind, state in self._states.items())

    def step(self) -> None:
        """Go on with each plan as far as is possible without waiting; the compile lock is held."""
        if not torch.are_deterministic_algorithms_enabled():
            self._plans = [plan for plan in self._plans if next(plan, self) is not self]

    def let_it_work(self) -> None:
        """Leave the cores to the background for a while, where it compiles a variant: beside a program that takes all of them, each
        variant took half a minute.
        """
        for job in self._jobs[:1]:
            job.let_it_work()

    def _recall(self, graph: LaterGraph, key: str) -> bool:
        """Give a graph the settings that an earlier process has found for it; whether one has."""
        content = cache.read("tuned", key)
        if content is None:
            return False
        known = {item.name: item for item in VARIANTS[self._backend.name](graph.graph)}
        try:
            names = list(json.loads(content))
            chosen = [known[name] for name in names]
        except (ValueError, TypeError, KeyError):  # whatever lies there: the graph is tuned again
            return False
        for variant in chosen:
            graph.options = {**graph.options, **variant.settings}
        self._end(graph, "tuned before", f"as tuned before: {_listed(names)}")
        return True

    def _plan(self, graph: LaterGraph, key: str) -> Iterator[None]:
        """Try one variant after the other; gives way wherever it would wait."""
        if (yield from self._is_short(graph)):
            self._end(graph, "not tuned", "too short to be tuned")
            return
        kept: list[str] = []
        for variant in VARIANTS[self._backend.name](graph.graph):
            if variant.settings.keys() & graph.options.keys():
                continue
            changed = dataclasses.replace(graph, options={**graph.options, **variant.settings}, run=None)
            try:
                generated = yield from self._compiled(changed, variant)
            except (UnportableError, OSError) as error:
                self._end(graph, "not tuned", f"cannot be tuned: {error}")
                return
            except Exception as error:  # noqa: BLE001  (whatever a backend may raise: the kernels so far go on)
                reason = f"{type(error).__name__}: {error}"
                self._events.note("variant not tried", graph=graph.kind, variant=variant.name, reason=reason)
                continue
            assert graph.run is not None and changed.run is not None
            self._states[graph.kind] = f"{variant.name!r} is tried"
            contest = graph.run = Contest(graph.run, changed.run)
            while (verdict := contest.verdict) is None:
                yield
            graph.run, said = contest.champion, "variant dropped"
            if verdict.is_faster:
                graph.run, graph.options, said = contest.challenger, changed.options, "variant kept"
                kept.append(variant.name)
                for item in generated:
                    note(self._fake_mode, item)
            self._events.note(said, graph=graph.kind, variant=variant.name, took=str(verdict))
        cache.write("tuned", key, json.dumps(kept).encode())
        self._end(graph, "tuned", f"tuned: {_listed(kept)}")

    def _is_short(self, graph: LaterGraph) -> Generator[None, None, bool]:
        """Whether a graph takes less time than can be told from that of the call around it."""
        run, seconds = graph.run, list[float]()
        assert run is not None

        def timed(inputs: list[Any]) -> list[Any]:
            start = time.perf_counter()
            results = run(inputs)
            seconds.append(time.perf_counter() - start)
            return results

        graph.run = timed
        while len(seconds) < _LOOK:
            yield
        graph.run = run
        return statistics.median(seconds) < SHORTEST

    def _compiled(self, graph: LaterGraph, variant: Variant) -> Generator[None, None, list[Generated]]:
        """Have the background compile a graph, and take its kernels; raises what that raises."""
        self._states[graph.kind] = f"{variant.name!r} is compiled"
        job = process.worker().submit(make_job(self._backend.name, [graph]))
        answer = None
        self._jobs.append(job)
        try:
            while (answer := job.answer()) is None:
                yield
        finally:
            self._jobs.remove(job)
            # The compiled function is gone. A job that has an answer must not be cancelled: the process may be at another one.
            if answer is None:
                job.cancel()
        if answer.status != "compiled":
            raise BackendError(answer.reason)
        with aside(self._fake_mode) as generated:
            self._take(graph)
        return generated

    def _take(self, graph: LaterGraph) -> None:
        """Its kernels from the cache, where the background has left them."""
        with private_state.preserved_rng_state(), without_autocast(), CACHES[self._backend.name].only_from_cache():
            graph.compile(self._backend)

    def _end(self, graph: LaterGraph, event: str, state: str) -> None:
        self._states[graph.kind] = state
        self._events.note(event, graph=graph.kind, reason=state)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "no variant is faster"


def _key_of(graph: LaterGraph, backend: Backend) -> str | None:
    """The key of what is known of a graph on this machine; None where it cannot be tuned."""
    software = cache.software()
    if software is None or backend.name not in VARIANTS or has_symbolic_sizes(graph.graph.graph.nodes):
        return None
    try:
        data = encode(graph.graph, graph.kind, graph.options)
    except UnportableError:
        return None
    names = [item.name for item in VARIANTS[backend.name](graph.graph)]
    machine = (_processor(), torch.backends.cpu.get_cpu_capability(), os.cpu_count(), torch.get_num_threads())
    return cache.key_of(
        "tuned", json.dumps(data), backend.name, names, private_state.kernel_flags(), machine, *software
    )


@functools.cache
def _processor() -> str:
    """The name of the processor: Linux has it in a file, where Python's own function has none."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines():
            if line.startswith("model name"):
                return line
    return platform.processor()
