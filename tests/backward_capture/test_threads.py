"""Several threads with backwards at once: torch's engine hands over one autograd graph at a time."""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail
from dovetail.backward_capture import BackwardSession, open_session
from dovetail.backward_capture import session as sessions
from dovetail.errors import CaptureError
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


def test_hooks_of_native_code_keep_the_engine_to_themselves() -> None:
    """They are of no use once the engine has returned, so another thread's backward is eager's meanwhile."""
    x, y = torch.randn(5, requires_grad=True), torch.randn(5, requires_grad=True)
    waiting, done = threading.Event(), threading.Event()
    kept: list[Any] = []

    def hook(gradient: torch.Tensor) -> None:
        waiting.set()
        assert done.wait(60)

    def first() -> None:
        with open_session(BackwardSession()) as session:
            h = x.sin()
            h.retain_grad()
            h.register_hook(hook)
            h.sum().backward()
            kept.append(h.grad)
        assert session.fallbacks == []

    def second() -> None:
        assert waiting.wait(60)
        with warnings.catch_warnings(), open_session(BackwardSession()) as session:
            warnings.simplefilter("ignore")
            y.cos().sum().backward()
        done.set()
        assert session.runs == 0
        assert "another thread" in session.fallbacks[0]

    together(first, second)
    assert torch.equal(kept[0], torch.ones(5))
    assert torch.equal(x.grad, x.detach().cos())
    assert torch.equal(y.grad, -y.detach().sin())


def eager_while_another_thread_captures(monkeypatch: pytest.MonkeyPatch, run: Callable[[], Any]) -> Any:
    """The result of a backward without a block that begins just as this thread has put its compiler in the hook."""
    entered, left = threading.Event(), threading.Event()
    found: list[Any] = []

    def work() -> None:
        try:
            found.append(run())
        except CaptureError as error:
            found.append(error)

    def late(*call: Any, **options: Any) -> Any:
        """Eager's engine, entered after the look at the lock."""
        if threading.current_thread() is thread and not entered.is_set():
            entered.set()
            assert left.wait(60)
        return engine(*call, **options)

    with open_session(BackwardSession()):
        engine = sessions._engine_run
        assert engine is not None
        monkeypatch.setattr(sessions, "_engine_run", late)
        thread = threading.Thread(target=work)
        thread.start()
        assert entered.wait(60)
        with sessions._hook_lock:
            sessions.private_engine.set_engine_compiler(sessions._new_recorder)
            left.set()
            time.sleep(0.2)
            sessions.private_engine.set_engine_compiler(None)
        thread.join(60)
        monkeypatch.undo()
    return found[0]


@pytest.mark.parametrize("known", [False, True], ids=["new", "seen before"])
def test_a_compiler_of_another_thread_in_the_hook(monkeypatch: pytest.MonkeyPatch, known: bool) -> None:
    """The eager backward waits, or runs what the engine collected."""
    x = torch.randn(4, requires_grad=True)

    def run() -> torch.Tensor:
        order: list[int] = []
        h = [x.sin().tan().sinh(), x.cos().sinh().tan(), x.exp().cos().tan()]
        for index, item in enumerate(h):
            item.register_hook(lambda gradient, index=index: order.append(index))
        (gradient,) = torch.autograd.grad((h[0] * h[2] + h[1] * (3 if known else 1)).sum(), [x])
        return torch.cat([gradient, torch.tensor(order)])

    expected = run()
    if known:
        with open_session(BackwardSession()):
            assert torch.equal(run(), expected)
    assert torch.equal(eager_while_another_thread_captures(monkeypatch, run), expected)


def test_a_traced_backward_is_never_run_outside_of_its_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    class Watching(private_tracing.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return function(*args, **(kwargs or {}))

    x = torch.randn(4, requires_grad=True)

    def run() -> torch.Tensor:
        return torch.autograd.grad((x.sin().tan() * x.cosh()).sum(), [x])[0]

    def traced() -> torch.Tensor:
        with Watching():
            return run()

    with open_session(BackwardSession()):
        run()
    assert isinstance(eager_while_another_thread_captures(monkeypatch, traced), CaptureError)


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
