"""Memory: what must die, dies, and a loop of calls keeps nothing, whatever the calls raise.

Each program is called in a loop, forwards and backwards, with inputs made anew. After some rounds the objects that Python's
collector knows, and the memory of the process, must stay what they are. At the end the function and all that it was given go
away: weak references say whether each of them is gone.

``make conformance-memory`` runs 2,000 calls of each program and prints a table.
"""

from __future__ import annotations

import argparse
import gc
import logging
import sys
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dovetail
from dovetail.reports.explanation import compiled_function

#: A program: ``setup()`` gives the compiled function, one round of calls, and the objects that must die with them.
Setup = Callable[[], tuple[Any, Callable[[], None], list[Any]]]
PROGRAMS: dict[str, Setup] = {}
#: Calls that raise are captured anew each time: they are run less often.
RAISING: set[str] = set()
MOST_OBJECTS = 200
MOST_BYTES = 16 << 20


@dataclass(frozen=True)
class Result:
    """``objects`` and ``resident`` are what came to be between the first rounds and the last; ``alive`` is what did not die."""

    name: str
    objects: int
    resident: int
    alive: tuple[str, ...]

    @property
    def is_right(self) -> bool:
        """Whether nothing grew and all died."""
        grew = self.objects > MOST_OBJECTS or self.resident > MOST_BYTES
        return not grew and not self.alive

    def __str__(self) -> str:
        alive = f", alive: {', '.join(self.alive)}" if self.alive else ""
        verdict = "right" if self.is_right else "WRONG"
        return f"{self.name:28s} {verdict}  {self.objects:+d} objects, {self.resident / 1024:+.0f} KiB{alive}"


def program(setup: Setup) -> Setup:
    """Register a program."""
    PROGRAMS[setup.__name__] = setup
    return setup


def raising(setup: Setup) -> Setup:
    """Register a program whose calls raise."""
    RAISING.add(setup.__name__)
    return program(setup)


def _loop(function: Any, make: Callable[[], Tensor], use: Callable[[Any], None], options: dict[str, Any]) -> Any:
    compiled = dovetail.compile(function, backend="aten", **options)

    def call() -> None:
        x = make()
        try:
            use(compiled(x))
        except (ValueError, RuntimeError, KeyError, AttributeError):
            return

    return compiled, call, [function]


def _backward(result: Tensor) -> None:
    result.sum().backward()


def _leaf() -> Tensor:
    return torch.randn(4, 8, requires_grad=True)


class _Raising(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ValueError("in the backward")


@program
def a_module() -> Any:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.5))
    compiled, call, held = _loop(model, _leaf, _backward, {})
    return compiled, call, [*held, *model.parameters()]


@program
def a_training_step() -> Any:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    compiled, call, held = _loop(step, _leaf, lambda loss: None, {})
    return compiled, call, [*held, model, optimizer]


@program
def hooks_and_second_order() -> Any:
    seen: list[float] = []
    x = _leaf()

    def second(result: Tensor) -> None:
        (slope,) = torch.autograd.grad(result.sum(), x, create_graph=True)
        slope.square().sum().backward()
        x.grad = None

    return _loop(lambda y: (y * y).sin(), lambda: x, second, {})[:2] + ([seen.append, x],)


@program
def changing_sizes() -> Any:
    sizes = iter(range(10**9))
    return _loop(lambda x: x.sin() * x.shape[0], lambda: torch.randn(2 + next(sizes) % 50, 8), lambda y: None, {})


@program
def a_graph_break() -> Any:
    def function(x: Tensor) -> Tensor:
        y = x * 2
        print(end="")
        return y.sin()

    return _loop(function, _leaf, _backward, {})


@program
def captured_backwards() -> Any:
    weight = torch.randn(8, 8, requires_grad=True)

    def call() -> None:
        with dovetail.compiled_autograd(backend="aten"):
            (torch.randn(4, 8) @ weight).sin().sum().backward()
        weight.grad = None

    compiled = dovetail.compile(lambda x: x + 1, backend="aten")
    compiled(torch.ones(2))
    return compiled, call, [weight]


@raising
def an_error_of_the_program() -> Any:
    def function(x: Tensor) -> Tensor:
        raise ValueError("no")

    return _loop(function, _leaf, _backward, {})


@raising
def an_error_of_torch() -> Any:
    return _loop(lambda x: x @ torch.ones(3, 3), _leaf, _backward, {"fullgraph": True})


@raising
def a_refused_break() -> Any:
    return _loop(lambda x: print(end="") or x, _leaf, _backward, {"fullgraph": True})


@raising
def an_error_after_a_break() -> Any:
    def function(x: Tensor) -> Tensor:
        y = x * 2
        print(end="")
        raise KeyError("after it")
        return y

    return _loop(function, _leaf, _backward, {})


@raising
def an_error_in_a_backward_inside() -> Any:
    return _loop(lambda x: _Raising.apply(x * 3).sum().backward(), _leaf, _backward, {})


@program
def an_error_in_a_backward() -> Any:
    return _loop(lambda x: _Raising.apply(x * 3), _leaf, _backward, {})


@program
def a_refused_second_order() -> Any:
    def function(x: Tensor) -> Tensor:
        y = x.sin()
        y.register_hook(lambda gradient: gradient * 2)
        return y * y

    x = _leaf()

    def second(result: Tensor) -> None:
        (slope,) = torch.autograd.grad(result.sum(), x, create_graph=True)
        slope.sum().backward()

    return _loop(function, lambda: x, second, {})


def resident() -> int:
    """The memory of this process in bytes; 0 where the system does not say."""
    status = Path("/proc/self/statm")
    return int(status.read_text().split()[1]) * 4096 if status.exists() else 0


def collect() -> int:
    """The number of objects that Python's collector knows when nothing is left to collect."""
    # What native code holds is found one layer at a time.
    while gc.collect() > 100:
        continue
    gc.collect()
    return len(gc.get_objects())


@contextmanager
def quiet() -> Iterator[None]:
    """Warnings and logs, which keep tracebacks, are off."""
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def run(name: str, calls: int) -> Result:
    """One program: a fifth of the calls first, then the rest, which must leave nothing behind."""
    with quiet():
        compiled, call, held = PROGRAMS[name]()
        references = [(type(item).__name__, weakref.ref(item)) for item in (compiled, *held) if _is_weak(item)]
        log = compiled_function(compiled).events
        # What is noted is kept up to a limit: soon reached here.
        log._events = deque(maxlen=32)
        for _ in range(max(calls // 5, 5)):
            call()
        objects, memory = collect(), resident()
        for _ in range(calls):
            call()
        objects, memory = collect() - objects, resident() - memory
        del compiled, call, held, log
        collect()
        alive = tuple(kind for kind, reference in references if reference() is not None)
    return Result(name, objects, memory, alive)


def _is_weak(item: Any) -> bool:
    # A bound method dies at once, and a function of this module lives with it.
    return hasattr(type(item), "__weakref__") or isinstance(item, (Tensor, nn.Module))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the programs and print a line for each; returns 1 if one of them keeps something."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--programs", default=",".join(PROGRAMS))
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    results = []
    for name in chosen.programs.split(","):
        results.append(run(name, chosen.calls))
        print(results[-1], flush=True)
    return int(not all(result.is_right for result in results))


if __name__ == "__main__":
    sys.exit(main())
