"""The conformance suite for backends.

>>> from dovetail.testing import check_backend
>>> report = check_backend("aten", groups=["aliasing"], show=False, isolate=False)
>>> report.passed
True
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from dovetail.backends import Backend, lookup_backend
from dovetail.backends.debug.subgraphs import Subgraph
from dovetail.backends.protocol import Kind
from dovetail.testing.cases import CaseResult
from dovetail.testing.report import Report
from dovetail.testing.suite import CASE_SECONDS, Probe, cases_for, probe_backends, run_cases
from dovetail.torch_private import tracing as private_tracing

__all__ = ["CaseResult", "Probe", "Report", "check_backend", "compare_graph", "probe_backends"]


def check_backend(
    backend: str | Backend | Any,
    *,
    groups: Sequence[str] | None = None,
    options: Mapping[str, Any] | None = None,
    device: str = "cpu",
    isolate: bool = True,
    seconds: float = CASE_SECONDS,
    show: bool = True,
) -> Report:
    """Run a backend, by name or as an object, through the suite; print the table and return it.

    The cases run in another process, so that a crash, or a case that takes longer than ``seconds``, is an entry of the table
    like any other; ``isolate=False`` runs them here. ``groups`` picks some of "operators", "models", "mutation", "aliasing",
    "dynamic shapes", "second order" and "errors"; the backend gets ``options``; the cases' tensors are on ``device``.

    >>> print(check_backend("aten", groups=["mutation"], show=False, isolate=False).rows())
    [('mutation', '5/6', '1', '-')]
    """
    found = lookup_backend(backend)
    subject = backend if isinstance(backend, str) else found
    found = found.with_options(options or {})
    pairs = [(subject, case) for case in cases_for(found, groups)]
    results = run_cases(pairs, options=options, device=device, isolate=isolate, seconds=seconds)
    report = Report(found, tuple(results))
    if show:
        print(report)
    return report


def compare_graph(
    graph: Callable[..., list[Any]],
    inputs: Sequence[torch.Tensor],
    *,
    backend: str | Backend | Any,
    kind: Kind = "inference",
    options: Mapping[str, Any] | None = None,
) -> str:
    """Say in words how a backend differs from ATen's own operators on a function of tensors that returns one list.

    The result is empty if it does not differ. The scripts that the backend "bisect" writes call this.

    >>> compare_graph(lambda x: [x.sin()], [torch.ones(2)], backend="aten")
    ''
    """
    fake_mode = private_tracing.FakeTensorMode()
    with fake_mode, torch.no_grad():
        module = make_fx(graph)(*[fake_mode.from_tensor(value, static_shapes=True) for value in inputs])
    found = lookup_backend(backend).with_options(options or {})
    return str(Subgraph(module, list(inputs), kind=kind).try_backend(found, options or {}) or "")
