"""Custom autograd Functions that hand back their inputs, or views of these: the gradient is that of their own backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail
from tests.differential import compare_call, leaf

Tensor = torch.Tensor

pytestmark = pytest.mark.usefixtures("quiet")


class One(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        return a

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 3


class Both(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return a, b.view(-1)

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        return first * 3, second.view(2, 2) * 5


class Mixed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return b * 2, a

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        return second * 3, first * 5


PROGRAMS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "one": lambda a, b: One.apply(a),
    "both": lambda a, b: Both.apply(a, b),
    "mixed": lambda a, b: Mixed.apply(a, b),
    "mixed alone": lambda a, b: Mixed.apply(a, b)[1],
    "views of results": lambda a, b: [item.view(-1) for item in Both.apply(a, b)],
    "of tensors made inside": lambda a, b: Both.apply(a * 2, b * 3),
    "one after the other": lambda a, b: Both.apply(*Mixed.apply(a, b)),
    "beside the input": lambda a, b: (Mixed.apply(a, b)[1], a),
    # Views that torch's own functions make in one go have torch's own gradient.
    "unbind": lambda a, b: a.unbind(0),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_result_that_is_an_input_has_the_functions_own_gradient(name: str) -> None:
    compiled = dovetail.compile(PROGRAMS[name], backend="aten")
    for needs in ((True, True), (True, False), (False, True)):
        args = [leaf(2, 2).requires_grad_(flag) for flag in needs]
        compare_call(PROGRAMS[name], compiled, args)
    if name == "unbind":
        assert not dovetail.events_of(compiled).count("graph break")


def test_such_a_result_may_not_be_written_to() -> None:
    for function in (lambda a, b: Both.apply(a * 2, b * 3)[0], lambda a, b: One.apply(a * 2)):
        compiled = dovetail.compile(function, backend="aten", fullgraph=True)
        with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
            compiled(leaf(2, 2), leaf(2, 2)).add_(1)
