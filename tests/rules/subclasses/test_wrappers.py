"""Tensor subclasses that wrap other tensors: inputs, parameters, outputs and tangents, eager against compiled."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import dovetail
from tests.differential import Rule, same

Tensor = torch.Tensor


def two(*shape: int, requires_grad: bool = False) -> Any:
    return TwoTensor(torch.randn(*shape), torch.randn(*shape)).requires_grad_(requires_grad)


def nested(*shape: int, requires_grad: bool = False) -> Any:
    return TwoTensor(two(*shape), two(*shape)).requires_grad_(requires_grad)


def inner(value: Any) -> list[Tensor]:
    if isinstance(value, torch.Tensor) and hasattr(value, "__tensor_flatten__"):
        names, _ = value.__tensor_flatten__()
        return [item for name in names for item in inner(getattr(value, name)) if isinstance(item, torch.Tensor)]
    return [value] if isinstance(value, torch.Tensor) else []


#: A gradient that is brought into another form may get the other zero.
SIGNS = Rule(ignored=frozenset({"sign of zero"}))


def check(
    function: Callable[..., Any],
    make: Callable[[], tuple[Any, ...]],
    tangent: Callable[[Tensor], Tensor] = torch.ones_like,
    captured: bool = True,
) -> None:
    compiled = dovetail.compile(function, backend="aten", fullgraph=captured)
    for _ in range(2):
        seen = []
        for run in (function, compiled):
            torch.manual_seed(0)
            inputs = make()
            for value in inputs:
                if value.requires_grad and not value.is_leaf:
                    value.retain_grad()
            result = run(*inputs)
            results = result if isinstance(result, tuple) else (result,)
            roots = [value for value in results if value.grad_fn is not None]
            if roots:
                torch.autograd.backward(roots, [tangent(value.detach()) for value in roots])
            seen.append((result, [value.grad for value in inputs], inputs))
        same(seen[0][0], seen[1][0])
        same(seen[0][1], seen[1][1], "gradients", SIGNS)
        same(list(seen[0][2]), list(seen[1][2]), "inputs")
        for run_result, _, run_inputs in seen:
            results = run_result if isinstance(run_result, tuple) else (run_result,)
            assert [any(a is b for b in run_inputs) for a in results] == [
                any(a is b for b in seen[0][2])
                for a in (seen[0][0] if isinstance(seen[0][0], tuple) else (seen[0][0],))
            ]


@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("make", [two, nested])
def test_input_and_output(make: Any, requires_grad: bool) -> None:
    check(lambda x: (x * 2).sin(), lambda: (make(3, 4, requires_grad=requires_grad),))


@pytest.mark.parametrize("make", [two, nested])
def test_with_a_plain_tensor(make: Any) -> None:
    check(lambda x, y: (x @ y, (y * 2).sum(), x.sum(0)), lambda: (make(3, 4, requires_grad=True), torch.randn(4, 2)))


def test_gradient_of_a_plain_tensor_is_none() -> None:
    def make() -> tuple[Any, ...]:
        return two(3, 4), torch.randn(4, 2, requires_grad=True)

    check(lambda x, y: x @ y, make, captured=False)
    with pytest.raises(dovetail.errors.GraphBreakError, match="which is a plain tensor, is a TwoTensor"):
        dovetail.compile(lambda x, y: x @ y, backend="aten", fullgraph=True)(*make())


def test_nonleaf_input() -> None:
    check(lambda x: (x * 2).sin() + x, lambda: (two(3, 4, requires_grad=True) * 2,))


def test_two_of_them_and_gradients() -> None:
    check(lambda x, y: (x * y).sum(), lambda: (two(3, requires_grad=True), two(3, requires_grad=False)))


def test_same_one_twice() -> None:
    def make() -> tuple[Any, ...]:
        x = two(3, requires_grad=True)
        return x, x

    check(lambda x, y: x * y, make)


def test_returned_as_it_is() -> None:
    check(lambda x: (x, x * 2), lambda: (two(3, requires_grad=True),))


def test_plain_result() -> None:
    check(lambda x: x.a * 2 + x.b, lambda: (two(3),))


@pytest.mark.parametrize(
    "tangent",
    [
        lambda value: torch.ones_like(value).t().contiguous().t(),
        lambda value: TwoTensor(torch.ones(1).expand(3, 4), torch.zeros(1).expand(3, 4)),
        lambda value: torch.randn_like(value),
        lambda value: TwoTensor(torch.ones(4, 3).t(), torch.ones(4, 3).t()),
    ],
)
def test_tangents_of_another_form(tangent: Any) -> None:
    check(lambda x: (x * x).sin(), lambda: (two(3, 4, requires_grad=True),), tangent)


def test_plain_tangent_is_refused() -> None:
    x = two(3, requires_grad=True)
    y = dovetail.compile(lambda x: x * 2, backend="aten", fullgraph=True)(x)
    with pytest.raises(dovetail.errors.InputError, match="of another form"):
        y.backward(torch.ones(3))


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(two(4, 2))
        self.bias = torch.nn.Parameter(TwoTensor(torch.zeros(2), torch.zeros(2)))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight + self.bias).tanh()


def test_training_with_a_parameter() -> None:
    torch.manual_seed(0)
    eager, other = Net(), Net()
    with torch.no_grad():
        for left, right in zip(eager.parameters(), other.parameters(), strict=True):
            right.a.copy_(left.a)
            right.b.copy_(left.b)
    compiled = dovetail.compile(other, backend="aten", fullgraph=True)
    for _ in range(3):
        x = torch.randn(5, 4)
        for net, run in ((eager, eager), (other, compiled)):
            net.zero_grad()
            run(x).sum().backward()
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.sub_(parameter.grad * 0.1)
        for left, right in zip(eager.parameters(), other.parameters(), strict=True):
            same(left.detach(), right.detach())
            same(left.grad, right.grad)


def test_another_form_is_another_entry() -> None:
    compiled = dovetail.compile(lambda x: x * 2, backend="aten", fullgraph=True)
    for value in (two(3), torch.randn(3), nested(3), two(4), two(3, requires_grad=True), two(3)):
        same(value * 2, compiled(value))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.mul_(2),
        lambda x: x.view(-1),
        lambda x: x.t_(),
        lambda x: x.detach(),
        lambda x: x[0].mul_(2),
        lambda x: TwoTensor(x.a, x.b) * 2,
    ],
)
def test_what_is_left_to_eager(function: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dovetail.errors.EagerFallbackWarning)
        check(function, lambda: (two(3, 4),), captured=False)
    with pytest.raises(dovetail.errors.DovetailError):
        dovetail.compile(function, backend="aten", fullgraph=True)(two(3, 4))


def test_higher_order() -> None:
    x = two(3, requires_grad=True)
    y = dovetail.compile(lambda x: (x * x).sin(), backend="aten", fullgraph=True)(x)
    with pytest.raises(dovetail.errors.HigherOrderGradientError):
        torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)


class Unflattenable(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C._DisableTorchDispatch():
            return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.ones(2).as_subclass(Unflattenable), "is a tensor subclass, Unflattenable"),
        (torch.eye(3).to_mkldnn(), "has the layout torch._mkldnn"),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "is quantized or nested"),
    ],
)
def test_refused_by_name_or_left_to_eager(value: Any, text: str) -> None:
    with pytest.raises(dovetail.errors.GraphBreakError, match=text):
        dovetail.compile(lambda x: x * 2, backend="aten", fullgraph=True)(value)
    compiled = dovetail.compile(lambda x: x * 2, backend="aten")
    with pytest.warns(dovetail.errors.EagerFallbackWarning, match=text):
        found = compiled(value)
    assert type(found) is type(value * 2) and found.layout is value.layout
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))
    assert len([entry for entry in compiled.entries if entry.run is not None]) == 1


@pytest.fixture
def mesh() -> Iterator[Any]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    store = dist.HashStore()
    dist.init_process_group("gloo", rank=0, world_size=1, store=store)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_dtensor(mesh: Any) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    def make() -> tuple[Any, ...]:
        torch.manual_seed(0)
        x = distribute_tensor(torch.randn(4, 3), mesh, [Shard(0)]).requires_grad_()
        w = distribute_tensor(torch.randn(3, 2), mesh, [Replicate()]).requires_grad_()
        return x, w

    check(lambda x, w: (x @ w).relu() * 2, make)


def test_dtensor_parameters_and_placements(mesh: Any) -> None:
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    def make() -> tuple[Any, ...]:
        torch.manual_seed(0)
        x = distribute_tensor(torch.randn(4, 3), mesh, [Shard(0)])
        w = torch.nn.Parameter(distribute_tensor(torch.randn(3, 2), mesh, [Replicate()]))
        return x, w

    def function(x: Any, w: Any) -> Any:
        y = torch.nn.functional.linear(x, w.t()).redistribute(placements=[Replicate()])
        return y.sin(), y.to_local() * 2

    def tangent(value: Tensor) -> Tensor:
        if isinstance(value, DTensor):
            return distribute_tensor(torch.ones(4, 2), mesh, [Shard(1)])
        return torch.ones_like(value)

    check(function, make)
    check(function, make, tangent)


def test_graph_break_with_wrappers_alive() -> None:
    def function(x: Any) -> Any:
        y = x * 2
        print(end="")
        return y.sin() + x

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dovetail.errors.EagerFallbackWarning)
        check(function, lambda: (two(3, 4, requires_grad=True),), captured=False)


@pytest.mark.parametrize("make", [two, nested])
@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("which", ["input", "data", "result"])
def test_write_after_the_call_is_noticed(which: str, compiles: bool, make: Any) -> None:
    def function(x: Any, data: Any) -> Any:
        return (x * data * x).exp()

    x, data = make(3, requires_grad=True), make(3)
    y = (dovetail.compile(function, backend="aten", fullgraph=True) if compiles else function)(x, data)
    {"input": x.detach(), "data": data, "result": y.detach()}[which].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(torch.ones_like(y.detach()))


def test_leaf_made_inside_is_refused() -> None:
    with pytest.raises(dovetail.errors.GraphBreakError, match="with requires_grad is returned"):
        dovetail.compile(lambda x: (x * 2).requires_grad_(), backend="aten", fullgraph=True)(two(3))


def test_the_class_of_a_subclass_is_its_own() -> None:
    def function(a: Tensor, b: Tensor) -> Any:
        c = a.sin() * b
        kinds = [type(item) for item in (a, b, c)]
        asked = [isinstance(item, kind) for item in (a, b, c) for kind in (TwoTensor, Tensor, torch.nn.Parameter)]
        return c, kinds, asked

    a, b = two(3), torch.nn.Parameter(two(3))
    expected = function(a, b)
    found = dovetail.compile(function, backend="aten", fullgraph=True)(a, b)
    same(expected[0], found[0])
    assert expected[1:] == found[1:]
