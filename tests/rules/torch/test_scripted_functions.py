"""TorchScript functions in compiled functions: one graph, every order of derivative, their effects, their errors."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch

import dovetail
from dovetail.errors import GraphBreakError
from tests.differential import check_calls, compare_modules, leaf, randn, same


@pytest.fixture(autouse=True)
def _without_deprecation() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)
        yield


def stacked(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.stack([torch.ones_like(y), y.sin(), x * y], -1)


def spread(x: torch.Tensor, index: torch.Tensor, count: int) -> torch.Tensor:
    return torch.zeros([count, x.shape[1]], dtype=x.dtype).index_add(0, index, x)


def powers(x: torch.Tensor, count: int) -> list[torch.Tensor]:
    found = [x]
    for _ in range(count):
        found.append(found[-1] * x)
    return found


def printing(x: torch.Tensor) -> torch.Tensor:
    print("here")
    return x * 2


def of_data(x: torch.Tensor) -> torch.Tensor:
    if bool(x.sum() > 0):
        return x * 2
    return x * 5


def limited(x: torch.Tensor) -> torch.Tensor:
    if x.shape[0] > 2:
        raise ValueError("too long")
    return x * 5


def writing(x: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return x * 2


def _second(function: Callable[..., Any], weight: torch.Tensor, *args: Any) -> torch.Tensor:
    (slope,) = torch.autograd.grad(function(*args), weight, create_graph=True)
    (curvature,) = torch.autograd.grad(slope.square().sum(), weight)
    return curvature


@pytest.mark.parametrize("warm", [0, 1, 3])
@pytest.mark.parametrize("backend", ["aten", "eager"])
def test_second_order_from_outside(warm: int, backend: str) -> None:
    weight, points = torch.randn(3, requires_grad=True), torch.randn(5, 3)

    def with_helper(helper: Callable[..., torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        def net(x: torch.Tensor) -> torch.Tensor:
            z = x * weight
            return helper(z[..., 0], z[..., 1]).tanh().sum()

        return net

    net = with_helper(torch.jit.script(stacked))
    for _ in range(warm):
        _second(net, weight, points)
    expected = _second(with_helper(stacked), weight, points)
    compiled = dovetail.compile(net, backend=backend, fullgraph=backend == "aten")
    for _ in range(2):
        torch.testing.assert_close(_second(compiled, weight, points), expected)


def test_third_order() -> None:
    scripted = torch.jit.script(stacked)
    x, y = leaf(3), leaf(3)

    def slopes(function: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        total, found = function(x, y).square().sum(), []
        for _ in range(3):
            (slope,) = torch.autograd.grad(total, x, create_graph=True)
            found.append(slope.detach())
            total = (slope * y).sin().sum()
        return found

    for expected, actual in zip(
        slopes(stacked), slopes(dovetail.compile(lambda a, b: scripted(a, b), backend="aten")), strict=True
    ):
        torch.testing.assert_close(actual, expected)


def test_forces_behind_a_break_train() -> None:
    def train(wrap: Callable[..., Any], helper: Callable[..., torch.Tensor]) -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        optimizer, index = torch.optim.SGD(model.parameters(), 0.1), torch.tensor([0, 0, 1, 1])

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            x.requires_grad_()
            energy = helper(model(x), index, int(index[-1]) + 1)
            print(end="")
            (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
            loss = energy.square().mean() + force.square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        compiled, generator = wrap(step), torch.Generator().manual_seed(1)
        return [float(compiled(torch.randn(4, 3, generator=generator))) for _ in range(4)]

    expected = train(lambda step: step, spread)
    assert train(lambda step: dovetail.compile(step, backend="aten"), torch.jit.script(spread)) == pytest.approx(
        expected
    )


def test_numbers_lists_and_sizes() -> None:
    scripted = torch.jit.script(powers)

    def function(x: torch.Tensor, count: int) -> torch.Tensor:
        found = scripted(x, count)
        return torch.stack(found).sum(0) * len(found)

    check_calls(function, [(leaf(3), 2), (leaf(3), 3), (leaf(4), 3), (leaf(5), 3)])


def test_a_traced_function() -> None:
    traced = torch.jit.trace(lambda x: x.sin() * 2, torch.ones(2))
    check_calls(lambda x: traced(x) + 1, [(leaf(3),), (leaf(4),)], fullgraph=True)


def test_another_function_under_the_same_name() -> None:
    chosen = torch.jit.script(writing), torch.jit.script(of_data)
    current = [chosen[0]]
    compiled = dovetail.compile(lambda x: current[0](x + 1), backend="aten")
    for function in (*chosen, chosen[0]):
        current[0] = function
        same(function(torch.ones(2) + 1), compiled(torch.ones(2)))


def test_it_prints_at_every_call(capfd: pytest.CaptureFixture[str]) -> None:
    scripted = torch.jit.script(printing)
    compiled = dovetail.compile(lambda x: scripted(x) + 1, backend="aten")
    for _ in range(3):
        compiled(torch.ones(2))
    assert capfd.readouterr().out.count("here") == 3
    with pytest.raises(GraphBreakError, match="printing prints"):
        dovetail.compile(lambda x: scripted(x) + 1, backend="aten", fullgraph=True)(torch.ones(2))


def test_branches_on_data_run_for_real() -> None:
    scripted = torch.jit.script(of_data)
    compiled = dovetail.compile(lambda x: scripted(x.sin()) + 1, backend="aten")
    for x in (torch.ones(2), -torch.ones(2)):
        same(scripted(x.sin()) + 1, compiled(x))
    assert compiled.entries[0].run is not None


def test_errors_are_the_programs() -> None:
    scripted = torch.jit.script(limited)

    def function(x: torch.Tensor) -> torch.Tensor:
        try:
            return scripted(x)
        except torch.jit.Error:
            return x + 1

    check_calls(function, [(leaf(2),), (leaf(3),), (leaf(4),)])
    with pytest.raises(torch.jit.Error, match="too long"):
        dovetail.compile(lambda x: scripted(x), backend="aten")(torch.ones(3))


def test_writes_in_place() -> None:
    scripted = torch.jit.script(writing)
    check_calls(lambda x: scripted(x) + x, [(torch.ones(2),), (torch.ones(3),)], fullgraph=True)


# --- graphs that are read ---------------------------------------------------------------------------------------------


class Scripted(torch.nn.Module):
    """A module with a parameter, a buffer, a number and a submodule, each used by its scripted method."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
        self.register_buffer("shift", torch.tensor([0.5, 0.25, 0.125]))
        self.linear = torch.nn.Linear(3, 3)
        self.scale = 2

    def forward(self, x: torch.Tensor, count: int = 2) -> torch.Tensor:
        if count > 1:
            x = x * 2
        for step in range(count):
            x = x + step
        size = x.shape[:-1] + [3, 1]
        return self.linear(x * self.weight + self.shift).reshape(size).squeeze(-1) * self.scale


