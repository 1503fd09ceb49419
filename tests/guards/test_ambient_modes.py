"""Modes of the program that are entered around a compiled function."""

from __future__ import annotations

import warnings

import torch
from torch.overrides import TorchFunctionMode

import dovetail


class Counting(TorchFunctionMode):
    """Counts the calls of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.names.append(function.__name__)
        return function(*args, **(kwargs or {}))


def test_a_function_mode_sees_the_calls_of_the_program_alone():
    compiled = dovetail.compile(lambda x: torch.sin(x) * 3, backend="aten")
    x = torch.randn(3, requires_grad=True)
    compiled(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            with Counting() as mode:
                compiled(x)
            assert mode.names == ["sin", "mul"]
