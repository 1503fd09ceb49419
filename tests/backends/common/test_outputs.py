"""Outputs that share memory share version counters, call by call."""

from __future__ import annotations

import torch

from dovetail.backends.common.outputs import guard_outputs, same_strides


def raw_alias(value, size, stride):
    """A tensor on the same memory that autograd knows nothing of, as compiled code makes it."""
    return torch.empty(0).set_(value.untyped_storage(), 0, size, stride)


def test_alias_of_an_input():
    run = guard_outputs(lambda inputs: [raw_alias(inputs[0], (4,), (1,))])
    for _ in range(2):
        x = torch.zeros(2, 2)
        (out,) = run([x])
        version = out._version
        x.add_(1)
        assert out._version == version + 1
        assert out.tolist() == [1.0] * 4
        assert not out._is_view()


def test_inputs_that_share_memory_only_at_first():
    run = guard_outputs(lambda inputs: [raw_alias(inputs[1], (4,), (1,))])
    x = torch.zeros(2, 2)
    run([x, x.view(4)])
    a, b = torch.zeros(2, 2), torch.ones(4)
    (out,) = run([a, b])
    assert out.tolist() == [1.0] * 4
    version = out._version
    a.add_(1)
    assert out._version == version


def test_other_dtype_is_copied():
    run = guard_outputs(lambda inputs: [torch.view_as_real(inputs[0])])
    x = torch.zeros(2, dtype=torch.complex64)
    for _ in range(2):
        (out,) = run([x])
        assert out.data_ptr() != x.data_ptr()


def test_promised_strides():
    run = guard_outputs(lambda inputs: [inputs[0].t() + 1], [(2, 1)])
    for _ in range(2):
        (out,) = run([torch.tensor([[1.0, 2.0], [3.0, 4.0]])])
        assert out.stride() == (2, 1)
        assert out.tolist() == [[2.0, 4.0], [3.0, 5.0]]


def test_empty_tensors_have_the_promised_strides():
    run = guard_outputs(lambda inputs: [torch.empty(1, 1).as_strided((0, 3), (0, 0))], [(3, 1)])
    assert [run([])[0].stride() for _ in range(2)] == [(3, 1)] * 2
    assert same_strides((1, 3), (7, 1), (3, 1))
    assert not same_strides((2, 3), (3, 1), (1, 2))


def test_view_of_something_inner_is_detached():
    run = guard_outputs(lambda inputs: [inputs[0].exp().t()])
    for _ in range(2):
        (out,) = run([torch.randn(2, 3)])
        assert not out._is_view()
