"""NumPy in a compiled function: eager's results, dtypes, memory and errors, and one graph break for a stretch of it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import dovetail
from tests.differential import check_calls

pytestmark = pytest.mark.filterwarnings("ignore::dovetail.errors.GraphBreakWarning")
SCALE = np.float64(0.5)
LINEAR = torch.nn.Linear(3, 2)


class _Buffer:
    def __init__(self) -> None:
        self.rows = {"seen": np.arange(12.0, dtype=np.float32).reshape(4, 3), "kind": np.arange(4) % 2}


BUFFER = _Buffer()


def _seen(value: Any) -> Any:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return type(value).__name__, str(value.dtype), value.tolist()
    if isinstance(value, (list, tuple)):
        return [_seen(item) for item in value]
    return type(value).__name__, repr(value)


def _calls(program: Callable[..., Any], array: np.ndarray | None) -> list[Any]:
    found = []
    for number in range(3):
        np.random.seed(number)
        x = torch.arange(9.0).reshape(3, 3) + number
        if array is not None:
            array += number
        try:
            result = _seen(program(x) if array is None else program(x, array))
        except ValueError as error:
            result = str(error)
        found.append((result, x.tolist(), None if array is None else array.tolist(), np.random.get_state()[2]))
    return found


def _compare(program: Callable[..., Any], array: np.ndarray | None = None, backend: str = "aten") -> int:
    """Three calls give what eager gives; the number of graph breaks."""
    expected = _calls(program, None if array is None else array.copy())
    compiled = dovetail.compile(program, backend=backend)
    assert _calls(compiled, None if array is None else array.copy()) == expected
    return dovetail.events_of(compiled).count("graph break")


# --- stretches --------------------------------------------------------------------------------------------------------


def _normal(values: Any) -> Any:
    return (values - values.mean()) / (values.std() + SCALE)


def one_function(x: torch.Tensor) -> Any:
    return torch.from_numpy(np.tanh(x.numpy())) + 1


def metrics(x: torch.Tensor) -> Any:
    y = x * 2
    values = y.detach().cpu().numpy()
    right = (values.argmax(-1) == x.cpu().numpy().argmax(-1)).mean()
    return y, {"right": float(right), "median": float(np.median(values)), "name": f"{right:.2f}"}


def a_buffer(x: torch.Tensor) -> Any:
    rows = np.random.randint(0, 4, size=3)
    seen = torch.as_tensor(BUFFER.rows["seen"][rows])
    kinds = torch.from_numpy(BUFFER.rows["kind"][rows])
    return (seen * x)[kinds == 0]


def a_picture(x: torch.Tensor) -> Any:
    picture = np.flip(x.numpy(), axis=1).copy()
    picture = _normal(picture)
    if np.random.rand() < 0.5:
        picture = picture[::-1].copy()
    return torch.from_numpy(picture).mul(2)


def a_loop_that_writes(x: torch.Tensor) -> Any:
    rewards = x.numpy()
    total, last = np.zeros_like(rewards), 0
    for step in reversed(range(3)):
        last = rewards[step] + 0.9 * last
        total[step] = last
    return torch.from_numpy(total) * 2


def loops_over_arrays(x: torch.Tensor) -> Any:
    total = 0.0
    for number, row in enumerate(x.numpy()):
        for value in row:
            total += value * number
    sums = [float(row.sum()) * 2 for row in x.numpy()]
    products = [a * b for a, b in zip(*x.numpy()[:2], strict=True)]
    return x * total, sums, products


def written_through_shared_memory(x: torch.Tensor) -> Any:
    values = x.numpy()
    values[0, 0] = 5
    values += 1
    np.multiply(values, 2, out=values)
    values.T[1:].fill(3)
    return x * 1


def a_branch(x: torch.Tensor) -> Any:
    values = x.numpy()
    return x * 2 if values.mean() > 4 and not np.isnan(values).any() else x * 3


def an_error(x: torch.Tensor) -> Any:
    values = x.numpy() + 1
    return values.reshape(7), x * 2


def a_table(x: torch.Tensor) -> Any:
    places = np.arange(3)[:, None]
    rates = np.exp(np.arange(0, 3, 2) * -(np.log(10000.0) / 3))
    table = np.zeros((3, 3))
    table[:, 0::2] = np.sin(places * rates)
    return x + torch.tensor(table, dtype=torch.float32)


STRETCHES: list[Callable[[torch.Tensor], Any]] = [
    *(one_function, metrics, a_buffer, a_picture, a_loop_that_writes, loops_over_arrays),
    *(written_through_shared_memory, a_branch, an_error, a_table),
]


@pytest.mark.parametrize("program", STRETCHES, ids=lambda item: item.__name__)
def test_a_stretch_is_one_break(program: Callable[..., Any]) -> None:
    # Since Python 3.12 a comprehension is a loop of the function itself, and each loop over an array is a stretch.
    most = 3 if program is loops_over_arrays and sys.version_info >= (3, 12) else 1
    assert _compare(program) <= most


def test_the_graph_goes_on_after_a_stretch() -> None:
    """What only loads values, and computes with tensors, is compiled: an object's property is not read twice, either."""
    reads = []

    class Model:
        @property
        def rate(self) -> float:
            reads.append(1)
            return 2.0

    model = Model()

    def program(x: torch.Tensor) -> Any:
        values = np.cos(x.numpy())
        scaled = x * model.rate
        return LINEAR(scaled), float(values.sum() * model.rate)

    expected = _seen(program(torch.ones(2, 3)))
    compiled = dovetail.compile(program, backend="aten")
    assert _seen(compiled(torch.ones(2, 3))) == expected
    assert len(reads) == 4


