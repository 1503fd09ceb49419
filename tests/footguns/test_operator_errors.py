"""Errors that only the data, or the real kernel, brings about: eager's, handled where the program handles them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail
from dovetail import aot
from dovetail.errors import GraphBreakWarning, OutgrownError
from dovetail.reports.explanation import compiled_function
from dovetail.versions import parse
from tests.differential import check

ONE, TWO = torch.tensor([0, 1]), torch.tensor([0, 9])


def other_dtype(x: torch.Tensor, index: torch.Tensor, seen: list[str]) -> torch.Tensor:
    """The kernel for fake tensors does not see that two dtypes do not fit."""
    try:
        return x.index_add(0, index, torch.ones(2, dtype=torch.float64)) * 2
    except RuntimeError as error:
        seen.append(str(error))
        return x * 3


def out_of_range(x: torch.Tensor, index: torch.Tensor, seen: list[str]) -> torch.Tensor:
    """Only the data tells whether an index is in range."""
    seen.append("before")
    try:
        return torch.nn.functional.embedding(index, x.view(3, 1)) * 2
    except IndexError as error:
        seen.append(str(error))
        return x * 3


def not_handled(x: torch.Tensor, index: torch.Tensor, seen: list[str]) -> torch.Tensor:
    """Nobody handles it: an effect before it has happened, one behind it has not."""
    seen.append("before")
    result = x[index] * 2
    seen.append("behind")
    return result


@pytest.mark.parametrize(
    ("function", "backend"),
    [
        (other_dtype, "aten"),  # Inductor's kernels take what eager's refuse here
        (out_of_range, "aten"),
        (out_of_range, "inductor"),
        (not_handled, "aten"),
        (not_handled, "inductor"),
    ],
)
@pytest.mark.once("inductor")
def test_an_error_of_a_real_kernel_is_where_eager_has_it(function: Any, backend: str) -> None:
    compiled = dovetail.compile(function, backend=backend, fullgraph=True)
    for index in (ONE, TWO, ONE):
        outcomes: list[Any] = []
        for run in (function, compiled):
            x, seen = torch.arange(3.0, requires_grad=True), ["start"]
            try:
                result = run(x, index, seen)
                result.sum().backward()
                outcomes.append((result.detach().tolist(), x.grad, seen))
            except IndexError as error:
                outcomes.append((str(error), seen))
        assert repr(outcomes[0]) == repr(outcomes[1])


def test_the_programs_random_numbers_are_drawn_once() -> None:
    def function(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(2)
        return x[index] * noise

    compiled = dovetail.compile(function, backend="aten", fullgraph=True)
    states = []
    for run in (function, compiled):
        torch.manual_seed(0)
        with pytest.raises(IndexError, match="out of bounds"):
            run(torch.ones(3), TWO)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


class Counting(torch.nn.Module):
    """Numbers, buffers and a list that change in front of the operator that may refuse the data, and behind it."""

    def __init__(self, ignored: int = -100) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(5, 3)
        self.norm = torch.nn.BatchNorm1d(3)
        self.drop = torch.nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(1))
        self.log: list[str] = []
        self.ignored = ignored

    def forward(self, words: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.log.append("begun")
        self.calls.add_(1)
        features = self.drop(self.norm(self.words(words)))
        self.log.append("known")
        loss = torch.nn.functional.cross_entropy(features, labels, ignore_index=self.ignored)
        self.calls.mul_(2)
        return loss


GOOD, UNKNOWN_WORD = torch.tensor([0, 4, 2, 1]), torch.tensor([0, 5, 2, 1])
LABELS, BAD_LABEL, IGNORED_LABEL = torch.tensor([0, 2, 1, 1]), torch.tensor([0, 3, 1, 1]), torch.tensor([0, -7, 1, 1])
BATCHES = [
    (GOOD, LABELS),
    (UNKNOWN_WORD, LABELS),
    (GOOD, BAD_LABEL),
    (GOOD, IGNORED_LABEL),
    # Inductor of older torch counts a label below zero from the end, under torch.compile as well.
    (GOOD, -LABELS if parse(torch.__version__) >= (2, 13) else BAD_LABEL),
    (GOOD, LABELS),
]


def bad_batches(compiling: Any, way: str) -> list[Any]:
    """What a loop that goes on behind a bad batch leaves, after each batch."""
    torch.manual_seed(0)
    model, seen = Counting(ignored=-7), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(words: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(words, labels)
        loss.backward()
        optimizer.step()
        return loss

    run = compiling(step if way == "whole step" else model)
    for words, labels in BATCHES:
        try:
            with torch.set_grad_enabled(way != "no gradients"):
                loss = run(words, labels)
                if way == "training":
                    loss.backward()
            seen.append(loss.detach())
        except IndexError as error:
            seen.append(str(error))
        state = {name: value.clone() for name, value in model.state_dict().items()}
        seen.append((state, list(model.log), [p.grad is None for p in model.parameters()], torch.get_rng_state()))
    return seen


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", ["training", "no gradients", "whole step"])
@pytest.mark.parametrize("backend", ["aten", "inductor"])
@pytest.mark.once("inductor")
def test_what_a_call_does_before_an_operator_refuses_its_data_is_done(backend: str, way: str) -> None:
    def compiling(function: Any) -> Any:
        return dovetail.compile(function, backend=backend, fullgraph=True, tiers="wait")

    expected, actual = bad_batches(lambda function: function, way), bad_batches(compiling, way)
    assert [type(item) for item in expected] == [
        torch.Tensor,
        tuple,
        str,
        tuple,
        str,
        tuple,
        torch.Tensor,
        tuple,
        str,
        tuple,
    ] + [torch.Tensor, tuple]
    tolerance = 0.0 if backend == "aten" else 1e-4
    torch.testing.assert_close(actual[::2][0], expected[::2][0], rtol=tolerance, atol=tolerance)
    for mine, eagers in zip(actual, expected, strict=True):
        if isinstance(eagers, tuple):
            torch.testing.assert_close(mine[0], eagers[0], rtol=tolerance, atol=tolerance)
            assert mine[1:3] == eagers[1:3] and torch.equal(mine[3], eagers[3])
        elif isinstance(eagers, str):
            assert mine == eagers


@pytest.mark.parametrize("backend", ["aten", "inductor"])
@pytest.mark.parametrize(
    "operator",
    [
        lambda x, index: x[index],
        lambda x, index: x.index_select(0, index),
        lambda x, index: x.gather(0, index.view(2, 1)),
        lambda x, index: x.scatter(0, index.view(2, 1).expand(2, 2), 1.0),
        lambda x, index: x.index_add(0, index, torch.ones(2, 2)),
        lambda x, index: torch.nn.functional.embedding(index, x),
        lambda x, index: x.t()[:, index.to(torch.int32)],
    ],
    ids=["item", "select", "gather", "scatter", "add", "embedding", "column"],
)
@pytest.mark.parametrize("bad", [[0, 3], [-4, 0]], ids=["above", "below"])
@pytest.mark.once("inductor")
def test_bad_indices_of_a_graph_that_writes(operator: Any, backend: str, bad: list[int]) -> None:
    def count(x: torch.Tensor, index: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        seen.add_(1)
        result: torch.Tensor = operator(x, index) * 2
        seen.mul_(3)
        return result

    compiled, outcomes = dovetail.compile(count, backend=backend, tiers="wait"), []
    for run in (count, compiled):
        seen = torch.zeros(1)
        for index in ([0, 2], bad, [1, 0]):
            try:
                outcome: Any = run(torch.arange(6.0).view(3, 2), torch.tensor(index), seen).tolist()
            except (IndexError, RuntimeError) as error:
                outcome = type(error).__name__, str(error)
            outcomes.append((outcome, seen.tolist()))
    assert outcomes[:3] == outcomes[3:]


def checked(x: torch.Tensor, log: list[int]) -> Any:
    """A check of the data before a graph break, and what it raises handled: the rest must not run again."""
    log.append(1)
    try:
        if x.min() < 0:
            raise ValueError("negative")
    except ValueError:
        return x * 7, "handled"
    y = x.sqrt()
    print("a graph break")
    return y * 2, "rest"


def indexed(x: torch.Tensor, log: list[int]) -> Any:
    """The same with an operator's error, behind a graph break too."""
    log.append(1)
    print("a graph break")
    try:
        y = torch.ones(4)[x.long()]
    except IndexError:
        return x * 7, "handled"
    print("a graph break")
    log.append(2)
    return y * 2, "rest"


