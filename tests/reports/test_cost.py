"""``compiled.cost()``: torch's own counts, bytes that are really saved, and a peak that follows from both."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import dovetail
from dovetail.cli.gpt import GPT, GPTConfig
from dovetail.reports.cost import Cost, amount, cost, memory_of_call
from dovetail.reports.explanation import compiled_function
from dovetail.reports.measured import made_up


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten())
        self.head = torch.nn.Linear(8 * 36, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


@pytest.fixture(scope="module")
def found() -> Cost:
    compiled = dovetail.compile(Net(), backend="aten")
    compiled(torch.ones(2, 3, 8, 8)).sum().backward()
    result: Cost = compiled.cost()
    return result


def test_arithmetic_is_that_of_torchs_counter() -> None:
    model = GPT(GPTConfig(vocabulary=16, block=8, layers=1, heads=2, width=8))
    tokens = torch.zeros(2, 8, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    compiled = dovetail.compile(model, backend="aten")
    compiled(tokens).sum().backward()
    assert compiled.cost().flops == counter.get_total_flops()


def test_by_module(found: Cost) -> None:
    assert {"", "body", "body.0", "body.1", "head"} <= set(found.modules) and next(iter(found.modules)) == ""
    whole, body, head = (found.modules[name] for name in ("", "body", "head"))
    assert head.forward_flops == 2 * 2 * 8 * 36 * 5 and head.backward_flops == 2 * head.forward_flops
    assert whole.forward_flops == body.forward_flops + head.forward_flops
    assert body.forward_flops == found.modules["body.0"].forward_flops and found.modules["body.1"].bytes > 0


def test_memory(found: Cost) -> None:
    inputs = 4 * (2 * 3 * 64 + sum(item.numel() for item in Net().parameters()))
    assert found.saved > 0 and found.peak_memory >= inputs + found.saved
    # The input, and the relu's result, which the last layer and the relu's own backward read.
    assert found.saved == 4 * (2 * 3 * 64 + 2 * 8 * 36)


def test_more_layers_need_more_memory() -> None:
    def peak(layers: int) -> int:
        parts = [part for _ in range(layers) for part in (torch.nn.Linear(8, 8), torch.nn.Tanh())]
        compiled = dovetail.compile(torch.nn.Sequential(*parts), backend="aten")
        compiled(torch.ones(64, 8)).sum().backward()
        result: int = cost(compiled).peak_memory
        return result

    # Each layer saves its result; an intermediate value that nobody reads again is freed.
    grown = peak(6) - peak(3)
    assert 3 * 64 * 8 * 4 <= grown <= 3 * (64 * 8 * 4 + 2 * 72 * 4)


def test_without_a_gradient_and_after_a_break() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        x = x @ x
        print(end="")
        return x @ x

    compiled = dovetail.compile(step, backend="aten")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled(torch.ones(4, 4))
    assert compiled.cost().flops == 2 * (2 * 4**3) and compiled.cost().saved == 0
    assert compiled.cost().peak_memory == 2 * 4 * 16


def test_symbolic_sizes_are_counted_at_their_hints() -> None:
    compiled = dovetail.compile(torch.nn.Linear(4, 4), backend="aten", dynamic=True)
    compiled(torch.ones(8, 4))
    assert compiled.cost().modules[""].forward_flops == 2 * 8 * 16


def test_how_it_prints(found: Cost) -> None:
    text = repr(found)
    assert text.splitlines()[2].startswith("whole call") and "  0" in text and text.splitlines()[-1].endswith("KiB")
    assert "<table>" in found._repr_html_() and amount(2048, 1024) == "2.00 Ki"


def test_nothing_compiled_yet_and_a_module_with_a_cost_of_its_own() -> None:
    class Priced(Net):
        cost = 3

    compiled = dovetail.compile(Priced(), backend="aten")
    assert compiled.cost == 3
    with pytest.raises(dovetail.errors.StageError, match="nothing has been compiled yet"):
        cost(compiled)
    with pytest.raises(AttributeError, match="'Net' object has no attribute 'costs'"):
        _ = dovetail.compile(Net(), backend="aten").costs


def test_what_was_measured() -> None:
    model = Net()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    compiled = dovetail.compile(model, backend="aten")
    compiled(torch.ones(2, 3, 8, 8))
    state = torch.get_rng_state()
    found = compiled.cost(measure=True)
    (measured,) = found.measured
    assert measured.forward > 0 and measured.backward > 0 and not measured.problem and not measured.not_run
    # Inputs and saved values at least; not more than everything at once, and again for the copies.
    assert found.saved < measured.peak_memory < 3 * found.peak_memory
    body, head, whole = (found.modules[name].seconds for name in ("body", "head", ""))
    assert (
        body > 0 and head > 0 and whole == pytest.approx(body + head) == pytest.approx(sum(measured.seconds.values()))
    )
    assert "measured as compiled: forward" in repr(found) and "one by one" in repr(found)
    assert torch.equal(state, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(map(torch.equal, before, model.parameters()))


def test_measuring_leaves_the_users_profiler_alone() -> None:
    compiled = dovetail.compile(Net(), backend="aten")
    compiled(torch.ones(2, 3, 8, 8))
    with torch.profiler.profile() as profile:
        (measured,) = compiled.cost(measure=True).measured
        torch.ones(3).erfinv()
    assert measured.forward > 0 and measured.peak_memory is None
    assert "aten::erfinv" in [event.name for event in profile.events()]


def test_an_operator_that_refuses_made_up_values_is_named_and_the_rest_is_measured() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.cholesky(x @ x.mT + torch.eye(4)).sin()

    def refused(x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.cholesky(x).sin()

    for function, argument in ((step, torch.zeros(4, 4)), (refused, torch.eye(4))):
        compiled = dovetail.compile(function, backend="aten")
        compiled(argument)
        (measured,) = compiled.cost(measure=True).measured
        assert bool(measured.problem) == (function is refused) and measured.seconds["sin"] > 0
        assert "linalg_cholesky_ex" in measured.seconds or measured.not_run
    assert "_linalg_check_errors" in measured.not_run[0] and "cholesky" in measured.problem


def test_inputs_of_every_layout_are_made_up_alike() -> None:
    for value in (
        torch.ones(3, 1).expand(3, 4),
        torch.ones(2, 3).t(),
        torch.ones(0, 3),
        torch.ones(2, dtype=torch.int8),
        torch.ones((), dtype=torch.complex64),
        torch.ones(4, dtype=torch.bfloat16)[::2],
    ):
        made = made_up(value)
        facts = [(item.shape, item.stride(), item.dtype) for item in (made, value)]
        assert facts[0] == facts[1]
        assert not made.is_floating_point() or bool((made > 0).all())
    assert made_up((torch.ones(1), 3, None))[1:] == (3, None)


def test_memory_over_a_step() -> None:
    compiled = dovetail.compile(
        torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Tanh()), backend="aten"
    )
    compiled(torch.ones(64, 8)).sum().backward()
    memory = memory_of_call(compiled_function(compiled).entries[0].compiled)
    assert memory.inputs == 4 * (64 * 8 + 8 * 8 + 8) and memory.peak == compiled.cost().peak_memory
    assert memory.saved[0] == 0 and memory.saved[memory.forward - 1] == 2 * 4 * 64 * 8 and memory.saved[-1] == 0
    assert all(alive >= memory.inputs + saved for alive, saved in zip(memory.alive, memory.saved, strict=True))
