"""Run torch's operator database through a compiler and compare with eager, operator by operator.

``python -m tests.conformance.opinfo_runner --ops add,mul --samples 2 -j 2``; see the README beside this file.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import os
import queue
import re
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tests.conformance.compilers import COMPILERS, Compiler, not_compiled, rounds
from tests.conformance.rounding import in_double, is_rounding, is_tolerable
from tests.conformance.verdicts import (
    ROUNDING,
    OperatorResult,
    SampleResult,
    cotangent_like,
    failure,
    first_line,
    seed_everything,
    summary,
    totals,
)
from tests.differential import Difference, aliasing, clone_inputs, differences, rule_of, tensors_in

VARIANTS = ("forward", "backward", "inplace")
# What is run for each ``--direction``.
DIRECTIONS = {"first": VARIANTS, "double": ("double",)}
# These return memory that nobody has written to, so that their values mean nothing.
UNINITIALISED = frozenset(
    (
        "empty",
        "empty_like",
        "empty_permuted",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "resize_",
        "resize_as_",
    )
)


@functools.cache
def operators() -> dict[str, Any]:
    """The operators that take float32 on the CPU, by full name (with the variant's name after a dot)."""
    # The import takes seconds, and a parent process that only hands out names from the command line does not need it.
    from torch.testing._internal import common_methods_invocations
    from torch.testing._internal.common_methods_invocations import op_db

    # The database seeds the generator inside some operators. The runner seeds before every call, and what is asked here
    # is whether the operator can be compiled, not whether a program that sets the seed can.
    common_methods_invocations.wrapper_set_seed = lambda operator, *args, **kwargs: operator(*args, **kwargs)
    supported = [op for op in op_db if op.supports_dtype(torch.float32, "cpu")]
    named = {op.name + (f".{op.variant_test_name}" if op.variant_test_name else ""): op for op in supported}
    if len(named) != len(supported):
        raise AssertionError("two operators of the database have the same full name")
    return named


@dataclass
class Outcome:
    """Everything that can be seen after one call."""

    result: Any
    inputs: Any
    aliases: Any
    random_state: torch.Tensor
    gradients: list[torch.Tensor | None] | None


def _second(
    gradients: Sequence[torch.Tensor | None], leaves: Sequence[torch.Tensor], generator: torch.Generator
) -> list[torch.Tensor | None] | None:
    """The gradients of the gradients; None where eager has none."""
    roots = [gradient for gradient in gradients if gradient is not None and gradient.requires_grad]
    if not roots:
        return None
    cotangents = [cotangent_like(root, torch.randn(root.shape, generator=generator)) for root in roots]
    return list(torch.autograd.grad(roots, leaves, cotangents, allow_unused=True))


def _run(
    function: Callable[..., Any], values: Any, backward: bool, post: Callable[[Any], Any] | None, double: bool = False
) -> Outcome:
    seed_everything()
    inputs = clone_inputs(values)
    result = function(*inputs)
    state = torch.get_rng_state()
    gradients: list[torch.Tensor | None] | None = None
    if backward:
        roots = [tensor for tensor in tensors_in(post(result) if post else result) if tensor.requires_grad]
        leaves = [tensor for tensor in tensors_in(inputs) if tensor.requires_grad]
        if roots and leaves:
            generator = torch.Generator().manual_seed(7)
            cotangents = [
                torch.randn(root.shape, generator=generator).to(root.dtype).to_sparse()
                if root.layout == torch.sparse_coo
                else cotangent_like(root, torch.randn(root.shape, generator=generator))
                for root in roots
            ]
            if double:
                cotangents = [cotangent.requires_grad_() for cotangent in cotangents]
            gradients = list(torch.autograd.grad(roots, leaves, cotangents, allow_unused=True, create_graph=double))
            if double:
                second = _second(gradients, [*leaves, *cotangents], generator)
                gradients = None if second is None else gradients + second
    return Outcome(result, inputs, aliasing(result, inputs), state, gradients)


def _compare(eager: Outcome, compiled: Outcome, values: str) -> list[Difference]:
    found = list(differences(eager.result, compiled.result, "result", values))
    found += differences(eager.inputs, compiled.inputs, "input after the call", values)
    # Eager hands an incoming gradient on as it is where the derivative is one: the very leaf that the runner has made.
    handed_on = dataclasses.replace(rule_of(values), ignored=frozenset({"is_leaf"}))
    found += differences(eager.gradients, compiled.gradients, "gradient", handed_on)
    if not found and eager.aliases != compiled.aliases:
        found.append(Difference("aliasing", "result", f"eager {eager.aliases}, compiled {compiled.aliases}"))
    if not torch.equal(eager.random_state, compiled.random_state):
        found.append(Difference("random state", "the call", "not as eager leaves it"))
    return found


def _is_rounding(
    function: Callable[..., Any],
    values: tuple[Any, ...],
    compiler: Compiler,
    how: tuple[bool, Callable[[Any], Any] | None, bool],
    found: Sequence[Difference],
    eager: Outcome,
    outcome: Outcome,
) -> bool:
    if not how[-1] and not rounds(compiler):
        return False
    wide = in_double(values)

    def seen(target: Callable[..., Any]) -> Any:
        again = _run(target, wide, *how)
        return again.result, again.gradients

    return (is_tolerable if rounds(compiler) else is_rounding)(
        found,
        (eager.result, eager.gradients),
        (outcome.result, outcome.gradients),
        lambda: seen(function),
        lambda: seen(compiler(function)),
    )


def check_call(
    function: Callable[..., Any],
    values: tuple[Any, ...],
    compiler: Compiler,
    *,
    backward: bool = False,
    post: Callable[[Any], Any] | None = None,
    uninitialised: bool = False,
    calls: int = 2,
    double: bool = False,
) -> SampleResult:
    """Run ``function(*values)`` eagerly and compiled, on copies, and compare all that can be seen.

    The compiled function is called ``calls`` times: the call that compiles and one that finds the entry both count.
    ``post`` is applied to the result before the gradients are asked for. ``double``: then their gradients too.

    >>> check_call(torch.sin, (torch.ones(2),), lambda function: function).verdict
    'passed'
    """
    try:
        eager = _run(function, values, backward, post, double)
        again = _run(function, values, backward, post, double)
    except Exception as error:
        return SampleResult("eager cannot", type(error).__name__, first_line(str(error)))
    if backward and eager.gradients is None:
        missing = "no second derivative" if double else "no output depends on an input that requires a gradient"
        return SampleResult("eager cannot", "no gradient", missing)
    values_rule = "ignored" if uninitialised else "exact" if not _compare(eager, again, "exact") else "close"
    compiled = compiler(function)
    passed = SampleResult("passed")
    for _ in range(calls):
        try:
            outcome = _run(compiled, values, backward, post, double)
        except Exception as error:
            return failure(error)
        found = _compare(eager, outcome, values_rule)
        if found and values_rule == "exact" and all(entry.kind.startswith("values") for entry in found):
            # Two equal runs do not prove determinism: kernels may choose by the alignment of fresh memory.
            more = [_run(function, values, backward, post, double) for _ in range(4)]
            if any(_compare(eager, other, "exact") for other in more):
                values_rule = "close"
                found = _compare(eager, outcome, values_rule)
        if found:
            text = "; ".join(str(entry) for entry in found[:3])[:500]
            if not _is_rounding(function, values, compiler, (backward, post, double), found, eager, outcome):
                return SampleResult("wrong", found[0].kind, text)
            passed = SampleResult("passed", ROUNDING, text)
    idle = not_compiled(compiled)
    return SampleResult("error", "not compiled", first_line(idle)) if idle else passed


def check_refusal_leaves_inputs(function: Callable[..., Any], values: tuple[Any, ...], compiler: Compiler) -> str:
    """After a refusal nothing may have changed: the first difference in the inputs or the random state, or ''."""
    seed_everything()
    inputs, state = clone_inputs(values), torch.get_rng_state()
    try:
        compiler(function)(*inputs)
    except Exception:
        found = list(differences(clone_inputs(values), inputs, "input after a refusal"))
        if not torch.equal(state, torch.get_rng_state()):
            found.append(Difference("random state", "a refused call", "changed"))
        return str(found[0]) if found else ""
    return ""


def _calling(op: Any) -> Callable[..., Any]:
    # sample arguments travel as a tuple and a dict, as in a user's own wrapper.
    target = op.op

    def forward(value: Any, args: Any, kwargs: Any) -> Any:
        return target(value, *args, **kwargs)

    return forward


def _writing(variant: Callable[..., Any], through_clone: bool) -> Callable[..., Any]:
    def write(value: Any, args: Any, kwargs: Any) -> Any:
        return variant(value, *args, **kwargs)

    def write_clone(value: Any, args: Any, kwargs: Any) -> Any:
        fresh = value.clone()
        variant(fresh, *args, **kwargs)
        return fresh

    return write_clone if through_clone else write


def _samples(op: Any, requires_grad: bool, count: int) -> list[Any]:
    seed_everything()
    return list(itertools.islice(op.sample_inputs("cpu", torch.float32, requires_grad=requires_grad), count))


def _checked(results: list[SampleResult], index: int, function: Callable[..., Any], sample: Any, **rest: Any) -> None:
    values = (sample.input, sample.args, sample.kwargs)
    result = check_call(function, values, **rest)
    if result.verdict == "refused":
        changed = check_refusal_leaves_inputs(function, values, rest["compiler"])
        if changed:
            result = SampleResult("wrong", "refusal changed the world", f"{changed}; after: {result.reason}")
    result.sample = index
    results.append(result)


def check_operator(
    name: str, op: Any, compiler: Compiler, samples: int = 2, direction: str = "first"
) -> OperatorResult:
    """All variants of one operator on its first ``samples`` samples."""
    outcome = OperatorResult(name, {variant: [] for variant in DIRECTIONS[direction]})
    started = time.perf_counter()
    common: dict[str, Any] = {"compiler": compiler, "uninitialised": op.name in UNINITIALISED}
    differentiable = op.supports_autograd and torch.float32 in op.supported_backward_dtypes("cpu")
    in_place = op.get_inplace()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            plain = _samples(op, False, samples) if direction == "first" else []
            tracked = _samples(op, True, samples) if differentiable else []
        except Exception as error:
            text = first_line(f"sample inputs: {error}")
            outcome.samples[DIRECTIONS[direction][0]].append(SampleResult("eager cannot", type(error).__name__, text))
            return outcome
        if direction == "double":
            common |= {"backward": True, "double": True}
            for index, sample in enumerate(tracked):
                post = sample.output_process_fn_grad
                _checked(outcome.samples["double"], index, _calling(op), sample, post=post, **common)
            outcome.seconds = round(time.perf_counter() - started, 3)
            return outcome
        for index, sample in enumerate(plain):
            _checked(outcome.samples["forward"], index, _calling(op), sample, **common)
        for index, sample in enumerate(tracked):
            post = sample.output_process_fn_grad
            _checked(outcome.samples["backward"], index, _calling(op), sample, backward=True, post=post, **common)
        if in_place is not None:
            for index, sample in enumerate(plain):
                if isinstance(sample.input, torch.Tensor) and not sample.broadcasts_input:
                    _checked(outcome.samples["inplace"], index, _writing(in_place, False), sample, **common)
            for index, sample in enumerate(tracked if op.supports_inplace_autograd else ()):
                if isinstance(sample.input, torch.Tensor) and not sample.broadcasts_input:
                    target = _writing(in_place, True)
                    _checked(outcome.samples["inplace"], index, target, sample, backward=True, **common)
    outcome.seconds = round(time.perf_counter() - started, 3)
    return outcome


def run_here(
    names: Iterable[str], compiler: Compiler, samples: int = 2, direction: str = "first"
) -> list[OperatorResult]:
    """Check operators in this process; for the test slice and for debugging."""
    table = operators()
    return [check_operator(name, table[name], compiler, samples, direction) for name in names]


def _worker(names: Sequence[str], compiler_name: str, samples: int, out: Path, direction: str) -> None:
    torch.set_num_threads(1)
    table = operators()
    compiler = COMPILERS[compiler_name]
    with out.open("a") as stream:
        for name in names:
            print(json.dumps({"start": name}), file=stream, flush=True)
            result = check_operator(name, table[name], compiler, samples, direction)
            print(json.dumps({"done": asdict(result)}), file=stream, flush=True)


def _read_progress(out: Path) -> tuple[dict[str, OperatorResult], str | None]:
    finished: dict[str, OperatorResult] = {}
    current: str | None = None
    for line in out.read_text().splitlines():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            # A killed process may leave half a line.
            continue
        if "start" in entry:
            current = entry["start"]
        else:
            result = OperatorResult.from_json(entry["done"])
            finished[result.name] = result
            current = None
    return finished, current


def _run_chunk(
    names: Sequence[str],
    compiler_name: str,
    samples: int,
    timeout: float,
    report: Callable[[OperatorResult], None],
    direction: str = "first",
) -> None:
    """Run ``names`` in subprocesses; an operator whose process dies or stalls is an error, and the rest goes on."""
    remaining = list(names)
    while remaining:
        with tempfile.TemporaryDirectory() as folder:
            out, log = Path(folder, "progress.jsonl"), Path(folder, "log.txt")
            out.touch()
            command = [sys.executable, "-m", "tests.conformance.opinfo_runner", "--worker", str(out)]
            command += ["--compiler", compiler_name, "--samples", str(samples), "--ops", ",".join(remaining)]
            command += ["--direction", direction]
            environment = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **os.environ}
            with log.open("w") as stream:
                process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, env=environment)
                size, since, stalled, reported = 0, time.monotonic(), False, 0
                while process.poll() is None:
                    time.sleep(0.1)
                    if out.stat().st_size != size:
                        size, since = out.stat().st_size, time.monotonic()
                        finished, _ = _read_progress(out)
                        for result in list(finished.values())[reported:]:
                            report(result)
                        reported = len(finished)
                    # The first operator's allowance also covers importing torch on a busy machine.
                    elif time.monotonic() - since > timeout + (60 if size == 0 else 0):
                        stalled = True
                        process.kill()
                        process.wait()
            finished, current = _read_progress(out)
            for result in list(finished.values())[reported:]:
                report(result)
            remaining = [name for name in remaining if name not in finished]
            if process.returncode == 0 and not remaining:
                return
            tail = first_line("\n".join(log.read_text(errors="replace").splitlines()[-3:]))
            if stalled:
                kind, reason = "timeout", f"nothing happened for {timeout:.0f} s"
            else:
                kind, reason = "crash", f"the process ended with {process.returncode}: {tail}"
            # A process that dies before its first operator would die again: the first operator takes the blame.
            culprit = current or remaining[0]
            remaining.remove(culprit)
            report(OperatorResult(culprit, {DIRECTIONS[direction][0]: [SampleResult("error", kind, reason)]}))


