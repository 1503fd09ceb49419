"""Whether a backend works on this machine: one small training step, in a process of its own, with a time limit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.backends import CUDAGRAPHS, lookup_backend
from dovetail.backends.cudagraphs import make_settings
from dovetail.backends.debug import children
from dovetail.backends.registry import defined_in_this_process
from dovetail.errors import DovetailError
from dovetail.testing.cases import Case, Compile, run_case

#: A C++ compiler that starts cold on a busy machine takes up to half a minute for the first graph.
PROBE_SECONDS = 90.0
#: CUDA graphs are recorded at the second call, and the third replays.
_CALLS = 3


@dataclass(frozen=True)
class Probe:
    """What came of trying one backend: whether it ``works``, how long its steps took, or why it does not.

    ``reason`` of one that works says what it does not do here.
    """

    name: str
    works: bool
    reason: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        works = f"works ({self.seconds:.1f} s)" + (f", but {self.reason}" if self.reason else "")
        return f"{self.name}: " + (works if self.works else self.reason)


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _training(compile: Compile) -> Any:
    compiled = compile(lambda x, w: (x @ w).tanh().sum())
    w = torch.ones(3, 2, device=_device(), requires_grad=True)
    for _ in range(_CALLS):
        compiled(torch.ones(4, 3, device=_device()), w).backward()
    return [w.grad]


def _inference(compile: Compile) -> Any:
    compiled = compile(lambda x: (x @ x.t()).tanh())
    with torch.no_grad():
        return [compiled(torch.ones(4, 3, device=_device())) for _ in range(_CALLS)]


def probe_here(name: str) -> Probe:
    """Try one backend in this process."""
    try:
        backend = lookup_backend(name)
    except DovetailError as error:
        return Probe(name, False, error.what)
    except Exception as error:  # noqa: BLE001  (loading a backend runs anybody's code)
        return Probe(name, False, f"{type(error).__name__}: {error}")
    trains = "backward" in backend.kinds
    case = Case("models", "a small step", _training if trains else _inference, trains)
    result = run_case(case, backend)
    reason = " ".join(result.problem.split("\n  what to do")[0].split())
    works = result.status == "passed"
    if works and backend.name == CUDAGRAPHS.name and (missing := make_settings({}).recorder.unavailable()):
        reason = f"records nothing: {missing.partition('; what to do')[0]}"
    return Probe(name, works, reason, result.seconds)


def probe_backends(names: Sequence[str], seconds: float = PROBE_SECONDS) -> Iterator[Probe]:
    """Try backends one after another in a child process, and in a new one after a crash or a hang.

    >>> [str(probe).split(" (")[0] for probe in probe_backends(["aten", "no_such_backend"])]
    ['aten: works', "no_such_backend: there is no backend named 'no_such_backend'"]
    """
    left = list(names)
    while left:
        if defined_in_this_process(left[0]):
            yield _probe_fork(left.pop(0), seconds)
            continue
        batch = list(itertools.takewhile(lambda name: not defined_in_this_process(name), left))
        before = len(left)
        for row in children.rows_of_module("dovetail.testing.child", {"probe": batch}, seconds):
            name = left.pop(0)
            yield _lost(name, row) if isinstance(row, children.Lost) else Probe(**row)
        if len(left) == before:
            yield Probe(left.pop(0), False, "the process ended without a word")


def _probe_fork(name: str, seconds: float) -> Probe:
    if not children.can_fork():
        return Probe(name, False, "was registered in this process, which uses CUDA and cannot be forked")
    for row in children.rows_of_fork(lambda write: write(vars(probe_here(name))), seconds):
        return _lost(name, row) if isinstance(row, children.Lost) else Probe(**row)
    return Probe(name, False, "the process ended without a word")


def _lost(name: str, lost: children.Lost) -> Probe:
    return Probe(name, False, str(lost))
