"""What a session shows: the forward's lines, the segments of a backward and why they are what they are."""

from __future__ import annotations

import inspect
import warnings

import pytest
import torch
from torch import nn

import dovetail
from dovetail.backward_capture import BackwardSession, open_session
from dovetail.backward_capture.printer import forward_lines


def here(offset: int = 0) -> str:
    """The line that calls this, as a captured backward names it."""
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    return f"{__file__}:{frame.f_back.f_lineno + offset}"


def test_the_forwards_lines() -> None:
    layer = nn.Linear(3, 3)
    with dovetail.compiled_autograd(backend="aten", forward_lines=True) as backwards:
        h = layer(torch.randn(2, 3))
        first = here(-1)
        y = h.sin().sum()
        second = here(-1)
        y.backward()
    assert backwards.fallbacks == []
    assert not torch.is_anomaly_enabled()
    text = str(backwards)
    assert f"AddmmBackward0, {first} `h = layer(torch.randn(2, 3))`" in text
    assert f"SinBackward0, {second} `y = h.sin().sum()`" in text


def test_lines_are_those_of_the_blocks_own_forward() -> None:
    """The engine knows a shape of graph whoever made it, and the line is that of the program at hand."""
    x = torch.randn(3, requires_grad=True)
    texts, lines = [], []
    for at in range(2):
        with dovetail.compiled_autograd(backend="aten", forward_lines=True) as backwards:
            if at:
                x.sinh().tan().sum().backward()
                lines.append(here(-1))
            else:
                x.sinh().tan().sum().backward()
                lines.append(here(-1))
        texts.append(str(backwards))
    assert [lines[0] in texts[0], lines[1] in texts[0], lines[0] in texts[1], lines[1] in texts[1]] == [
        True,
        False,
        False,
        True,
    ]


def test_without_the_option_nothing_is_noted_and_a_block_in_anomaly_mode_is_watched() -> None:
    x = torch.zeros(3, requires_grad=True)
    with dovetail.compiled_autograd(backend="aten") as backwards:
        y = x.cosh().sum()
        assert forward_lines([y.grad_fn]) == {}
        y.backward()
    assert __file__ not in str(backwards)
    with (
        warnings.catch_warnings(),
        torch.autograd.set_detect_anomaly(True),
        dovetail.compiled_autograd(backend="aten", forward_lines=True),
        pytest.raises(RuntimeError, match="SqrtBackward0"),
    ):
        warnings.simplefilter("ignore")
        (x.sqrt() * 0).sum().backward()


def test_hooks_do_not_see_the_mode_that_notes_lines() -> None:
    seen = []
    x = torch.randn(3, requires_grad=True)
    with dovetail.compiled_autograd(backend="aten", forward_lines=True):
        h = x.sin()
        h.register_hook(lambda gradient: seen.append(torch.is_anomaly_enabled()))
        h.sum().backward()
        torch.autograd.grad(x.sin().sum(), [x], create_graph=True)[0].sum().backward()
    assert seen == [False]


def test_segments_and_why_they_are_eager() -> None:
    x = torch.randn(4, 3, requires_grad=True)
    session = BackwardSession(lambda segment: dovetail.compile(segment, backend="aten"))
    with open_session(session), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        h = x.sin()
        h.prod(1).sum().backward()
        torch.autograd.grad(x.sin(), [x], grad_outputs=[torch.ones(2, 4, 3)], is_grads_batched=True)
    text = session.explain()
    for words in (
        "1 captured backward(s), 1 run(s)",
        "left to eager: the gradients are batched by vmap",
        "segment 0: compiled, 1 entries, SumBackward0",
        "segment 1: in eager (torch computes it in another way while it is traced), ProdBackward1",
        "SinBackward0, then 1 leaves' gradients",
        "compile forward",
    ):
        assert words in text


def test_segments_that_are_not_compiled() -> None:
    x = torch.randn(3, requires_grad=True)
    with open_session(BackwardSession()) as session:
        x.sin().sum().backward()
    assert "segment 0: operator by operator, SumBackward0, SinBackward0" in session.explain()
