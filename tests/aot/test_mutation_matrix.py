"""Mutation and aliasing: each small program, eager against compiled, in everything that can be seen of memory and autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dovetail
from tests.aot.alias_programs import Inputs, Program, compare

Tensor = torch.Tensor


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def plain(*shape: int) -> Tensor:
    return torch.randn(*shape)


def one_plain() -> Inputs:
    return [plain(3, 4)]


def one_leaf() -> Inputs:
    return [leaf(3, 4)]


def one_nonleaf() -> Inputs:
    root = leaf(3, 4)
    value = root * 1.5
    value.root = root  # type: ignore[attr-defined]
    return [value]


def nonleaf_view() -> Inputs:
    root = leaf(3, 4)
    value = (root * 1.5)[:, 1:3]
    value.root = root  # type: ignore[attr-defined]
    return [value]


def plain_and_leaf() -> Inputs:
    return [plain(3, 4), leaf(3, 4)]


def one_row() -> Inputs:
    return [plain(1, 4)]


def two_leaves() -> Inputs:
    return [leaf(3, 4), leaf(3, 4)]


def nonleaf_and_leaf() -> Inputs:
    return [*one_nonleaf(), leaf(3, 4)]


def square() -> Inputs:
    return [plain(3, 3)]


def expanded() -> Inputs:
    return [plain(1, 4).expand(3, 4)]


def empty_one() -> Inputs:
    return [plain(0, 4)]


def integer() -> Inputs:
    return [torch.arange(12).view(3, 4)]


def boolean() -> Inputs:
    return [torch.randn(3, 4) > 0]


def base_and_row() -> Inputs:
    base = plain(3, 4)
    return [base, base[1]]


def two_rows() -> Inputs:
    base = plain(3, 4)
    return [base[0], base[1]]


def overlapping_rows() -> Inputs:
    base = plain(12)
    return [base[0:8], base[4:12]]


def base_and_transpose() -> Inputs:
    base = plain(3, 3)
    return [base, base.t()]


def nonleaf_base_and_row() -> Inputs:
    root = leaf(3, 4)
    base = root * 1.5
    base.root = root  # type: ignore[attr-defined]
    row = base[1]
    row.root = root  # type: ignore[attr-defined]
    return [base, row]


def two_nonleaf_rows() -> Inputs:
    root = leaf(3, 4)
    base = root * 1.5
    rows = [base[0], base[1]]
    for row in rows:
        row.root = root  # type: ignore[attr-defined]
    return rows


def leaf_and_its_view() -> Inputs:
    base = leaf(3, 4)
    return [base, base.view(4, 3)]


def leaf_and_detached() -> Inputs:
    base = leaf(3, 4)
    return [base, base.detach()]


def same_twice() -> Inputs:
    base = plain(3, 4)
    return [base, base]


def channels_last_leaf() -> Inputs:
    return [torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last).requires_grad_(), leaf(6, 3, 3, 3)]


def transposed_leaf() -> Inputs:
    return [torch.randn(4, 3).t().requires_grad_()]


def base_with_gap() -> Inputs:
    return [torch.randn(3, 8)[:, ::2]]


def complex_plain() -> Inputs:
    return [torch.randn(3, 4, dtype=torch.complex64)]


def complex_leaf() -> Inputs:
    return [torch.randn(3, 4, dtype=torch.complex64).requires_grad_()]


def write_output(result: Any, inputs: Inputs) -> Any:
    """Write in place to the first returned tensor."""
    first = result[0] if isinstance(result, (tuple, list)) else result
    return first.mul_(3)


def write_last(result: Any, inputs: Inputs) -> Any:
    return result[-1].mul_(3)


def write_input(result: Any, inputs: Inputs) -> Any:
    inputs[0].mul_(2)


def write_no_grad(result: Any, inputs: Inputs) -> Any:
    first = result[0] if isinstance(result, (tuple, list)) else result
    with torch.no_grad():
        first.mul_(3)


def between(result: Any, inputs: Inputs) -> Any:
    """The gradient of the last output with regard to the first."""
    grads = torch.autograd.grad(result[-1].sum(), [result[0]], allow_unused=True, retain_graph=True)
    return [g for g in grads if g is not None]


def between_and_input(result: Any, inputs: Inputs) -> Any:
    grads = torch.autograd.grad(result[-1].sum(), [result[0], inputs[0]], allow_unused=True, retain_graph=True)
    return [g for g in grads if g is not None]


def into_grad(result: Any, inputs: Inputs) -> Any:
    result[-1].sum().backward(inputs=[result[0], inputs[0]], retain_graph=True)


def edge_between(result: Any, inputs: Inputs) -> Any:
    edge = torch.autograd.graph.get_gradient_edge(result[0])
    return torch.autograd.grad(result[-1].sum(), [edge], allow_unused=True, retain_graph=True)


def hooked(result: Any, inputs: Inputs) -> Any:
    result[0].register_hook(lambda gradient: gradient * 2)
    result[-1].sum().backward(retain_graph=True)


def hooked_and_dropped(result: Any, inputs: Inputs) -> Any:
    result[0].register_hook(lambda gradient: gradient * 2)
    last = result[-1]
    del result
    last.sum().backward(retain_graph=True)


def hook_of_last(result: Any, inputs: Inputs) -> Any:
    result[-1].register_hook(lambda gradient: gradient * 2)


def retained(result: Any, inputs: Inputs) -> Any:
    result[0].retain_grad()
    result[-1].sum().backward(retain_graph=True)


PROGRAMS: list[Program] = []


def program(make: Any, *more: Any, later: Any = None, **options: Any) -> Any:
    """Add a program to the matrix, once for each way of making its inputs."""

    def add(function: Any) -> Any:
        for item in (make, *more):
            name = f"{function.__name__}-{item.__name__}" + (f"-{later.__name__}" if later is not None else "")
            settings = dict(options)
            if later is not None:
                settings["later"] = later
            if not options.get("grad_enabled", True):
                name += "-no_grad"
            PROGRAMS.append(Program(function, item, name=name, **settings))
        return function

    return add


# Data of inputs.
@program(one_plain, one_nonleaf, nonleaf_view, one_leaf, same_twice, complex_plain)
@program(one_plain, one_nonleaf, nonleaf_view, one_leaf, grad_enabled=False)
@program(one_plain, one_nonleaf, later=write_output)
def mul_in_place(x: Tensor, *rest: Tensor) -> Tensor:
    x.mul_(2)
    return x.sin()


@program(one_plain, one_nonleaf, nonleaf_view, one_leaf)
@program(one_plain, one_nonleaf, nonleaf_view, later=write_output)
def mul_and_return(x: Tensor) -> Tensor:
    return x.mul_(2)


@program(one_plain, one_nonleaf, nonleaf_view, one_leaf)
def write_under_no_grad(x: Tensor) -> Tensor:
    with torch.no_grad():
        x.mul_(2)
    return x * 3


@program(one_plain, one_nonleaf, one_leaf)
@program(one_nonleaf, one_leaf, grad_enabled=False)
def write_row(x: Tensor) -> Tensor:
    x[1] = 7.0
    return x.exp()


@program(plain_and_leaf, nonleaf_and_leaf, two_leaves)
@program(plain_and_leaf, grad_enabled=False)
@program(plain_and_leaf, nonleaf_and_leaf, later=write_output)
def copy_differentiable(x: Tensor, w: Tensor) -> Tensor:
    x.copy_(w * 2)
    return x.sin()


@program(plain_and_leaf, nonleaf_and_leaf)
def copy_into_row(x: Tensor, w: Tensor) -> Tensor:
    x[0].copy_(w[1] * 2)
    return x * x


@program(one_plain, one_nonleaf, one_leaf)
def write_through_data(x: Tensor) -> Tensor:
    x.data.mul_(2)
    return x * 3


@program(one_plain, one_nonleaf, one_leaf)
def write_through_detach(x: Tensor) -> Tensor:
    y = x.detach()
    y.add_(1)
    return x * 3


@program(one_plain, one_nonleaf, one_leaf)
def saved_then_written(x: Tensor) -> Tensor:
    y = x.sin()
    with torch.no_grad():
        x.add_(1)
    return y


@program(one_nonleaf, one_leaf, later=write_no_grad)
@program(one_nonleaf, one_leaf, later=write_input)
def exp_saved_by_output(x: Tensor) -> Tensor:
    return x.exp()


@program(one_nonleaf, one_leaf)
def saved_through_data(x: Tensor) -> Tensor:
    y = x.sin()
    x.data.add_(1)
    return y


@program(one_plain, one_nonleaf, one_leaf)
def data_of_result(x: Tensor) -> Tensor:
    y = x * 2
    y.data.zero_()
    return y * x


@program(one_plain, one_nonleaf, one_leaf)
def returns_data(x: Tensor) -> Tensor:
    return x.data


@program(one_plain, one_nonleaf, one_leaf, later=write_output)
def returns_detach(x: Tensor) -> Tensor:
    return x.detach()


@program(one_plain, one_nonleaf, one_leaf)
@program(one_plain, one_nonleaf, one_leaf, later=write_output)
@program(one_plain, one_nonleaf, one_leaf, later=write_last)
def returns_parts_of_detached(x: Tensor) -> Any:
    return x.detach()[1:], x.detach().t(), x.data[0]


@program(one_plain, one_nonleaf, one_leaf)
@program(one_leaf, later=write_output)
@program(one_leaf, later=write_last)
def returns_detached_parts(x: Tensor) -> Any:
    y = x * 2
    return y[1:].detach(), y, y.data, y.detach()[0]


@program(one_plain, one_nonleaf)
def writes_through_both(x: Tensor) -> Any:
    x.data.mul_(2)
    x.add_(1)
    return x * 2


@program(two_leaves, plain_and_leaf)
def assigns_data(x: Tensor, w: Tensor) -> Tensor:
    x.data = w.detach() * 2
    return x * 3


@program(one_plain, one_leaf)
def assigns_data_other_shape(x: Tensor) -> Tensor:
    x.data = torch.ones(2)
    return x * 3


# Metadata of inputs.
@program(one_plain, one_nonleaf, one_leaf, nonleaf_view)
@program(one_plain, one_nonleaf, one_leaf, grad_enabled=False)
@program(one_plain, one_nonleaf, later=write_output)
def transposes_in_place(x: Tensor) -> Tensor:
    x.t_()
    return x * 2


@program(one_plain, one_nonleaf)
def transposes_and_returns(x: Tensor) -> Tensor:
    return x.transpose_(0, 1)


@program(one_plain, one_nonleaf)
def transposes_and_writes(x: Tensor) -> Tensor:
    x.t_()
    x.mul_(2)
    return x.sin()


@program(one_plain, one_nonleaf)
def transposes_twice(x: Tensor) -> Tensor:
    x.t_().t_()
    return x.sin()


@program(one_plain, one_nonleaf, one_leaf)
def unsqueezes_in_place(x: Tensor) -> Tensor:
    x.unsqueeze_(0)
    return x * 2


@program(one_row)
def squeezes_in_place(x: Tensor) -> Tensor:
    x.squeeze_()
    return x * 2


@program(one_plain)
def resizes_smaller(x: Tensor) -> Tensor:
    x.resize_(2, 2)
    return x * 2


@program(one_plain)
def resizes_larger(x: Tensor) -> Tensor:
    x.resize_(6, 4).fill_(1.0)
    return x * 2


@program(plain_and_leaf)
@program(plain_and_leaf, grad_enabled=False)
def sets_to_other(x: Tensor, w: Tensor) -> Tensor:
    with torch.no_grad():
        x.set_(w.detach())
    return x * 2


@program(one_plain)
def sets_to_new(x: Tensor) -> Tensor:
    x.set_(torch.ones(5))
    return x * 2


@program(one_plain)
def swaps_axes_of_view(x: Tensor) -> Tensor:
    y = x[1:]
    y.t_()
    return y * 2


@program(one_plain, one_leaf)
def view_transposed_and_returned(x: Tensor) -> Tensor:
    y = x[1:]
    return y.t_()


@program(one_plain, one_nonleaf, one_leaf)
@program(one_nonleaf, later=write_output)
def detaches_in_place(x: Tensor) -> Tensor:
    x.detach_()
    return x * 2


@program(one_plain, one_nonleaf, one_leaf)
def requires_grad_inside(x: Tensor) -> Tensor:
    x.requires_grad_()
    return x * 2


@program(one_leaf)
def no_longer_requires_grad(x: Tensor) -> Tensor:
    x.requires_grad_(False)
    return x * 2


@program(one_plain)
def new_leaf_returned(x: Tensor) -> Tensor:
    return (x * 2).requires_grad_()


@program(one_plain)
def new_leaf_and_its_use(x: Tensor) -> Any:
    y = (x * 2).requires_grad_()
    return y, y * 3


# Inputs that share memory.
@program(base_and_row, overlapping_rows, base_and_transpose, two_rows, leaf_and_detached)
@program(nonleaf_base_and_row, two_nonleaf_rows, leaf_and_its_view)
def reads_both(x: Tensor, y: Tensor) -> Tensor:
    return x.sum() + y.sum()


@program(base_and_row, overlapping_rows, base_and_transpose, two_rows, leaf_and_detached)
@program(nonleaf_base_and_row, two_nonleaf_rows, leaf_and_its_view)
@program(base_and_row, nonleaf_base_and_row, two_nonleaf_rows, grad_enabled=False)
def writes_first(x: Tensor, y: Tensor) -> Tensor:
    x.mul_(2)
    return y * 3


@program(base_and_row, overlapping_rows, base_and_transpose, two_rows, leaf_and_detached)
@program(nonleaf_base_and_row, two_nonleaf_rows, leaf_and_its_view)
def writes_second(x: Tensor, y: Tensor) -> Tensor:
    y.mul_(2)
    return x * 3


@program(base_and_row, overlapping_rows, two_rows, nonleaf_base_and_row, two_nonleaf_rows)
@program(two_rows, two_nonleaf_rows, later=write_input)
def writes_both(x: Tensor, y: Tensor) -> Any:
    x.mul_(2)
    y.add_(1)
    return x, y


# Outputs that are inputs, views, or share memory.
@program(one_plain, one_leaf, one_nonleaf)
@program(one_plain, one_nonleaf, later=write_output)
def returns_input(x: Tensor) -> Tensor:
    return x


@program(one_plain, one_leaf, one_nonleaf, nonleaf_view)
@program(one_plain, one_leaf, one_nonleaf, nonleaf_view, later=write_output)
@program(one_plain, one_leaf, later=write_no_grad)
@program(one_leaf, one_nonleaf, grad_enabled=False)
@program(one_leaf, one_nonleaf, grad_enabled=False, later=write_output)
def returns_view(x: Tensor) -> Tensor:
    return x[1:].t()


@program(one_plain, one_leaf, one_nonleaf)
@program(one_leaf, one_nonleaf, later=write_output)
def returns_view_of_written(x: Tensor) -> Any:
    y = x * 1
    y[0].mul_(2)
    return y, y[1:], y.t()


@program(one_plain, one_leaf, one_nonleaf)
@program(one_plain, one_leaf, one_nonleaf, later=write_output)
@program(one_plain, one_leaf, one_nonleaf, later=write_last)
@program(one_leaf, later=between)
def returns_views_of_intermediate(x: Tensor) -> Any:
    y = x * 2
    return y[0], y[1], y.t()


@program(one_leaf, one_nonleaf)
@program(one_leaf, one_nonleaf, later=write_output)
@program(one_leaf, one_nonleaf, later=write_last)
@program(one_leaf, later=between)
def returns_intermediate_and_view(x: Tensor) -> Any:
    y = x * 2
    return y, y[0]


@program(one_leaf, one_nonleaf)
@program(one_leaf, one_nonleaf, later=write_output)
@program(one_leaf, later=between)
def returns_view_and_intermediate(x: Tensor) -> Any:
    y = x * 2
    return y[0], y


@program(one_leaf, one_plain, later=write_output)
@program(one_leaf, later=write_last)
@program(one_leaf)
def returns_unbind(x: Tensor) -> Any:
    return (x * 2).unbind(0)


@program(one_leaf, one_plain, later=write_output)
@program(one_leaf, later=write_last)
@program(one_leaf)
def returns_unbind_of_input(x: Tensor) -> Any:
    return x.unbind(0)


@program(one_leaf, later=write_output)
@program(one_leaf)
def returns_split(x: Tensor) -> Any:
    return (x * 2).split(2, 1)


@program(one_leaf, one_plain)
@program(one_leaf, one_plain, later=write_output)
def returns_single_view(x: Tensor) -> Tensor:
    return (x * 2)[1:]


@program(one_leaf, later=write_output)
@program(one_leaf, later=write_last)
def returns_detached_pair(x: Tensor) -> Any:
    y = x * 2
    return y, y.detach()


@program(one_leaf)
def returns_same_twice(x: Tensor) -> Any:
    y = x * 2
    return y, y


@program(one_leaf, one_plain)
@program(one_leaf, later=write_output)
def returns_view_made_without_grad(x: Tensor) -> Any:
    y = x * 2
    with torch.no_grad():
        z = y[1:]
    return y, z


@program(one_leaf, one_plain)
def returns_expanded(x: Tensor) -> Tensor:
    return (x.sum(0) * 2).expand(5, 4)


@program(one_leaf, one_plain, complex_plain, complex_leaf)
@program(complex_plain, complex_leaf, later=write_output)
def returns_conjugate(x: Tensor) -> Tensor:
    return x.conj()


@program(complex_plain, complex_leaf)
@program(complex_plain, complex_leaf, later=write_output)
def returns_real_view(x: Tensor) -> Tensor:
    return torch.view_as_real(x)


@program(complex_plain, complex_leaf)
@program(complex_plain, later=write_output)
def returns_real_and_imaginary(x: Tensor) -> Any:
    y = x * 2
    return y.real, y.imag


@program(one_plain)
@program(one_plain, later=write_output)
def returns_bit_cast(x: Tensor) -> Any:
    y = x * 2
    return y, y.view(torch.int32)


@program(one_plain, one_leaf)
def returns_diagonal_after_write(x: Tensor) -> Any:
    y = x * 2
    d = y.diagonal()
    d.fill_(0)
    return y, d


# Outputs that feed outputs.
@program(one_leaf)
@program(one_leaf, later=between)
@program(one_leaf, later=between_and_input)
@program(one_leaf, later=into_grad)
@program(one_leaf, later=edge_between)
@program(one_leaf, later=hooked)
@program(one_leaf, later=hooked_and_dropped)
@program(one_leaf, later=retained)
@program(one_leaf, later=write_last)
@program(one_leaf, later=hook_of_last)
@program(one_leaf, later=write_output)
def chain(x: Tensor) -> Any:
    y = x.sin()
    return y, y.exp()


@program(two_leaves)
@program(two_leaves, later=between)
@program(two_leaves, later=hooked)
def no_chain(x: Tensor, w: Tensor) -> Any:
    return x.sin(), w.exp()


@program(one_leaf, later=between)
def chain_of_input(x: Tensor) -> Any:
    return x, x.exp()


@program(one_nonleaf, later=between)
@program(one_nonleaf)
def chain_of_written_input(x: Tensor) -> Any:
    x.mul_(2)
    return x, x.exp()


@program(one_leaf, one_nonleaf, later=between)
@program(one_leaf, one_nonleaf)
def chain_of_view(x: Tensor) -> Any:
    v = x[0]
    return v, v.exp()


@program(one_leaf, one_nonleaf, later=between)
@program(one_leaf, one_nonleaf)
def chain_of_intermediate_view(x: Tensor) -> Any:
    v = (x * 2)[0]
    return v, v.exp()[1:]


@program(one_leaf, later=between)
@program(one_leaf)
@program(one_leaf, later=write_output)
def chain_in_middle(x: Tensor) -> Any:
    y = x.sin()
    z = y.exp()
    return y, z, z.cos()


@program(one_leaf, one_nonleaf, later=between)
@program(one_leaf)
def chain_of_older_version(x: Tensor) -> Any:
    y = x.sin()
    z = y.exp()
    y.mul_(2)
    return y, z * z


@program(nonleaf_and_leaf, later=between)
@program(nonleaf_and_leaf)
def chain_through_written_input(x: Tensor, w: Tensor) -> Any:
    y = w.exp()
    x.add_(y)
    return y, x, x.sin()


@program(one_leaf, later=between)
@program(one_leaf)
def chain_of_parts(x: Tensor) -> Any:
    a, b, c = (x * 2).unbind(0)
    return b, a, c, (a * b).sum()


# Strides.
@program(nonleaf_view, one_nonleaf, base_with_gap, transposed_leaf)
def asks_about_strides(x: Tensor) -> Any:
    scale = 2.0 if x.is_contiguous() else 3.0
    return x * scale + x.stride(0) + x.storage_offset()


@program(channels_last_leaf)
def convolution(x: Tensor, w: Tensor) -> Tensor:
    return torch.nn.functional.conv2d(x, w)


@program(channels_last_leaf)
def pointwise_channels_last(x: Tensor, w: Tensor) -> Any:
    return x * 2, x.relu(), x.contiguous(), x.to(memory_format=torch.channels_last)


@program(transposed_leaf, one_leaf, base_with_gap)
def pointwise(x: Tensor) -> Any:
    return x * 2, x.exp(), torch.empty_like(x).fill_(1), x.clone()


@program(transposed_leaf)
def matrix_product(x: Tensor) -> Tensor:
    return x.t() @ x


@program(base_with_gap)
def writes_with_gap(x: Tensor) -> Tensor:
    x.mul_(2)
    return x


@program(base_with_gap)
def views_with_gap(x: Tensor) -> Tensor:
    return x[1:]


# More writes.
@program(one_plain, one_nonleaf, later=write_output)
@program(one_plain, one_nonleaf, one_leaf)
def writes_row_returns_view(x: Tensor) -> Any:
    x[0].mul_(2)
    return x[1:], x


@program(one_plain, one_nonleaf, one_leaf)
@program(one_plain, one_nonleaf, later=write_input)
def writes_transposed(x: Tensor) -> Any:
    y = x.t()
    y.mul_(2)
    return y


@program(one_plain, one_nonleaf)
def writes_chunk(x: Tensor) -> Any:
    a, b = x.chunk(2, 1)
    with torch.no_grad():
        a.mul_(2)
    return a, b * 2


@program(one_plain, one_nonleaf)
def writes_unbound(x: Tensor) -> Any:
    a, *_ = x.unbind(0)
    a.mul_(2)
    return x * 1


@program(one_leaf, one_plain, one_nonleaf)
def writes_intermediate_without_grad(x: Tensor) -> Any:
    y = x * 2
    with torch.no_grad():
        y[0].mul_(3)
    return y * y


@program(one_plain, one_nonleaf, one_leaf)
def writes_whole_view(x: Tensor) -> Any:
    y = x.view_as(x)
    y.mul_(2)
    return y


@program(plain_and_leaf, nonleaf_and_leaf, two_leaves)
def writes_out(x: Tensor, w: Tensor) -> Any:
    with torch.no_grad():
        torch.mul(w, 2, out=x)
    return x * 3


@program(plain_and_leaf)
def writes_out_with_grad(x: Tensor, w: Tensor) -> Any:
    torch.mul(w, 2, out=x)
    return x * 3


@program(square)
def adds_own_transpose(x: Tensor) -> Any:
    x.add_(x.t())
    return x * 2


@program(plain_and_leaf, nonleaf_and_leaf)
def sets_item(x: Tensor, w: Tensor) -> Any:
    x[:, 1:3] = w[0, :2]
    return x.sum(0)


@program(one_plain, one_nonleaf)
def writes_by_index(x: Tensor) -> Any:
    x.index_put_((torch.tensor([0, 2]),), torch.tensor(1.0))
    x.masked_fill_(x > 0.5, 0.0)
    x.scatter_(1, torch.zeros(3, 1, dtype=torch.long), 5.0)
    return x.exp()


@program(one_leaf, one_plain)
def metadata_of_intermediate(x: Tensor) -> Any:
    y = x * 2
    y.t_()
    z = x * 3
    z.unsqueeze_(0)
    return y, z.squeeze_(), y.exp().transpose_(0, 1)


@program(one_leaf, one_plain)
def metadata_of_intermediate_view(x: Tensor) -> Any:
    y = x * 2
    v = y[1:]
    v.t_()
    return y, v


@program(one_leaf, one_plain)
def detaches_intermediate(x: Tensor) -> Any:
    y = x * 2
    z = y.sin()
    z.detach_()
    return y, z


@program(one_leaf, one_plain)
def new_leaf_inside(x: Tensor) -> Any:
    y = torch.ones(3, 4, requires_grad=True)
    return (y * x).sum()


@program(one_leaf, one_plain, one_nonleaf)
@program(one_leaf, one_plain, one_nonleaf, later=write_no_grad)
def returns_itself_by_other_names(x: Tensor) -> Any:
    return x.contiguous(), x.to(torch.float32), x.float(), x.cpu(), x.reshape(3, 4), x.view(3, 4), x.expand(3, 4)


@program(one_leaf, one_nonleaf)
def returns_all_kinds(x: Tensor) -> Any:
    return (
        x,
        x[:],
        x.T,
        x.mT,
        x.flatten(),
        x.ravel(),
        x.unsqueeze(0),
        x.narrow(0, 1, 2),
        x.diagonal(),
        x.unfold(0, 2, 1),
    )


@program(one_leaf, one_nonleaf, one_plain)
def returns_all_kinds_of_intermediate(x: Tensor) -> Any:
    y = x * 2
    return y[:], y.T, y.flatten(), y.unsqueeze(0), y.narrow(0, 1, 2), y.diagonal(), y.unfold(0, 2, 1), y.swapaxes(0, 1)


@program(one_leaf, one_nonleaf, one_plain)
@program(one_leaf, later=write_output)
def returns_view_of_view(x: Tensor) -> Any:
    y = (x * 2)[1:]
    return y[0], y.t()[1]


@program(complex_leaf, complex_plain)
def returns_adjoint(x: Tensor) -> Any:
    return x.mH, x.real, x.resolve_conj()


@program(one_plain)
def returns_bits_of_input(x: Tensor) -> Any:
    return x.view(torch.int32)


@program(one_leaf, one_plain)
def returns_strided(x: Tensor) -> Any:
    return (x * 2).as_strided((2, 2), (4, 1), 1)


@program(one_plain, one_nonleaf, one_leaf)
def writes_clone(x: Tensor) -> Any:
    y = x.clone()
    y.mul_(2)
    return y


@program(expanded)
def reads_expanded(x: Tensor) -> Any:
    return x * 2, x


@program(expanded)
def writes_expanded(x: Tensor) -> Any:
    x.mul_(2)
    return x * 1


@program(two_leaves)
def swaps_values(x: Tensor, w: Tensor) -> Any:
    with torch.no_grad():
        t = x.clone()
        x.copy_(w)
        w.copy_(t)
    return x * w


@program(one_plain, one_nonleaf)
def writes_zero_times(x: Tensor) -> Any:
    x.mul_(1)
    x[:0].fill_(3)
    return x


@program(one_plain, one_leaf, one_nonleaf)
def returns_written_and_copy(x: Tensor) -> Any:
    y = x.detach().clone()
    with torch.no_grad():
        x.zero_()
    return x, y


@program(nonleaf_and_leaf, plain_and_leaf)
@program(nonleaf_and_leaf, later=write_input)
def writes_view_with_leaf(x: Tensor, w: Tensor) -> Any:
    x[0].add_(w[0])
    return x[0], x[1]


@program(nonleaf_view)
@program(nonleaf_view, later=write_output)
@program(nonleaf_view, later=write_input)
def writes_view_of_nonleaf(x: Tensor) -> Any:
    x.mul_(2)
    return x.t()


@program(plain_and_leaf)
def writes_plain_view(x: Tensor, w: Tensor) -> Any:
    v = x[0]
    v.mul_(w[0])
    return v, x


@program(empty_one)
def writes_nothing(x: Tensor) -> Any:
    x.mul_(2)
    return x, x.view(0)


@program(one_plain, one_nonleaf)
def writes_in_loop(x: Tensor) -> Any:
    total = x.new_zeros(())
    for row in x:
        row.mul_(2)
        total = total + row.sum()
    return total, x


@program(integer)
def writes_integers(x: Tensor) -> Any:
    x.add_(1)
    x[0] = 5
    return x * 2.0, x.view(-1)


@program(boolean)
def writes_booleans(x: Tensor) -> Any:
    x.logical_not_()
    x &= x.flip(0)
    return x


@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("item", PROGRAMS, ids=str)
@pytest.mark.sampled(18)
def test_as_eager(item: Program, dynamic: bool | None) -> None:
    found, reason = compare(item, dynamic=dynamic)
    assert not found, "\n".join([*found, f"ran eagerly because: {reason}" if reason else "was captured"])


# --- writes after the call, to what eager has saved -----------------------------------------------------------------------


WRITTEN: dict[str, Any] = {
    "relu_": lambda x: x.relu_(),
    "tanh_": lambda x: x.tanh_(),
    "sqrt_": lambda x: x.abs_().add_(1).sqrt_(),
    "elu": lambda x: torch.nn.functional.elu(x, inplace=True),
    "mul_": lambda x: x.mul_(2),
    "a part": lambda x: (x[:1].sigmoid_(), x)[1],
    "read after a write": lambda x: (x.add_(1), x * x)[1],
    "an item": lambda x: (x.__setitem__(0, x[1] * 2), x.pow(3))[1],
    "copy_": lambda x: x.copy_(x.exp()),
}
LATER: dict[str, Any] = {
    "none": lambda x, result: None,
    "to the result": lambda x, result: result.mul_(2),
    "to the input": lambda x, result: x.add_(1),
    "to a view without a gradient": lambda x, result: x.detach()[1:].mul_(2),
}


def _outcome(call: Any) -> Any:
    try:
        return call()
    except RuntimeError as error:
        return str(error)[:70]


@pytest.mark.parametrize("backend", ["aten", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("program", WRITTEN)
def test_writes_to_what_eager_has_saved_are_noticed(program: str, backend: str) -> None:
    compiled = dovetail.compile(WRITTEN[program], backend=backend, fullgraph=True)
    for write in LATER.values():

        def step(run: Any, write: Any = write) -> Any:
            leaf = torch.tensor([-1.0, 2.0], requires_grad=True)
            x = leaf + 0
            result = run(x)
            write(x, result)
            result.sum().backward()
            return leaf.grad.tolist()  # type: ignore[union-attr]

        expected, found = _outcome(lambda: step(WRITTEN[program])), _outcome(lambda: step(compiled))
        assert found == (expected if isinstance(expected, str) else pytest.approx(expected))


def test_a_buffer_that_the_next_call_writes() -> None:
    def program(buffer: torch.Tensor, weight: torch.Tensor, copy: bool) -> torch.Tensor:
        buffer[:1].add_(1)
        return (buffer.clone() if copy else buffer) * weight

    compiled = dovetail.compile(program, backend="aten", fullgraph=True)
    for copy in (False, True):
        for calls in (1, 2):

            def step(run: Any, copy: bool = copy, calls: int = calls) -> Any:
                buffer, weight = torch.zeros(2), torch.ones(2, requires_grad=True)
                results = [run(buffer, weight, copy) for _ in range(calls)]
                sum(results).sum().backward()
                return weight.grad.tolist()  # type: ignore[union-attr]

            assert _outcome(lambda step=step: step(program)) == _outcome(lambda step=step: step(compiled))


@pytest.mark.parametrize(
    "write",
    [
        lambda x, y: torch._foreach_mul_([x, y], [2.0, 3.0]),
        lambda x, y: torch._foreach_mul_([x, y], [y * 1, x * 1]),
        lambda x, y: torch._foreach_add_([x.view(-1)], 1.0),
        lambda x, y: torch._foreach_add_([x.data, y], 1.0),
    ],
)
def test_lists_of_inputs_are_written(write) -> None:
    """Gradients pass through such a write to what was given, and it is counted."""

    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        write(x, y)
        return x.sin() + y

    found = []
    for run in (program, dovetail.compile(program, backend="aten", fullgraph=True)):
        leaves = [torch.arange(1.0, 5, requires_grad=True) for _ in range(2)]
        given = [item * 1.5 for item in leaves]
        result = run(*given)
        gradients = torch.autograd.grad((result + given[0] * given[1]).sum(), leaves)
        found.append(([item.tolist() for item in (*given, *gradients)], [item._version for item in given]))
    assert found[0][0] == found[1][0] and [bool(count) for count in found[0][1]] == list(map(bool, found[1][1]))
