"""The cache on disk under stress: processes killed while they fill it, and entries of every kind that are damaged.

``python -m tests.conformance.cache_stress`` does three things until the counts are reached (``--only`` one of them):

*kills*: four processes at a time train one of three programs with one cache, compile what is missing in it, and are killed at a
random instant; entries are removed, so that there is always something to write. Every entry on disk must be whole.

*damaged*: entries of the filled cache are damaged on disk, from one to all at a time. None of them may be read; and in each eighth
round a program trains as in a new process. It must get eager's answer without a warning, by the kernels exactly where none of the
entries that it needs is damaged.

*meaningless*: entries that are whole, but hold what nobody has written: a miss, and no exception.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import itertools
import os
import random
import signal
import stat
import sys
import tempfile
import time
import unittest.mock
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dovetail
from dovetail import cache
from dovetail.cache import entries
from dovetail.face.loading import load_rules
from dovetail.fast_capture.memory import MEMORIES
from dovetail.tiers import choice, process
from dovetail.torch_private import inductor_cache
from tests.tiers.fakes import FakeWorker

WRITERS = 4
#: Of so many rounds of damage one is followed by a step, which takes longer than all the others.
READS = 8
#: The longest time after which a writer is killed: most have compiled by then.
LIFE = 4.0


class CompilesHere(FakeWorker):
    """In the place of the process in the background: its graphs are compiled by this process, at the third call."""

    def submit(self, data: dict[str, Any]) -> Any:
        """Take a job that no other process can do."""
        job = super().submit(data)
        self.answer_all(process.Answer("unfit", "compiled here"))
        return job


def _layers() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3), nn.Softmax(-1)), torch.randn(
        5, 6
    )


def _pictures() -> tuple[nn.Module, Tensor]:
    body = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 2))
    return body, torch.randn(3, 2, 5, 5)


def _places() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Embedding(7, 4), nn.Dropout(0.5), nn.Tanh(), nn.Linear(4, 7)), torch.arange(14).reshape(
        2, 7
    ) % 7


PROGRAMS = {"layers": _layers, "pictures": _pictures, "places": _places}


def made(name: str) -> tuple[nn.Module, Tensor]:
    """A program: a model and what it is given."""
    torch.manual_seed(0)
    return PROGRAMS[name]()


def trained(model: Any, x: Tensor) -> list[Tensor]:
    """Loss, gradients and buffers of a step."""
    torch.manual_seed(1)
    model.zero_grad()
    loss = model(x).square().sum()
    loss.backward()
    buffers = [buffer.detach().clone() for buffer in model.buffers()]
    return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters()), *buffers]


def check(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Eager's answer, up to rounding."""
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def compiled_anew(model: nn.Module) -> Any:
    """The model compiled, with nothing in memory of what was captured or loaded before."""
    dovetail.reset()
    MEMORIES.clear()
    for name in [name for name in sys.modules if name.endswith(".kernel")]:
        del sys.modules[name]
    return dovetail.compile(model, backend="inductor", fullgraph=True)


def fill(name: str) -> None:
    """Train until the kernels are there and the cache is filled."""
    process.worker = CompilesHere  # type: ignore[assignment]
    model, x = made(name)
    compiled = compiled_anew(model)
    expected = [trained(made(name)[0], x)[0]]
    for _ in range(4):
        check(trained(compiled, x)[:1], expected)
    log = dovetail.events_of(compiled)
    if not log.count("tier 1"):
        raise AssertionError(f"no kernels: {log}")
    for memory in MEMORIES.values():
        memory.keep()


def in_fork(work: Callable[[], object], words: Path) -> int:
    """Begin something in a fork of this process, in a group of its own; what it raises is in a file."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        os.setsid()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            work()
        status = 0
    except BaseException as error:  # noqa: BLE001  (said by the parent)
        words.write_text(f"{type(error).__name__}: {error}")
    finally:
        os._exit(status)


class Counts(collections.Counter[str]):
    """What was done so far; said each minute, so that a run that is stopped has said it too."""

    def __init__(self, *counts: Mapping[str, int]) -> None:
        super().__init__(*counts)
        self._next = time.monotonic() + 60

    def said(self, where: str) -> None:
        """Print the counts from time to time."""
        if time.monotonic() > self._next:
            self._next = time.monotonic() + 60
            print(f"{where}, so far: {dict(self)}", flush=True)


def whole_entries() -> int:
    """How many entries there are; each must be whole, and be a file of this user's."""
    count = 0
    for entry in cache.ls():
        path = cache.directory() / entry.kind / entry.key
        if entries.decode(entry.kind, entry.key, path.read_bytes()) is None:
            raise AssertionError(f"half an entry: {path}")
        count += 1
    return count


