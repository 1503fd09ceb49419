"""The demo's model: a decoder-only transformer with the sizes of nanoGPT."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a :class:`GPT`; the defaults are those of the demo."""

    vocabulary: int
    block: int = 128
    layers: int = 6
    heads: int = 6
    width: int = 384
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"the width ({self.width}) must be a multiple of the number of heads ({self.heads})")


class SelfAttention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.inward = nn.Linear(config.width, 3 * config.width, bias=False)
        self.outward = nn.Linear(config.width, config.width, bias=False)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Attend from each position of ``x`` (batch, time, width) to those before it."""
        parts = self.inward(x).split(x.shape[2], dim=2)
        query, key, value = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in parts)
        dropout = self.dropout.p if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        return self.dropout(self.outward(mixed.transpose(1, 2).flatten(2)))  # type: ignore[no-any-return]


class Block(nn.Module):
    """One layer: attention and feed-forward, each behind a layer norm and beside a residual path."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.width
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.attention = SelfAttention(config)
        self.feed_forward_norm = nn.LayerNorm(width, bias=False)
        self.widen = nn.Linear(width, 4 * width, bias=False)
        self.narrow = nn.Linear(4 * width, width, bias=False)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.dropout(self.narrow(F.gelu(self.widen(self.feed_forward_norm(x)))))


class GPT(nn.Module):
    """Tokens to logits, or to the mean cross-entropy where ``targets`` are given.

    Input and output embeddings are one tied weight.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.block, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, bias=False)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self._initialise()
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return logits (batch, time, vocabulary), or the scalar loss against ``targets``."""
        time = tokens.shape[1]
        if time > self.config.block:
            raise ValueError(f"{time} tokens are more than the model's block of {self.config.block}")
        x = self.dropout(self.tokens(tokens) + self.positions(torch.arange(time, device=tokens.device)))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))

    def _initialise(self) -> None:
        for name, weight in self.named_parameters():
            if weight.dim() < 2:
                continue  # layer norms start at one
            # The layers that write to the residual path are scaled down, so that its variance does not grow with depth.
            onto_residual = name.endswith(("outward.weight", "narrow.weight"))
            nn.init.normal_(weight, std=0.02 / math.sqrt(2 * self.config.layers) if onto_residual else 0.02)


def make_optimizer(model: nn.Module, learning_rate: float) -> torch.optim.AdamW:
    """Return an AdamW that decays matrices, but neither norms nor other vectors."""
    weights = list(model.parameters())
    groups = [
        {"params": [weight for weight in weights if weight.dim() >= 2], "weight_decay": 0.1},
        {"params": [weight for weight in weights if weight.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.99))
