"""A job of the background process, on both sides: made from graphs here, compiled there."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dovetail.aot.nodes import has_symbolic_sizes
from dovetail.backends import lookup_backend
from dovetail.backends.common.sizes_elsewhere import SizesHere, SizesThere
from dovetail.cache.unportable import UnportableError
from dovetail.face.loading import load_rules
from dovetail.guards.ambient import without_autocast
from dovetail.tiers.branches import Branch, can_branch, side_by_side
from dovetail.tiers.choice import CACHES
from dovetail.tiers.flat_graph import DecodedGraph, encode
from dovetail.tiers.later import LaterGraph
from dovetail.torch_private import inductor_cache
from dovetail.torch_private import state as private_state
from dovetail.torch_private.inductor_kernels import compile_headers, trusting_compiler
from dovetail.trace.shapes import RecordingShapeEnv

_PLACE = f"{__name__}:compile_job"


def make_job(backend: str, graphs: Sequence[LaterGraph], environment: Any = None) -> dict[str, Any]:
    """The graphs, and the state of torch that decides what the backend makes of them; raises :class:`UnportableError`.

    ``environment`` has what is known of their sizes, where some are symbolic.
    """
    cache = CACHES[backend]
    is_symbolic = any(has_symbolic_sizes(item.graph.graph.nodes) for item in graphs)
    sizes = SizesHere(environment) if is_symbolic and isinstance(environment, RecordingShapeEnv) else None
    return {
        "place": _PLACE,
        "backend": backend,
        "sizes": None if sizes is None else sizes.described(),
        "graphs": [encode(item.graph, item.kind, item.options, sizes) for item in graphs],
        "cache": cache.cache_folder(),
        "settings": cache.settings_as_data(),
        "threads": torch.get_num_threads(),
        "dtype": str(torch.get_default_dtype()),
        "switches": repr(private_state.kernel_flags()),
    }


def prepare() -> None:
    """Import what the first job needs."""
    inductor_cache.load_compiler()
    load_rules()


def compile_job(job: dict[str, Any], said: Callable[[str], None]) -> None:
    """Compile every graph of a job, in the state of torch that the parent was in."""
    load_rules()
    # Not of the environment, which was the parent's when this process began: a program may change it.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = job["cache"]
    torch.set_num_threads(job["threads"])
    torch.set_default_dtype(getattr(torch, job["dtype"].removeprefix("torch.")))
    if repr(private_state.kernel_flags()) != job["switches"]:
        raise UnportableError("switches of torch are not as they are in a new process")
    with CACHES[job["backend"]].settings_from_data(job["settings"]), without_autocast():
        if can_branch():
            _compile_in_branches(job, said)
        else:
            _compile_graphs(job, said)


def _compile_graphs(job: dict[str, Any], said: Callable[[str], None]) -> None:
    backend = lookup_backend(job["backend"])
    sizes = None if job["sizes"] is None else SizesThere(job["sizes"])
    for number, data in enumerate(job["graphs"]):
        said(f"graph {number + 1} of {len(job['graphs'])}")
        decoded = DecodedGraph(data, sizes)
        backend.compile(decoded.graph, decoded.examples, kind=decoded.kind, options=decoded.options)


def _compile_in_branches(job: dict[str, Any], said: Callable[[str], None]) -> None:
    """Compile the graphs at the same time, on what is most likely of the compiler; where that fails, look at the compiler first."""
    # Facts found out about symbolic sizes in one graph hold for the next one.
    parts = [job] if job["sizes"] is not None else [{**job, "graphs": [data]} for data in job["graphs"]]
    compile_parts = [functools.partial(_compile_graphs, part, _silent) for part in parts]
    _compile_headers_beside()
    with trusting_compiler():
        errors = side_by_side(compile_parts, lambda count: said(f"{count} of {len(parts)} compiled"))
    for compile_part, error in zip(compile_parts, errors, strict=True):
        if isinstance(error, UnportableError):
            raise error
        if error is not None:
            Branch(functools.partial(_trusting_nobody, compile_part)).wait()


def _trusting_nobody(compile_part: Callable[[], None]) -> None:
    with trusting_compiler("nobody"):
        compile_part()


@functools.cache
def _compile_headers_beside() -> None:
    """Once in the life of this process, and without waiting: on a core that would be idle (Inductor's Python is on one for each
    graph) they are there before the kernels of the first graph, each file of which takes half as long with them.
    """
    Branch(compile_headers, niceness=19).leave()


def _silent(text: str) -> None:
    """Ignore the answer of a branch, which has one graph."""
