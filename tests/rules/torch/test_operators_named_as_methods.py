"""Operators of libraries with the names of tensors' methods and of torch's functions: a name alone is no rule."""

from __future__ import annotations

import pytest
import torch

import dovetail
from tests.differential import check_calls, check_entries, leaf, same

NAMES = (
    "backward",
    "tolist",
    "numpy",
    "load",
    "cov",
    "storage",
    "unsafe_split",
    "retain_grad",
    "as_subclass",
    "seed",
    "stride",
)
LIBRARY = torch.library.Library("dovetail_names", "FRAGMENT")
for _name in NAMES:
    LIBRARY.define(f"{_name}(Tensor x, Tensor y) -> Tensor")
    LIBRARY.impl(_name, lambda x, y: x * y, "CompositeImplicitAutograd")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", NAMES)
def test_an_operator_with_the_name_of_a_method_stays_in_the_graph(name: str) -> None:
    packet = getattr(torch.ops.dovetail_names, name)
    for operator in (packet, packet.default):
        calls = [(leaf(3), leaf(3)), (leaf(4), leaf(4))]
        assert check_entries(lambda x, y, operator=operator: operator(x, y).sin(), calls) == 2

        def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return operator(x, y).sin()

        x, y = leaf(3), leaf(3)
        same(function(x, y), dovetail.compile(function, backend="aten", fullgraph=True)(x, y))


@pytest.mark.usefixtures("quiet")
def test_a_higher_order_operator_with_the_name_of_a_method() -> None:
    library = pytest.importorskip("torch._higher_order_ops.register_hook", reason="torch 2.13 and newer")
    register_hook_op = library.register_hook_op
    check_calls(lambda x: register_hook_op(x, lambda gradient: gradient * 2) * 3, [(leaf(3),)], fullgraph=False)
    check_calls(lambda x: register_hook_op(x * 2, lambda gradient: gradient * 2).sin(), [(leaf(3),)])


@pytest.mark.usefixtures("quiet")
def test_operators_of_torch_itself_have_the_rules_of_methods() -> None:
    check_calls(lambda x: torch.ops.aten.item(x.detach().sum()) * x, [(leaf(3),)], fullgraph=False)
    check_calls(lambda x: torch.ops.aten.unsafe_split(x * 2, 2), [(leaf(4),)], fullgraph=False)
