"""A capture leaves the default generator alone: other threads draw from it meanwhile."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import dovetail
from dovetail.trace import overrides

Tensor = torch.Tensor


def dropped(x: Tensor) -> Tensor:
    return torch.dropout(x, 0.5, True).sin()


def plain(x: Tensor) -> Tensor:
    return x.sin()


def drawing(x: Tensor) -> Tensor:
    return dropped(x) * torch.rand(4)


def computed_again(x: Tensor) -> Tensor:
    return checkpoint(dropped, x, use_reentrant=False) * torch.rand(4)


@pytest.mark.parametrize("function", [plain, drawing, computed_again])
def test_numbers_that_another_thread_draws_during_a_capture_stay_drawn(function: Callable[[Tensor], Tensor]) -> None:
    """They came from a fixed seed, and were drawn again afterwards."""
    seen: list[Tensor] = []

    @contextlib.contextmanager
    def draws_beside() -> Iterator[None]:
        for _ in range(2):
            thread = threading.Thread(target=lambda: seen.append(torch.rand(3)))
            thread.start()
            thread.join()
            if len(seen) < 2:
                yield

    compiled = dovetail.compile(function, backend="aten", fullgraph=True)
    x = torch.ones(4, requires_grad=True)
    expected = [torch.rand(3), torch.rand(3), function(x)]
    expected += [*torch.autograd.grad(expected[2].sum(), x), torch.rand(3)]
    torch.manual_seed(0)
    dovetail.compile(torch.cos, backend="aten")(x)  # the rules are there now
    overrides.WHILE_OPEN.append(draws_beside)
    try:
        result = compiled(x)
    finally:
        overrides.WHILE_OPEN.remove(draws_beside)
    found = [*seen, result, *torch.autograd.grad(result.sum(), x), torch.rand(3)]
    assert all(map(torch.equal, found, expected))


def test_threads_that_set_the_generator_during_a_capture_set_their_own() -> None:
    with contextlib.ExitStack() as stack:
        for opened in overrides.WHILE_OPEN:
            stack.enter_context(opened())
        torch.manual_seed(5)
        thread = threading.Thread(target=torch.manual_seed, args=(7,))
        thread.start()
        thread.join()
        assert torch.initial_seed() == 5 and torch.default_generator.initial_seed() == 7
    assert torch.initial_seed() == 7 and torch.random.default_generator is torch.default_generator
