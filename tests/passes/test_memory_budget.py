"""A memory budget is obeyed, monotone, reported, and changes no number."""

from __future__ import annotations

import pytest
import torch

import dovetail
from dovetail import errors
from dovetail.aot.partition import partition
from dovetail.backends import register_backend
from dovetail.backends.aten import compile_aten
from dovetail.backends.registry import unregister_backend
from dovetail.passes.memory_budget import choose_budget
from dovetail.passes.recompute import saved_by

BUDGETS = (0.0, 0.1, 0.25, 0.4, 0.5, 0.6, 0.75, 0.9, 1.0)


class Block(torch.nn.Module):
    def __init__(self, width: int, rate: float) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.wide = torch.nn.Linear(width, 4 * width)
        self.back = torch.nn.Linear(4 * width, width)
        self.rate = rate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.nn.functional.gelu(self.wide(self.norm(x)))
        return x + torch.nn.functional.dropout(self.back(hidden), self.rate, self.training)


def model(rate: float = 0.0, depth: int = 3) -> torch.nn.Module:
    return torch.nn.Sequential(*[Block(16, rate) for _ in range(depth)])


def step(compiled: object, module: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    module.zero_grad()
    torch.manual_seed(3)
    loss = compiled(x).square().mean()  # type: ignore[operator]
    loss.backward()
    return [loss.detach(), *[parameter.grad for parameter in module.parameters()], torch.rand(1)]  # type: ignore[list-item]


@pytest.mark.parametrize("rate", [0.0, 0.25])
def test_obeyed_monotone_and_bitwise(rate: float) -> None:
    module, x = model(rate), torch.randn(32, 16)
    expected = step(module, module, x)
    joint = dovetail.capture(module, (x,))
    before = -1
    for budget in BUDGETS:
        compiled = joint.compile(backend="aten", memory_budget=budget)
        report = compiled.memory
        assert report is not None and report.measured is None
        assert report.predicted <= report.budget
        assert report.smallest <= report.predicted <= report.largest
        assert report.predicted >= before
        before = report.predicted
        actual = step(compiled, module, x)
        assert all(torch.equal(left, right) for left, right in zip(expected, actual, strict=True))
        after = compiled.memory
        assert after is not None and after.measured == after.predicted
        assert "measured" in str(compiled.memory)
    assert report.recomputed == 0
    least = partition(joint, saved_by("save_all", 0.0))
    assert least.memory is not None and least.recomputed_nodes and least.memory.smallest < report.largest / 2
    assert least.backward is not None
    assert not [
        node
        for node in least.backward.graph.nodes
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    ]


def test_bytes_are_obeyed_or_refused() -> None:
    module, x = model(), torch.randn(32, 16)
    joint = dovetail.capture(module, (x,))
    whole = partition(joint, saved_by("save_all", 1.0)).memory
    assert whole is not None
    middle = (whole.smallest + whole.largest) // 2
    plan = partition(joint, saved_by("save_all", middle))
    assert plan.saved_bytes <= middle
    with pytest.raises(errors.OptionError, match="cannot be kept"):
        partition(joint, saved_by("save_all", whole.smallest - 1))
    assert partition(joint, saved_by("save_all", whole.smallest)).saved_bytes == whole.smallest
    assert partition(joint, saved_by("save_all", 10**12)).saved_bytes == whole.largest


@pytest.mark.parametrize("budget", [-1, 1.5, True, "half", float("nan")])
def test_what_is_no_budget(budget: object) -> None:
    with pytest.raises(errors.OptionError):
        dovetail.compile(model(), memory_budget=budget)


def test_as_an_option_of_compile() -> None:
    module, x = model(0.25), torch.randn(32, 16)
    expected = step(module, module, x)
    compiled = dovetail.compile(module, backend="aten", memory_budget=0.3, fullgraph=True)
    actual = step(compiled, module, x)
    assert all(torch.equal(left, right) for left, right in zip(expected, actual, strict=True))
    assert any("budget" in str(event) for event in dovetail.events_of(compiled).events)


def test_the_eager_backend_refuses_it() -> None:
    with pytest.raises(errors.OptionError, match="own autograd"):
        dovetail.capture(model(), (torch.randn(4, 16),)).compile(backend="eager", memory_budget=0.5)


def test_symbolic_sizes_keep_the_plan() -> None:
    module = model()
    compiled = dovetail.compile(module, backend="aten", memory_budget=0.3, fullgraph=True, dynamic=True)
    for rows in (32, 7, 50):
        x = torch.randn(rows, 16)
        expected, actual = step(module, module, x), step(compiled, module, x)
        assert all(torch.equal(left, right) for left, right in zip(expected, actual, strict=True))


def test_exact_numerics_run_the_captured_operators() -> None:
    module, x = model(), torch.randn(8, 16)
    expected = step(module, module, x)
    compiled = dovetail.compile(module, numerics="exact", fullgraph=True)
    actual = step(compiled, module, x)
    assert all(torch.equal(left, right) for left, right in zip(expected, actual, strict=True))
    joint = dovetail.capture(module, (x,))
    seen: list[set[object]] = []

    def backend(graph: torch.fx.GraphModule, inputs: object, *, kind: str, options: object) -> object:
        seen.append({node.target for node in graph.graph.nodes if node.op == "call_function"})
        return lambda values: list(graph(*values))

    joint.compile(backend, numerics="exact")
    assert torch.ops.aten.native_layer_norm.default in seen[0]
    with pytest.raises(errors.OptionError, match="decompositions"):
        joint.compile("inductor", numerics="exact")
    with pytest.raises(errors.OptionError):
        dovetail.compile(module, numerics="precise")


def test_exact_numerics_refuse_another_formula() -> None:
    joint = dovetail.capture(lambda x: x.prod(), (torch.randn(4, requires_grad=True),))
    assert joint.inexact
    with pytest.raises(errors.CaptureError, match="another formula"):
        joint.compile(lambda graph, inputs, *, kind, options: graph, numerics="exact")


@pytest.mark.parametrize("budget", [0.0, 0.5, 1.0])
def test_sizes_that_the_data_decides(budget: float) -> None:
    def function(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.sin(torch.exp(x[x > 0] * weight)).sum() * weight

    compiled = dovetail.compile(function, backend="aten", fullgraph=True, memory_budget=budget)
    weight = torch.ones((), requires_grad=True)
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(50, requires_grad=True)
        expected = torch.autograd.grad(function(x, weight), (x, weight))
        actual = torch.autograd.grad(compiled(x, weight), (x, weight))
        assert all(torch.equal(left, right) for left, right in zip(expected, actual, strict=True))


def test_under_torch_compile() -> None:
    module, x = model(0.25), torch.randn(32, 16)
    expected = step(module, module, x)
    backend = dovetail.torch_backend("aten", fullgraph=True, memory_budget=0.0)
    actual = step(torch.compile(module, backend=backend), module, x)
    assert all(torch.equal(left, right) for left, right in zip(expected, actual, strict=True))
    with pytest.raises(errors.OptionError):
        dovetail.torch_backend("aten", memory_budget=2.0)


def _doubled(x):
    x.mul_(2)
    return x.sin()


def _doubled_without_recording(x):
    with torch.no_grad():
        x.mul_(2)
    return x * x


def _row_of_it(x):
    x[0].mul_(2)
    return x.t().sin() * x.view(-1)[1]


@pytest.mark.parametrize("function", [_doubled, _doubled_without_recording, _row_of_it])
@pytest.mark.parametrize("numerics", ["bitwise", "tolerance"])
def test_nothing_is_computed_again_from_an_input_that_is_written(function, numerics):
    """After the call the input holds its new value, and autograd would take a saved one for changed."""
    name = f"written-{numerics}-{function.__name__}"
    register_backend(name, numerics=numerics)(compile_aten)
    try:
        options = {"memory_budget": 0.0} if numerics == "bitwise" else {}
        compiled = dovetail.compile(function, backend=name, fullgraph=True, **options)
        found = []
        for run in (function, compiled):
            leaf = torch.linspace(0.1, 1, 6).reshape(2, 3).requires_grad_()
            given = leaf * 1
            found.append([*torch.autograd.grad(run(given).sum(), leaf), given.detach()])
        assert all(map(torch.equal, *found))
    finally:
        unregister_backend(name)


def test_a_budget_is_a_fraction_between_the_extremes_or_a_number_of_bytes() -> None:
    assert choose_budget(0.5, smallest=100, largest=300) == 200
    assert choose_budget(250, smallest=100, largest=300) == 250
