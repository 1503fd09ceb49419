"""``tune=True``: results are eager's on every variant, the fastest stays, and every failure leaves the kernels that there are."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dovetail
from dovetail.backends import register_backend
from dovetail.backends.registry import unregister_backend
from dovetail.errors import OptionError
from dovetail.reports.explanation import compiled_function
from dovetail.tiers import choice, contest, process, tuning
from dovetail.tiers.process import Answer
from dovetail.tiers.tuning import Variant
from tests.differential import compare_modules, same
from tests.tiers.fakes import CACHE, FakeWorker, SlowBackend
from tests.tiers.test_contest import Clock

NAME = "slow to compile, tuned"
#: By setting, what the kernels take with it.
SECONDS = {"slower": 3.0, "quick": 0.5, "same": 1.0}


class Tuned:
    """A model of a backend whose kernels take a time that their options say, and the same model in eager."""

    def __init__(self, worker: FakeWorker, backend: SlowBackend, clock: Clock) -> None:
        self.worker, self.backend, self.ran = worker, backend, list[str]()
        backend.tell = functools.partial(self._tell, clock)
        self.restart()

    def _tell(self, clock: Clock, options: Mapping[str, Any]) -> None:
        names = [name for name in SECONDS if name in options]
        self.ran.append("+".join(names))
        clock.now += SECONDS[names[-1]] if names else 1.0

    def restart(self, **options: Any) -> None:
        """Compile the model anew, as another process would."""
        torch.manual_seed(0)
        self.eager = nn.Sequential(nn.Linear(6, 8), nn.SiLU(), nn.Dropout(0.4), nn.Linear(8, 3))
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.SiLU(), nn.Dropout(0.4), nn.Linear(8, 3))
        self.compiled = dovetail.compile(model, backend=NAME, fullgraph=True, **{"tune": True, **options})

    def train(self, steps: int, answer: Answer | None = None, size: int = 5) -> None:
        """So many steps of both; each is compared."""
        for step in range(steps):
            torch.manual_seed(step)
            values = torch.randn(size, 6)
            results = []
            for model in (self.eager, self.compiled):
                torch.manual_seed(step)
                model.zero_grad()
                result = model(values)
                result.square().sum().backward()
                results.append((result.detach(), torch.get_rng_state()))
            same(*results, exact=False)
            compare_modules(self.eager, self.compiled, "model", exact=False)
            if answer is not None:
                self.worker.answer_all(answer)

    def notes(self, *names: str) -> list[tuple[str, str]]:
        """For each such event its graph, and the variant or reason."""
        events = dovetail.events_of(self.compiled).events
        told = [event for event in events if event.name in names]
        return [(item.details["graph"], item.details.get("variant", item.details.get("reason"))) for item in told]


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> Iterator[Tuned]:
    worker, backend, clock = FakeWorker(), SlowBackend(NAME), Clock()
    monkeypatch.delenv(choice.SWITCH, raising=False)
    monkeypatch.setattr(process, "worker", lambda: worker)
    monkeypatch.setattr(tuning, "Contest", functools.partial(contest.Contest, clock=clock))
    monkeypatch.setattr(contest, "LOOKS", (12,))
    monkeypatch.setattr(tuning, "SHORTEST", 0.0)
    CACHE.is_filled = False
    monkeypatch.setitem(choice.CACHES, NAME, CACHE)
    variants = [Variant(name, {name: True}) for name in SECONDS]
    monkeypatch.setitem(tuning.VARIANTS, NAME, lambda graph: variants)
    register_backend(NAME, backend.backend)
    yield Tuned(worker, backend, clock)
    unregister_backend(NAME)


COMPILED = Answer("compiled", seconds=1.0)


def test_the_fastest_variant_stays_and_is_there_at_the_next_start(tuned: Tuned) -> None:
    tuned.train(130, COMPILED)
    assert tuned.notes("variant kept") == [("forward", "quick"), ("backward", "quick")]
    assert tuned.notes("variant dropped") == [
        (kind, name) for name in ("slower", "same") for kind in ("forward", "backward")
    ]
    assert set(tuned.ran[-20:]) == {"quick"}
    (entry,) = compiled_function(tuned.compiled).entries
    assert entry.run.state.endswith("; forward: tuned: quick; backward: tuned: quick")
    assert entry.run._tuning is None

    # Another process: the first kernels are those that won, and nothing competes.
    tuned.restart()
    tuned.ran.clear()
    tuned.worker.jobs.clear()
    tuned.train(40, COMPILED)
    assert set(tuned.ran) == {"quick"}
    assert [graph["options"].get("quick") for graph in tuned.worker.jobs[0].data["graphs"]] == [True, True]
    assert len(tuned.worker.jobs) == 1
    assert tuned.notes("tuned before") == [(kind, "as tuned before: quick") for kind in ("forward", "backward")]

    # Who does not ask for it gets the kernels as they always are.
    tuned.restart(tune=False)
    tuned.ran.clear()
    tuned.train(10, COMPILED)
    assert set(tuned.ran) == {""}


def test_variants_that_cannot_be_compiled_are_left_out(tuned: Tuned) -> None:
    tuned.train(4, COMPILED)
    tuned.train(60, Answer("failed", "its process has ended"))
    assert tuned.notes("variant not tried") == [(kind, name) for name in SECONDS for kind in ("forward", "backward")]
    assert set(tuned.ran) == {""}


@pytest.mark.slow
def test_an_error_of_the_backend_in_this_process(tuned: Tuned) -> None:
    tuned.train(4, COMPILED)
    tuned.backend.error = ValueError("a fault of the backend")
    tuned.train(130, COMPILED)
    (first, *_) = [event for event in dovetail.events_of(tuned.compiled).events if event.name == "variant not tried"]
    assert first.details["reason"] == "ValueError: a fault of the backend"
    assert set(tuned.ran) == {""}


def test_a_background_that_takes_no_jobs(tuned: Tuned) -> None:
    tuned.train(4, COMPILED)
    tuned.worker.fails = OSError
    tuned.train(60)
    assert [kind for kind, _ in tuned.notes("not tuned")] == ["forward", "backward"]
    assert set(tuned.ran) == {""}


def test_short_graphs_are_left_alone(tuned: Tuned, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "SHORTEST", 1e9)
    tuned.train(60, COMPILED)
    assert tuned.notes("not tuned") == [(kind, "too short to be tuned") for kind in ("forward", "backward")]
    assert len(tuned.worker.jobs) == 1


@pytest.mark.slow
def test_nothing_changes_under_deterministic_algorithms(tuned: Tuned) -> None:
    tuned.train(60, COMPILED)
    assert "slower" in tuned.ran
    torch.use_deterministic_algorithms(True)
    try:
        before = len(tuned.ran)
        tuned.train(60, COMPILED)
    finally:
        torch.use_deterministic_algorithms(False)
    assert set(tuned.ran[before:]) == {""}


@pytest.mark.slow
def test_sizes_that_change_are_not_tuned(tuned: Tuned) -> None:
    tuned.restart(dynamic=True)
    for size in (4, 5, 6):
        tuned.train(60, COMPILED, size=size)
    assert tuned.notes("variant kept", "variant dropped") == []
    assert ("forward", "its sizes change, or it cannot be written down") in tuned.notes("not tuned")


def test_a_model_that_is_gone_asks_for_nothing_more(tuned: Tuned) -> None:
    tuned.train(4, COMPILED)
    tuned.train(40)
    (job, *others) = tuned.worker.jobs[1:]
    assert not job.is_cancelled
    del tuned.compiled
    gc.collect()
    assert all(item.is_cancelled for item in (job, *others))


@pytest.mark.parametrize("tiers", ["wait", "never"])
def test_a_run_whose_kernels_never_change_cannot_be_tuned(tuned: Tuned, tiers: str) -> None:
    with pytest.raises(OptionError, match="forbids"):
        tuned.restart(tiers=tiers)


def test_the_environment_has_the_last_word(tuned: Tuned, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(choice.SWITCH, "wait")
    tuned.restart()
    tuned.train(60)
    assert [
        event.details["reason"] for event in dovetail.events_of(tuned.compiled).events if event.name == "not tuned"
    ] == ['tiers="wait"']
