"""``out=``: the given tensor keeps its memory, strides and type, and eager's errors stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import dovetail
from dovetail.versions import parse
from tests.differential import check_calls, same

SQUARE = torch.tensor([[4.0, 1.0, 0.0], [1.0, 3.0, 1.0], [0.0, 1.0, 2.0]])


def lost_by_composition(x: torch.Tensor) -> Any:
    rank, product = torch.zeros((), dtype=torch.int64), torch.zeros(3, 3)
    torch.linalg.matrix_rank(x, out=rank)
    return rank, product, torch.chain_matmul(x, x, x, out=product) is product


def strides_of_columns(x: torch.Tensor) -> Any:
    factor, inverse = torch.zeros(3, 3), torch.zeros(3, 3)
    torch.linalg.cholesky(x, out=factor)
    torch.linalg.inv(x, out=inverse)
    return factor, inverse


def not_the_operand(x: torch.Tensor) -> Any:
    out = torch.zeros(3, 3)
    torch.conj_physical(x, out=out)
    out.mul_(3)
    return out, x * 1


def rows_of_a_buffer(x: torch.Tensor) -> Any:
    buffer = torch.zeros(2, 3, 3)
    torch.matmul(x, x, out=buffer[0])
    torch.exp(x, out=buffer[1])
    return buffer


def several(x: torch.Tensor) -> Any:
    values, places = torch.zeros(3), torch.zeros(3, dtype=torch.int64)
    found = torch.max(x, 1, out=(values, places))
    return values, places, type(found).__name__, found[0] is values, found.indices is places


def grown(x: torch.Tensor) -> Any:
    out = torch.empty(0)
    torch.mul(x, 2, out=out)
    return out


def also_read(x: torch.Tensor) -> Any:
    y = x.clone()
    torch.mul(y, y, out=y)
    return y


def drawn(x: torch.Tensor) -> Any:
    out = torch.empty(3, 3)
    torch.randn(3, 3, out=out)
    return out + x


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "function",
    [
        *(lost_by_composition, strides_of_columns, not_the_operand, rows_of_a_buffer, several, also_read, drawn),
        pytest.param(
            grown,
            marks=pytest.mark.skipif(
                parse(torch.__version__) >= (2, 15), reason="functionalisation of torch 2.15 grows no tensor of a trace"
            ),
        ),
    ],
)
def test_one_graph_with_eagers_memory(function: Any) -> None:
    # What a tensor without elements grows to has the strides of columns, which only eager knows.
    check_calls(function, [(SQUARE,), (SQUARE * 2,), *([(SQUARE.t(),)] if function is not grown else [])])


@pytest.mark.parametrize("backend", ["aten", "eager"])
@pytest.mark.parametrize(
    "call",
    [
        lambda x: torch.sum(x, out=torch.zeros(())),
        lambda x: torch.cat([x, x], out=torch.zeros(6, 3, dtype=torch.int64)),
        lambda x: torch.all(x > 1, out=torch.zeros((), dtype=torch.int64)),
        lambda x: torch.exp(x, out=torch.zeros(3, 3, requires_grad=True)),
        lambda x: torch.atanh(x / 9, out=torch.zeros(3, 3, 2)[..., 0]),
        lambda x: torch.sum(x, 0, out=torch.zeros(3, dtype=torch.float64)),
        lambda x: torch.matmul(x, x, out=torch.zeros(2, 2)),
        # Kernels of products round by the address of what they write; others write strides of their own where a size is 1.
        lambda x: torch.mm(x.repeat(3, 3).sin(), x.repeat(3, 3).cos(), out=torch.zeros(2, 9, 9)[1]),
        lambda x: torch.mv(x.repeat(3, 11).sin(), x.repeat(11, 1)[:, 0].exp(), out=torch.zeros(2, 9)[1]),
        lambda x: torch.linalg.solve(x, x[:, :1], out=torch.zeros(0)),
        lambda x: torch.linalg.eigvals(x[:1, :1], out=torch.zeros(1, 2, dtype=torch.complex64)[:, 0]),
        lambda x: torch.dequantize(x, out=torch.zeros(3, 3)),  # type: ignore[call-overload]
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_other_kinds_are_eagers(call: Any, backend: str) -> None:
    def run(function: Any) -> Any:
        try:
            return function(SQUARE.clone())
        except (RuntimeError, TypeError) as error:
            return type(error), str(error)

    same(run(call), run(dovetail.compile(call, backend=backend)))


def test_a_loop_writes_to_one_input() -> None:
    def step(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return torch.add(x, out, out=out)

    check_calls(step, [(torch.ones(3), torch.zeros(3)), (torch.ones(3), torch.ones(3))], entries=1)


def test_a_mode_of_the_program_sees_one_call() -> None:
    def function(x: torch.Tensor) -> Any:
        with FlopCounterMode(display=False) as mode:
            out = torch.empty_like(x)
            torch.mm(x, x, out=out)
        return mode.get_total_flops(), out

    compiled = dovetail.compile(function, backend="aten")
    for size in (4, 4, 6):
        x = torch.randn(size, size)
        ours, theirs = compiled(x), function(x)
        assert ours[0] == theirs[0] == 2 * size**3 and torch.equal(ours[1], theirs[1])


def test_a_list_that_is_written_is_what_is_returned() -> None:
    def function(x: torch.Tensor) -> Any:
        tensors = [x * 1, x * 2]
        returned = getattr(torch, "_foreach_add_")(tensors, 1.0)  # noqa: B009
        return returned is tensors, returned

    compiled = dovetail.compile(function, backend="aten", fullgraph=True)
    for run in (function, compiled):
        is_same, tensors = run(torch.ones(2))
        assert is_same and [item.tolist() for item in tensors] == [[2.0, 2.0], [3.0, 3.0]]