def test_a_generator_and_a_model_in_a_helper_are_not_run_for_real() -> None:
    def apply(values: Any) -> torch.Tensor:
        return LINEAR(torch.from_numpy(values)).sum()

    def program(x: torch.Tensor) -> Any:
        return [apply(values) for values in np.stack([x.numpy(), x.numpy()])], apply(x.numpy())

    _compare(program)


# --- one graph --------------------------------------------------------------------------------------------------------

RATES = np.linspace(0.1, 0.01, 10)


def _grid(x: torch.Tensor, n: Any) -> Any:
    places = np.arange(4)[:, None] * np.exp(np.arange(0, 4, 2) * -(np.log(10000.0) / 4))
    table = np.zeros((4, 4))
    table[:, 0::2] = np.sin(places)
    table[1] += 1
    return x[:1] * torch.tensor(table, dtype=torch.float32)[:, :3], torch.from_numpy(np.ones(3)) + x[0]


def _own_arrays_leave(x: torch.Tensor, n: Any) -> Any:
    made = np.zeros((2, 3), order="F")
    made[1] = 2
    part = made[1:, ::2]
    part += 3
    return x * 2, made, part, np.float32(3), {"a": made}, made.astype(int)


ONE_GRAPH: dict[str, Callable[[torch.Tensor, Any], Any]] = {
    "numbers": lambda x, n: x / np.sqrt(x.shape[-1]) + np.log(2.0) * np.pi + np.clip(1.5, 0, 1) + np.maximum(3, 4),
    "sizes": lambda x, n: x.reshape(int(np.prod(x.shape))) * np.mean([1.0, 2.0]),
    "a branch on a number": lambda x, n: x if np.isnan(0.5) or not np.isfinite(2.0) else x * 2,
    "a table": lambda x, n: x * RATES[2] + torch.from_numpy(np.cumprod(1.0 - RATES)).float()[:3],
    "slices of a table": lambda x, n: (x * torch.tensor(RATES[1:4] / RATES[:3]), RATES[2:], RATES[-1]),
    "a list as any array": lambda x, n: x.sum() + torch.from_numpy(np.asanyarray([1.0, 2.0, 3.0])),
    "a table as an index": lambda x, n: x[np.arange(2)] + x[:, np.array([0, 2, 1])][1:3],
    "from_numpy": lambda x, n: torch.from_numpy(n) * x,
    "tensor": lambda x, n: (torch.tensor(n), torch.tensor(n.T, dtype=torch.float32) @ x, torch.tensor(data=n.T[0])),
    "as_tensor": lambda x, n: torch.as_tensor(n, dtype=torch.float32) * x + torch.as_tensor(n).sum(),
    "an index": lambda x, n: (
        x[:, n[0].astype(int) % 3] if type(n) is int else x[n.shape[0] - 1],
        x[np.array([True, False, True])],
    ),
    "write to an array by a tensor": lambda x, n: (torch.from_numpy(n).add_(x.double()), x * 1)[1],
    "write to a slice": lambda x, n: (torch.as_tensor(n)[1:].mul_(2), x * 1)[1],
    "the same array": lambda x, n: (x * 1, n, [n, n[1:]]),
    "a grid": _grid,
    "own arrays leave": _own_arrays_leave,
}


