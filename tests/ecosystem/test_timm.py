"""timm: image models of several families train as in eager, written down under their own names."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from tests.ecosystem.training import Wrap, compare, train

try:
    # torchvision's wheel for GPUs cannot load its operators beside a build of torch for the CPU; timm's models need none of them.
    _operators = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        with contextlib.suppress(RuntimeError):
            _operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import timm
except (ImportError, RuntimeError) as error:
    pytest.skip(f"timm cannot be imported: {error}", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("quiet")

MODELS = {
    "vit_tiny_patch16_224": {"img_size": 32, "patch_size": 8, "depth": 2},
    "resnet10t": {},
    "convnext_atto": {"depths": (1, 1, 1, 1), "dims": (8, 16, 24, 32)},
}
IMAGES = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))
LABELS = torch.arange(4)


def loss(call: Any, index: int) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(call(IMAGES), LABELS)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains(name: str) -> None:
    def run(wrap: Wrap) -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = timm.create_model(name, num_classes=4, **MODELS[name])
        call = wrap(model)
        return train(model, call, loss, steps=2), call

    compare(run, captures=2)
