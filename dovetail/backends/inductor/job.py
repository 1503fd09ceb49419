"""The compilation of one graph with Inductor, as transformations of the graph see it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dovetail.backends.protocol import CompiledCallable


@dataclass
class Job:
    """One graph on its way to Inductor; every field may be changed in place.

    ``graph``: a copy of the graph that the backend was given, which is never run; ``examples``: the values of its placeholders.
    ``settings``: Inductor's own settings by name. ``write_backs``: outputs that are new values of inputs (output -> input).
    ``is_guarded``: the sizes and strides of all inputs are looked at before each run.
    ``during``: makers of context managers that are open while Inductor compiles; ``before`` is called first. Neither is called
    where the code comes from the cache: to look at Inductor loads it, which takes longer than all else there.
    ``not_kept``: why the code cannot be kept on disk; empty where it can.
    ``wrappers``: functions that wrap the compiled callable, the first one innermost. ``resolved``: inputs that are conjugated or
    negated before that, where they are marked as such.
    """

    graph: torch.fx.GraphModule
    examples: list[Any]
    settings: dict[str, Any]
    write_backs: Mapping[int, int] = field(default_factory=dict)
    during: list[Callable[[], contextlib.AbstractContextManager[None]]] = field(default_factory=list)
    before: list[Callable[[], None]] = field(default_factory=list)
    wrappers: list[Callable[[CompiledCallable], CompiledCallable]] = field(default_factory=list)
    resolved: list[int] = field(default_factory=list)
    is_guarded: bool = False
    not_kept: str = ""


#: Functions that make Inductor right where it is wrong (:mod:`.workarounds`), in the order in which they run.
WORKAROUNDS: list[Callable[[Job], None]] = []


def resolved(value: torch.Tensor) -> torch.Tensor:
    """The same values at the same strides, without a mark."""
    if not value.is_conj() and not value.is_neg():
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).copy_(value)


def resolving(call: CompiledCallable, marked: Sequence[int]) -> CompiledCallable:
    """``call``, with the marks of the inputs at the places ``marked`` resolved before."""

    def run(inputs: list[Any]) -> list[Any]:
        for index in marked:
            if isinstance(inputs[index], torch.Tensor):
                inputs[index] = resolved(inputs[index])
        return call(inputs)

    return run if marked else call
