"""What a session captures, says and leaves to eager; compiled functions in the forward; the option of ``compile``."""

from __future__ import annotations

import contextlib
import gc
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import dovetail
from dovetail.backward_capture import BackwardSession, open_session
from dovetail.errors import CaptureError, EagerFallbackWarning, GraphBreakError, GraphBreakWarning, OptionError
from dovetail.torch_private import engine as private_engine
from tests.backward_capture.test_scenarios import assert_same


def test_another_size_is_the_same_capture() -> None:
    weight = torch.randn(4, 3, requires_grad=True)
    with dovetail.compiled_autograd(backend="aten") as backwards:
        for size in (2, 5, 1, 7):
            weight.grad = None
            (torch.randn(size, 4) @ weight).sin().expand(2, size, 3).mean(1).sum().backward()
    assert len(backwards.captures) == 1
    assert backwards.runs == 4


def test_another_scalar_is_the_same_capture() -> None:
    x = torch.randn(3, requires_grad=True)
    with dovetail.compiled_autograd(backend="aten") as backwards:
        for number in (1.5, 2.5, 3.5):
            (found,) = torch.autograd.grad((x * number / (number + 1)).sum(), [x])
            with torch.no_grad():
                assert_same(torch.full((3,), 1.0) / (number + 1) * number, found)
    assert len(backwards.captures) == 1


def test_an_exponent_is_a_part_of_the_capture_and_never_of_another_one() -> None:
    x = torch.rand(3, requires_grad=True)
    with dovetail.compiled_autograd(backend="aten") as backwards:
        for exponent in (1.5, 2.5, 1.5):
            (found,) = torch.autograd.grad((x**exponent).sum(), [x])
            torch.testing.assert_close(found, exponent * x.detach() ** (exponent - 1))
    assert len(backwards.captures) == 2


def test_the_captured_backward_is_readable() -> None:
    x = torch.randn(3, requires_grad=True)
    with dovetail.compiled_autograd(backend="aten") as backwards:
        h = x.sin()
        h.register_hook(lambda gradient: gradient * 2)
        (h * x).sum().backward()
    text = str(backwards)
    assert "1 captured backward(s), 1 run(s)" in text
    for line in ("# 1: SumBackward0", "# 3: SinBackward0", "call_tensor_hook", "add_gradients", "accumulate_grad"):
        assert line in text


def test_no_sum_of_two_gradients_depends_on_the_order_and_one_of_three_does() -> None:
    x = torch.randn(3, requires_grad=True)
    with dovetail.compiled_autograd(backend="aten") as backwards:
        torch.autograd.grad((x.sin() * x).sum(), [x])
        torch.autograd.grad((x.sin() * x + x.cos()).sum(), [x])
    assert [capture.order_matters for capture in backwards.captures] == [False, True]


def test_one_warning_for_many_fallbacks() -> None:
    x = torch.randn(3, requires_grad=True)
    with warnings.catch_warnings(record=True) as record, dovetail.compiled_autograd(backend="aten") as backwards:
        warnings.simplefilter("always")
        for _ in range(3):
            torch.autograd.grad(x.sin(), [x], grad_outputs=[torch.eye(3)], is_grads_batched=True)
    assert [item.category for item in record] == [EagerFallbackWarning]
    assert "vmap" in str(record[0].message)
    assert len(backwards.fallbacks) == 3
    assert "left to eager: the gradients are batched" in str(backwards)


def test_the_next_block_runs_what_the_last_one_has_compiled() -> None:
    graphs: list[Any] = []

    def backend(graph: Any, example_inputs: Any, **_: Any) -> Any:
        graphs.append(graph)
        return lambda values: list(graph(*values))

    weight = torch.randn(4, 3)
    for _ in range(3):
        leaf = weight.clone().requires_grad_()
        with dovetail.compiled_autograd(backend=backend) as backwards:
            (torch.ones(2, 4) @ leaf).tanh().sum().backward()
        assert (backwards.runs, len(backwards.captures)) == (1, 1)
    assert len(graphs) == 1


