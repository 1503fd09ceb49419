"""Run torch's module database through a compiler and compare with eager, module by module.

``python -m tests.conformance.module_runner --match Conv -j 2``; see the README beside this file.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tests.conformance.compilers import COMPILERS, Compiler, not_compiled, rounds
from tests.conformance.rounding import in_double, is_tolerable
from tests.conformance.verdicts import (
    ROUNDING,
    OperatorResult,
    SampleResult,
    cotangent_like,
    failure,
    first_line,
    seed_everything,
    summary,
)
from tests.conformance.workers import run_in_workers
from tests.differential import Difference, aliasing, clone_inputs, differences, tensors_in

VARIANTS = ("train", "eval")


@functools.cache
def modules() -> dict[str, Any]:
    """The modules that take float32 on the CPU, by name."""
    # The import takes seconds, and a parent process that only hands out names does not need it.
    from torch.testing._internal.common_modules import module_db

    return {info.name: info for info in module_db if torch.float32 in info.supported_dtypes("cpu")}


def _build(info: Any, sample: Any, training: bool, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """The module of one sample, with the same weights at every call."""
    seed_everything()
    given = sample.constructor_input
    module: torch.nn.Module = info.module_cls(*given.args, **given.kwargs)
    return module.to("cpu", torch.float32).to(dtype).train(training)


def _run(module: torch.nn.Module, call: Callable[..., Any], values: Any) -> tuple[Any, ...]:
    """All that can be seen of one call: result, inputs, gradients, buffers, random state and aliasing."""
    seed_everything()
    args, kwargs = clone_inputs(values)
    result = call(*args, **kwargs)
    state = torch.get_rng_state()
    parameters = dict(module.named_parameters())
    leaves = [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]
    leaves += [parameter for parameter in parameters.values() if parameter.requires_grad]
    roots = [tensor for tensor in tensors_in(result) if tensor.requires_grad]
    gradients = None
    if roots and leaves:
        generator = torch.Generator().manual_seed(7)
        cotangents = [cotangent_like(root, torch.randn(root.shape, generator=generator)) for root in roots]
        gradients = list(torch.autograd.grad(roots, leaves, cotangents, allow_unused=True))
    return (
        result,
        (args, kwargs),
        gradients,
        dict(module.named_buffers()),
        parameters,
        state,
        aliasing(result, (args, kwargs)),
    )


_PARTS = ("result", "input after the call", "gradient", "buffer", "parameter", "random state", "aliasing")


def _compare(eager: tuple[Any, ...], compiled: tuple[Any, ...], values: str) -> list[Difference]:
    found: list[Difference] = []
    for part, left, right in zip(_PARTS, eager, compiled, strict=True):
        found += differences(left, right, part, values)
    return found


def check_sample(info: Any, sample: Any, training: bool, compiler: Compiler, calls: int = 2) -> SampleResult:
    """One sample: a module made anew for eager and for the compiler, called ``calls`` times, buffers kept between calls."""
    given = sample.forward_input
    values = (tuple(given.args), dict(given.kwargs))

    def eagerly() -> list[tuple[Any, ...]]:
        module = _build(info, sample, training)
        return [_copied(_run(module, module, values)) for _ in range(calls)]

    try:
        eager, again = eagerly(), eagerly()
    except Exception as error:
        return SampleResult("eager cannot", type(error).__name__, first_line(str(error)))
    same = not any(_compare(one, other, "exact") for one, other in zip(eager, again, strict=True))
    rule = "exact" if same else "close"
    module = _build(info, sample, training)
    compiled = compiler(module)
    passed = SampleResult("passed")

    def in_float64(compile_module: Compiler) -> Any:
        wide = _build(info, sample, training, torch.float64)
        return _run(wide, compile_module(wide), in_double(values))

    for number, expected in enumerate(eager):
        try:
            outcome = _run(module, compiled, values)
        except Exception as error:
            return failure(error)
        found = _compare(expected, outcome, rule)
        if found and rounds(compiler):
            text = "; ".join(str(entry) for entry in found[:3])[:500]
            # Float64 runs the first call; in a later one, buffers may have changed.
            alone = number == 0 or all(entry.kind == "values, by rounding" for entry in found)
            runs = (lambda: in_float64(lambda wide: wide), lambda: in_float64(compiler))
            if alone and is_tolerable(found, expected, outcome, *runs):
                passed = SampleResult("passed", ROUNDING, text)
                continue
        if found and rule == "exact" and all(entry.kind.startswith("values") for entry in found):
            # Two equal runs do not prove determinism: kernels may choose by the alignment of fresh memory.
            runs = [eagerly() for _ in range(3)]
            if any(_compare(one, other, "exact") for run in runs for one, other in zip(eager, run, strict=True)):
                rule = "close"
                found = _compare(expected, outcome, rule)
        if found:
            return SampleResult("wrong", found[0].kind, "; ".join(str(entry) for entry in found[:3])[:500])
    idle = not_compiled(compiled)
    return SampleResult("error", "not compiled", first_line(idle)) if idle else passed


def _copied(outcome: tuple[Any, ...]) -> tuple[Any, ...]:
    """Buffers as they are now: the next call writes to them."""
    result, inputs, gradients, buffers, *rest = outcome
    return (result, inputs, gradients, {name: value.clone() for name, value in buffers.items()}, *rest)


def check_module(name: str, compiler: Compiler, samples: int | None = None) -> OperatorResult:
    """A module in training and in evaluation mode, on its first ``samples`` samples (all by default)."""
    info = modules()[name]
    outcome = OperatorResult(name, {variant: [] for variant in VARIANTS})
    started = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for variant in VARIANTS:
            training = variant == "train"
            seed_everything()
            try:
                found = info.module_inputs_func(
                    info, device="cpu", dtype=torch.float32, requires_grad=True, training=training
                )
            except Exception as error:
                text = first_line(f"sample inputs: {error}")
                outcome.samples[variant].append(SampleResult("eager cannot", type(error).__name__, text))
                continue
            for index, sample in enumerate(list(found)[:samples]):
                result = check_sample(info, sample, training, compiler)
                result.sample = index
                outcome.samples[variant].append(result)
    outcome.seconds = round(time.perf_counter() - started, 3)
    return outcome


def run_here(names: Iterable[str], compiler: Compiler, samples: int | None = None) -> list[OperatorResult]:
    """Check modules in this process."""
    return [check_module(name, compiler, samples) for name in names]


def _worker(names: Sequence[str], compiler: str, samples: int | None) -> None:
    torch.set_num_threads(1)
    for name in names:
        print(json.dumps(asdict(check_module(name, COMPILERS[compiler], samples))), flush=True)


def run_parallel(names: Sequence[str], compiler: str, samples: int | None, jobs: int) -> list[OperatorResult]:
    """Check modules in ``jobs`` subprocesses; one whose process dies is an error, and the rest goes on."""

    def arguments(some: Sequence[str]) -> list[str]:
        options = ["--worker", "--compiler", compiler, "--samples", str(samples or 0)]
        return ["tests.conformance.module_runner", *options, "--modules", ",".join(some)]

    return run_in_workers(names, VARIANTS, arguments, jobs)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns 1 if any answer was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.conformance.module_runner", description=__doc__)
    parser.add_argument("--modules", help="modules by name, separated by commas; all by default")
    parser.add_argument("--match", help="a regular expression that the name must contain")
    parser.add_argument("--samples", type=int, default=0, help="samples for each module; 0, the default, for all")
    parser.add_argument("-j", "--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--compiler", choices=sorted(COMPILERS), default="dovetail")
    parser.add_argument("--json", type=Path, help="write all results here")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    names = chosen.modules.split(",") if chosen.modules else list(modules())
    if chosen.match:
        names = [name for name in names if re.search(chosen.match, name)]
    unknown = [name for name in names if name not in modules()]
    if unknown:
        parser.error(f"no module is called {', '.join(unknown)}")
    if chosen.worker:
        _worker(names, chosen.compiler, chosen.samples or None)
        return 0
    results = run_parallel(names, chosen.compiler, chosen.samples or None, max(1, chosen.jobs))
    print("\n" + summary(results, VARIANTS))
    if chosen.json:
        chosen.json.write_text(json.dumps([asdict(result) for result in results], indent=1))
    return int(any(result.verdict(variant) == "wrong" for result in results for variant in VARIANTS))


if __name__ == "__main__":
    sys.exit(main())
