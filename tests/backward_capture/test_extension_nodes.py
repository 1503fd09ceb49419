"""A node of a C++ extension, compiled here: an eager call between two captured parts."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch

import dovetail
from tests.differential import same

SOURCE = """
#include <torch/extension.h>

struct Triple : public torch::autograd::Function<Triple> {
    static torch::Tensor forward(torch::autograd::AutogradContext* ctx, torch::Tensor x) {
        ctx->save_for_backward({x});
        return x * x * x;
    }
    static torch::autograd::variable_list backward(
        torch::autograd::AutogradContext* ctx, torch::autograd::variable_list gradients) {
        auto x = ctx->get_saved_variables()[0];
        if (x.numel() == 7) { TORCH_CHECK(false, "seven is refused"); }
        return {gradients[0] * 3 * x * x};
    }
};

torch::Tensor triple(torch::Tensor x) { return Triple::apply(x); }
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("c++") is None or shutil.which("ninja") is None, reason="needs a C++ compiler and ninja"
    ),
]


@pytest.fixture(scope="module")
def extension(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from torch.utils import cpp_extension

    folder = str(tmp_path_factory.mktemp("extension"))
    return cpp_extension.load_inline("dovetail_triple", SOURCE, functions=["triple"], build_directory=folder)


def leaves(size: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(size)
    return [torch.randn(size, generator=generator).requires_grad_() for _ in range(2)]


def gradients(extension: Any, size: int) -> list[torch.Tensor | None]:
    x, y = leaves(size)
    (extension.triple(x.sin()) * y.exp()).sum().backward()
    return [x.grad, y.grad]


def test_its_gradients_are_those_of_eager(extension: Any) -> None:
    expected = [gradients(extension, size) for size in (3, 3, 5)]
    with dovetail.compiled_autograd(backend="aten") as backwards:
        for size, wanted in zip((3, 3, 5), expected, strict=True):
            same(wanted, gradients(extension, size))
    assert (len(backwards.captures), backwards.runs) == (1, 3)
    assert not backwards.fallbacks


def test_what_it_raises_is_raised_and_the_next_backward_works(extension: Any) -> None:
    expected = gradients(extension, 4)
    with dovetail.compiled_autograd(backend="aten"):
        with pytest.raises(RuntimeError, match="seven is refused"):
            gradients(extension, 7)
        same(expected, gradients(extension, 4))


def test_a_forward_with_it_is_compiled_around_it(extension: Any) -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (extension.triple(x.sin()) * y.exp()).sum()

    compiled = dovetail.compile(function, backend="aten")
    with pytest.warns(dovetail.errors.GraphBreakWarning):
        for size in (3, 5):
            found, expected = leaves(size), leaves(size)
            compiled(*found).backward()
            function(*expected).backward()
            same([item.grad for item in expected], [item.grad for item in found])
