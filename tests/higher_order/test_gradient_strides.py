"""Gradients with gaps in memory: which they are, and the node that gives a sum of parts their strides."""

from __future__ import annotations

import torch

from dovetail.higher_order.gradient_strides import gap_strides, keep_common, keep_gaps


def test_gaps_are_found_and_overlaps_are_none() -> None:
    assert gap_strides([torch.ones(2), torch.ones(4)[::2], torch.ones(1).expand(2), None]) == {1: (2,)}


def test_a_gradient_gets_the_strides() -> None:
    x = torch.ones(2, requires_grad=True)
    inputs = [x]
    keep_gaps(inputs, {0: (2,)})
    assert torch.autograd.grad(inputs[0].sum(), x)[0].stride() == (2,)


def test_strides_that_a_second_derivative_has_not_are_forgotten() -> None:
    strides = {0: (2,), 1: (2,)}
    keep_common(strides, [0, 1], [torch.ones(4)[::2], torch.ones(2)])
    assert strides == {0: (2,)}
