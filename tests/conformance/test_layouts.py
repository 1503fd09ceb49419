"""Every operator of torch's database on inputs in other layouts: the program is told eager's strides while it is captured.

About one operator in forty runs by default; all of them (``--slow``) take 100 s on 2 cores.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

import dovetail

Tensor = torch.Tensor
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=FORMATS[x.dim()]) if x.dim() in FORMATS else x


def transposed(x: Tensor) -> Tensor:
    return x.transpose(0, -1).contiguous().transpose(0, -1) if x.dim() > 1 else x


def with_gaps(x: Tensor) -> Tensor:
    return torch.stack([x, x], -1)[..., 0] if x.dim() else x


def expanded(x: Tensor) -> Tensor:
    return x[:1].expand(x.shape) if x.dim() > 1 and x.shape[0] > 1 else x


LAYOUTS: list[Callable[[Tensor], Tensor]] = [channels_last, transposed, with_gaps, expanded]
#: They leave memory as it is, draw numbers, need a GPU, or (ldexp, einsum) are known to differ where sizes are one.
LEFT_OUT = (
    "empty",
    "rand",
    "normal",
    "bernoulli",
    "uniform",
    "multinomial",
    "sampled_addmm",
    "ldexp",
    "einsum",
    "jiterator",
)
OPERATORS = [
    op for op in op_db if op.supports_dtype(torch.float32, "cpu") and not any(name in op.name for name in LEFT_OUT)
]


def strides(tensors: list[Tensor]) -> list[Any]:
    """The strides that say something."""
    dense = [x for x in tensors if x.layout is torch.strided and x.numel() > 1]
    return [[(stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1] for x in dense]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("op", OPERATORS, ids=lambda op: ".".join(filter(None, (op.name, op.variant_test_name))))
@pytest.mark.sampled(120)
def test_strides_are_those_of_eager(op: Any) -> None:
    samples = list(itertools.islice(op.sample_inputs("cpu", torch.float32, requires_grad=False), 24))
    for layout in LAYOUTS:
        compared = 0
        for sample in samples:
            leaves, tree = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
            is_dense = [isinstance(leaf, Tensor) and leaf.layout is torch.strided for leaf in leaves]
            given = [layout(leaf) if dense else leaf for leaf, dense in zip(leaves, is_dense, strict=True)]
            if compared == 4 or all(one is other for one, other in zip(leaves, given, strict=True)):
                continue

            def program(*leaves: Any, tree: Any = tree) -> tuple[list[Any], list[Tensor]]:
                first, args, kwargs = pytree.tree_unflatten(list(leaves), tree)
                found = [x for x in pytree.tree_leaves(op.op(first, *args, **kwargs)) if isinstance(x, Tensor)]
                return strides(found), found

            try:
                expected, tensors = program(*given)
            except RuntimeError:
                continue  # not with this layout
            compared += 1
            told, results = dovetail.compile(program, backend="aten")(*given)
            assert told == expected, layout.__name__
            assert strides(results) == strides(tensors), layout.__name__
