"""Sizes that change from call to call: one recompile, then one entry for all, with eager's results and gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import dovetail
from dovetail import errors
from dovetail.versions import parse
from tests.differential import check_calls, entries_of, randn

SIZES = (8, 16, 5, 7)
BACKENDS = [("aten", True), ("inductor", False)]


@pytest.mark.parametrize(("backend", "exact"), BACKENDS)
def test_batch_size(backend: str, exact: bool) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.LayerNorm(8), torch.nn.Linear(8, 3))
    check_calls(model, [(randn(size, 4, grad=True),) for size in SIZES], entries=2, backend=backend, exact=exact)


@pytest.mark.parametrize(("backend", "exact"), BACKENDS)
@pytest.mark.slow
def test_two_dimensions_change_at_once(backend: str, exact: bool) -> None:
    def attention(q: Any, k: Any, v: Any) -> Any:
        batch, length, width = q.shape
        heads = 2
        q, k, v = (item.view(batch, length, heads, width // heads).transpose(1, 2) for item in (q, k, v))
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.size(-1))
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        result = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v
        return result.transpose(1, 2).reshape(batch, length, width)

    calls = [tuple(randn(batch, length, 8, grad=True) for _ in "qkv") for batch, length in ((2, 6), (3, 9), (4, 5))]
    # Before torch 2.13 a product of matrices in batches asks for plain sizes: one graph for each size.
    entries = 2 if parse(torch.__version__) >= (2, 13) else 3
    check_calls(attention, calls, entries=entries, backend=backend, exact=exact)


@pytest.mark.parametrize("sizes", [(8, 1, 0, 4, 1, 0, 9), (1, 8, 4, 1), (0, 1, 5, 6, 0)])
def test_batches_of_one_and_none(sizes: tuple[int, ...]) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    check_calls(model, [(randn(size, 4),) for size in sizes], entries=4)


def test_from_the_start() -> None:
    check_calls(lambda x, n: (x * n).sum(0), [(randn(size, 3), size) for size in SIZES], entries=1, dynamic=True)


def test_never() -> None:
    check_calls(lambda x: x * 2, [(randn(size, 3),) for size in (8, 16, 5)], dynamic=False)
    compiled = dovetail.compile(lambda x: x * 2, backend="aten", dynamic=False)
    for size in (8, 16, 5, 8):
        compiled(randn(size))
    assert entries_of(compiled) == 3


def test_sizes_that_must_be_equal() -> None:
    def add(x: Any, y: Any) -> Any:
        return (x + y).view(y.shape[0], -1).sum(1)

    sizes = [(8, 8), (6, 6), (5, 5), (7, 7)]
    check_calls(add, [(randn(a, 3, grad=True), randn(b, 3, grad=True)) for a, b in sizes], entries=2)


def test_equal_by_chance_is_not_equal_for_ever() -> None:
    def product(x: Any, y: Any) -> Any:
        return x.sum() * y.sum(), x.shape[0] + y.shape[0]

    sizes = [(8, 8), (6, 6), (5, 4), (9, 4)]
    check_calls(product, [(randn(a), randn(b)) for a, b in sizes], entries=2)


def test_broadcast_or_equal() -> None:
    sizes = [(8, 8), (6, 6), (6, 1), (1, 6), (5, 5), (4, 1)]
    check_calls(lambda x, y: x * y, [(randn(a, 2, grad=True), randn(b, 2, grad=True)) for a, b in sizes], entries=6)


def test_control_flow_on_a_size() -> None:
    def branch(x: Any) -> Any:
        if x.shape[0] > 6:
            return x.sum(0) * 2
        if x.shape[0] % 2 == 0:
            return x.mean(0)
        return x.amax(0)

    compiled = check_calls(branch, [(randn(size, 3),) for size in (8, 16, 4, 6, 5, 3, 20, 2)], entries=4)
    texts = str(dovetail.explain(compiled)(randn(1, 3)))
    assert "x.shape[0]" in texts


def test_loop_over_a_size_is_unrolled() -> None:
    def loop(x: Any) -> Any:
        total = x.new_zeros(x.shape[1])
        for position in range(x.shape[0]):
            total = total + x[position] * position
        return total

    check_calls(loop, [(randn(size, 3, grad=True),) for size in (3, 4, 5, 3)], entries=3)


def test_size_is_returned() -> None:
    def sizes(x: Any) -> Any:
        n = x.shape[0]
        found = {"n": n, "shape": x.shape, "double": [n * 2, n // 3, n % 3, -n, n / 4, math.sqrt(n)], "more": n > 3}
        return x * 2, found, (x.numel(), x.size(), len(x)), slice(0, n)

    check_calls(sizes, [(randn(size, 3),) for size in SIZES], entries=2)


def test_size_is_stored() -> None:
    class Seen:
        def __init__(self) -> None:
            self.size = 0
            self.sizes: list[int] = []

    def run(x: Any, seen: Any) -> Any:
        seen.size = x.shape[0] + 1
        seen.sizes = [x.shape[0], x.shape[1]]
        return x + 1

    check_calls(run, [(randn(size, 3), Seen()) for size in SIZES], entries=2)


def test_size_is_a_python_int() -> None:
    def types(x: Any) -> Any:
        n = x.shape[0]
        assert isinstance(n, int) and type(n) is int and not isinstance(n, (str, float))
        table = {n: "size", (n, 1): "pair"}
        text = f"{n} {n:03d} {n!r} {str(n)} {'%d' % n} {'{}'.format(n)}"
        items = list(range(40))
        return (
            x * 2,
            text,
            table[n],
            items[n],
            items[:n],
            n in {n},
            n in items,
            n.bit_length(),
            int(n),
            "ab" * n,
            hash(n),
        )

    check_calls(types, [(randn(size),) for size in (8, 16, 5)])


@pytest.mark.slow
def test_views_with_computed_sizes() -> None:
    def views(x: Any) -> Any:
        n = x.shape[0]
        a = x.view(n // 2, -1)
        b = x.reshape(2, n // 2, 6).flatten(1)
        c = x.unflatten(0, (2, n // 2)).permute(1, 0, 2)
        d = x[: n // 2].expand(n // 2, 6)
        e = x.narrow(0, 1, n - 1).contiguous()
        f = torch.cat([x, x.new_ones(n, 1)], 1).split([6, 1], 1)[0]
        return a, b * 1, c * 2, d.sum(), e, f

    # Several gradients meet in one input, and eager adds them up in another order.
    check_calls(views, [(randn(size, 6, grad=True),) for size in (8, 16, 4, 6)], entries=2, exact=False)


@pytest.mark.parametrize("differentiable", [True, False])
def test_returned_views_of_inputs(differentiable: bool) -> None:
    def views(x: Any) -> Any:
        n = x.shape[0]
        y = x * 2
        return x.view(-1), x[: n // 2], x.t(), y, y.view(n // 2, -1), y[1:]

    compiled = dovetail.compile(views, backend="aten", fullgraph=True)
    for size in (8, 16, 4, 6):
        x = randn(size, 4)
        if differentiable:
            x = x.requires_grad_().clone()
        for left, right in zip(views(x), compiled(x), strict=True):
            assert left.shape == right.shape and left.stride() == right.stride()
            assert torch.equal(left, right) and left._is_view() == right._is_view()
            assert left.storage_offset() == right.storage_offset()
    assert entries_of(compiled) == 2


def test_layouts_that_change() -> None:
    base = randn(32, 32)
    calls = [
        (base[:8],),
        (base[:16],),
        (base[:5].t(),),
        (base[:7, :9],),
        (base[:6, :9].t(),),
        (base[::2, :4],),
        (randn(9, 8),),
    ]
    check_calls(lambda x: (x * 2).sum(0), calls, entries=6)


def test_in_place_on_an_input() -> None:
    def write(x: Any) -> Any:
        x.add_(1)
        x[: x.shape[0] // 2].mul_(2)
        return x.sum()

    check_calls(write, [(randn(size, 2),) for size in SIZES], entries=2)


def test_batch_norm_and_dropout() -> None:
    model = torch.nn.Sequential(
        torch.nn.Conv1d(3, 4, 3), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5), torch.nn.ReLU()
    )
    # Torch's convolution takes another kernel from a batch of 16 on, and asks for the size.
    check_calls(model, [(randn(size, 3, 9, grad=True),) for size in (*SIZES, 20, 6)], entries=3)
    images = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3, padding=1), torch.nn.MaxPool2d(2), torch.nn.AdaptiveAvgPool2d(1)
    )
    # The other entry is for images of one window.
    check_calls(images, [(randn(2, 3, size, size + 2, grad=True),) for size in (8, 12, 10)], entries=3)


@pytest.mark.slow
def test_some_tangents_are_not_defined() -> None:
    for backend, exact in BACKENDS:
        compiled = dovetail.compile(lambda x: (x.sin() * x.shape[0], x.exp().sum(0)), backend=backend, fullgraph=True)
        for size in SIZES:
            for chosen in ((0,), (1,), (0, 1)):
                x, y = randn(size, 3, grad=True), randn(size, 3, grad=True)
                expected, actual = (x.sin() * size, x.exp().sum(0)), compiled(y)
                sum(expected[item].sum() for item in chosen).backward()  # type: ignore[union-attr]
                sum(actual[item].sum() for item in chosen).backward()
                assert x.grad is not None and y.grad is not None
                torch.testing.assert_close(x.grad, y.grad, rtol=0 if exact else 1e-5, atol=0 if exact else 1e-6)
        assert entries_of(compiled) == 2


def test_tangents_with_other_strides() -> None:
    compiled = dovetail.compile(lambda x: x.t().tanh(), backend="aten", fullgraph=True)
    for size in SIZES:
        x, y = randn(size, 3, grad=True), randn(size, 3, grad=True)
        tangent = randn(size, 3).t()
        x.t().tanh().backward(tangent)
        compiled(y).backward(tangent.contiguous())
        assert torch.equal(x.grad, y.grad)  # type: ignore[arg-type]


def test_eager_backend_with_other_sizes() -> None:
    def program(x: Any, n: Any) -> Any:
        return x.view(x.shape[0] // 2, -1)[: x.shape[0] // 4] * n

    check_calls(program, [(randn(8, 3), 2), (randn(16, 3), 3), (randn(12, 3), 5)], entries=3, backend="eager")


def test_marked_dimension() -> None:
    compiled = dovetail.compile(lambda x: x.sum(0), backend="aten", fullgraph=True)
    for size in (8, 16, 64):
        x = randn(size, 3)
        dovetail.mark_dynamic(x, 0, minimum=2, maximum=64)
        assert torch.equal(compiled(x), x.sum(0))
    assert entries_of(compiled) == 1
    assert torch.equal(compiled(randn(65, 3)), randn(65, 3).sum(0))
    assert entries_of(compiled) == 2
    with pytest.raises(errors.InputError, match="100.*64"):
        dovetail.mark_dynamic(randn(100, 3), 0, maximum=64)


def test_marked_dimension_that_the_program_fixes() -> None:
    def fixed(x: Any) -> Any:
        return x.view(4, 2, 3).sum(0) if x.shape[0] == 8 else x.sum(0)

    compiled = dovetail.compile(fixed, backend="aten", fullgraph=True)
    for size in (8, 16, 8, 5):
        x = randn(size, 3)
        dovetail.mark_dynamic(x, 0, minimum=2, maximum=64)
        assert torch.equal(compiled(x), fixed(x))
    assert entries_of(compiled) == 2


def test_bad_marks() -> None:
    with pytest.raises(errors.InputError):
        dovetail.mark_dynamic(randn(3), 1)
    with pytest.raises(errors.OptionError):
        dovetail.compile(lambda x: x, dynamic="yes")


def test_torch_marks_are_respected() -> None:
    compiled = dovetail.compile(lambda x: x * 2, backend="aten")
    x = randn(8)
    torch._dynamo.mark_dynamic(x, 0)
    compiled(x)
    compiled(randn(16))
    assert entries_of(compiled) == 1


def test_export_keeps_symbolic_sizes(tmp_path: Any) -> None:
    x = randn(8, 3)
    dovetail.mark_dynamic(x, 0)
    joint = dovetail.capture(lambda x: x * 2, (x,))
    loaded = dovetail.load(joint.export(tmp_path / "out"))
    assert torch.equal(loaded(randn(5, 3)), randn(5, 3) * 2)
    with pytest.raises(errors.InputError, match="shape"):
        loaded(randn(5, 4))
    assert torch.equal(joint.compile(backend="aten")(randn(5, 3)), randn(5, 3) * 2)


def test_recompile_sentence_names_size_and_line() -> None:
    def sized(x: Any) -> Any:
        return x.view(-1, 4) if x.shape[0] % 4 == 0 else x

    compiled = dovetail.compile(sized, backend="aten")
    for size in (8, 16, 7):
        compiled(randn(size))
    reasons = [str(event) for event in dovetail.events_of(compiled).events if "recompile" in str(event)]
    assert "`x.shape[0]` was 8, is 16" in reasons[0]
    assert "`(x.shape[0] % 4) == 0` must hold" in reasons[1]
    assert "x.shape[0] % 4 == 0 else x" in reasons[1]
