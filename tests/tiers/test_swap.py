"""Operators first, kernels later: what a call gives before, at and after a swap is eager's, and every failure leaves tier 0."""

from __future__ import annotations

import copy
import gc
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import silu
from torch.utils.checkpoint import checkpoint

import dovetail
from dovetail.backends import lookup_backend, register_backend
from dovetail.backends.registry import unregister_backend
from dovetail.errors import EagerFallbackWarning, OptionError
from dovetail.options import make_options
from dovetail.tiers import choice, process
from dovetail.tiers.process import Answer
from tests.differential import check_calls, compare_call, compare_modules, same
from tests.tiers.fakes import CACHE, FakeWorker, SlowBackend

NAME = "slow to compile"


@pytest.fixture
def background(monkeypatch: pytest.MonkeyPatch) -> FakeWorker:
    made = FakeWorker()
    monkeypatch.setattr(process, "worker", lambda: made)
    CACHE.is_filled = False
    monkeypatch.setitem(choice.CACHES, NAME, CACHE)
    monkeypatch.delenv(choice.SWITCH, raising=False)
    return made


@pytest.fixture
def slow() -> Iterator[SlowBackend]:
    made = SlowBackend(NAME)
    register_backend(NAME, made.backend)
    yield made
    unregister_backend(NAME)


def notes(compiled: Any) -> list[str]:
    named = [event.name for event in dovetail.events_of(compiled).events]
    return [name for name in named if "tier" in name or "kernels" in name or "swap" in name or "process" in name]


def layers(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.SiLU(), nn.BatchNorm1d(8), nn.Dropout(0.4), nn.Linear(8, 3))


def train(model: Any, step: int) -> Tensor:
    torch.manual_seed(step)
    result = model(torch.randn(5, 6))
    result.square().sum().backward()
    return result.detach()


def test_eager_before_at_and_after_a_swap(background: FakeWorker, slow: SlowBackend) -> None:
    eager, model = layers(), layers()
    compiled = dovetail.compile(model, backend=NAME, fullgraph=True)
    for step in range(8):
        if step == 5:
            background.answer_all()
        expected, actual = train(eager, step), train(compiled, step)
        same(expected, actual, exact=step < 5)
        same(torch.get_rng_state(), (train(eager, step), torch.get_rng_state(), train(compiled, step))[1])
        compare_modules(eager, model, "model", exact=False)
        assert bool(slow.ran) == (step >= 5)
    assert notes(compiled) == ["tier 0", "tier 1 asked for", "tier 1"]
    assert len(background.jobs) == 1
    assert [graph["kind"] for graph in background.jobs[0].data["graphs"]] == ["forward", "backward"]


