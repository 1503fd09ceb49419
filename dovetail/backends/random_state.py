"""The state of torch's default generators, the CPU's and those of the GPUs in use.

>>> state = take_random_state()
>>> first = torch.rand(1)
>>> put_random_state(state)
>>> torch.equal(torch.rand(1), first)
True
"""

from __future__ import annotations

import torch


def take_random_state() -> list[torch.Tensor]:
    """The states now: the CPU's, then one for each GPU if CUDA has been used."""
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *gpus]


def put_random_state(state: list[torch.Tensor]) -> None:
    """Go back to states that :func:`take_random_state` gave."""
    torch.set_rng_state(state[0])
    if len(state) > 1:
        torch.cuda.set_rng_state_all(state[1:])
