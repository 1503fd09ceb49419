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
    breaks = [event for event in dovetail.events_of(compiled).events if event.name == "graph break"]
    if program is not minimised:
        # One call into the library; .numpy() is a break of its own.
        assert sum("site-packages" in str(event) for event in breaks) == 1


@pytest.mark.filterwarnings("ignore")
def test_an_attribute_of_a_native_object(monkeypatch: pytest.MonkeyPatch) -> None:
    function = scipy.linalg.lapack.dpotrf
    monkeypatch.setattr(function, "seen", 0, raising=False)

    def program(x: torch.Tensor) -> torch.Tensor:
        function.seen = 3
        return x * function.seen

    compiled = dovetail.compile(program, backend="aten")
    for before in (5, 6, 7):
        function.seen = before
        assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 3.0))
        assert function.seen == 3
