"""Exceptions beside the ordinary ones: raised by the program they are eager's, and an interrupt of the capture undoes the call."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import dovetail
from dovetail.torch_private.state import dispatch_mode_count
from dovetail.trace import overrides


@pytest.fixture(autouse=True)
def _nothing_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators that were recorded before, in any test, do not ask the modes that these tests interrupt."""
    monkeypatch.setattr("dovetail.fast_capture.operators.MEMORIES", {})


class StopNow(BaseException):
    """Neither an error nor an interrupt."""


class Task:
    """Counts, and raises at the second call."""

    def __init__(self, error: Callable[[], BaseException]) -> None:
        self.error, self.calls, self.log, self.total = error, 0, [], torch.zeros(2)

    def state(self) -> Any:
        return self.calls, list(self.log), self.total.tolist()

    def plain(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.total.add_(x)
        self.log.append(self.calls)
        if self.calls == 2:
            raise self.error()
        return x * 2

    def in_a_called_function(self, x: Tensor) -> Tensor:
        return self.plain(x) + 1

    def with_finally(self, x: Tensor) -> Tensor:
        try:
            return self.plain(x)
        finally:
            self.total.mul_(2)
            self.log.append("finally")

    def handled(self, x: Tensor) -> Tensor:
        try:
            return self.plain(x)
        except BaseException as error:  # noqa: BLE001  (the subject of the test)
            self.log.append(type(error).__name__)
            return x * 3

    def raised_again(self, x: Tensor) -> Tensor:
        try:
            return self.plain(x)
        except BaseException:
            self.log.append("again")
            raise

    def passed_by(self, x: Tensor) -> Tensor:
        try:
            return self.plain(x)
        except (StopIteration, ZeroDivisionError):
            self.log.append("of another kind")
            return x
        finally:
            self.log.append("left")

    def after_a_graph_break(self, x: Tensor) -> Tensor:
        y = x.sum().item() + x
        return self.plain(y)


PROGRAMS = (
    "plain",
    "in_a_called_function",
    "with_finally",
    "handled",
    "raised_again",
    "passed_by",
    "after_a_graph_break",
)


def run(task: Task, call: Callable[[Tensor], Tensor]) -> list[Any]:
    out: list[Any] = []
    for _ in range(4):
        try:
            out.append(call(torch.ones(2)).tolist())
        except BaseException as error:  # noqa: BLE001  (the subject of the test)
            out.append(f"{type(error).__name__}: {error}")
        out.append(task.state())
    return out


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, StopNow, GeneratorExit])
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.sampled(4)
def test_what_the_program_raises_keeps_its_writes(program: str, error: type[BaseException]) -> None:
    eager, task = Task(lambda: error("now")), Task(lambda: error("now"))
    expected = run(eager, getattr(eager, program))
    assert run(task, dovetail.compile(getattr(task, program), backend="aten")) == expected


def test_an_interrupt_while_capturing_goes_to_the_caller_and_to_no_handler_of_the_program() -> None:
    log: list[str] = []
    # A process that a shell has started in the background ignores it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupt(*args: Any) -> Any:
        signal.raise_signal(signal.SIGINT)

    def program(x: Tensor) -> Tensor:
        log.append("begun")
        try:
            return x.sin() + x.cos()
        except KeyboardInterrupt:
            log.append("handled")
            return x

    compiled = dovetail.compile(program, backend="aten")
    original = torch._subclasses.fake_tensor.FakeTensorMode.__torch_dispatch__
    torch._subclasses.fake_tensor.FakeTensorMode.__torch_dispatch__ = interrupt  # type: ignore[method-assign]
    try:
        with pytest.raises(KeyboardInterrupt):
            compiled(torch.ones(2))
    finally:
        torch._subclasses.fake_tensor.FakeTensorMode.__torch_dispatch__ = original  # type: ignore[method-assign]
        signal.signal(signal.SIGINT, before)
    assert log == []
    assert torch.equal(compiled(torch.ones(2)), torch.ones(2).sin() + torch.ones(2).cos())
    assert log == ["begun"]


def test_an_interrupt_while_a_mode_is_entered_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        def __enter__(self) -> None:
            # What Python does where the interrupt comes between the two: nobody has taken note of the mode yet.
            TorchDispatchMode().__enter__()
            raise KeyboardInterrupt

        def __exit__(self, *error: object) -> None:
            raise AssertionError("it was not entered")

    compiled = dovetail.compile(lambda x: x.sin(), backend="aten")
    modes = dispatch_mode_count()
    with monkeypatch.context() as patched:
        patched.setattr(overrides, "WHILE_OPEN", [*overrides.WHILE_OPEN, Interrupted])
        patched.setattr("dovetail.trace.trace.WHILE_OPEN", overrides.WHILE_OPEN)
        with pytest.raises(KeyboardInterrupt):
            compiled(torch.ones(2))
    assert dispatch_mode_count() == modes
    assert torch.equal(compiled(torch.ones(2)), torch.ones(2).sin())


@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError, StopNow])
@pytest.mark.parametrize("attribute", ["__enter__", "__torch_dispatch__"])
def test_a_handler_of_a_signal_runs_where_no_mode_is_half_entered(
    attribute: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch ends the process when a mode was entered that nobody leaves."""
    log: list[str] = []
    places: list[str] = []

    def handler(number: int, frame: Any) -> None:
        places.append("in torch" if dispatch_mode_count() else "outside")
        raise error("a signal")

    def program(x: Tensor) -> Tensor:
        log.append("begun")
        try:
            return x.sin() * x
        except error:
            log.append("handled")
            return x

    mode = torch._subclasses.fake_tensor.FakeTensorMode
    whole = getattr(mode, attribute)

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        signal.raise_signal(signal.SIGTERM)
        monkeypatch.setattr(mode, attribute, whole)
        return whole(*args, **kwargs)

    before = signal.signal(signal.SIGTERM, handler)
    compiled = dovetail.compile(program, backend="aten")
    try:
        monkeypatch.setattr(mode, attribute, interrupted)
        with pytest.raises(error, match="a signal"):
            compiled(torch.ones(2))
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (places, log) == (["outside"], [])
    assert torch.equal(compiled(torch.ones(2)), torch.ones(2).sin())
    assert log == ["begun"]


def test_a_handler_that_only_takes_note(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    mode = torch._subclasses.fake_tensor.FakeTensorMode
    whole = mode.__torch_dispatch__

    def noted(*args: Any, **kwargs: Any) -> Any:
        signal.raise_signal(signal.SIGTERM)
        return whole(*args, **kwargs)

    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        monkeypatch.setattr(mode, "__torch_dispatch__", noted)
        compiled = dovetail.compile(lambda x: x.sin() * x, backend="aten", fullgraph=True)
        assert torch.equal(compiled(torch.ones(2)), torch.ones(2).sin())
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen and set(seen) == {signal.SIGTERM}
