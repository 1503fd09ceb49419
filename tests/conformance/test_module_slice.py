"""A fixed slice of torch's module database in the default tests, and checks of its harness."""

from __future__ import annotations

import pytest
import torch

from tests.conformance import compilers, module_runner

SLICE = """
nn.Linear nn.Conv2d nn.ConvTranspose1d nn.BatchNorm1d nn.BatchNorm2d nn.LayerNorm nn.GroupNorm nn.Embedding
nn.ReLU nn.GELU nn.Softmax nn.MaxPool2d nn.CircularPad1d nn.LazyConv1d nn.CrossEntropyLoss nn.MSELoss
nn.GaussianNLLLoss nn.CTCLoss nn.GRUCell nn.Dropout
""".split()


@pytest.mark.parametrize("name", SLICE)
@pytest.mark.sampled(8)
def test_module(name: str) -> None:
    if name not in module_runner.modules():
        pytest.skip(f"this torch's database has no {name}")
    result = module_runner.check_module(name, compilers.COMPILERS["dovetail"], samples=2)
    for variant in module_runner.VARIANTS:
        assert result.verdict(variant) in ("passed", "eager cannot"), (variant, result.samples[variant])


@pytest.mark.slow
def test_batch_norm_with_an_average_of_all_batches() -> None:
    """``momentum=None`` makes a Python number out of a counter: the sixth sample of the database."""
    result = module_runner.check_module("nn.BatchNorm1d", compilers.COMPILERS["dovetail"])
    assert result.verdict("train") == "passed", result.samples["train"]


class _Off(torch.nn.Module):
    """Eager's module with its result, buffers or gradients changed."""

    def __init__(self, inner: torch.nn.Module, how: str) -> None:
        super().__init__()
        self.inner = inner
        self.how = how

    def forward(self, *args: object, **kwargs: object) -> object:
        result = self.inner(*args, **kwargs)
        if self.how == "buffer":
            self.inner.num_batches_tracked.add_(1)
        if self.how == "gradient":
            result = result.detach() + (result - result.detach()) * 2
        return result * 2 if self.how == "result" else result


@pytest.mark.parametrize("how", ["result", "buffer", "gradient"])
def test_harness_finds_what_is_wrong(how: str) -> None:
    found = module_runner.check_module("nn.BatchNorm1d", lambda module: _Off(module, how), samples=1)
    assert found.verdict("train") == "wrong"
    assert how in found.samples["train"][0].reason


def test_harness_accepts_eager() -> None:
    found = module_runner.check_module("nn.BatchNorm1d", lambda module: module)
    assert {found.verdict(variant) for variant in module_runner.VARIANTS} == {"passed"}
