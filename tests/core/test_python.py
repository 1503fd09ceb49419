"""Python around the tensors: what was read is guarded, what was written is written again, the rest breaks the graph."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import dovetail

CALLS: list[str] = []


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.count = 2.0, 0
        self.seen: list[int] = []
        self.inner = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, *rest: torch.Tensor, flag: bool = False) -> Any:
        self.count += 1
        self.seen.append(self.count)
        parts = {f"part {at}": item * self.scale for at, item in enumerate((x, *rest))}
        total = sum(parts.values()) if flag else self.inner(x)
        return total, [key for key in parts if key.endswith("0")], max(self.seen)


def test_reads_are_guarded_and_writes_are_made() -> None:
    torch.manual_seed(0)
    model, twin = Scaled(), Scaled()
    twin.load_state_dict(model.state_dict())
    compiled = dovetail.compile(twin, backend="aten", fullgraph=True)
    x = torch.randn(2, 3)
    for change in (None, 3.0, 3.0):
        if change is not None:
            model.scale = twin.scale = change
        for flag in (False, True):
            expected, found = model(x, x + 1, flag=flag), compiled(x, x + 1, flag=flag)
            assert torch.equal(expected[0], found[0]) and expected[1:] == found[1:]
    assert (model.count, model.seen) == (twin.count, twin.seen)


def printing(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    print(end="")
    return y + x.sum()


def branching(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.sum() > 0 else x * 3


def raising(x: torch.Tensor) -> torch.Tensor:
    try:
        return [x][int(x.shape[0])]
    except IndexError:
        return x - 1


def with_a_generator(x: torch.Tensor) -> torch.Tensor:
    def parts():
        for number in range(3):
            try:
                yield x * number
            finally:
                CALLS.append("left")

    return torch.stack(list(parts())).sum(0)


def texts(x: torch.Tensor) -> tuple[torch.Tensor, str]:
    return x * 2, f"{x.shape[0]} rows, " + "{:>4}".format(x.dim()) + ", %s" % (x.dtype,)


@pytest.mark.parametrize("function", [printing, branching, raising, with_a_generator, texts])
def test_programs_are_eagers_with_or_without_a_graph_break(function: Any) -> None:
    compiled = dovetail.compile(function, backend="aten")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for x in (torch.ones(2, 3), -torch.ones(2, 3), torch.ones(4, 3)):
            expected, found = function(x), compiled(x)
            one, other = (value if isinstance(value, tuple) else (value,) for value in (expected, found))
            assert torch.equal(one[0], other[0]) and one[1:] == other[1:]


def test_a_text_of_a_tensor_is_never_one_of_a_traced_tensor() -> None:
    def show(x: torch.Tensor) -> tuple[torch.Tensor, str, str]:
        y = x + 1
        return y, f"{y}", "%s" % (y,)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, *found = dovetail.compile(show, backend="aten")(torch.ones(2))
    assert found == [str(torch.ones(2) + 1)] * 2
