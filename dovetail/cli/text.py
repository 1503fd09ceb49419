"""The demo's text: source files of Python's standard library, as character-level tokens; every machine has them."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor


@dataclass(frozen=True)
class Text:
    """A text as indices into its vocabulary (the sorted characters that occur in it)."""

    tokens: Tensor
    vocabulary: str

    def __len__(self) -> int:
        return self.tokens.numel()

    def batch(self, *, step: int, batch: int, block: int, seed: int) -> tuple[Tensor, Tensor]:
        """Return the inputs and targets (batch, block) of a training step; equal arguments give equal batches."""
        if len(self) <= block:
            raise ValueError(f"the text has {len(self)} characters; a block of {block} needs more")
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        starts = torch.randint(len(self) - block, (batch, 1), generator=generator)
        places = starts + torch.arange(block + 1)
        window = self.tokens[places]
        return window[:, :-1].contiguous(), window[:, 1:].contiguous()


def read_text(characters: int) -> Text:
    """Return the first ``characters`` characters of the standard library's top-level modules, in the order of their names."""
    if characters < 1:
        raise ValueError(f"the text needs at least one character, not {characters}")
    parts: list[str] = []
    missing, folder = characters, Path(sysconfig.get_path("stdlib"))
    for path in sorted(path for path in folder.glob("*.py") if path.is_file()):
        part = path.read_text(encoding="utf-8", errors="replace")[:missing]
        parts.append(part)
        missing -= len(part)
        if not missing:
            break
    content = "".join(parts)
    if not content:
        raise FileNotFoundError(f"no source files of the standard library in {folder}; the demo trains on them")
    vocabulary = "".join(sorted(set(content)))
    index = {character: number for number, character in enumerate(vocabulary)}
    return Text(torch.tensor([index[character] for character in content]), vocabulary)
