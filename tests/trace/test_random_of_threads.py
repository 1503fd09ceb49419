"""Captures leave the numbers alone that other threads draw meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import dovetail
from dovetail.backends.registry import unregister_backend

DRAWN: list[torch.Tensor] = []


def draw() -> None:
    DRAWN.append(torch.rand(3))


@pytest.fixture
def other_thread() -> Iterator[None]:
    """A thread that is there all the time."""
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    yield
    end.set()
    thread.join()


@pytest.fixture
def drawing_beside() -> Iterator[str]:
    """A backend in the middle of whose compilation another thread draws."""

    @dovetail.register_backend("drawing beside", tolerances=(0.0, 0.0))
    def compile_graph(graph: Any, example_inputs: Any, *, kind: Any, options: Any) -> Any:
        thread = threading.Thread(target=draw)
        thread.start()
        thread.join()
        return lambda inputs: list(graph(*inputs))

    yield "drawing beside"
    unregister_backend("drawing beside")


@pytest.mark.usefixtures("other_thread")
def test_numbers_that_another_thread_draws_stay_drawn(drawing_beside: str) -> None:
    expected = [torch.rand(3), torch.rand(3)]
    torch.manual_seed(0)
    DRAWN.clear()
    dovetail.compile(torch.sin, backend=drawing_beside)(torch.ones(2))
    assert torch.equal(DRAWN[0], expected[0]) and torch.equal(torch.rand(3), expected[1])


@pytest.mark.usefixtures("other_thread")
def test_a_program_draws_its_own_numbers_beside_another_thread() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.dropout(x, 0.5, True) * torch.rand(4)

    expected = [program(torch.ones(4)), torch.rand(3)]
    torch.manual_seed(0)
    compiled = dovetail.compile(program, backend="aten", fullgraph=True)
    assert torch.equal(compiled(torch.ones(4)), expected[0]) and torch.equal(torch.rand(3), expected[1])
