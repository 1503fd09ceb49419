"""Libraries that know no tensors, called by a compiled function."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import scipy.linalg
import scipy.optimize
import torch

import dovetail
from tests.differential import same


def factorised(x: torch.Tensor) -> torch.Tensor:
    factor = scipy.linalg.cholesky(numpy.eye(3) * 2)
    return x * float(factor[0, 0])


def solved(x: torch.Tensor) -> torch.Tensor:
    array = x.detach().numpy()
    return torch.from_numpy(scipy.linalg.solve(array, array)) + x


def minimised(x: torch.Tensor) -> torch.Tensor:
    def loss(point: Any) -> float:
        return float((x.detach() - torch.as_tensor(point, dtype=x.dtype)).square().sum())

    return x * float(scipy.optimize.minimize(loss, [0.0, 0.0]).fun)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("program", [factorised, solved, minimised])
def test_a_call_runs_as_a_whole(program: Any) -> None:
    compiled = dovetail.compile(program, backend="aten")
    for scale in (1.0, 2.0):
        x = torch.tensor([[2.0, 1.0], [0.0, 3.0]]) * scale
        same(program(x), compiled(x))
    if program is not minimised:
        assert dovetail.events_of(compiled).count("graph break") <= 3


def test_an_attribute_of_a_native_object() -> None:
    function = scipy.linalg.lapack.dpotrf

    def program(x: torch.Tensor) -> torch.Tensor:
        function.seen = 3
        return x * function.seen

    assert torch.equal(dovetail.compile(program, backend="aten")(torch.ones(2)), torch.full((2,), 3.0))
    assert function.seen == 3
