"""Tensors made of sizes, and tensors used as sizes: one graph for all of them, with eager's numbers and types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail
from dovetail.reports.explanation import compiled_function
from tests.differential import check_calls, entries_of, leaf, same

SIZES = (4, 5, 7, 6, 4, 9)


def sum_of_list(x: torch.Tensor) -> Any:
    made = torch.tensor([[x.shape[0], 3], [1, x.shape[0] * 2]])
    return made, x * made.sum()


def floats(x: torch.Tensor) -> Any:
    third = torch.as_tensor(x.shape[0] / 3)
    return third, x * third, torch.tensor((x.shape[0], 0.1), dtype=torch.float16), torch.tensor([x.shape[0] * 0.1, 2])


def whole_as_float(x: torch.Tensor) -> Any:
    return torch.tensor(x.shape, dtype=torch.float32).prod().sqrt() * x


def like_another(x: torch.Tensor) -> Any:
    return x.new_tensor([x.shape[0], 7]), x.long().new_tensor(x.shape[0])


def slice_bounds(x: torch.Tensor) -> Any:
    span = torch.tensor(min(max(x.shape[0], 2), 512))
    table = torch.arange(1024.0)
    return table[512 - span : 512 + span, None] + x.sum(), x[: span - 1] * 2, x[-span + 2 :]


def changed_in_place(x: torch.Tensor) -> Any:
    stop = torch.tensor(x.shape[0])
    stop -= 2
    twice = stop.clone().mul_(2)
    return x[:stop], x.repeat(2)[: int(twice)], stop.item() + 1, twice


def written_slice(x: torch.Tensor) -> Any:
    x = x.clone()
    x[: torch.tensor(x.shape[0] - 1)] = 0
    return x


def python_numbers(x: torch.Tensor) -> Any:
    size = torch.tensor(x.shape[0]).item()
    return x.view(size), x * size, torch.zeros(int(torch.tensor(x.shape[0] + 1)))


def constants(x: torch.Tensor) -> Any:
    return x[: torch.scalar_tensor(3, dtype=torch.int64)], torch.tensor(3).item() * x


def with_alpha(x: torch.Tensor) -> Any:
    return torch.add(torch.tensor(x.shape[0]), torch.tensor(2), alpha=3), torch.tensor(x.shape[0]) * 0.5 + x


PROGRAMS = [
    sum_of_list,
    floats,
    whole_as_float,
    slice_bounds,
    changed_in_place,
    written_slice,
    python_numbers,
    constants,
    with_alpha,
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_one_graph_for_all_sizes(program: Callable[[torch.Tensor], Any]) -> None:
    compiled = dovetail.compile(program, backend="aten", fullgraph=True)
    for size in SIZES:
        x = torch.randn(size, generator=torch.Generator().manual_seed(size))
        same(program(x), compiled(x), f"size {size}")
    assert len(compiled_function(compiled).entries) <= 2


def test_new_tensors_like_another() -> None:
    compiled = dovetail.compile(like_another, backend="aten", fullgraph=True)
    for size in SIZES[:3]:
        x = torch.ones(size)
        same(like_another(x), compiled(x), f"size {size}")


def test_the_gradient_goes_through_slices_up_to_a_tensor() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        span = torch.tensor(x.shape[0] - 2)
        return (x[:span] ** 3).sum() * span

    compiled = dovetail.compile(program, backend="aten", fullgraph=True)
    for size in SIZES:
        results = []
        for function in (program, compiled):
            x = torch.arange(1.0, size + 1, requires_grad=True)
            (first,) = torch.autograd.grad(function(x), x, create_graph=True)
            (second,) = torch.autograd.grad(first.pow(2).sum(), x)
            results.append((first.detach(), second))
        same(*results, f"size {size}")


def test_numbers_that_would_wrap_around_are_read_from_the_tensor() -> None:
    def program(x: torch.Tensor) -> Any:
        return (torch.tensor(x.shape[0]) * (1 << 62)).item()

    compiled = dovetail.compile(program, backend="aten")
    for size in (4, 5, 6):
        assert compiled(torch.ones(size)) == program(torch.ones(size))


def test_a_ragged_list_raises_as_in_eager() -> None:
    def program(x: torch.Tensor) -> Any:
        return torch.tensor([[x.shape[0], 1], [2]])

    compiled = dovetail.compile(program, backend="aten")
    for size in (4, 5):
        with pytest.raises(ValueError, match="expected sequence of length 2"):
            compiled(torch.ones(size))


def test_a_list_of_numbers_is_part_of_one_graph() -> None:
    def program(x: torch.Tensor, counts: torch.Tensor) -> Any:
        parts = [part * 2 for part in torch.split(x, counts.tolist())]
        shown = counts.tolist(), (counts > 1).tolist(), counts[0].tolist(), counts.double().div(3).tolist()
        return parts, shown, counts[None].tolist(), counts[:0].tolist(), [number * 4 for number in counts.tolist()]

    compiled = dovetail.compile(program, backend="aten", fullgraph=True)
    for counts in ([2, 1, 2], [1, 3, 1], [5, 0, 0]):
        ours, theirs = torch.ones(5, 2, requires_grad=True), torch.ones(5, 2, requires_grad=True)
        given = torch.tensor(counts)
        results = compiled(ours, given), program(theirs, given)
        same(*results)
        for parts, *_ in results:
            torch.stack([part.pow(2).sum() for part in parts]).sum().backward()
        same(ours.grad, theirs.grad)
    assert entries_of(compiled) == 1


def test_a_long_list_of_numbers_is_no_part_of_the_graph() -> None:
    compiled = dovetail.compile(lambda x: x.tolist(), backend="aten", fullgraph=True)
    with pytest.raises(dovetail.errors.GraphBreakError, match="tolist needs the tensor's data"):
        compiled(torch.arange(65))


def test_a_number_of_a_constant_and_of_a_loss_after_its_backward() -> None:
    """As a training loop of radiance fields reports the ratio of signal and noise beside the loss."""

    def step(x: torch.Tensor) -> Any:
        loss = x.square().mean()
        ratio = torch.log(loss) / torch.log(torch.Tensor([10.0]))
        loss.backward()
        return loss.item(), ratio.item()

    check_calls(step, [(leaf(3),), (leaf(3),)])


def _written(x: torch.Tensor) -> list[int]:
    places = torch.zeros(3, dtype=torch.int64)
    places[1:] = 2
    return places.tolist()


def _made_longer(x: torch.Tensor) -> list[int]:
    numbers = torch.tensor([[1, 2], [3, 4]]).tolist()
    numbers.append([x.dim()])
    return numbers


#: Numbers that no input decides: they are the same in each call, and none of these breaks the graph.
SAME_IN_EACH_CALL = {
    "dimensions": lambda x: x.sum(torch.arange(1, len(x.shape)).tolist()),
    "a factor": lambda x: x * torch.tensor([1.0, 2.5]).tolist()[1],
    "written to": lambda x: (x, _written(x)),
    "a list of lists": lambda x: (x, _made_longer(x)),
    "no dimensions": lambda x: x + torch.tensor(3, dtype=torch.int16).tolist(),
    "truths": lambda x: (x, (torch.arange(3) > 1).tolist()),
    "complex numbers": lambda x: (x, torch.tensor([1 + 2j]).tolist()),
    "nothing": lambda x: (x, torch.empty(0).tolist()),
    "a maximum": lambda x: x.narrow(0, 0, torch.tensor([1, 2]).max().item()),
    "a whole number": lambda x: x[: int(torch.tensor([1, 2]).prod())],
    "half precision": lambda x: (x, torch.linspace(0, 1, 4, dtype=torch.bfloat16).tolist()),
    "under vmap": lambda x: torch.vmap(lambda row: row * torch.tensor([2.0, 3.0]).tolist()[1])(x),
}


@pytest.mark.parametrize("program", SAME_IN_EACH_CALL.values(), ids=SAME_IN_EACH_CALL)
def test_numbers_that_are_the_same_in_each_call_are_read_at_capture(program: Callable[[torch.Tensor], Any]) -> None:
    compiled = check_calls(program, [(leaf(4, 3),), (leaf(4, 3) * 2,), (leaf(6, 3),)])
    assert not dovetail.events_of(compiled).count("graph break")


@pytest.mark.parametrize(
    "program",
    [
        lambda x: (x, torch.rand(3).tolist()),
        lambda x: (x, torch.randperm(3).tolist()),
        lambda x: (x, (torch.arange(3) * x.detach().sum().long()).tolist()),
        lambda x: (x, torch.arange(3).index_fill(0, torch.tensor([1]), int(x.shape[0])).tolist()),
    ],
)
def test_numbers_that_change_are_not(program: Callable[[torch.Tensor], Any]) -> None:
    with pytest.warns(dovetail.errors.GraphBreakWarning):
        check_calls(program, [(leaf(4, 3),), (leaf(4, 3) * 2,), (leaf(6, 3),)], fullgraph=False)


def test_a_number_of_a_tensor_that_the_program_writes_to_is_read_each_time() -> None:
    seen = torch.zeros(2, dtype=torch.int64)

    def count(x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        seen.add_(1)
        return x * 2, seen.tolist()

    with pytest.warns(dovetail.errors.GraphBreakWarning):
        compiled = dovetail.compile(count, backend="aten")
        assert [compiled(torch.ones(2))[1] for _ in range(3)] == [[1, 1], [2, 2], [3, 3]]
