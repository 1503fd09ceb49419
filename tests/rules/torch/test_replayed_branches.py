"""Branches of torch's own Python on the values of small inputs, where a break is an error."""

from __future__ import annotations

import builtins
import copy
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail
from tests.differential import check_calls, entries_of, same


def in_torch(function: types.FunctionType) -> types.FunctionType:
    """The function as if it were one of torch's layers."""
    scope = {"__name__": "torch.nn.modules.made_up", "__builtins__": builtins, "torch": torch}
    return types.FunctionType(function.__code__, scope, function.__name__, None, function.__closure__)


@in_torch
def causal(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    if bool((mask == torch.ones_like(mask).tril()).all()):
        return x.tril() * 2
    return x * mask


def test_each_answer_has_its_own_entry() -> None:
    compiled = dovetail.compile(causal, backend="aten", fullgraph=True)
    triangle = torch.ones(3, 3).tril()
    for mask in (triangle, triangle.clone(), torch.ones(3, 3), triangle, torch.full((3, 3), 0.5)):
        x = torch.randn(3, 3, requires_grad=True)
        expected, found = causal(x, mask), compiled(x, mask)
        assert torch.equal(expected, found)
        assert torch.equal(*(torch.autograd.grad(value.sum(), x)[0] for value in (expected, found)))
    assert len(compiled.entries) == 2


def test_the_last_bit_counts() -> None:
    @in_torch
    def sign(x, flag):
        return x + 1 if torch.signbit(flag).any() else x - 1

    compiled = dovetail.compile(sign, backend="aten", fullgraph=True)
    x = torch.ones(2)
    for flag in (torch.tensor(0.0), torch.tensor(-0.0), torch.tensor(float("nan"))):
        assert torch.equal(compiled(x, flag), sign(x, flag))
        assert torch.equal(compiled(x, flag), sign(x, flag))


def test_a_value_written_before_the_branch() -> None:
    @in_torch
    def write(x, flag):
        flag.add_(1)
        return x * 2 if flag.sum() > 2 else x * 3

    compiled = dovetail.compile(write, backend="aten", fullgraph=True)
    for start in (0.0, 1.0, 5.0):
        one, other = torch.full((2,), start), torch.full((2,), start)
        assert torch.equal(write(torch.ones(2), one), compiled(torch.ones(2), other))
        assert torch.equal(one, other)


@pytest.mark.parametrize("what", ["large", "gradient", "random", "the user's"])
def test_other_branches_stay_refused(what: str) -> None:
    def branch(x, flag):
        if what == "random":
            flag = flag + torch.rand(2)
        return x * 2 if flag.sum() > 0 else x

    flag = torch.ones(1000) if what == "large" else torch.ones(2, requires_grad=what == "gradient")
    compiled = dovetail.compile(branch if what == "the user's" else in_torch(branch), backend="aten", fullgraph=True)
    with pytest.raises(dovetail.errors.GraphBreakError, match="branch depends on the values"):
        compiled(torch.ones(2), flag)


@pytest.mark.parametrize("is_causal", [True, False])
def test_a_layer_that_asks_whether_its_mask_is_causal(is_causal: bool) -> None:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    compiled = dovetail.compile(encoder, backend="aten", fullgraph=True)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(3) if is_causal else torch.zeros(3, 3)
    x = torch.randn(2, 3, 4, requires_grad=True)
    for _ in range(2):
        one, other = encoder(x, mask=mask), compiled(x, mask=mask)
        assert torch.equal(one, other)
        assert torch.equal(*(torch.autograd.grad(value.sum(), x)[0] for value in (one, other)))


class Normalised(torch.nn.Module):
    """A layer that takes its scale from the first batch that it sees, as in models of flows and in codebooks."""

    def __init__(self, asks: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.register_buffer("is_initialised", torch.tensor(False))
        self.scale = torch.nn.Parameter(torch.ones(3))
        self.asks = asks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.asks(self.is_initialised):
            with torch.no_grad():
                self.scale.copy_(1 / x.std(0))
                self.is_initialised.fill_(True)
        return x * self.scale


#: Ways in which a program asks for a flag.
ASKED = {
    "itself": lambda flag: flag,
    "its number": lambda flag: flag.item(),
    "bool": bool,
    "a formula": lambda flag: torch.logical_not(flag) == 0,
    "all": lambda flag: flag.reshape(1).all(),
}


@pytest.mark.parametrize("asks", ASKED.values(), ids=ASKED)
@pytest.mark.parametrize("backend", ["aten", "eager"])
@pytest.mark.usefixtures("quiet")
def test_a_flag_of_the_users_own(asks: Callable[[torch.Tensor], Any], backend: str) -> None:
    torch.manual_seed(0)
    ours = torch.nn.Sequential(*[Normalised(asks) for _ in range(3)])
    theirs = copy.deepcopy(ours)
    compiled = dovetail.compile(ours, backend=backend, fullgraph=backend == "aten")
    for number in range(5):
        if number == 3:
            ours[1].is_initialised.fill_(False)
            theirs[1].is_initialised.fill_(False)
        x = torch.randn(5, 3)
        same(compiled(x), theirs(x), exact=True)
        compiled(x).sum().backward()
        theirs(x).sum().backward()
        same(dict(ours.named_parameters()), dict(theirs.named_parameters()), exact=True)
        same(dict(ours.named_buffers()), dict(theirs.named_buffers()))
    assert backend == "eager" or entries_of(compiled) == 3


class Warming(torch.nn.Module):
    """Counts its steps in a buffer, and does something else in the first ones."""

    def __init__(self, every: int) -> None:
        super().__init__()
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("is_done", torch.tensor(0.0))
        self.every = every

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        if self.steps <= 3:
            x = x * 2
        if self.steps % self.every == 0:
            x = x + self.steps
        if not self.is_done > 0:
            self.is_done += 1
        return x.sin()


@pytest.mark.parametrize(
    ("every", "entries", "fullgraph"), [(100, 3, True), (2, 5, True), (3, 5, True), (100, 3, False)]
)
def test_a_counter_that_a_module_keeps(every: int, entries: int, fullgraph: bool) -> None:
    ours, theirs = Warming(every), Warming(every)
    compiled = dovetail.compile(ours, backend="aten", fullgraph=fullgraph)
    for _ in range(9):
        x = torch.ones(3)
        same(compiled(x), theirs(x), exact=True)
        same(dict(ours.named_buffers()), dict(theirs.named_buffers()))
    assert entries_of(compiled) <= entries
    assert not dovetail.events_of(compiled).count("graph break")


def test_a_counter_of_a_module_that_is_an_argument() -> None:
    ours, theirs = Warming(100), Warming(100)
    compiled = dovetail.compile(lambda model, x: model(x).sum(), backend="aten")
    for _ in range(6):
        x = torch.ones(3)
        same(compiled(ours, x), theirs(x).sum(), exact=True)
        same(dict(ours.named_buffers()), dict(theirs.named_buffers()))
    assert entries_of(compiled) <= 3
    assert not dovetail.events_of(compiled).count("graph break")


@pytest.mark.usefixtures("quiet")
def test_a_number_that_is_given_in_each_call_breaks_the_graph() -> None:
    compiled = dovetail.compile(lambda x, bound: x * 2 if bound > 0 else x, backend="aten")
    for number in (1.0, -1.0, 2.0, -3.0):
        same(compiled(torch.ones(2), torch.tensor(number)), torch.ones(2) * (2 if number > 0 else 1))
    assert entries_of(compiled) == 1


def test_flags_that_change_from_call_to_call_do_not_compile_for_ever() -> None:
    def function(x: torch.Tensor, *flags: torch.Tensor) -> torch.Tensor:
        for flag in flags:
            x = x * 2 if flag else x + 1
        return x

    compiled, x = dovetail.compile(function, backend="aten"), torch.ones(2)
    answers = torch.rand(20, 5, generator=torch.Generator().manual_seed(0)) < 0.5
    with pytest.warns(dovetail.errors.GraphBreakWarning, match="a branch depends on the values"):
        for row in answers:
            flags = [flag.clone() for flag in row]
            same(compiled(x, *flags), function(x, *flags))
    assert entries_of(compiled) <= 5


def test_a_flag_that_is_written_to_between_two_questions() -> None:
    def function(x: torch.Tensor, flag: torch.Tensor) -> torch.Tensor:
        y = x + 1 if flag else x - 1
        flag.logical_not_()
        return y * 3 if flag else y * 5

    check_calls(function, [(torch.ones(2), torch.tensor(bool(number % 2))) for number in range(4)], entries=2)


def test_a_capture_of_a_flag_is_refused() -> None:
    with pytest.raises(dovetail.errors.DovetailError, match="values of a tensor"):
        dovetail.capture(lambda x, flag: x + 1 if flag else x - 1, (torch.ones(2), torch.tensor(True)))


@pytest.mark.usefixtures("quiet")
def test_a_flag_that_a_hook_asks_for_is_read_when_the_backward_runs() -> None:
    def gradients(compiled: bool) -> list[float]:
        flag, found = torch.tensor(True), []

        def function(x: torch.Tensor) -> torch.Tensor:
            y = x.sin() + flag
            y.register_hook(lambda gradient: gradient * 2 if flag else gradient)
            return y

        called = dovetail.compile(function, backend="aten") if compiled else function
        for number in range(4):
            x = torch.ones(1, requires_grad=True)
            result = called(x)
            if number % 2:
                flag.logical_not_()
            result.sum().backward()
            found.append(float(x.grad))
        return found

    assert gradients(True) == gradients(False)
