"""The examples of ``examples/`` train to eager's numbers, and without a fall-back."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import dovetail
from dovetail.errors import EagerFallbackWarning

FOLDER = Path(__file__).parents[1] / "examples"
NAMES = ["energy_and_forces", "pinn", "wgan_gp", "maml", "hessian_vector"]


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("backend", ["aten", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("whole", [False, True], ids=["part", "whole"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.sampled(2)
def test_example(name: str, whole: bool, backend: str) -> None:
    module = load(name)
    expected = module.train(lambda function: function, whole=whole)
    with warnings.catch_warnings():
        warnings.simplefilter("error", EagerFallbackWarning)
        actual = module.train(lambda function: dovetail.compile(function, backend=backend, fullgraph=True), whole=whole)
    # After some steps of an optimizer, rounding has grown a little.
    torch.testing.assert_close(torch.tensor(actual), torch.tensor(expected), rtol=1e-5, atol=1e-7)
