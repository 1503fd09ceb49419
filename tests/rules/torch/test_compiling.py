"""``torch.compiler.is_compiling()`` has one answer in all parts of a function."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

import dovetail
from dovetail.errors import GraphBreakError, RecompileLimitError


class KeepsSize(torch.nn.Module):
    """A size kept in an attribute that is left alone where the program is told that it is compiled."""

    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.size, self.breaks = 0, breaks
        self.weight = torch.nn.Parameter(torch.tensor(2.0))

    def forward(self, values: Tensor, batch: Tensor) -> Tensor:
        values = values * self.weight
        if self.breaks and not (values > -1e9).all():
            values = values[values > 0]
        if not torch.compiler.is_compiling():
            self.size = int(batch.max().item() + 1)
        return torch.zeros(self.size).index_add(0, batch, values)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("breaks", (False, True))
@pytest.mark.parametrize("warm", (0, 5))
def test_a_size_that_is_kept_by_the_answer(breaks: bool, warm: int) -> None:
    expected, actual = KeepsSize(breaks), KeepsSize(breaks)
    compiled = dovetail.compile(actual, backend="aten")
    for rows in [warm] * bool(warm):
        actual(torch.ones(rows), torch.arange(rows))
    for rows in (2, 3, 4, 2, 3):
        data = torch.ones(3 * rows), torch.arange(rows).repeat_interleave(3)
        assert torch.equal(expected(*data), compiled(*data))
        assert expected.size == actual.size


class _Doubles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, told: list[bool]) -> Tensor:
        ctx.told = told
        told.append(torch.compiler.is_compiling())
        return values * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        ctx.told.append(torch.compiler.is_dynamo_compiling())
        return gradient * 2, None


def is_told(told: list[bool]) -> None:
    told += [torch.compiler.is_compiling(), torch._utils.is_compiling(), torch._dynamo.external_utils.is_compiling()]


def asks_everywhere(values: Tensor, extra: list[int], told: list[bool]) -> Tensor:
    is_told(told)
    values = torch.func.vmap(lambda row: is_told(told) or row * len(extra))(values)
    print(end="")
    is_told(told)
    leaf = values.detach().requires_grad_()
    leaf.register_hook(lambda gradient: is_told(told))
    _Doubles.apply(leaf, told).sum().backward()
    sorted([2, 1], key=lambda item: is_told(told) or item)
    return values + leaf.grad


def test_every_place_gets_eagers_answer() -> None:
    compiled = dovetail.compile(asks_everywhere, backend="aten", recompile_limit=2)
    for length in range(4):
        expected: list[bool] = []
        told: list[bool] = []
        values = torch.ones(3, 2)
        extra = [0] * length
        assert torch.equal(asks_everywhere(values, extra, expected), compiled(values, extra, told))
        assert told == expected
        assert not any(told)


def prints_unless_compiled(values: Tensor, scale: list[int]) -> Tensor:
    if not torch.compiler.is_compiling():
        print(end="")
    return values * len(scale) * (3 if torch.compiler.is_compiling() else 2)


def test_the_branch_for_compilers_where_one_graph_is_asked_for() -> None:
    compiled = dovetail.compile(prints_unless_compiled, backend="aten", fullgraph=True, recompile_limit=2)
    assert compiled(torch.ones(2), [1]).tolist() == [3, 3]
    assert compiled(torch.ones(2), [1, 1]).tolist() == [6, 6]
    # Eager would take the other branch.
    with pytest.raises(RecompileLimitError, match="is_compiling"):
        compiled(torch.ones(2), [1, 1, 1])
    assert dovetail.compile(prints_unless_compiled, backend="aten")(torch.ones(2), [1]).tolist() == [2, 2]
    assert "mul" in str(dovetail.capture(prints_unless_compiled, (torch.ones(2), [1])).graph)


def prints_on_the_way(values: Tensor, asks: bool) -> Tensor:
    if asks and not torch.compiler.is_compiling():
        print(end="")
    return values + (10 if torch.compiler.is_compiling() else 1)


def test_the_answer_changes_once_and_for_all_entries() -> None:
    compiled = dovetail.compile(prints_on_the_way, backend="aten", fullgraph=True)
    assert [compiled(torch.ones(1), asks).item() for asks in (False, True, False, True)] == [2, 11, 11, 11]


def breaks_either_way(values: Tensor) -> Tensor:
    print(end="")
    return values * (3 if torch.compiler.is_compiling() else 2)


def test_no_answer_gives_one_graph() -> None:
    with pytest.raises(GraphBreakError, match="print writes"):
        dovetail.compile(breaks_either_way, backend="aten", fullgraph=True)(torch.ones(2))
    assert dovetail.compile(breaks_either_way, backend="aten")(torch.ones(2)).tolist() == [2, 2]


class _Refuses(torch.nn.Module):
    def forward(self, values: Tensor, bad: bool) -> Tensor:
        doubled = values * 2
        if bad:
            raise ValueError("refused")
        return doubled


@pytest.mark.parametrize("fullgraph", (False, True))
@pytest.mark.parametrize(("everywhere", "own"), ((False, True), (True, False), (True, True)))
def test_hooks_that_run_where_forward_raises(everywhere: bool, own: bool, fullgraph: bool) -> None:
    """torch leaves them out where it is told that it is compiled."""

    def run(compiler: Any) -> list[Any]:
        module, seen = _Refuses(), []
        handles = []
        if own:
            handles.append(
                module.register_forward_hook(lambda *found: seen.append(("own", found[2] is None)), always_call=True)
            )
        if everywhere:
            register = torch.nn.modules.module.register_module_forward_hook
            handles.append(register(lambda *found: seen.append(("all", found[2] is None)), always_call=True))

        def program(values: Tensor, bad: bool) -> Tensor:
            try:
                return module(values, bad)
            except ValueError:
                return values

        compiled = compiler(program)
        try:
            for bad in (False, True, False, True):
                seen.append(compiled(torch.ones(1), bad).item())
        finally:
            for handle in handles:
                handle.remove()
        return seen

    assert run(lambda program: dovetail.compile(program, backend="aten", fullgraph=fullgraph)) == run(
        lambda program: program
    )


@pytest.mark.parametrize("library", ["tensordict.base", "torchrl.objectives", "transformers.models"])
def test_libraries_that_choose_algorithms_are_told_yes(library: str) -> None:
    """They take locks and references that a graph does not need where the answer is no."""
    space: dict[str, Any] = {"__name__": library, "torch": torch, "lock": threading.Lock()}
    exec(
        "def added(x):\n"
        "    if torch.compiler.is_compiling():\n        return x + 1\n"
        "    with lock:\n        return x + 1\n",
        space,
    )
    compiled = dovetail.compile(lambda x: space["added"](x) * 2, backend="aten")
    assert compiled(torch.ones(2)).tolist() == [4, 4]
    assert len(compiled.entries) == 1 and not compiled.continuations()
