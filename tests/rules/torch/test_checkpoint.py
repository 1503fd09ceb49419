"""torch.utils.checkpoint inside of a compiled function: eager's numbers, and its memory."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import dovetail
from dovetail.aot.partition import partition
from dovetail.passes.recompute import saved_by
from tests.differential import check_calls, same

DOUBLE = torch.float64
WEIGHT = torch.randn(16, 16, dtype=DOUBLE, generator=torch.Generator().manual_seed(0)).mul_(0.3).requires_grad_()


def block(x: torch.Tensor) -> torch.Tensor:
    return torch.dropout(torch.sin(x @ WEIGHT), 0.5, True) @ WEIGHT


def deep(x: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        x = torch.tanh(x @ WEIGHT)
    return x


def one_region(x: torch.Tensor) -> torch.Tensor:
    return checkpoint(block, x, use_reentrant=False).sum()


def twice_the_same(x: torch.Tensor) -> torch.Tensor:
    """Structure alone cannot tell which numbers belong to which region."""
    first = checkpoint(block, x, use_reentrant=False)
    noise = torch.rand_like(x)
    return (first * noise + checkpoint(block, x, use_reentrant=False)).sum() + torch.dropout(x, 0.5, True).sum()


def nested(x: torch.Tensor) -> torch.Tensor:
    def outer(y: torch.Tensor) -> torch.Tensor:
        return checkpoint(block, torch.dropout(y, 0.1, True), use_reentrant=False).cos()

    return checkpoint(outer, x, use_reentrant=False).sum()


def attention(x: torch.Tensor) -> torch.Tensor:
    """The operator may draw numbers, is not repeated therefore, and has two results."""
    attend = torch.nn.functional.scaled_dot_product_attention

    def block(y: torch.Tensor) -> torch.Tensor:
        heads = (y @ WEIGHT).view(1, 2, 4, 16)
        return attend(heads, heads.sin(), heads.cos()).tanh() + heads

    return checkpoint(block, checkpoint(block, x, use_reentrant=False).view(8, 16), use_reentrant=False).sum()


def two_results(x: torch.Tensor) -> torch.Tensor:
    def block(y: torch.Tensor) -> torch.Tensor:
        dropped, mask = torch.native_dropout(y @ WEIGHT, 0.5, True)
        return dropped.sin() * mask

    return checkpoint(block, x, use_reentrant=False).sum()


def new_numbers(x: torch.Tensor) -> torch.Tensor:
    return checkpoint(block, x, use_reentrant=False, preserve_rng_state=False).sum()


def run(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> list[torch.Tensor]:
    x = x.detach().clone().requires_grad_()
    WEIGHT.grad = None
    torch.manual_seed(5)
    loss = function(x)
    loss.backward()
    assert x.grad is not None and WEIGHT.grad is not None
    return [loss.detach(), x.grad, WEIGHT.grad, torch.rand(2)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("budget", [None, 0.0, 0.5])
@pytest.mark.parametrize("function", [one_region, twice_the_same, nested, new_numbers, attention, two_results])
def test_same_numbers_as_eager(function: Callable[[torch.Tensor], torch.Tensor], budget: float | None) -> None:
    x = torch.randn(8, 16, dtype=DOUBLE)
    expected = run(function, x)
    compiled = dovetail.compile(function, backend="aten", fullgraph=True, memory_budget=budget)
    for _ in range(2):
        assert all(torch.equal(left, right) for left, right in zip(expected, run(compiled, x), strict=True))


def test_the_whole_step_inside() -> None:
    def step(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        loss = checkpoint(lambda y: torch.dropout(y @ weight, 0.5, True).sin(), x, use_reentrant=False).sum()
        return torch.autograd.grad(loss, (x, weight))

    x, weight = (
        torch.randn(8, 16, dtype=DOUBLE, requires_grad=True),
        torch.randn(16, 16, dtype=DOUBLE, requires_grad=True),
    )
    torch.manual_seed(2)
    expected = step(x, weight)
    torch.manual_seed(2)
    actual = dovetail.compile(step, backend="aten", fullgraph=True)(x, weight)
    assert all(torch.equal(left, right) for left, right in zip(expected, actual, strict=True))


@pytest.mark.parametrize("strategy", ["save_all", "minimum_cut"])
def test_nothing_of_a_region_is_saved(strategy: str) -> None:
    x = torch.randn(64, 16, dtype=DOUBLE, requires_grad=True)
    with_region = dovetail.capture(lambda y: checkpoint(deep, y, use_reentrant=False).sum(), (x,))
    without = dovetail.capture(lambda y: deep(y).sum(), (x,))
    plan = partition(with_region, saved_by(strategy))  # type: ignore[arg-type]
    assert plan.saved_bytes == x.nbytes + WEIGHT.nbytes < partition(without, saved_by(strategy)).saved_bytes  # type: ignore[arg-type]
    assert plan.backward is not None and plan.recomputed_nodes
    tanh = torch.ops.aten.tanh.default
    assert len(plan.forward.graph.find_nodes(op="call_function", target=tanh)) == 3
    assert plan.backward.graph.find_nodes(op="call_function", target=tanh)


def test_the_generator_is_as_it_was_after_a_capture() -> None:
    torch.manual_seed(11)
    before = torch.get_rng_state()
    dovetail.capture(
        one_region, (torch.randn(2, 16, dtype=DOUBLE, generator=torch.Generator().manual_seed(0)).requires_grad_(),)
    )
    assert torch.equal(torch.get_rng_state(), before)


def test_a_selective_policy() -> None:
    def policy(context: object, operator: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        wanted = operator is torch.ops.aten.mm.default
        return CheckpointPolicy.MUST_SAVE if wanted else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)

    def function(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(deep, x, use_reentrant=False, context_fn=contexts).sum()

    x = torch.randn(64, 16, dtype=DOUBLE)
    expected = run(function, x)
    compiled = dovetail.compile(function, backend="aten", fullgraph=True)
    for _ in range(2):
        assert all(torch.equal(left, right) for left, right in zip(expected, run(compiled, x), strict=True))
    plan = partition(dovetail.capture(function, (x.requires_grad_(),)))
    assert plan.backward is not None
    mm, tanh = torch.ops.aten.mm.default, torch.ops.aten.tanh.default
    assert len(plan.backward.graph.find_nodes(op="call_function", target=tanh)) == 3
    # Six of the gradients, none of the forward.
    assert len(plan.backward.graph.find_nodes(op="call_function", target=mm)) == 6
    assert all(torch.equal(left, right) for left, right in zip(expected, run(compiled, x), strict=True))


@pytest.mark.parametrize("function", [one_region, twice_the_same])
def test_second_order_from_outside(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def second(call: Callable[[torch.Tensor], torch.Tensor]) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(3)
        (gradient,) = torch.autograd.grad(call(x).square(), x, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), (x, WEIGHT))

    x = torch.randn(8, 16, dtype=DOUBLE, requires_grad=True)
    expected = second(function)
    actual = second(dovetail.compile(function, backend="aten", fullgraph=True, memory_budget=0.5))
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("function", [one_region, twice_the_same, nested])
def test_regions_that_dynamo_has_captured(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    torch._dynamo.reset()
    x = torch.randn(8, 16, dtype=DOUBLE)
    expected = run(function, x)
    compiled = torch.compile(function, backend=dovetail.torch_backend("aten", fullgraph=True))
    for _ in range(2):
        assert all(torch.equal(left, right) for left, right in zip(expected, run(compiled, x), strict=True))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("needs_gradient", [False, True])
def test_a_sequence_in_segments(reentrant: bool, needs_gradient: bool) -> None:
    """It ran eagerly: torch's own code took the layers for plain functions."""
    outcomes = []
    for compiles in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(4, 4), torch.nn.Dropout(0.5), torch.nn.Tanh(), torch.nn.Linear(4, 3)
        )

        def step(x: torch.Tensor, model: Any = model) -> torch.Tensor:
            result = torch.utils.checkpoint.checkpoint_sequential(model, 2, x, use_reentrant=reentrant)
            loss: torch.Tensor = result.square().sum()
            loss.backward()
            return loss.detach()

        run = dovetail.compile(step, backend="aten", fullgraph=True) if compiles else step
        x = torch.ones(2, 4, requires_grad=needs_gradient)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch's own, about inputs that require no gradient
            losses = [run(x) for _ in range(3)]
        outcomes.append((losses, x.grad, [item.grad for item in model.parameters()], torch.get_rng_state()))
    same(*outcomes)


