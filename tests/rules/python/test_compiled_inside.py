"""What Dovetail or torch.compile has compiled, inside of something that is compiled: part of the same graph."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail
from tests.differential import same

Compile = Callable[..., Any]
Program = tuple[Callable[..., Any], Callable[[], Any]]


def _eager(function: Any, **options: Any) -> Any:
    return function


def _aten(function: Any, **options: Any) -> Any:
    return dovetail.compile(function, backend="aten", **options)


def _net() -> torch.nn.Module:
    parts = (torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Dropout(0.5), torch.nn.Linear(6, 4))
    return torch.nn.Sequential(*parts)


def _whole_step(compiled: Compile) -> Program:
    model = compiled(_net())
    optimizer = torch.optim.Adam(model.parameters(), 0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        return loss.detach()

    return step, model.state_dict


def _blocks_then_model_then_step(compiled: Compile) -> Program:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(compiled(_net()) for _ in range(2))
            self.named = torch.nn.ModuleDict({"last": compiled(torch.nn.Linear(4, 4))})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for number, layer in enumerate(self.layers):
                x = layer(x).relu() * number
            for layer in self.named.values():
                x = layer(x)
            return x + sum(parameter.sum() for parameter in self.parameters()) + len(list(self.named_modules()))

    model = compiled(Model())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        model.zero_grad()
        return loss.detach()

    return step, model.state_dict


def _train_and_eval(compiled: Compile) -> Program:
    model = compiled(_net())

    def step(x: torch.Tensor) -> Any:
        assert model.eval() is model
        quiet = model(x)
        assert model.train() is model
        return quiet + model(x)

    return step, lambda: (model.state_dict(), model.training)


def _questions(compiled: Compile) -> Program:
    layer = compiled(torch.nn.Linear(4, 4))

    def step(x: torch.Tensor) -> Any:
        kinds = [
            isinstance(layer, kind)
            for kind in (torch.nn.Linear, torch.nn.Module, torch.nn.ReLU, (int, torch.nn.Linear))
        ]
        return kinds, layer.__class__ is torch.nn.Linear, layer.in_features, hasattr(layer, "nothing"), x * 2

    return step, lambda: None


def _items_and_attributes(compiled: Compile) -> Program:
    model = compiled(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()))
    model.count = 0

    def step(x: torch.Tensor) -> torch.Tensor:
        model.count += 1
        for layer in model:
            x = layer(x)
        weights = [value for name, value in model.state_dict().items() if name.endswith("weight")]
        return model[0](x) * len(model) + model.count + weights[0].sum()

    return step, lambda: model.count


def _hooks(compiled: Compile) -> Program:
    model = compiled(_net())
    model.register_forward_hook(lambda module, args, result: result * 2)
    model[0].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    return lambda x: model(x), model.state_dict


def _functions(compiled: Compile) -> Program:
    @compiled
    def wave(x: torch.Tensor, factor: int = 2) -> torch.Tensor:
        return x.sin() * factor

    class Model(torch.nn.Module):
        @compiled
        def part(self, x: torch.Tensor) -> torch.Tensor:
            return wave(x, factor=3) + 1

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.part(x) + wave(x)

    return Model(), lambda: None


def _copies(compiled: Compile) -> Program:
    one = compiled(compiled(torch.nn.Linear(4, 4)))
    other = copy.deepcopy(one)
    with torch.no_grad():
        other.weight.mul_(2)
    return lambda x: one(x) + other(x), lambda: other.weight


def _functional_transforms(compiled: Compile) -> Program:
    model = compiled(torch.nn.Linear(4, 4))

    def step(x: torch.Tensor) -> torch.Tensor:
        slope = torch.func.grad(lambda y: model(y).square().sum())(x)
        doubled = {name: value * 2 for name, value in model.named_parameters()}
        return torch.func.functional_call(model, doubled, (torch.vmap(model)(x) + slope,))

    return step, lambda: None


def _with_backwards(compiled: Compile) -> Program:
    model = compiled(torch.nn.Linear(4, 4), compiled_autograd=True)
    return lambda x: model(x).sin(), lambda: None


_PROGRAMS = (
    *(_whole_step, _blocks_then_model_then_step, _train_and_eval, _questions, _items_and_attributes, _hooks),
    *(_functions, _copies, _functional_transforms, _with_backwards),
)


@pytest.mark.parametrize("make", _PROGRAMS, ids=lambda make: make.__name__)
@pytest.mark.sampled(4)
def test_it_is_part_of_the_graph(make: Callable[[Compile], Program]) -> None:
    found = []
    for compiled in (_eager, _aten):
        torch.manual_seed(0)
        step, state = make(compiled)
        whole = compiled(step, fullgraph=True)
        x = torch.randn(5, 4)
        results = [whole(x) for _ in range(3)]
        found.append((results, copy.deepcopy(state()), torch.rand(2)))
    same(*found)


def test_an_argument_and_a_result() -> None:
    layer = _aten(torch.nn.Linear(4, 4))
    other = _aten(torch.nn.Linear(4, 4))
    whole = _aten(lambda model, x: (model, model(x)), fullgraph=True)
    x = torch.randn(2, 4)
    for model in (layer, other, layer):
        found, result = whole(model, x)
        assert found is model
        same(model.original(x), result)
    # It is the same code for all modules of a kind.
    same(torch.nn.Linear.forward(other.original, x), whole(other, x)[1])


def test_what_changes_between_calls_is_seen() -> None:
    layer = _aten(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5)))
    whole = _aten(lambda x: layer(x), fullgraph=True)
    x = torch.randn(2, 4)
    whole(x)
    layer.eval()
    same(layer.original(x), whole(x))
    handle = layer.register_forward_hook(lambda module, args, result: result + 1)
    same(layer.original(x), whole(x))
    handle.remove()
    layer[0].weight = torch.nn.Parameter(torch.zeros(4, 4))
    same(layer.original(x), whole(x))
    layer.forward = lambda x: x * 3
    same(x * 3, whole(x))


def _reads(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.sum().item() > 0 else x


def test_the_options_of_the_outer_one_hold() -> None:
    strict, loose = _aten(_reads, fullgraph=True), _aten(_reads)
    x = torch.ones(2)
    with pytest.warns(dovetail.errors.GraphBreakWarning):
        same(x * 4, _aten(lambda x: strict(x) * 2)(x))
    with pytest.raises(dovetail.errors.GraphBreakError):
        _aten(lambda x: loose(x) * 2, fullgraph=True)(x)


def test_passes_of_the_inner_one_are_not_dropped() -> None:
    runs = []

    def count(joint: Any) -> Any:
        runs.append(joint)
        return joint

    layer = _aten(torch.nn.Linear(4, 4), passes=(count,))
    x = torch.randn(2, 4)
    with pytest.warns(dovetail.errors.GraphBreakWarning, match="passes of its own"):
        same(layer.original(x) * 2, _aten(lambda x: layer(x) * 2)(x))
    assert len(runs) == 1


def test_a_module_that_says_it_is_another_one() -> None:
    class Proxy(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner = inner

        @property
        def __class__(self) -> type:  # type: ignore[override]
            return type(self.inner)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

    proxy = Proxy(torch.nn.Linear(4, 4))

    def program(x: torch.Tensor) -> torch.Tensor:
        return proxy(x) if isinstance(proxy, torch.nn.Linear) else x.sin()

    whole = _aten(program, fullgraph=True)
    x = torch.randn(2, 4)
    same(program(x), whole(x))
    proxy.inner = torch.nn.ReLU()
    same(x.sin(), whole(x))


def test_what_torch_compile_has_wrapped() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = torch.compile(torch.nn.Linear(4, 4), backend="eager")
            self.two = torch.nn.Linear(4, 4)
            self.two.compile(backend="eager")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert isinstance(self.one.weight, torch.nn.Parameter)
            return self.two(self.one(x)) + sum(parameter.sum() for parameter in self.one.parameters())

    model = Model()
    x = torch.randn(2, 4)
    expected = torch.nn.functional.linear(model.one._orig_mod(x), model.two.weight, model.two.bias)
    expected = expected + sum(parameter.sum() for parameter in model.one.parameters())
    same(expected, _aten(model, fullgraph=True)(x))
