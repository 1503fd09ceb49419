"""A loop as CleanRL writes them, in one file: roll-outs with a policy, generalised advantages, epochs of clipped updates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributions import Categorical

from tests.ecosystem.training import Wrap, compare

pytestmark = pytest.mark.usefixtures("quiet")
ENVIRONMENTS, STEPS, GAMMA, LAMBDA, CLIP = 3, 4, 0.99, 0.95, 0.2


class Corridors:
    """Several corridors: one walks left or right, and is rewarded at the end."""

    def __init__(self) -> None:
        self.place = torch.zeros(ENVIRONMENTS)

    def seen(self) -> torch.Tensor:
        return torch.stack([self.place, self.place.square(), torch.ones(ENVIRONMENTS)], 1)

    def step(self, action: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        self.place = self.place + action * 2 - 1
        done = self.place.abs() >= 2
        reward = (self.place >= 2).float()
        self.place = torch.where(done, 0.0, self.place)
        return self.seen(), reward, done.float()


class Agent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        self.actor = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))

    def get_action_and_value(self, x: torch.Tensor, action: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        chances = Categorical(logits=self.actor(x))
        if action is None:
            action = chances.sample()
        return action, chances.log_prob(action), chances.entropy(), self.critic(x)


def gae(rewards: torch.Tensor, dones: torch.Tensor, values: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    advantages, following = [], torch.zeros_like(last)
    for step in reversed(range(STEPS)):
        after = last if step == STEPS - 1 else values[step + 1]
        going_on = 1.0 - dones[step]
        following = rewards[step] + GAMMA * after * going_on - values[step] + GAMMA * LAMBDA * going_on * following
        advantages.append(following)
    return torch.stack(advantages[::-1])


def train(wrap: Wrap) -> tuple[Any, Any]:
    agent = Agent()
    optimizer = torch.optim.Adam(agent.parameters(), 1e-2, eps=1e-5)

    def update(
        seen: torch.Tensor, action: torch.Tensor, before: torch.Tensor, gain: torch.Tensor, to: torch.Tensor
    ) -> Any:
        optimizer.zero_grad()
        _, chance, entropy, value = agent.get_action_and_value(seen, action)
        ratio = (chance - before).exp()
        gain = (gain - gain.mean()) / (gain.std() + 1e-8)
        policy = torch.max(-gain * ratio, -gain * ratio.clamp(1 - CLIP, 1 + CLIP)).mean()
        loss = policy - 0.01 * entropy.mean() + 0.5 * (value.view(-1) - to).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
        optimizer.step()
        return loss.detach(), (ratio - 1 - ratio.log()).mean().detach()

    act, advantages_of, learn = wrap(agent.get_action_and_value), wrap(gae), wrap(update)
    world, losses = Corridors(), []
    for _ in range(2):
        rows: list[list[torch.Tensor]] = []
        with torch.no_grad():
            for _ in range(STEPS):
                seen = world.seen()
                action, chance, _, value = act(seen)
                _, reward, done = world.step(action)
                rows.append([seen, action, chance, reward, done, value.view(-1)])
            seen, action, chance, reward, done, value = map(torch.stack, zip(*rows))
            gain = advantages_of(reward, done, value, agent.critic(world.seen()).view(-1))
        batch = [item.flatten(0, 1) for item in (seen, action, chance, gain, gain + value)]
        for _ in range(2):
            for part in torch.randperm(ENVIRONMENTS * STEPS).split(6):
                losses.append(learn(*(item[part] for item in batch)))
    return [losses, dict(agent.state_dict())], learn


@pytest.mark.slow
def test_proximal_policy_optimisation_in_one_file() -> None:
    # The first step finds no state of the optimizer.
    compare(train, captures=2)
