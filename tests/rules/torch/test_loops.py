"""``map``, ``scan`` and ``while_loop`` are one node each: values and gradients are those of the loop, and torch's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._higher_order_ops.map import map as mapped
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.utils._pytree import tree_leaves, tree_map

import dovetail
from dovetail.errors import GraphBreakError, HigherOrderGradientError
from dovetail.torch_private.libraries import DIFFERENTIATES_SCANS

WEIGHT = torch.tensor([[0.5, -0.25], [0.75, 0.125]], requires_grad=True)
CELL = torch.nn.GRUCell(2, 2)
ZERO = torch.tensor(0)
has_scan_gradients = pytest.mark.skipif(not DIFFERENTIATES_SCANS, reason="torch 2.13 and newer")


def _plain_map(function: Any, xs: Any, *args: Any) -> Any:
    count = len(tree_leaves(xs)[0])
    found = [function(tree_map(lambda item, at=at: item[at], xs), *args) for at in range(count)]
    return tree_map(lambda *rows: torch.stack(rows), *found)


def _plain_scan(function: Any, init: Any, xs: Any, dim: int = 0, reverse: bool = False) -> Any:
    count = tree_leaves(xs)[0].shape[dim]
    rows = []
    for at in reversed(range(count)) if reverse else range(count):
        init, row = function(init, tree_map(lambda item, at=at: item.select(dim, at), xs))
        rows.append(row)
    ordered = rows[::-1] if reverse else rows
    return init, tree_map(lambda *parts: torch.stack(parts, dim), *ordered)


def _plain_while(goes_on: Any, step: Any, carried: Any) -> Any:
    while goes_on(*carried):
        carried = step(*carried)
    return carried


def rows_with_a_parameter(x: torch.Tensor, loops: Any) -> Any:
    shift = x.sum()
    return loops.map(lambda row: (row @ WEIGHT).sin() * WEIGHT.sum() + shift, x * 1)


def rows_of_two(x: torch.Tensor, loops: Any) -> Any:
    found = loops.map(lambda pair, w: {"a": pair[0] @ w, "b": (pair[1] * 2).exp()}, (x, x.cos()), WEIGHT)
    return found["a"] + found["b"]


def rows_of_rows(x: torch.Tensor, loops: Any) -> Any:
    return loops.map(lambda row: loops.map(lambda item: item.sin() * WEIGHT[0], row), x[:, :, None] * 2)


def a_recurrent_cell(x: torch.Tensor, loops: Any) -> Any:
    def step(state: torch.Tensor, row: torch.Tensor) -> Any:
        following = CELL(row[None], state)
        return following, following.clone()

    return loops.scan(step, torch.zeros(1, 2), x)


def backwards_over_columns(x: torch.Tensor, loops: Any) -> Any:
    def step(state: Any, column: torch.Tensor) -> Any:
        return {"sum": state["sum"] + column, "n": state["n"] * 0.5}, [column * state["n"] * WEIGHT[0, 0]]

    return loops.scan(step, {"sum": x[:, 0].clone(), "n": torch.ones(())}, x, dim=1, reverse=True)


def a_condition_in_a_scan(x: torch.Tensor, loops: Any) -> Any:
    def step(state: torch.Tensor, row: torch.Tensor) -> Any:
        following = torch.cond(row.sum() > 2, lambda s, r: s + r @ WEIGHT, lambda s, r: s * r, (state, row))
        return following, row * 2

    return loops.scan(step, torch.ones(2), x)


def until_it_is_large(x: torch.Tensor, loops: Any) -> Any:
    goes_on = lambda i, y: (y.detach().abs().sum() < 50) & (i < 20)  # noqa: E731
    return loops.while_loop(goes_on, lambda i, y: (i + 1, (y @ WEIGHT).tanh() * 2 + y * WEIGHT[0] + y), (ZERO, x * 1))


def roots(x: torch.Tensor, loops: Any) -> Any:
    goes_on = lambda y: (y.detach() * y.detach() - 2).abs().max() > 1e-4  # noqa: E731
    return loops.while_loop(goes_on, lambda y: (y - (y * y - 2) / (2 * y),), (x.abs() + 1,))[0] * x


def a_loop_in_a_map(x: torch.Tensor, loops: Any) -> Any:
    def row(item: torch.Tensor) -> torch.Tensor:
        step = lambda y: (y * y + 1,)  # noqa: E731
        return loops.while_loop(lambda y: y.sum() < 30, step, (item * 1,))[0]  # type: ignore[no-any-return]

    return loops.map(row, x)


class Torchs:
    map, scan, while_loop = staticmethod(mapped), staticmethod(scan), staticmethod(while_loop)


class Plain:
    map, scan, while_loop = staticmethod(_plain_map), staticmethod(_plain_scan), staticmethod(_plain_while)


SCANS = [a_recurrent_cell, backwards_over_columns, a_condition_in_a_scan]
LOOPS = [rows_with_a_parameter, rows_of_two, rows_of_rows, until_it_is_large, roots, a_loop_in_a_map]
programs = pytest.mark.parametrize(
    "program",
    [*LOOPS, *[pytest.param(item, marks=has_scan_gradients) for item in SCANS]],
    ids=lambda item: item.__name__,
)


def _outcomes(function: Callable[[torch.Tensor], Any]) -> list[Any]:
    found: list[Any] = []
    for rows, scale in ((3, 1.0), (3, 2.0), (3, -0.5)):
        x = (scale * torch.arange(1.0, 1 + 2 * rows).reshape(rows, 2) / 3).requires_grad_()
        results = [item for item in tree_leaves(function(x)) if item.is_floating_point()]
        total = sum(item.square().sum() for item in results)
        wanted = [x, WEIGHT, *CELL.parameters()]
        gradients = torch.autograd.grad(total, wanted, allow_unused=True)  # type: ignore[arg-type]
        filled = [torch.zeros_like(at) if item is None else item for at, item in zip(wanted, gradients, strict=True)]
        found.append([*results, *filled])
    return found


@programs
@pytest.mark.parametrize("backend", ["aten", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_loop_is_one_node(program: Any, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own functions compile what they are given, which takes seconds: here plain loops are the oracle."""
    compiled = dovetail.compile(lambda x: program(x, Torchs), backend=backend, fullgraph=True)
    actual = _outcomes(compiled)
    assert len(compiled.entries) == 1
    condition = lambda pred, true_fn, false_fn, operands: (true_fn if pred else false_fn)(*operands)  # noqa: E731
    monkeypatch.setattr(torch, "cond", condition)
    torch.testing.assert_close(actual, _outcomes(lambda x: program(x, Plain)))


