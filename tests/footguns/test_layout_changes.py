"""Tensors that are made to lie in other memory, by code of torch that nobody would suspect of it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import dovetail
from tests.differential import compare_modules, same


def compare(model: nn.Module, make: Callable[[Any], Callable[..., Any]], calls: list[tuple[Any, ...]]) -> None:
    """Results, parameters, gradients and which parameters share memory, after every call."""
    twin = copy.deepcopy(model)
    eager, compiled = make(model), dovetail.compile(make(twin), backend="aten")
    for number, args in enumerate(calls):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected, actual = eager(*args), compiled(*args)
        same(expected, actual, f"call {number}")
        expected.sum().backward()
        actual.sum().backward()
        # Two tensors are swapped only where no autograd graph holds them.
        del expected, actual
        compare_modules(model, twin, f"call {number}")
        for (name, left), right in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert left.storage_offset() == right.storage_offset(), f"call {number}: {name}"


def test_parameters_are_set_from_a_vector() -> None:
    def make(model: Any) -> Callable[..., Any]:
        def step(x: torch.Tensor, scale: float) -> torch.Tensor:
            vector = nn.utils.parameters_to_vector(model.parameters())
            with torch.no_grad():
                nn.utils.vector_to_parameters(vector * scale, model.parameters())
            return model(x)

        return step

    compare(nn.Linear(3, 2), make, [(torch.randn(2 + number, 3), 0.5 + number) for number in range(3)])


def test_two_parameters_are_swapped() -> None:
    def make(model: Any) -> Callable[..., Any]:
        def step(x: torch.Tensor) -> torch.Tensor:
            torch.utils.swap_tensors(model[0].weight, model[1].weight)
            return model(x)

        return step

    compare(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), make, [(torch.randn(2, 3),) for _ in range(3)])


def test_a_module_takes_another_memory_format() -> None:
    def make(model: Any) -> Callable[..., Any]:
        def step(x: torch.Tensor, memory_format: torch.memory_format) -> torch.Tensor:
            nn.utils.convert_conv2d_weight_memory_format(model, memory_format)
            return model(x)

        return step

    x = torch.randn(2, 2, 5, 5)
    calls = [(x, torch.channels_last), (x, torch.contiguous_format), (x, torch.channels_last)]
    compare(nn.Conv2d(2, 3, 3), make, calls)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_a_tensor_is_resized_to_a_memory_format(memory_format: torch.memory_format) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y.resize_(y.size(), memory_format=memory_format)
        return y * 2

    x = torch.randn(3, 2, 3, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        same(function(x), dovetail.compile(function, backend="aten")(x), "result")


def test_a_kernel_of_a_module_is_fused_with_its_normalisation() -> None:
    def make(model: Any) -> Callable[..., Any]:
        def step(x: torch.Tensor) -> torch.Tensor:
            fused = nn.utils.fuse_conv_bn_eval(model[0], model[1])
            return fused(x)

        return step

    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)).eval()
    compare(model, make, [(torch.randn(1 + number, 2, 5, 5),) for number in range(3)])
