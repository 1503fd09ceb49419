"""Typical mistakes: the message names the user's line first, says what is wrong, and shows nothing of Dovetail's inside."""

from __future__ import annotations

import functools
import logging
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import dovetail
from dovetail import errors
from dovetail.reports.messages import INTERNALS, is_library
from tests import layout
from tests.face.mistakes import MISTAKES, SHORTEST, Mistake, lines_of, printed

ours = functools.partial(dovetail.compile, backend="aten")


def counted() -> dict[str, tuple[str, str]]:
    """The table of the docs: the lines that torch.compile and Dovetail print, by mistake."""
    page = (layout.ROOT / "docs" / "messages.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.+?) \| (\d+|silent) \| \w* \| (\d+|silent) \| \w* \|$", page, re.MULTILINE)
    return {name: (torchs, own) for name, torchs, own in rows}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_mistake(mistake: Mistake, tmp_path: Path) -> None:
    text = printed(mistake, ours, tmp_path, ours=True)
    assert mistake.line in text and all(part in text for part in mistake.says), text
    last = next((line for line in text.splitlines()[::-1] if re.match(r"[\w.]+(:|$)", line)), "")
    assert mistake.raises in last.split(":")[0] if mistake.raises else "Traceback" not in text, text
    assert text.count("GraphBreakWarning") <= 1 and "Break:" not in text and "\x1b" not in text
    shown = re.findall(r'File "([^"]*)"', text)
    assert not [file for file in shown if file.startswith(str(layout.PACKAGE)) and not file.endswith("face/module.py")]
    torchs = counted()[mistake.name][0]
    # The table was counted on Python 3.11; tracebacks of 3.13 and later show an expression of several lines whole, torch's too.
    assert torchs == "silent" or sys.version_info >= (3, 13) or lines_of(text) <= int(torchs), text


def test_ours_are_shorter_than_torchs_in_the_table() -> None:
    table = counted()
    assert list(table) == [mistake.name for mistake in MISTAKES] and len(table) >= 30
    said = {
        name: (int(own.replace("silent", "0")), int(torchs))
        for name, (torchs, own) in table.items()
        if torchs != "silent"
    }
    assert not [name for name, (own, torchs) in said.items() if own >= torchs] and len(said) >= 25


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="Python says there itself which keyword was meant")
def test_the_one_that_is_as_long_says_what_was_meant(tmp_path: Path) -> None:
    compilers = {"torch": torch.compile, "ours": ours}
    texts = {name: printed(SHORTEST, item, tmp_path, ours=name == "ours") for name, item in compilers.items()}
    # More where a library has wrapped torch.compile.
    assert lines_of(texts["ours"]) == 5 <= lines_of(texts["torch"])
    assert SHORTEST.line in texts["ours"] and all(part in texts["ours"] for part in SHORTEST.says)
    assert "did you mean" not in texts["torch"]


