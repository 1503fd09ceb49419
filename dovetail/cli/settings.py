"""The engines of the demo, and the settings of a training run."""

from __future__ import annotations

from dataclasses import dataclass

#: The engines in the order in which they are shown.
ENGINES = ("eager", "torch.compile", "dovetail-aten", "dovetail-inductor")


@dataclass(frozen=True)
class Settings:
    """A training run; settings that are equal but for ``engine`` give the same weights and the same batches."""

    engine: str
    layers: int
    heads: int
    width: int
    block: int
    batch: int
    steps: int
    characters: int
    learning_rate: float
    seed: int
    threads: int
