"""A slice of the memory loops in the default tests, and a check of their harness."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conformance import memory_runner

SLOW = {"a_training_step", "changing_sizes"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in memory_runner.PROGRAMS]
)
def test_nothing_is_kept(name: str) -> None:
    result = memory_runner.run(name, 15 if name in memory_runner.RAISING else 40)
    assert result.objects < 100 and result.alive == (), str(result)


def test_what_is_kept_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []

    def keeps() -> Any:
        compiled, call, held = memory_runner.PROGRAMS["a_module"]()
        return compiled, lambda: (call(), kept.append([[] for _ in range(20)])), held

    monkeypatch.setitem(memory_runner.PROGRAMS, "keeps", keeps)
    assert not memory_runner.run("keeps", 40).is_right
