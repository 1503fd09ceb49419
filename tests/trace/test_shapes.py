"""Symbolic sizes and numbers: eager's results at every size, at most one more entry, and every assumption guarded."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail
from dovetail.backends import Backend
from dovetail.errors import InputError, OptionError
from dovetail.versions import parse
from tests.differential import check_entries, leaf, same

SIZES = (3, 5, 7, 11)


def two_views(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = x * 2
    return y, y[1:]


def written(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y.mul_(2)
    return y.sum()


def causal(x: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(x.shape[0], x.shape[0]).triu(1).bool()
    return torch.softmax(x.masked_fill(mask, -1e9), -1)


F = torch.nn.functional
CASES: dict[str, tuple[Callable[..., Any], list[tuple[Any, ...]], int]] = {
    "view": (lambda x: x.view(x.shape[0] * x.shape[1]).sin(), [(leaf(n, 4),) for n in SIZES], 2),
    "reshape": (lambda x: x.reshape(-1, 2).cos(), [(leaf(n, 4),) for n in SIZES], 2),
    "sizes leave": (
        lambda x: (x * x.shape[0], x.shape[0], x.shape, [x.size(0) + 1], len(x)),
        [(leaf(n, 4),) for n in SIZES],
        2,
    ),
    "branch": (lambda x: x.sin() if x.shape[0] > 6 else x.cos(), [(leaf(n, 4),) for n in (3, 4, 5, 8, 9, 10)], 3),
    "loop": (lambda x: sum(x[i] for i in range(x.shape[0])), [(leaf(n, 4),) for n in (2, 3, 4)], 3),
    "equal sizes": (lambda x, y: x + y, [(leaf(n, 4), leaf(n, 4)) for n in SIZES], 2),
    "broadcast later": (lambda x, y: x + y, [(leaf(n, 4), leaf(m, 4)) for n, m in ((3, 3), (5, 5), (4, 1), (6, 6))], 3),
    "cat": (lambda x, y: torch.cat([x, y]), [(leaf(n, 4), leaf(m, 4)) for n, m in ((2, 3), (4, 5), (6, 7), (9, 9))], 2),
    "matmul": (lambda x, y: x @ y, [(leaf(2, n, 4), leaf(2, 4, n)) for n in SIZES], 2),
    "text": (lambda x: (x * 2, f"{x.shape[0]}-{tuple(x.shape)}"), [(leaf(n, 4),) for n in (3, 5, 7)], 3),
    "number": (lambda x, k: x * k + k, [(leaf(3), k) for k in (2, 3, 4, 5, 9)], 2),
    "special numbers": (lambda x, k: x * k, [(leaf(3), k) for k in (0, 1, 2, 3, 4, -1)], 6),
    "number in slice": (lambda x, k: x[:k].sin(), [(leaf(12), k) for k in (2, 3, 4, 5)], 2),
    "number in dictionary": (lambda x, k: x * {2: 1.0, 3: 2.0, 4: 3.0}[k], [(leaf(3), k) for k in (2, 3, 4)], 3),
    "number type": (
        lambda x, k: x * (k if isinstance(k, int) and type(k) is int else 0),
        [(leaf(3), k) for k in (2, 5, 7)],
        2,
    ),
    "zeros": (lambda x: torch.zeros(x.shape[0], 3) + x.sum(), [(leaf(n, 4),) for n in SIZES], 2),
    "arange": (lambda x: torch.arange(x.shape[1]) * x, [(leaf(3, n),) for n in SIZES], 2),
    "causal mask": (causal, [(leaf(n, n),) for n in SIZES], 2),
    "pad": (lambda x: F.pad(x, (0, 1), value=3.0), [(leaf(n, m),) for n, m in ((2, 3), (4, 5), (6, 7))], 2),
    "dropout": (lambda x: F.dropout(x, 0.5), [(leaf(n, 4),) for n in SIZES], 2),
    "attention": (
        lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True),
        [(leaf(2, 2, n, 8),) for n in SIZES],
        2,
    ),
    "convolution": (
        lambda x: F.conv2d(x, torch.ones(2, 3, 3, 3)),
        [(leaf(n, 3, h, h),) for n, h in ((2, 6), (3, 7), (4, 9))],
        2,
    ),
    "pooling": (lambda x: F.max_pool2d(x, 2), [(leaf(n, 3, h, h),) for n, h in ((2, 6), (3, 8), (4, 10))], 2),
    "returned view": (lambda x: x.t(), [(leaf(n, 4),) for n in SIZES], 2),
    "two views": (two_views, [(leaf(n, 4),) for n in SIZES], 2),
    "written": (written, [(leaf(n, 4),) for n in SIZES], 2),
    "mean": (lambda x: x.mean(0) / x.shape[0] ** 0.5, [(leaf(n, 4),) for n in SIZES], 2),
    "one and none": (lambda x: x.sin().sum(0), [(leaf(n, 4),) for n in (4, 1, 6, 0, 7, 1, 0)], 4),
    "encoder": (
        torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        [(leaf(n, m, 8),) for n, m in ((2, 3), (4, 5), (6, 7))],
        2,
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled(8)
def test_sizes_that_change(name: str) -> None:
    function, calls, most = CASES[name]
    # A product of matrices in batches asks for plain sizes before torch 2.13: one graph for each size.
    most += len(calls) * (name in ("matmul", "encoder") and parse(torch.__version__) < (2, 13))
    if isinstance(function, torch.nn.Module):
        module = function
        assert check_entries(lambda x: module(x), calls) <= most
    else:
        assert check_entries(function, calls) <= most


def test_dynamic_from_the_start() -> None:
    assert check_entries(lambda x, k: x * k, [(leaf(n, 4), k) for n, k in ((3, 4), (5, 6))], dynamic=True) == 1


def test_never_dynamic() -> None:
    assert check_entries(lambda x: x * 2, [(leaf(n, 4),) for n in (2, 3, 4)], dynamic=False) == 3
    with pytest.raises(OptionError, match="dynamic"):
        dovetail.compile(torch.sin, dynamic="yes")


def test_marked() -> None:
    compiled = dovetail.compile(lambda x: x * 2, backend="aten", fullgraph=True)
    for size in (8, 9, 16):
        compiled(dovetail.mark_dynamic(torch.ones(size, 3), 0, minimum=2, maximum=16))
    assert len(compiled.entries) == 1
    compiled(torch.ones(40, 3))
    assert len(compiled.entries) == 2
    with pytest.raises(InputError, match="outside of"):
        dovetail.mark_dynamic(torch.ones(1, 3), 0, minimum=2)
    with pytest.raises(InputError, match="no dimension"):
        dovetail.mark_dynamic(torch.ones(1, 3), 2)


def test_recompile_sentence() -> None:
    compiled = dovetail.compile(lambda x: x.sin() if x.shape[0] > 6 else x.cos(), backend="aten", fullgraph=True)
    for size in (3, 4, 9):
        compiled(torch.ones(size, 2))
    reasons = [
        str(event.details["reason"]) for event in dovetail.events_of(compiled).events if event.name == "recompile"
    ]
    assert "x.shape[0]` was 3, is 4" in reasons[0]
    assert "x.shape[0]" in reasons[1] and "must" in reasons[1] and __file__ in reasons[1]


# --- each origin of a guard: without it, the entry would be used for a size for which its graph is wrong ---------------


class BranchInBackward(torch.autograd.Function):
    """A backward that does something else for large inputs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * 3 if gradient.shape[0] > 6 else gradient * 2