def test_decisions_are_events() -> None:
    x = torch.randn(3, requires_grad=True)
    with warnings.catch_warnings(), dovetail.compiled_autograd(backend="aten") as backwards:
        warnings.simplefilter("ignore")
        x.sin().sinh().sum().backward()
        torch.autograd.grad(x.sin(), [x], grad_outputs=[torch.eye(3)], is_grads_batched=True)
    assert [event.name for event in backwards.events.events] == ["prepare backward", "left to eager"]


def test_unknown_options_are_refused() -> None:
    with pytest.raises(OptionError, match="backend"):
        dovetail.compiled_autograd(backnd="aten")
    with pytest.raises(OptionError, match="compiled_autograd"):
        dovetail.compile(lambda x: x, compiled_autograd="yes")


def test_outside_of_the_block_all_is_as_before() -> None:
    before = torch.autograd._engine_run_backward
    x = torch.randn(3, requires_grad=True)
    with dovetail.compiled_autograd(backend="aten") as backwards:
        x.sin().sum().backward()
    x.sin().sum().backward()
    assert backwards.runs == 1
    assert torch.autograd._engine_run_backward is before


def test_nested_blocks_capture_in_the_inner_one() -> None:
    x = torch.randn(3, requires_grad=True)
    with dovetail.compiled_autograd(backend="aten") as outer:
        with dovetail.compiled_autograd(backend="aten") as inner:
            x.sin().sum().backward()
        x.sin().sum().backward()
    assert (outer.runs, inner.runs) == (1, 1)


def test_torchs_own_compiled_autograd_works_before_and_after() -> None:
    from torch._dynamo import compiled_autograd as torchs

    def gradient() -> torch.Tensor:
        x = torch.arange(4.0).requires_grad_()
        (x.sin() * x).sum().backward()
        return x.grad

    expected = gradient()
    seen: list[Any] = []
    private_engine.prepare_engine_hook()
    private_engine.clear_engine_cache()
    for _ in range(2):
        with torchs._enable(lambda graph: seen.append(graph) or graph):
            assert_same(expected, gradient())
        with dovetail.compiled_autograd(backend="aten") as backwards:
            assert_same(expected, gradient())
        assert backwards.runs == 1
        assert len(backwards.captures) == 1
    assert seen


def test_nothing_of_a_backward_is_kept_alive() -> None:
    with dovetail.compiled_autograd(backend="aten"):
        for _ in range(2):
            x = torch.randn(3, requires_grad=True)
            h = x.sin()
            saved = weakref.ref(h)
            (h * h).sum().backward()
            gone = weakref.ref(x)
            del x, h
        gc.collect()
        assert saved() is None
        assert gone() is None


def test_no_node_of_a_backward_is_kept_alive() -> None:
    with dovetail.compiled_autograd(backend="aten"):
        x = torch.randn(3, requires_grad=True)
        node = torch.autograd.graph.get_gradient_edge(x).node
        node.metadata["kept"] = mark = torch.nn.Identity()
        gone = weakref.ref(mark)
        loss = x.sin().atanh().cosh().sum()
        loss.backward(retain_graph=True)
        del node, mark, loss, x
        gc.collect()
        assert gone() is None


def test_a_gradient_that_nobody_else_holds_becomes_the_leafs_own() -> None:
    kept = []
    x = torch.randn(3, requires_grad=True)
    y = torch.randn(3, requires_grad=True)
    y.register_hook(kept.append)
    with warnings.catch_warnings(), dovetail.compiled_autograd(backend="aten"):
        warnings.simplefilter("ignore")
        (x.sin() * y.cos()).sum().backward()
    y.grad.add_(1)
    assert torch.equal(kept[0] + 1, y.grad)


