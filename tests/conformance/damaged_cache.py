"""Train again and again from a cache with a damaged entry: eager's answer each time, no exception, no entry that is believed.

``python -m tests.conformance.damaged_cache --seconds 300 --seed 0`` fills a cache once (decomposed graphs, their code, kernels,
what operators record, and what is known of the compiler). In each round it damages one entry on disk, of any kind, and trains as
a new process would: the graph is captured, looked for in the cache, and runs by operators where an entry of it is not whole.
"""

from __future__ import annotations

import argparse
import collections
import os
import random
import sys
import tempfile
import time
import unittest.mock
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dovetail
from dovetail import cache
from dovetail.fast_capture.memory import MEMORIES
from dovetail.tiers import choice, process
from tests.tiers.fakes import FakeWorker


def _flip(path: Path, dice: random.Random, others: Sequence[Path]) -> None:
    data = bytearray(path.read_bytes())
    data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    path.write_bytes(data)


def _cut(path: Path, dice: random.Random, others: Sequence[Path]) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: dice.randrange(len(data))])


def _add(path: Path, dice: random.Random, others: Sequence[Path]) -> None:
    data = path.read_bytes()
    place = dice.randrange(len(data) + 1)
    path.write_bytes(data[:place] + dice.randbytes(dice.randint(1, 40)) + data[place:])


def _blank(path: Path, dice: random.Random, others: Sequence[Path]) -> None:
    """A block that never reached the disk."""
    data = bytearray(path.read_bytes())
    place, size = dice.randrange(len(data)), dice.choice((16, 512, 4096))
    hole = bytes(len(data[place : place + size]))
    data[place : place + size] = hole if any(data[place : place + size]) else b"\xff" * max(len(hole), 1)
    path.write_bytes(data)


def _exchange(path: Path, dice: random.Random, others: Sequence[Path]) -> None:
    """A whole entry under another entry's name."""
    path.write_bytes(dice.choice([item for item in others if item != path]).read_bytes())


def _remove(path: Path, dice: random.Random, others: Sequence[Path]) -> None:
    path.unlink()


def _link(path: Path, dice: random.Random, others: Sequence[Path]) -> None:
    """The same content, but somebody else may have laid the link."""
    content, elsewhere = path.read_bytes(), path.parent.parent / "elsewhere"
    elsewhere.write_bytes(content)
    path.unlink()
    path.symlink_to(elsewhere)


DAMAGES: tuple[Callable[[Path, random.Random, Sequence[Path]], None], ...] = (
    _flip, _flip, _cut, _add, _blank, _exchange, _remove, _link,
)  # fmt: skip


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3), nn.Softmax(-1))


def _train(model: Any, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    loss = model(x).square().sum()
    loss.backward()
    return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


def _as_a_new_process(model: nn.Module) -> Any:
    """The model compiled, with nothing in memory of what was captured or loaded before."""
    dovetail.reset()
    MEMORIES.clear()
    for name in [name for name in sys.modules if name.endswith(".kernel")]:
        del sys.modules[name]
    return dovetail.compile(model, backend="inductor")


def stress(seconds: float, seed: int, rounds: int | None = None) -> dict[str, dict[str, int]]:
    """Rounds until the time is up; by the kind of the entry how often the kernels ran, and how often the operators."""
    dice, model = random.Random(seed), _model()
    x = torch.randn(5, 6)
    expected = _train(model, x)
    with unittest.mock.patch.dict(os.environ, {choice.SWITCH: "wait"}):
        _train(dovetail.compile(model, backend="inductor"), x)
    for memory in MEMORIES.values():
        memory.keep()
    paths = [path for path in cache.directory().glob("*/*") if not path.name.endswith(".lock")]
    whole = {path: path.read_bytes() for path in paths}
    found: dict[str, dict[str, int]] = collections.defaultdict(lambda: {"kernels": 0, "operators": 0})
    end = time.monotonic() + seconds
    number = 0
    while time.monotonic() < end and (rounds is None or number < rounds):
        path = dice.choice(paths)
        # Each tenth round nothing is damaged: the kernels run, or the rounds would show nothing.
        if number % 10:
            dice.choice(DAMAGES)(path, dice, paths)
        compiled = _as_a_new_process(model)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            results = _train(compiled, x)
        for one, other in zip(results, expected, strict=True):
            torch.testing.assert_close(one, other)
        log = dovetail.events_of(compiled)
        is_hit = log.count("tier 1") == 1 and not log.count("tier 0")
        found[path.parent.name if number % 10 else "none"]["kernels" if is_hit else "operators"] += 1
        if number % 10 and is_hit and path.parent.name in ("graphs", "code", "kernels"):
            raise AssertionError(f"seed {seed}, round {number}: a damaged entry was believed: {path}")
        if number % 10 == 0 and not is_hit:
            raise AssertionError(f"seed {seed}, round {number}: whole entries were not found: {log}")
        for item, content in whole.items():
            if item.is_symlink() or not item.exists() or item.read_bytes() != content:
                item.unlink(missing_ok=True)
                item.write_bytes(content)
                item.chmod(0o600)
        number += 1
    return dict(found)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run rounds until the time is up, in a cache of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"DOVETAIL_CACHE_DIR": folder, "DOVETAIL_CACHE": "1", choice.SWITCH: "auto"}
        # In the place of a compiler in the background: damaged entries stay damaged until the end of the round.
        process.worker = FakeWorker  # type: ignore[assignment]
        print(stress(chosen.seconds, chosen.seed, chosen.rounds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
