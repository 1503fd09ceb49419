"""``torch.cpu.amp.autocast`` and ``torch.cuda.amp.autocast``, the older names of ``torch.autocast``."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor

from tests.differential import check_calls, leaf

pytestmark = [
    pytest.mark.usefixtures("quiet"),
    pytest.mark.filterwarnings("ignore:.*amp.autocast.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*CUDA is not available"),
]


def block(x: Tensor) -> tuple[Tensor, bool]:
    with torch.cpu.amp.autocast(dtype=torch.bfloat16) as manager:
        y = x @ x
        inside = torch.is_autocast_enabled("cpu") and type(manager) is torch.cpu.amp.autocast
    return (y @ y).float(), inside


def switched_off(x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = x @ x
        with torch.cpu.amp.autocast(enabled=False):
            y = y.float() @ x
    return y


def of_another_device(x: Tensor) -> Tensor:
    with torch.cuda.amp.autocast():
        return x @ x


def decorator_inside(x: Tensor) -> Tensor:
    @torch.cpu.amp.autocast()
    def product(y: Tensor) -> Tensor:
        return y @ y

    return product(x).float() * x


def broken(x: Tensor) -> Tensor:
    with torch.cpu.amp.autocast():
        y = x @ (x * 2)
        print(end="")
        z = y @ (x + 1)
    return z.float() @ x


with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)
    switch_off = torch.cuda.amp.autocast(enabled=False)


class Layer(torch.nn.Module):
    @switch_off
    def forward(self, x: Tensor) -> Tensor:
        return x.float() @ x


@pytest.mark.parametrize("program", [block, switched_off, of_another_device, decorator_inside, Layer()])
def test_a_block_of_one_device_is_in_the_graph(program) -> None:
    check_calls(program, [(leaf(3, 3),), (leaf(3, 3),)], entries=1, fullgraph=True)


def test_an_object_that_was_made_before_the_call() -> None:
    made = torch.cpu.amp.autocast(dtype=torch.bfloat16)

    def program(x: Tensor) -> Tensor:
        with made:
            y = x @ x
        return y.float() + y.dtype.itemsize

    check_calls(program, [(leaf(3, 3),), (leaf(3, 3),)], entries=1, fullgraph=True)


def test_a_break_inside_of_the_block() -> None:
    check_calls(broken, [(leaf(3, 3),), (leaf(3, 3),)], fullgraph=False)