class Around(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = torch.jit.script(Scripted())
        self.last = torch.nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.inner(x).tanh())


def sized(x: torch.Tensor, count: int, dim: int = 0) -> torch.Tensor:
    shape = list(x.shape)
    shape[dim] = count
    made = torch.zeros(shape, dtype=x.dtype, device=x.device)
    return torch.cat(
        [made, torch.einsum("ij,kj->ik", [x, x[:, :1].expand(x.shape[0], x.shape[1])]).sum(1, keepdim=True) * x], dim
    )


def test_methods_of_scripted_modules_are_captured() -> None:
    model, twin = Around(), Around()
    compiled = dovetail.compile(twin, backend="aten", fullgraph=True)
    for count in (4, 5, 7):
        x = randn(count, 3)
        for net in (model, compiled):
            net(x).square().mean().backward()
        compare_modules(model, twin, f"{count} rows")


@pytest.mark.slow
def test_a_scripted_module_trains_as_a_whole_step_of_all_sizes() -> None:
    def losses(compiled: bool) -> list[torch.Tensor]:
        model = Around()
        optimizer = torch.optim.Adam(model.parameters())

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            x = x.detach().requires_grad_()
            energies = model(x)
            (slope,) = torch.autograd.grad(energies.sum(), x, create_graph=True)
            loss = energies.square().mean() + slope.square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        call = dovetail.compile(step, backend="aten", fullgraph=True) if compiled else step
        found = [call(randn(n, 3)) for n in (4, 5, 6, 7, 8)]
        if compiled:
            assert dovetail.events_of(call).count("capture") <= 3
        return found

    torch.testing.assert_close(losses(True), losses(False))