class Network(nn.Module):
    """A module whose forward breaks in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.LayerNorm(6)
        self.second = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.norm(self.first(x)).tanh()
        print(end="")
        return self.second(h), h


def gradients(model: nn.Module, forward: Any, size: int, use: str) -> list[Any]:
    """What training on one batch leaves in ``.grad``."""
    torch.manual_seed(size)
    model.zero_grad()
    y, h = forward(torch.randn(size, 4))
    {"both": y.square().sum() + h.sum(), "first": y.square().sum(), "second": h.exp().sum()}[use].backward()
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("backend", ["aten", "eager"])
@pytest.mark.parametrize("use", ["both", "first", "second"])
@pytest.mark.sampled(6)
def test_compiled_forwards_with_breaks(backend: str, use: str) -> None:
    torch.manual_seed(0)
    model = Network()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = dovetail.compile(model, backend=backend)
        with dovetail.compiled_autograd(backend="aten") as backwards:
            for size in (3, 5, 3, 7):
                assert_same(gradients(model, model, size, use), gradients(model, compiled, size, use))
    # The eager model's backwards run in the block too.
    assert backwards.fallbacks == []
    assert backwards.runs == 8
    if backend == "aten":
        assert "compiled_prologue" in str(backwards)


def test_a_compiled_functions_graph_is_a_part_of_the_backward() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    compiled = dovetail.compile(model, backend="aten")
    with warnings.catch_warnings(), dovetail.compiled_autograd(backend="aten") as backwards:
        warnings.simplefilter("error")
        compiled(torch.randn(3, 4)).sum().backward()
    text = str(backwards)
    assert "compiled_prologue" in text
    assert "tanh_backward" in text
    assert "call_backward" not in text


def test_hooks_between_compiled_functions() -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 2)

    def run(left: Any, right: Any, notes: list[Any]) -> list[Any]:
        torch.manual_seed(0)
        first.zero_grad(), second.zero_grad()
        h = left(torch.randn(3, 4))
        h.register_hook(lambda gradient: notes.append(gradient.clone()) or gradient * 2)
        first.weight.register_hook(lambda gradient: gradient + 1)
        right(h.relu()).sum().backward()
        return [p.grad.clone() for p in (*first.parameters(), *second.parameters())]

    expected_notes: list[Any] = []
    notes: list[Any] = []
    expected = run(first, second, expected_notes)
    first.weight._backward_hooks.clear()
    left, right = dovetail.compile(first, backend="aten"), dovetail.compile(second, backend="aten")
    with warnings.catch_warnings(), dovetail.compiled_autograd(backend="aten"):
        warnings.simplefilter("ignore")
        found = run(left, right, notes)
    assert_same(expected, found)
    assert_same(expected_notes, notes)


def test_the_option_of_compile() -> None:
    def train(model: nn.Module, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        print(end="")
        loss.backward()
        optimizer.step()
        return loss.detach()

    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        step = dovetail.compile(train, backend="aten", compiled_autograd=True) if compiled else train
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            losses = [step(model, optimizer, torch.randn(size, 4)) for size in (3, 3, 5, 2)]
        results.append([*losses, *(p.detach() for p in model.parameters())])
    assert_same(*results)


def test_a_hook_that_is_made_anew_for_each_step_compiles_once() -> None:
    x, counted = torch.randn(3, requires_grad=True), []
    session = BackwardSession(lambda function: dovetail.compile(function, backend="aten"))
    for step in range(4):
        with open_session(session):
            h = x.sin()
            h.register_hook(lambda gradient, by=2.0 if step < 3 else 4.0: gradient * by)  # type: ignore[misc]
            (h * h).sum().backward()
        counted.append([len(function.entries) for runner in session.compiled.values() for function in runner.functions])
    # The first step has no .grad to add to.
    assert counted[1] == counted[2] == [1, 1]
    expected = x.detach().clone().requires_grad_()
    (expected.sin() ** 2).sum().backward()
    torch.testing.assert_close(x.grad, expected.grad * (2 + 2 + 2 + 4))


def test_inductor_agrees_up_to_rounding() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.GELU(), nn.Linear(6, 2))
    x = torch.randn(5, 4)
    model(x).square().sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with dovetail.compiled_autograd(backend="inductor") as backwards:
        model(x).square().sum().backward()
    assert backwards.fallbacks == []
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
        assert parameter.grad.stride() == gradient.stride()


def test_a_capture_that_stops_half_way_refuses_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    from dovetail.backward_capture.builder import GraphBuilder

    def fail(*_: Any) -> Any:
        raise RuntimeError("no")

    x = torch.randn(3, 1, 4, requires_grad=True)
    monkeypatch.setattr(GraphBuilder, "apply_functional", fail)
    with pytest.raises(CaptureError, match="run the forward again"), open_session(BackwardSession()):
        # An autograd graph that no other test has: the engine keeps what it has captured.
        x.sin().cos().tan().sinh().cosh().sum().backward()
    monkeypatch.undo()
    with open_session(BackwardSession()) as session:
        x.sin().cos().tan().sinh().cosh().sum().backward()
    assert session.runs == 1
    assert torch.equal(x.grad, torch.autograd.grad(x.sin().cos().tan().sinh().cosh().sum(), [x])[0])


def test_gradients_of_tensor_subclasses_are_of_their_class() -> None:
    def run() -> Any:
        torch.manual_seed(0)
        parameter = nn.Parameter(TwoTensor(torch.randn(3, 3), torch.randn(3, 3)))
        (torch.randn(2, 3) @ parameter).sin().sum().backward()
        return parameter.grad

    expected = run()
    with warnings.catch_warnings(), dovetail.compiled_autograd(backend="aten") as backwards:
        warnings.simplefilter("ignore")
        found = run()
    assert backwards.runs == 1
    assert type(found) is type(expected) is TwoTensor
    assert torch.equal(expected.a, found.a)
    assert torch.equal(expected.b, found.b)


def test_subclasses_at_the_edge_of_a_compiled_function_are_in_the_graph() -> None:
    def function(p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (x @ p).sin() * p.sum()

    def run(forward: Any) -> list[Any]:
        torch.manual_seed(0)
        p = nn.Parameter(TwoTensor(torch.randn(3, 3), torch.randn(3, 3)))
        q = nn.Parameter(torch.randn(3, 3))
        (forward(p, torch.randn(2, 3)).cos() @ q).sum().backward()
        return [p.grad, q.grad]

    expected = run(function)
    compiled = dovetail.compile(function, backend="aten")
    backwards = BackwardSession(lambda part: dovetail.compile(part, backend="aten"))
    with warnings.catch_warnings(), open_session(backwards):
        warnings.simplefilter("error")
        for _ in range(3):
            assert_same(expected, run(compiled))
    text = str(backwards)
    assert "WrappedBackward" in text
    assert "InnerTensorBackward" in text
    # Neither building a subclass nor taking it apart leads out of the graph, and what is built anew is no other one.
    (runner,) = backwards.compiled.values()
    functions = runner.functions
    assert [len(function.entries) for function in functions] == [1] * len(functions)
    assert not any(event.name == "graph break" for function in functions for event in function.events.events)


def test_anomaly_mode_names_the_operator() -> None:
    x = torch.zeros(3, requires_grad=True)
    with (
        warnings.catch_warnings(),
        dovetail.compiled_autograd(backend="aten") as backwards,
        torch.autograd.detect_anomaly(),
        pytest.raises(RuntimeError, match="SqrtBackward0"),
    ):
        warnings.simplefilter("ignore")
        (x.sqrt() * 0).sum().backward()
    assert backwards.runs == 0
    assert "anomaly mode" in backwards.fallbacks[0]


# --- fullgraph --------------------------------------------------------------------------------------------------------


class Printing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        print(end="")
        return gradient * 2


def test_fullgraph_refuses_a_break_in_a_backward() -> None:
    x = torch.ones(3, requires_grad=True)
    with dovetail.compiled_autograd(backend="aten", fullgraph=True), pytest.raises(GraphBreakError, match="print"):
        Printing.apply(x).sum().backward()
    with dovetail.compiled_autograd(backend="aten", fullgraph=True) as backwards:
        x.sin().sum().backward()
        assert backwards.runs == 1
        with torch.autograd.set_detect_anomaly(True), pytest.raises(GraphBreakError, match="anomaly"):
            x.sin().sum().backward()
    # The same options without it share nothing with these.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GraphBreakWarning)
        with dovetail.compiled_autograd(backend="aten"):
            Printing.apply(x).sum().backward()


# --- calls that wait for the end of a backward ----------------------------------------------------------------------------


class Queuing(torch.autograd.Function):
    log: list[str] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: Queuing.log.append("end"))
        Queuing.log.append("in it")
        return gradient * 2


def _hooked(x: torch.Tensor) -> torch.Tensor:
    engine: Any = torch.autograd.Variable._execution_engine
    y = x * 2
    y.register_hook(lambda gradient: engine.queue_callback(lambda: Queuing.log.append("of a hook")))
    return y


@pytest.mark.parametrize("function", [Queuing.apply, _hooked], ids=["function", "hook"])
@pytest.mark.parametrize("way", ["block", "forward", "step"])
def test_callbacks_at_the_end_of_a_backward(function: Any, way: str) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        function(x).sum().backward()
        assert x.grad is not None
        return x.grad.clone()

    def in_block(x: torch.Tensor) -> torch.Tensor:
        with dovetail.compiled_autograd(backend="aten"):
            return step(x)

    compiled = dovetail.compile(function, backend="aten")

    def forward_compiled(x: torch.Tensor) -> torch.Tensor:
        compiled(x).sum().backward()
        assert x.grad is not None
        return x.grad.clone()

    run = {"block": in_block, "forward": forward_compiled, "step": dovetail.compile(step, backend="aten")}[way]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):
            seen = []
            for each in (step, run):
                Queuing.log.clear()
                seen.append((each(torch.ones(3, requires_grad=True)).tolist(), list(Queuing.log)))
            assert seen[0] == seen[1]


class Exponential(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * ctx.saved_tensors[0].exp()


def test_what_a_compiled_forward_has_read_is_checked_outside_of_the_segment() -> None:
    compiled = dovetail.compile(lambda x: Exponential.apply(x * 0.5) * x, backend="aten")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GraphBreakWarning)
        for size in (2, 3, 4, 2):
            x, y = (torch.full((size, 3), 0.5, requires_grad=True) for _ in range(2))
            (Exponential.apply(x * 0.5) * x).sum().backward()
            with dovetail.compiled_autograd(backend="aten"):
                compiled(y).sum().backward()
            torch.testing.assert_close(x.grad, y.grad)


@pytest.mark.parametrize("stage", ["session.cut", "session.SegmentRunner", "session.forward_lines"])
def test_a_backward_whose_segments_cannot_be_made_runs_as_it_was_captured(
    stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object) -> None:
        raise AssertionError("a fault")

    def train(block: contextlib.AbstractContextManager[object]) -> list[object]:
        weight = torch.ones(3, requires_grad=True)
        seen: list[object] = []
        weight.register_hook(lambda gradient: gradient * 2)
        weight.register_post_accumulate_grad_hook(lambda leaf: seen.append(leaf.grad.tolist()))
        with block:
            for number in range(2):
                (weight.sin() * weight * number).sum().backward()
        return [weight.grad, seen]

    expected = train(contextlib.nullcontext())
    monkeypatch.setattr(f"dovetail.backward_capture.{stage}", broken)
    with pytest.warns(EagerFallbackWarning, match="a fault"):
        found = train(dovetail.compiled_autograd(backend="aten"))
    torch.testing.assert_close(found[0], expected[0])
    assert found[1] == expected[1]