def without_a_word(x: torch.Tensor) -> torch.Tensor:
    return checkpoint(block, x).sum()


def sequence_without_a_word(x: torch.Tensor) -> torch.Tensor:
    layers = [torch.sin, functools.partial(torch.dropout, p=0.5, train=True), torch.tanh]
    return torch.utils.checkpoint.checkpoint_sequential(layers, 2, x).sum()


@pytest.mark.parametrize("program", [without_a_word, sequence_without_a_word], ids=lambda item: item.__name__)
def test_a_checkpoint_that_does_not_say_its_kind_is_one_graph_with_torchs_warning(program: Any) -> None:
    results, said = [], []
    for function in (program, dovetail.compile(program, backend="aten", fullgraph=True)):
        for _ in range(2):
            x = torch.linspace(-1, 1, 64, dtype=DOUBLE).view(4, 16).requires_grad_()
            torch.manual_seed(1)
            with warnings.catch_warnings(record=True) as given:
                warnings.simplefilter("always")
                value = function(x)
            value.backward()
            results.append((value.detach(), x.grad, torch.get_rng_state()))
            said.append([(item.category, str(item.message)) for item in given])
    same(results[:2], results[2:])
    assert len(said[0]) == 1 and said[:2] == said[2:]


def test_the_reentrant_kind_takes_no_other_keywords() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(block, x, use_reentrant=True, scale=2)

    for function in (program, dovetail.compile(program, backend="aten")):
        with pytest.raises(ValueError, match="Unexpected keyword arguments: scale"):
            function(torch.ones(4, 16, dtype=DOUBLE, requires_grad=True))


