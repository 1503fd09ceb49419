"""The runtime's description of a compiled graph's inputs and outputs, as plain data.

The graph is a pure function: primals in, forward outputs out. Everything that eager does beyond that (a returned input, a
returned view, an input written to) is described here and done by :mod:`dovetail.runtime.function` around the graph.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from dovetail.trace.trace import MetadataChange


@dataclass(frozen=True)
class FreshOutput:
    """The returned tensor is the graph's forward output ``index``; ``is_leaf``: it requires a gradient of its own.

    ``is_freed``: it requires a gradient, and a backward inside has freed the graph that the gradient would be computed in.
    """

    index: int
    is_leaf: bool = False
    is_freed: bool = False


@dataclass(frozen=True)
class InputOutput:
    """The returned tensor is the input ``index`` itself, the same object."""

    index: int


@dataclass(frozen=True)
class ViewOutput:
    """The returned tensor is a view, made anew by ``replay(base, inputs)`` from an input or from a forward output.

    ``differentiable`` is False where eager's view was made without recording gradients; the replay then runs under ``no_grad``.
    Such a view may say that it requires a gradient though none will flow (``requires_grad``; None: as autograd says of it, by the
    base of its base); other such views are detached.
    """

    base: InputOutput | FreshOutput
    replay: Any
    differentiable: bool
    requires_grad: bool | None = False


OutputTensor = FreshOutput | InputOutput | ViewOutput


@dataclass(frozen=True)
class Mutation:
    """Input ``input_index`` was written to; its new value is the graph's forward output ``output_index``.

    ``differentiable``: eager's write was recorded by autograd, so the write-back is too. ``counted`` is the number of writes
    that the tensor's version counter has seen; it sees none that went through ``.data``. ``is_freed``: see :class:`FreshOutput`.
    """

    input_index: int
    output_index: int
    differentiable: bool
    counted: int = 1
    is_freed: bool = False


@dataclass(frozen=True)
class OutputDependency:
    """Forward output ``output`` of the graph was computed from what the function hands out otherwise too: from the results
    ``results`` and from the new values of the inputs ``inputs``.
    """

    output: int
    results: tuple[int, ...]
    inputs: tuple[int, ...] = ()


@dataclass(frozen=True)
class RuntimeSpec:
    """The whole description of one graph.

    ``input_requires_grad`` has one entry per primal, ``output_differentiable`` one per forward output of the graph.
    ``dependencies`` name the results that forward outputs were computed from, in an order in which they can be made: autograd
    outside of the graph does not see that, so that gradients of these results outside are only parts. ``metadata_changes`` are
    made again, in their order, before the graph runs. ``freed_by_backward`` has for each differentiable output the outputs that
    cannot be differentiated any more after a backward from it; None: all. ``leaf_order`` is the order of the primals in which the
    leaves among them get their gradients as in eager; (): any. ``kept_alive`` are objects that operators of the graph name by
    number.
    """

    input_requires_grad: tuple[bool, ...]
    output_differentiable: tuple[bool, ...]
    outputs: tuple[OutputTensor, ...]
    mutations: tuple[Mutation, ...] = ()
    dependencies: tuple[OutputDependency, ...] = ()
    metadata_changes: tuple[MetadataChange, ...] = ()
    freed_by_backward: tuple[frozenset[int], ...] | None = None
    leaf_order: tuple[int, ...] = ()
    kept_alive: tuple[Any, ...] = ()

    def with_further_inputs(self, count: int) -> RuntimeSpec:
        """This description with further inputs behind the others, which get no gradient."""
        before = len(self.input_requires_grad)
        order = (*self.leaf_order, *range(before, before + count)) if self.leaf_order else ()
        return replace(self, input_requires_grad=(*self.input_requires_grad, *[False] * count), leaf_order=order)
