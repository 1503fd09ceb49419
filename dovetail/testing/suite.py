"""The conformance suite, and the probe of a backend by one small training step, run in child processes."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.backends import Backend, lookup_backend
from dovetail.backends.cudagraphs import make_settings
from dovetail.backends.debug import processes
from dovetail.backends.protocol import KINDS
from dovetail.backends.registry import defined_in_this_process
from dovetail.errors import OptionError
from dovetail.testing.cases import GROUPS, Case, CaseResult
from dovetail.testing.models import MODEL_CASES
from dovetail.testing.operators import operator_cases
from dovetail.testing.programs import PROBE_CASE, PROGRAM_CASES

#: The time limit of one case: a C++ compiler on a busy machine needs a while for a model.
CASE_SECONDS = 180.0
Subject = str | Backend


def cases_for(backend: Backend, groups: Sequence[str] | None = None) -> list[Case]:
    """Return the cases that apply to this backend, in the order of the groups."""
    chosen = list(GROUPS if groups is None else groups)
    for group in chosen:
        if group not in GROUPS:
            raise OptionError(f"the suite has no group {group!r}", advice=f"the groups are: {', '.join(GROUPS)}")
    cases = [*operator_cases(backend.kinds), *MODEL_CASES, *PROGRAM_CASES]
    return [case for group in chosen for case in cases if case.group == group]


def run_cases(
    pairs: Sequence[tuple[Subject, Case]],
    *,
    options: Mapping[str, Any] | None = None,
    device: str = "cpu",
    isolate: bool = True,
    seconds: float = CASE_SECONDS,
) -> Iterator[CaseResult]:
    """Run cases with their backends one by one; with ``isolate`` in a child process, and in a new one after a crash or a hang.

    A new interpreter runs backends that it finds by name, a fork those that only this process has.
    """
    left = list(pairs)
    while left:
        by_name = _known_everywhere(left[0][0])
        if not isolate or not (by_name or processes.can_fork()):
            yield _run(*left.pop(0), options, device)
            continue
        _, batch = next(itertools.groupby(left, lambda pair: _known_everywhere(pair[0])))
        finished = False
        for row in _rows(list(batch), by_name, options, device, seconds):
            _, case = left.pop(0)
            finished = True
            yield case.lost(row) if isinstance(row, processes.Lost) else CaseResult(**row)
        if not finished:
            # A backend that calls exit: the child ends with status 0.
            yield left.pop(0)[1].lost(processes.Lost("crashed", "the process ended before the case did"))


def _known_everywhere(subject: Subject) -> bool:
    return isinstance(subject, str) and not defined_in_this_process(subject)


def _rows(
    batch: Sequence[tuple[Subject, Case]], by_name: bool, options: Mapping[str, Any] | None, device: str, seconds: float
) -> Iterator[processes.Row | processes.Lost]:
    if by_name:
        names = [(subject, case.name) for subject, case in batch]
        job = {"cases": names, "options": dict(options or {}), "device": device}
        return processes.rows_of_interpreter(f"{__name__}:run_job", job, seconds)

    def work(write: processes.Write) -> None:
        for subject, case in batch:
            write(vars(_run(subject, case, options, device)))

    return processes.rows_of_fork(work, seconds)


def _run(subject: Subject, case: Case, options: Mapping[str, Any] | None, device: str) -> CaseResult:
    try:
        backend = lookup_backend(subject)
    except Exception as error:  # noqa: BLE001  (loading a backend runs anybody's code)
        return CaseResult(case.group, case.name, "failed", str(error))
    return case.run(backend, options, device)


def run_job(job: Mapping[str, Any], write: processes.Write) -> None:
    """Run the cases that :func:`run_cases` has sent to a new interpreter by name."""
    os.environ.setdefault("TORCH_LOGS", "-all")
    cases = {case.name: case for case in (*operator_cases(KINDS), *MODEL_CASES, *PROGRAM_CASES, PROBE_CASE)}
    for backend, name in job["cases"]:
        write(vars(_run(backend, cases[name], job["options"], job["device"])))


#: A C++ compiler that starts cold on a busy machine takes up to half a minute for the first graph.
PROBE_SECONDS = 90.0


@dataclass(frozen=True)
class Probe:
    """The result of trying one backend: whether it ``works``, how long its steps took, or why it does not.

    ``reason`` of a backend that works names a part of it that does not work here.
    """

    name: str
    works: bool
    reason: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        text = f"  {self.name:<29} {'works' if self.works else 'does not work':<14}"
        if self.works:
            return f"{text} {self.seconds:.1f} s{f', but {self.reason}' if self.reason else ''}"
        return f"{text} {self.reason if len(self.reason) <= 300 else self.reason[:297] + '...'}"


def probe_backends(names: Sequence[str], seconds: float = PROBE_SECONDS) -> Iterator[Probe]:
    """Try backends one after another in a child process, and in a new one after a crash or a hang.

    >>> [(probe.works, probe.reason) for probe in probe_backends(["aten", "no_such_backend"])]
    [(True, ''), (False, "there is no backend named 'no_such_backend'")]
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    results = run_cases([(name, PROBE_CASE) for name in names], device=device, seconds=seconds)
    for name, result in zip(names, results, strict=True):
        yield Probe(name, result.status == "passed", _reason(name, result), result.seconds)


def _reason(name: str, result: CaseResult) -> str:
    if result.status == "passed":
        missing = make_settings({}).recorder.unavailable() if name == "cudagraphs" else ""
        return f"records nothing: {missing.partition('; what to do')[0]}" if missing else ""
    problem = " ".join(result.problem.split("\n  what to do")[0].split())
    return f"{result.status}: {problem}" if result.status in ("crashed", "timed out") else problem
