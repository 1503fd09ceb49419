"""A Hugging Face model with its whole training step compiled; ten of them, by Inductor, with --slow."""

from __future__ import annotations

import importlib.util
import warnings

import pytest

from tests.conformance.step_runner import TEN, train

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)


@pytest.mark.slow
def test_a_step_by_aten_is_eagers_to_the_last_bit() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = train("bert", "aten")
    assert (found.loss, found.gradients, found.weights) == (0.0, 0.0, 0.0)
    assert found.captures <= 2 and found.breaks == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", TEN)
def test_a_step_by_inductor_is_close_to_eagers(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = train(name, "inductor")
    # Adam divides by the gradients' size, so weights whose gradients are rounding alone move by up to the rate.
    assert found.loss < 1e-5 and found.gradients < 1e-4 and found.weights < 1e-4
    assert found.captures <= 2 and found.breaks == 0
