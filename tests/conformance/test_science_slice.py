"""The runner of trainings with scientific packages, on programs that need none."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.conformance import science_runner
from tests.conformance.science_programs import PROGRAMS, Batch, Program, Training
from tests.conformance.science_runner import check


def _training(change: float = 0.0) -> Program:
    built: list[Training] = []

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        # The compiled training is built second.
        return model(batch["x"]).square().mean() * (1.0 + change * (len(built) % 2 == 0))

    def build() -> Training:
        built.append(Training(nn.Linear(2, 1), lambda seed: {"x": torch.full((3, 2), seed + 1.0)}, loss))
        return built[-1]

    return Program((), build)


def test_a_missing_package_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PROGRAMS, "own", Program(("no_such_package_of_science",), _training().build))
    found = check("own", "step", "dovetail-with-breaks", 2)
    assert (found.verdict, found.kind) == ("refused", "missing")
    assert "no_such_package_of_science" in found.reason


def test_equal_numbers_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PROGRAMS, "own", _training())
    assert check("own", "model", "dovetail-with-breaks", 2).kind == "equal"


def test_other_numbers_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PROGRAMS, "own", _training(0.1))
    monkeypatch.setitem(science_runner.COMPILERS, "identity", lambda function: function)
    monkeypatch.setattr(
        science_runner.dovetail, "events_of", lambda compiled: type("E", (), {"count": lambda self, name: 0})()
    )
    assert check("own", "step", "identity", 2).verdict == "wrong"
