"""What reaches the user of an error that the program does not raise: a warning with the user's line, and eager's own errors."""

from __future__ import annotations

import dataclasses
import json
import logging
import multiprocessing
import os.path
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail
from dovetail.backends.registry import lookup_backend
from dovetail.errors import BackendError, EagerFallbackWarning, GraphBreakError, GraphBreakWarning
from dovetail.face.dispatcher import compile_lock
from tests.differential import same


class _Secret(RuntimeError):
    pass


def _breaks_for(monkeypatch: pytest.MonkeyPatch, kinds: set[str]) -> None:
    """Inductor that raises while it compiles graphs of these kinds, and computes as it is else."""

    def compiler(graph: torch.fx.GraphModule, example_inputs: Any, *, kind: str, options: Any) -> Any:
        if kind in kinds:
            raise _Secret("the compiler is broken")
        return lambda inputs: list(graph(*inputs))

    broken = dataclasses.replace(lookup_backend("inductor"), compile=compiler)
    monkeypatch.setattr("dovetail.backends.inductor.backend.INDUCTOR", broken)


@pytest.mark.parametrize("kinds", [{"forward"}, {"backward"}, {"inference"}, {"forward", "backward", "inference"}])
def test_a_backend_that_does_not_work_here(monkeypatch: pytest.MonkeyPatch, kinds: set[str]) -> None:
    _breaks_for(monkeypatch, kinds)

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        with torch.no_grad():
            z = y * 2
        return y * z

    compiled = dovetail.compile(function, backend="inductor")
    expected, actual = (torch.ones(3, requires_grad=True) for _ in range(2))
    function(expected).sum().backward()
    function(torch.ones(3))
    with pytest.warns(EagerFallbackWarning, match="(?s)compiler is broken.*what to do"):
        compiled(actual).sum().backward()
        same(function(torch.ones(3)), compiled(torch.ones(3)))
    same(expected.grad, actual.grad)
    if "forward" in kinds:
        with pytest.raises(BackendError, match="compiler is broken"):
            dovetail.compile(function, backend="inductor", fullgraph=True)(torch.ones(3, requires_grad=True))


MISTAKES: list[Callable[[torch.Tensor], Any]] = [
    lambda x: x @ torch.ones(3, 3),
    lambda x: torch.cat([x, torch.ones(4, 4, 4)]),
    lambda x: x.reshape(7, 5),
    lambda x: torch.nn.functional.cross_entropy(x, torch.ones(3, dtype=torch.long)),
    lambda x: x[:, torch.tensor([100])],
]


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("number", range(len(MISTAKES)))
def test_a_mistake_has_eagers_words_and_no_log(
    number: int, dynamic: bool, fullgraph: bool, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    function, x = MISTAKES[number], torch.randn(2, 8)
    with pytest.raises(Exception) as expected:  # noqa: PT011
        function(x)
    with caplog.at_level(logging.WARNING), pytest.raises(type(expected.value)) as actual:
        dovetail.compile(function, backend="aten", fullgraph=fullgraph, dynamic=dynamic)(x)
    assert str(actual.value) == str(expected.value)
    assert not caplog.records and not any(capfd.readouterr())


def test_a_caught_mistake_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        try:
            return x @ torch.ones(3, 3)
        except RuntimeError:
            return x + 1

    with pytest.warns(GraphBreakWarning), caplog.at_level(logging.WARNING):
        same(function(torch.ones(1, 2)), dovetail.compile(function, backend="aten")(torch.ones(1, 2)))
    assert not caplog.records


def test_torchs_own_log_outside_of_captures() -> None:
    dovetail.compile(lambda x: x + 1, backend="aten")(torch.ones(2))
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    assert logger.filter(logging.LogRecord(logger.name, logging.ERROR, "", 0, "", (), None))


def _with_json(x: torch.Tensor) -> torch.Tensor:
    return x * len(json.dumps({"a": 1}))  # the line


def _with_path(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if os.path.exists("/") else x  # the line


@pytest.mark.parametrize("function", [_with_json, _with_path])
def test_a_break_in_the_standard_library_names_the_users_line(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with pytest.raises(GraphBreakError) as caught:
        dovetail.compile(function, backend="aten", fullgraph=True)(torch.ones(3))
    assert caught.value.where is not None
    assert caught.value.where.file == __file__ and "# the line" in caught.value.where.text


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_pass_that_raises_is_named_with_its_line() -> None:
    def careless(joint: dovetail.JointGraph) -> None:
        raise KeyError("nothing")

    line = careless.__code__.co_firstlineno + 1
    says = f"KeyError: 'nothing'; raised by the pass careless at {os.path.basename(__file__)}:{line}"
    layer, x = torch.nn.Linear(3, 2), torch.ones(4, 3)
    with pytest.warns(EagerFallbackWarning) as caught:
        same(layer(x), dovetail.compile(layer, backend="aten", passes=(careless,))(x))
    assert says in str(caught[0].message).replace(os.path.dirname(__file__) + os.sep, "")
    with pytest.raises(KeyError) as error:
        dovetail.capture(layer, (x,)).apply(careless)
    assert "raised by the pass careless" in error.value.__notes__[0]


def test_what_a_refused_call_wrote_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            x.add_(torch.rand(3))
            y[0].zero_()
        return x * y

    def broken(*args: object) -> None:
        raise _Secret("a kernel of torch's does not work")

    monkeypatch.setattr("dovetail.face.attempts.capture_joint", broken)
    x, y = torch.ones(3), torch.ones(2, 3, requires_grad=True)
    state = torch.get_rng_state()
    with pytest.raises(GraphBreakError, match="does not work"):
        dovetail.compile(function, backend="aten", fullgraph=True)(x, y)
    assert torch.equal(x, torch.ones(3)) and torch.equal(y, torch.ones(2, 3))
    assert torch.equal(torch.get_rng_state(), state)


def test_a_child_forked_while_another_thread_compiles() -> None:
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with compile_lock:
            held.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(60)
    compiled = dovetail.compile(lambda x: x * 2, backend="aten")
    child = multiprocessing.get_context("fork").Process(target=compiled, args=(torch.ones(2),))
    child.start()
    child.join(60)
    code = child.exitcode
    if code is None:
        child.kill()
    done.set()
    thread.join()
    assert code == 0
