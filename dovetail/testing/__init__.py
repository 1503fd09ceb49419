"""For people who make backends: the conformance suite.

>>> from dovetail.testing import check_backend
>>> report = check_backend("aten", groups=["aliasing"], show=False, isolate=False)
>>> report.passed
True
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dovetail.backends import Backend, lookup_backend
from dovetail.testing.cases import CaseResult
from dovetail.testing.report import Report
from dovetail.testing.suite import CASE_SECONDS, items_for, run_items

__all__ = ["CaseResult", "Report", "check_backend"]


def check_backend(
    backend: str | Backend | Any,
    *,
    groups: Sequence[str] | None = None,
    options: Mapping[str, Any] | None = None,
    isolate: bool = True,
    seconds: float = CASE_SECONDS,
    show: bool = True,
) -> Report:
    """Run a backend, by name or as an object, through the suite; prints a table, and returns it.

    The cases run in another process, so that one that crashes or takes longer than ``seconds`` is an entry of the table like
    any other; ``isolate=False`` runs them here. ``groups`` picks some of "operators", "models", "mutation", "aliasing",
    "dynamic shapes", "second order" and "errors"; ``options`` are given to the backend.

    >>> print(check_backend("aten", groups=["mutation"], show=False, isolate=False).rows())
    [('mutation', '5/6', '1', '-')]
    """
    found = lookup_backend(backend)
    subject = backend if isinstance(backend, str) else found
    items = items_for(found, groups)
    results = tuple(run_items(subject, items, options=options or {}, isolate=isolate, seconds=seconds))
    report = Report(found, results)
    if show:
        print(report)
    return report
