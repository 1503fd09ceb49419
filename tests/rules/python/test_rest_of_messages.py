"""Messages with numbers of the step that gives them: one graph break, and nothing is compiled anew for what they say."""

from __future__ import annotations

import copy
import io
import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dovetail
from tests.differential import same

logger = logging.getLogger("steps")
Step = Callable[[nn.Module, Any, Tensor, int], Any]


def _printed(model: nn.Module, optimizer: Any, x: Tensor, number: int) -> Any:
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    print(f"step {number:>3}: {loss.item():.4f} of {len(x)} rows, norm {norm:.3f}", number, sep=" | ")
    optimizer.step()
    return loss.detach()


def _printed_at_the_end(model: nn.Module, optimizer: Any, x: Tensor, number: int) -> Any:
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    value = loss.item()
    print("%d: %.3f" % (number, value), "{}".format(round(value, 2)))  # noqa: UP031, UP032
    return number


def _logged(model: nn.Module, optimizer: Any, x: Tensor, number: int) -> Any:
    loss = model(x).square().mean()
    logger.info(f"{number} {loss.item():.3f}")
    optimizer.zero_grad()
    loss.backward()
    logger.warning("norm %s at %d", [item.grad.norm().item() for item in model.parameters()][0], number)
    optimizer.step()
    return loss.detach()


def _text_returned(model: nn.Module, optimizer: Any, x: Tensor, number: int) -> Any:
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return f"{loss.item():.3f}"


def _only_a_number(model: nn.Module, optimizer: Any, x: Tensor, number: int) -> Any:
    y = model(x) * 2
    print(f"step {number}")
    return (y + number).detach()


def _run(step: Step, compiler: Callable[[Step], Step], optimizer: type) -> tuple[list[Any], list[int]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    run, found, counts = compiler(step), [], []
    made = optimizer(model.parameters(), lr=0.1)
    for number in range(7):
        torch.manual_seed(number)
        found.append(run(model, made, torch.randn(5, 3), number))
        counts.append(dovetail.events_of(run).count("capture") if run is not step else 0)
    return [*found, dict(model.state_dict())], counts


def _compile(step: Step) -> Step:
    return dovetail.compile(step, backend="aten")  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore::dovetail.errors.GraphBreakWarning")
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("step", [_printed, _printed_at_the_end, _logged, _text_returned, _only_a_number])
@pytest.mark.sampled(12)
def test_a_step_that_says_its_number_is_compiled_a_few_times(
    step: Step, optimizer: type, capsys: Any, caplog: Any
) -> None:
    results, texts = [], []
    for compiler in (lambda step: step, _compile):
        caplog.clear()
        with caplog.at_level(logging.INFO, "steps"):
            found, counts = _run(step, compiler, optimizer)
        results.append(found)
        texts.append(
            (
                capsys.readouterr().out,
                [(item.message, item.funcName) for item in caplog.records if item.name == "steps"],
            )
        )
    same(results[0][-1], results[1][-1])
    assert str(results[0][:-1]) == str(results[1][:-1])
    assert texts[0] == texts[1]
    assert counts[3] == counts[-1] and counts[-1] <= 18, counts


def _describe(y: Tensor) -> str:
    return f"{y.sum():.2f}"


class _Told:
    """Counts how often it is turned into text."""

    count = 0

    def __format__(self, specification: str) -> str:
        self.count += 1
        return f"told {self.count} times"


def _failing(x: Tensor, told: _Told) -> Tensor:
    y = x * 2
    print(f"{y.sum().item():.2f} {told} {y.sum().item():d}")
    return y


def _with_a_call(x: Tensor, told: _Told) -> Tensor:
    y = x.exp()
    print(f"{y.sum().item():.2f} {told}", _describe(y * 2), file=None, end="!")
    return y + told.count


def _another_print(x: Tensor, told: _Told) -> Tensor:
    def print(text: str) -> int:
        told.count += len(text)
        return len(text)

    y = x.exp()
    return y * print(f"{y.sum().item():.1f}") + told.count


def _result_of_print(x: Tensor, told: _Told) -> Any:
    y = x.exp()
    return y, print(f"{y.sum().item():.1f}", told), [print(f"{number} {y.sum().item():.1f}") for number in range(2)]


@pytest.mark.filterwarnings("ignore::dovetail.errors.GraphBreakWarning")
@pytest.mark.parametrize("function", [_failing, _with_a_call, _another_print, _result_of_print])
def test_what_a_message_does_besides_is_done_once(function: Any, capsys: Any) -> None:
    outcomes = []
    for run in (function, dovetail.compile(function, backend="aten")):
        told, found = _Told(), []
        for number in (1.0, 2.0, 3.0):
            try:
                found.append(run(torch.full((2,), number), told))
            except ValueError as error:
                found.append((str(error), error.__traceback__ is not None))
        text = capsys.readouterr().out
        outcomes.append((found, told.count, copy.copy(text).replace(hex(id(told)), "")))
    same(outcomes[0], outcomes[1])


def test_a_message_that_somebody_replaces_is_the_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def say(x: Tensor, number: int) -> Tensor:
        print(f"{number}: {x.sum().item()}")
        return x + 1

    compiled, stream = dovetail.compile(say, backend="aten"), io.StringIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dovetail.errors.GraphBreakWarning)
        compiled(torch.ones(2), 0)
        compiled(torch.ones(2), 1)
        monkeypatch.setitem(say.__globals__, "print", stream.write)
        compiled(torch.ones(2), 2)
        compiled(torch.ones(3), 3)
    assert stream.getvalue() == "2: 2.03: 3.0"
