"""Arithmetic whose results and types Inductor has in another way than eager's kernels."""

from __future__ import annotations

import functools
import math
import operator
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail
from dovetail.torch_private import compilers as private_compilers
from dovetail.torch_private import inductor as private_inductor
from tests.differential import check, leaf

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(private_compilers.cpp_compiler() is None, reason="needs a C++ compiler"),
]
_INF, _NAN = math.inf, math.nan


def _compare(function: Callable[..., Any], *args: torch.Tensor) -> None:
    compiled = dovetail.compile(function, backend="inductor", tiers="wait", fullgraph=True)
    torch.testing.assert_close(compiled(*args), function(*args), rtol=1e-5, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.sampled(1)
def test_quotients_are_rounded_down_as_in_python(dtype: torch.dtype) -> None:
    one = torch.tensor(
        [1.0, -1.0, _INF, -0.0, 5.0, 1e20, 0.3, _NAN, 6.0, 0.5, 7.0, -7.0, 0.0, 5.5, -5.5, 1.0], dtype=dtype
    )
    other = torch.tensor(
        [0.1, 0.1, 2.0, 3.0, _INF, 3.0, 0.1, 1.0, -_INF, 0.1, 0.0, 0.0, 0.0, -_INF, 2.0, 1 / 3], dtype=dtype
    )

    def program(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        down = torch.div(x, y, rounding_mode="floor")
        return x // y, x % y, down, torch.remainder(x, 0.1), torch.floor_divide(x, 0.3), 5.5 % y, x % -3, x // 2

    _compare(program, one, other)
    # Signs of zeros.
    _compare(lambda x, y: [item.signbit() & (item == 0) for item in program(x, y)], one, other)


def test_a_quotient_that_overflows_is_rounded_down_to_infinity() -> None:
    x, y = torch.tensor([3e38, -3e38, 2.5] * 12), torch.tensor([0.5, 0.3, 5e-39] * 12)
    _compare(lambda x, y: (x // y, torch.div(x, -y, rounding_mode="floor"), x // 0.3), x, y)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.sampled(1)
def test_the_next_number_is_one_of_the_type(dtype: torch.dtype) -> None:
    x = torch.tensor([1.0, -2.0, 0.0, 0.1], dtype=dtype)
    _compare(lambda x: (torch.nextafter(x, x + 1), torch.nextafter(x * 2, x)), x)


def test_small_and_large_numbers_keep_their_digits() -> None:
    x = torch.tensor([1e-30, -1e-8, 1e-4, 0.5, -0.9, 3e38, 1.5, _INF, -_INF, _NAN, 0.0, -0.0, 1.0, 1.0001, 2e9, 1e20])
    _compare(lambda x: (torch.expm1(x), torch.atanh(x), torch.acosh(x), x**-0.5), x)


def test_whole_numbers_wrap_and_count_as_in_eager() -> None:
    def program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.arange(9) * 1500000000, x.abs() < 0, x.byte().any(1), x.byte().any() * 200 + 100

    _compare(program, torch.full((4, 5), -(2**15), dtype=torch.int16) + 1 - torch.eye(4, 5, dtype=torch.int16))


def test_truth_values_of_known_numbers_are_compared() -> None:
    def program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        known, more = torch.arange(8) < 4, torch.arange(8.0) > -1
        extremes = torch.maximum(known, more), torch.minimum(known, x > 0.5)
        return known != more, known == more, more == (x > 0.5), *extremes, x * (torch.arange(8.0) % -3)

    _compare(program, torch.linspace(0, 1, 8))


@pytest.mark.parametrize("both", [operator.and_, operator.or_, operator.xor])
@pytest.mark.sampled(1)
def test_combined_truth_values_of_known_numbers_are_conditions(both: Callable[..., Any]) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        y = torch.arange(40.0)
        condition = both(y.exp().isinf(), ~y.isnan())
        return torch.where(both(condition, y > 9), y, x)

    _compare(program, torch.linspace(0, 1, 40))


def test_sine_positions_of_detection_transformers() -> None:
    """Their frequencies are computed from a row of numbers that is divided and rounded down."""

    def program(x: torch.Tensor) -> torch.Tensor:
        steps = torch.arange(8, dtype=torch.int64).to(torch.float32)
        at = x[..., None] / 10000 ** (2 * torch.div(steps, 2, rounding_mode="floor") / 8)
        return torch.stack((at[..., 0::2].sin(), at[..., 1::2].cos()), dim=-1).flatten(-2)

    _compare(program, torch.linspace(0, 1, 15).view(3, 5))


def test_a_scaled_truth_value_is_one() -> None:
    one, other = torch.tensor([True, False, True, False] * 5), torch.tensor([True, True, False, False] * 5)

    def program(one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, ...]:
        both = torch.add(one, other, alpha=2)
        return both, both == other, torch.add(one, other, alpha=0), both.sum()

    _compare(program, one, other)


def test_products_of_whole_numbers_have_their_type() -> None:
    one, other, vector = (torch.full(size, 100, dtype=torch.int8) for size in ((2, 3, 4), (2, 4, 4), (4,)))

    def program(one: torch.Tensor, other: torch.Tensor, vector: torch.Tensor) -> tuple[torch.Tensor, ...]:
        batches = one[:, :1] @ other[..., :1], one[:, :1] @ other, one @ other
        return *batches, one[0, :1] @ other[0], torch.dot(vector, vector), one[0] @ vector

    _compare(program, one, other, vector)


def test_a_term_without_a_factor_is_left_out() -> None:
    nothing, one, other = torch.full((4,), _NAN), torch.ones(1, 4), torch.ones(4, 4)

    def program(start: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.addmm(start, one, other, beta=0), torch.addmm(one, one * _NAN, other, alpha=0)

    _compare(program, nothing, one, other)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.bool, torch.int16])
@pytest.mark.parametrize("shape", [(3, 70), (70, 3)])
@pytest.mark.sampled(2)
def test_places_of_extreme_numbers(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = torch.randint(-9 if dtype.is_signed else 0, 120, shape).remainder(2 if dtype is torch.bool else 100).to(dtype)

    def program(x: torch.Tensor) -> list[torch.Tensor]:
        pairs = [*x.min(0), *x.min(1, keepdim=True), *x.max(0), *x.max(-1)]
        places = [] if x.dtype is torch.bool else [x.argmin(), x.argmax(1), x.argmin(0, keepdim=True)]
        return pairs + places + [x.amax(1), x.amin(0)]

    _compare(program, x)


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 2, 0), (2, 1, 0)])
@pytest.mark.sampled(2)
def test_places_among_all_numbers_count_in_the_order_of_the_dimensions(order: tuple[int, ...]) -> None:
    def program(x: torch.Tensor) -> list[torch.Tensor]:
        y = x.permute(order)
        found = [
            y.argmax(),
            y.sin().argmax(),
            (y * 2).argmin(keepdim=True),
            y.contiguous().argmax(),
            y.cos().argmin(dim=None),
        ]
        return [*found, y.to(torch.int8).argmax(), torch.argmin(y.exp(), 1), y.sin().max(), *y.flatten(1).min(1)]

    _compare(program, torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.sampled(1)
def test_labels_behind_the_last_one_do_not_count(reduction: str) -> None:
    labels = torch.tensor([[3, 0, -1, 1], [1, -1, 2, 3], [-1, 0, 0, 0], [0, 1, 2, 3]])
    loss = functools.partial(torch.nn.functional.multilabel_margin_loss, reduction=reduction)
    check(loss, leaf(4, 4), labels, exact=False, backend="inductor", tiers="wait", fullgraph=True)
    check(loss, leaf(4), labels[1], exact=False, backend="inductor", tiers="wait", fullgraph=True)
    compiled = dovetail.compile(loss, backend="inductor", tiers="wait", fullgraph=True)
    with pytest.raises(RuntimeError):
        compiled(torch.ones(4, 4), labels + 1)


@pytest.mark.parametrize("x", [torch.ones(3, dtype=torch.bool), torch.arange(3), torch.ones(3).half()])
@pytest.mark.sampled(1)
def test_a_scaled_number_has_the_type_of_a_product(x: torch.Tensor) -> None:
    _compare(lambda x: (torch.ldexp(x, torch.ones(3).half()), torch.ldexp(x, torch.ones(3))), x)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, index: x.index_select(0, index),
        lambda x, index: x.index_add(0, index, torch.ones(2, 3)),
        lambda x, index: x.index_copy(0, index, torch.ones(2, 3)),
    ],
)
@pytest.mark.sampled(1)
def test_negative_indices_are_refused(function: Callable[..., torch.Tensor]) -> None:
    compiled = dovetail.compile(function, backend="inductor", tiers="wait")
    x = torch.arange(12.0).reshape(4, 3)
    torch.testing.assert_close(compiled(x, torch.tensor([3, 0])), function(x, torch.tensor([3, 0])))
    with pytest.raises((IndexError, RuntimeError)):
        compiled(x, torch.tensor([-1, 0]))


