"""What Dovetail assumes of torch, as small programs of plain torch: each raises AssertionError where torch does otherwise.

They run first in each environment (``make test-matrix``), so that a new version of torch says which assumption it has broken and
not only which tests of Dovetail fail. An assumption names the modules that stand on it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


@dataclass(frozen=True)
class Assumption:
    """One program, and the rooms of Dovetail that stand on what it shows."""

    check: Callable[[], None]
    rooms: tuple[str, ...]


ASSUMPTIONS: dict[str, Assumption] = {}


def assumes(*rooms: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Register a program by its name."""

    def register(check: Callable[[], None]) -> Callable[[], None]:
        ASSUMPTIONS[check.__name__] = Assumption(check, rooms)
        return check

    return register


def raised(function: Callable[[], Any], pattern: str) -> None:
    """The function raises a RuntimeError with this text."""
    try:
        function()
    except RuntimeError as error:
        assert re.search(pattern, str(error)), f"another text: {error}"
    else:
        raise AssertionError(f"nothing was raised; expected: {pattern}")


class Sine(torch.autograd.Function):
    """Saves its argument, and counts the gradients that were asked for."""

    wanted: list[Any] = []
    recorded: list[bool] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The sine of the first argument, times the second."""
        Sine.recorded.append(torch.is_grad_enabled())
        ctx.save_for_backward(x, y)
        return x.sin() * y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """The gradients, by differentiable operators."""
        Sine.wanted.append(tuple(ctx.needs_input_grad))
        x, y = ctx.saved_tensors
        return gradient * x.cos() * y, gradient * x.sin() if ctx.needs_input_grad[1] else None


class Seen(TorchDispatchMode):
    """Keeps the operators that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[Any] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator."""
        self.operators.append(function)
        return function(*args, **(kwargs or {}))


# --- autograd ---------------------------------------------------------------------------------------------------------


@assumes("rules/torch/custom_functions", "quirks/replays")
def custom_functions_run_without_recording() -> None:
    Sine.recorded.clear()
    Sine.wanted.clear()
    x = torch.ones(2, requires_grad=True)
    result = Sine.apply(x, torch.ones(2))
    assert Sine.recorded == [False] and result.grad_fn.name() == "SineBackward"
    result.sum().backward()
    assert Sine.wanted == [(True, False)]


@assumes("rules/torch/custom_functions", "trace")
def modes_see_inside_of_custom_functions() -> None:
    with Seen() as seen:
        Sine.apply(torch.ones(2, requires_grad=True), torch.ones(2))
    assert aten.sin.default in seen.operators and aten.mul.Tensor in seen.operators


@assumes("runtime/function", "higher_order/kept_inputs")
def saved_tensors_notice_writes() -> None:
    x, y = torch.ones(2, requires_grad=True), torch.ones(2)
    result = Sine.apply(x, y)
    y.add_(1)
    raised(result.sum().backward, "modified by an inplace operation")


@assumes("runtime/function", "runtime/derivatives")
def saved_tensors_are_freed() -> None:
    result = Sine.apply(torch.ones(2, requires_grad=True), torch.ones(2)).sum()
    result.backward()
    raised(result.backward, "a second time")


@assumes("runtime/function", "aot/outputs")
def the_engine_runs_the_newest_node_first() -> None:
    order: list[str] = []
    x = torch.ones(2, requires_grad=True)
    old, new = x.sin(), x.cos()
    for name, item in (("old", old), ("new", new)):
        item.grad_fn.register_prehook(lambda gradients, name=name: order.append(name))
    (old + new).sum().backward()
    assert order == ["new", "old"]


@assumes("rules/gradients/engine_order", "backward_capture")
def hooks_run_in_their_order() -> None:
    order: list[str] = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda gradient: order.append("tensor"))
    y.grad_fn.register_prehook(lambda gradients: order.append("before the node"))
    y.grad_fn.register_hook(lambda results, gradients: order.append("behind the node"))
    x.register_post_accumulate_grad_hook(lambda leaf: order.append("after adding"))
    y.sum().backward()
    assert order == ["tensor", "before the node", "behind the node", "after adding"]


@assumes("runtime/function", "backward_capture/accumulation")
def gradients_take_the_strides_of_leaves() -> None:
    leaf = torch.ones(2, 3).t().requires_grad_()
    (leaf * 1).backward(torch.ones(3, 2))
    assert leaf.grad is not None and leaf.grad.stride() == leaf.stride() == (1, 3)
    first = leaf.grad
    (leaf * 1).backward(torch.ones(3, 2))
    assert leaf.grad is first, "a second gradient is added in place"


@assumes("runtime/backward_reads", "runtime/origins")
def versions_count_writes() -> None:
    x = torch.ones(4)
    view, alias, apart = x[:2], x.detach(), x.data
    before = x._version
    view.add_(1)
    assert x._version == before + 1 == alias._version == view._version
    assert apart._version == 0
    with torch.no_grad():
        x.zero_()
    assert x._version == before + 2


@assumes("aot/views", "aot/outputs")
def views_know_their_base() -> None:
    x = torch.ones(2, 3)
    assert x.t()[0]._base is x and x._base is None
    assert x.detach()._base is None
    with torch.no_grad():
        assert x.view(-1)._base is x
    leaf = torch.ones(2, 3, requires_grad=True)
    assert leaf.view(-1)._base is leaf and leaf.view(-1).grad_fn.name() == "ViewBackward0"


@assumes("higher_order/backward")
def second_derivatives_need_recorded_backwards() -> None:
    x = torch.tensor([0.5], requires_grad=True)
    (plain,) = torch.autograd.grad(x.sin(), x)
    (recorded,) = torch.autograd.grad(x.sin(), x, create_graph=True)
    assert not plain.requires_grad and recorded.requires_grad


# --- tracing ----------------------------------------------------------------------------------------------------------


@assumes("trace", "quirks/layouts")
def fake_kernels_keep_strides() -> None:
    mode = FakeTensorMode()
    x = mode.from_tensor(torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last))
    weight = mode.from_tensor(torch.ones(5, 3, 1, 1))
    assert aten.convolution.default(x, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1).stride()[1] == 1
    assert x.sin().stride() == x.stride()
    assert (x + x.contiguous()).stride() == x.stride()


@assumes("trace", "frontend/sizes")
def sizes_made_of_data_are_refused_without_symbols() -> None:
    fake = FakeTensorMode().from_tensor(torch.ones(3))
    try:
        fake.nonzero()
    except torch._subclasses.fake_tensor.DynamicOutputShapeException:
        return
    raise AssertionError("nonzero of a fake tensor has a size")


@assumes("trace", "guards/shapes")
def comparisons_of_symbols_are_recorded() -> None:
    environment = ShapeEnv()
    sizes = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    x = FakeTensorMode(shape_env=environment).from_tensor(torch.ones(5, 4), symbolic_context=sizes)
    assert isinstance(x.shape[0], torch.SymInt) and type(x.shape[1]) is int
    count = len(environment.guards)
    assert x.shape[0] > 3
    assert len(environment.guards) == count + 1


@assumes("aot", "passes/decompose")
def traced_graphs_are_flat_calls_of_operators() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y.add_(1)
        return y.sum()

    graph = make_fx(function, tracing_mode="fake")(torch.ones(3)).graph
    calls = [node.target for node in graph.nodes if node.op == "call_function"]
    assert calls == [aten.mul.Tensor, aten.add_.Tensor, aten.sum.default]
    assert all(isinstance(node.meta["val"], torch.Tensor) for node in graph.nodes if node.op == "call_function")


@assumes("aot/capture_joint")
def backwards_can_be_traced() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(x.sin().sum(), x)[0]

    graph = make_fx(function, tracing_mode="fake")(torch.ones(3)).graph
    assert aten.cos.default in [node.target for node in graph.nodes]


@assumes("trace/overrides", "quirks/functionalisation")
def functional_operators_have_schemas() -> None:
    schema = aten.add_.Tensor._schema
    assert schema.is_mutable and schema.arguments[0].alias_info.is_write
    assert not aten.add.Tensor._schema.is_mutable
    assert aten.view.default._schema.arguments[0].alias_info is not None


# --- state ------------------------------------------------------------------------------------------------------------


@assumes("runtime", "trace/repeats")
def random_numbers_follow_the_state() -> None:
    torch.manual_seed(3)
    state = torch.get_rng_state()
    first = torch.nn.functional.dropout(torch.ones(8), 0.5)
    torch.set_rng_state(state)
    assert torch.equal(first, torch.nn.functional.dropout(torch.ones(8), 0.5))
    assert not torch.equal(state, torch.get_rng_state())


@assumes("guards/ambient")
def backwards_run_in_the_autocast_of_the_caller() -> None:
    seen = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda gradient: seen.append(torch.is_autocast_enabled("cpu")))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y.sum().backward()
    assert seen == [True]


@assumes("frontend/interpreter/calls", "guards")
def modules_keep_hooks_and_parameters_in_dictionaries() -> None:
    layer = torch.nn.Linear(2, 2)
    assert {"_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks"} <= vars(layer).keys()
    assert list(layer._parameters) == ["weight", "bias"] and torch.nn.Module.__call__ is not None
    assert torch.nn.Module.__call__.__code__.co_name == "_wrapped_call_impl"
