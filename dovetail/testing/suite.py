"""The conformance suite as one list, and running it in children."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dovetail.backends import Backend, lookup_backend
from dovetail.backends.debug import children
from dovetail.backends.debug.conformance import CASES as GRAPH_CASES
from dovetail.backends.debug.conformance import check_case
from dovetail.backends.registry import defined_in_this_process
from dovetail.errors import OptionError, UnsupportedGraphError
from dovetail.testing.cases import GROUPS, CaseResult, run_case
from dovetail.testing.models import MODEL_CASES
from dovetail.testing.programs import PROGRAM_CASES

#: How long one case may take: a C++ compiler on a busy machine needs a while for a model.
CASE_SECONDS = 180.0


@dataclass(frozen=True)
class Item:
    """One entry of the suite: run it with a backend, its options and a device."""

    group: str
    name: str
    run: Callable[[Backend, Mapping[str, Any], str], CaseResult]


def _graph_item(case: Any, kind: Any) -> Item:
    name = f"{case.name} ({kind})"

    def run(backend: Backend, options: Mapping[str, Any], device: str) -> CaseResult:
        begun = time.perf_counter()
        status: Any = None
        try:
            problem = check_case(backend, case, kind, options, device)
        except UnsupportedGraphError as error:
            problem, status = str(error), "refused"
        except Exception as error:  # noqa: BLE001  (a backend may raise anything)
            problem = f"{type(error).__name__}: {error}"
        status = status or ("failed" if problem else "passed")
        return CaseResult("operators", name, status, problem, time.perf_counter() - begun)

    return Item("operators", name, run)


def _program_item(case: Any) -> Item:
    return Item(case.group, case.name, lambda backend, options, device: run_case(case, backend, options, device))


def items_for(backend: Backend, groups: Sequence[str] | None = None) -> list[Item]:
    """The entries of the suite that say something about this backend, in the order of the groups."""
    chosen = list(GROUPS if groups is None else groups)
    for group in chosen:
        if group not in GROUPS:
            raise OptionError(f"the suite has no group {group!r}", advice=f"the groups are: {', '.join(GROUPS)}")
    entries = [_graph_item(case, kind) for case in GRAPH_CASES for kind in backend.kinds]
    entries += [_program_item(case) for case in (*MODEL_CASES, *PROGRAM_CASES)]
    return [entry for group in chosen for entry in entries if entry.group == group]


def run_items(
    backend: str | Backend,
    items: Sequence[Item],
    *,
    options: Mapping[str, Any],
    device: str = "cpu",
    isolate: bool = True,
    seconds: float = CASE_SECONDS,
) -> Iterator[CaseResult]:
    """Run entries one by one; with ``isolate`` in a child process, and in a new one after a crash or a hang."""
    found = lookup_backend(backend)
    by_name = isinstance(backend, str) and not defined_in_this_process(backend)
    if not isolate or not (by_name or children.can_fork()):
        for entry in items:
            yield entry.run(found, options, device)
        return
    left = list(items)
    while left:
        groups = sorted({entry.group for entry in left})
        names = [entry.name for entry in left]
        if by_name:
            job = {"backend": backend, "options": dict(options), "device": device, "groups": groups, "names": names}
            rows = children.rows_of_module("dovetail.testing.child", job, seconds)
        else:
            rows = children.rows_of_fork(_forked_work(found, list(left), options, device), seconds)
        for row in rows:
            entry = left.pop(0)
            if isinstance(row, children.Lost):
                status: Any = row.status
                yield CaseResult(
                    entry.group, entry.name, status, row.problem, seconds if status == "timed out" else 0.0
                )
            else:
                yield CaseResult(**row)
        # A child that ends early with status 0 has left entries unsaid: a backend that calls exit.
        if left and names == [entry.name for entry in left]:
            entry = left.pop(0)
            yield CaseResult(entry.group, entry.name, "crashed", "the process ended before the case did")


def _forked_work(
    backend: Backend, items: Sequence[Item], options: Mapping[str, Any], device: str
) -> Callable[[children.Write], None]:
    def work(write: children.Write) -> None:
        for entry in items:
            write(vars(entry.run(backend, options, device)))

    return work


def run_job(job: Mapping[str, Any], write: children.Write) -> None:
    """What a child started by :func:`run_items` does; ``job`` names the backend and the entries."""
    os.environ.setdefault("TORCH_LOGS", "-all")
    backend = lookup_backend(job["backend"])
    wanted = job["names"]
    by_name = {entry.name: entry for entry in items_for(backend, job["groups"])}
    for name in wanted:
        write(vars(by_name[name].run(backend, job["options"], job["device"])))