# --- kills --------------------------------------------------------------------------------------------------------------


def _write_for_ever(seed: int) -> None:
    dice = random.Random(seed)
    while True:
        fill(dice.choice(list(PROGRAMS)))


def kills(count: int, seed: int, folder: Path) -> dict[str, int]:
    """Kill writers at random instants; how often, how many were still at work, and how many entries were seen whole."""
    dice, words = random.Random(seed), folder / "words"
    os.environ["DOVETAIL_CACHE_DIR"] = str(folder / "kills")
    found = Counts({"kills": 0, "entries": 0, "half-written files": 0})
    while found["kills"] < count:
        found.said("kills")
        writers = {in_fork(functools.partial(_write_for_ever, seed * WRITERS + at), words) for at in range(WRITERS)}
        start, seed = time.monotonic(), seed + 1
        for at in sorted(dice.random() * LIFE for _ in writers):
            time.sleep(max(0.0, start + at - time.monotonic()))
            writer = dice.choice(sorted(writers))
            writers.remove(writer)
            os.killpg(writer, signal.SIGKILL)
            _, status = os.waitpid(writer, 0)
            if not os.WIFSIGNALED(status):
                raise AssertionError(f"a writer has ended: {words.read_text()}")
            found["kills"] += 1
            found["entries"] += whole_entries()
        found["half-written files"] += len(list(cache.directory().glob("*/*.new")))
        if cache.ls():
            for entry in dice.sample(cache.ls(), dice.randint(1, len(cache.ls()))):
                (cache.directory() / entry.kind / entry.key).unlink(missing_ok=True)
    for name in PROGRAMS:
        _, status = os.waitpid(in_fork(functools.partial(fill, name), words), 0)
        if status:
            raise AssertionError(f"after all kills: {words.read_text()}")
    whole_entries()
    return dict(found)


# --- damage -------------------------------------------------------------------------------------------------------------

Damage = Callable[[Path, random.Random, Sequence[Path]], None]


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
    found = [item.read_bytes() for item in others if item != path and item.is_file()]
    # Two may have changed places: then it would be its own content.
    path.write_bytes(
        dice.choice([data for data in found if entries.decode(path.parent.name, path.name, data) is None] or [b""])
    )


def _remove(path: Path, dice: random.Random, others: Sequence[Path]) -> None:
    path.unlink()


def _link(path: Path, dice: random.Random, others: Sequence[Path]) -> None:
    """The same content, but somebody else may have laid the link."""
    elsewhere = path.parent.parent / f"elsewhere-{path.name}"
    elsewhere.write_bytes(path.read_bytes())
    path.unlink()
    path.symlink_to(elsewhere)


def _open(path: Path, dice: random.Random, others: Sequence[Path]) -> None:
    """The same content, but everybody can write to it."""
    path.chmod(path.stat().st_mode | stat.S_IWOTH)


DAMAGES: tuple[Damage, ...] = (_flip, _flip, _cut, _add, _blank, _exchange, _remove, _link, _open)


class Filled:
    """A program with a cache of its own that is filled, and can be made whole again."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self._place = str(folder / name)
        self.model, self.x = made(name)
        with self.cache():
            _, status = os.waitpid(in_fork(lambda: fill(name), folder / "words"), 0)
            if status:
                raise AssertionError((folder / "words").read_text())
            self.paths = sorted(cache.directory() / entry.kind / entry.key for entry in cache.ls())
        self._whole = {path: path.read_bytes() for path in self.paths}
        kinds = {path.parent.name for path in self.paths}
        if kinds != set(entries.KINDS):
            raise AssertionError(f"{name} has filled {kinds} only")

    @contextlib.contextmanager
    def cache(self) -> Iterator[None]:
        """A block in which the program's cache is used."""
        with unittest.mock.patch.dict(os.environ, {"DOVETAIL_CACHE_DIR": self._place}):
            yield

    def step(self) -> tuple[list[Tensor], Any]:
        """A step as in a new process, and the log of its compilation."""
        model = made(self.name)[0]
        compiled = compiled_anew(model)
        return trained(compiled, self.x), dovetail.events_of(compiled)

    def mend(self) -> None:
        """All entries as they were."""
        for path, content in self._whole.items():
            is_plain = not path.is_symlink() and path.is_file() and not path.stat().st_mode & stat.S_IWOTH
            if is_plain and path.read_bytes() == content:
                continue
            path.unlink(missing_ok=True)
            path.write_bytes(content)
            path.chmod(0o600)

    def is_enough(self, damaged: set[Path]) -> bool:
        """Whether the kernels can be had without the entries that are damaged."""
        kinds = {path.parent.name for path in damaged}
        return not kinds & {"code", "kernels"} and not kinds >= {"steps", "graphs"}