class _Held:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


@pytest.mark.parametrize("wrap", [lambda y: {"a": y}, lambda y: (y, [y * 2]), _Held, lambda y: (y, None, 3)])
@pytest.mark.filterwarnings("ignore")
def test_what_the_reentrant_kind_returns_in_an_object_has_no_gradient(wrap: Any) -> None:
    linear = torch.nn.Linear(3, 3)

    def function(x: torch.Tensor) -> Any:
        return checkpoint(lambda value: wrap(linear(value)), x, use_reentrant=True)

    def flags(run: Any) -> list[bool]:
        result = run(torch.ones(2, 3, requires_grad=True))
        leaves = torch.utils._pytree.tree_leaves(result.value if isinstance(result, _Held) else result)
        return [leaf.requires_grad for leaf in leaves if isinstance(leaf, torch.Tensor)]

    compiled = dovetail.compile(function, backend="aten")
    for _ in range(2):
        assert flags(compiled) == flags(function)


RETURNING: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "what it was given": lambda x, mask: (x * 2, mask),
    "a result without a gradient": lambda x, mask: (x * 2, mask * 1.0, x.detach(), mask > 0),
    "its input alone": lambda x, mask: x,
    "its input beside another use": lambda x, mask: (x * mask, x),
    "a named tuple": lambda x, mask: (x * mask).max(0),
    "a view": lambda x, mask: x.view(1, 3),
}


@pytest.mark.parametrize("name", RETURNING)
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad", "ignore:.*detached tensor")
def test_what_the_reentrant_kind_returns_is_a_result_of_its_node(name: str, requires_grad: bool) -> None:
    def direct(x: torch.Tensor, mask: torch.Tensor) -> Any:
        found = checkpoint(RETURNING[name], x, mask, use_reentrant=True)
        return found, type(found).__name__, [item is x or item is mask for item in found]

    def used(x: torch.Tensor, mask: torch.Tensor) -> Any:
        given = x.sin()
        first, *rest = checkpoint(RETURNING[name], given, mask, use_reentrant=True)
        return first * 3, given, [item + 1 for item in rest], [item.requires_grad for item in rest]

    for function in (direct, used):
        x = torch.tensor([0.3, 0.4, 0.5], requires_grad=requires_grad)
        calls = [(x, torch.tensor([1.0, 0.0, 2.0])), (x, torch.tensor([2.0, 3.0, 0.0]))]
        check_calls(function, calls, fullgraph=function is used)
