"""How time and memory grow with a program: with its layers, parameters, sequence, graph breaks and compiled entries.

For each size there is a new model, and the engines take turns: eager, torch.compile and Dovetail, the compilers with backends that
run ATen's operators (``aot_eager``, ``aten``), so that what grows is their own work and not a C++ compiler's. The table has

- *first*: the first step, with all that is captured in it, in seconds of the process (the shortest of three with new models);
- *step*: a later step, median of the rounds;
- *tensors*: the most bytes that torch's allocator held at once during a later step, above what it held before.

Below each axis stands the growth: the exponent between the two largest sizes (1 is linear). Run it with ``make bench-growth``.
"""

from __future__ import annotations

import gc
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from measuring import alternating, make_parser, peak_of_tensors, save
from torch import Tensor, nn

import dovetail
from dovetail.cli.gpt import GPT, GPTConfig
from dovetail.reports.table import Table

Step = Callable[[], Any]
#: The largest exponent of Dovetail's own first step; a sequence that is twice as long is four times the attention in every engine.
MOST = 1.25
#: A first step is taken so often, unless that takes longer than so many seconds.
FIRST_STEPS, ENOUGH = 3, 2.0


@dataclass
class Case:
    """A function to compile, and a step that is given the compiled one."""

    function: Callable[..., Any]
    step: Callable[[Callable[..., Any]], Any]


def _trained(model: nn.Module, *inputs: Tensor) -> Case:
    def step(run: Callable[..., Any]) -> None:
        model.zero_grad()
        run(*inputs).backward()

    return Case(model, step)


def _gpt(layers: int, block: int = 32) -> Case:
    tokens = torch.randint(50, (2, block))
    return _trained(GPT(GPTConfig(vocabulary=50, block=block, layers=layers, heads=2, width=32)), tokens, tokens)


def layers(count: int) -> Case:
    """A GPT of narrow layers."""
    return _gpt(count)


def sequence(length: int) -> Case:
    """A GPT of two layers on a sequence."""
    return _gpt(2, length)


def parameters(count: int) -> Case:
    """Four square layers that have so many parameters together."""
    width = math.isqrt(count // 4)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(4)))
    x = torch.randn(4, width)

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.model(x).pow(2).mean()
            return result

    return _trained(Loss(), x)


def breaks(count: int) -> Case:
    """A function with so many graph breaks, each on a line of its own."""
    lines = "".join(f"    x = x * {number} + 1\n    torch._dynamo.graph_break()\n" for number in range(2, count + 2))
    names: dict[str, Any] = {"torch": torch}
    exec(f"def function(x):\n{lines}    return x.sum()\n", names)
    x = torch.ones(4, requires_grad=True)
    return Case(names["function"], lambda run: run(x).backward())


def entries(count: int) -> Case:
    """A function that is compiled for so many values of an argument; later steps call it with the value that came first."""

    def function(x: Tensor, kind: str) -> Tensor:
        return (x * len(kind)).sum()

    kinds = [str(number) * 3 for number in reversed(range(count))]
    x = torch.ones(4, requires_grad=True)

    def step(run: Callable[..., Any]) -> None:
        while len(kinds) > 1:
            run(x, kinds.pop())
        run(x, kinds[0]).backward()

    return Case(function, step)


AXES: dict[str, tuple[Callable[[int], Case], tuple[int, ...]]] = {
    "layers": (layers, (1, 3, 6, 12, 24, 48)),
    "parameters": (parameters, (10**5, 10**6, 10**7, 10**8)),
    "sequence": (sequence, (32, 64, 128, 256, 512)),
    "breaks": (breaks, (1, 4, 16, 32)),
    "entries": (entries, (1, 4, 16, 32)),
}
ENGINES: dict[str, Callable[[Any], Any]] = {
    "eager": lambda function: function,
    "torch.compile": lambda function: torch.compile(function, backend="aot_eager", dynamic=False),
    "Dovetail": lambda function: dovetail.compile(function, backend="aten", dynamic=False, recompile_limit=64),
}


def begin(axis: str, size: int, engine: str) -> tuple[float, Step]:
    """Return the seconds of a first step, the shortest of up to three, and the step that the last one leaves."""
    shortest, total = math.inf, 0.0
    for _ in range(FIRST_STEPS):
        torch.manual_seed(0)
        torch._dynamo.reset()
        case = AXES[axis][0](size)
        gc.collect()
        start = time.process_time()
        run = ENGINES[engine](case.function)
        case.step(run)
        seconds = time.process_time() - start
        shortest, total = min(shortest, seconds), total + seconds
        if total > ENOUGH:
            break
    return shortest, lambda: case.step(run)


def measure(axis: str, size: int, rounds: int) -> dict[str, dict[str, float]]:
    """Return the three numbers of each engine for one size."""
    found: dict[str, dict[str, float]] = {}
    steps: dict[str, Step] = {}
    for name in ENGINES:
        seconds, steps[name] = begin(axis, size, name)
        found[name] = {"first": seconds}
    times: dict[str, list[float]] = {name: [] for name in ENGINES}
    for number, name in alternating(list(ENGINES), rounds + 1):
        start = time.perf_counter()
        steps[name]()
        if number:  # a reset behind an engine's first step may have it compile once more
            times[name].append(time.perf_counter() - start)
    for name, step in steps.items():
        found[name] |= {"step": statistics.median(times[name]), "tensors": float(peak_of_tensors(step))}
    return found


def exponent(axis: str, results: dict[int, dict[str, dict[str, float]]], engine: str, what: str) -> float:
    """Return the exponent of the growth between the two largest sizes of an axis."""
    *_, before, last = AXES[axis][1]
    low, high = (max(results[size][engine][what], 1e-9) for size in (before, last))
    return math.log(high / low) / math.log(last / before)


def main() -> int:
    """Measure, print the table, save the raw numbers; 0 if no first step of Dovetail's grows faster than it may."""
    parser = make_parser(__doc__, rounds=7)
    parser.add_argument("--axes", nargs="+", choices=AXES, default=list(AXES))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch._dynamo.config.recompile_limit = 64
    warnings.simplefilter("ignore")
    # Modules are imported and caches of Python and torch filled before anything is counted.
    for axis in ("layers", "breaks"):
        for engine in ENGINES:
            begin(axis, 1, engine)
    results: dict[str, dict[int, dict[str, dict[str, float]]]] = {}
    rows: list[tuple[str, ...]] = []
    said = []
    for axis in options.axes:
        results[axis] = {size: measure(axis, size, options.rounds) for size in AXES[axis][1]}
        for size, found in results[axis].items():
            for name, each in found.items():
                cells = (f"{each['first']:.2f} s", f"{each['step'] * 1e3:.2f} ms", f"{each['tensors'] / 2**20:.2f} MiB")
                rows.append((axis, f"{size:,}", name, *cells))
        grown = [
            f"{name} {', '.join(f'{what} {exponent(axis, results[axis], name, what):.2f}' for what in ('first', 'step'))}"
            for name in ENGINES
        ]
        said.append(f"{axis}: {'; '.join(grown)}")
        print(f"{axis}: done", flush=True)
    print(f"\nGrowth, {options.threads} threads, medians of {options.rounds} rounds")
    print(Table(("axis", "size", "engine", "first", "step", "tensors"), tuple(rows)))
    print("exponents between the two largest sizes:\n" + "\n".join(said))
    save("growth", options, results=results)
    own = [exponent(axis, results[axis], "Dovetail", "first") for axis in options.axes if axis != "sequence"]
    return 0 if all(each <= MOST for each in own) else 1


if __name__ == "__main__":
    sys.exit(main())
