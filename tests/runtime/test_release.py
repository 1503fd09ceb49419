"""Nothing that a compiled function has made outlives it, and nothing that the program has let go is held."""

from __future__ import annotations

import gc
import logging
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dovetail
from dovetail.aot import passes
from dovetail.errors import HigherOrderGradientError
from dovetail.reports.explanation import compiled_function

Held = dict[str, Any]
MEGABYTE = 1 << 20
#: What a program returns: the compiled function, and the objects of the user that it was given.
Program = Callable[[], tuple[Any, Held]]
PROGRAMS: dict[str, Program] = {}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    # Log records keep the tracebacks of errors, and pytest keeps the records.
    logging.disable(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.disable(logging.NOTSET)


def program(function: Program) -> Program:
    PROGRAMS[function.__name__] = function
    return function


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh())


def batch(size: int = 4) -> Tensor:
    return torch.randn(size, 8)


def on_aten(function: Any, **options: Any) -> Any:
    return dovetail.compile(function, backend="aten", **options)


def after_a_backward(function: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> tuple[Any, Held]:
    compiled = dovetail.compile(function, backend="aten")
    compiled(x).backward()
    return compiled, {"model": model, "x": x, "function": function}


def data(*shape: int) -> Tensor:
    return torch.randn(*(shape or (4, 8)))


class Net(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, value: Tensor) -> Tensor:
        return self.layer(value).tanh()


class Breaking(Net):
    def forward(self, value: Tensor) -> Tensor:
        value = self.layer(value)
        print(end="")
        return self.layer(value).tanh()


@program
def a_module() -> tuple[Any, Held]:
    model, x = linear(), batch()
    compiled = dovetail.compile(model, backend="aten")
    compiled(x).sum().backward()
    return compiled, {"model": model, "x": x, "weight": next(model.parameters())}


@program
def recompiles_and_symbolic_sizes() -> tuple[Any, Held]:
    model = linear()
    compiled = dovetail.compile(model, backend="aten")
    for size in (4, 5, 6):
        x = batch(size)
        compiled(x).sum().backward()
    return compiled, {"model": model, "x": x}


@program
def second_order() -> tuple[Any, Held]:
    model, x = linear(), batch().requires_grad_()
    compiled = dovetail.compile(model, backend="aten")
    (slope,) = torch.autograd.grad(compiled(x).sum(), x, create_graph=True)
    slope.square().sum().backward()
    return compiled, {"model": model, "x": x, "slope": slope}


@program
def a_refused_second_order() -> tuple[Any, Held]:
    model, x = linear(), batch().requires_grad_()

    def function(x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved * 2, lambda saved: saved / 2):
            return model(x).sin().sum()

    compiled = dovetail.compile(function, backend="aten", fullgraph=True)
    (slope,) = torch.autograd.grad(compiled(x), x, create_graph=True)
    for _ in range(2):
        with pytest.raises(HigherOrderGradientError):
            slope.sum().backward(retain_graph=True)
    return compiled, {"model": model, "x": x, "function": function}


@program
def a_whole_step() -> tuple[Any, Held]:
    model, x = linear(), batch()
    optimizer = torch.optim.AdamW(model.parameters())

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    compiled = dovetail.compile(step, backend="aten")
    for _ in range(3):
        compiled(x)
    return compiled, {"model": model, "x": x, "optimizer": optimizer, "step": step}


@program
def graph_breaks() -> tuple[Any, Held]:
    model, x = linear(), batch()

    def function(x: Tensor) -> Tensor:
        y = model(x)
        print(end="")
        return y * y.sum().item()

    compiled = dovetail.compile(function, backend="aten")
    compiled(x).sum().backward()
    return compiled, {"model": model, "x": x, "function": function}


@program
def an_error_of_the_program() -> tuple[Any, Held]:
    model, x = linear(), batch()

    def function(x: Tensor) -> Tensor:
        if x.shape[0] == 4:
            raise ValueError("four")
        return model(x)  # type: ignore[no-any-return]

    compiled = dovetail.compile(function, backend="aten")
    with pytest.raises(ValueError, match="four"):
        compiled(x)
    return compiled, {"model": model, "x": x, "function": function}


@program
def a_hook_inside() -> tuple[Any, Held]:
    model, x = linear(), batch()

    def function(x: Tensor) -> Tensor:
        y = model(x)
        y.register_hook(lambda gradient: gradient * 2)
        return y.sin().sum()

    return after_a_backward(function, model, x)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        result = x * x
        ctx.save_for_backward(x)
        # A cycle through autograd's own nodes, which the garbage collector does not see.
        ctx.result = result
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


@program
def a_custom_function() -> tuple[Any, Held]:
    model, x = linear(), batch()

    def function(x: Tensor) -> Tensor:
        return Square.apply(model(x)).sum()  # type: ignore[no-any-return]

    return after_a_backward(function, model, x)


@program
def a_checkpointed_region() -> tuple[Any, Held]:
    model, x = linear(), batch()

    def function(x: Tensor) -> Tensor:
        return checkpoint(model, x, use_reentrant=False).sum()  # type: ignore[no-any-return]

    return after_a_backward(function, model, x)


@program
def gradients_inside() -> tuple[Any, Held]:
    model, x = linear(), batch().requires_grad_()

    def function(x: Tensor) -> Tensor:
        energy = model(x).sin().sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return energy + force.square().sum()

    return after_a_backward(function, model, x)


@program
def a_transform() -> tuple[Any, Held]:
    model, x = linear(), batch()

    def function(x: Tensor) -> Tensor:
        return torch.func.vmap(lambda row: model(row).sum())(x).sum()

    return after_a_backward(function, model, x)


@program
def whole_calls() -> tuple[Any, Held]:
    x, weight = torch.randn(8, requires_grad=True), torch.randn(8, requires_grad=True)

    def function(x: Tensor) -> Tensor:
        return torch.cumprod(x * weight, 0).sum() + torch.median(x)

    compiled = dovetail.compile(function, backend="aten")
    (slope,) = torch.autograd.grad(compiled(x), x, create_graph=True)
    slope.sum().backward()
    return compiled, {"x": x, "weight": weight, "function": function}


@program
def results_that_depend_on_each_other() -> tuple[Any, Held]:
    model, x = linear(), batch()

    def function(x: Tensor) -> tuple[Tensor, ...]:
        y = model(x)
        return y, y.exp(), x.t(), y[0]

    compiled = dovetail.compile(function, backend="aten")
    results = compiled(x)
    results[1].sum().backward()
    return compiled, {"model": model, "x": x, "function": function, "result": results[0]}


@program
def independent_results() -> tuple[Any, Held]:
    first, second, x = linear(), linear(), batch()

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        return first(x).exp().sum(), second(x).exp().sum()

    compiled = dovetail.compile(function, backend="aten")
    for result in compiled(x):
        result.backward()
    return compiled, {"first": first, "second": second, "x": x, "function": function}


@program
def passes_and_a_budget() -> tuple[Any, Held]:
    model, x = linear(), batch()
    compiled = dovetail.compile(model, backend="aten", passes=(passes.clip_gradients(1.0),), memory_budget=0.5)
    compiled(x).sum().backward()
    return compiled, {"model": model, "x": x}


@program
def objects_that_are_made_and_written_to() -> tuple[Any, Held]:
    class Kept:
        pass

    kept, x = Kept(), batch()

    def function(x: Tensor) -> Any:
        made = Kept()
        made.value = x * 2  # type: ignore[attr-defined]
        kept.last = made.value  # type: ignore[attr-defined]
        return made

    compiled = dovetail.compile(function, backend="aten")
    for _ in range(2):
        compiled(x)
    return compiled, {"kept": kept, "class": Kept, "x": x, "function": function}


@program
def the_stages_by_hand() -> tuple[Any, Held]:
    model, x = linear(), batch()
    joint = dovetail.capture(model, (x,))
    compiled = joint.compile("aten")
    compiled(x).sum().backward()
    return compiled, {"model": model, "x": x, "joint": joint, "shapes": joint.fake_mode.shape_env}


@program
def forward_only() -> tuple[Any, Held]:
    net, value = Net(), data()
    with torch.no_grad():
        on_aten(net)(value)
    return None, {"net": net, "weight": net.layer.weight, "value": value}


@program
def forward_and_backward() -> tuple[Any, Held]:
    net, value = Net(), data()
    call = on_aten(net)
    result = call(value)
    result.sum().backward()
    return call, {"net": net, "weight": net.layer.weight, "weight_grad": net.layer.weight.grad, "value": value}


@program
def backward_that_never_comes() -> tuple[Any, Held]:
    net, value = Net(), data()
    result = on_aten(net)(value)
    return None, {"net": net, "value": value, "result": result}


@program
def closure() -> tuple[Any, Held]:
    net, scale = Net(), data(8)
    function = on_aten(lambda value: net(value) * scale)
    function(data()).sum().backward()
    return function, {"net": net, "scale": scale}


@program
def module_as_an_argument() -> tuple[Any, Held]:
    net = Net()
    on_aten(lambda module, value: module(value))(net, data())
    return None, {"net": net}


@program
def whole_step() -> tuple[Any, Held]:
    net = Net()
    optimizer = torch.optim.Adam(net.parameters())

    def step(value: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = net(value).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    call = on_aten(step)
    for _ in range(3):
        loss = call(data())
    return call, {
        "net": net,
        "optimizer": optimizer,
        "average": optimizer.state[net.layer.weight]["exp_avg"],
        "loss": loss,
    }


@program
def breaks() -> tuple[Any, Held]:
    net, value = Breaking(), data()
    call = on_aten(net)
    for _ in range(2):
        call(value).sum().backward()
    return call, {"net": net, "weight": net.layer.weight, "value": value}


@program
def recompiles() -> tuple[Any, Held]:
    net = Net()
    call = on_aten(net)
    values = [data(rows, 8) for rows in (3, 4, 5)]
    for value in values:
        call(value).sum().backward()
    return call, {"net": net, **{f"value {number}": value for number, value in enumerate(values)}}


@program
def over_the_limit() -> tuple[Any, Held]:
    net = Net()
    call = on_aten(net, recompile_limit=1, dynamic=False)
    values = [data(rows, 8) for rows in (3, 4, 5)]
    for value in values:
        call(value)
    return call, {"net": net, **{f"value {number}": value for number, value in enumerate(values)}}


@program
def errors() -> tuple[Any, Held]:
    net, value = Net(), data(4, 9)
    call = on_aten(net)
    for _ in range(2):
        with pytest.raises(RuntimeError):
            call(value)
    return call, {"net": net, "value": value}


@program
def errors_of_the_program() -> tuple[Any, Held]:
    net, value = Net(), data()

    def check(item: Tensor, flag: bool) -> Tensor:
        if flag:
            raise ValueError("no")
        return net(item)

    call = on_aten(check)
    call(value, False)
    with pytest.raises(ValueError, match="no"):
        call(value, True)
    return call, {"net": net, "value": value}


@program
def refusals() -> tuple[Any, Held]:
    net, value = Breaking(), data()
    call = on_aten(net, fullgraph=True)
    with pytest.raises(dovetail.errors.GraphBreakError):
        call(value)
    return call, {"net": net, "value": value}


@program
def eager_fallback() -> tuple[Any, Held]:
    net = Net()

    def items(value: Tensor) -> Any:
        yield net(value)

    value = data()
    call = on_aten(items)
    list(call(value))
    return call, {"net": net, "value": value}


@program
def second_order_of_a_class() -> tuple[Any, Held]:
    net, value = Net(), data().requires_grad_()
    call = on_aten(net)
    (gradient,) = torch.autograd.grad(call(value).sum(), value, create_graph=True)
    gradient.square().sum().backward()
    return call, {"net": net, "weight": net.layer.weight, "value": value, "gradient": gradient}


@program
def by_the_program() -> tuple[Any, Held]:
    net, value = Net(), data()
    call = dovetail.compile(net, backend="eager")
    call(value).sum().backward()
    return call, {"net": net, "value": value}


@program
def joint_graph() -> tuple[Any, Held]:
    net, value = Net(), data()
    joint = dovetail.capture(net, (value,))
    run = joint.compile("aten")
    for _ in range(2):
        run(value).sum().backward()
    return None, {"net": net, "weight": net.layer.weight, "value": value, "joint": joint, "run": run}


@program
def backward_block() -> tuple[Any, Held]:
    net, value = Net(), data()
    with dovetail.compiled_autograd(backend="aten"):
        net(value).sum().backward()
    return None, {"net": net, "weight": net.layer.weight, "value": value}


def references(name: str) -> Iterator[tuple[str, weakref.ref[Any]]]:
    """Run a program and forget it; what is left are weak references to what it used and to what was made for it."""
    compiled, held = PROGRAMS[name]()
    found = dict(held)
    if compiled is not None:
        found["wrapper"] = compiled
    if compiled is not None and not isinstance(compiled, dovetail.aot.CompiledGraph):
        found["compiled"] = compiled_function(compiled)
        for number, entry in enumerate(found["compiled"].entries):
            found[f"entry {number}"] = entry
            if entry.compiled is not None:
                joint = entry.compiled.joint
                found[f"graph {number}"], found[f"joint {number}"] = entry.compiled, joint
                found[f"mode {number}"], found[f"shapes {number}"] = joint.fake_mode, joint.fake_mode.shape_env
    return iter([(key, weakref.ref(value)) for key, value in found.items()])


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.sampled(4)
def test_everything_goes_with_the_compiled_function(name: str) -> None:
    found = list(references(name))
    for _ in range(2):
        # The second time, what finalizers have kept until then.
        gc.collect()
    assert [key for key, reference in found if reference() is not None] == []


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096


def test_the_first_input_dies_while_the_function_lives() -> None:
    for function in (lambda value: value * 2, Net(), Breaking()):
        call = on_aten(function)
        for size in (4, 5, 6):
            value = data(size, 8)
            made = [weakref.ref(item) for item in (value, call(value))]
            del value
            gc.collect()
            assert [ref() for ref in made] == [None, None]


def test_deleted_models_leave_nothing() -> None:
    def once() -> None:
        net = nn.Linear(1024, 1024)  # 4 MiB, and as much for its gradient
        on_aten(net)(torch.ones(2, 1024)).sum().backward()

    once()
    gc.collect()
    before = resident_bytes()
    for _ in range(20):
        once()
        gc.collect()
    # Kept, they would be 80 MiB or more; the allocator keeps some whole blocks of 4 MiB.
    assert resident_bytes() - before < 64 * MEGABYTE


def _training(call: Any) -> Callable[[Tensor], Any]:
    def step(value: Tensor) -> None:
        call(value).sum().backward()

    return step


def _failing(call: Any) -> Callable[[Tensor], Any]:
    def step(value: Tensor) -> None:
        with pytest.raises(ValueError, match="no"):
            call(value)

    return step


def _raises(value: Tensor) -> Tensor:
    if value.dim() == 2:
        raise ValueError("no")
    return value


def _second_order(call: Any) -> Callable[[Tensor], Any]:
    def step(value: Tensor) -> None:
        value.requires_grad_()
        (gradient,) = torch.autograd.grad(call(value).sum(), value, create_graph=True)
        gradient.square().sum().backward()

    return step


def _whole_step() -> Callable[[Tensor], Any]:
    net = Net(128)
    optimizer = torch.optim.SGD(net.parameters(), 0.01, momentum=0.9)

    def step(value: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = net(value).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return on_aten(step)  # type: ignore[no-any-return]


LOOPS: dict[str, Callable[[], Callable[[Tensor], Any]]] = {
    "module": lambda: _training(on_aten(Net(128))),
    "function": lambda: on_aten(lambda value: value.sin().cos()),
    "whole step": _whole_step,
    "breaks": lambda: _training(on_aten(Breaking(128))),
    "errors": lambda: _failing(on_aten(_raises)),
    "over the limit": lambda: on_aten(lambda value: value * 2, recompile_limit=2, dynamic=False),
    "second order": lambda: _second_order(on_aten(Net(128))),
}


@pytest.mark.parametrize("kind", LOOPS)
@pytest.mark.sampled(4)
def test_memory_stays_over_many_calls(kind: str) -> None:
    """2,000 calls over all kinds with inputs of 64 KiB: a call that kept one of them would leave about 20 MiB for its kind."""
    step = LOOPS[kind]()
    for number in range(20):
        step(data(128 + number % 4, 128))
    gc.collect()
    before = resident_bytes()
    for number in range(2000 // len(LOOPS)):
        step(data(128 + number % 4, 128))
    gc.collect()
    assert resident_bytes() - before < 8 * MEGABYTE


def most_bytes(step: Callable[[], None]) -> int:
    """The most bytes that torch's allocator has held at once during a step, of those that the step has asked for."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    held = most = 0
    for event in profile.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


def test_a_backward_frees_what_is_saved_while_it_runs() -> None:
    weights = [torch.randn(64, 64, requires_grad=True) for _ in range(8)]
    x = torch.randn(1024, 64)

    def loss(x: Tensor) -> Tensor:
        for weight in weights:
            x = torch.tanh(x @ weight)
        return x.sum()

    def peak(function: Callable[[Tensor], Tensor]) -> int:
        def step() -> None:
            function(x).backward()

        step()
        step()
        return most_bytes(step)

    compiled = on_aten(loss)
    assert peak(compiled) <= peak(loss) * 1.02
    result = compiled(x)
    first = torch.autograd.grad(result, weights, retain_graph=True)
    for one, other in zip(first, torch.autograd.grad(result, weights), strict=True):
        assert torch.equal(one, other)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(result, weights)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's numbers")
@pytest.mark.parametrize("order", [0, 1, 2])
@pytest.mark.sampled(2)
def test_memory_does_not_grow_over_two_thousand_calls(order: int) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    x = torch.randn(32, 64, requires_grad=True)
    compiled = dovetail.compile(model, backend="aten")

    def call() -> None:
        result = compiled(x)
        if order:
            (slope,) = torch.autograd.grad(result.sum(), x, create_graph=order > 1)
            if order > 1:
                slope.square().sum().backward()

    for _ in range(50):
        call()
    gc.collect()
    before = resident_bytes()
    for _ in range(2000):
        call()
    gc.collect()
    # A call that held on to one of its activations would take 16 MiB.
    assert resident_bytes() - before < 4 << 20


@pytest.mark.parametrize("is_viewed", [False, True])
def test_a_gradient_of_what_a_backward_inside_has_freed_is_eagers_error(is_viewed: bool) -> None:
    """For inputs that are named, with ``allow_unused`` too: no gradient at all would pass for "not used"."""
    weight = torch.ones(3, requires_grad=True)

    def step(x: Tensor) -> Tensor:
        hidden = (weight * x).sin()
        hidden.mean().backward()
        return hidden[:2] if is_viewed else hidden

    for x in (torch.ones(3), torch.ones(3, requires_grad=True)):
        inputs = [item for item in (weight, x) if item.requires_grad]
        for function in (step, on_aten(step)):
            for options in ({}, {"inputs": inputs}):
                result = function(x).sum()
                with pytest.raises(RuntimeError, match="second time"):
                    result.backward(**options)
            result = function(x).sum()
            with pytest.raises(RuntimeError, match="second time"):
                torch.autograd.grad(result, inputs, allow_unused=True)
