"""A graph that is expected to run once is not worth kernels of its own: its first run is by eager's operators as they are.

The first training step creates the optimizer's state, and what it assumed (that there is none) never holds again. Compiling
its kernels took 27 of the 68 seconds that a whole step of an MLP with 82 parameters needed for its first steps under Inductor.
Where the graph is run once more after all, the backend compiles it then.
"""

from __future__ import annotations

import dataclasses
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch

from dovetail.aot.compile_joint import CompiledGraph, compile_joint
from dovetail.aot.joint_graph import JointGraph
from dovetail.backends import ATEN, Backend
from dovetail.errors import EagerFallbackWarning
from dovetail.torch_private import sizes as private_sizes
from dovetail.torch_private import state as private_state

Runner = Callable[[list[torch.Tensor]], list[torch.Tensor]]
#: Its numbers are eager's, but nobody has promised them: the backend that was asked for may compute gradients otherwise.
_AS_IT_IS = dataclasses.replace(ATEN, numerics="tolerance")


def can_put_off(joint: JointGraph, backend: Backend) -> bool:
    """Whether kernels can wait until a graph is run again.

    Not with symbolic sizes: the backend may assume more about these, and that must be known before the guards are installed.
    """
    values = (node.meta.get("val") for node in joint.graph_module.graph.nodes)
    return backend.slow_to_compile and not any(map(private_sizes.has_symbols, values))


def compile_put_off(joint: JointGraph, backend: Backend, **settings: Any) -> CompiledGraph:
    """As :func:`dovetail.aot.compile_joint`, with kernels from the second run on; ``settings`` are its options."""
    options = settings.pop("options", None)
    first = compile_joint(None, joint, _AS_IT_IS, **settings)
    lock = threading.Lock()
    runs = 0
    chosen = first.run

    def second() -> Runner:
        """Kernels. The call has begun, and eager cannot take it over: where there are none, it goes on as the first one did."""
        try:
            with private_state.preserved_rng_state():
                compiled = compile_joint(None, joint, backend, options=options, **settings)
        except Exception as error:  # noqa: BLE001  (whatever a compiler may raise)
            warnings.warn(
                f"backend {backend.name} compiled no kernels for a graph that is run once more, which goes on by ATen operators: "
                f"{error}",
                EagerFallbackWarning,
                stacklevel=2,
            )
            return first.run
        # The entry has dropped these gradients by now; a graph that needs another set of them cannot take over.
        return compiled.run if compiled.dropped == first.dropped else first.run

    def run(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        nonlocal runs, chosen
        if runs < 2:
            with lock:
                runs += 1
                if runs == 2:
                    chosen = second()
        return chosen(inputs)

    return dataclasses.replace(first, run=run, backend=backend)
