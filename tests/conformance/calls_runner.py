"""Call every public function and method of torch in every form, compiled and eagerly, and compare all that can be seen.

``python -m tests.conformance.calls_runner --match '^torch.linalg' -j 2``; see the README beside this file.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tests.conformance.call_forms import Form, callables, forms
from tests.conformance.compilers import COMPILERS, Compiler, not_compiled
from tests.conformance.verdicts import (
    OperatorResult,
    SampleResult,
    cotangent_like,
    first_line,
    seed_everything,
    summary,
)
from tests.conformance.workers import run_in_workers
from tests.differential import Difference, aliasing, clone_inputs, differences, tensors_in

VARIANTS = ("plain", "gradients")
#: The kind of a "passed" that ran eagerly.
EAGERLY = "eagerly"


@dataclass(frozen=True)
class Seen:
    """All that can be seen of one call: its result or the class of its error, and what it left behind."""

    result: Any
    inputs: Any
    others: dict[str, Any]
    error: str = ""
    message: str = ""


def observe(function: Callable[..., Any], form: Form) -> Seen:
    """Run a form on copies of its arguments."""
    seed_everything()
    inputs = clone_inputs((form.given.args, form.given.kwargs))
    given = tensors_in(inputs)
    versions = [tensor._version for tensor in given]
    result, others, error, message = None, {}, "", ""
    try:
        result = function(*inputs)
        others["random state"] = torch.get_rng_state()
        others["aliasing"] = aliasing(result, inputs)
        if form.backward:
            others["gradient"] = _gradients(result, given)
    except Exception as raised:
        error, message = type(raised).__name__, first_line(str(raised))
    others["written inputs"] = [tensor._version != before for tensor, before in zip(given, versions, strict=True)]
    return Seen(result, inputs, others, error, message)


def _gradients(result: Any, given: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    roots = [tensor for tensor in tensors_in(result) if tensor.requires_grad]
    leaves = [tensor for tensor in given if tensor.requires_grad]
    if not roots or not leaves:
        return []
    generator = torch.Generator().manual_seed(7)
    cotangents = [cotangent_like(root, torch.randn(root.shape, generator=generator)) for root in roots]
    return [
        None if gradient is None else gradient.detach()
        for gradient in torch.autograd.grad(roots, leaves, cotangents, allow_unused=True)
    ]


def _different(eager: Seen, compiled: Seen, values: str) -> Iterator[Difference]:
    if eager.error or compiled.error:
        if eager.error != compiled.error:
            text = f"eager {eager.error or 'succeeds'}, compiled {compiled.error or 'succeeds'}: {compiled.message}"
            yield Difference("error", "the call", text)
    else:
        yield from differences(eager.result, compiled.result, "result", values)
    yield from differences(eager.inputs, compiled.inputs, "input after the call", values)
    for name in eager.others:
        if name in compiled.others:
            yield from differences(eager.others[name], compiled.others[name], name, values)


def check_form(form: Form, compiler: Compiler, values: str = "exact", calls: int = 2) -> SampleResult:
    """Compare ``calls`` calls of the compiled form with eager's."""
    eager = observe(form.function, form)
    if list(_different(eager, observe(form.function, form), "exact")):
        values = "close"
    compiled = compiler(form.function)
    for _ in range(calls):
        outcome = observe(compiled, form)
        found = list(_different(eager, outcome, values))
        if found:
            text = "; ".join(str(entry) for entry in found[:3])[:500]
            broken = bool(outcome.error) and not eager.error
            return SampleResult("error" if broken else "wrong", f"{form.name}: {found[0].kind}", text)
    idle = "" if eager.error else not_compiled(compiled)
    if eager.error:
        return SampleResult("passed", "eager raises", f"{form.name}: {eager.error}")
    return SampleResult("passed", EAGERLY if idle else "", f"{form.name}: {first_line(idle)}" if idle else "")


def check_callable(name: str, compiler_name: str, samples: int) -> OperatorResult:
    """All forms of one callable."""
    outcome = OperatorResult(name, {variant: [] for variant in VARIANTS})
    started = time.perf_counter()
    values = "close" if "inductor" in compiler_name else "exact"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for variant, requires_grad in zip(VARIANTS, (False, True), strict=True):
            for form in forms(name, requires_grad, samples):
                outcome.samples[variant].append(check_form(form, COMPILERS[compiler_name], values))
    outcome.seconds = round(time.perf_counter() - started, 3)
    return outcome


def _report(results: Sequence[OperatorResult]) -> str:
    samples = [sample for result in results for found in result.samples.values() for sample in found]
    alone = sum(sample.kind == EAGERLY for sample in samples)
    raised = sum(sample.kind == "eager raises" for sample in samples)
    lines = [f"{len(samples)} calls of {len(results)} callables; {alone} ran eagerly, in {raised} eager raises", ""]
    return "\n".join(lines) + summary(results, VARIANTS)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns 1 if any answer was wrong, or an error that eager does not give."""
    parser = argparse.ArgumentParser(prog="python -m tests.conformance.calls_runner", description=__doc__)
    parser.add_argument("--callables", help="full names, separated by commas; all by default")
    parser.add_argument("--match", help="a regular expression that the full name must contain")
    parser.add_argument("--samples", type=int, default=2, help="argument lists for each callable (default 2)")
    parser.add_argument("-j", "--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--compiler", choices=sorted(COMPILERS), default="dovetail-with-breaks")
    parser.add_argument("--json", type=Path, help="write all results here")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    names = chosen.callables.split(",") if chosen.callables else list(callables())
    unknown = [name for name in names if name not in callables()]
    if unknown:
        parser.error(f"no callable is called {', '.join(unknown)}")
    if chosen.match:
        names = [name for name in names if re.search(chosen.match, name)]
    if chosen.worker:
        torch.set_num_threads(1)
        for name in names:
            print(json.dumps(asdict(check_callable(name, chosen.compiler, chosen.samples))), flush=True)
        return 0

    def command(some: Sequence[str]) -> list[str]:
        options = ["--worker", "--compiler", chosen.compiler, "--samples", str(chosen.samples)]
        return ["tests.conformance.calls_runner", *options, "--callables", ",".join(some)]

    results = run_in_workers(names, VARIANTS, command, max(1, chosen.jobs), chunk=100)
    print("\n" + _report(results))
    if chosen.json:
        chosen.json.write_text(json.dumps([asdict(result) for result in results], indent=1))
    return int(any(result.verdict(variant) in ("wrong", "error") for result in results for variant in VARIANTS))


if __name__ == "__main__":
    sys.exit(main())