def test_guard_from_the_backward() -> None:
    assert check_entries(lambda x: BranchInBackward.apply(x), [(leaf(n, 4),) for n in (3, 4, 5)]) == 2
    # The graph of size 4 and 5 would double the gradient; eager triples it.
    assert check_entries(lambda x: BranchInBackward.apply(x), [(leaf(n, 4),) for n in (3, 4, 8, 9)]) == 3


def test_guard_from_a_decomposition() -> None:
    def softplus(x: torch.Tensor, beta: float = 1.0, threshold: float = 20.0) -> torch.Tensor:
        # As a backend may do it: another formula where there is little to compute.
        return torch.log1p(torch.exp(x)) if x.shape[0] > 6 else torch.log(torch.exp(x) + 1)

    def compile_plainly(graph: torch.fx.GraphModule, examples: Any, *, kind: str, options: Any) -> Any:
        seen.append({str(node.target) for node in graph.graph.nodes})
        return lambda inputs: list(graph(*inputs))

    seen: list[set[str]] = []
    backend = Backend(
        "branching",
        compile_plainly,
        decompositions=lambda: {torch.ops.aten.softplus.default: softplus},
        numerics="tolerance",
    )
    compiled = dovetail.compile(F.softplus, backend=backend, fullgraph=True)
    for size in (3, 4, 5, 8, 9):
        torch.testing.assert_close(compiled(torch.ones(size)), F.softplus(torch.ones(size)))
    assert len(compiled.entries) == 3
    assert ["aten.log1p.default" in names for names in seen] == [False, False, True]


def test_guard_from_inductor() -> None:
    def compile_with_a_guard(graph: torch.fx.GraphModule, examples: Any, *, kind: str, options: Any) -> Any:
        from dovetail.backends.inductor.backend import compile_inductor

        # What Inductor does where one kernel serves sizes below a bound only.
        inputs = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
        bounds.append(bool(inputs[0].shape[0] < 100))
        return compile_inductor(graph, examples, kind=kind, options=options)  # type: ignore[arg-type]

    bounds: list[bool] = []
    compiled = dovetail.compile(
        lambda x: x * 2, backend=Backend("bounded", compile_with_a_guard, numerics="tolerance"), fullgraph=True
    )
    for size in (3, 4, 50, 200):
        torch.testing.assert_close(compiled(torch.ones(size)), torch.full((size,), 2.0))
    assert bounds == [True, True, False]
    assert len(compiled.entries) == 3


@pytest.mark.slow
def test_inductor_with_changing_sizes() -> None:
    assert (
        check_entries(lambda x, y: (x @ y).relu(), [(leaf(n, 4), leaf(4, n)) for n in (3, 5, 7)], backend="inductor")
        == 2
    )


def test_graph_breaks_with_changing_sizes() -> None:
    def program(x: torch.Tensor, k: int) -> tuple[torch.Tensor, int]:
        y = x * k
        print(end="")
        return y.sin() * x.shape[0], k + x.shape[0]

    compiled = dovetail.compile(program, backend="aten")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for size in (3, 4, 5, 6):
            same(program(torch.ones(size, 2), size + 1), compiled(torch.ones(size, 2), size + 1))
    assert len(compiled.entries) <= 2
    assert all(len(item.entries) <= 2 for item in compiled.continuations())
