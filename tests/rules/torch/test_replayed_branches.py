"""Branches of torch's own Python on the values of small inputs, where a break is an error."""

from __future__ import annotations

import builtins
import types

import pytest
import torch

import dovetail


def in_torch(function: types.FunctionType) -> types.FunctionType:
    """The function as if it were one of torch's layers."""
    scope = {"__name__": "torch.nn.modules.made_up", "__builtins__": builtins, "torch": torch}
    return types.FunctionType(function.__code__, scope, function.__name__, None, function.__closure__)


@in_torch
def causal(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    if bool((mask == torch.ones_like(mask).tril()).all()):
        return x.tril() * 2
    return x * mask


def test_each_answer_has_its_own_entry() -> None:
    compiled = dovetail.compile(causal, backend="aten", fullgraph=True)
    triangle = torch.ones(3, 3).tril()
    for mask in (triangle, triangle.clone(), torch.ones(3, 3), triangle, torch.full((3, 3), 0.5)):
        x = torch.randn(3, 3, requires_grad=True)
        expected, found = causal(x, mask), compiled(x, mask)
        assert torch.equal(expected, found)
        assert torch.equal(*(torch.autograd.grad(value.sum(), x)[0] for value in (expected, found)))
    assert len(compiled.entries) == 2


def test_the_last_bit_counts() -> None:
    @in_torch
    def sign(x, flag):
        return x + 1 if torch.signbit(flag).any() else x - 1

    compiled = dovetail.compile(sign, backend="aten", fullgraph=True)
    x = torch.ones(2)
    for flag in (torch.tensor(0.0), torch.tensor(-0.0), torch.tensor(float("nan"))):
        assert torch.equal(compiled(x, flag), sign(x, flag))
        assert torch.equal(compiled(x, flag), sign(x, flag))


def test_a_value_written_before_the_branch() -> None:
    @in_torch
    def write(x, flag):
        flag.add_(1)
        return x * 2 if flag.sum() > 2 else x * 3

    compiled = dovetail.compile(write, backend="aten", fullgraph=True)
    for start in (0.0, 1.0, 5.0):
        one, other = torch.full((2,), start), torch.full((2,), start)
        assert torch.equal(write(torch.ones(2), one), compiled(torch.ones(2), other))
        assert torch.equal(one, other)


@pytest.mark.parametrize("what", ["large", "gradient", "random", "the user's"])
def test_other_branches_stay_refused(what: str) -> None:
    def branch(x, flag):
        if what == "random":
            flag = flag + torch.rand(2)
        return x * 2 if flag.sum() > 0 else x

    flag = torch.ones(1000) if what == "large" else torch.ones(2, requires_grad=what == "gradient")
    compiled = dovetail.compile(branch if what == "the user's" else in_torch(branch), backend="aten", fullgraph=True)
    with pytest.raises(dovetail.errors.GraphBreakError, match="branch depends on the values"):
        compiled(torch.ones(2), flag)


@pytest.mark.parametrize("is_causal", [True, False])
def test_a_layer_that_asks_whether_its_mask_is_causal(is_causal: bool) -> None:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    compiled = dovetail.compile(encoder, backend="aten", fullgraph=True)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(3) if is_causal else torch.zeros(3, 3)
    x = torch.randn(2, 3, 4, requires_grad=True)
    for _ in range(2):
        one, other = encoder(x, mask=mask), compiled(x, mask=mask)
        assert torch.equal(one, other)
        assert torch.equal(*(torch.autograd.grad(value.sum(), x)[0] for value in (one, other)))
