"""Capture speed: from the user's first call to graphs that are ready for a backend; eager, torch.compile and Dovetail.

The model is the demo's 6-layer GPT; both compilers run the captured operators as they are (torch.compile with
``aot_eager``, Dovetail with ``aten``), so that little but capture is left of the first call. Rounds alternate in one
process, each compiles afresh, and the order within a round changes from round to round. Four times are taken:

- *graphs ready*: from making the compiled model until the backend holds its forward and backward graphs. The project
  promises something about this time.
- *first forward*: making the compiled model, and its first call.
- *first step*: the same with the backward of the loss, because a compiler may put off work until then.
- *capture*: the first step less a step when everything is compiled: the cost of capture for the user.

For torch.compile, graphs are ready when ``aot_eager`` returns (which does little but wrap them; guards come later); for
Dovetail, when its event log says that the compilation of the forward graph starts (guards come later as well). The table
is followed by Dovetail's own "capture" and "partition" spans. Run it with ``make bench-capture``.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from measuring import alternating, make_parser, positive, save
from torch import Tensor

import dovetail
from dovetail.cli.gpt import GPT, GPTConfig
from dovetail.reports.table import Table
from dovetail.torch_private import dynamo as private_dynamo

#: The project's promise: Dovetail's time over that of torch.compile.
PROMISE = 0.4
EAGER, THEIRS, OURS = "eager", "torch.compile (aot_eager)", "Dovetail (aten)"
COMPARED = ("graphs_ready", "first_forward", "first_step", "capture")

_ready: list[float] = []


def aot_eager(graph: Any, inputs: list[Any]) -> Any:
    """Run torch's ``aot_eager``, and note when it is done."""
    run = private_dynamo.torch_backend("aot_eager")(graph, inputs)
    _ready.append(time.perf_counter())
    return run


def compile_torch(model: GPT) -> Any:
    """Compile with torch, with nothing left from earlier rounds."""
    torch.compiler.reset()
    return torch.compile(model, backend=aot_eager, fullgraph=True)


ENGINES: dict[str, Callable[[GPT], Any]] = {
    EAGER: lambda model: model,
    THEIRS: compile_torch,
    OURS: lambda model: dovetail.compile(model, backend="aten", fullgraph=True),
}


def measure(engine: str, config: GPTConfig, tokens: Tensor) -> dict[str, float]:
    """Run one round: seconds of the first call with its backward, and of a later one."""
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
    compiled = ENGINES[engine](model)
    setup = time.perf_counter() - start
    forward, first = step(compiled)
    later = min(step(compiled)[1] for _ in range(3))
    result = {
        "first_forward": setup + forward,
        "first_step": setup + first,
        "later_step": later,
        "capture": setup + first - later,
    }
    if engine == OURS:
        log = dovetail.events_of(compiled)
        result["own_capture"] = log.seconds("capture")
        result["own_partition"] = log.seconds("partition")
        _ready.extend(event.start for event in log.events if event.name == "compile forward")
    if engine != EAGER:
        (ready,) = _ready  # one graph, compiled once: anything else is not what this benchmark compares
        result["graphs_ready"] = ready - start
    return result


def main() -> int:
    """Measure, print the table, save the raw numbers; 0 if the graphs are ready as soon as promised."""
    parser = make_parser(__doc__, rounds=7)
    for flag, value in (("--layers", 6), ("--width", 384), ("--block", 128), ("--batch", 8)):
        parser.add_argument(flag, type=positive, default=value)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    config = GPTConfig(vocabulary=100, block=options.block, layers=options.layers, width=options.width)
    tokens = torch.randint(100, (options.batch, options.block), generator=torch.Generator().manual_seed(0))
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in ENGINES}
    # The first round imports modules and fills caches of Python and torch for both compilers; it is not counted.
    for number, name in alternating(list(ENGINES), options.rounds + 1):
        result = measure(name, config, tokens)
        print(f"round {number or 'warm-up'}: {name}: first step {result['first_step']:.3f} s", flush=True)
        if number:
            rounds[name].append(result)

    def median(name: str, what: str) -> float:
        return statistics.median(result[what] for result in rounds[name])

    def row(name: str) -> tuple[str, ...]:
        columns = ("graphs_ready", "first_forward", "first_step", "later_step", "capture")
        missing = ("graphs_ready", "capture") if name == EAGER else ()
        return (name, *("-" if what in missing else f"{median(name, what):.3f} s" for what in columns))

    ratios = {what: median(OURS, what) / median(THEIRS, what) for what in COMPARED}
    sizes = f"{options.layers} layers, width {options.width}, block {options.block}, batch {options.batch}"
    print(f"\nGPT, {sizes}; {options.threads} threads, medians of {options.rounds} rounds")
    head = ("engine", "graphs ready", "first forward", "first step", "later step", "capture")
    print(Table(head, tuple(map(row, ENGINES))))
    own = median(OURS, "own_capture"), median(OURS, "own_partition")
    print(f"Dovetail's own log: capture {own[0]:.3f} s, partition {own[1]:.3f} s")
    said = ", ".join(f"{what.replace('_', ' ')} {ratio:.2f}" for what, ratio in ratios.items())
    print(f"Dovetail / torch.compile: {said} (promised for graphs ready: at most {PROMISE})")
    save("capture", options, rounds=rounds, ratios=ratios)
    return 0 if ratios["graphs_ready"] <= PROMISE else 1


if __name__ == "__main__":
    raise SystemExit(main())
