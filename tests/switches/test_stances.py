"""Stances, torch's and our own; ``reset``; torch's settings that have a meaning here."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dovetail
from dovetail.errors import GraphBreakWarning, OptionError, RecompileError, RecompileLimitError
from dovetail.runtime.entry import Entry
from dovetail.switches import settings, stances
from dovetail.switches.stances import STANCES, stance_in_force

ROOT = Path(__file__).parents[2]
SETTERS = pytest.mark.parametrize("setter", (torch.compiler.set_stance, dovetail.set_stance), ids=("torch", "ours"))


@pytest.fixture(autouse=True)
def _no_stance_is_left() -> Iterator[None]:
    yield
    assert stance_in_force() == "default"


def graphs(compiled: Any) -> int:
    return dovetail.events_of(compiled).count("compile forward")


def doubled(values: Tensor) -> Tensor:
    return values * 2


@pytest.fixture(autouse=True)
def _warns_of_nothing() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GraphBreakWarning)
        yield


def broken(values: Tensor) -> Tensor:
    values = values * 2
    print(end="")
    return values + 1


@SETTERS
@pytest.mark.parametrize("fullgraph", (False, True))
def test_everything_runs_eagerly(setter: Any, fullgraph: bool) -> None:
    compiled = dovetail.compile(doubled, backend="aten", fullgraph=fullgraph)
    compiled(torch.ones(2))
    with setter("force_eager"):
        for size in (2, 3):
            assert compiled(torch.ones(size)).tolist() == [2.0] * size
    assert (graphs(compiled), len(compiled.entries)) == (1, 1)
    compiled(torch.ones(2))
    assert graphs(compiled) == 1


@SETTERS
@pytest.mark.parametrize("program", (doubled, broken))
def test_what_is_compiled_is_used(setter: Any, program: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = dovetail.compile(program, backend="aten")
    expected = program(torch.ones(2, 3))
    compiled(torch.ones(2, 3))
    made, hits, call = graphs(compiled), [], Entry.call
    monkeypatch.setattr(Entry, "call", lambda *args: (hits.append(1), call(*args))[1])
    with setter("eager_on_recompile"):
        assert torch.equal(compiled(torch.ones(2, 3)), expected)
        assert torch.equal(compiled(torch.ones(3)), program(torch.ones(3)))
    with setter("fail_on_recompile"):
        assert torch.equal(compiled(torch.ones(2, 3)), expected)
        with pytest.raises(
            RecompileError, match=r"would be compiled, and the stance 'fail_on_recompile'.*`values.dim\(\)`"
        ):
            compiled(torch.ones(3))
    assert graphs(compiled) == made and len(hits) == 2 * made


def test_never_compiled_and_not_to_be() -> None:
    compiled = dovetail.compile(doubled, backend="aten")
    with dovetail.set_stance("fail_on_recompile"), pytest.raises(RecompileError, match="has not been compiled yet"):
        compiled(torch.ones(2))
    with dovetail.set_stance("eager_on_recompile"):
        assert compiled(torch.ones(2)).tolist() == [2, 2]
    assert not compiled.entries


@SETTERS
@pytest.mark.parametrize("stance", ("eager_then_compile", "aot_eager_then_compile"))
def test_the_second_call_is_compiled(setter: Any, stance: str) -> None:
    compiled, made = dovetail.compile(broken, backend="aten"), []
    x = torch.ones(2, requires_grad=True)
    with setter(stance):
        for _ in range(4):
            compiled(x).sum().backward()
            made.append(graphs(compiled))
    assert made[0] == 0 < made[1] and made[2] == made[3]
    assert x.grad is not None and x.grad.tolist() == [8, 8]
    compiled(x)
    assert graphs(compiled) == made[3]


def test_as_a_function_a_block_and_a_decorator() -> None:
    compiled = dovetail.compile(doubled, backend="aten")

    @dovetail.set_stance("force_eager")
    def step() -> Tensor:
        assert stance_in_force() == "force_eager"
        return compiled(torch.ones(1))

    assert stance_in_force() == "default"
    step()
    with dovetail.set_stance("eager_on_recompile"):
        step()
        assert stance_in_force() == "eager_on_recompile"
    dovetail.set_stance("force_eager")
    compiled(torch.ones(1))
    dovetail.set_stance("default")
    assert not compiled.entries
    with pytest.raises(OptionError, match=r"no stance 'force_eagr'(.|\n)*did you mean 'force_eager'"):
        dovetail.set_stance("force_eagr")


@pytest.mark.parametrize("setter", (torch.compiler.set_stance, dovetail.set_stance), ids=("torch", "ours"))
def test_set_in_a_compiled_function(setter: Any) -> None:
    inner = dovetail.compile(doubled, backend="aten")
    seen = []

    def program(values: Tensor) -> Tensor:
        values = values + 1
        with setter("force_eager"):
            values = inner(values)
            seen.append(stance_in_force())
        return values + 1

    compiled = dovetail.compile(program, backend="aten")
    for _ in range(3):
        assert compiled(torch.ones(2)).tolist() == [5, 5]
        assert stance_in_force() == "default"
    assert seen == ["force_eager"] * 3


def test_in_a_checkpoint() -> None:
    compiled = dovetail.compile(lambda values: values.sin().sin(), backend="aten")
    x = torch.ones(3, requires_grad=True)
    for stance in STANCES:
        with dovetail.set_stance("eager_on_recompile" if stance == "fail_on_recompile" else stance):
            torch.utils.checkpoint.checkpoint(compiled, x, use_reentrant=False).sum().backward()
    y = torch.ones(3, requires_grad=True)
    for _ in STANCES:
        y.sin().sin().sum().backward()
    assert torch.equal(x.grad, y.grad)


@pytest.mark.parametrize("reset", (torch.compiler.reset, dovetail.reset), ids=("torch", "ours"))
def test_reset(reset: Any) -> None:
    compiled = dovetail.compile(broken, backend="aten")
    for again in range(2):
        assert torch.equal(compiled(torch.ones(2)), broken(torch.ones(2)))
        assert compiled.entries and compiled.continuations()
        reset()
        assert not compiled.entries and not compiled.continuations()


def test_turned_off_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stances, "_is_off", True)
    monkeypatch.setattr(stances, "_ours", "force_eager")
    dovetail.set_stance("default")
    compiled = dovetail.compile(doubled, backend="aten")
    compiled(torch.ones(2))
    assert not compiled.entries
    monkeypatch.undo()


@pytest.mark.slow
@pytest.mark.parametrize("name", ("DOVETAIL_DISABLE", "TORCH_COMPILE_DISABLE"))
def test_the_environment_turns_everything_off(name: str) -> None:
    program = (
        "import torch, dovetail\n"
        "f = dovetail.compile(lambda x: x * 2, backend='aten', fullgraph=True)\n"
        "dovetail.set_stance('default')\n"
        "print(f(torch.ones(1)).item(), len(f.entries))"
    )
    environment = {**os.environ, name: "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.stdout.split() == ["2.0", "0"], done.stderr[-2000:]


def test_settings_of_torch_that_mean_something() -> None:
    config = torch._dynamo.config
    with config.patch(recompile_limit=2, fail_on_recompile_limit_hit=True):
        compiled = dovetail.compile(doubled, backend="aten", dynamic=False)
        for size in (2, 3):
            compiled(torch.ones(size))
        with pytest.raises(RecompileLimitError):
            compiled(torch.ones(4))
        own = dovetail.compile(doubled, backend="aten", recompile_limit=3, dynamic=False)
        for size in (2, 3, 4):
            own(torch.ones(size))
        assert len(own.entries) == 3
    with config.patch(assume_static_by_default=False):
        compiled = dovetail.compile(doubled, backend="aten")
        for size in (2, 3):
            compiled(torch.ones(size))
        assert len(compiled.entries) == 1
    with config.patch(automatic_dynamic_shapes=False):
        compiled = dovetail.compile(doubled, backend="aten")
        for size in (2, 3, 4):
            compiled(torch.ones(size))
        assert len(compiled.entries) == 3
    with config.patch(disable=True):
        compiled = dovetail.compile(doubled, backend="aten")
        compiled(torch.ones(2))
        assert not compiled.entries
    with config.patch(error_on_recompile=True):
        compiled(torch.ones(2))
        with pytest.raises(RecompileError, match="error_on_recompile"):
            compiled(torch.ones(3))


def test_settings_without_effect_say_so_once(caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    monkeypatch.setattr(settings, "_told", set())
    with torch._dynamo.config.patch(suppress_errors=True), caplog.at_level(logging.WARNING, "dovetail"):
        for _ in range(2):
            dovetail.compile(lambda values: values + 1, backend="aten")(torch.ones(2))
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "torch._dynamo.config.suppress_errors has no effect on dovetail.compile"
    ]
    settings._told.clear()
    caplog.clear()
    dovetail.compile(lambda values: values + 2, backend="aten")(torch.ones(2))
    assert not caplog.records and not settings.changed_in_torch()
