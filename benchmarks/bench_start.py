"""The first second: how long a user waits for the first step, the tenth, and full speed; eager, torch.compile and Dovetail.

Each engine trains in a fresh process, engines alternate, and each engine gets its own folder for all compiled code, Inductor's and
Dovetail's: once empty ("cold"), then a second process with the folder that the first one has filled ("warm"). The clock starts when
the model is there, right before the compiler is imported, and every step ends with the value of its loss. Dovetail's modules are
bytecode before the first process starts, as torch's are, and as pip leaves them. Run it with ``make bench-start``.

- *first*, *tenth*: seconds until so many steps are done.
- *full speed*: seconds until the first step is done from which on steps take the process as much CPU time as in the second half
  of the run: that step, and the median of it and the nine behind it, at most 1.15 times the median there. CPU time says which code
  runs; the time of the clock, by which it was defined before, says as much about what else the machine does.
- *steps*: how many steps were done in ``--seconds``; *CPU*: seconds of all cores, compilers and background processes included.

An engine that cannot run a program (torch.compile has no second derivatives) is named, and left out of its tables.
``--draw RAW PICTURE`` measures nothing, and draws the losses over the time of the clock of a run whose raw numbers were saved.
"""

from __future__ import annotations

import compileall
import itertools
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

import dovetail
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
        images, labels = (torch.randn(8, 3, 16, 16, generator=generator), torch.randint(10, (8,), generator=generator))
        return nn.functional.cross_entropy(module(images), labels)

    return model, loss