@pytest.mark.parametrize("name", ONE_GRAPH)
def test_one_graph(name: str) -> None:
    assert _compare(ONE_GRAPH[name], np.arange(9.0).reshape(3, 3).copy()) == 0


def test_an_array_of_indices_is_an_input() -> None:
    assert _compare(lambda x, i: (x[i] * 2, x[:, i], x[None][:, i, None]), np.array([-1, -2, -3])) == 0
    _compare(lambda x, i: (x[i] * 2, x[i > -2], x[i[1:], :]), np.array([-1, -2, -3]))


def test_arrays_that_leave_share_their_memory() -> None:
    compiled = dovetail.compile(_own_arrays_leave, backend="aten")
    for _ in range(2):
        _, made, part, _, held, copy = compiled(torch.ones(3, 3), None)
        part += 1
        assert made[1, 0] == 6 and held["a"] is made and copy[1, 0] == 5 and made.strides == (8, 16)


def test_a_result_is_the_array_or_a_view_of_it() -> None:
    compiled = dovetail.compile(ONE_GRAPH["the same array"], backend="aten")
    n = np.arange(9.0).reshape(3, 3)
    for _ in range(2):
        _, first, (second, part) = compiled(torch.ones(2), n)
        assert first is n and second is n and np.shares_memory(part, n) and part.flags.writeable


def test_gradients_go_through() -> None:
    x = torch.ones(3, requires_grad=True)
    program = lambda x, n: (x * torch.from_numpy(n)).sum() * RATES[0] * np.sqrt(2.0)  # noqa: E731
    check_calls(program, [(x, np.arange(3.0)), (x, np.arange(4.0)[1:].copy())], backend="aten", fullgraph=True)


SHARED: dict[str, Callable[[torch.Tensor, Any], Any]] = {
    "tensor of the array is written": lambda x, n: (torch.from_numpy(n).add_(1), x * 2)[1],
    "tensor is written": lambda x, n: (x.add_(1), torch.from_numpy(n) * 2)[1],
    "tensor is written after the array was read": lambda x, n: (torch.from_numpy(n) * 2, x.add_(1)),
    "tensor is written, then the array read": lambda x, n: (x.add_(1), float(np.sum(n)))[1],
    "read, written, read": lambda x, n: (float(np.sum(n)), x.add_(1), float(np.sum(n)), n[0]),
    "a part": lambda x, n: (x[1:].add_(1), torch.from_numpy(n) * 2)[1],
}


@pytest.mark.parametrize("name", SHARED)
def test_an_array_and_a_tensor_in_one_memory(name: str) -> None:
    def run(function: Callable[..., Any]) -> Any:
        found = []
        for shared in (True, True, False):
            n = np.arange(4.0)
            x = torch.from_numpy(n) if shared else torch.zeros(4, dtype=torch.float64)
            found.append((_seen(function(x, n)), n.tolist(), x.tolist()))
        return found

    assert run(dovetail.compile(SHARED[name], backend="aten")) == run(SHARED[name])


def _held(x: torch.Tensor) -> Any:
    made = np.arange(3.0)
    tensor = torch.from_numpy(made)
    tensor += 1
    return made, tensor, float(made.sum())


def _written_after(x: torch.Tensor) -> Any:
    made = np.arange(3.0)
    tensor = torch.as_tensor(made)
    made[0] = 7
    return tensor * x[0], made


def _table_is_written(x: torch.Tensor) -> Any:
    RATES[0] += 1
    np.multiply(RATES, 2, out=RATES)
    part = RATES[1:]
    part -= 1
    first = float(RATES[0])
    RATES[:] = np.linspace(0.1, 0.01, 10)
    return x * first, float(np.sum(RATES))


def _warns(x: torch.Tensor) -> Any:
    return x * (np.ones(3) / np.zeros(3))[0]


@pytest.mark.parametrize("program", [_held, _written_after, _table_is_written], ids=lambda item: item.__name__)
def test_writes_to_memory_of_constants(program: Callable[..., Any]) -> None:
    _compare(program)


