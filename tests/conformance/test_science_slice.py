"""The runner of trainings with scientific packages, on programs that need none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.conformance import science_runner
from tests.conformance.science_programs import PROGRAMS, Batch, Program, Training
from tests.conformance.science_runner import check


def _training(change: float = 0.0) -> Program:
    built: list[Training] = []

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        # The compiled training is built second, and nothing else of it.
        return model(batch["x"]).square().mean() * (1.0 + change * (len(built) == 2))

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


def test_an_old_version_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PROGRAMS, "own", Program(("torch.nn:NoSuchLayer",), _training().build))
    found = check("own", "step", "dovetail-with-breaks", 2)
    assert (found.verdict, found.kind) == ("refused", "missing")
    assert "torch.nn:NoSuchLayer" in found.reason


def test_a_package_that_raises_at_import_is_refused_in_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "raising_package_of_science.py").write_text("raise RuntimeError('not with this torch')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(PROGRAMS, "own", Program(("raising_package_of_science",), _training().build))
    found = check("own", "step", "dovetail-with-breaks", 2)
    assert (found.verdict, "not with this torch" in found.reason) == ("refused", True)


def test_what_torch_alone_cannot_train_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        raise TypeError("the package is too old")

    build = lambda: Training(nn.Linear(2, 1), lambda seed: {}, loss)  # noqa: E731
    monkeypatch.setitem(PROGRAMS, "own", Program((), build))
    found = check("own", "step", "dovetail-with-breaks", 2)
    assert (found.verdict, found.reason) == ("eager cannot", "TypeError: the package is too old")


def test_a_program_that_differs_from_itself_is_no_wrong_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def build() -> Training:
        seen.append(1)
        return Training(nn.Linear(2, 1), lambda seed: {"x": torch.full((3, 2), 1.0 + len(seen))}, _square)

    monkeypatch.setitem(PROGRAMS, "own", Program((), build))
    found = check("own", "model", "dovetail-with-breaks", 1)
    assert (found.verdict, found.kind) == ("eager cannot", "varies")


def _square(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch["x"]).square().mean()


def test_a_package_that_is_against_compiled_models_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PROGRAMS, "own", Program((), _training().build, "it looks at the model's class"))
    found = check("own", "model", "dovetail-with-breaks", 1)
    assert (found.verdict, found.reason) == ("not applicable", "it looks at the model's class")
