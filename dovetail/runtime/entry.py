"""What one compiled entry does at a call: run the graph, replay the effects, build the result."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.errors import DovetailError, OutgrownError
from dovetail.guards import AmbientChange, Checker
from dovetail.runtime.backward_reads import BackwardReads, reads_of
from dovetail.runtime.effects import EffectRecipe, Effects
from dovetail.runtime.recipe import Recipe, rebuild
from dovetail.runtime.recipe_code import Build, generate
from dovetail.torch_private import state as private_state
from dovetail.trace import ASSUMPTION

OPERATOR_ERRORS = (RuntimeError, IndexError, TypeError, ValueError)


@dataclass(frozen=True)
class Completed:
    """The result of a whole call, from an entry that ordinarily goes up to a graph break only."""

    result: Any


@dataclass(frozen=True)
class Entry:
    """Guards, the compiled function, the recipe for the result and the effects to apply.

    ``run`` is None for an entry that runs the user's function eagerly; ``reason`` then says why. An entry with a
    ``resume_point`` ends at a graph break: its result is the live values there. ``numbers`` computes numbers of the result
    from the sizes of the inputs. An entry that ``assumes`` has a graph that checks what was assumed about sizes that the data
    decides, or about results known by example; where that does not hold, the call runs eagerly: nothing has been written by
    then. One that can ``start_over`` does so too when an operator refuses its arguments in a way that nobody can foresee
    without the data: the program may handle the error. ``dropped`` are inputs whose ``.grad`` is dropped before the graph
    runs, each with the input that the gradient is. One whose graph ``is_edited`` never gives way to eager, which would leave out
    what the passes have added. ``turned_on`` are inputs that require a gradient from here on.
    """

    checker: Checker
    run: Callable[[list[torch.Tensor]], list[torch.Tensor]] | None
    recipe: Recipe | None
    effects: tuple[EffectRecipe, ...] = ()
    reason: str = ""
    compiled: Any = None
    ambient_change: AmbientChange | None = None
    resume_point: Any = None
    numbers: Callable[[Sequence[torch.Tensor]], tuple[Any, ...]] | None = None
    assumes: bool = False
    start_over: bool = False
    backward_reads: BackwardReads | None = None
    dropped: tuple[tuple[int, int], ...] = ()
    is_edited: bool = False
    turned_on: tuple[int, ...] = ()

    @functools.cached_property
    def _effects(self) -> Effects:
        return Effects(self.recipe, self.effects, [item.source for item in self.checker.guards.tensors])

    @functools.cached_property
    def _build(self) -> Build:
        assert self.recipe is not None
        return generate(self.recipe) or functools.partial(rebuild, self.recipe)

    def call(self, callee: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], tensors: list[torch.Tensor]) -> Any:
        """Run on the tensors that the guards fetched; ``callee`` is the user's own function or module."""
        if self.run is None:
            return callee(*args, **kwargs)
        # Read before the graph runs: it may change a size in place.
        numbers = self.numbers(tensors) if self.numbers is not None else None
        if self.backward_reads is not None:
            reads = self.backward_reads.of_call(callee, args, kwargs, tensors)
            with reads_of(reads):
                result = self._call(callee, args, kwargs, tensors, numbers)
            reads.note_versions()
            return result
        return self._call(callee, args, kwargs, tensors, numbers)

    def _call(
        self,
        callee: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        tensors: list[torch.Tensor],
        numbers: tuple[Any, ...] | None,
    ) -> Any:
        results = self._results(tensors)
        if results is None:
            # Not in a handler: what the program raises has no context of ours.
            result = callee(*args, **kwargs)
            return result if self.resume_point is None else Completed(result)
        if numbers is not None:
            results = [*results, *reversed(numbers)]
        if not self.effects:
            result = self._build(results, callee, args, kwargs)
        else:
            result = self._effects.apply(tensors, results, callee, args, kwargs)
        if self.ambient_change is not None:
            self.ambient_change.make()
        return result

    def _results(self, tensors: list[torch.Tensor]) -> list[torch.Tensor] | None:
        """What the graph returns; None where the call is to be made by eager."""
        assert self.run is not None
        for place in self.turned_on:
            tensors[place].requires_grad_()
        for owner, gradient in self.dropped:
            tensors[owner].grad = None
            # The last reference of Dovetail's own: the graph does not take it.
            tensors[gradient] = None  # type: ignore[call-overload]
        if self.assumes:
            devices = sorted({tensor.device.index for tensor in tensors if tensor.is_cuda})
            states = private_state.random_states(devices)
            try:
                return self.run(tensors)
            except RuntimeError as error:
                if ASSUMPTION not in str(error) and not isinstance(error, OutgrownError):
                    raise
                if self.is_edited:
                    raise OutgrownError(
                        f"the data of this call is not such as the graph was captured for ({error}), and passes have edited the "
                        "graph, so that eager cannot take its place",
                        advice="keep sizes and branches independent of the data, or compile without passes",
                    ) from error
                private_state.set_random_states(states, devices)
                return None
        if self.start_over:
            try:
                return self.run(tensors)
            except OPERATOR_ERRORS as error:
                if isinstance(error, (DovetailError, torch.OutOfMemoryError)):
                    raise
                return None
        return self.run(tensors)
