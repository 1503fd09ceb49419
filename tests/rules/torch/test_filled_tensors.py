"""Tensors that torch fills in another way while it is traced."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dovetail
from tests.differential import same


def test_one_hot_is_contiguous() -> None:
    def program(classes: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(classes, num_classes=4)

    compiled = dovetail.compile(program, backend="aten", fullgraph=True)
    for classes in (torch.arange(3), torch.arange(4).view(2, 2).T, torch.ones(1, 1, dtype=torch.int64).expand(3, 2)):
        same(program(classes), compiled(classes))


def count(classes: torch.Tensor, number: int) -> torch.Tensor:
    return torch.nn.functional.one_hot(classes, number).sum(0)


def by_keyword(classes: torch.Tensor, number: int) -> torch.Tensor:
    return torch.nn.functional.one_hot(num_classes=number, input=classes) * 2


def guessed(classes: torch.Tensor, number: int) -> torch.Tensor:
    return torch.nn.functional.one_hot(classes) * number


def batched(classes: torch.Tensor, number: int) -> torch.Tensor:
    return torch.vmap(lambda item: torch.nn.functional.one_hot(item, number))(classes)


def loss(classes: torch.Tensor, number: int) -> torch.Tensor:
    weight = torch.arange(1.0, number + 1, requires_grad=True)
    with torch.enable_grad():
        (torch.nn.functional.one_hot(classes, number) * weight.exp()).sum().backward()
    assert weight.grad is not None
    return weight.grad


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore::dovetail.errors.GraphBreakWarning")
@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("program", [count, by_keyword, guessed, batched, loss], ids=lambda item: item.__name__)
def test_one_hot_refuses_classes_that_there_are_not(program: Any, fullgraph: bool) -> None:
    if program is guessed and fullgraph:
        pytest.skip("the number of classes is data")
    compiled = dovetail.compile(program, backend="aten", fullgraph=fullgraph)
    for classes in ([0, 2, 1], [0, 3, 1], [0, -100, 2], [], [1, 1, 1], [7, 7, 7]):
        given = torch.tensor(classes, dtype=torch.int64)
        expected = error_of(lambda given=given: program(given, 3))  # type: ignore[misc]
        found = error_of(lambda given=given: compiled(given, 3))  # type: ignore[misc]
        if isinstance(expected, torch.Tensor):
            same(expected, found)
        else:
            assert found == expected


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_one_hot_is_one_graph_on_other_backends(backend: str) -> None:
    compiled = dovetail.compile(count, backend=backend, fullgraph=True, tiers="never")
    for classes in ([0, 2, 1], [2, 2, 2], [0, 3, 1]):
        given = torch.tensor(classes)
        assert repr(error_of(lambda given=given: compiled(given, 3))) == repr(  # type: ignore[misc]
            error_of(lambda given=given: count(given, 3))  # type: ignore[misc]
        )


def test_a_captured_one_hot_checks_and_is_data(tmp_path: Path) -> None:
    joint = dovetail.capture(lambda classes: count(classes, 3), (torch.tensor([0, 1]),))
    loaded = dovetail.load(joint.export(tmp_path / "counts"))
    for run in (joint.compile(backend="aten"), loaded.compile(backend="aten")):
        assert run(torch.tensor([2, 2])).tolist() == [0, 0, 2]
        with pytest.raises(RuntimeError, match="class"):
            run(torch.tensor([2, 3]))


def test_one_hot_in_a_backward_checks_too() -> None:
    class Chosen(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(classes)
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            return gradient * torch.nn.functional.one_hot(ctx.saved_tensors[0], 3), None

    compiled = dovetail.compile(Chosen.apply, backend="aten", fullgraph=True)
    for classes in ([0, 2], [0, 5], [1, 1], [-1, 0]):
        x, given = torch.ones(2, 3, requires_grad=True), torch.tensor(classes)
        expected = error_of(lambda x=x, given=given: torch.autograd.grad(Chosen.apply(x, given).sum(), x)[0])  # type: ignore[misc]
        found = error_of(lambda x=x, given=given: torch.autograd.grad(compiled(x, given).sum(), x)[0])  # type: ignore[misc]
        assert repr(found) == repr(expected)


def error_of(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:  # noqa: BLE001  (whatever eager raises is what is expected)
        return type(error), str(error)
