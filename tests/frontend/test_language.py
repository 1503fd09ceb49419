"""The whole Python language: every program of language.py compiled against eager, and by the frame machine against Python."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dovetail
from dovetail.errors import GraphBreakError
from tests.differential import same
from tests.frontend.language import CASES, Case, plain
from tests.frontend.machine_language import run_by_machine

BY_NAME = {case.name: case for case in CASES}


@pytest.fixture(params=list(BY_NAME))
def case(request: Any) -> Case:
    return BY_NAME[request.param]


def tensor() -> torch.Tensor:
    return torch.tensor([1.5, -2.0])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("backend", ["eager", "aten"])
def test_compiled_as_eager(case: Case, backend: str) -> None:
    torch.compiler.reset()
    expected = plain(case.function(tensor()))
    if case.breaks is not None:
        with pytest.raises(GraphBreakError, match=case.breaks):
            dovetail.compile(case.function, fullgraph=True, backend=backend)(tensor())
    compiled = dovetail.compile(case.function, fullgraph=case.breaks is None, backend=backend)
    for _ in range(2):
        same(plain(compiled(tensor())), expected)


def test_machine_as_python(case: Case) -> None:
    assert plain(run_by_machine(case.function, 1.5)) == plain(case.function(1.5))