class Checked(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert (x >= 0).all(), "negative"
        return self.linear(x)


@pytest.mark.parametrize("fullgraph", (False, True))
@pytest.mark.parametrize("whole", (False, True))
def test_a_later_call_that_fails_has_eagers_frames_only(fullgraph: bool, whole: bool) -> None:
    original = Checked()
    compiled = ours(original if whole else original.forward, fullgraph=fullgraph)
    eager = original if whole else original.forward
    compiled(torch.ones(2, 3))
    for bad in (-torch.ones(2, 3), torch.ones(2, 4), "no tensor"):
        frames = []
        for function in (eager, compiled):
            with pytest.raises((AssertionError, RuntimeError, TypeError)) as caught:
                function(bad)
            frames.append([item.name for item in caught.traceback][1:])
        assert frames[0] == frames[1]


def test_the_error_of_a_backward_has_no_frames_of_ours() -> None:
    weight = torch.ones(3, requires_grad=True)
    loss = dovetail.compile(lambda x: (x * weight).sin().sum(), backend="aten")(torch.ones(3))
    loss.backward()
    with pytest.raises(RuntimeError, match="a second time") as caught:
        loss.backward()
    assert not [item for item in caught.traceback if str(item.path).startswith(str(layout.PACKAGE))]


def test_an_error_of_a_hook_in_the_backward_has_its_frame() -> None:
    def hook(gradient: torch.Tensor) -> None:
        raise ValueError("the user's own")

    class Halved(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x / 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient / 2

    x = torch.ones(3, requires_grad=True)
    x.register_hook(hook)
    loss = dovetail.compile(lambda x: Halved.apply(x.sin()).sum(), backend="aten")(x)
    with pytest.raises(ValueError, match="the user's own") as caught:
        loss.backward()
    assert caught.traceback[-1].name == "hook"


def test_a_fault_of_our_own_in_a_backward_keeps_its_frames() -> None:
    weight = torch.ones(3, requires_grad=True)
    loss = dovetail.compile(lambda x: (x * weight).sin().sum(), backend="aten")(torch.ones(3))
    loss.grad_fn.call.graph._differentiable = (99,)
    with pytest.raises(IndexError) as caught:
        loss.backward()
    # They say where the fault is.
    assert str(caught.traceback[-1].path).startswith(str(layout.PACKAGE))


def test_a_break_error_can_be_caught_and_says_where() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x

    with pytest.raises(errors.GraphBreakError) as caught:
        dovetail.compile(step, backend="aten", fullgraph=True)(torch.ones(2))
    assert caught.value.where is not None and caught.value.where.text == "return x if x.sum() > 0 else -x"
    frames = [item.path for item in caught.traceback]
    assert [Path(frame).name for frame in frames] == ["test_mistakes.py"]


def test_the_inside_is_shown_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        print(end="")
        return x

    monkeypatch.setenv(INTERNALS, "1")
    with pytest.raises(errors.GraphBreakError) as caught:
        dovetail.compile(step, backend="aten", fullgraph=True)(torch.ones(2))
    assert caught.value.__cause__ is not None and len(caught.traceback) > 2


def test_breaks_of_one_call_are_one_warning_and_each_is_an_event() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        print(end="")
        x = x.sin()
        print(end="")
        return x.cos()

    compiled = dovetail.compile(step, backend="aten")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compiled(torch.ones(2))
        compiled(torch.ones(2))
    assert len(caught) == 1 and str(caught[0].message).endswith("1 more in this call: DOVETAIL_LOG=breaks shows it")
    assert caught[0].filename == __file__
    assert compiled.events.count("graph break") == 2


def test_a_warning_that_is_an_error_leaves_the_next_call_as_it_is() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        print(end="")
        return x.sin()

    compiled = dovetail.compile(step, backend="aten")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(errors.GraphBreakWarning):
            compiled(torch.ones(2))
        assert torch.equal(compiled(torch.ones(2)), torch.ones(2).sin())


def test_an_error_after_a_break_comes_with_the_warning() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        print(end="")
        raise ValueError("the user's own")

    with (
        pytest.warns(errors.GraphBreakWarning, match="print writes"),
        pytest.raises(ValueError, match="the user's own"),
    ):
        dovetail.compile(step, backend="aten")(torch.ones(2))


def test_an_error_of_the_program_goes_on_where_warnings_are_errors() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        warnings.warn("the user's own", DeprecationWarning, stacklevel=2)
        return x.sin()

    compiled = dovetail.compile(step, backend="aten")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(DeprecationWarning, match="the user's own"):
            compiled(torch.ones(2))


def test_a_function_inside_of_another_call_warns_with_it() -> None:
    @dovetail.compile(backend="aten")
    def inside(x: torch.Tensor) -> torch.Tensor:
        print(end="")
        return x.sin()

    @dovetail.disable
    def eagerly(x: torch.Tensor) -> torch.Tensor:
        return inside(x)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dovetail.compile(lambda x: eagerly(x) + 1, backend="aten")(torch.ones(2))
    assert len(caught) == 1


def test_files_of_libraries() -> None:
    assert is_library(logging.__file__) and is_library(torch.nn.__file__) and is_library(dovetail.__file__)
    assert is_library("/home/me/.venv/lib/python3.11/site-packages/transformers/trainer.py")
    assert not is_library(__file__) and not is_library("<ipython-input-1>")


def test_each_class_of_error_has_its_place_in_troubleshooting() -> None:
    page = (layout.ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    names = [
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, (errors.DovetailError, Warning)) and value is not Warning
    ]
    assert names and all(f"\n## {name}\n" in page for name in names)
