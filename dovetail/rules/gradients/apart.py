"""``.grad`` of tensors that the program sees a stand-in of: parameters spread over ranks (``DTensor``), sparse tensors.

The graph knows the parts of such a tensor only. A ``backward()`` inside of the program stops at the stand-in of a wrapper; the
gradient goes into the ``.grad`` of a leaf of the same class, by the class's own operators, as eager's engine would do it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.frontend.code.frame import Break
from dovetail.frontend.effects.journal import Effect
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.values.values import StandIn
from dovetail.guards import Equals, GradSource
from dovetail.rules.gradients.marks import marked
from dovetail.rules.subclasses.wrappers import GradientForm, InnerSource, WrapperMaker, detached, parts_of
from dovetail.runtime.origins import origins_of
from dovetail.torch_private import calls as private_calls
from dovetail.torch_private import tensors as private_tensors
from dovetail.torch_private import tracing as private_tracing
from dovetail.trace import TracedInput


@dataclass(eq=False)
class Apart:
    """A tensor with a stand-in: ``leaf`` has its ``.grad`` as it is by now, ``before`` is what it was before the call."""

    known: StandIn
    leaf: Any
    before: Any


#: A leaf with a stand-in, where its gradients can be caught, and the input that is its part.
Behind = tuple[StandIn, GradientForm, TracedInput]


@dataclass
class _Holder:
    """Has the ``.grad`` of a tensor whose stand-in is no tensor."""

    grad: Any = None


class GradientsApart:
    """The ``.grad`` of the tensors of one trace that have stand-ins."""

    def __init__(self, interpreter: TracingInterpreter) -> None:
        self._values = interpreter.values
        self._native = interpreter.native
        self._found: dict[int, Apart] = {}
        interpreter.effects.defer(self._effects)

    def read(self, known: StandIn) -> Any:
        """``tensor.grad``, as it is by now."""
        return self.begin(known).leaf.grad

    def write(self, known: StandIn, value: Any) -> None:
        """``tensor.grad = value``; only a wrapper takes another value than None."""
        is_wrapper = private_tensors.is_wrapper(known.value)
        if not known.real.is_leaf or not (value is None or (is_wrapper and isinstance(value, torch.Tensor))):
            raise Break(f".grad of {known.source.name}, a {type(known.real).__name__}, is set", "set it outside")
        self.begin(known).leaf.grad = None if value is None else self._values.wrap(value)

    def begin(self, known: StandIn) -> Apart:
        """Read what ``.grad`` was before the call."""
        found = self._found.get(id(known.real))
        if found is not None:
            return found
        if self._values.in_backward:
            raise Break("a hook or the backward of a custom autograd.Function reads or sets .grad", "do so outside")
        source = GradSource(known.source)
        with private_tracing.disable_current_modes(), private_calls.no_torch_function():
            gradient = known.real.grad if known.real.is_leaf else None
        before = None
        if gradient is None:
            self._values.guard(source, Equals(None), f"{source.name} was read")
        else:
            before = self._values.read(gradient, source)
        leaf: Any = _Holder()
        if private_tensors.is_wrapper(known.value) and known.real.requires_grad:
            with torch.no_grad():
                leaf = detached(known.value).requires_grad_()
        leaf.grad = before
        found = self._found[id(known.real)] = Apart(known, leaf, before)
        return found

    def behind(self, traced: TracedInput) -> Behind | None:
        """The leaf of which an input is the only part, and where its gradients can be caught."""
        source = self._values.guards.tensor_source(traced.index)
        origins = origins_of(traced.real)
        if not isinstance(source, InnerSource) or len(origins) != 1 or not origins[0][0].is_leaf:
            return None
        known = self._values.stood_for(self._values.wrap(origins[0][0]))
        if known is None or not private_tensors.is_wrapper(known.value) or len(parts_of(known.real)[0]) != 1:
            return None
        return known, source.form, traced

    @contextlib.contextmanager
    def caught(self, leaves: Sequence[Behind]) -> Iterator[None]:
        """While the engine runs: catch the gradients of these leaves, and add them up into ``.grad`` when it has ended."""
        for _, form, _ in leaves:
            form.caught = []
        try:
            yield
            for known, form, traced in leaves:
                for gradient in form.caught or ():
                    self._add(self.begin(known).leaf, self._marked(traced, gradient))
        finally:
            for _, form, _ in leaves:
                form.caught = None

    def _marked(self, traced: TracedInput, gradient: torch.Tensor) -> torch.Tensor:
        if not self._values.trace.settings.marks_gradients:
            return gradient
        maker, parts = WrapperMaker.of(gradient), parts_of(gradient)[0]
        with torch.no_grad():
            return maker.build({name: marked(self._values.trace, traced, part) for name, part in parts.items()})

    def _add(self, leaf: torch.Tensor, gradient: torch.Tensor) -> None:
        if leaf.grad is None and type(gradient) is type(leaf) and gradient.stride() == leaf.stride():
            # The engine takes such a gradient as it is where nothing else holds it.
            leaf.grad = gradient.detach()
        else:
            self._native(torch.autograd.backward, ([leaf], [gradient]), {})

    def _effects(self) -> list[Effect]:
        """The gradients that the entry has to set."""
        changed = [item for item in self._found.values() if item.leaf.grad is not item.before]
        return [Effect(item.known.source, "attribute", {"grad": item.leaf.grad}) for item in changed]
