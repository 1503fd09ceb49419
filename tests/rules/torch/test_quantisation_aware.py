"""Training with the rounding of a quantised model: observers and layers of ``torch.ao``, which are interpreted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.ao import quantization

import dovetail
from tests.differential import check_training, entries_of

pytestmark = pytest.mark.usefixtures("quiet")


def prepared() -> torch.nn.Module:
    model = torch.nn.Sequential(quantization.QuantStub(), torch.nn.Linear(3, 4), torch.nn.ReLU())
    model.qconfig = quantization.get_default_qat_qconfig("fbgemm")  # type: ignore[assignment]
    found: torch.nn.Module = quantization.prepare_qat(model.train())
    return found


def by_tensor() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(3, 4), quantization.FakeQuantize())


class RoundedWeight(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 4)
        observer = quantization.MovingAveragePerChannelMinMaxObserver
        options: dict[str, Any] = {"dtype": torch.qint8, "qscheme": torch.per_channel_symmetric, "ch_axis": 0}
        self.rounding = quantization.FakeQuantize(observer, -128, 127, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.rounding(self.weight), self.bias)


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [prepared, by_tensor, RoundedWeight])
def test_observers_and_rounded_layers(make: Any) -> None:
    batches = [(torch.randn(5, 3),) for _ in range(4)]
    check_training(
        make(),
        lambda module, x: module(x).square().mean(),
        batches,
        dovetail.compile(backend="aten"),
        exact=make is not by_tensor,
    )


@pytest.mark.filterwarnings("ignore")
def test_a_prepared_model_is_one_graph_after_its_first_call() -> None:
    model = prepared()
    x = torch.randn(5, 3)
    model(x)
    with torch.no_grad():
        expected = model(x)
        assert torch.equal(dovetail.compile(model, backend="aten", fullgraph=True)(x), expected)
        model.apply(quantization.disable_observer)
        compiled = dovetail.compile(model, backend="aten", fullgraph=True)
        assert torch.equal(compiled(x * 2), model(x * 2))
        model.apply(quantization.disable_fake_quant)
        assert torch.equal(compiled(x), model(x))
        assert entries_of(compiled) == 1
