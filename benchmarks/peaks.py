"""What the machine can do at most, measured in the run that compares programs with it."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

SIZE = 1536
ROUNDS = 12


def fastest(run: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Return the shortest time of a call in seconds: the peak is what the machine reaches when nothing disturbs it."""
    run()
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return min(times)


def matrix_products(dtype: torch.dtype, threads: int) -> float:
    """Return the floating-point operations a second of large matrix products."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        left, right = (torch.randn(SIZE, SIZE).to(dtype) for _ in range(2))
        return 2 * SIZE**3 / fastest(lambda: left @ right)
    finally:
        torch.set_num_threads(before)
