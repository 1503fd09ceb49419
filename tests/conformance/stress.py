"""Stress: threads, forks and interrupts, again and again under a time limit.

``python -m tests.conformance.stress --seconds 300`` runs rounds of each kind in processes of their own. A process that ends by a
signal, hangs, or gives another answer than eager is a failure; its seed repeats it.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import dovetail

THREADS = 4
KINDS: dict[str, Callable[[random.Random], None]] = {}


def kind(function: Callable[[random.Random], None]) -> Callable[[random.Random], None]:
    """Register a kind of stress."""
    KINDS[function.__name__] = function
    return function


class _Custom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.saved_tensors[0].exp()


def _plain(x: Tensor) -> Tensor:
    return (x.sin() * x).tanh()


def _broken(x: Tensor) -> Tensor:
    y = x * 2
    print(end="")
    return y.cos() * y


def _custom(x: Tensor) -> Tensor:
    return _Custom.apply(x * 0.5) * x  # type: ignore[no-any-return]


FUNCTIONS = (_plain, _broken, _custom)


def _gradient(function: Callable[[Tensor], Tensor], x: Tensor, twice: bool = False) -> Tensor:
    x = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(function(x).sum(), x, create_graph=twice)
    if twice:
        (slope,) = torch.autograd.grad(slope.square().sum(), x)
    return slope


def _check(function: Callable[[Tensor], Tensor], compiled: Callable[[Tensor], Tensor], x: Tensor, twice: bool) -> None:
    expected, found = _gradient(function, x, twice), _gradient(compiled, x, twice)
    if not torch.allclose(expected, found, rtol=1e-4, atol=1e-5):
        raise AssertionError(f"{function.__name__}: {expected} is not {found}")


def _in_threads(work: Callable[[random.Random], None], dice: random.Random) -> None:
    errors: list[BaseException] = []
    seeds = [dice.random() for _ in range(THREADS)]
    barrier = threading.Barrier(THREADS)

    def run(seed: float) -> None:
        try:
            barrier.wait()
            work(random.Random(seed))
        except BaseException as error:  # noqa: BLE001  (told by the main thread)
            errors.append(error)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in seeds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@kind
def threads(dice: random.Random) -> None:
    """The same and different compiled functions in several threads, of changing sizes."""
    compiled = {function: dovetail.compile(function, backend="aten") for function in FUNCTIONS}

    def work(own: random.Random) -> None:
        for _ in range(8):
            function = own.choice(FUNCTIONS)
            _check(function, compiled[function], torch.randn(own.randint(1, 4), 3), own.random() < 0.3)

    _in_threads(work, dice)


@kind
def captured_backwards(dice: random.Random) -> None:
    """Backwards of several threads under compiled autograd, some of them of compiled functions."""
    compiled = {function: dovetail.compile(function, backend="aten") for function in FUNCTIONS}

    def work(own: random.Random) -> None:
        for _ in range(6):
            function = own.choice(FUNCTIONS)
            block = dovetail.compiled_autograd(backend="aten") if own.random() < 0.7 else contextlib.nullcontext()
            x = torch.randn(own.randint(1, 4), 3)
            expected = _gradient(function, x)
            with block:
                found = _gradient(own.choice((function, compiled[function])), x)
            if not torch.allclose(expected, found, rtol=1e-4, atol=1e-5):
                raise AssertionError(f"{function.__name__}: {expected} is not {found}")

    _in_threads(work, dice)


def _child(compiled: Callable[[Tensor], Tensor], seed: int) -> None:
    torch.set_num_threads(1)
    dice = random.Random(seed)
    for _ in range(3):
        _check(_plain, compiled, torch.randn(dice.randint(1, 5), 3), False)
    os._exit(0)


@kind
def forks(dice: random.Random) -> None:
    """Children forked after a compilation, and while another thread compiles."""
    torch.set_num_threads(1)
    compiled = dovetail.compile(_plain, backend="aten")
    # Autograd's threads do not survive a fork: the parent computes no gradient before it.
    compiled(torch.ones(2, 3))
    context = multiprocessing.get_context("fork")
    stop = threading.Event()

    def compile_others() -> None:
        while not stop.is_set():
            dovetail.compile(lambda x: x.sin() + dice.random(), backend="aten")(torch.ones(2))

    busy = threading.Thread(target=compile_others)
    busy.start()
    try:
        children = [context.Process(target=_child, args=(compiled, dice.randrange(1 << 30))) for _ in range(3)]
        for child in children:
            child.start()
        for child in children:
            child.join(60)
            if child.exitcode != 0:
                if child.exitcode is None:
                    child.kill()
                raise AssertionError(f"a child has ended with {child.exitcode}")
    finally:
        stop.set()
        busy.join()


@kind
def interrupts(dice: random.Random) -> None:
    """KeyboardInterrupt at a random moment of a capture or a call; what is called afterwards is right."""

    class Interrupt(KeyboardInterrupt):
        pass

    def interrupt(number: int, frame: Any) -> None:
        raise Interrupt

    signal.signal(signal.SIGALRM, interrupt)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    for function in (*FUNCTIONS, model):
        compiled = dovetail.compile(function, backend="aten")
        for _ in range(4):
            ambient = torch.is_grad_enabled(), torch.get_default_dtype()
            try:
                signal.setitimer(signal.ITIMER_REAL, dice.random() * 0.03 + 1e-5)
                try:
                    for _ in range(20):
                        _gradient(compiled, torch.randn(2, 3))
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            except Interrupt:
                pass
            if (torch.is_grad_enabled(), torch.get_default_dtype()) != ambient:
                raise AssertionError("an interrupt has left a switch of torch changed")
            x = torch.randn(2, 3)
            expected, found = _gradient(function, x), _gradient(compiled, x)
            if not torch.allclose(expected, found, rtol=1e-4, atol=1e-5):
                raise AssertionError(f"{function}: {expected} is not {found}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run rounds until the time is up; returns 1 if one has failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--round", help="one round of this kind, in this process")
    parser.add_argument("--rounds", type=int, default=10, help="rounds in each process")
    chosen = parser.parse_args(arguments)
    if chosen.round:
        warnings.simplefilter("ignore")
        for number in range(chosen.rounds):
            torch.manual_seed(chosen.seed + number)
            KINDS[chosen.round](random.Random(chosen.seed + number))
        return 0
    end, counts, failures, seed = (
        time.monotonic() + chosen.seconds,
        dict.fromkeys(chosen.kinds.split(","), 0),
        0,
        chosen.seed,
    )
    while time.monotonic() < end:
        for name in counts:
            command = [sys.executable, "-m", "tests.conformance.stress", "--round", name, "--seed", str(seed)]
            try:
                done = subprocess.run(
                    [*command, "--rounds", str(chosen.rounds)], capture_output=True, text=True, timeout=600, check=False
                )
                code, text = done.returncode, done.stderr
            except subprocess.TimeoutExpired:
                code, text = -1, "it hangs"
            counts[name] += chosen.rounds
            if code != 0:
                failures += 1
                print(f"{name} --seed {seed}: exit {code}\n{text[-3000:]}", flush=True)
        seed += chosen.rounds
    print(f"{counts}, {failures} failures")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
