"""For people who make backends: the conformance suite.

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
from dovetail.backends.debug.pieces import Piece
from dovetail.backends.protocol import Kind
from dovetail.testing.cases import CaseResult
from dovetail.testing.probe import Probe, probe_backends
from dovetail.testing.report import Report
from dovetail.testing.suite import CASE_SECONDS, items_for, run_items
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
    """Run a backend, by name or as an object, through the suite; prints a table, and returns it.

    The cases run in another process, so that one that crashes or takes longer than ``seconds`` is an entry of the table like
    any other; ``isolate=False`` runs them here. ``groups`` picks some of "operators", "models", "mutation", "aliasing",
    "dynamic shapes", "second order" and "errors"; ``options`` are given to the backend; the cases' tensors are on ``device``.

    >>> print(check_backend("aten", groups=["mutation"], show=False, isolate=False).rows())
    [('mutation', '5/6', '1', '-')]
    """
    found = lookup_backend(backend)
    subject = backend if isinstance(backend, str) else found
    found = found.with_options(options or {})
    items = items_for(found, groups)
    results = tuple(run_items(subject, items, options=options or {}, device=device, isolate=isolate, seconds=seconds))
    report = Report(found, results)
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
    """How a backend differs from ATen's own operators on a function of tensors that returns one list; empty if it does not.

    This is what the scripts call that the backend "bisect" writes.

    >>> compare_graph(lambda x: [x.sin()], [torch.ones(2)], backend="aten")
    ''
    """
    fake_mode = private_tracing.FakeTensorMode()
    with fake_mode, torch.no_grad():
        module = make_fx(graph)(*[fake_mode.from_tensor(value, static_shapes=True) for value in inputs])
    found = Piece(module, list(inputs), (), kind).try_backend(
        lookup_backend(backend).with_options(options or {}), options or {}
    )
    return str(found or "")