@pytest.mark.parametrize("function", [checked, indexed])
@pytest.mark.filterwarnings("ignore::dovetail.errors.GraphBreakWarning")
def test_a_call_that_starts_over_is_whole_despite_graph_breaks(function: Any) -> None:
    compiled = dovetail.compile(function, backend="aten")
    for value in (3.0, -9.0, 2.0, -8.0):
        outcomes = []
        for run in (function, compiled):
            log: list[int] = []
            result, way = run(torch.tensor([value]), log)
            outcomes.append((result.tolist(), way, log))
        assert outcomes[0] == outcomes[1]
    assert len(compiled_function(compiled).entries) == 1


def kept_as_it_is(joint: Any) -> Any:
    return joint


def test_eager_never_takes_the_place_of_a_graph_that_was_edited() -> None:
    """It would leave out what the pass has added: the exchange of gradients between processes, say."""

    def chosen(x: torch.Tensor) -> torch.Tensor:
        if x.min() < 0:
            raise ValueError("negative")
        return x.sqrt()

    def handled(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        try:
            return x[index] * 2
        except IndexError:
            return x

    compiled = dovetail.compile(chosen, backend="aten", fullgraph=True, passes=(kept_as_it_is,))
    compiled(torch.ones(2))
    with pytest.raises(OutgrownError, match="passes have edited"):
        compiled(-torch.ones(2))
    compiled = dovetail.compile(handled, backend="aten", fullgraph=True, passes=(kept_as_it_is,))
    compiled(torch.ones(3), ONE)
    with pytest.raises(IndexError):
        compiled(torch.ones(3), TWO)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(
    "call",
    [
        lambda x: torch.stack([]),
        lambda x: torch.cat([]),
        lambda x: x.double(1),
        lambda x: vars(*(x, x)),
        lambda x: dict(*((), ())),
        lambda x: torch.vstack([]),
        lambda x: torch.block_diag(3),
    ],
)
def test_a_handled_error_is_eagers(call: Any) -> None:
    """The kernels for fake tensors, and the methods of traced ones, may refuse by other classes of errors."""

    def function(x: torch.Tensor) -> Any:
        try:
            return call(x)
        except Exception as error:  # noqa: BLE001
            return type(error), str(error), x * 2

    check(function, torch.ones(3, requires_grad=True), fullgraph=False)


def unread_rows(x: torch.Tensor, index: torch.Tensor, seen: list[str]) -> torch.Tensor:
    """Nothing reads the result."""
    try:
        torch.nn.functional.embedding(index, x.view(3, 1))
    except IndexError as error:
        seen.append(str(error))
        return x * 3
    return x * 2


def unread_write(x: torch.Tensor, index: torch.Tensor, seen: list[str]) -> torch.Tensor:
    """What is written is the function's own, and nothing reads it."""
    x.detach().clone().index_add_(0, index, torch.ones(2))
    return x * 2


def unread_loss(x: torch.Tensor, index: torch.Tensor, seen: list[str]) -> torch.Tensor:
    """The operator has two results."""
    torch.nn.functional.cross_entropy(x.expand(2, 3), index)
    return x * 2


def unread_chain(x: torch.Tensor, index: torch.Tensor, seen: list[str]) -> torch.Tensor:
    """What raises is read by what nothing reads."""
    torch.nn.functional.embedding_bag(index.view(1, 2), x.view(3, 1)).sin()
    return x * 2


@pytest.mark.parametrize("backend", ["aten", "eager", "inductor"])
@pytest.mark.parametrize("function", [unread_rows, unread_write, unread_loss, unread_chain])
@pytest.mark.once("inductor")
def test_what_nothing_reads_raises_all_the_same(function: Any, backend: str) -> None:
    compiled = dovetail.compile(function, backend=backend, fullgraph=True)
    for index in (ONE, TWO, ONE):
        outcomes: list[Any] = []
        for run in (function, compiled):
            x, seen = torch.ones(3, requires_grad=True), []
            try:
                result = run(x, index, seen)
                result.sum().backward()
                outcomes.append((result.tolist(), x.grad.tolist(), seen))
            except (IndexError, RuntimeError) as error:
                outcomes.append((type(error), str(error).splitlines()[0], seen))
        assert outcomes[0] == outcomes[1]


NUMBERS_WITHOUT_A_KERNEL: dict[str, Callable[[torch.Tensor], Any]] = {
    "resizing": lambda x: torch.nn.functional.interpolate(x.reshape(1, 1, -1).long(), scale_factor=2.0, mode="linear"),
    "pooling": lambda x: torch.nn.functional.adaptive_avg_pool2d(x.reshape(1, 1, -1).byte(), 1),
    "a product": lambda x: (x > 0).outer(x > 0).mm((x > 0).outer(x > 0)),
    "the larger ones": lambda x: torch.maximum(x + 1j, x * 1j),
    "softmax": lambda x: x.long().softmax(0),
}


@pytest.mark.parametrize("name", NUMBERS_WITHOUT_A_KERNEL)
def test_numbers_for_which_there_is_no_kernel_raise_where_nothing_reads_the_result(name: str) -> None:
    compute = NUMBERS_WITHOUT_A_KERNEL[name]

    def function(x: torch.Tensor) -> torch.Tensor:
        try:
            compute(x)
        except (RuntimeError, TypeError):
            return x * 3
        return x * 2

    x = torch.ones(4)
    compiled = dovetail.compile(function, backend="aten")
    for _ in range(2):
        assert torch.equal(compiled(x), function(x)) and function(x)[0] == 3


def test_only_what_may_raise_stays_in_the_graph() -> None:
    def function(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        x.sin().cos()
        x.gather(0, index)
        kept = x[index]
        return (kept * x[: len(kept)]).sum()

    with contextlib.ExitStack() as stack:
        state = aot.create_state(stack, function, (torch.ones(3, requires_grad=True), ONE))
        graph = aot.capture_joint(state).graph
        names = [node.target.__name__ for node in graph.nodes if node.op == "call_function"]
    assert [names.count(name) for name in ("sin.default", "cos.default", "index.Tensor")] == [0, 0, 1]
    assert names[names.index("gather.default") + 1] == "read.default"
    assert names.count("read.default") == 1


def test_the_memory_of_a_numpy_array_is_not_resized() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        try:
            x.resize_(10, 10)
        except RuntimeError:
            return y * 3
        return y * 2

    x = torch.ones(4)
    array = x.numpy()
    compiled = dovetail.compile(function, backend="aten")
    with pytest.warns(GraphBreakWarning, match="memory is not its own"):
        assert compiled(x, torch.ones(2)).tolist() == [3.0, 3.0]
    assert array.shape == (4,)
