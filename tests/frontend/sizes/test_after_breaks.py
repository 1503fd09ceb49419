"""Sizes that change, where a graph break comes before or after: each part learns which of them do."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import dovetail
from dovetail.reports.explanation import compiled_function
from tests.differential import backward, clone_inputs, randn, same


def check_parts(
    function: Callable[..., Any], calls: Sequence[tuple[Any, ...]], most: int = 2, settled_after: int = 2
) -> Any:
    """Compare every call with eager. No part may have more than ``most`` entries, and none is added after so many calls."""
    compiled = dovetail.compile(function, backend="aten")
    owner = compiled_function(compiled)
    counts: list[list[int]] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dovetail.errors.GraphBreakWarning)
        for number, args in enumerate(calls):
            eager_args, compiled_args = clone_inputs(args), clone_inputs(args)
            expected, actual = function(*eager_args), compiled(*compiled_args)
            same(expected, actual, f"call {number}")
            backward(expected)
            backward(actual)
            same([item.grad for item in eager_args], [item.grad for item in compiled_args], f"call {number}: gradients")
            counts.append([len(part.entries) for part in (owner, *owner.continuations())])
    assert len(counts[0]) > 1, "there was no break"
    assert counts[settled_after - 1] == counts[-1] and max(counts[-1]) <= most, (
        f"{counts}: {[str(item) for item in owner.events.events]}"
    )
    return compiled


def test_a_shape_that_lives_across_a_break(capsys: Any) -> None:
    def reshape(x: Any) -> Any:
        shape = x.shape
        flat = (x * 2).reshape(-1)
        print("half-way")
        return flat.reshape(shape) * shape[0] + shape.numel()

    check_parts(reshape, [(randn(rows, 3, grad=True),) for rows in (4, 5, 7, 9)])


def test_both_sides_of_a_branch_before_a_break(capsys: Any) -> None:
    def windowed(x: Any) -> Any:
        y = x[:, -8:].cumsum(1) if x.shape[1] >= 8 else x * 3
        print("half-way")
        return y.sum(1) * 2

    check_parts(windowed, [(randn(3, length, grad=True),) for length in (12, 5, 9, 7, 11)], most=3, settled_after=3)


def test_both_sides_of_a_branch_after_a_break(capsys: Any) -> None:
    def windowed(x: Any) -> Any:
        y = x * 2
        print("half-way")
        return y[:, -8:].cumsum(1) if y.shape[1] >= 8 else y * 3

    check_parts(windowed, [(randn(3, length, grad=True),) for length in (5, 7, 9, 12, 4)], most=3, settled_after=3)


@pytest.mark.slow
def test_padding_up_to_a_window() -> None:
    def padded(x: Any) -> Any:
        x, padding = x * 2, -x.shape[1] % 4
        if padding:
            x = torch.cat([x, x.new_zeros(x.shape[0], padding).add(1)], 1)
        print("padded")
        return x.view(x.shape[0], -1, 4).softmax(2)

    check_parts(
        padded, [(randn(3, length, grad=True),) for length in (12, 7, 9, 11, 10, 16, 8)], most=4, settled_after=6
    )


@pytest.mark.slow
def test_a_size_that_is_the_same_in_the_first_two_calls(capsys: Any) -> None:
    def padded(x: Any) -> Any:
        x = torch.cat([x * 2, x.new_zeros(x.shape[0], 8 - x.shape[1] % 8)], 1)
        whole, parts = x.shape, [x + 1, {"half": x[:, ::2]}]
        print("padded")
        return parts[0].view(whole) * whole[1], parts[1]["half"].softmax(1)

    check_parts(
        padded,
        [(randn(rows, length, grad=True),) for rows, length in ((2, 12), (3, 10), (4, 5), (2, 20))],
        most=3,
        settled_after=3,
    )


@pytest.mark.slow
def test_a_rest_that_is_nothing_or_one(capsys: Any) -> None:
    def padded(x: Any) -> Any:
        padding = -x.shape[1] % 4
        if padding > 0:
            x = torch.nn.functional.pad(x * 2, (0, padding))
        y = x.view(x.shape[0], -1, 4).cumsum(2).flatten(1)
        print("padded")
        return y[:, : y.shape[1] - padding] * 3 if padding else y + 1

    lengths = (13, 10, 8, 11, 16, 7, 12, 14, 5)
    check_parts(padded, [(randn(3, length, grad=True),) for length in lengths], most=5, settled_after=4)


def _padded(x: Any, window: int) -> tuple[int, Any]:
    padding = (window - x.shape[1] % window) % window
    return padding, torch.nn.functional.pad(x, (0, padding)) if padding > 0 else x * 1


@pytest.mark.slow
def test_a_padding_and_the_sizes_that_it_belongs_to() -> None:
    def windowed(x: Any) -> Any:
        padding, y = _padded(x * 2, 4)
        print("padded")
        y = y.view(y.shape[0], -1, 4).softmax(2).flatten(1)
        if padding > 0:
            y = y[:, :-padding]
        # With another padding, but the sizes of today, this is another program's error.
        if y.shape[1] != x.shape[1]:
            raise ValueError(f"{y.shape[1]} instead of {x.shape[1]}")
        return y * x

    check_parts(
        windowed, [(randn(3, length, grad=True),) for length in (12, 9, 7, 11, 8, 10, 16, 5)], most=5, settled_after=8
    )


@pytest.mark.slow
def test_a_padding_in_a_closure_and_across_two_breaks() -> None:
    def windowed(x: Any) -> Any:
        padding, y = _padded(x * 2, 4)
        print("padded")
        y = y.view(y.shape[0], -1, 4).cumsum(2)
        print("summed")
        parts = [part[:, : part.shape[1] - padding] for part in (y.flatten(1), y.flatten(1).sin()) if padding >= 0]
        if parts[0].shape != x.shape:
            raise ValueError(f"{parts[0].shape} instead of {x.shape}")
        return parts[0] + parts[1]

    check_parts(
        windowed,
        [(randn(rows, length, grad=True),) for rows, length in ((2, 12), (3, 9), (5, 7), (4, 8), (2, 10))],
        most=5,
        settled_after=4,
    )


def test_a_first_part_that_adds_nothing_keeps_what_is_given() -> None:
    def padded(x: Any) -> Any:
        missing = max(0, 8 - x.shape[1])
        y = torch.cat([x * 2, x.new_zeros(x.shape[0], missing)], 1)
        print("padded")
        return y[:, : y.shape[1] - missing].softmax(1) + missing

    check_parts(
        padded,
        [(randn(rows, length, grad=True),) for rows, length in ((2, 12), (3, 5), (5, 6), (4, 10), (2, 7))],
        most=4,
        settled_after=5,
    )


@pytest.mark.slow
def test_chunks_of_which_there_may_be_one() -> None:
    def chunked(x: Any) -> Any:
        _, y = _padded(x * 2, 4)
        print("padded")
        chunks = y.shape[1] // 4
        y = y.view(y.shape[0], chunks, 4)
        y = y.softmax(1) + y[:, :1] if chunks == 1 else y.cumsum(1) * y
        if y.shape[1] * 4 - x.shape[1] >= 4:
            raise ValueError(f"{y.shape[1]} chunks for {x.shape[1]}")
        return y.flatten(1)[:, : x.shape[1]] * x

    lengths = ((2, 12), (3, 9), (5, 7), (4, 8), (2, 4), (3, 3), (2, 11))
    check_parts(chunked, [(randn(rows, length, grad=True),) for rows, length in lengths], most=6, settled_after=6)


def _recompiles(compiled: Any, since: int = 0) -> list[Any]:
    return [item for item in dovetail.events_of(compiled).events[since:] if item.name == "recompile"]


def test_what_an_instruction_at_a_break_gives_is_told_from_sizes() -> None:
    def selected(x: Any, mask: Any) -> Any:
        chosen = (x * 2)[mask]
        way = str(int(mask[0].item()))
        return chosen.sum() * (3 if way == "1" else 5)

    compiled = dovetail.compile(selected, backend="aten")

    def call(rows: int, first: bool) -> list[Any]:
        seen = len(dovetail.events_of(compiled).events)
        mask = torch.tensor([first] + [True] * (rows - 1))
        x = randn(rows, 3)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", dovetail.errors.GraphBreakWarning)
            same(selected(x, mask), compiled(x, mask), f"{rows} rows")
        return _recompiles(compiled, seen)

    call(6, True)
    by_sizes = call(5, True)
    assert not all("decided_by" in item.details for item in by_sizes)
    assert not call(9, True)
    by_data = call(9, False)
    assert by_data and all(item.details["decided_by"] == "what ran at the graph break" for item in by_data)
    assert not call(7, False) and not call(8, True)


def test_a_selection_after_a_break_that_may_be_empty() -> None:
    def selected(x: Any, limit: Any) -> Any:
        rows = torch.where(x.detach()[:, 0] > limit)[0].tolist()
        return x[rows].cumsum(0).sum() + x.mean()

    compiled = dovetail.compile(selected, backend="aten")
    x = torch.arange(24.0).reshape(8, 3)
    for limit in (3.0, 7.0, 100.0, 20.0, 5.0, 100.0):
        mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected, actual = selected(mine, limit), compiled(other, limit)
        same(expected, actual, f"limit {limit}")
        backward(expected)
        backward(actual)
        same(mine.grad, other.grad, f"limit {limit}: gradient")
