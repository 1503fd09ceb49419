"""Kernels that are compiled when a graph runs for the second time; the first run is by eager's operators as they are.

A graph that is expected to run once is not worth kernels of its own: a call's own effects invalidate its guards. The first training
step finds no state of the optimizer and creates it; a counter that was 0 becomes 1. Compiling its kernels took 27 of the 68 seconds
that a whole step of an MLP with 82 parameters needed for its first steps under Inductor. Where the graph is run once more, the
backend compiles it then.
"""

from __future__ import annotations

import dataclasses
import threading
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from dovetail.aot.compile_joint import run_steps
from dovetail.aot.compiled_graph import CompiledGraph
from dovetail.aot.nodes import has_symbolic_sizes
from dovetail.aot.steps import Lowering, instead_of_steps
from dovetail.backends import ATEN
from dovetail.errors import EagerFallbackWarning
from dovetail.guards import Equals, GradSource, Guard, HasNoKey, InstanceDictSource, ItemSource, Source
from dovetail.guards.reading import item_key
from dovetail.runtime.effects import EffectRecipe
from dovetail.runtime.function import RuntimeFunction
from dovetail.runtime.recipe import ConstantItem, ObjectItem, Recipe, TensorItem
from dovetail.torch_private import state as private_state

_DICTIONARIES = ("dict", "ordered dict")


def ended_assumption(guards: Sequence[Guard], effects: Sequence[EffectRecipe]) -> Guard | None:
    """The first guard that no longer holds once the effects have been made; None where none is found.

    It looks at items of dictionaries, attributes and gradients. This is no proof: whoever asks must be right either way.
    """
    added: dict[Source, list[Recipe]] = {}
    constants: dict[Source, Any] = {}
    gradients = set()
    for effect in effects:
        if not isinstance(effect.values, ObjectItem):
            continue
        for key, value in effect.values.pairs:
            if effect.kind in _DICTIONARIES:
                added.setdefault(effect.source, []).append(key)
            if not isinstance(key, ConstantItem):
                continue
            holder = effect.source if effect.kind in _DICTIONARIES else InstanceDictSource(effect.source)
            if isinstance(value, ConstantItem):
                constants[ItemSource(holder, key.value)] = value.value
            elif key.value == "grad" and isinstance(value, TensorItem):
                gradients.add(effect.source)
    for guard in guards:
        source, predicate = guard.source, guard.predicate
        if isinstance(predicate, HasNoKey):
            if any(_may_be(key, predicate.key) for key in added.get(source, ())):
                return guard
        elif isinstance(predicate, Equals):
            if source in constants and not predicate.holds(constants[source]):
                return guard
            if isinstance(source, GradSource) and predicate.value is None and source.base in gradients:
                return guard
    return None


def _may_be(recipe: Recipe, key: Any) -> bool:
    """Whether a key that is built by this recipe may be this one; which tensor a recipe gives is not asked."""
    if isinstance(recipe, ConstantItem):
        return bool(item_key(recipe.value) == item_key(key))
    return isinstance(recipe, TensorItem) and isinstance(key, torch.Tensor)


#: Its numbers are eager's, but nobody has promised them: the backend that was asked for may compute gradients otherwise.
_AS_IT_IS = dataclasses.replace(ATEN, numerics="tolerance")


@instead_of_steps
def put_off_kernels(lowering: Lowering) -> CompiledGraph | None:
    """Run the operators as they are first, where the call itself ends an assumption.

    Not with symbolic sizes: the backend may assume more about these, and that must be known before the guards are installed.
    """
    joint, settings = lowering.joint, lowering.settings
    if not settings.may_run_once or not lowering.backend.slow_to_compile or has_symbolic_sizes(joint.graph.nodes):
        return None
    ended = ended_assumption(joint.capture.guards.so_far(), joint.capture.effects)
    if ended is None:
        return None
    settings.events.note("kernels put off", reason=f"the call itself ends what was assumed: {ended}")
    lowering = lowering.with_(settings=dataclasses.replace(settings, may_run_once=False))
    first = run_steps(lowering.with_(backend=_AS_IT_IS, settings=dataclasses.replace(lowering.settings, options={})))
    return dataclasses.replace(first, run=_PutOff(first, lowering), backend=lowering.backend)


class _PutOff:
    """The runtime function of a graph whose kernels are compiled when it is called for the second time."""

    def __init__(self, first: CompiledGraph, lowering: Lowering) -> None:
        self._first = first
        self._lowering: Lowering | None = lowering
        self._chosen: RuntimeFunction = first.run
        self._runs = 0
        self._lock = threading.Lock()

    def __call__(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        if self._runs < 2:
            with self._lock:
                self._runs += 1
                if self._runs == 2:
                    self._chosen = self._compile()
        return self._chosen(inputs)

    def _compile(self) -> RuntimeFunction:
        """Kernels. The call has begun, and eager cannot take it over: where there are none, it goes on as the first one did."""
        lowering, self._lowering = self._lowering, None
        assert lowering is not None
        try:
            with private_state.preserved_rng_state():
                compiled = run_steps(lowering)
        except Exception as error:  # noqa: BLE001  (whatever a compiler may raise)
            warnings.warn(
                f"backend {lowering.backend.name} compiled no kernels for a graph that is run once more, which goes on by ATen "
                f"operators: {error}",
                EagerFallbackWarning,
                stacklevel=3,
            )
            return self._first.run
        # The entry has dropped these gradients by now; a graph that needs another set of them cannot take over.
        is_alike = compiled.lowering.gradients_dropped_first == self._first.lowering.gradients_dropped_first
        return compiled.run if is_alike else self._first.run
