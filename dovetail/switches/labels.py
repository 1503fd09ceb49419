"""Labels for torch's profiler: "step [0] forward" around each compiled graph, while a profiler is active.

The number counts the compilations of the function, as the stages in its event log do.
"""

from __future__ import annotations

import functools

from dovetail.aot.steps import BackendGraph, Lowering, before_backend
from dovetail.torch_private import dynamo as private_dynamo


@before_backend
def _label(lowering: Lowering, unit: BackendGraph) -> BackendGraph:
    log = lowering.settings.events
    label = f"{log.owner or 'a graph'} [{log.count('compile')}] {unit.kind}"
    return unit.wrapped(functools.partial(private_dynamo.labelled, label))
