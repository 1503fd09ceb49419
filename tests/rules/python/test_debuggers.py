"""A debugger stops in the frame of the program, with its variables."""

from __future__ import annotations

import io
import pdb
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

import dovetail
from dovetail.errors import EagerFallbackWarning, GraphBreakError


def inner(values: Tensor) -> Tensor:
    local = values * 2
    breakpoint()
    return local + 1


def outer(values: Tensor) -> Tensor:
    secret = values + 1
    return inner(secret)


def test_breakpoint_stops_in_the_programs_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    stops: list[tuple[str, str, list[str]]] = []

    def hook(*args: Any, **kwargs: Any) -> None:
        frame = sys._getframe(1)
        assert frame.f_back is not None
        stops.append((frame.f_code.co_name, frame.f_back.f_code.co_name, sorted(frame.f_locals)))

    monkeypatch.setattr(sys, "breakpointhook", hook)
    compiled = dovetail.compile(outer, backend="aten")
    with pytest.warns(EagerFallbackWarning, match="breakpoint stops the program"):
        compiled(torch.ones(2))
    assert compiled(torch.ones(2)).tolist() == [5, 5]
    assert stops == [("inner", "outer", ["local", "values"])] * 2
    with pytest.raises(GraphBreakError, match="breakpoint"):
        dovetail.compile(outer, backend="aten", fullgraph=True)(torch.ones(2))


def test_pdb_by_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def program(values: Tensor) -> Tensor:
        secret = values + 1
        pdb.Pdb(stdin=io.StringIO("p sorted(locals())\nc\n"), stdout=shown).set_trace()
        return secret

    shown = io.StringIO()
    compiled = dovetail.compile(program, backend="aten")
    with pytest.warns(EagerFallbackWarning):
        assert compiled(torch.ones(2)).tolist() == [2, 2]
    assert "program()" in shown.getvalue() and "'secret', 'shown'" in shown.getvalue()
    assert "machine.py" not in shown.getvalue()
