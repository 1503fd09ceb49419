"""Functions that return the tensor they are given, a view of it or a copy: gradients, writes and identity are eager's."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import dovetail
from dovetail.errors import EagerFallbackWarning
from tests.differential import same

F64 = torch.float64
MADE: dict[str, Callable[[Tensor], Tensor]] = {
    "as_tensor": lambda x: torch.as_tensor(x),
    "as_tensor by keyword": lambda x: torch.as_tensor(data=x, device="cpu"),
    "as_tensor, its own dtype": lambda x: torch.as_tensor(x, dtype=x.dtype),
    "as_tensor, another dtype": lambda x: torch.as_tensor(x, dtype=F64),
    "asarray": lambda x: torch.asarray(x),
    "asarray, copied": lambda x: torch.asarray(x, copy=True),
    "asarray, another dtype": lambda x: torch.asarray(x, dtype=F64),
    "asarray with gradient": lambda x: torch.asarray(x, requires_grad=True),
    "tensor": lambda x: torch.tensor(x),
    "new_tensor": lambda x: x.new_tensor(x),
    "to": lambda x: x.to(x.dtype),
    "to a copy": lambda x: x.to(x.dtype, copy=True),
    "type": lambda x: x.type(x.dtype),
    "type_as": lambda x: x.type_as(x),
    "float": lambda x: x.float(),
    "double": lambda x: x.double(),
    "contiguous": lambda x: x.contiguous(),
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
    "requires_grad_": lambda x: x.requires_grad_(x.requires_grad),
    "atleast_1d": lambda x: torch.atleast_1d(x),  # type: ignore[no-any-return, no-untyped-call, unused-ignore]
    "broadcast": lambda x: torch.broadcast_tensors(x)[0],  # type: ignore[no-any-return, no-untyped-call, unused-ignore]
    "ravel": lambda x: x.ravel(),
    "reshape": lambda x: x.reshape(x.shape),
    "expand_as": lambda x: x.expand_as(x),
    "real": lambda x: x.real,
    "conj": lambda x: x.conj(),
    "resolve_conj": lambda x: x.resolve_conj(),
    "dropout that drops nothing": lambda x: torch.nn.functional.dropout(x, 0.5, training=False),
    "identity": lambda x: torch.nn.Identity()(x),
    "chunk": lambda x: x.chunk(1)[0],
    "view of its dtype": lambda x: x.view(x.dtype),
    "cpu": lambda x: x.cpu(),
    "pin": lambda x: x.squeeze(),
}


def outcome(
    call: Callable[[Tensor, Callable[[Tensor], Tensor]], Any], make: Callable[[Tensor], Tensor], x: Tensor
) -> Any:
    """Everything about one call: what it returns or raises, which tensor that is, its gradient, and the argument afterwards."""
    try:
        result, flag = call(x, make)
    except RuntimeError as error:
        return str(error).split("\n", 1)[0]
    same = result is x
    shares = result.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    about = [
        flag,
        same,
        shares,
        type(result).__name__,
        result.dtype,
        result.requires_grad,
        result.detach().clone(),
        x.detach().clone(),
    ]
    if result.requires_grad:
        leaf = result if result.is_leaf else x
        result.double().square().sum().backward()
        about.append(None if leaf.grad is None else leaf.grad.clone())
    return about


def agree(first: Any, second: Any) -> bool:
    if isinstance(first, list):
        return isinstance(second, list) and len(first) == len(second) and all(map(agree, first, second))
    return torch.equal(first, second) if isinstance(first, Tensor) and isinstance(second, Tensor) else first == second


def returned(x: Tensor, make: Callable[[Tensor], Tensor]) -> Any:
    y = make(x)
    return y, y is x


def written(x: Tensor, make: Callable[[Tensor], Tensor]) -> Any:
    base = x * 2
    y = make(base)
    with torch.no_grad():
        y.add_(1)
    return base + y, y is base


def written_argument(x: Tensor, make: Callable[[Tensor], Tensor]) -> Any:
    y = make(x)
    with torch.no_grad():
        y.mul_(3)
    return x * 1, y is x


@pytest.mark.parametrize("call", [returned, written, written_argument], ids=lambda call: call.__name__)
@pytest.mark.parametrize("name", MADE)
@pytest.mark.sampled(8)
def test_it_is_the_tensor_that_eager_returns(name: str, call: Callable[..., Any]) -> None:
    make = MADE[name]
    kinds: list[Callable[[], Tensor]] = [
        lambda: torch.arange(6.0).requires_grad_(),
        lambda: torch.arange(6.0),
        lambda: torch.nn.Parameter(torch.arange(6.0)),
    ]
    for kind in kinds:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = outcome(call, make, kind())
            compiled = dovetail.compile(lambda x, make=make: call(x, make), backend="aten")
            for _ in range(2):
                found = outcome(lambda x, make, compiled=compiled: compiled(x), make, kind())
                assert agree(expected, found), (expected, found)


CLASSES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "is": lambda x, p: (x.__class__ is Tensor, p.__class__ is torch.nn.Parameter, (x + p).__class__ is Tensor),
    "equals": lambda x, p: (x.__class__ == p.__class__, x.__class__ != Tensor),
    "name": lambda x, p: (x.__class__.__name__, p.__class__.__qualname__, (x * p).__class__.__module__),
    "isinstance": lambda x, p: (
        isinstance(p, x.__class__),
        isinstance(x, p.__class__),
        issubclass(p.__class__, x.__class__),
    ),
    "getattr": lambda x, p: (x.__class__, p.__class__),
    "in a table": lambda x, p: {Tensor: "tensor", torch.nn.Parameter: "parameter"}[p.__class__],
    "text": lambda x, p: f"{x.__class__} {p.__class__!r}",
    "of a view": lambda x, p: (p[1:].__class__, p.data.__class__, p.detach().__class__),
    "of an attribute": lambda x, p: (x.shape.__class__, x.dtype.__class__, x.device.__class__),
}


@pytest.mark.parametrize("name", CLASSES)
def test_the_class_of_a_tensor_is_the_programs(name: str) -> None:
    program = CLASSES[name]
    x, p = torch.ones(3), torch.nn.Parameter(torch.ones(3))
    compiled = dovetail.compile(lambda x, p: (x + p, program(x, p)), backend="aten", fullgraph=True)
    for _ in range(2):
        assert compiled(x, p)[1] == program(x, p)
    assert compiled(p, x)[1] == program(p, x)


def test_another_class_is_another_answer() -> None:
    compiled = dovetail.compile(lambda x: (x * 2, x.__class__.__name__), backend="aten")
    assert compiled(torch.ones(2))[1] == "Tensor"
    assert compiled(torch.nn.Parameter(torch.ones(2)))[1] == "Parameter"
    assert compiled(torch.ones(2))[1] == "Tensor"


def test_an_out_of_another_type_is_eagers_error_or_result() -> None:
    def into(x: Tensor, out: Tensor) -> Tensor:
        return torch.add(x, x, out=out)

    def places(x: Tensor, out: Tensor) -> Tensor:
        return torch.gt(x, 1, out=torch.empty(3, dtype=torch.bool)) + torch.argmax(x, 0, out=out)

    x = torch.tensor([1.5, 2.5, 0.5])
    compiled = dovetail.compile(into, backend="aten")
    for out in (torch.empty(3), torch.empty(3, dtype=torch.int64), torch.empty(3, dtype=torch.float64)):
        if out.dtype == torch.int64:
            with pytest.raises(RuntimeError, match="can't be cast to the desired output type Long"):
                compiled(x, out)
        else:
            assert torch.equal(compiled(x, out), (x + x).to(out.dtype))
    whole = dovetail.compile(places, backend="aten", fullgraph=True)
    out = torch.empty((), dtype=torch.int64)
    assert torch.equal(whole(x, out), places(x, torch.empty((), dtype=torch.int64)))
    assert out.item() == 1


@pytest.mark.parametrize("backend", ["aten", "eager"])
@pytest.mark.parametrize(
    "make",
    [
        lambda x: torch.dequantize(x),
        lambda x: x.dequantize(),
        lambda x: torch.unsafe_chunk(x, 2)[1],
        lambda x: x.unsafe_split(2)[0],
        lambda x: torch.unsafe_split_with_sizes(x, [1, 3])[1],
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_write_to_the_same_memory_is_seen(make: Any, backend: str) -> None:
    def write(x: Tensor) -> Tensor:
        make(x).mul_(2)
        return x + 1

    x, y = torch.arange(4.0), torch.arange(4.0)
    same((write(x), x), (dovetail.compile(write, backend=backend)(y), y))


def test_an_address_is_that_of_the_programs_memory() -> None:
    # torch 2.11 has no ``const_data_ptr``.
    ask = getattr(torch.Tensor, "const_data_ptr", torch.Tensor.data_ptr)
    compiled = dovetail.compile(lambda x: (x + 1, ask(x), x.data_ptr()), backend="aten")
    with pytest.warns(EagerFallbackWarning):
        for x in (torch.ones(2), torch.ones(3)):
            assert compiled(x)[1:] == (x.data_ptr(), x.data_ptr())
