"""Functions kept whole that write to an argument without counting it: the running statistics of norms with a factor from data."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import dovetail
from tests.differential import same


class Factor(nn.Module):
    """A norm whose factor of averaging is the value of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 3))
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("variance", torch.ones(3))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        factor = 0.5 / float(self.calls)
        return nn.functional.batch_norm(x, self.mean, self.variance, self.weight, None, True, factor)


@pytest.mark.parametrize(
    ("backend", "fullgraph"), [("aten", True), ("aten", False), pytest.param("inductor", False, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (Factor, (4, 3)),
        (lambda: nn.BatchNorm1d(3, momentum=None), (4, 3)),
        (lambda: nn.BatchNorm2d(3, momentum=None, affine=False), (4, 3, 2, 5)),
        (lambda: nn.InstanceNorm1d(3, momentum=None, affine=True, track_running_stats=True), (4, 3, 5)),
    ],
)
@pytest.mark.filterwarnings("ignore::dovetail.errors.GraphBreakWarning")
def test_statistics_are_written_once_a_call_and_never_by_a_backward(
    make: Callable[[], nn.Module], shape: tuple[int, ...], backend: str, fullgraph: bool
) -> None:
    torch.manual_seed(0)
    made = make()
    expected, actual = copy.deepcopy(made), copy.deepcopy(made)
    compiled = dovetail.compile(actual, backend=backend, fullgraph=fullgraph)
    for step in range(5):
        for module in (expected, actual):
            module.train(step != 3)
        x, y = (torch.arange(0.0, torch.Size(shape).numel()).sin().add(step).reshape(shape) for _ in range(2))
        results = [module(item.requires_grad_()) for module, item in ((expected, x), (compiled, y))]
        for result in results:
            result.sin().sum().backward()
        if backend == "aten":
            same([results[0], x.grad, expected.state_dict()], [results[1], y.grad, actual.state_dict()])
            versions = [[item._version for item in module.buffers()] for module in (expected, actual)]
            assert versions[0] == versions[1]
        else:
            torch.testing.assert_close(dict(actual.state_dict()), dict(expected.state_dict()))
            torch.testing.assert_close(y.grad, x.grad)
