"""The frontend's result for stage 1: one frozen class for interpreted calls, graphs of other compilers, and replays."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.aot.descriptors import Descriptor
from dovetail.guards import AmbientChange, AmbientState, GuardSet
from dovetail.runtime.effects import EffectRecipe
from dovetail.runtime.recipe import Recipe
from dovetail.trace import Bindings, Program


@dataclass(frozen=True, eq=False)
class CaptureResult:
    """One captured call.

    ``outputs`` are the traced tensors that leave it, ``input_descriptors`` says where each traced input was read, ``program``
    computes the outputs by the torch calls of the function, ``bindings`` says where symbols are read at a later call. ``order`` is
    that of the derivative which the backward of the graph computes.

    The rest is what an entry does around the graph at every call. ``recipe`` builds the result; its symbolic numbers are
    ``numbers``, as expressions over ``bindings``. ``effects`` are the writes to Python objects. ``ambient`` is the state of torch
    in which the call began, ``ambient_change`` what the call changes in it. ``gradients_dropped_first`` are inputs whose ``.grad``
    is dropped before the graph runs, each with the input that the gradient is; ``inputs_made_differentiable`` require a gradient
    from then on.

    At a graph break, ``resume_point`` says where the function goes on (:mod:`dovetail.frontend.code.points`), and ``recipe`` builds
    the live values there.
    """

    function: Any
    outputs: tuple[torch.Tensor, ...]
    input_descriptors: tuple[Descriptor, ...]
    guards: GuardSet
    program: Program
    bindings: Bindings
    order: int = 1
    recipe: Recipe | None = None
    numbers: tuple[Any, ...] = ()
    effects: tuple[EffectRecipe, ...] = ()
    ambient: AmbientState | None = None
    ambient_change: AmbientChange | None = None
    gradients_dropped_first: tuple[tuple[int, int], ...] = ()
    inputs_made_differentiable: tuple[int, ...] = ()
    resume_point: Hashable | None = None
