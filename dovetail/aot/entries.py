"""A compiled graph as an entry of a compiled function: guards, runtime function, effects and the recipe of the result."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.aot import steps
from dovetail.aot.nodes import checks_assumption, tensor_of, writes_in_place
from dovetail.guards import compile_checker
from dovetail.runtime.backward_reads import BackwardReads
from dovetail.runtime.entry import Entry
from dovetail.trace import shape_guards
from dovetail.trace.repeats import draws_random_numbers

if TYPE_CHECKING:
    from dovetail.aot.compiled_graph import CompiledGraph


def make_entry(compiled: CompiledGraph) -> Entry:
    """An entry for a compiled graph; the frontend's result says what else belongs to it."""
    joint = compiled.lowering.joint
    capture = joint.capture
    if not capture.guards.is_frozen:
        # The last backend has run: nothing can assume more about sizes.
        capture.guards.set_shapes(shape_guards(joint.fake_mode.shape_env, capture.bindings))
    guards = capture.guards.freeze()
    checks = any(map(checks_assumption, joint.graph.nodes))
    dropped = compiled.lowering.gradients_dropped_first
    draws = checks or any(draws_random_numbers(node.target) for node in joint.graph.nodes)
    devices = sorted({item.device.index for item in map(tensor_of, joint.primals) if item is not None and item.is_cuda})
    return Entry(
        compile_checker(guards, ambient=capture.ambient),
        compiled.run,
        capture.recipe,
        capture.effects,
        compiled=compiled,
        ambient_change=capture.ambient_change,
        resume_point=capture.resume_point,
        backward_reads=BackwardReads(guards.backward) if guards.backward else None,
        is_edited=bool(joint.provenance),
        can_rerun_eagerly=checks or not (dropped or _writes_first(compiled)),
        random_devices=tuple(devices) if draws else None,
        fits=next(filter(None, (hook(compiled.lowering) for hook in steps.asks_data)), None),
        # A call that is done again by eager drops them itself; a later backward may read them.
        gradients_dropped_first=() if checks or guards.backward else dropped,
        numbers=capture.bindings.function(capture.numbers) if capture.numbers else None,
        inputs_made_differentiable=capture.inputs_made_differentiable,
    )


def _writes_first(compiled: CompiledGraph) -> bool:
    """Whether a graph that fails half-way may have changed something that the call made again would see."""
    lowering, spec = compiled.lowering, compiled.lowering.joint.spec
    changed = lowering.write_backs or spec.metadata_changes or (lowering.backend.takes_program and spec.mutations)
    return bool(changed) or any(map(writes_in_place, lowering.joint.graph.nodes))
