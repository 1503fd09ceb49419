"""``x, number, path = batch``: items of a tuple that nothing reads make no entries, and those that are read are eager's."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import dovetail
from tests.differential import captures, same

pytestmark = pytest.mark.usefixtures("quiet")
Tensor = torch.Tensor
Batch = tuple[Tensor, int, str, Any]


def unread(batch: Batch) -> Any:
    x, number, path, rest = batch
    return x * 2


def read_in_a_branch(batch: Batch) -> Any:
    x, number, path, rest = batch
    if x.shape[0] == 3:
        return x * number
    return x - 1


def formatted(batch: Batch) -> Any:
    x, number, path, rest = batch
    return x + 1, f"{path} of {number}"


def returned(batch: Batch) -> Any:
    x, number, path, rest = batch
    return path, number, rest, x + 1


def used_as_index_and_key(batch: Batch) -> Any:
    x, number, path, rest = batch
    return x[number % 3] + {"p0": 1.0, "p1": 2.0}.get(path, 3.0)


def in_a_closure(batch: Batch) -> Any:
    x, number, path, rest = batch

    def inner() -> Tensor:
        return x * number

    return inner()


def in_locals(batch: Batch) -> Any:
    x, number, path, rest = batch
    return x + 1, sorted((name, value) for name, value in locals().items() if name in ("number", "path"))


def across_a_break(batch: Batch) -> Any:
    x, number, path, rest = batch
    y = x * 2
    print(end="")
    return y + number, path


def in_a_called_function(batch: Batch) -> Any:
    def second(pair: Any) -> Any:
        first, other, path, rest = pair
        return other, path

    number, path = second(batch)
    return batch[0] * number, path


def identity(batch: Batch) -> Any:
    x, number, path, rest = batch
    return x + 1, path is batch[2], rest is None


def nested(batch: Batch) -> Any:
    (x, number, path, rest), again = batch, batch
    return x * number + again[1], path, rest


def deleted(batch: Batch) -> Any:
    x, number, path, rest = batch
    del number, path
    path = "other"
    return x + 1, path


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("function", "most"),
    [
        (unread, 1),
        (read_in_a_branch, 1),
        (deleted, 1),
        (formatted, None),
        (returned, None),
        (used_as_index_and_key, None),
        (in_a_closure, None),
        (in_locals, None),
        (across_a_break, None),
        (in_a_called_function, None),
        (identity, None),
        (nested, None),
    ],
)
def test_a_batch_with_a_number_and_a_text(function: Callable[[Batch], Any], most: int | None) -> None:
    compiled = dovetail.compile(function, backend="aten")
    for number in range(8):
        batch = (torch.full((4, 2), number + 1.0), number, f"p{number}", (None, "a", 0.5, True)[number % 4])
        same(compiled(batch), function(batch))
    assert most is None or captures(compiled) <= most


def test_a_branch_that_reads_it() -> None:
    compiled = dovetail.compile(read_in_a_branch, backend="aten")
    for number, rows in enumerate((4, 3, 4, 3, 3, 4)):
        batch = (torch.ones(rows, 2), number, "", None)
        same(compiled(batch), read_in_a_branch(batch))


@pytest.mark.parametrize("count", [3, 5])
def test_another_number_of_items_raises_eagers_error(count: int) -> None:
    compiled = dovetail.compile(unread, backend="aten")
    compiled((torch.ones(2), 1, "", None))
    batch: Any = (torch.ones(2), *range(1, count))
    with pytest.raises(ValueError, match="to unpack") as eager:
        unread(batch)
    with pytest.raises(ValueError, match="to unpack") as raised:
        compiled(batch)
    assert str(raised.value) == str(eager.value)


def test_the_tuple_is_replaced_before_the_item_is_read() -> None:
    """The item is that of the tuple that was unpacked."""

    def function(state: Any, x: Tensor) -> Any:
        number, path = state.pair
        state.pair = (number + 10, "new") if x.shape[0] == 2 else (7, "old")
        print(end="")
        return x * number, path

    compiled = dovetail.compile(function, backend="aten")
    state, twin = SimpleNamespace(pair=(1, "a")), SimpleNamespace(pair=(1, "a"))
    for rows in (2, 2, 3, 2, 3, 3):
        same(compiled(state, torch.ones(rows)), function(twin, torch.ones(rows)))
        assert state.pair == twin.pair
        state.pair = twin.pair = (*state.pair[:1], f"{state.pair[1]}{rows}")


def test_other_unread_kinds_of_items() -> None:
    compiled = dovetail.compile(unread, backend="aten")
    for number, path, rest in ((1, "a", None), (2.5, None, torch.float32), (True, b"x", 3), ("t", 1, (1, 2))):
        batch: Any = (torch.ones(2), number, path, rest)
        same(compiled(batch), unread(batch))
    assert captures(compiled) <= 2
