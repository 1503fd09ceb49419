"""Graphs that an earlier process has compiled: what it has kept is taken, also by those that wait for their kernels; what these
compile is kept.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time

from dovetail import cache
from dovetail.aot.compile_joint import run_steps
from dovetail.aot.compiled_graph import CompiledGraph
from dovetail.aot.joint_graph import JointGraph
from dovetail.aot.steps import Lowering, instead_of_steps
from dovetail.face.attempts import collection_paused
from dovetail.guards import GuardSet
from dovetail.tiers import kept_steps
from dovetail.tiers.choice import CACHES, Tiers, is_kept_on_disk
from dovetail.tiers.kept_graphs import has_sizes
from dovetail.torch_private import assumptions as private_assumptions
from dovetail.torch_private import state as private_state
from dovetail.torch_private.assumptions import Aside
from dovetail.torch_private.inductor_cache import NotCachedError


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


def from_cache(lowering: Lowering, tiers: Tiers) -> CompiledGraph | None:
    """The graph with its kernels, where an earlier process has left all of it in Dovetail's cache: tier 0 is not needed."""
    if tiers.check_swap or tiers.tune or not cache.is_on():
        return None
    start, events = time.monotonic(), lowering.settings.events
    joint, direct = lowering.joint, lowering.with_(backend=dataclasses.replace(tiers.backend, compile=tiers.__call__))
    environment = joint.fake_mode.shape_env
    sizes = Aside(environment) if has_sizes(joint) else contextlib.nullcontext()
    before = private_assumptions.count_of_assumptions(environment)
    try:
        # No kernel is compiled, and all that is made lives on: to look for garbage once took as long as all the rest.
        where = CACHES[tiers.backend.name].only_from_cache(ours=True)
        with private_state.preserved_rng_state(), collection_paused(), where, sizes:
            compiled = kept_steps.run_once(direct)
            _check_guards(joint, before)
    except Exception as error:  # noqa: BLE001  (what is missing, or cannot be used, is made as without a cache)
        kind = "" if isinstance(error, NotCachedError) else f"{type(error).__name__}: "
        events.note("cache miss", reason=f"{kind}{error}")
        return None
    if isinstance(sizes, Aside):
        sizes.keep()
    loaded = time.monotonic() - start
    events.note("tier 1", backend=tiers.backend.name, cache="hit", after=0.0, compiled=0.0, loaded=loaded)
    return dataclasses.replace(compiled, backend=lowering.backend)


def _check_guards(joint: JointGraph, before: object) -> None:
    """Raise where the kernels assume more of the sizes than was assumed ``before``, and the guards of the entry are made already.

    Tier 0 runs then, and what takes over from it looks at the sizes by itself.
    """
    guards = joint.capture.guards
    if private_assumptions.count_of_assumptions(joint.fake_mode.shape_env) == before:
        return
    if not isinstance(guards, GuardSet) or guards.is_frozen:
        raise NotCachedError("the kernels assume something of sizes, and the guards are made")