def test_sizes_stay_symbolic() -> None:
    scripted = torch.jit.script(sized)
    check_calls(
        lambda x, n: scripted(x, n), [(leaf(n, 3), n + 1) for n in (4, 5, 6, 7)], entries=2, fullgraph=True, exact=False
    )


def test_a_number_of_a_scripted_module_is_guarded() -> None:
    model = torch.jit.script(Scripted())
    compiled = dovetail.compile(lambda x: model(x), backend="aten", fullgraph=True)
    x = randn(2, 3)
    for scale in (2, 5, 2):
        model.scale = scale
        same(model(x).detach(), compiled(x).detach())


def test_lists_are_copied_at_the_call() -> None:
    scripted = torch.jit.script(_appending)

    def function(x: torch.Tensor) -> tuple[torch.Tensor, int]:
        given = [x, x * 2]
        return scripted(given), len(given)

    check_calls(function, [(leaf(2),), (leaf(3),)], fullgraph=True)


def _appending(given: list[torch.Tensor]) -> torch.Tensor:
    given.append(given[0].sin())
    return torch.stack(given).to(torch.float64)


class Pair(NamedTuple):
    """What a scripted function returns by name."""

    first: torch.Tensor
    second: torch.Tensor


def paired(x: torch.Tensor) -> Pair:
    return Pair(x.sin(), x.cos())


def test_named_results() -> None:
    scripted = torch.jit.script(paired)
    check_calls(lambda x: scripted(x).second * 2, [(leaf(2),), (leaf(3),)])


def test_autocast() -> None:
    scripted = torch.jit.script(_product)

    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return scripted(x) + 1

    check_calls(function, [(leaf(2, 2),), (leaf(3, 3),)])


def _product(x: torch.Tensor) -> torch.Tensor:
    return x @ x


class Normalised(torch.nn.Module):
    """A module whose scripted method writes to buffers, draws random numbers and asks whether it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(3)
        self.drop = torch.nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.norm(x))
        return x if self.training else x * 2


def test_buffers_random_numbers_and_modes() -> None:
    model, twin = torch.jit.script(Normalised()), torch.jit.script(Normalised())
    compiled = dovetail.compile(lambda x: twin(x), backend="aten", fullgraph=True)
    for count, training in ((4, True), (5, True), (5, False), (6, False), (4, True)):
        x, found = randn(count, 3), []
        for net, call in ((model, model), (twin, compiled)):
            net.train(training)
            torch.manual_seed(count)
            found.append(call(x))
            found[-1].sum().backward()
        same(found[0].detach(), found[1].detach())
        compare_modules(model, twin, f"{count} rows, training {training}")


@functools.lru_cache
def _of_a_matrix(function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    function = functools.partial(function)

    def scripted(x: torch.Tensor) -> torch.Tensor:
        values, vectors = torch.linalg.eigh(x)
        return vectors @ torch.diag_embed(function(values)) @ vectors.mT

    return torch.jit.script(scripted)


@pytest.mark.parametrize("through_the_cache", [True, False])
def test_a_function_that_is_scripted_where_it_is_made(through_the_cache: bool) -> None:
    make = _of_a_matrix if through_the_cache else _of_a_matrix.__wrapped__

    def function(x: torch.Tensor) -> torch.Tensor:
        return make(torch.exp)(x @ x.mT).sin()

    compiled = dovetail.compile(function, backend="aten")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", dovetail.errors.EagerFallbackWarning)
        for factor in range(1, 4):
            x = randn(3, 3) * factor
            same(function(x), compiled(x))
    assert not [item for item in caught if item.category is dovetail.errors.EagerFallbackWarning]
