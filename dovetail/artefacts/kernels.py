"""Kernels that an artefact carries: the entries of the cache from which the graph is compiled without a compiler.

They are found under the keys of the cache (:mod:`dovetail.backends.inductor.kept_code`), so that those of another graph, CPU,
version or setting are never taken. They are code: :func:`with_kernels` is called only where the user has asked for it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from dovetail import cache
from dovetail.artefacts.build import build
from dovetail.artefacts.files import open_kernels
from dovetail.artefacts.loaded_graph import LoadedGraph
from dovetail.errors import ArtefactError, EagerFallbackWarning
from dovetail.torch_private import inductor_cache as private_cache
from dovetail.torch_private import state as private_state

_BACKEND = "inductor"
#: Of the cache: what a process reads that compiles a graph again.
_KINDS = ("code", "graphs", "kernels", "steps")


def kernels_of(payload: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Iterable[bytes]:
    """The kernels of a graph as the parts of a file; raises :class:`ArtefactError` where they are not kept on disk.

    The graph is compiled as its readers will see it, then once more as they will compile it.
    """
    entries: cache.Held = {}
    document = json.loads(json.dumps(payload))
    with cache.holding(entries):
        _compiled(build(document, tensors))
        try:
            # A compilation leaves marks on the graph that it is given.
            _taken(build(document, tensors), entries)
        except private_cache.NotCachedError as error:
            raise ArtefactError(
                f"its kernels cannot be exported: {error}", advice="fix its sizes, or export it without kernels"
            ) from error
    return cache.packed((kind, key, content) for (kind, key), content in sorted(entries.items()) if kind in _KINDS)


def with_kernels(graph: LoadedGraph, path: str | os.PathLike[str]) -> LoadedGraph:
    """The graph on the kernels that lie beside it; compiled here where they do not fit, with a warning where that fails too."""
    entries: cache.Held = {}
    try:
        with open_kernels(path) as file:
            found = cache.unpacked(file, str(path))
            entries.update({(kind, key): content for kind, key, content in found if kind in _KINDS})
        return dataclasses.replace(_taken(graph, entries), kernels="from the file")
    except Exception as error:  # noqa: BLE001  (whatever lies there: the graph runs as without it)
        reason = error.what if isinstance(error, ArtefactError) else str(error) or type(error).__name__
    try:
        return dataclasses.replace(_compiled(graph), kernels=f"compiled here: {reason}")
    except Exception as error:  # noqa: BLE001  (whatever a backend may raise)
        warnings.warn(
            f"a loaded graph runs by ATen operators: its kernels cannot be used ({reason}), and {_BACKEND} compiles none "
            f"({type(error).__name__}: {str(error).strip().splitlines()[0]})\n  what to do: export it with kernels=True on such a "
            "machine, with this version of torch and this number of threads",
            EagerFallbackWarning,
            stacklevel=3,
        )
    return dataclasses.replace(graph, kernels=f"none: {reason}")


def _taken(graph: LoadedGraph, entries: cache.Held) -> LoadedGraph:
    """The graph compiled from entries; raises ``NotCachedError`` where that is not all of it."""
    with cache.holding(entries), private_cache.only_from_cache(ours=True):
        return _compiled(graph)


def _compiled(graph: LoadedGraph) -> LoadedGraph:
    with private_state.preserved_rng_state():
        return graph.compile(_BACKEND)
