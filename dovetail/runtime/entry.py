"""A compiled entry, which at a call runs the graph, replays the effects and builds the result."""

from __future__ import annotations

import functools
import importlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.errors import DovetailError, OutgrownError
from dovetail.guards import AmbientChange, Checker
from dovetail.runtime.backward_reads import BackwardReads, reads_of
from dovetail.runtime.effects import EffectRecipe
from dovetail.runtime.recipe import Recipe
from dovetail.runtime.recipe_code import Finish, generate
from dovetail.torch_private import state as private_state
from dovetail.trace import ASSUMPTION

OPERATOR_ERRORS = (RuntimeError, IndexError, TypeError, ValueError)
FAILED: Counter[str] = Counter()  # how often what was assumed about data did not hold, by the text of the error


@dataclass(frozen=True)
class Completed:
    """The result of a whole call, from an entry that ordinarily goes up to a graph break only."""

    result: Any


@dataclass(frozen=True, eq=False)
class Entry:
    """Guards, the compiled function, the recipe for the result and the effects to apply.

    >>> # tensors = entry.checker.check(callee, args, kwargs)      the guards; None for a miss
    >>> # entry.call(callee, args, kwargs, tensors)
    >>> #     numbers(tensors)                 numbers of the result that follow from sizes
    >>> #     run(tensors)                     the graph (dovetail.runtime.function), or eager where it cannot take the data
    >>> #     finish(tensors, results, ...)    the result, then the effects (dovetail.runtime.recipe_code)
    >>> #     ambient_change.make()            states of torch that the call leaves changed

    ``run`` is None for an entry that runs the user's function eagerly; ``reason`` then says why. An entry with a
    ``resume_point`` ends at a graph break: its result is the live values there. ``numbers`` computes numbers of the result
    from the sizes of the inputs.

    ``can_rerun_eagerly``: nothing is written before the graph is through. Where an operator refuses its arguments, or what was
    assumed about the data does not hold, the call runs eagerly, with the random state as it was on the CPU and on the GPUs
    ``random_devices`` (None: the graph draws no numbers): the error is eager's, after all that eager does before it. ``fits``
    asks the data before a graph that writes.
    ``is_edited``: the entry never gives way to eager, which would leave out what the passes have added.
    ``inputs_made_differentiable`` are inputs that require a gradient from this call on. ``gradients_dropped_first`` are inputs,
    each with the input that is its gradient, whose ``.grad`` is dropped before the graph runs.
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
    can_rerun_eagerly: bool = False
    random_devices: tuple[int, ...] | None = None
    fits: Callable[[Sequence[torch.Tensor]], bool] | None = None
    is_edited: bool = False
    backward_reads: BackwardReads | None = None
    gradients_dropped_first: tuple[tuple[int, int], ...] = ()
    inputs_made_differentiable: tuple[int, ...] = ()

    @functools.cached_property
    def finish(self) -> Finish:
        """Makes the result, and applies the effects."""
        assert self.recipe is not None
        return generate(self.recipe, self.effects, [item.source for item in self.checker.guards.tensors])

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
        result = self.finish(tensors, results, callee, args, kwargs)
        if self.ambient_change is not None:
            self.ambient_change.make()
        return result

    def _results(self, tensors: list[torch.Tensor]) -> list[torch.Tensor] | None:
        """The graph's results; None where eager is to make the call."""
        assert self.run is not None
        if self.fits is not None and not self.fits(tensors):
            return None
        for place in self.inputs_made_differentiable:
            tensors[place].requires_grad_()
        for owner, gradient in self.gradients_dropped_first:
            tensors[owner].grad = None
            # The last reference of Dovetail's own: the graph does not take it.
            tensors[gradient] = None  # type: ignore[call-overload]
        if not self.can_rerun_eagerly:
            return self.run(tensors)
        devices = self.random_devices
        states = None if devices is None else private_state.random_states(devices)
        try:
            return self.run(tensors)
        except OPERATOR_ERRORS as error:
            refused = ASSUMPTION in str(error) or isinstance(error, OutgrownError)
            is_ours = self.is_edited or isinstance(error, DovetailError)
            if isinstance(error, torch.OutOfMemoryError) or (is_ours and not refused):
                raise
            FAILED.update([str(error)] if ASSUMPTION in str(error) else ())
            if self.is_edited:
                raise OutgrownError(
                    f"the data of this call is not such as the graph was captured for ({error}), and passes have edited it",
                    advice="keep sizes and branches independent of the data, or compile without passes",
                ) from error
            if states is not None and devices is not None:
                private_state.set_random_states(states, devices)
            return None

    def __repr__(self) -> str:
        return f"<{page('describe')(self)}>"

    def _repr_html_(self) -> str:
        return str(page("as_page")(self))


def page(name: str) -> Callable[..., Any]:
    """A function of :mod:`dovetail.reports.entries`, loaded when it is asked for."""
    return getattr(importlib.import_module("dovetail.reports.entries"), name)  # type: ignore[no-any-return]