@pytest.mark.slow
@programs
def test_a_loop_is_as_torchs(program: Any) -> None:
    """To the last bit, but for linear layers in a scan, of which torch's derivative copies the transposed weight."""
    actual = _outcomes(dovetail.compile(lambda x: program(x, Torchs), backend="aten", fullgraph=True))
    # Torch's own loops compile what they are given, and fail at a second kind of ``while_loop`` in a ``map`` if they remember.
    torch.compiler.reset()
    expected = _outcomes(lambda x: program(x, Torchs))
    is_exact = program is not a_recurrent_cell
    tolerance: dict[str, float] = {"rtol": 0, "atol": 0} if is_exact else {}
    torch.testing.assert_close(actual, expected, **tolerance)  # type: ignore[arg-type]


@pytest.mark.slow
def test_gradients_of_no_round_are_torchs() -> None:
    """Torch differentiates one round of a loop that had none."""

    def program(x: torch.Tensor) -> Any:
        return while_loop(lambda i, y: i > 0, lambda i, y: (i + 1, (y @ WEIGHT).sin()), (ZERO, x))[1]

    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
    found = []
    for function in (program, dovetail.compile(program, backend="aten", fullgraph=True)):
        result = function(x)
        found.append([result.detach(), *torch.autograd.grad(result.sum(), [x, WEIGHT], allow_unused=True)])
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
    torch.testing.assert_close(found[1][0], x.detach(), rtol=0, atol=0)


def test_without_a_gradient_no_round_is_run() -> None:
    compiled = dovetail.compile(
        lambda x: while_loop(lambda y: y.sum() > 0, lambda y: (y - 1,), (x,))[0], backend="aten", fullgraph=True
    )
    for value in (-1.0, 2.5, -3.0):
        x = torch.tensor([value])
        result = compiled(x)
        assert result.item() == (value if value < 0 else -0.5)
        assert result.data_ptr() != x.data_ptr()
    assert len(compiled.entries) == 1


def test_a_map_has_a_second_derivative() -> None:
    def slope(function: Any) -> Any:
        x = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
        first = torch.autograd.grad(function(x).sum(), [x, WEIGHT], create_graph=True)
        return torch.autograd.grad(sum(item.square().sum() for item in first), [x, WEIGHT])  # type: ignore[arg-type]

    compiled = dovetail.compile(lambda x: rows_with_a_parameter(x, Torchs), backend="aten", fullgraph=True)
    torch.testing.assert_close(slope(compiled), slope(lambda x: rows_with_a_parameter(x, Plain)))


@pytest.mark.parametrize("program", [until_it_is_large, pytest.param(a_recurrent_cell, marks=has_scan_gradients)])
def test_what_torch_differentiates_otherwise_is_refused(program: Any) -> None:
    """Torch's second derivatives of the two are not those of the loop."""
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
    total = dovetail.compile(lambda x: program(x, Torchs)[1].sum(), backend="aten", fullgraph=True)(x)
    (slope,) = torch.autograd.grad(total, x, create_graph=True)
    with pytest.raises(HigherOrderGradientError, match="have no second derivative"):
        slope.square().sum().backward()