def test_a_warning_is_given_at_each_call() -> None:
    compiled = dovetail.compile(_warns, backend="aten")
    for _ in range(3):
        with pytest.warns(RuntimeWarning, match="divide by zero"):
            compiled(torch.ones(2))
    with np.errstate(divide="raise"), pytest.raises(FloatingPointError):
        compiled(torch.ones(2))


def test_a_table_that_changes_is_read_at_each_call() -> None:
    table = np.arange(3.0)

    def program(x: torch.Tensor) -> Any:
        return x * float(np.sum(table * 2)) + table[1]

    compiled = dovetail.compile(program, backend="aten")
    for _ in range(4):
        table += 1
        assert torch.equal(compiled(torch.ones(2)), program(torch.ones(2)))
    assert len(compiled.entries) < 4


def test_an_array_of_another_kind_is_noticed() -> None:
    program = lambda x, n: torch.from_numpy(n) + x  # noqa: E731
    compiled = dovetail.compile(program, backend="aten")
    x = torch.ones(2)
    for n in (np.ones(2), np.ones(2, np.float32), np.ones((3, 2)), np.ones(4)[::2], np.asfortranarray(np.ones((2, 2)))):
        assert _seen(compiled(x, n)) == _seen(program(x, n))
    for wrong, error in ((np.array(["a"]), TypeError), (np.ones(2)[::-1], ValueError), (3, TypeError)):
        with pytest.raises(error):
            compiled(x, wrong)


# --- what of an array is read -------------------------------------------------------------------------------------------

READS: dict[str, Callable[[torch.Tensor, Any], Any]] = {
    "sum of T": lambda x, n: x * float(n.T.sum()),
    "item of flat": lambda x, n: x * n.flat[0],
    "list of flat": lambda x, n: x * list(n.flat)[1],
    "write to flat": lambda x, n: (n.flat.__setitem__(0, 9), x * 1)[1],
    "fill T": lambda x, n: (n.T.fill(2), x * 1)[1],
    "in-place method of T": lambda x, n: (n.T.__imul__(2), x * 1)[1],
    "data": lambda x, n: x * n.data[0, 0],
    "mT": lambda x, n: x * n.mT[0, 1],
    "operator on T": lambda x, n: x * float((n.T * 2)[0, 1]),
    "text of T": lambda x, n: (x * 1, str(n.T)),
    "T itself": lambda x, n: (x * 1, n.T),
    "in an index": lambda x, n: x[:, n[0].astype(int) % 2],
    "mask in an index": lambda x, n: x[(slice(None), n[0] > 1)],
    "as any array": lambda x, n: x * float(np.asanyarray(n).sum()),
    "in a list": lambda x, n: x * torch.tensor([n, n]).sum(),
    "in a nested list": lambda x, n: x * torch.tensor([[n], [n]])[0].sum(),
    "flags": lambda x, n: x * int(n.flags.writeable) * n.size * n.shape[0],
    "dtype": lambda x, n: x * (2 if n.dtype == np.float64 else 3),
}


@pytest.mark.parametrize("name", READS)
def test_an_array_is_read_at_each_call(name: str) -> None:
    array = np.arange(9.0).reshape(3, 3) if "index" not in name else np.arange(9).reshape(3, 3)
    _compare(READS[name], array)


def test_an_index_behind_a_break_is_read_at_each_call() -> None:
    def program(x: torch.Tensor) -> Any:
        order = np.random.permutation(3)
        return LINEAR(x[:, order]), x[order, :]

    _compare(program)


def test_an_attribute_of_an_array_is_guarded() -> None:
    calls = [(torch.ones(2), np.ones(2)), (torch.ones(2), np.ones(2, np.float32)), (torch.ones(2), np.ones((2, 1)))]
    program = lambda x, n: x * n.ndim * (2 if n.dtype == np.float64 else 3) + n.itemsize  # noqa: E731
    check_calls(program, calls, backend="aten", fullgraph=True)


def test_the_length_of_an_array() -> None:
    def program(array: Any) -> Any:
        return array.sum() / len(array), len(array)

    compiled = dovetail.compile(program, backend="aten", fullgraph=True)
    for rows in (3, 4, 5):
        array = np.arange(2.0 * rows).reshape(rows, 2)
        assert compiled(array) == program(array)
    with pytest.raises(TypeError, match="unsized"):
        compiled(np.array(1.0))