def test_random_numbers_are_the_same_on_both_tiers(background: FakeWorker, slow: SlowBackend) -> None:
    def noisy(x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(silu(x), 0.5) + torch.rand_like(x)

    compiled, states = dovetail.compile(noisy, backend=NAME), []
    x = torch.randn(50)
    for call in range(5):
        if call == 3:
            background.answer_all()
        torch.manual_seed(7)
        result = compiled(x)
        states.append((result, torch.get_rng_state()))
    torch.manual_seed(7)
    expected = noisy(x)
    for result, state in states:
        same(expected, result, exact=False)
        same(torch.get_rng_state(), state)
    assert slow.ran == ["inference"] * 2


def test_a_backward_runs_on_the_tier_of_its_forward(background: FakeWorker, slow: SlowBackend) -> None:
    compiled = dovetail.compile(lambda x: (silu(x) * x).sum(), backend=NAME)
    inputs = [torch.randn(4, requires_grad=True) for _ in range(4)]
    losses = [compiled(x) for x in inputs[:3]]
    background.answer_all()
    losses.append(compiled(inputs[3]))
    assert slow.ran == ["forward"]
    for x, loss in reversed(list(zip(inputs, losses, strict=True))):
        loss.backward()
        own = x.detach().requires_grad_()
        (own * silu(own)).sum().backward()
        same(own.grad, x.grad, exact=False)
    assert slow.ran == ["forward", "backward"]


class _WithScores(nn.Module):
    """A model whose second result, a number, looks like the loss, which it is only a part of."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = silu(self.first(x))
        return self.second(hidden), hidden.square().mean()


def _used(used: str, model: Any, step: int) -> Tensor:
    torch.manual_seed(step)
    result, score = model(torch.randn(5, 6))
    loss = result.square().sum()
    for part in {"result": [loss], "score": [score], "both": [loss + score], "each": [loss, score]}[used]:
        part.backward(retain_graph=True)
    return loss.detach()


@pytest.mark.parametrize(("used", "backwards"), [("both", 1), ("score", 1), ("result", 1), ("each", 2)])
def test_the_backward_of_the_results_that_are_used_is_compiled_in_the_background(
    background: FakeWorker, slow: SlowBackend, used: str, backwards: int
) -> None:
    eager, model = _WithScores(), _WithScores()
    compiled = dovetail.compile(model, backend=NAME, fullgraph=True)
    for step in range(8):
        same(_used(used, eager, step), _used(used, compiled, step), exact=False)
        compare_modules(eager, model, "model", exact=False)
        if step == 2:
            dovetail.wait(compiled, 0)
            background.answer_all()
            dovetail.wait(compiled)
            count = len(slow.compiled)
    assert [graph["kind"] for graph in background.jobs[0].data["graphs"]] == ["forward"] + ["backward"] * backwards
    assert len(slow.compiled) == count


def test_a_graph_that_is_called_once_is_never_compiled(background: FakeWorker, slow: SlowBackend) -> None:
    dovetail.compile(torch.sin, backend=NAME)(torch.ones(2))
    assert not background.jobs
    assert not slow.compiled


@pytest.mark.parametrize("status", ["failed", "left"])
def test_a_job_that_fails_leaves_tier_0(background: FakeWorker, slow: SlowBackend, status: str) -> None:
    compiled = dovetail.compile(lambda x: silu(x) + 1, backend=NAME)
    x = torch.randn(3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for call in range(6):
            same(silu(x) + 1, compiled(x))
            if call == 2:
                background.answer_all(Answer(status, "the compiler has crashed"))
    told = [str(item.message) for item in caught if issubclass(item.category, EagerFallbackWarning)]
    # A fork is no fault that anybody could mend.
    assert len(told) == (status == "failed")
    assert all("the compiler has crashed" in text and "what to do" in text for text in told)
    assert not slow.ran
    assert "stays on ATen operators" in str(dovetail.explain(compiled)(x))
    assert dovetail.wait(compiled)


def test_kernels_that_cannot_be_taken_leave_tier_0(background: FakeWorker, slow: SlowBackend) -> None:
    compiled = dovetail.compile(torch.sin, backend=NAME)
    x = torch.randn(3)
    for _ in range(2):
        compiled(x)
    slow.error = RuntimeError("the compiled graph is not in the cache")
    background.answer_all()
    with pytest.warns(EagerFallbackWarning, match="not in the cache"):
        same(torch.sin(x), compiled(x))
    same(torch.sin(x), compiled(x))


def test_what_another_process_cannot_compile_is_compiled_here(background: FakeWorker, slow: SlowBackend) -> None:
    compiled = dovetail.compile(torch.sin, backend=NAME)
    x = torch.randn(3)
    for _ in range(2):
        compiled(x)
    background.answer_all(Answer("unfit", "other switches"))
    same(torch.sin(x), compiled(x))
    assert slow.ran == ["inference"]
    assert "compiled in this process" in notes(compiled)


def test_operators_of_others_wait_for_their_kernels(background: FakeWorker, slow: SlowBackend) -> None:
    @torch.library.custom_op("tiers::doubled", mutates_args=())
    def doubled(x: Tensor) -> Tensor:
        return x * 2

    doubled.register_fake(torch.empty_like)
    compiled = dovetail.compile(lambda x: doubled(x) + 1, backend=NAME)
    same(torch.full((2,), 3.0), compiled(torch.ones(2)))
    assert slow.ran == ["inference"]
    assert not background.jobs


@pytest.mark.parametrize("why", ["option", "environment", "deterministic", "budget", "no process"])
def test_waits_for_kernels(
    background: FakeWorker, slow: SlowBackend, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    options: dict[str, Any] = {"option": {"tiers": "wait"}, "budget": {"memory_budget": 0.5}}
    if why == "environment":
        monkeypatch.setenv(choice.SWITCH, "wait")
    background.fails_to_start = why == "no process"
    torch.use_deterministic_algorithms(why == "deterministic")
    try:
        check_calls(
            lambda x: silu(x) * 2,
            [(torch.randn(3, 2),), (torch.randn(4, 2),)],
            backend=NAME,
            exact=False,
            **options.get(why, {}),
        )
    finally:
        torch.use_deterministic_algorithms(False)
    assert slow.ran[0] in ("inference", "forward")
    assert not background.jobs


def test_sizes_that_the_data_decides_wait(background: FakeWorker, slow: SlowBackend) -> None:
    compiled = dovetail.compile(lambda x: silu(x[x > 0]) * 2, backend=NAME, fullgraph=True)
    for _ in range(3):
        x = torch.randn(9)
        same(silu(x[x > 0]) * 2, compiled(x), exact=False)
    assert not background.jobs
    assert slow.ran == ["inference"] * 3


def test_nothing_swaps_while_algorithms_are_to_be_deterministic(background: FakeWorker, slow: SlowBackend) -> None:
    compiled = dovetail.compile(torch.sin, backend=NAME)
    x = torch.randn(3)
    for _ in range(2):
        compiled(x)
    background.answer_all()
    torch.use_deterministic_algorithms(True)
    try:
        compiled(x)
        assert not dovetail.wait(compiled, 1) or len(dovetail.explain(compiled)(x).entries) > 1
    finally:
        torch.use_deterministic_algorithms(False)
    assert "tier 1" not in notes(compiled)
    compiled(x)
    assert notes(compiled)[-1] == "tier 1"


def test_never(background: FakeWorker, slow: SlowBackend) -> None:
    check_calls(lambda x: silu(x) * 2, [(torch.randn(3),)] * 4, backend=NAME, tiers="never", exact=True)
    assert not slow.compiled
    assert not background.jobs


def test_bad_options(slow: SlowBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match="tiers must be 'auto', 'wait' or 'never', not 'soon'"):
        dovetail.compile(torch.sin, backend="aten", tiers="soon")
    with pytest.raises(OptionError, match="check_swap must be True or False, not 1"):
        dovetail.compile(torch.sin, backend="aten", check_swap=1)
    monkeypatch.setenv(choice.SWITCH, "later")
    with pytest.raises(OptionError, match="not 'later'"):
        dovetail.compile(torch.sin, backend=NAME)


def test_a_full_disk_leaves_tier_0(background: FakeWorker, slow: SlowBackend) -> None:
    background.fails = OSError
    compiled = dovetail.compile(torch.sin, backend=NAME)
    x = torch.randn(3)
    compiled(x)
    with pytest.warns(EagerFallbackWarning, match="No space left"):
        compiled(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same(torch.sin(x), compiled(x))


def test_a_deleted_function_cancels_its_work(background: FakeWorker, slow: SlowBackend) -> None:
    compiled = dovetail.compile(lambda x: x.sin(), backend=NAME)
    for _ in range(3):
        compiled(torch.ones(2))
    (job,) = background.jobs
    assert not job.is_cancelled
    del compiled
    gc.collect()
    assert job.is_cancelled


def test_two_functions_swap_by_themselves(background: FakeWorker, slow: SlowBackend) -> None:
    one, two = (dovetail.compile(function, backend=NAME) for function in (torch.sin, torch.cos))
    x = torch.randn(3)
    for _ in range(2):
        one(x), two(x)
    first, second = background.jobs
    second.given = Answer("compiled")
    same(torch.sin(x), one(x))
    same(torch.cos(x), two(x))
    assert slow.ran == ["inference"]
    first.given = Answer("failed", "crash")
    with pytest.warns(EagerFallbackWarning, match="crash"):
        one(x)
    same(torch.cos(x), two(x))
    assert slow.ran == ["inference"] * 2


def test_each_graph_between_breaks_swaps(background: FakeWorker, slow: SlowBackend, quiet: None) -> None:
    def broken(x: Tensor) -> Tensor:
        y = silu(x) + 1
        print(end="")
        return (y * 2).cos()

    compiled = dovetail.compile(broken, backend=NAME)
    for call in range(5):
        if call == 3:
            background.answer_all()
        x = torch.randn(3)
        same(broken(x), compiled(x), exact=False)
    assert notes(compiled).count("tier 1") == len(background.jobs) == 2


def test_one_warning_a_function(background: FakeWorker, slow: SlowBackend, quiet: None) -> None:
    def broken(x: Tensor) -> Tensor:
        y = silu(x)
        print(end="")
        y = y * 2
        print(end="")
        return y.cos()

    compiled = dovetail.compile(broken, backend=NAME)
    x = torch.randn(3)
    for _ in range(2):
        compiled(x)
    assert len(background.jobs) > 1
    background.answer_all(Answer("failed", "no compiler"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            same(broken(x), compiled(x))
    assert len([item for item in caught if "no compiler" in str(item.message)]) == 1


def test_wait_swaps_everything_so_far(background: FakeWorker, slow: SlowBackend) -> None:
    compiled = dovetail.compile(torch.sin, backend=NAME)
    x = torch.randn(3)
    assert dovetail.wait(compiled)
    compiled(x)
    assert "tier 0: kernels are asked for at the second call" in str(dovetail.explain(compiled)(x))
    assert not dovetail.wait(compiled, 0.05)
    assert "compiles 1 graph in the background" in str(dovetail.explain(compiled)(x))
    threading.Timer(0.1, background.answer_all).start()
    assert dovetail.wait(compiled)
    assert "tier 1: runs by the kernels" in str(dovetail.explain(compiled)(x))
    same(torch.sin(x), compiled(x))
    assert slow.ran == ["inference"]


@pytest.mark.parametrize("is_wrong", [False, True])
def test_check_swap(background: FakeWorker, slow: SlowBackend, is_wrong: bool) -> None:
    def wrong(outputs: list[Any]) -> list[Any]:
        return [item * 2 if isinstance(item, Tensor) and item.is_floating_point() else item for item in outputs]

    slow.change = wrong if is_wrong else list
    eager, model = layers(), layers()
    compiled = dovetail.compile(model, backend=NAME, check_swap=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(6):
            if step == 3:
                background.answer_all()
            same(train(eager, step), train(compiled, step), exact=is_wrong)
            compare_modules(eager, model, "model", exact=is_wrong)
    told = [str(item.message) for item in caught]
    assert len(told) == is_wrong
    assert notes(compiled)[-1] == ("stays on tier 0" if is_wrong else "tier 1")
    assert all("other results than ATen operators" in text for text in told)


def test_check_swap_leaves_written_inputs_alone(background: FakeWorker, slow: SlowBackend) -> None:
    def write(x: Tensor) -> Tensor:
        x.mul_(2)
        return silu(x) + torch.rand(3)

    compiled = dovetail.compile(write, backend=NAME, check_swap=True)
    for call in range(5):
        if call == 2:
            background.answer_all()
        compare_call(write, compiled, (torch.randn(3),), exact=False)
    assert notes(compiled)[-1] == "tier 1"


def test_derivatives_of_the_next_order(background: FakeWorker, slow: SlowBackend) -> None:
    def energy(x: Tensor, w: Tensor) -> Tensor:
        return ((x @ w).tanh() * silu(x).sum()).sum()

    compiled = dovetail.compile(energy, backend=NAME)

    def second(function: Callable[..., Tensor], seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4, 2, requires_grad=True)
        (force,) = torch.autograd.grad(function(x, w), x, create_graph=True)
        return list(torch.autograd.grad(force.square().sum(), (x, w)))

    for call in range(8):
        if call >= 3:
            background.answer_all()
        same(second(energy, call), second(compiled, call), exact=False)
    assert len(background.jobs) > 1
    assert "forward" in slow.ran


def test_a_whole_step_swaps(background: FakeWorker, slow: SlowBackend) -> None:
    def make(model: nn.Module) -> Callable[[Tensor], Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().sum()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    models = [nn.Sequential(nn.Linear(3, 4), nn.SiLU(), nn.Linear(4, 2)) for _ in range(2)]
    models[1].load_state_dict(copy.deepcopy(models[0].state_dict()))
    eager, compiled = make(models[0]), dovetail.compile(make(models[1]), backend=NAME, fullgraph=True)
    for step in range(7):
        if step >= 4:
            background.answer_all()
        x = torch.randn(5, 3)
        same(eager(x), compiled(x), exact=False)
        compare_modules(models[0], models[1], "model", exact=False)
    assert slow.ran


@pytest.mark.sampled(3)
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.NAdam, torch.optim.SGD])
def test_a_whole_step_whose_numbers_change_swaps(
    background: FakeWorker, slow: SlowBackend, optimizer: Callable[..., torch.optim.Optimizer]
) -> None:
    def make(model: nn.Module) -> tuple[Callable[[Tensor], Tensor], torch.optim.Optimizer]:
        owner = optimizer(model.parameters(), lr=0.1)

        def step(x: Tensor) -> Tensor:
            owner.zero_grad()
            loss = model(x).square().sum()
            loss.backward()
            owner.step()
            return loss.detach()

        return step, owner

    models = [nn.Sequential(nn.Linear(3, 4), nn.SiLU(), nn.Linear(4, 2)) for _ in range(2)]
    models[1].load_state_dict(copy.deepcopy(models[0].state_dict()))
    (eager, first), (step, second) = map(make, models)
    compiled = dovetail.compile(step, backend=NAME, fullgraph=True)
    for number in range(8):
        for group in (*first.param_groups, *second.param_groups):
            group["lr"] = 0.1 / (number + 1)
        if number >= 5:
            background.answer_all()
        x = torch.randn(5, 3)
        same(eager(x), compiled(x), exact=False)
        compare_modules(models[0], models[1], "model", exact=False)
        assert bool(slow.ran) is (number >= 5)
    assert "waits for kernels" not in notes(compiled)


def test_a_number_of_which_only_guards_know(background: FakeWorker, slow: SlowBackend) -> None:
    def program(x: Tensor, number: int) -> Tensor:
        return silu(x) * 2 if number % 2 == 0 else silu(x) - 1

    compiled = dovetail.compile(program, backend=NAME, fullgraph=True)
    for number in range(2, 14):
        if number >= 10:
            background.answer_all()
        x = torch.randn(3, requires_grad=True)
        copied = x.detach().clone().requires_grad_()
        expected, found = program(copied, number), compiled(x, number)
        same(expected, found, exact=False)
        same(torch.autograd.grad(expected.sum(), copied), torch.autograd.grad(found.sum(), x), exact=False)
    assert len(background.jobs) >= 2
    assert slow.ran == ["forward", "backward"] * 4
    assert "waits for kernels" not in notes(compiled)


def test_a_number_that_changes_in_forward_and_backward(background: FakeWorker, slow: SlowBackend) -> None:
    compiled = dovetail.compile(lambda x, scale: silu(x * scale) * scale**2, backend=NAME, fullgraph=True)
    for number in range(7):
        if number >= 4:
            background.answer_all()
        x = torch.randn(3, requires_grad=True)
        copied = x.detach().clone().requires_grad_()
        expected, found = silu(copied * (number + 0.5)) * (number + 0.5) ** 2, compiled(x, number + 0.5)
        same(expected, found, exact=False)
        same(torch.autograd.grad(expected.sum(), copied), torch.autograd.grad(found.sum(), x), exact=False)
    assert slow.ran == ["forward", "backward"] * 3


def test_a_number_that_the_compiler_does_not_take_waits(background: FakeWorker, slow: SlowBackend) -> None:
    compiled = dovetail.compile(lambda x, end: silu(x) + torch.linspace(0.5, end, 3), backend=NAME, fullgraph=True)
    x = torch.randn(3)
    for number in (1.5, 2.5, 3.5, 4.5):
        same(silu(x) + torch.linspace(0.5, number, 3), compiled(x, number), exact=False)
    assert "waits for kernels" in notes(compiled)


def test_threads_swap_once(background: FakeWorker, slow: SlowBackend) -> None:
    compiled = dovetail.compile(lambda x: silu(x) * 3, backend=NAME)
    x = torch.randn(4)
    for _ in range(2):
        compiled(x)
    background.answer_all()
    results: list[Tensor] = []
    threads = [threading.Thread(target=lambda: results.extend(compiled(x) for _ in range(20))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 80
    for result in results:
        same(silu(x) * 3, result, exact=False)
    assert notes(compiled).count("tier 1") == 1


def test_a_region_of_checkpoint_is_computed_again_by_what_computed_it(
    background: FakeWorker, slow: SlowBackend
) -> None:
    # Tier 0 may save other tensors than the kernels do, and checkpoint counts them.
    eager = nn.Sequential(nn.Linear(6, 8), nn.SiLU(), nn.Dropout(0.4), nn.Linear(8, 6))
    model = copy.deepcopy(eager)
    compiled = dovetail.compile(model, backend=NAME)
    ran = []
    for step in range(4):
        results = []
        for block in (eager, compiled):
            torch.manual_seed(step)
            x = torch.randn(5, 6, requires_grad=True)
            y = checkpoint(block, x, use_reentrant=False)
            if step == 2 and block is compiled:
                background.answer_all()
            checkpoint(block, y, use_reentrant=False).square().sum().backward()
            results.append((x.grad, y.detach()))
        same(results[0], results[1], exact=False)
        ran.append(list(slow.ran))
        slow.ran.clear()
    again = ["forward", "backward"]
    assert ran == [[], [], ["forward", *again], ["forward", "forward", *again, *again]]
    compare_modules(eager, model, "model", exact=False)


def test_options_of_the_backend_keep_the_tiers() -> None:
    backend = choice.in_tiers(lookup_backend("inductor"), make_options(tiers="auto"))
    assert isinstance(backend.with_options({}).compile, choice.Tiers)
