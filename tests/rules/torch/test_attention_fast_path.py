"""Attention in evaluation, where eager takes a fused kernel or packs sequences."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dovetail
from dovetail.errors import GraphBreakError
from tests.differential import same

VARIANTS: dict[str, dict[str, Any]] = {
    "weights": {},
    "no weights": {"need_weights": False},
    "weights of each head": {"average_attn_weights": False},
}


def padding(rows: int) -> Tensor:
    mask = torch.zeros(rows, 5, dtype=torch.bool)
    mask[:, 3:] = True
    return mask


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("pads", "backend"), ((False, "aten"), (True, "aten"), (False, "eager")))
@pytest.mark.sampled(9)
def test_attention(variant: str, pads: bool, backend: str) -> None:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(8, 4, batch_first=True).eval()
    compiled = dovetail.compile(copy.deepcopy(module), backend=backend, fullgraph=True)
    for rows, mode in ((2, torch.no_grad), (3, torch.no_grad), (2, torch.enable_grad), (4, torch.no_grad)):
        values, options = torch.randn(rows, 5, 8), dict(VARIANTS[variant])
        options |= {"key_padding_mask": padding(rows)} if pads else {}
        with mode():
            expected, actual = module(values, values, values, **options), compiled(values, values, values, **options)
        assert (expected[1] is None) == (actual[1] is None)
        for left, right in zip(expected, actual, strict=True):
            if left is not None:
                assert torch.equal(left, right)
                assert left.stride() == right.stride()


@pytest.mark.parametrize("frozen", (False, True))
@pytest.mark.sampled(2)
@pytest.mark.slow
def test_an_encoder_that_packs_padded_sequences(frozen: bool) -> None:
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0), 2)
    encoder.eval().requires_grad_(not frozen)
    compiled = dovetail.compile(copy.deepcopy(encoder), backend="aten")
    for rows, mode in ((2, torch.no_grad), (3, torch.no_grad), (2, torch.enable_grad), (4, torch.no_grad)):
        values, mask = torch.randn(rows, 5, 8), padding(rows)
        with mode():
            expected, actual = encoder(values, src_key_padding_mask=mask), compiled(values, src_key_padding_mask=mask)
        same(expected, actual)
        assert not expected[:, 3:].any() or (mode is torch.enable_grad and not frozen)
    encoder.train()
    compiled.train()
    values = torch.randn(2, 5, 8)
    same(encoder(values, src_key_padding_mask=padding(2)), compiled(values, src_key_padding_mask=padding(2)))
    strict = dovetail.compile(copy.deepcopy(encoder).eval(), backend="aten", fullgraph=True)
    with torch.no_grad(), pytest.raises(GraphBreakError, match="packs padded sequences"):
        strict(values, src_key_padding_mask=padding(2))


@pytest.mark.parametrize("settings", [{}, {"need_weights": False}])
def test_the_kernel_called_by_its_name(settings: dict[str, bool]) -> None:
    torch.manual_seed(0)
    weights = torch.randn(12, 4), torch.randn(12), torch.randn(4, 4), torch.randn(4)

    def program(x: Tensor) -> Any:
        return torch._native_multi_head_attention(x, x, x, 4, 2, *weights, **settings)

    compiled = dovetail.compile(program, backend="aten", fullgraph=True)
    with torch.no_grad():
        same(program(torch.ones(2, 3, 4)), compiled(torch.ones(2, 3, 4)))
