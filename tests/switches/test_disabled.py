"""``disable``, torch's and our own, and functions of torch's compiler that a program calls."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dovetail
from dovetail.errors import EagerFallbackWarning, GraphBreakError, GraphBreakWarning, NotCallableError
from dovetail.switches.stances import stance_in_force
from tests.differential import check

DISABLERS = pytest.mark.parametrize("disable", (torch.compiler.disable, dovetail.disable), ids=("torch", "ours"))
SAYS = pytest.mark.filterwarnings("ignore::dovetail.errors.EagerFallbackWarning")
pytestmark = SAYS


def graphs(compiled: Any) -> int:
    return dovetail.events_of(compiled).count("compile forward")


def noted(disable: Any, seen: list[Any]) -> Any:
    def plain(values: Tensor) -> Tensor:
        seen.append(type(values))
        return values * float(values.sum())

    return disable(plain)


@DISABLERS
def test_nothing_inside_is_traced(disable: Any) -> None:
    seen: list[Any] = []
    inner = noted(disable, seen)
    compiled = dovetail.compile(lambda values: inner(values + 1) + 1, backend="aten")
    with pytest.warns(GraphBreakWarning, match="plain is disabled"):
        compiled(torch.ones(2))
    for _ in range(2):
        assert compiled(torch.ones(2)).tolist() == [9, 9]
    assert seen == [Tensor] * 3
    assert graphs(compiled) == 2 and len(compiled.continuations()) == 1
    with pytest.raises(GraphBreakError, match="plain is disabled"):
        dovetail.compile(lambda values: inner(values), backend="aten", fullgraph=True)(torch.ones(2))


@DISABLERS
def test_the_reason_is_said(disable: Any) -> None:
    @disable(reason="it talks to a server")
    def send(values: Tensor) -> Tensor:
        return values * 2

    with pytest.raises(GraphBreakError, match="send is disabled: it talks to a server"):
        dovetail.compile(lambda values: send(values) + 1, backend="aten", fullgraph=True)(torch.ones(2))


@DISABLERS
def test_a_method_and_a_wrapped_function(disable: Any) -> None:
    class Model(nn.Module):
        @disable
        def part(self, values: Tensor) -> Tensor:
            return values * 3

        def forward(self, values: Tensor) -> Tensor:
            return self.part(values + 1) + 1

    with pytest.warns(GraphBreakWarning, match="part is disabled"):
        assert dovetail.compile(Model(), backend="aten")(torch.ones(2)).tolist() == [7, 7]

    inner = disable(lambda values: values * 2)

    @functools.wraps(inner)
    def outer(values: Tensor) -> Tensor:
        return inner(values + 1)

    # A decorator around it copies the marks: what it does beside the call is traced.
    compiled = dovetail.compile(lambda values: outer(values) + 1, backend="aten")
    with pytest.warns(GraphBreakWarning, match="<lambda> is disabled"):
        assert compiled(torch.ones(2)).tolist() == [5, 5]
    assert graphs(compiled) == 2


@DISABLERS
@pytest.mark.parametrize("whole", (False, True))
def test_a_module(disable: Any, whole: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(2, 2)
    model = disable(layer) if whole else nn.Sequential(disable(layer), nn.Tanh())
    compiled = dovetail.compile(model, backend="aten")
    x = torch.ones(1, 2)
    expected = layer(x) if whole else layer(x).tanh()
    with pytest.warns(EagerFallbackWarning, match="Linear is disabled"):
        assert torch.equal(compiled(x), expected)
    assert torch.equal(compiled(x), expected)
    assert sorted(layer.state_dict()) == ["bias", "weight"]


def test_without_recursion_and_made_by_torch_itself() -> None:
    inner = torch.compiler.disable(lambda values: values * 2, recursive=False)
    compiled = dovetail.compile(lambda values: inner(values) + 1, backend="aten")
    with pytest.warns(GraphBreakWarning, match="is disabled"):
        compiled(torch.ones(2))
    # Torch disables some of its own functions for its own compiler only.
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    @dovetail.compile(backend="aten", fullgraph=True)
    def step(values: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = torch.utils.checkpoint.checkpoint(model, values, use_reentrant=False).sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    step(torch.ones(3, 2))


def test_a_block_and_what_is_called_inside() -> None:
    inner = dovetail.compile(lambda values: values * 2, backend="aten")

    @dovetail.disable
    def outer(values: Tensor) -> Tensor:
        assert stance_in_force() == "force_eager"
        return inner(values)

    assert outer(torch.ones(1)).item() == 2
    with dovetail.disable():
        inner(torch.ones(1))
    with pytest.raises(ZeroDivisionError), dovetail.disable(reason="why not"):
        raise ZeroDivisionError
    assert not inner.entries and stance_in_force() == "default"
    with pytest.raises(NotCallableError):
        dovetail.disable(3)  # type: ignore[type-var]


@pytest.mark.parametrize("switch", (torch._dynamo.graph_break, torch.compiler.cudagraph_mark_step_begin))
def test_calls_of_torchs_compiler_break_the_graph(switch: Any) -> None:
    def program(values: Tensor) -> Tensor:
        values = values * 2
        switch()
        return values + 1

    compiled = dovetail.compile(program, backend="aten")
    with pytest.warns(GraphBreakWarning, match=f"{switch.__name__} is called"):
        assert compiled(torch.ones(2)).tolist() == [3, 3]
    assert graphs(compiled) == 2


def test_settings_of_torch_are_left_as_they_are() -> None:
    def program(values: Tensor) -> Tensor:
        with torch._dynamo.config.patch(suppress_errors=True):
            return values * (2 if torch._dynamo.config.suppress_errors else 3)

    compiled = dovetail.compile(program, backend="aten")
    for _ in range(2):
        assert compiled(torch.ones(1)).item() == 2
        assert not torch._dynamo.config.suppress_errors


def test_allowed_in_graph_is_looked_into() -> None:
    scale = [2.0]

    @torch.compiler.allow_in_graph
    def inner(values: Tensor) -> Tensor:
        return values * scale[0]

    compiled = dovetail.compile(lambda values: inner(values) + 1, backend="aten", fullgraph=True)
    for scale[0] in (2.0, 3.0):
        assert compiled(torch.ones(1)).item() == scale[0] + 1


class _Scaled(torch.nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) * self.factor


def test_a_module_is_made_inside_after_torch_compile_was_used_in_the_process() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return _Scaled(2.0)(x)

    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    assert torch.nn.Module.__init__.__name__ == "patched_init"
    check(program, torch.randn(3), fullgraph=True, backend="aten")
