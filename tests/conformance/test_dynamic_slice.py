"""Models of the dynamic runner: one with two graphs for all sizes, one with tensors made of sizes, one with a branch on a size."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from tests.conformance import dynamic_runner


@pytest.mark.parametrize(
    ("name", "verdict"),
    [
        pytest.param("gpt2", "passed"),
        pytest.param("deberta", "passed", marks=pytest.mark.slow),
        pytest.param("mistral", "passed", marks=pytest.mark.slow),
    ],
)
def test_model(name: str, verdict: str) -> None:
    result = dynamic_runner.check_model(name)
    assert result.verdict == verdict, result
