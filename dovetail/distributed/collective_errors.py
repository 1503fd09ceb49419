"""Says in words that an exchange with other ranks has failed, where a graph has exchanges in it."""

from __future__ import annotations

import re
from typing import Any

from dovetail.aot.backward_graphs import FlatCallable
from dovetail.aot.steps import BackendGraph, Lowering, before_backend
from dovetail.errors import CollectiveError, DovetailError
from dovetail.passes.recompute import exchanges_with_ranks

# Words of gloo, NCCL and the store about a process that is gone or too late.
_SIGNS = re.compile(
    r"gloo|nccl|connection|timed? ?out|broken pipe|socket|peer|process group|no longer alive", re.IGNORECASE
)


@before_backend
def explain_failed_exchanges(lowering: Lowering, unit: BackendGraph) -> BackendGraph:
    """Have a graph with exchanges in it raise :class:`CollectiveError` where one fails."""
    exchanges = any(map(exchanges_with_ranks, unit.whole.graph.nodes))
    return unit.wrapped(with_collective_errors) if exchanges else unit


def with_collective_errors(run: FlatCallable) -> FlatCallable:
    """``run``, which raises :class:`CollectiveError` where an exchange fails."""

    def explained(values: list[Any]) -> list[Any]:
        try:
            return run(values)
        except DovetailError:
            raise
        except RuntimeError as error:
            text = str(error)
            if not _SIGNS.search(text):
                raise
            raise CollectiveError(
                f"an exchange with the other ranks has failed, so this call has changed nothing: {text.splitlines()[0]}",
                advice="see what the other ranks say; to go on without them, call torch.distributed.destroy_process_group() "
                "and init_process_group() again: the next call compiles for the new group",
            ) from error

    return explained
