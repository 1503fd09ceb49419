"""Python numbers that are computed from data: ``max(count, 1)``, ``float(mask.sum())``. They stay in the graph."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail
from tests.differential import entries_of, same

pytestmark = pytest.mark.usefixtures("quiet")
Tensor = torch.Tensor


def at_least_one(x: Tensor) -> Any:
    count = (x > 0).sum().item()
    return x.sum() / max(count, 1), max(1, count), min(count, 3, 2), type(max(count, 1))


def of_a_whole_tensor(x: Tensor) -> Any:
    return x / max(1, int((x > 0).sum()))


def rows_at_most(x: Tensor) -> Any:
    rows = x[x > 0]
    return rows[: min(3, rows.shape[0])].sum() / max(len(rows), 1)


def as_float(x: Tensor) -> Any:
    share = float((x > 0).sum()) / x.shape[0]
    return x * share, share, float((x > 0).any()), float((x.detach() * 3).half().sum())


def float_of_a_number(x: Tensor) -> Any:
    return x * float((x > 0).sum().item())


def of_a_loss(x: Tensor) -> Any:
    loss = x.square().mean()
    return loss * 2, float(loss), f"{float(x.max()):.3f}", float(loss.half())


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")
@pytest.mark.parametrize(
    "function", [at_least_one, of_a_whole_tensor, rows_at_most, as_float, float_of_a_number, of_a_loss]
)
def test_one_graph(function: Callable[[Tensor], Any]) -> None:
    compiled = dovetail.compile(function, backend="aten", fullgraph=True)
    for seed, positive in enumerate((5, 3, 0, 1, 8, 2)):
        found = []
        for call in (function, compiled):
            torch.manual_seed(seed)
            x = (torch.randn(8).abs() * torch.where(torch.arange(8) < positive, 1.0, -1.0)).requires_grad_()
            results = call(x)
            first = results[0] if isinstance(results, tuple) else results
            found.append((results, torch.autograd.grad(first.sum(), x)))
        same(*found)


def test_large_whole_numbers_as_floats() -> None:
    def function(x: Tensor) -> Any:
        return float(x.sum()), float(x.sum().item())

    compiled = dovetail.compile(function, backend="aten")
    for number in (3, (1 << 53) + 1, (1 << 62) + 12345, -((1 << 54) + 3), 0):
        same(function(torch.tensor([number])), compiled(torch.tensor([number])))


def test_errors_and_warnings_of_a_conversion_are_eagers() -> None:
    def function(x: Tensor) -> float:
        return float(x)

    compiled = dovetail.compile(function, backend="aten")
    for value in (torch.ones(2), torch.ones(0), torch.tensor(1j)):
        with pytest.raises(Exception) as expected:
            function(value)
        with pytest.raises(type(expected.value)) as found:
            compiled(value)
        assert str(found.value) == str(expected.value)
    same(function(torch.ones(1, 1)), compiled(torch.ones(1, 1)))


def test_torch_warns_once_in_a_process_of_a_float_of_what_requires_a_gradient() -> None:
    program = """
import sys, torch, dovetail

def function(x):
    return x * 2, float(x.sum())

called = dovetail.compile(function, backend="aten", fullgraph=True) if sys.argv[1] == "compiled" else function
for _ in range(3):
    called(torch.ones(2, requires_grad=True))
"""
    found = []
    for how in ("eager", "compiled"):
        done = subprocess.run([sys.executable, "-c", program, how], capture_output=True, text=True, check=True)
        # Where torch's own code has found it is said by eager alone.
        found.append([line.partition(" (Triggered")[0] for line in done.stderr.splitlines() if "float(" not in line])
    assert found[0] == found[1]
    assert sum("requires_grad=True" in line for line in found[1]) == 1


def whole_numbers(x: Tensor) -> Any:
    return x * 2, int(x.sum()), int(x.half().mean()), int(x[0] > 0), int(x.double().sum().detach())


@pytest.mark.parametrize("number", [1.7, -1.7, 0.3, -0.3, 65000.0, 2.0**61, 2.0**63, 1e30, math.inf, math.nan])
def test_whole_numbers_of_floats_are_eagers(number: float) -> None:
    compiled = dovetail.compile(whole_numbers, backend="aten", fullgraph=True)
    for value in (torch.tensor([3.5, -1.0], requires_grad=True), torch.tensor([number, 0.0])):
        try:
            expected = whole_numbers(value)
        except (ValueError, OverflowError) as error:
            with pytest.raises(type(error)) as found:
                compiled(value)
            assert str(found.value) == str(error)
        else:
            same(expected, compiled(value))
    assert entries_of(compiled) <= 2


def truth_of_a_size(x: Tensor) -> Any:
    is_four = x.shape[0] == 4
    return x * 2 if is_four is True else x * 3


def truth_of_data(x: Tensor) -> Any:
    is_positive, has_none = x.sum().item() > 0, x[x > 0].shape[0] == 0
    return x * 2 if has_none is not False else x * 3, is_positive is True, has_none is None


@pytest.mark.parametrize("function", [truth_of_a_size, truth_of_data])
def test_a_truth_is_one_object(function: Callable[[Tensor], Any]) -> None:
    compiled = dovetail.compile(function, backend="aten", dynamic=True)
    for x in (torch.ones(5), torch.ones(4), -torch.ones(3), -torch.ones(4), torch.ones(6)):
        same(function(x), compiled(x))
