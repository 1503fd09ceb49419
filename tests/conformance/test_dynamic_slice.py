"""Models of the dynamic runner: one with two graphs for all sizes, one with tensors made of sizes, one with a branch on a size."""

from __future__ import annotations

import importlib.util

import pytest

from dovetail.events import Event
from tests.conformance import dynamic_runner

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)


@pytest.mark.parametrize(
    ("name", "verdict"),
    [
        pytest.param("gpt2", "passed", marks=pytest.mark.slow),
        pytest.param("deberta", "passed", marks=pytest.mark.slow),
        pytest.param("mistral", "branches", marks=pytest.mark.slow),
    ],
)
def test_model(name: str, verdict: str) -> None:
    result = dynamic_runner.check_model(name)
    assert result.verdict == verdict, result


def test_causes_of_what_is_compiled_late() -> None:
    by_data = Event(
        "recompile", 0.0, None, {"reason": "`stack[1]` was 0, is 1", "decided_by": "what ran at the graph break"}
    )
    by_size = Event("recompile", 0.0, None, {"reason": "`x.shape[0]` was 2, is 3"})
    before = [(2, 12), (3, 9), (5, 7)]

    def causes(events: list[Event], parts: dict[str, list[int]], sizes: tuple[int, int] = (4, 11)) -> list[str]:
        return [text.split(" (")[0] for text in dynamic_runner._late(events, parts, before, sizes)]

    assert causes([by_data], {"start": [1, 2, 2, 3]}) == ["by data"]
    assert causes([by_size, by_data], {"start": [1, 2, 2, 3]}) == ["by sizes", "by data"]
    assert causes([], {"start": [1, 2, 2, 2], "1": [0, 0, 0, 1]}) == ["by data"]
    assert causes([by_size], {"start": [1, 2, 2, 3], "1": [0, 0, 0, 1]}) == ["by sizes", "by sizes"]
    before = [(2, 12), (3, 12), (5, 12)]
    assert causes([by_size], {"start": [1, 2, 2, 3]}, (2, 6)) == ["by a first change"]
    assert dynamic_runner._once_more({"start": [1, 2, 2, 3]}, ["by data (4, 11): ..."])
    assert not dynamic_runner._once_more({"start": [1, 2, 2, 3]}, ["by sizes (4, 11): ..."])
    assert not dynamic_runner._once_more({"start": [1, 3, 3, 3]}, [])
