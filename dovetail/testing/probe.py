"""Probes of backends: one small training step in a process of its own, with a time limit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from dovetail.backends.cudagraphs import make_settings
from dovetail.testing.cases import CaseResult
from dovetail.testing.programs import PROBE_CASE
from dovetail.testing.suite import run_cases

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
