"""Train small models of scientific packages, in eager and compiled: the whole step, and the model alone.

``python -m tests.conformance.science_runner`` prints one table. The packages are no part of the test environment;
``make conformance-science`` makes one of its own. A program whose package is missing is refused in words.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

import dovetail
from dovetail.errors import EagerFallbackWarning, RecompileLimitWarning
from tests.conformance.compilers import COMPILERS, breaks
from tests.conformance.science_programs import PROGRAMS, Training, missing
from tests.conformance.verdicts import (
    ROUNDING,
    OperatorResult,
    SampleResult,
    failure,
    first_line,
    seed_everything,
    summary,
)
from tests.conformance.workers import run_in_workers

MODES = ("step", "model")
#: A difference of rounding, relative to the largest number of a tensor: after some steps of Adam in float32, and in float64.
_ROUNDING = {torch.float32: 1e-4, torch.float64: 1e-8}


@dataclass
class Trained:
    """What a training has left."""

    losses: list[Tensor] = field(default_factory=list)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    weights: dict[str, Tensor | None] = field(default_factory=dict)
    #: Captures after each step, and graph breaks.
    captures: list[int] = field(default_factory=list)
    breaks: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"captures {self.captures}, breaks {len(self.breaks)}"


def run(training: Training, mode: str, compiler: Callable[..., Any] | None, steps: int) -> Trained:
    """Train; ``compiler`` None is eager."""
    optimizer = torch.optim.Adam(training.model.parameters(), lr=1e-3)
    model: Any = training.model

    def step(batch: dict[str, Any]) -> Tensor:
        optimizer.zero_grad()
        loss = training.loss(model, batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    call: Any = step
    compiled: Any = None
    if compiler is not None and mode == "step":
        compiled = call = compiler(step)
    elif compiler is not None:
        compiled = model = compiler(training.model)
    left = Trained()
    for index in range(steps):
        torch.manual_seed(index)
        left.losses.append(call(training.batch(index)))
        if compiled is not None:
            left.captures.append(int(dovetail.events_of(compiled).count("capture")))
    left.breaks = breaks(compiled)
    for name, parameter in training.model.named_parameters():
        left.gradients[name] = None if parameter.grad is None else parameter.grad.detach()
        left.weights[name] = parameter.detach()
    left.weights.update({name: buffer.detach() for name, buffer in training.model.named_buffers()})
    return left


def _distance(expected: Tensor | None, found: Tensor | None) -> float:
    """0 for equal bits; relative to the largest number, infinite where one is missing or something is not finite."""
    if expected is None or found is None:
        return 0.0 if expected is found else float("inf")
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return float("inf")
    if torch.equal(expected, found) or not expected.numel():
        return 0.0
    gap = float((expected.double() - found.double()).abs().max() / expected.double().abs().max().clamp(min=1e-12))
    return gap if gap == gap else float("inf")


def compare(expected: Trained, found: Trained) -> float:
    """The greatest distance between what two trainings have left."""
    gaps = [_distance(left, right) for left, right in zip(expected.losses, found.losses, strict=True)]
    for left, right in ((expected.gradients, found.gradients), (expected.weights, found.weights)):
        if set(left) != set(right):
            return float("inf")
        gaps += [_distance(left[name], right[name]) for name in left]
    return max(gaps)


class EagerError(Exception):
    """The program does not train with torch alone."""


def _fresh(name: str, dtype: torch.dtype) -> Training:
    torch.set_default_dtype(dtype)
    seed_everything()
    built = PROGRAMS[name].build()
    built.model.to(dtype)
    return built


def _train_in_eager(name: str, mode: str, steps: int, dtype: torch.dtype) -> Trained:
    try:
        return run(_fresh(name, dtype), mode, None, steps)
    except Exception as error:
        raise EagerError(f"{type(error).__name__}: {first_line(str(error))}") from error


def train(name: str, mode: str, compiler: str, steps: int, dtype: torch.dtype = torch.float32) -> tuple[float, Trained]:
    """Train a program twice, in eager and compiled: how far they are apart, and what the compiled one has left."""
    try:
        expected = _train_in_eager(name, mode, steps, dtype)
        found = run(_fresh(name, dtype), mode, COMPILERS[compiler], steps)
    finally:
        torch.set_default_dtype(torch.float32)
    return compare(expected, found), found


def _eager_varies(name: str, mode: str, steps: int) -> float:
    """How far two trainings in eager are apart."""
    first, second = (_train_in_eager(name, mode, steps, torch.float32) for _ in range(2))
    return compare(first, second)


def _rounds_only(name: str, mode: str, compiler: str, steps: int) -> str:
    """What float64 says of a difference."""
    try:
        apart, _ = train(name, mode, compiler, steps, torch.float64)
    except (RuntimeError, TypeError, EagerError) as error:
        return f"the program has no float64: {first_line(str(error))[:80]}"
    return f"in float64 {apart:.0e}" if apart < _ROUNDING[torch.float64] else ""


def check(name: str, mode: str, compiler: str, steps: int) -> SampleResult:
    """The verdict on a program in a mode."""
    lacking = missing(name)
    if lacking:
        return SampleResult("refused", "missing", ", ".join(lacking))
    if mode == "model" and PROGRAMS[name].only_steps:
        return SampleResult("not applicable", "only steps", PROGRAMS[name].only_steps)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            apart, found = train(name, mode, compiler, steps)
        except EagerError as error:
            print("".join(traceback.format_exception(error)), file=sys.stderr)
            return SampleResult("eager cannot", "torch alone", str(error))
        except Exception as error:  # noqa: BLE001  (an error of the program's, of torch's or of Dovetail's: each is a verdict)
            print("".join(traceback.format_exception(error)), file=sys.stderr)
            return failure(error)
    if any(issubclass(item.category, RecompileLimitWarning) for item in caught):
        return SampleResult("error", "recompiles", str(found))
    told = [first_line(str(item.message)) for item in caught if issubclass(item.category, EagerFallbackWarning)]
    print("\n".join([*found.breaks, *dict.fromkeys(told)]), file=sys.stderr)
    if apart == 0.0:
        return SampleResult("passed", "equal", str(found))
    checked = _rounds_only(name, mode, compiler, steps) if apart < _ROUNDING[torch.float32] else ""
    reason = f"{found}, apart {apart:.0e} {checked}"
    if checked:
        return SampleResult("passed", ROUNDING, reason)
    varies = _eager_varies(name, mode, steps)
    if varies > _ROUNDING[torch.float32]:
        return SampleResult("eager cannot", "varies", f"two trainings in eager are {varies:.0e} apart")
    return SampleResult("wrong", "values", reason)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train the programs that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", default=",".join(PROGRAMS), help="separated by commas")
    parser.add_argument("--compiler", default="dovetail-with-breaks", choices=sorted(COMPILERS))
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("-j", "--jobs", type=int, default=1)
    parser.add_argument("--here", action="store_true", help="in this process, with all graph breaks and warnings")
    options = parser.parse_args(arguments)
    names = options.programs.split(",")
    if options.here:
        for name in names:
            started = time.perf_counter()
            samples = {mode: [check(name, mode, options.compiler, options.steps)] for mode in MODES}
            print(json.dumps(asdict(OperatorResult(name, samples, time.perf_counter() - started))), flush=True)
        return 0

    def command(current: Sequence[str]) -> list[str]:
        own = ["--programs", ",".join(current), "--compiler", options.compiler, "--steps", str(options.steps), "--here"]
        return ["tests.conformance.science_runner", *own]

    results = run_in_workers(names, MODES, command, options.jobs, chunk=1, seconds=1800.0)
    for result in results:
        for mode, samples in result.samples.items():
            for sample in samples:
                print(f"{result.name:22} {mode:6} {sample.verdict:8} {sample.kind:12} {sample.reason[:160]}")
    print(summary(results, MODES))
    return int(any(result.verdict(mode) in ("wrong", "error") for result in results for mode in MODES))


if __name__ == "__main__":
    sys.exit(main())
