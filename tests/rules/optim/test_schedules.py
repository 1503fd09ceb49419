"""Schedules of rates inside of a compiled step: rates, weights and states are eager's, in few captures."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR

import dovetail
from tests.differential import captures, same
from tests.passes.test_whole_step import batch, network
from tests.passes.test_whole_step_parts import Parts, train

mse_loss = torch.nn.functional.mse_loss
Optimizer = torch.optim.Optimizer

#: How each is made, and how many captures it may take: the first step makes the optimizer's state, and a rate of zero is a
#: number of its own.
SCHEDULES: dict[str, tuple[Callable[[Optimizer], Any], int]] = {
    "lambda": (lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.95**epoch), 3),
    "multiplicative": (lambda o: lr_scheduler.MultiplicativeLR(o, lambda epoch: 0.95), 3),
    "step": (lambda o: lr_scheduler.StepLR(o, 3), 2),
    "milestones": (lambda o: lr_scheduler.MultiStepLR(o, [4, 8, 12]), 2),
    "constant": (lambda o: lr_scheduler.ConstantLR(o, total_iters=4), 2),
    "linear": (lambda o: lr_scheduler.LinearLR(o, total_iters=5), 2),
    "exponential": (lambda o: lr_scheduler.ExponentialLR(o, 0.9), 2),
    "sequence": (
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o, total_iters=5), lr_scheduler.CosineAnnealingLR(o, 30)], [5]
        ),
        2,
    ),
    "cosine": (lambda o: lr_scheduler.CosineAnnealingLR(o, 8), 3),
    "chained": (
        lambda o: lr_scheduler.ChainedScheduler(
            [lr_scheduler.ConstantLR(o, total_iters=4), lr_scheduler.ExponentialLR(o, 0.9)], o
        ),
        2,
    ),
    "cyclic": (lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=4), 2),
    "restarts": (lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 6), 2),
    "one cycle": (lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=40), 2),
    "polynomial": (lambda o: lr_scheduler.PolynomialLR(o, total_iters=12, power=2.0), 3),
    "swa": (lambda o: SWALR(o, 0.05), 2),
    "plateau": (lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=2), 2),
}


def step_with(
    model: torch.nn.Module,
    optimizer: Optimizer,
    schedule: Any,
    rates: list[float] | None = None,
    zero_behind: bool = False,
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """A step with the schedule inside."""

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if not zero_behind:
            optimizer.zero_grad()
        loss = mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        if isinstance(schedule, lr_scheduler.ReduceLROnPlateau):
            schedule.step(loss)
        else:
            schedule.step()
        if zero_behind:
            optimizer.zero_grad()
        return loss.detach()

    return step


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.sampled(8)
def test_twenty_steps_in_few_captures(name: str) -> None:
    schedule_of, most = SCHEDULES[name]

    def make(model: torch.nn.Module) -> Parts:
        first, second = list(model.parameters())[:2], list(model.parameters())[2:]
        groups = [{"params": first}, {"params": second, "lr": 0.05, "weight_decay": 0.1}]
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        schedule = schedule_of(optimizer)
        return step_with(model, optimizer, schedule, zero_behind=name in ("cyclic", "plateau")), [optimizer, schedule]

    compiled = train(make, steps=20)
    # A capture may begin anew, with symbols for the rates that it has found to change.
    assert len(compiled.entries) <= captures(compiled) <= most


def test_the_loss_as_a_number() -> None:
    def make(model: torch.nn.Module) -> Parts:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        schedule = lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, threshold=0.5)

        def step(x: torch.Tensor, y: torch.Tensor) -> float:
            optimizer.zero_grad()
            loss = mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            number = loss.item()
            schedule.step(number)
            return number

        return step, [optimizer, schedule]  # type: ignore[return-value]

    assert len(train(make).entries) <= 3


READS: dict[str, Callable[[Optimizer, Any], Any]] = {
    "the rate": lambda optimizer, schedule: optimizer.param_groups[0]["lr"],
    "the last rates": lambda optimizer, schedule: schedule.get_last_lr(),
    "the count": lambda optimizer, schedule: schedule.last_epoch,
    "all of the group": lambda optimizer, schedule: sum(
        value for value in optimizer.param_groups[0].values() if isinstance(value, float)
    ),
    "all of the schedule, by native code": lambda optimizer, schedule: operator.attrgetter("last_epoch")(schedule),
    "all of the group, by native code": lambda optimizer, schedule: operator.itemgetter("lr")(
        optimizer.param_groups[0]
    ),
    "the optimizer of the schedule": lambda optimizer, schedule: schedule.optimizer.param_groups[0]["lr"] * 2,
}


@pytest.mark.parametrize("name", READS)
@pytest.mark.sampled(9)
def test_what_a_schedule_has_written_is_read(name: str) -> None:
    def make(model: torch.nn.Module) -> Parts:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        schedule = lr_scheduler.StepLR(optimizer, 2)
        inner = step_with(model, optimizer, schedule)

        def step(x: torch.Tensor, y: torch.Tensor) -> Any:
            return inner(x, y), READS[name](optimizer, schedule)

        return step, [optimizer, schedule]

    train(make, fullgraph=not name.startswith("all of the"), steps=7)


def test_the_program_writes_a_rate_behind_and_before() -> None:
    def make(model: torch.nn.Module) -> Parts:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = lr_scheduler.ExponentialLR(optimizer, 0.9)
        inner = step_with(model, optimizer, schedule)

        def step(x: torch.Tensor, y: torch.Tensor) -> Any:
            optimizer.param_groups[0]["momentum"] = 0.5
            loss = inner(x, y)
            optimizer.param_groups[0]["lr"] = 0.05
            return loss

        return step, [optimizer, schedule]

    train(make, steps=5)


def test_two_schedules_and_one_twice() -> None:
    def make(model: torch.nn.Module) -> Parts:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        first, second = lr_scheduler.StepLR(optimizer, 3), lr_scheduler.ExponentialLR(optimizer, 0.9)
        inner = step_with(model, optimizer, first)

        def step(x: torch.Tensor, y: torch.Tensor) -> Any:
            loss = inner(x, y)
            second.step()
            first.step()
            return loss

        return step, [optimizer, first, second]

    assert len(train(make).entries) <= 2


@pytest.mark.parametrize("name", ["step", "sequence", "cyclic", "plateau", "swa"])
@pytest.mark.sampled(6)
def test_a_rate_in_a_tensor(name: str) -> None:
    """Schedules fill it; each phase of the schedule was an entry of its own."""

    def make(model: torch.nn.Module) -> Parts:
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1), foreach=False)
        schedule = SCHEDULES[name][0](optimizer)
        return step_with(model, optimizer, schedule, zero_behind=True), [optimizer, schedule]

    assert len(train(make, steps=8).entries) == 2


READS_OF_TENSORS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "the rate": lambda rate, view: rate * 2,
    "a view of it": lambda rate, view: view * 2,
    "a view that is made then": lambda rate, view: rate.view(1),
    "nothing": lambda rate, view: (rate, view),
    "a write": lambda rate, view: rate.add_(1.0),
}


@pytest.mark.parametrize("name", READS_OF_TENSORS)
@pytest.mark.sampled(6)
def test_a_rate_in_a_tensor_is_read_after_the_schedule(name: str) -> None:
    def make(model: torch.nn.Module) -> Parts:
        rate = torch.tensor(0.1)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        schedule = lr_scheduler.ExponentialLR(optimizer, 0.5)

        def step(x: torch.Tensor, y: torch.Tensor) -> Any:
            view = rate.view(1).expand(3)
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()
            optimizer.step()
            schedule.step()
            found = READS_OF_TENSORS[name](rate, view)
            return [
                item.clone() if name == "a write" else item for item in (found if type(found) is tuple else (found,))
            ]

        return step, [optimizer, schedule]

    train(make, steps=4)


def test_an_error_of_a_schedule_is_eagers_and_the_next_step_works() -> None:
    """One step more than the schedule was made for: the weights are updated, then it raises."""
    outcomes = []
    for compiled in (False, True):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        schedules = [lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=4)]

        def step(
            x: torch.Tensor,
            y: torch.Tensor,
            model: torch.nn.Module = model,
            optimizer: Optimizer = optimizer,
            schedules: list[Any] = schedules,
        ) -> torch.Tensor:
            optimizer.zero_grad()
            loss = mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            schedules[0].step()
            return loss.detach()

        take = dovetail.compile(step, backend="aten", fullgraph=True) if compiled else step
        found: list[Any] = []
        for index in range(8):
            try:
                found.append(take(*batch(index)))
            except ValueError as error:
                found.append(str(error))
                schedules[0] = lr_scheduler.ExponentialLR(optimizer, 0.9)
            found.append([(p.detach().clone(), p.grad) for p in model.parameters()])
            found.append((optimizer.state_dict()["param_groups"], schedules[0].state_dict()["last_epoch"]))
        outcomes.append(found)
    assert any(isinstance(item, str) for item in outcomes[0])
    same(outcomes[0], outcomes[1])


def test_states_are_loaded_between_steps() -> None:
    outcomes = []
    for compiled in (False, True):
        model = network()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        schedule = lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3, 2)
        step = step_with(model, optimizer, schedule)
        take = dovetail.compile(step, backend="aten", fullgraph=True) if compiled else step
        rates = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for index in range(10):
                take(*batch(index))
                if index == 2:
                    saved = schedule.state_dict(), optimizer.param_groups[0]["lr"]
                if index == 6:
                    schedule.load_state_dict(saved[0])
                    optimizer.param_groups[0]["lr"] = saved[1]
                rates.append(optimizer.param_groups[0]["lr"])
        outcomes.append([rates, [p.detach() for p in model.parameters()], schedule.state_dict()])
    same(outcomes[0], outcomes[1])


@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("chained", [False, True])
@pytest.mark.sampled(4)
def test_what_is_behind_an_error_of_a_schedule_is_not_done(chained: bool, calls: int) -> None:
    """The gradients stay, and so does all else that the program would have changed behind the call that raises."""
    outcomes = []
    for compiled in (False, True):
        model, counts, found = network(), [0, 0], list[Any]()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        one: Any = lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=6)
        schedule = lr_scheduler.ChainedScheduler([one]) if chained else one

        def step(
            x: torch.Tensor,
            y: torch.Tensor,
            model: torch.nn.Module = model,
            optimizer: Optimizer = optimizer,
            schedule: Any = schedule,
            counts: list[int] = counts,
        ) -> torch.Tensor:
            loss = mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            counts[0] += 1
            for _ in range(calls):
                schedule.step()
            counts[1] += 1
            optimizer.zero_grad()
            return loss.detach()

        take = dovetail.compile(step, backend="aten", fullgraph=True) if compiled else step
        for index in range(9):
            try:
                found.append(take(*batch(index)))
            except ValueError as error:
                found.append(str(error))
            found.append([(p.detach().clone(), None if p.grad is None else p.grad.clone()) for p in model.parameters()])
            found.append((list(counts), schedule.state_dict()["_last_lr"], one.last_epoch))
        outcomes.append(found)
    assert sum(isinstance(item, str) for item in outcomes[0]) >= 3
    same(outcomes[0], outcomes[1])
