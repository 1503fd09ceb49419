"""The nine model families of the conformance runner; three quick ones by default, all of them with ``--slow``."""

from __future__ import annotations

import importlib.util

import pytest

from tests.conformance import compilers, model_runner

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)
QUICK = ("gpt2", "vit", "resnet")


@pytest.mark.parametrize("mode", model_runner.MODES)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in model_runner.CORE]
)
@pytest.mark.sampled(2)
def test_model(name: str, mode: str) -> None:
    (result,) = model_runner.run_here([name], [mode], compilers.COMPILERS["dovetail"])
    assert result.verdict == "passed", result


def test_harness_accepts_eager_and_finds_a_lost_gradient() -> None:
    (result,) = model_runner.run_here(["resnet"], ["train"], lambda model: model)
    assert result.verdict == "passed", result

    def freeze(model):
        next(model.parameters()).requires_grad_(False)
        return model

    (result,) = model_runner.run_here(["resnet"], ["train"], freeze)
    assert result.verdict == "wrong"
    assert "gradients" in result.reason


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in model_runner.FACTORIES if name not in model_runner.CORE])
def test_further_families_build_and_train_in_eager(name: str) -> None:
    (result,) = model_runner.run_here([name], ["train"], lambda model: model)
    assert result.verdict == "passed", result
