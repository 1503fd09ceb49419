"""A step with each library by Inductor's kernels: the loss and the gradients are eager's, but for rounding."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail
from tests.differential import Rule, same

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]

Loss = Callable[[Any], torch.Tensor]


def of_transformers() -> tuple[torch.nn.Module, Loss]:
    from tests.ecosystem import test_peft as library

    return library.base(), lambda call: library.loss(call, 0)


def of_peft() -> tuple[torch.nn.Module, Loss]:
    from tests.ecosystem import test_peft as library

    return library.peft.get_peft_model(library.base(), library.KINDS["lora"]()), lambda call: library.loss(call, 0)


def of_diffusers() -> tuple[torch.nn.Module, Loss]:
    from tests.ecosystem import test_diffusers as library

    blocks = {"down_block_types": ("DownBlock2D",), "up_block_types": ("UpBlock2D",), "norm_num_groups": 4}
    model = library.diffusers.UNet2DModel(sample_size=8, layers_per_block=1, block_out_channels=(8,), **blocks)
    return model, lambda call: call(torch.ones(1, 3, 8, 8), torch.tensor([3])).sample.square().mean()


def of_geometric() -> tuple[torch.nn.Module, Loss]:
    from tests.ecosystem import test_geometric as library

    graph = library.graph(6)
    batch = torch.tensor([0, 0, 0, 1, 1, 1])
    return library.Network("GCNConv"), lambda call: call(graph.x, graph.edge_index, batch).square().mean()


def of_ignite() -> tuple[torch.nn.Module, Loss]:
    from tests.ecosystem import test_ignite as library

    def loss(call: Any) -> torch.Tensor:
        engine = library.engines.Engine(lambda engine, pair: torch.nn.functional.mse_loss(call(pair[0]), pair[1]))
        found: torch.Tensor = engine.run(library.batches(1)).output
        return found

    return library.model(), loss


def of_timm() -> tuple[torch.nn.Module, Loss]:
    from tests.ecosystem import test_timm as library

    options = {"img_size": 32, "patch_size": 8, "depth": 1, "num_classes": 4}
    return library.timm.create_model("vit_tiny_patch16_224", **options), lambda call: library.loss(call, 0)


def of_torchrl() -> tuple[torch.nn.Module, Loss]:
    from tests.ecosystem import test_torchrl as library

    torchrl, nn = pytest.importorskip("torchrl.modules"), pytest.importorskip("tensordict.nn")
    model = nn.TensorDictModule(torchrl.MLP(in_features=4, out_features=2, num_cells=[8]), ["observation"], ["action"])
    batch = library.batch()
    return model, lambda call: call(batch.clone())["action"].square().mean()


def of_accelerate() -> tuple[torch.nn.Module, Loss]:
    accelerate = pytest.importorskip("accelerate", reason="Accelerate is not installed")
    model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))

    def loss(call: Any) -> torch.Tensor:
        found: torch.Tensor = accelerate.Accelerator(cpu=True).prepare(call)(torch.ones(4, 3)).square().mean()
        return found

    return model, loss


LIBRARIES = (*(of_transformers, of_peft, of_diffusers, of_geometric), *(of_ignite, of_timm, of_torchrl, of_accelerate))


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.__name__.removeprefix("of_"))
def test_a_step_by_generated_kernels(library: Callable[[], tuple[torch.nn.Module, Loss]]) -> None:
    torch.manual_seed(0)
    model, loss = library()
    compiled = dovetail.compile(copy.deepcopy(model), backend="inductor", tiers="wait")
    results = []
    for call in (model, compiled):
        torch.manual_seed(1)
        found = loss(call)
        found.backward()
        results.append([found.detach(), {name: item.grad for name, item in call.named_parameters()}])
    assert any(gradient is not None for gradient in results[0][1].values())
    same(*results, exact=Rule("close", (1e-3, 1e-5)))
    kinds = {event.name: event.details.get("backend") for event in dovetail.events_of(compiled).events}
    assert kinds["compile forward"] == kinds["compile backward"] == "inductor"
