"""Python ints and floats that change from call to call."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import dovetail
from tests.differential import check_calls, entries_of, leaf, randn

BACKENDS = [("aten", True), ("inductor", False)]


@pytest.mark.parametrize(
    ("backend", "exact"), [("aten", True), pytest.param("inductor", False, marks=pytest.mark.slow)]
)
def test_int_argument(backend: str, exact: bool) -> None:
    def shift(x: Any, n: Any) -> Any:
        return x * n + torch.arange(n).sum(), n + 1, x[: n // 3 + 1]

    calls = [(randn(8, grad=True), n) for n in (3, 5, 7, 20)]
    check_calls(shift, calls, entries=2, backend=backend, exact=exact)


def test_zero_one_and_negative_ints() -> None:
    calls = [(randn(8, grad=True), n) for n in (3, 5, 0, 1, -2, 7)]
    # 0, 1 and negative numbers have entries of their own.
    check_calls(lambda x, n: (x * n, x + n, n * n, n // 2, n % 3, -n), calls, entries=5)


@pytest.mark.parametrize(
    ("backend", "exact"), [("aten", True), pytest.param("inductor", False, marks=pytest.mark.slow)]
)
def test_float_argument(backend: str, exact: bool) -> None:
    def scale(x: Any, rate: Any) -> Any:
        return x * rate, x.add(x, alpha=rate), rate * 0.1 * 3, 1 / rate, math.exp(-rate), x - rate**2

    calls = [(randn(8, grad=True), rate) for rate in (0.1, 0.3, 1e-3, 7.0, 0.1 + 0.2)]
    check_calls(scale, calls, entries=2, backend=backend, exact=exact)


def test_floats_that_are_no_ordinary_numbers() -> None:
    values = (0.5, 0.25, 0.0, -0.0, math.inf, -math.inf, math.nan, 0.75, 1.0, 1)

    def copy_sign(x: Any, rate: Any) -> Any:
        return x * rate, math.copysign(1.0, rate), rate > 0.3

    check_calls(copy_sign, [(randn(3), rate) for rate in values])


def test_float_that_becomes_a_branch_or_an_int() -> None:
    def branch(x: Any, rate: Any) -> Any:
        if rate > 0.5:
            return x * rate
        return x[: int(rate * 10) + 1] + round(rate, 1)

    check_calls(branch, [(randn(9), rate) for rate in (0.9, 0.8, 0.7, 0.3, 0.2, 0.1, 0.6)], entries=4)


def test_learning_rate_like_loop_does_not_recompile() -> None:
    compiled = dovetail.compile(lambda x, rate, step: x * rate / (step + 1), backend="aten", fullgraph=True)
    for step in range(30):
        x = randn(4)
        assert torch.equal(compiled(x, 0.9**step, step), x * 0.9**step / (step + 1))
    assert entries_of(compiled) <= 3


class Counter(torch.nn.Module):
    """Counts its calls in a Python attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.rate = 1.0
        self.lin = torch.nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One counted call."""
        self.count += 1
        self.rate = self.rate * 0.5 + 0.1
        return self.lin(x) * self.count + self.rate


def test_attributes_that_count() -> None:
    eager, twin = Counter(), Counter()
    twin.load_state_dict(eager.state_dict())
    compiled = dovetail.compile(twin, backend="aten", fullgraph=True)
    for _ in range(8):
        x = randn(2, 3)
        assert torch.equal(eager(x), compiled(x))
        assert (eager.count, eager.rate, type(twin.count), type(twin.rate)) == (twin.count, twin.rate, int, float)
    # The counts 0 and 1 have entries of their own.
    assert entries_of(compiled) <= 3


def test_global_and_closure_numbers() -> None:
    box = {"n": 3}
    free = 1

    def run(x: Any) -> Any:
        return x * box["n"] + free

    compiled = dovetail.compile(run, backend="aten", fullgraph=True)
    for number in (3, 4, 5, 6):
        box["n"], free = number, number * 2
        assert torch.equal(compiled(randn(3)), run(randn(3)))
    assert entries_of(compiled) == 2


def test_tuple_of_sizes() -> None:
    def resize(x: Any, size: Any) -> Any:
        height, width = size
        return x.new_zeros(size) + x.sum(), height * width, size

    check_calls(resize, [(randn(3), size) for size in ((2, 3), (4, 3), (5, 6), (7, 8))], entries=3)


def test_number_in_a_tuple_of_other_constants() -> None:
    def column(x: Any, at: Any) -> Any:
        return x[at], at[1] * 2

    check_calls(column, [(randn(9, 9), (slice(None), number)) for number in (2, 3, 5, 7)], entries=2)

    def scaled(x: Any, spec: Any) -> Any:
        kind, (factor, shift) = spec
        return (x.relu() if kind == "relu" else x.tanh()) * factor + shift, spec

    specs = [("relu", (2, 0.5)), ("relu", (3, 1.5)), ("tanh", (4, 2.5)), ("tanh", (5, 3.5)), ("relu", (6, 4.5))]
    check_calls(scaled, [(randn(3), spec) for spec in specs], entries=3)


def test_tuple_of_numbers_that_gets_a_tensor() -> None:
    calls = [(randn(3), spec) for spec in ((2, 3), (3, 3), (4, randn(3)), (5, 3))]
    check_calls(lambda x, spec: (x * spec[0] + spec[1], spec), calls)


def test_list_of_sizes_is_right() -> None:
    def resize(x: Any, sizes: Any) -> Any:
        return x.new_zeros(sizes) + x.sum(), sizes[0] * 2, sum(sizes), [size + 1 for size in sizes]

    check_calls(resize, [(randn(3), sizes) for sizes in ([2, 3], [4, 3], [5, 6])])


def test_bools_and_big_ints_stay_constants() -> None:
    check_calls(lambda x, flag: x * 2 if flag else x, [(randn(3), flag) for flag in (True, False, 1, 0, 2, True)])
    check_calls(lambda x, n: (x, n + 1), [(randn(3), n) for n in (2**70, 2**71, 2**80)])


def test_int_and_float_of_one_argument() -> None:
    check_calls(lambda x, n: (x * n, n), [(randn(3), n) for n in (2, 3, 2.0, 3.0, 2.5, 4, True)])


def test_division_by_zero_is_eagers_error() -> None:
    compiled = dovetail.compile(lambda x, n: x * (6 // n), backend="aten")
    for number in (3, 2, 1):
        assert torch.equal(compiled(randn(3), number), randn(3) * (6 // number))
    with pytest.raises(ZeroDivisionError):
        compiled(randn(3), 0)


def test_numbers_that_overflow_a_symbol() -> None:
    check_calls(lambda x, n: (x, n * n * n), [(randn(2), n) for n in (3, 5, 2**31, 2**40, 2**61)])


def test_number_arithmetic_is_pythons() -> None:
    def arithmetic(x: Any, n: Any, m: Any) -> Any:
        return (
            x,
            n // m,
            n % m,
            n**2,
            divmod(n, m),
            n & m,
            n | m,
            n ^ m,
            n << 2,
            abs(n),
            n / m,
            int(n / m),
            max(n, m),
            min(n, 3),
        )

    numbers = [(7, 3), (-7, 2), (7, -2), (-7, -3), (100, 9), (9, 100), (2**40, 3)]
    check_calls(arithmetic, [(randn(2), *pair) for pair in numbers])


def test_floats_made_from_sizes_are_exact() -> None:
    """Torch's symbolic floats put sums and products in another order, which changes the last bit."""

    def floats(x: Any) -> Any:
        n = x.shape[0]
        scale = n / 3 * 0.1 * 3
        total = 0.1 + n / 7 + 0.2
        others = ((n / 3) ** 2, n * 0.1 * 0.7, (n / 3) / (n / 7), n // 0.3, n % 0.7, -n / 3, sum([n / 3, 0.1, n / 7]))
        return x * scale, x / math.sqrt(total), scale, total, others, n / 7 > 0.30000000000000004

    check_calls(floats, [(randn(size).double(),) for size in (8, 16, 5, 7, 23, 101, 37, 999)], entries=2)


@pytest.mark.parametrize(
    ("backend", "exact"), [("aten", True), pytest.param("inductor", False, marks=pytest.mark.slow)]
)
def test_float_among_tensors_of_all_kinds(backend: str, exact: bool) -> None:
    def kinds(x: Any, rate: Any) -> Any:
        half, whole, single = x.half(), (x * 10).long(), x.sum()
        return (
            x * rate,
            half * rate,
            whole * rate,
            single * rate,
            rate - x,
            rate / (x + 9),
            x**rate,
            x.clamp(max=rate),
            x > rate,
        )

    calls = [(randn(8).abs(), rate) for rate in (0.1, 0.3, 0.7, 1.3)]
    check_calls(kinds, calls, entries=2 if exact else None, backend=backend, exact=exact)


def test_a_list_of_changing_sizes_is_compiled_twice() -> None:
    """As the experts of a mixture get their tokens."""

    def parts(x: torch.Tensor, counts: list[int]) -> list[torch.Tensor]:
        return [part * position for position, part in enumerate(torch.split(x, counts))]

    lists = [[5, 7, 10, 10], [6, 6, 12, 8], [9, 5, 4, 14], [3, 4, 5, 20], [6, 6, 20], [4, 8, 20]]
    check_calls(parts, [(leaf(32, 2), counts) for counts in lists], entries=3)


def test_numbers_are_compared_by_identity() -> None:
    """Python has one object of each small integer."""

    def arguments(x: Any, a: Any, b: Any) -> Any:
        return x * (2 if a is b else 3), x if a is not b else -x, x + (a is None), x + (b is True)

    for a, b in ((300, 300), (7.5, 7.5)):
        check_calls(arguments, [(randn(2), *pair) for pair in ((2, 2), (3, 4), (5, 5), (6, 6), (a, b), (a, 7.5))])

    def sizes(x: Any) -> Any:
        n, m = x.shape
        return x * (2 if n is m else 3), x + (m is x.shape[1]), [n is item for item in (3, 4, 5)]

    check_calls(sizes, [(randn(*shape),) for shape in ((2, 3), (3, 4), (4, 4), (5, 5), (300, 300))])


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "split",
    [
        lambda x, counts: x.split(counts),
        lambda x, counts: x.split(tuple(counts)),
        lambda x, counts: x.split_with_sizes(counts),
        lambda x, counts: torch.split_with_sizes(x, split_sizes=counts),
        lambda x, counts: torch.split(x, list(counts)),
        lambda x, counts: x.split([*tuple(counts)[:1], sum(list(counts)[1:])]),
    ],
)
def test_lists_of_changing_sizes_by_methods_and_as_copies(split: Any) -> None:
    def parts(x: torch.Tensor, counts: list[int]) -> list[torch.Tensor]:
        return [part * position for position, part in enumerate(split(x, counts))]

    lists = [[2, 3, 4], [4, 2, 3], [3, 4, 2], [2, 5, 2], [3, 3, 3]]
    check_calls(parts, [(leaf(9, 2), counts) for counts in lists], entries=2)


def test_a_copied_list_is_a_list_of_its_own() -> None:
    def program(x: torch.Tensor, counts: list[int], kind: type) -> Any:
        own = kind(counts)
        if kind is list:
            own.append(7)
        return own, own is counts, tuple(counts) is counts, x * len(own)

    for kind in (list, tuple):
        for given in (list, tuple):
            check_calls(program, [(leaf(2), given(counts), kind) for counts in ([2, 3], [4, 3], [5, 6], [8, 8, 2])])