class Bert(nn.Module):
    """An encoder with padding and dropout, and a head that says which words were hidden."""

    def __init__(self, words: int, width: int, layers: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(64, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, words)

    def forward(self, tokens: Tensor, padding: Tensor) -> Tensor:
        """Scores of all words at all places."""
        x = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        found: Tensor = self.head(self.encoder(x, src_key_padding_mask=padding))
        return found


def bert() -> tuple[nn.Module, Callable[[nn.Module, int], Tensor]]:
    """A BERT of 4 layers."""

    def loss(module: nn.Module, step: int) -> Tensor:
        tokens = torch.randint(100, (4, 48), generator=torch.Generator().manual_seed(step))
        scores = module(tokens, torch.arange(48).expand(4, 48) >= 40)
        return nn.functional.cross_entropy(scores.flatten(0, 1), tokens.flatten())

    return Bert(100, 128, 4), loss


class Block(nn.Module):
    """A normalised layer with a wide middle, around which the input goes as it is."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Add what the layers find."""
        found: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return found


def blocks() -> tuple[nn.Module, Callable[[nn.Module, int], Tensor]]:
    """24 equal blocks."""

    def loss(module: nn.Module, step: int) -> Tensor:
        found: Tensor = module(torch.randn(64, 64, generator=torch.Generator().manual_seed(step))).square().mean()
        return found

    return nn.Sequential(*(Block(64) for _ in range(24))), loss


def second_order() -> tuple[nn.Module, Callable[[nn.Module, int], Tensor]]:
    """A network whose slope is held to one everywhere."""

    def loss(module: nn.Module, step: int) -> Tensor:
        x = torch.randn(256, 8, generator=torch.Generator().manual_seed(step)).requires_grad_()
        (slope,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
        return (slope.norm(dim=1) - 1).square().mean()

    layers = [part for _ in range(4) for part in (nn.Linear(128, 128), nn.Softplus())]
    return nn.Sequential(nn.Linear(8, 128), nn.Softplus(), *layers, nn.Linear(128, 1)), loss


PROGRAMS = {"gpt": gpt, "resnet": resnet, "bert": bert, "blocks": blocks, "second_order": second_order}


def compiled_by(engine: str, model: nn.Module) -> nn.Module:
    """The model as an engine runs it; the compiler's import counts."""
    if engine == EAGER:
        return model
    if engine == THEIRS:
        return torch.compile(model)  # type: ignore[return-value]
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
    cpu: list[float] = [time.process_time()]
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
        cpu.append(time.process_time())
    swapped = []
    if engine == OURS:
        swapped = [
            str(event)
            for event in dovetail.events_of(compiled).events
            if "tier" in event.name or "kernels" in event.name
        ]
    print(
        json.dumps(
            {"done": done, "cpu_steps": cpu, "losses": [float(f"{loss:.6g}") for loss in losses], "tiers": swapped}
        )
    )


def measure(program: str, engine: str, cache: Path, options: Any) -> dict[str, Any] | str:
    """One process of an engine; the last line of what it has said where it failed."""
    folders = {"TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"), "DOVETAIL_CACHE_DIR": str(cache / "dovetail")}
    environment = {**os.environ, **folders}
    command = [sys.executable, "-W", "ignore", __file__, "--work", program, engine]
    command += [str(options.seconds), str(options.threads)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode != 0:
        return (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    found["cpu"] = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return found | numbers(found["done"], found["cpu_steps"], options.seconds)


def numbers(done: list[float], cpu: list[float], seconds: float) -> dict[str, float]:
    """What the table shows, by when each step was done, and the CPU seconds of the process at the start and then."""
    took = [end - begin for begin, end in zip([0.0, *done], done, strict=False)]
    steady = statistics.median(took[len(took) // 2 :])
    spent = [end - begin for begin, end in itertools.pairwise(cpu)]
    # At least ten steps, for runs that are short.
    least = 1.15 * statistics.median(spent[min(len(spent) // 2, len(spent) - 10) :])
    full = (at for at, one in enumerate(spent) if max(one, statistics.median(spent[at : at + 10])) <= least)
    return {
        "first": done[0],
        "tenth": done[9],
        "full": done[next(full, len(done) - 1)],
        "step": steady,
        "steps": float(sum(end <= seconds for end in done)),
    }


def draw(raw: Path, picture: Path) -> None:
    """Draw the losses of a run over the seconds since the model was there: a column for each program, a row for each state of the
    caches, the first round of each engine.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    about = json.loads(raw.read_text(encoding="utf-8"))
    found = {tuple(name.split(" ", 2)): runs[0] for name, runs in about["rounds"].items()}
    programs = list(dict.fromkeys(program for program, _, _ in found))
    figure = Figure(figsize=(3.4 * len(programs), 6), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(CACHES), len(programs), squeeze=False, sharex=True, sharey="col")
    for (program, cache, engine), run in found.items():
        axes = grid[CACHES.index(cache)][programs.index(program)]
        losses = run["losses"]
        # A step has few examples: the median of it and the fourteen before it shows where training is.
        smooth = [statistics.median(losses[max(0, at - 14) : at + 1]) for at in range(len(losses))]
        axes.plot(run["done"], smooth, f"C{ENGINES.index(engine)}", label=engine, linewidth=1.2)
        axes.plot(run["done"][0], losses[0], f"C{ENGINES.index(engine)}o", markersize=4)
        axes.set(xscale="log", title=f"{program}, {cache} caches")
    for axes in grid[-1]:
        axes.set_xlabel("seconds, from the import of the compiler on")
    for row in grid:
        row[0].set_ylabel("loss")
    # Of all programs: some engines cannot run some of them.
    lines = {line.get_label(): line for axes in grid.flat for line in axes.get_lines()[::2]}
    shown = [engine for engine in ENGINES if engine in lines]
    figure.legend([lines[engine] for engine in shown], shown, loc="outside upper center", ncols=len(shown))
    threads = about["settings"]["threads"]
    figure.supxlabel(
        f"torch {about['torch']}, {threads} threads, {about['when'][:10]}; the dot is the first step", fontsize=9
    )
    figure.savefig(picture, dpi=110)
    print(f"wrote {picture}")


def main() -> int:
    """Measure, print the tables, save the raw numbers; 0 if the aims are met."""
    if sys.argv[1:2] == ["--work"]:
        work(sys.argv[2], sys.argv[3], float(sys.argv[4]), int(sys.argv[5]))
        return 0
    parser = make_parser(__doc__, rounds=1)
    parser.add_argument("--seconds", type=positive, default=60, help="how long each process trains (60)")
    parser.add_argument("--programs", nargs="+", choices=list(PROGRAMS), default=list(PROGRAMS))
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--draw", nargs=2, type=Path, metavar=("RAW", "PICTURE"), help="draw the losses of a run")
    options = parser.parse_args()
    if options.draw:
        draw(*options.draw)
        return 0
    compileall.compile_dir(str(Path(dovetail.__file__).parent), quiet=1)
    rounds: dict[str, list[dict[str, Any]]] = {}
    failed: set[tuple[str, str]] = set()
    for program in options.programs:
        for number, engine in alternating(options.engines, options.rounds):
            with tempfile.TemporaryDirectory(prefix="bench-start-") as folder:
                for cache in CACHES if (program, engine) not in failed else ():
                    found = measure(program, engine, Path(folder), options)
                    if isinstance(found, str):
                        failed.add((program, engine))
                        print(f"{program}: {engine} failed: {found[:200]}", flush=True)
                        break
                    rounds.setdefault(f"{program} {cache} {engine}", []).append(found)
                    print(f"round {number + 1}: {program}, {cache}: {engine}: first {found['first']:.2f} s", flush=True)

    def median(program: str, cache: str, engine: str, what: str) -> float:
        return statistics.median(found[what] for found in rounds[f"{program} {cache} {engine}"])

    misses = 0
    for program in options.programs:
        engines = [engine for engine in options.engines if (program, engine) not in failed]
        for cache in CACHES:
            print(f"\n{program}, {cache} caches; {options.threads} threads, medians of {options.rounds} rounds")
            rows = []
            for engine in engines:
                of = {
                    what: median(program, cache, engine, what)
                    for what in ("first", "tenth", "full", "step", "steps", "cpu")
                }
                times = (f"{of[what]:.2f} s" for what in ("first", "tenth", "full"))
                rows.append((engine, *times, f"{of['step'] * 1e3:.1f} ms", f"{of['steps']:.0f}", f"{of['cpu']:.1f} s"))
            print(Table(("engine", "first", "tenth", "full speed", "step", "steps", "CPU"), tuple(rows)))
            if {OURS, THEIRS} <= set(engines):
                for what in ("first", "full"):
                    ratio = median(program, cache, OURS, what) / median(program, cache, THEIRS, what)
                    aim = AIMS.get((cache, what))
                    misses += aim is not None and ratio > aim
                    print(f"{what}: {ratio:.3f} of torch.compile" + (f" (aim: {aim})" if aim is not None else ""))
    save("start", options, rounds=rounds)
    return 1 if misses else 0


if __name__ == "__main__":
    raise SystemExit(main())
