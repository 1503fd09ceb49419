"""TorchRL: the loss of proximal policy optimisation over tensordicts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ecosystem.training import Wrap, compare, train

pytest.importorskip("torchrl", reason="TorchRL is not installed")
tensordict = pytest.importorskip("tensordict", reason="tensordict is not installed")
pytestmark = pytest.mark.usefixtures("quiet")


def batch() -> Any:
    ended = {name: torch.zeros(2, 8, 1, dtype=torch.bool) for name in ("done", "terminated")}
    following = {"observation": torch.randn(2, 8, 4), "reward": torch.randn(2, 8, 1), **ended}
    return tensordict.TensorDict({"observation": torch.randn(2, 8, 4), "next": following}, [2, 8])


def test_proximal_policy_optimisation() -> None:
    from tensordict.nn import NormalParamExtractor, TensorDictModule
    from torchrl.modules import MLP, ProbabilisticActor, TanhNormal, ValueOperator
    from torchrl.objectives import ClipPPOLoss
    from torchrl.objectives.value import GAE

    def run(wrap: Wrap) -> tuple[Any, Any]:
        layers = torch.nn.Sequential(MLP(in_features=4, out_features=4, num_cells=[16]), NormalParamExtractor())
        actor = ProbabilisticActor(
            TensorDictModule(layers, ["observation"], ["loc", "scale"]),
            in_keys=["loc", "scale"],
            distribution_class=TanhNormal,
            return_log_prob=True,
        )
        critic = ValueOperator(MLP(in_features=4, out_features=1, num_cells=[16]), in_keys=["observation"])
        advantage = GAE(gamma=0.99, lmbda=0.95, value_network=critic, average_gae=True)
        model = ClipPPOLoss(actor, critic)
        call = wrap(model)

        def loss(call: Any, index: int) -> torch.Tensor:
            with torch.no_grad():
                played = advantage(actor(batch()))
            found = call(played.reshape(-1))
            return found["loss_objective"] + found["loss_critic"] + found["loss_entropy"]

        return train(model, call, loss), call

    # It is one graph where the library is told that it is compiled; eight breaks are left of 26.
    compare(run, captures=60)
