"""Several threads with backwards at once: torch's engine hands over one autograd graph at a time."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import dovetail
from dovetail.backward_capture import BackwardSession, open_session
from dovetail.backward_capture import engine as engine_module
from dovetail.backward_capture.engine import gate
from dovetail.torch_private import engine as private_engine
from dovetail.torch_private import tracing as private_tracing


def together(*works: Callable[[], Any]) -> None:
    """Run each in a thread of its own, all at once; the first error is raised here."""
    errors: list[BaseException] = []
    start = threading.Barrier(len(works))

    def run(work: Callable[[], Any]) -> None:
        try:
            start.wait(60)
            work()
        except BaseException as error:  # noqa: BLE001  (raised again below)
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


def test_threads_without_a_block_are_eager() -> None:
    x, y = torch.randn(50, requires_grad=True), torch.randn(50, requires_grad=True)
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(50):
                y.sin().sum().backward()
        except BaseException as error:  # noqa: BLE001  (the test looks at it)
            errors.append(error)

    thread = threading.Thread(target=work)
    with dovetail.compiled_autograd(backend="aten") as backwards:
        thread.start()
        for _ in range(50):
            x.sin().sum().backward()
        thread.join()
    assert errors == []
    assert backwards.runs == 50
    assert torch.allclose(y.grad, 50 * y.detach().cos())
    assert torch.allclose(x.grad, 50 * x.detach().cos())


@pytest.mark.parametrize("backend", ["aten", None])
def test_threads_with_blocks_capture_all_of_their_backwards(backend: str | None) -> None:
    leaves = [torch.randn(50, requires_grad=True) for _ in range(4)]
    found: list[BackwardSession] = []

    def work(x: torch.Tensor, depth: int) -> None:
        block = open_session(BackwardSession()) if backend is None else dovetail.compiled_autograd(backend=backend)
        with block as backwards:
            for _ in range(20):
                h = x
                for _ in range(depth):
                    h = h.sin()
                h.sum().backward()
        found.append(backwards)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # Threads with the same autograd graph, and with one of their own.
        together(*(lambda x=x, depth=depth: work(x, depth) for x, depth in zip(leaves, (1, 1, 2, 3), strict=True)))
    assert [(item.runs, item.fallbacks) for item in found] == [(20, [])] * 4
    for x, depth in zip(leaves, (1, 1, 2, 3), strict=True):
        again = x.detach().clone().requires_grad_()
        for _ in range(20):
            h = again
            for _ in range(depth):
                h = h.sin()
            h.sum().backward()
        assert torch.equal(x.grad, again.grad)


def test_a_hook_that_waits_for_a_backward_of_another_thread() -> None:
    x, y = torch.randn(5, requires_grad=True), torch.randn(5, requires_grad=True)
    waiting, done = threading.Event(), threading.Event()

    def hook(gradient: torch.Tensor) -> None:
        waiting.set()
        assert done.wait(60)

    def first() -> None:
        with open_session(BackwardSession()) as session:
            h = x.sin()
            h.register_hook(hook)
            h.sum().backward()
        assert session.fallbacks == []

    def second() -> None:
        assert waiting.wait(60)
        with open_session(BackwardSession()) as session:
            for _ in range(3):
                y.cos().sum().backward()
        done.set()
        assert (session.runs, session.fallbacks) == (3, [])

    together(first, second)
    assert torch.equal(x.grad, x.detach().cos())
    torch.testing.assert_close(y.grad, -3 * y.detach().sin())


@pytest.fixture
def on_the_way(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event, list[str]]]:
    """Within a session: another thread's backward stops in front of torch's engine. Events: it is there, and it may go on.

    The list gets "eager" when the engine has run it.
    """
    there, go_on, order = threading.Event(), threading.Event(), list[str]()
    with open_session(BackwardSession()):
        engine, main = gate.engine_run, threading.current_thread()

        def late(*call: Any, **options: Any) -> Any:
            if threading.current_thread() is not main and not there.is_set():
                there.set()
                assert go_on.wait(60)
                result = engine(*call, **options)
                order.append("eager")
                return result
            return engine(*call, **options)

        monkeypatch.setattr(gate, "engine_run", late)
        yield there, go_on, order
        go_on.set()
        monkeypatch.undo()


def test_a_capture_waits_for_threads_on_their_way_into_the_engine(
    monkeypatch: pytest.MonkeyPatch, on_the_way: tuple[threading.Event, threading.Event, list[str]]
) -> None:
    """Without that the engine calls a null pointer: it has read the hook for one thread, and another one has cleared it."""
    there, go_on, order = on_the_way
    x, y = torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)
    set_compiler = private_engine.set_engine_compiler

    def noted(factory: Any) -> Any:
        order.append("clear" if factory is None else "set")
        return set_compiler(factory)

    monkeypatch.setattr(private_engine, "set_engine_compiler", noted)
    thread = threading.Thread(target=lambda: x.sin().sum().backward())
    thread.start()
    assert there.wait(60)
    threading.Timer(0.3, go_on.set).start()
    with open_session(BackwardSession()) as session:
        y.cos().sum().backward()
    thread.join(60)
    assert order == ["eager", "set", "clear"]
    assert session.runs == 1
    assert torch.equal(x.grad, x.detach().cos())
    assert torch.equal(y.grad, -y.detach().sin())


def test_a_capture_does_not_wait_forever(
    monkeypatch: pytest.MonkeyPatch, on_the_way: tuple[threading.Event, threading.Event, list[str]]
) -> None:
    there, go_on, _ = on_the_way
    monkeypatch.setattr(engine_module, "PATIENCE", 0.1)
    x, y = torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)
    thread = threading.Thread(target=lambda: x.sin().sum().backward())
    thread.start()
    assert there.wait(60)
    with warnings.catch_warnings(), open_session(BackwardSession()) as session:
        warnings.simplefilter("ignore")
        y.cos().sum().backward()
    go_on.set()
    thread.join(60)
    assert session.runs == 0
    assert "keeps torch's engine to itself" in session.fallbacks[0]
    assert torch.equal(y.grad, -y.detach().sin())


@pytest.mark.parametrize("nested", [False, True])
def test_a_hook_of_an_eager_backward_may_wait_for_a_backward_in_a_block(
    nested: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing shows that its thread is past the engine's hook, unless it has entered the engine again."""
    monkeypatch.setattr(engine_module, "PATIENCE", 0.1)
    x, y = torch.randn(5, requires_grad=True), torch.randn(5, requires_grad=True)
    waiting, done = threading.Event(), threading.Event()

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        if nested:
            with torch.enable_grad():
                torch.autograd.grad(gradient.clone().requires_grad_().sum().sin(), [x], allow_unused=True)
        waiting.set()
        assert done.wait(60)
        return gradient * 2

    def eager() -> None:
        h = x.sin()
        h.register_hook(hook)
        h.sum().backward()

    def captured() -> None:
        assert waiting.wait(60)
        with open_session(BackwardSession()) as session:
            y.cos().sum().backward()
        done.set()
        assert session.runs == nested
        assert nested or "keeps torch's engine to itself" in session.fallbacks[0]

    with open_session(BackwardSession()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        together(eager, captured)
    assert torch.equal(x.grad, 2 * x.detach().cos())
    assert torch.equal(y.grad, -y.detach().sin())


_STRESS = """
import sys, threading, time, torch, dovetail

sys.setswitchinterval(1e-5)
torch.set_num_threads(1)

def value(x, steps, seed):
    for step in range(steps):
        x = x * 1.5 if (step + seed) % 3 else x.sin()
    return x.sum()

def eager(seed):
    while time.monotonic() < end:
        x = torch.ones(3, requires_grad=True)
        seed += 1
        value(x, 300 + seed % 97, seed).backward()

def captured(seed):
    while time.monotonic() < end:
        with dovetail.compiled_autograd(backend="aten") as backwards:
            for steps in (1, 2, 3):
                x = torch.full((3,), 0.5, requires_grad=True)
                value(x, steps, seed).backward()
                again = x.detach().clone().requires_grad_()
                assert torch.allclose(x.grad, torch.autograd.grad(value(again, steps, seed), again)[0])
        assert not backwards.fallbacks, backwards.fallbacks

def run(work, seed):
    try:
        work(seed)
    except BaseException as error:
        errors.append(error)
        raise

errors = []
end = time.monotonic() + 0.1
captured(0)
end = time.monotonic() + 2
threads = [threading.Thread(target=run, args=(work, seed)) for seed, work in enumerate([eager, eager, captured, captured])]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
sys.exit(len(errors))
"""


@pytest.mark.slow
def test_many_threads_do_not_end_the_process() -> None:
    done = subprocess.run([sys.executable, "-c", _STRESS], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_traced_backward_is_never_captured() -> None:
    class Watching(private_tracing.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(function)
            return function(*args, **(kwargs or {}))

    seen: list[Any] = []
    x = torch.randn(4, requires_grad=True)
    with open_session(BackwardSession()) as session:
        y = (x.sin().tan() * x.cosh()).sum()
        with Watching():
            torch.autograd.grad(y, [x])
    assert seen
    assert (session.runs, session.fallbacks) == (0, [])


def test_blocks_that_open_and_close_in_threads() -> None:
    x = torch.randn(5)

    def work() -> None:
        for index in range(20):
            leaf = x.clone().requires_grad_()
            with open_session(BackwardSession()) if index % 2 else contextlib.nullcontext():
                (leaf.sin() * leaf).sum().backward()
            torch.testing.assert_close(leaf.grad, x.sin() + x * x.cos())

    before = torch.autograd._engine_run_backward
    together(work, work, work)
    assert torch.autograd._engine_run_backward is before
