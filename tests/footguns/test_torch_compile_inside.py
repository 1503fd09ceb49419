"""What ``torch.compile`` made, called inside of a compiled function: torch's own compiler is not switched on under a trace."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback

import dovetail
from tests.differential import backward, same

doubled = torch.compile(lambda x: x * 2, backend="eager")
kept_out = torch.compiler.disable(lambda x: x * 3)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wrapped = torch.compile(torch.nn.Linear(2, 2), backend="eager")
        self.in_place = torch.nn.Linear(2, 2)
        self.in_place.compile(backend="eager")

    @torch.compile(backend="eager")
    def part(self, x: Any) -> Any:
        return x + 5

    def forward(self, x: Any) -> Any:
        return self.wrapped(x) + self.in_place(x) + self.part(x) + self.wrapped.weight.sum()


class Disabling(Model):
    @torch.compiler.disable
    def off(self, x: Any) -> Any:
        return x * 7

    def forward(self, x: Any) -> Any:
        return self.off(super().forward(x))


DISABLED = [lambda x: kept_out(x) + 1, Disabling()]


@pytest.mark.filterwarnings("ignore::dovetail.errors.GraphBreakWarning")
@pytest.mark.parametrize(
    "function",
    [lambda x: doubled(x) + 1, doubled, Model(), *DISABLED],
    ids=["function", "itself", "model", "disabled", "disabling model"],
)
def test_it_is_one_graph_unless_disabled_and_leaves_torchs_compiler_alone(function: Callable[..., Any]) -> None:
    expected_x, x = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    twin = copy.deepcopy(function)
    is_whole = function not in DISABLED
    compiled = dovetail.compile(twin, backend="aten", fullgraph=is_whole)
    for _ in range(2):
        with torch.compiler.set_stance("force_eager"):
            expected = function(expected_x)
        actual = compiled(x)
        same(expected, actual)
        backward(expected)
        backward(actual)
        same(expected_x.grad, x.grad)
    assert get_eval_frame_callback() is None
