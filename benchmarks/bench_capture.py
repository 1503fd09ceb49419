"""Capture speed: from the user's first call to graphs that are ready for a backend, Dovetail beside torch.compile.

The model is the demo's 6-layer GPT; both compilers run the captured operators as they are (torch.compile with
``aot_eager``, Dovetail with ``aten``), so that hardly anything but capture is left of the first call. Rounds alternate
in one process, each compiles afresh, and the order within a round changes from round to round. Four times are taken:

- *graphs ready*: from making the compiled model to the backend holding its forward and backward graphs: the time that
  the project promises something about.
- *first forward*: making the compiled model and its first call, less nothing.
- *first step*: the same with the backward of the loss, because a compiler may put off work until then.
- *capture*: the first step less what the same step takes when everything is compiled: what capture costs the user.

For torch.compile, graphs are ready when ``aot_eager`` returns (which does little but wrap them; guards come later); for
Dovetail, when its event log says that the compilation of the forward graph starts (guards come later as well). Its own
"capture" and "partition" spans are shown too. Run it with ``make bench-capture``.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import dovetail
from dovetail.cli.gpt import GPT, GPTConfig
from dovetail.report.curves import Table
from dovetail.torch_private import dynamo as private_dynamo

#: What the project promises: Dovetail's time over that of torch.compile.
PROMISE = 0.4


def measure(compile_model: Callable[[GPT], Any], config: GPTConfig, tokens: Tensor) -> dict[str, float]:
    """One round: seconds of the first call with its backward, and of a later one."""
    torch.manual_seed(0)
    model = GPT(config)
    gc.collect()

    def step(compiled: Any) -> tuple[float, float]:
        begin = time.perf_counter()
        loss = compiled(tokens, tokens)
        middle = time.perf_counter()
        loss.backward()
        return middle - begin, time.perf_counter() - begin

    _ready.clear()
    start = time.perf_counter()
    compiled = compile_model(model)
    setup = time.perf_counter() - start
    forward, first = step(compiled)
    later = min(step(compiled)[1] for _ in range(3))
    result = {
        "first_forward": setup + forward,
        "first_step": setup + first,
        "later_step": later,
        "capture": setup + first - later,
    }
    if compile_model is compile_dovetail:
        log = dovetail.events_of(compiled)
        result["own_capture"] = log.seconds("capture")
        result["own_partition"] = log.seconds("partition")
        _ready.extend(event.start for event in log.events if event.name == "compile forward")
    if compile_model is not compile_nothing:
        (ready,) = _ready  # one graph, compiled once: anything else is not what this benchmark compares
        result["graphs_ready"] = ready - start
    return result


_ready: list[float] = []


def aot_eager(graph: Any, inputs: list[Any]) -> Any:
    """torch's ``aot_eager``, noting when it is done."""
    run = private_dynamo.torch_backend("aot_eager")(graph, inputs)
    _ready.append(time.perf_counter())
    return run


def compile_nothing(model: GPT) -> Any:
    """Eager."""
    return model


def compile_torch(model: GPT) -> Any:
    """torch.compile, with nothing left from earlier rounds."""
    torch.compiler.reset()
    return torch.compile(model, backend=aot_eager, fullgraph=True)


def compile_dovetail(model: GPT) -> Any:
    """Dovetail, always a fresh compilation."""
    return dovetail.compile(model, backend="aten", fullgraph=True)


ENGINES: dict[str, Callable[[GPT], Any]] = {
    "eager": compile_nothing,
    "torch.compile (aot_eager)": compile_torch,
    "Dovetail (aten)": compile_dovetail,
}


def main() -> int:
    """Measure, print the table, save the raw numbers; 0 if the graphs are ready as soon as promised."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--block", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    torch.set_num_threads(options.threads)
    config = GPTConfig(vocabulary=100, block=options.block, layers=options.layers, width=options.width)
    tokens = torch.randint(100, (options.batch, options.block), generator=torch.Generator().manual_seed(0))

    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in ENGINES}
    # The first round imports modules and fills caches of Python and torch for both compilers; it is not counted.
    for number in range(options.rounds + 1):
        names = list(ENGINES) if number % 2 else list(reversed(ENGINES))
        for name in names:
            result = measure(ENGINES[name], config, tokens)
            print(f"round {number or 'warm-up'}: {name}: first step {result['first_step']:.3f} s", flush=True)
            if number:
                rounds[name].append(result)

    def median(name: str, what: str) -> float:
        return statistics.median(result[what] for result in rounds[name])

    rows = [
        (
            name,
            "-" if name == "eager" else f"{median(name, 'graphs_ready'):.3f} s",
            f"{median(name, 'first_forward'):.3f} s",
            f"{median(name, 'first_step'):.3f} s",
            f"{median(name, 'later_step'):.3f} s",
            "-" if name == "eager" else f"{median(name, 'capture'):.3f} s",
        )
        for name in ENGINES
    ]
    theirs, ours = "torch.compile (aot_eager)", "Dovetail (aten)"
    compared = ("graphs_ready", "first_forward", "first_step", "capture")
    ratios = {what: median(ours, what) / median(theirs, what) for what in compared}
    own = {what: median(ours, what) for what in ("own_capture", "own_partition")}
    print(
        f"\nGPT, {options.layers} layers, width {options.width}, block {options.block}, batch {options.batch}; ", end=""
    )
    print(f"{options.threads} threads, medians of {options.rounds} rounds")
    print(Table(("engine", "graphs ready", "first forward", "first step", "later step", "capture"), tuple(rows)))
    print(f"Dovetail's own log: capture {own['own_capture']:.3f} s, partition {own['own_partition']:.3f} s")
    said = ", ".join(f"{what.replace('_', ' ')} {ratio:.2f}" for what, ratio in ratios.items())
    print(f"Dovetail / torch.compile: {said} (promised for graphs ready: at most {PROMISE})")

    now = datetime.now(UTC)
    options.output.mkdir(parents=True, exist_ok=True)
    target = options.output / f"capture-{now:%Y%m%d-%H%M%S}.json"
    about = {
        "when": now.isoformat(timespec="seconds"),
        "machine": {"platform": platform.platform(), "cores": os.cpu_count(), "python": platform.python_version()},
        "torch": torch.__version__,
        "settings": {name: value for name, value in vars(options).items() if name != "output"},
        "rounds": rounds,
        "ratios": ratios,
    }
    target.write_text(json.dumps(about, indent=1), encoding="utf-8")
    print(f"wrote {target}")
    return 0 if ratios["graphs_ready"] <= PROMISE else 1


if __name__ == "__main__":
    raise SystemExit(main())
