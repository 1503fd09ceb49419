"""A small GPT for ``dovetail plan examples/plan_gpt.py --ranks 8,64,1024``."""

from __future__ import annotations

import torch
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from dovetail.simulator import Training

LAYERS, WIDTH, HEADS, LENGTH, WORDS, BATCH = 4, 256, 8, 128, 1024, 8


class Block(torch.nn.Module):
    """Attention and a multilayer perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = (torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The new hidden states."""
        normed = self.before(x)
        parts = [
            part(normed).unflatten(2, (-1, WIDTH // HEADS)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        ]
        mixed = torch.nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(torch.nn.functional.gelu(self.up(self.between(x))))


class GPT(torch.nn.Module):
    """A language model."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = torch.nn.Embedding(WORDS, WIDTH), torch.nn.Embedding(LENGTH, WIDTH)
        self.blocks = torch.nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = torch.nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Logits of the next word."""
        return self.head(self.blocks(self.words(words) + self.places.weight))


def loss(model: torch.nn.Module, words: torch.Tensor) -> torch.Tensor:
    """The mean cross entropy of the next word."""
    logits = model(words)[:, :-1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())


def build() -> Training:
    """The model, its optimizer and one rank's batch."""
    model = GPT()
    columns = {f"blocks.*.{name}": ColwiseParallel() for name in ("query", "key", "value", "up")}
    rows = {f"blocks.*.{name}": RowwiseParallel() for name in ("out", "down")}
    words = torch.randint(WORDS, (BATCH, LENGTH))
    return Training(model, torch.optim.AdamW(model.parameters(), lr=3e-4), loss, (words,), {**columns, **rows})
