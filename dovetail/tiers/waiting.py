"""Graphs that wait for their kernels: what an earlier process has kept of them is taken; what this one compiles is kept."""

from __future__ import annotations

import dataclasses
import time

from dovetail import cache
from dovetail.aot.compile_joint import run_steps
from dovetail.aot.compiled_graph import CompiledGraph
from dovetail.aot.steps import Lowering, instead_of_steps
from dovetail.face.attempts import collection_paused
from dovetail.tiers import kept_steps
from dovetail.tiers.choice import Tiers, is_kept_on_disk
from dovetail.torch_private import state as private_state


@instead_of_steps
def take_what_is_held(lowering: Lowering) -> CompiledGraph | None:
    """A graph whose kernels come with it, or are to go with it."""
    is_asked = cache.held() is not None and is_kept_on_disk(lowering.backend)
    return compile_or_take(lowering, Tiers(lowering.backend, "wait")) if is_asked else None


def compile_or_take(lowering: Lowering, tiers: Tiers) -> CompiledGraph | None:
    """The graph with its kernels, under the keys and after the checks of :mod:`.kept_steps`; None where it is not kept.

    Errors of the steps are raised here, as where nothing is kept.
    """
    if tiers.check_swap or not cache.is_on() or not is_kept_on_disk(tiers.backend):
        return None
    start, events = time.monotonic(), lowering.settings.events
    # The steps that make a graph for this backend must not come here again.
    direct = lowering.with_(backend=dataclasses.replace(lowering.backend, compile=tiers.__call__))
    found, key = None, None
    try:
        with private_state.preserved_rng_state(), collection_paused():
            key = kept_steps.key_of_steps(direct)
            if key is None:
                return None
            found = kept_steps.take(key, direct)
    except Exception as error:  # noqa: BLE001  (what cannot be keyed or taken is compiled as without a cache)
        events.note("cache miss", reason=f"{type(error).__name__}: {error}")
    if found is not None:
        loaded = time.monotonic() - start
        events.note("tier 1", backend=tiers.backend.name, cache="hit", after=0.0, compiled=0.0, loaded=loaded)
    else:
        found = run_steps(direct)
        kept_steps.keep(key, found.lowering)
    return dataclasses.replace(found, backend=lowering.backend)
