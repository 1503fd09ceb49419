"""Nothing is held that the program has let go: models, closures, optimizers, inputs and results die with their last reference."""

from __future__ import annotations

import gc
import logging
import os
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import dovetail

Made = list["weakref.ref[Any]"]
MEGABYTE = 1 << 20


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    # Log records keep the tracebacks of errors, and pytest keeps the records.
    logging.disable(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.disable(logging.NOTSET)


def resident() -> int:
    """Bytes of this process in memory."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def compiled(function: Any, **options: Any) -> Any:
    return dovetail.compile(function, backend="aten", **options)


def x(*shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (4, 8)))


class Net(torch.nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(width, width)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.layer(value).tanh()


class Breaking(Net):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        value = self.layer(value)
        print(end="")
        return self.layer(value).tanh()


def refs(*values: Any) -> Made:
    return [weakref.ref(value) for value in values]


# --- what is made and let go ------------------------------------------------------------------------------------------


def forward_only() -> Made:
    net, value = Net(), x()
    with torch.no_grad():
        compiled(net)(value)
    return refs(net, net.layer.weight, value)


def forward_and_backward() -> Made:
    net, value = Net(), x()
    call = compiled(net)
    result = call(value)
    result.sum().backward()
    return refs(net, net.layer.weight, net.layer.weight.grad, value, call, call.compiled_call)


def backward_that_never_comes() -> Made:
    net, value = Net(), x()
    result = compiled(net)(value)
    return refs(net, value, result)


def closure() -> Made:
    net, scale = Net(), x(8)
    function = compiled(lambda value: net(value) * scale)
    function(x()).sum().backward()
    return refs(net, scale, function)


def module_as_an_argument() -> Made:
    net = Net()
    compiled(lambda module, value: module(value))(net, x())
    return refs(net)


def whole_step() -> Made:
    net = Net()
    optimizer = torch.optim.Adam(net.parameters())

    def step(value: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = net(value).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    call = compiled(step)
    for _ in range(3):
        loss = call(x())
    return refs(net, optimizer, optimizer.state[net.layer.weight]["exp_avg"], loss, call)


def breaks() -> Made:
    net, value = Breaking(), x()
    call = compiled(net)
    for _ in range(2):
        call(value).sum().backward()
    return refs(net, net.layer.weight, value, call)


def recompiles() -> Made:
    net = Net()
    call = compiled(net)
    values = [x(rows, 8) for rows in (3, 4, 5)]
    for value in values:
        call(value).sum().backward()
    return refs(net, *values)


def over_the_limit() -> Made:
    net = Net()
    call = compiled(net, recompile_limit=1, dynamic=False)
    values = [x(rows, 8) for rows in (3, 4, 5)]
    for value in values:
        call(value)
    return refs(net, *values)


def errors() -> Made:
    net, value = Net(), x(4, 9)
    call = compiled(net)
    for _ in range(2):
        with pytest.raises(RuntimeError):
            call(value)
    return refs(net, value, call)


def errors_of_the_program() -> Made:
    net, value = Net(), x()

    def check(item: torch.Tensor, flag: bool) -> torch.Tensor:
        if flag:
            raise ValueError("no")
        return net(item)

    call = compiled(check)
    call(value, False)
    with pytest.raises(ValueError, match="no"):
        call(value, True)
    return refs(net, value, call)


def refusals() -> Made:
    net, value = Breaking(), x()
    call = compiled(net, fullgraph=True)
    with pytest.raises(dovetail.errors.GraphBreakError):
        call(value)
    return refs(net, value, call)


def eager_fallback() -> Made:
    net = Net()

    def items(value: torch.Tensor) -> Any:
        yield net(value)

    value = x()
    call = compiled(items)
    list(call(value))
    return refs(net, value, call)


def second_order() -> Made:
    net, value = Net(), x().requires_grad_()
    call = compiled(net)
    (gradient,) = torch.autograd.grad(call(value).sum(), value, create_graph=True)
    gradient.square().sum().backward()
    return refs(net, net.layer.weight, value, gradient, call)


def by_the_program() -> Made:
    net, value = Net(), x()
    call = dovetail.compile(net, backend="eager")
    call(value).sum().backward()
    return refs(net, value, call)


def joint_graph() -> Made:
    net, value = Net(), x()
    joint = dovetail.capture(net, (value,))
    run = joint.compile("aten")
    for _ in range(2):
        run(value).sum().backward()
    return refs(net, net.layer.weight, value, joint, run)


def backward_block() -> Made:
    net, value = Net(), x()
    with dovetail.compiled_autograd(backend="aten"):
        net(value).sum().backward()
    return refs(net, net.layer.weight, value)


KINDS: list[Callable[[], Made]] = [
    forward_only,
    forward_and_backward,
    backward_that_never_comes,
    closure,
    module_as_an_argument,
    whole_step,
    breaks,
    recompiles,
    over_the_limit,
    errors,
    errors_of_the_program,
    refusals,
    eager_fallback,
    second_order,
    by_the_program,
    joint_graph,
    backward_block,
]


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_what_is_let_go_dies(make: Callable[[], Made]) -> None:
    made = make()
    gc.collect()
    assert [position for position, ref in enumerate(made) if ref() is not None] == []


def test_the_first_input_dies_while_the_function_lives() -> None:
    for function in (lambda value: value * 2, Net(), Breaking()):
        call = compiled(function)
        for size in (4, 5, 6):
            value = x(size, 8)
            made = refs(value, call(value))
            del value
            gc.collect()
            assert [ref() for ref in made] == [None, None]


def test_deleted_models_leave_nothing() -> None:
    def once() -> None:
        net = torch.nn.Linear(1024, 1024)  # 4 MiB, and as much for its gradient
        compiled(net)(torch.ones(2, 1024)).sum().backward()

    once()
    gc.collect()
    before = resident()
    for _ in range(50):
        once()
        gc.collect()
    assert resident() - before < 24 * MEGABYTE


def _training(call: Any) -> Callable[[torch.Tensor], Any]:
    def step(value: torch.Tensor) -> None:
        call(value).sum().backward()

    return step


def _failing(call: Any) -> Callable[[torch.Tensor], Any]:
    def step(value: torch.Tensor) -> None:
        with pytest.raises(ValueError, match="no"):
            call(value)

    return step


def _raises(value: torch.Tensor) -> torch.Tensor:
    if value.dim() == 2:
        raise ValueError("no")
    return value


def _second_order(call: Any) -> Callable[[torch.Tensor], Any]:
    def step(value: torch.Tensor) -> None:
        value.requires_grad_()
        (gradient,) = torch.autograd.grad(call(value).sum(), value, create_graph=True)
        gradient.square().sum().backward()

    return step


def _whole_step() -> Callable[[torch.Tensor], Any]:
    net = Net(128)
    optimizer = torch.optim.SGD(net.parameters(), 0.01, momentum=0.9)

    def step(value: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = net(value).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return compiled(step)  # type: ignore[no-any-return]


LOOPS: dict[str, Callable[[], Callable[[torch.Tensor], Any]]] = {
    "module": lambda: _training(compiled(Net(128))),
    "function": lambda: compiled(lambda value: value.sin().cos()),
    "whole step": _whole_step,
    "breaks": lambda: _training(compiled(Breaking(128))),
    "errors": lambda: _failing(compiled(_raises)),
    "over the limit": lambda: compiled(lambda value: value * 2, recompile_limit=2, dynamic=False),
    "second order": lambda: _second_order(compiled(Net(128))),
}


@pytest.mark.parametrize("kind", LOOPS)
def test_memory_stays_over_many_calls(kind: str) -> None:
    """2,000 calls over all kinds with inputs of 64 KiB: a call that kept one of them would leave about 20 MiB for its kind."""
    step = LOOPS[kind]()
    for number in range(20):
        step(x(128 + number % 4, 128))
    gc.collect()
    before = resident()
    for number in range(2000 // len(LOOPS)):
        step(x(128 + number % 4, 128))
    gc.collect()
    assert resident() - before < 8 * MEGABYTE