def test_ties_of_half_precision_get_a_gradient() -> None:
    x = torch.randn(4, 50, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0)).requires_grad_()
    function = lambda x: (x * 1.1).amax(-1)  # noqa: E731
    compiled = dovetail.compile(function, backend="inductor", tiers="wait", fullgraph=True)
    (expected,), (actual,) = (torch.autograd.grad(callee(x).sum(), x) for callee in (function, compiled))
    torch.testing.assert_close(actual, expected)


@pytest.mark.skipif(
    private_inductor.inductor_realize() is None, reason="nothing can be kept in memory (before torch 2.13)"
)
@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: torch.nn.functional.gelu(x + y).amax(1),
        lambda x, y: torch.linalg.vector_norm(torch.nn.functional.gelu(x * y + x), math.inf, dim=1),
    ],
)
@pytest.mark.sampled(1)
def test_the_largest_element_gets_a_gradient(function: Callable[..., torch.Tensor]) -> None:
    compiled = dovetail.compile(function, backend="inductor", tiers="wait", fullgraph=True)
    for seed in range(3):
        x, y = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(seed)).requires_grad_().unbind()
        expected, actual = (torch.autograd.grad(callee(x, y).sum(), (x, y)) for callee in (function, compiled))
        torch.testing.assert_close(actual, expected)


def test_functions_of_numbers_that_are_the_same_along_a_row() -> None:
    """Inductor writes these as numbers in the place of vectors, by the name of the function for vectors."""

    def function(x: torch.Tensor, y: torch.Tensor) -> Any:
        return torch.expm1(x) * y, torch.atanh(x) * y, torch.nn.functional.elu(x - 0.5) * y

    with warnings.catch_warnings():
        warnings.simplefilter("error", dovetail.errors.EagerFallbackWarning)
        _compare(function, torch.linspace(0.1, 0.9, 8)[:, None], torch.rand(8, 32))
