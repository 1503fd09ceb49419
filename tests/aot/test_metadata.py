"""Inputs whose size, strides or offset change in place: the call does to the real tensor what the program did."""

from __future__ import annotations

import pytest
import torch

import dovetail
from dovetail.errors import ArtefactError, GraphBreakError


def _plain() -> torch.Tensor:
    return torch.arange(6.0).reshape(2, 3)


def _tracked() -> torch.Tensor:
    return torch.arange(6.0, requires_grad=True).reshape(2, 3) * 1


def _facts(result, given):
    tensors = result if isinstance(result, tuple) else (result,)
    here = given.untyped_storage().data_ptr()
    return [
        (
            tuple(item.shape),
            item.stride(),
            item.storage_offset(),
            item.tolist(),
            item.requires_grad,
            item is given,
            item.untyped_storage().data_ptr() == here,
        )
        for item in (*tensors, given)
    ]


def _facts_of_all(result, given):
    parts = result if isinstance(result, tuple) else (result,)
    numbers = [item for item in parts if isinstance(item, int)]
    return numbers, _facts(tuple(item for item in parts if isinstance(item, torch.Tensor)), given)


def _view_from_before(x):
    view = x[0]
    x.t_()
    return view


def _view_from_after(x):
    x.t_()
    return x[0]


def _and_back(x):
    x.t_()
    y = x * 2
    x.t_()
    return y, x


def _with_a_write(x):
    x.transpose_(0, 1)
    x.add_(1)
    return x * 2


def _write_through_a_view(x):
    row = x[0]
    x.unsqueeze_(1)
    row.mul_(3)
    return row, x + 1


def _shrink(x):
    x.resize_(2, 2)
    return x


def _grow(x):
    x.resize_(3, 3)
    return x.view(-1)[:6] * 2


def _as_strided(x):
    x.as_strided_((2, 2), (1, 2), 1)
    return x.sum(), x


def _squeezes(x):
    x.unsqueeze_(0).unsqueeze_(-1).squeeze_()
    return x.square()


def _only_a_detached_alias(x):
    y = x.detach()
    y.t_()
    return y, x


@pytest.mark.parametrize("make", [_plain, _tracked])
@pytest.mark.parametrize(
    "function",
    [
        _view_from_before,
        _view_from_after,
        _and_back,
        _with_a_write,
        _as_strided,
        _squeezes,
        _only_a_detached_alias,
        lambda x: x.t_(),
    ],
)
def test_metadata_changes_as_in_eager(function, make) -> None:
    compiled = dovetail.compile(function, fullgraph=True, backend="aten")
    for _ in range(2):
        one, other = make(), make()
        expected, actual = function(one), compiled(other)
        assert _facts(expected, one) == _facts(actual, other)
        if one.requires_grad:
            for result, given in ((expected, one), (actual, other)):
                roots = [item for item in (*(result if isinstance(result, tuple) else (result,)), given)]
                sum(root.square().sum() for root in roots if root.requires_grad).backward()


@pytest.mark.parametrize("function", [_write_through_a_view, _shrink])
def test_metadata_changes_of_plain_tensors(function) -> None:
    compiled = dovetail.compile(function, fullgraph=True, backend="aten")
    for _ in range(2):
        one, other = _plain(), _plain()
        assert _facts(function(one), one) == _facts(compiled(other), other)


def _several_views(x):
    before = x[:, 0]
    x.transpose_(0, 1)
    return x.unsqueeze(0), x[:, 1], before, x.t(), x.shape[0]


@pytest.mark.parametrize("function", [_view_from_before, _view_from_after, _with_a_write, _several_views])
def test_views_have_the_changed_sizes_where_sizes_are_symbolic(function) -> None:
    """Symbols are sizes of inputs as they were given, also in what is made after the inputs have changed."""
    compiled = dovetail.compile(function, fullgraph=True, backend="aten", dynamic=True)
    for rows in (2, 3, 5):
        one, other = (torch.cat([_tracked()] * rows)[:rows] * 1 for _ in range(2))
        assert _facts_of_all(function(one), one) == _facts_of_all(compiled(other), other)


@pytest.mark.parametrize("fullgraph", [True, False])
def test_an_input_that_grows(fullgraph: bool) -> None:
    one, other = _plain(), _plain()
    alias = other.view(-1)
    expected, actual = _grow(one), dovetail.compile(_grow, fullgraph=fullgraph, backend="aten")(other)
    # The rest is memory that nobody has written to.
    assert torch.equal(expected, actual)
    assert one.shape == other.shape == (3, 3) and torch.equal(one[:2], other[:2])
    assert alias.untyped_storage()._cdata == other.untyped_storage()._cdata and other._version == one._version


def test_gradients_through_a_changed_input() -> None:
    def function(x, w):
        x.t_()
        return (x * w).sin()

    found = []
    for callee in (function, dovetail.compile(function, fullgraph=True, backend="aten")):
        base = torch.arange(6.0).reshape(2, 3).requires_grad_()
        w = torch.linspace(0, 1, 6).reshape(3, 2).requires_grad_()
        x = base * 1
        found.append(torch.autograd.grad(callee(x, w).sum() + x.prod(0).sum(), [base, w]))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_refused_and_left_as_it_was() -> None:
    def hidden(x):
        with torch.no_grad():
            x.t_()
        return x * 3

    def taken(x, y):
        x.set_(y)
        return x + 1

    parameter = _plain().requires_grad_()
    with pytest.raises(GraphBreakError):
        dovetail.compile(hidden, fullgraph=True, backend="aten")(parameter)
    assert parameter.shape == (2, 3)
    assert torch.equal(dovetail.compile(hidden, backend="aten")(parameter), _plain().t() * 3)
    one, other = _plain(), torch.ones(4)
    with pytest.raises(GraphBreakError):
        dovetail.compile(taken, fullgraph=True, backend="aten")(one, other)
    assert one.shape == (2, 3)


def test_not_exported(tmp_path) -> None:
    joint = dovetail.capture(_view_from_after, (_plain(),))
    with pytest.raises(ArtefactError, match="in place"):
        joint.export(tmp_path / "artefact")


def test_a_view_of_a_view_made_without_recording_gives_its_gradient_to_the_latter() -> None:
    def program(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            view = x.view(4, 3)
        return view.t(), view

    grads = []
    for run in (program, dovetail.compile(program, backend="aten")):
        x = torch.ones(3, 4, requires_grad=True)
        for _ in range(2):
            result, view = run(x)
            result.sum().backward()
            grads.append(
                (x.grad, None if view.grad is None else view.grad.tolist(), view.requires_grad, result.requires_grad)
            )
    assert grads[:2] == grads[2:]