def test_a_changed_number_in_a_closure_is_seen() -> None:
    def program(x: torch.Tensor, factor: int) -> Any:
        return mapped(lambda row: row * factor, x)

    compiled = dovetail.compile(program, backend="aten", fullgraph=True)
    x = torch.ones(2, 2)
    assert [compiled(x, factor).sum().item() for factor in (2, 3, 2)] == [8, 12, 8]


LOG: list[int] = []


def _logs(row: torch.Tensor) -> torch.Tensor:
    LOG.append(1)
    return row * 2


REFUSED: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "a list": (lambda x: mapped(_logs, x), "writes to what exists outside"),
    "a list of its own": (
        lambda x: (lambda log: (mapped(lambda row: (log.append(1), row * 2)[1], x), len(log)))([]),
        "writes to what exists outside",
    ),
    "a tensor": (
        lambda x: (lambda y: (mapped(lambda row: (y.add_(1), row * y)[1], x), y))(torch.zeros(2)),
        "writes to what exists outside",
    ),
    "the carry": (lambda x: scan(lambda c, r: (c.add_(r), c * 2), torch.zeros(2), x), "writes to what exists outside"),
    "a terminal": (lambda x: mapped(lambda row: (print("row"), row * 2)[1], x), "print"),
    "a view": (lambda x: mapped(lambda row: row[:1], x), "returns something else than new tensors"),
    "one result twice": (
        lambda x: scan(lambda c, r: (lambda y: (y, y))(c + r), torch.zeros(2), x),
        "returns something else than new tensors",
    ),
    "random numbers": (lambda x: mapped(lambda row: row * torch.rand(2), x), "draws random numbers"),
    "another carry": (lambda x: scan(lambda c, r: (c + r.sum(), r * 2), torch.zeros(()).long(), x), "other kinds"),
    "other strides": (
        lambda x: while_loop(lambda y: y.sum() < 9, lambda y: ((y + 1).t().contiguous().t(),), (x,)),
        "other kinds",
    ),
    "a condition of two": (lambda x: while_loop(lambda y: y[0] < 9, lambda y: (y + 1,), (x,)), "no boolean"),
    "a number": (lambda x: mapped(lambda row, k: row * k, x, 2), "something else than tensors"),
    "no gradient": (lambda x: mapped(lambda row: (row > 0).long(), x), "has no gradient"),
    "a loop in a condition": (
        lambda x: torch.cond(
            x.sum() > 0, lambda x: while_loop(lambda y: y.sum() < 9, lambda y: (y + 1,), (x * 1,))[0], torch.sin, (x,)
        ),
        "loop whose end depends on data",
    ),
    "torch.func": (lambda x: torch.vmap(lambda r: mapped(lambda item: item.sin(), r))(x[:, :, None] * 1), "torch.func"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_torch_may_refuse_is_refused_in_words(name: str) -> None:
    function, words = REFUSED[name]
    with pytest.raises(GraphBreakError, match=words):
        dovetail.compile(function, backend="aten", fullgraph=True)(torch.ones(2, 2, requires_grad=True))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name in REFUSED if name != "a terminal"])
def test_what_torch_may_refuse_is_left_to_it(name: str) -> None:
    def outcome(function: Callable[..., Any]) -> Any:
        LOG.clear()
        torch.manual_seed(0)
        try:
            return [item.tolist() if isinstance(item, torch.Tensor) else item for item in tree_leaves(function(x))], LOG
        except Exception as error:  # noqa: BLE001
            return type(error).__name__

    x = torch.ones(2, 2, requires_grad=True)
    assert outcome(dovetail.compile(REFUSED[name][0], backend="aten")) == outcome(REFUSED[name][0])


@pytest.mark.parametrize("dynamic", [None, True])
def test_sizes_that_change_are_each_captured(dynamic: bool | None) -> None:
    def program(x: torch.Tensor, factor: float) -> Any:
        y = torch.cond(x.sum() > 5, lambda x: x * x.shape[0], lambda x: x - factor, (x,))
        return mapped(lambda row: row.sin() * y.shape[0] * factor, y)

    compiled = dovetail.compile(program, backend="aten", fullgraph=True, dynamic=dynamic)
    for count, factor in ((2, 1.5), (3, 1.5), (3, 2.5), (2, 1.5)):
        x = torch.arange(2.0 * count).reshape(count, 2)
        y = x * count if x.sum() > 5 else x - factor
        torch.testing.assert_close(compiled(x, factor), y.sin() * count * factor)
