"""Inputs of a trace that are like earlier ones, such as the parameters of the next block, are made without torch's converter.

What torch makes of a tensor of known shape follows from its type, sizes, strides, place in its memory and device; and from whether
another input shares the memory. The first time is torch's, and teaches what comes out of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dovetail.fast_capture.memory import Output
from dovetail.torch_private import fast_capture as private
from dovetail.trace.modes import FakeMode
from dovetail.trace.overrides import INPUTS
from dovetail.trace.trace import Trace

_MOST = 2_000
#: By the facts of the real tensor; None: torch's way every time.
_KNOWN: dict[Any, Output | None] = {}


def known_input(record: Callable[..., Any], trace: Trace, real: torch.Tensor, name: str) -> Any:
    """Make an input as the last time; where it is met for the first time, learn from torch."""
    mode = trace.fake_mode
    if type(mode) is not FakeMode or trace.settings.shapes.has_symbols or not private.is_ordinary(real, mode):
        return None
    facts = private.facts_of_real(real)
    output = _KNOWN.get(facts, NotImplemented)
    if output is NotImplemented:
        if len(_KNOWN) >= _MOST:
            _KNOWN.clear()
        made = record(real, name)
        _KNOWN[facts] = _learn(trace, *made)
        return made
    if output is None:
        return None
    fake, shown = output.pattern.make(mode, (), 2)
    private.note_memory(mode, real, fake)
    place = f"primals_{len(trace.inputs) + 1}"
    node = private.add_node(trace.graph, place, (), {}, place, "placeholder")
    trace.tracer.note(node)
    private.track(trace.tracer, fake, node)
    node.meta["val"] = shown
    node.meta["tensor_meta"] = output.tensor_meta
    return fake, node, private.functional(trace.functional_mode, fake)


def _learn(trace: Trace, fake: Any, node: torch.fx.Node, traced: Any) -> Output | None:
    if not private.is_plain(fake, trace.fake_mode) or private.node_of_fake(trace.tracer, fake) is not node:
        return None
    pattern = private.pattern_of(fake, ())
    known = {"val", "tensor_meta", "phase", "user_line", "without_gradients"}
    is_alike = pattern is not None and node.meta.keys() <= known and type(traced) is private.FunctionalTensor
    return Output(pattern, node.meta["tensor_meta"]) if pattern is not None and is_alike else None


if private.IS_KNOWN:
    INPUTS.append(known_input)
