"""Which graphs run in tiers, and the marks by which a compiled function asks for them.

A backend that is slow to compile goes through the pipeline as :func:`in_tiers` returns it: the same facts, and a compile function
that carries the option. So every graph of the function sees it: the code after a graph break, and each next order.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.aot.joint_graph import JointGraph
from dovetail.aot.steps import Lowering
from dovetail.backends import ATEN, Backend, lookup_backend
from dovetail.backends.common.size_expressions import depends_on_data
from dovetail.backends.protocol import CompiledCallable, Kind
from dovetail.errors import OptionError, UnknownBackendError
from dovetail.options import Options, check_choice
from dovetail.tiers.kept_graphs import has_sizes, is_unread
from dovetail.tiers.later import Collector, compile_now
from dovetail.tiers.progress import stage
from dovetail.torch_private import inductor_cache
from dovetail.torch_private import operators as private_operators
from dovetail.trace.shapes import RecordingShapeEnv

#: In the environment, over the option: a run that must give the same bits as another one waits, say.
SWITCH = "DOVETAIL_TIERS"
#: Tier 0. Its numbers are eager's, but nobody has promised them: the backend that was asked for may compute gradients otherwise.
OPERATORS = dataclasses.replace(ATEN, numerics="tolerance", has_options=True)
#: The module that reads a backend's cache on disk, from which one process takes the graphs that another one has compiled.
CACHES: dict[str, Any] = {"inductor": inductor_cache}


@dataclass(frozen=True)
class Tiers:
    """The option, in the place of the compile function of ``backend``; called, it compiles at once."""

    backend: Backend
    mode: str
    check_swap: bool = False
    tune: bool = False

    def __call__(
        self, graph: torch.fx.GraphModule, example_inputs: Sequence[Any], *, kind: Kind, options: Mapping[str, Any]
    ) -> CompiledCallable:
        """See :class:`dovetail.backends.protocol.CompileFunction`."""
        with stage(f"{self.backend.name} compiles the {kind} graph of {len(graph.graph.nodes)} nodes"):
            return compile_now(self.backend, graph, example_inputs, kind, options)


def in_tiers(backend: Backend, options: Options) -> Backend:
    """The backend with the option; tier 0 itself where nothing is ever to be swapped."""
    mode = os.environ.get(SWITCH) or options.tiers
    check_choice("tiers", mode)
    if options.tune and options.tiers != "auto":
        raise OptionError(
            f"tune=True has kernels change hands during training, and tiers={options.tiers!r} forbids that",
            advice='leave tiers="auto", or leave tune out',
        )
    if mode == "never":
        return OPERATORS
    # The options have been looked at: the backend itself would come without the tiers.
    return dataclasses.replace(
        backend, compile=Tiers(backend, mode, options.check_swap, options.tune), for_options=None
    )


def tiers_of(lowering: Lowering) -> Tiers | None:
    """The option that a graph is to be compiled with; None where it does not ask for tiers."""
    compile: Any = lowering.backend.compile
    if isinstance(compile, Collector) and compile.is_done:
        # The next order of a graph that has been swapped.
        compile = compile.asked
    return compile if isinstance(compile, Tiers) else None


def why_not(lowering: Lowering, tiers: Tiers) -> str | None:
    """Why a graph waits for its kernels, in words; None where it can run in tiers."""
    joint = lowering.joint
    if tiers.mode == "wait":
        return 'tiers="wait"'
    if torch.are_deterministic_algorithms_enabled():
        return "torch.use_deterministic_algorithms is on, and a swap changes the rounding"
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return "several processes train together, and would not swap at the same step"
    if lowering.settings.memory_budget is not None:
        return "a memory budget is given, which is kept from the first step on"
    if not any(node.op == "call_function" for node in joint.graph.nodes):
        return "nothing is computed"
    if has_sizes(joint):
        if not isinstance(joint.fake_mode.shape_env, RecordingShapeEnv):
            return "sizes are symbolic, and torch.compile must know at once what the kernels assume of them"
        if any(map(depends_on_data, _values(joint))):
            return "sizes depend on data"
    return _why_not_elsewhere(joint, tiers.backend)


def has_changing_numbers(joint: JointGraph) -> bool:
    """Whether a graph computes with floats that change from call to call: a learning rate, an optimizer's count of steps."""
    return any(isinstance(value, torch.SymFloat) for value in _values(joint))


def _values(joint: JointGraph) -> Iterable[Any]:
    return (node.meta.get("val") for node in joint.graph.nodes if not is_unread(node))


def is_kept_on_disk(backend: Backend) -> bool:
    """Whether another process has the same backend under this name, with a cache on disk."""
    try:
        return backend.name in CACHES and lookup_backend(backend.name) == backend
    except UnknownBackendError:
        return False


def _why_not_elsewhere(joint: JointGraph, backend: Backend) -> str | None:
    """Why another process cannot compile a graph."""
    if not is_kept_on_disk(backend):
        return f"another process cannot compile for the backend {backend.name}"
    for node in joint.graph.nodes:
        is_operator = node.op == "call_function" and isinstance(node.target, private_operators.OpOverload)
        if is_operator and node.target.namespace not in ("aten", "prims"):  # type: ignore[union-attr]
            return f"another process does not know the operator {node.target}"
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.device.type != "cpu":
            return f"a value is on {value.device.type}"
    return None