def damaged(count: int, seed: int, programs: Sequence[Filled]) -> dict[str, Any]:
    """Damage entries, read them, and train after some of these rounds; how many entries of each kind, and what the steps ran by."""
    dice = random.Random(seed)
    found = Counts({"entries": 0, "in trained rounds": 0, "trained": 0, "trained by kernels": 0})
    expected = {program.name: trained(made(program.name)[0], program.x) for program in programs}
    for number in itertools.count():
        found.said(f"damaged, seed {seed}")
        if found["entries"] >= count:
            break
        program, trains = dice.choice(programs), number % READS == 0
        # Before each tenth step nothing is damaged: the kernels run, or the others would show nothing.
        is_none = trains and number // READS % 10 == 0
        chosen = set(
            dice.sample(program.paths, 0 if is_none else dice.choice((1, dice.randint(1, len(program.paths)))))
        )
        for path in sorted(chosen):
            dice.choice(DAMAGES)(path, dice, program.paths)
        with program.cache():
            believed = [path for path in sorted(chosen) if cache.read(path.parent.name, path.name) is not None]
        if believed:
            raise AssertionError(f"seed {seed}, round {number}: {believed} were read")
        found.update(["entries"] * len(chosen) + [path.parent.name for path in chosen])
        if trains:
            is_hit = _train_with(program, chosen, expected[program.name], f"seed {seed}, round {number}")
            found.update({"in trained rounds": len(chosen), "trained": 1, "trained by kernels": is_hit})
        program.mend()
    return dict(found)


def _train_with(program: Filled, chosen: set[Path], expected: Sequence[Tensor], where: str) -> bool:
    with program.cache(), warnings.catch_warnings():
        warnings.simplefilter("error")
        results, log = program.step()
    check(results, expected)
    is_hit = log.count("tier 1") == 1 and not log.count("tier 0")
    if is_hit is not program.is_enough(chosen):
        raise AssertionError(f"{where}: {program.name}, {sorted(chosen)}: {log}")
    return is_hit


# --- entries that mean nothing ------------------------------------------------------------------------------------------


def _nonsense(content: bytes, dice: random.Random) -> bytes:
    whole = (b"", b"[", b"null", b"[" * 100_000, b"{}", b"[]", b"[3]", b"\xff\xfe", b"9" * 5_000, dice.randbytes(50))
    return dice.choice((*whole, content[: dice.randrange(len(content))]))


def meaningless(count: int, seed: int, programs: Sequence[Filled]) -> dict[str, Any]:
    """Entries of data with other data in them: no exception, and the result is eager's where the data means nothing.

    ``code`` and ``kernels`` are machine code, and are believed as far as they are whole.
    """
    dice = random.Random(seed)
    found = Counts()
    expected = {program.name: trained(made(program.name)[0], program.x) for program in programs}
    for _ in range(count):
        found.said("meaningless")
        program = dice.choice(programs)
        path = dice.choice([path for path in program.paths if path.parent.name not in ("code", "kernels")])
        kind, key = path.parent.name, path.name
        content = entries.decode(kind, key, path.read_bytes())
        path.write_bytes(entries.encode(kind, key, _nonsense(content or b"", dice)))
        if kind == "graphs":
            # Without the steps it is looked for.
            next(item for item in program.paths if item.parent.name == "steps").unlink()
        with program.cache(), warnings.catch_warnings():
            warnings.simplefilter("error")
            results, _ = program.step()
        check(results, expected[program.name])
        program.mend()
        found[kind] += 1
    return dict(found)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until the counts are reached, in caches of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1_000)
    parser.add_argument("--damaged", type=int, default=100_000)
    parser.add_argument("--meaningless", type=int, default=1_000)
    parser.add_argument("--only", choices=("kills", "damaged", "meaningless"))
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ |= {
            "DOVETAIL_CACHE": "1",
            choice.SWITCH: "auto",
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        }
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
        load_rules()
        inductor_cache.load_compiler()
        if chosen.only in (None, "kills"):
            print("kills:", kills(chosen.kills, chosen.seed, folder), flush=True)
        if chosen.only != "kills":
            # No gradient is computed here before the last fork: autograd's threads would not survive it.
            programs = [Filled(name, folder) for name in PROGRAMS]
            process.worker = FakeWorker  # type: ignore[assignment]
            for run in (damaged, meaningless):
                if chosen.only in (None, run.__name__):
                    print(f"{run.__name__}:", run(getattr(chosen, run.__name__), chosen.seed, programs), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