def run_parallel(
    names: Sequence[str],
    compiler_name: str,
    samples: int = 2,
    jobs: int = 1,
    timeout: float = 120.0,
    chunk: int = 40,
    direction: str = "first",
) -> list[OperatorResult]:
    """Check operators in ``jobs`` subprocesses at a time, and return the results in the order of ``names``."""
    work: queue.SimpleQueue[Sequence[str]] = queue.SimpleQueue()
    size = max(1, min(chunk, -(-len(names) // max(jobs, 1))))
    for position in range(0, len(names), size):
        work.put(names[position : position + size])
    results: dict[str, OperatorResult] = {}
    lock = threading.Lock()

    def report(result: OperatorResult) -> None:
        with lock:
            results[result.name] = result
            line = "  ".join(f"{variant} {result.verdict(variant):14}" for variant in DIRECTIONS[direction])
            print(f"[{len(results):4}/{len(names)}] {result.name:44} {line} {result.seconds:6.2f} s", flush=True)
            for variant, samples in result.samples.items():
                bad = [sample for sample in samples if sample.verdict in ("wrong", "error", "refused")]
                for sample in bad:
                    print(f"    {variant} {sample.sample}: {sample.kind}: {sample.reason[:300]}", flush=True)

    def serve() -> None:
        while True:
            try:
                names_now = work.get_nowait()
            except queue.Empty:
                return
            _run_chunk(names_now, compiler_name, samples, timeout, report, direction)

    threads = [threading.Thread(target=serve) for _ in range(max(1, jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[name] for name in names if name in results]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns 1 if any answer was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.conformance.opinfo_runner", description=__doc__)
    parser.add_argument("--ops", help="operators by full name, separated by commas; all by default")
    parser.add_argument("--match", help="a regular expression that the full name must contain")
    parser.add_argument("--samples", type=int, default=2, help="samples for each operator (default 2)")
    parser.add_argument("-j", "--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--chunk", type=int, default=40, help="operators for each process")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for one operator")
    parser.add_argument("--compiler", choices=sorted(COMPILERS), default="dovetail")
    parser.add_argument(
        "--direction", choices=sorted(DIRECTIONS), default="first", help="double: gradients of gradients, from outside"
    )
    parser.add_argument("--json", type=Path, help="write all results here")
    parser.add_argument("--list", action="store_true", help="print the operators' names and stop")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.worker:
        _worker(chosen.ops.split(","), chosen.compiler, chosen.samples, chosen.worker, chosen.direction)
        return 0
    table = operators()
    names = chosen.ops.split(",") if chosen.ops else list(table)
    unknown = [name for name in names if name not in table]
    if unknown:
        # A bare name stands for all its variants.
        names = [
            full
            for name in names
            for full in ([name] if name in table else [k for k in table if table[k].name == name])
        ]
        missing = [name for name in unknown if not any(op.name == name for op in table.values())]
        if missing:
            parser.error(f"no operator is called {', '.join(missing)} (see --list)")
    if chosen.match:
        names = [name for name in names if re.search(chosen.match, name)]
    if chosen.list:
        print("\n".join(names))
        return 0
    results = run_parallel(
        names, chosen.compiler, chosen.samples, chosen.jobs, chosen.timeout, chosen.chunk, chosen.direction
    )
    print("\n" + summary(results, DIRECTIONS[chosen.direction]))
    if chosen.json:
        payload = {
            "compiler": chosen.compiler,
            "torch": torch.__version__,
            "python": sys.version.split()[0],
            "samples": chosen.samples,
            "totals": totals(results, DIRECTIONS[chosen.direction]),
            "operators": [
                {
                    **asdict(result),
                    "verdicts": {variant: result.verdict(variant) for variant in DIRECTIONS[chosen.direction]},
                }
                for result in results
            ],
        }
        chosen.json.write_text(json.dumps(payload, indent=1))
    return int(any(result.verdict(variant) == "wrong" for result in results for variant in result.samples))


if __name__ == "__main__":
    sys.exit(main())
