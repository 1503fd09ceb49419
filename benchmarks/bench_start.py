"""The first second: how long a user waits for the first step, the tenth, and full speed; eager, torch.compile and Dovetail.

Each engine trains in a fresh process, engines alternate, and each process gets its own folder for compiled code: once empty
("cold"), then a second process with the folder that the first one has filled ("warm"). The clock starts when the model is there,
right before the compiler is imported, and every step ends with the value of its loss. Run it with ``make bench-start``.

- *first*, *tenth*: seconds until so many steps are done.
- *full speed*: seconds until ten steps are done of which the median is at most 1.3 times that of the second half of the run.
- *steps*: how many steps were done in ``--seconds``; *CPU*: seconds of all cores, compilers and background processes included.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measuring import alternating, make_parser, positive, save
from torch import Tensor, nn

from dovetail.cli.gpt import GPT, GPTConfig
from dovetail.reports.table import Table

EAGER, THEIRS, OURS, WAITING = "eager", "torch.compile", "Dovetail", 'Dovetail, tiers="wait"'
ENGINES = (EAGER, THEIRS, OURS, WAITING)
CACHES = ("cold", "warm")
#: The project's aims: Dovetail's seconds over those of torch.compile.
AIMS = {("cold", "first"): 0.08, ("cold", "full"): 0.6, ("warm", "full"): 0.25}


def gpt() -> tuple[nn.Module, Callable[[nn.Module, int], Tensor]]:
    """A GPT of 6 layers."""
    model = GPT(GPTConfig(vocabulary=100, block=64, layers=6, width=192))

    def loss(module: nn.Module, step: int) -> Tensor:
        tokens = torch.randint(100, (4, 64), generator=torch.Generator().manual_seed(step))
        found: Tensor = module(tokens, tokens)
        return found

    return model, loss


class Residual(nn.Module):
    """Two convolutions around which the input goes as it is."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Add what the convolutions find."""
        return nn.functional.relu(x + self.body(x))


def resnet() -> tuple[nn.Module, Callable[[nn.Module, int], Tensor]]:
    """A small residual network for images."""
    blocks = [Residual(32) for _ in range(6)]
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)
    )

    def loss(module: nn.Module, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(step)
        images, labels = (
            torch.randn(8, 3, 16, 16, generator=generator),
            torch.randint(10, (8,), generator=generator),
        )
        return nn.functional.cross_entropy(module(images), labels)

    return model, loss


PROGRAMS = {"gpt": gpt, "resnet": resnet}


def compiled_by(engine: str, model: nn.Module) -> nn.Module:
    """The model as an engine runs it; the compiler's import counts."""
    if engine == EAGER:
        return model
    if engine == THEIRS:
        return torch.compile(model)  # type: ignore[return-value]
    import dovetail

    found: nn.Module = dovetail.compile(model, backend="inductor", tiers="auto" if engine == OURS else "wait")
    return found


def work(program: str, engine: str, seconds: float, threads: int) -> None:
    """Train for so many seconds, at least twelve steps, and print when each step was done."""
    # The tools of all benchmarks ask for kernels from the first call on.
    os.environ.pop("DOVETAIL_TIERS", None)
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model, loss_of = PROGRAMS[program]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    done: list[float] = []
    losses: list[float] = []
    start = time.perf_counter()
    compiled = compiled_by(engine, model)
    while len(done) < 12 or done[-1] < seconds:
        optimizer.zero_grad()
        loss = loss_of(compiled, len(done))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        done.append(time.perf_counter() - start)
    swapped = []
    if engine == OURS:
        import dovetail

        swapped = [
            str(event)
            for event in dovetail.events_of(compiled).events
            if "tier" in event.name or "kernels" in event.name
        ]
    print(json.dumps({"done": done, "losses": [losses[0], losses[11]], "tiers": swapped}))


def measure(program: str, engine: str, cache: Path, options: Any) -> dict[str, Any]:
    """One process of an engine."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    command = [sys.executable, "-W", "ignore", __file__, "--work", program, engine]
    command += [str(options.seconds), str(options.threads)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode != 0:
        raise SystemExit(f"{engine} failed: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    found["cpu"] = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return found | numbers(found["done"], options.seconds)


def numbers(done: list[float], seconds: float) -> dict[str, float]:
    """What the table shows, by when each step was done."""
    took = [end - begin for begin, end in zip([0.0, *done], done, strict=False)]
    steady = statistics.median(took[len(took) // 2 :])
    # A median of ten: one step that a busy machine has held up says nothing.
    smooth = [statistics.median(took[at : at + 10]) for at in range(max(len(took) - 9, 1))]
    first_full = next((at for at, value in enumerate(smooth) if value <= 1.3 * steady), len(done) - 1)
    return {
        "first": done[0],
        "tenth": done[9],
        "full": done[min(first_full + 9, len(done) - 1)],
        "step": steady,
        "steps": float(sum(end <= seconds for end in done)),
    }


def main() -> int:
    """Measure, print the tables, save the raw numbers; 0 if the aims are met."""
    if sys.argv[1:2] == ["--work"]:
        work(sys.argv[2], sys.argv[3], float(sys.argv[4]), int(sys.argv[5]))
        return 0
    parser = make_parser(__doc__, rounds=1)
    parser.add_argument("--seconds", type=positive, default=60, help="how long each process trains (60)")
    parser.add_argument("--programs", nargs="+", choices=list(PROGRAMS), default=list(PROGRAMS))
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    options = parser.parse_args()
    rounds: dict[str, list[dict[str, Any]]] = {}
    for program in options.programs:
        for number, engine in alternating(options.engines, options.rounds):
            with tempfile.TemporaryDirectory(prefix="bench-start-") as folder:
                for cache in CACHES:
                    found = measure(program, engine, Path(folder), options)
                    rounds.setdefault(f"{program} {cache} {engine}", []).append(found)
                    print(f"round {number + 1}: {program}, {cache}: {engine}: first {found['first']:.2f} s", flush=True)

    def median(program: str, cache: str, engine: str, what: str) -> float:
        return statistics.median(found[what] for found in rounds[f"{program} {cache} {engine}"])

    misses = 0
    for program in options.programs:
        for cache in CACHES:
            print(f"\n{program}, {cache} caches; {options.threads} threads, medians of {options.rounds} rounds")
            rows = []
            for engine in options.engines:
                of = {
                    what: median(program, cache, engine, what)
                    for what in ("first", "tenth", "full", "step", "steps", "cpu")
                }
                times = (f"{of[what]:.2f} s" for what in ("first", "tenth", "full"))
                rows.append((engine, *times, f"{of['step'] * 1e3:.1f} ms", f"{of['steps']:.0f}", f"{of['cpu']:.1f} s"))
            print(Table(("engine", "first", "tenth", "full speed", "step", "steps", "CPU"), tuple(rows)))
            if {OURS, THEIRS} <= set(options.engines):
                for what in ("first", "full"):
                    ratio = median(program, cache, OURS, what) / median(program, cache, THEIRS, what)
                    aim = AIMS.get((cache, what))
                    misses += aim is not None and ratio > aim
                    print(f"{what}: {ratio:.3f} of torch.compile" + (f" (aim: {aim})" if aim is not None else ""))
    save("start", options, rounds=rounds)
    return 1 if misses else 0


if __name__ == "__main__":
    raise SystemExit(main())
