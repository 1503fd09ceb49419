"""Products written in place round as eager's, which multiply otherwise by the layout and the address of what they write."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import dovetail
from tests.differential import check_calls, same

Layout = Callable[[torch.Tensor], torch.Tensor]


def transposed(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(-1, -2).clone(memory_format=torch.contiguous_format).transpose(-1, -2)


def with_gaps(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x, x], -1)[..., 0]


def at_an_odd_address(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x, x])[1]


def with_a_pitch(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, x], -1)[..., : x.shape[-1]]


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", [transposed, with_gaps])
@pytest.mark.parametrize("batched", [False, True])
def test_one_graph(layout: Layout, batched: bool) -> None:
    def program(x: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        y = layout(x.sin())
        (y.addbmm_ if batched else y.addmm_)(left, right, beta=0.5, alpha=2)
        return y.cos()

    for rows, inner, columns in ((9, 33, 17), (1, 5, 3), (8, 1, 1), (25, 10, 5)):
        batch = (4,) if batched else ()
        given = _random(rows, columns), _random(*batch, rows, inner), _random(*batch, inner, columns)
        check_calls(program, [tuple(item.requires_grad_() for item in given), tuple(item.detach() for item in given)])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", [at_an_odd_address, with_a_pitch, with_gaps])
def test_eagers_where_only_eager_knows(layout: Layout) -> None:
    programs = (
        (lambda x, left, right: layout(x).addmm_(left, right) * 2, (), ()),
        (lambda x, left, right: layout(x).baddbmm_(left, right) * 2, (4,), (4,)),
        (lambda x, left, right: layout(x[:, 0]).addmv_(left, right[:, 0]) * 2, (), ()),
    )
    for program, outer, batch in programs:
        given = _random(*outer, 9, 17), _random(*batch, 9, 33), _random(*batch, 33, 17)
        compiled = dovetail.compile(program, backend="aten")
        for _ in range(2):
            same(program(*given), compiled(*given))


def test_another_backend_keeps_one_graph() -> None:
    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return at_an_odd_address(x).addmm_(y, y)

    x = _random(3, 3)
    joint = dovetail.capture(program, (x, x))
    assert [item for item in joint.graph.nodes if "addmm" in str(item.target)]
