"""What one compiled entry does at a call: run the graph, replay the effects, build the result."""

from __future__ import annotations

import types
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dovetail import torch_private as private
from dovetail.errors import OutgrownError
from dovetail.guards import AmbientChange, Checker, Source
from dovetail.runtime.backward_reads import BackwardReads, reads_of
from dovetail.runtime.recipe import Recipe, rebuild
from dovetail.trace import ASSUMPTION


@dataclass(frozen=True)
class EffectRecipe:
    """One container that is brought to its final state after the graph has run."""

    source: Source
    kind: str
    values: Recipe
    deleted: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Entry:
    """Guards, the compiled function, the recipe for the result and the effects to apply.

    ``run`` is None for an entry that runs the user's function eagerly; ``reason`` then says why. An entry with a
    ``resume_point`` ends at a graph break: its result is the live values there. ``numbers`` computes numbers of the result
    from the sizes of the inputs. An entry that ``assumes`` has a graph that checks what was assumed about sizes that the data
    decides, or about results known by example; where that does not hold, the call runs eagerly: nothing has been written by
    then.
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
    backward_reads: BackwardReads | None = None

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
        assert self.run is not None
        if self.assumes:
            devices = sorted({tensor.device.index for tensor in tensors if tensor.is_cuda})
            states = private.random_states(devices)
            try:
                results = self.run(tensors)
            except RuntimeError as error:
                if ASSUMPTION not in str(error) and not isinstance(error, OutgrownError):
                    raise
                private.set_random_states(states, devices)
                return callee(*args, **kwargs)
        else:
            results = self.run(tensors)
        if numbers is not None:
            results = [*results, *reversed(numbers)]
        assert self.recipe is not None
        if not self.effects:
            result = rebuild(self.recipe, results, callee, args, kwargs)
        else:
            # Containers are fetched before the first of them is changed: one may be reached through another.
            containers = [effect.source.fetch(callee, args, kwargs) for effect in self.effects]
            memo: dict[int, Any] = {}
            values = [rebuild(effect.values, results, callee, args, kwargs, memo) for effect in self.effects]
            result = rebuild(self.recipe, results, callee, args, kwargs, memo)
            for effect, container, value in zip(self.effects, containers, values, strict=True):
                _apply(effect, container, value)
        if self.ambient_change is not None:
            self.ambient_change.make()
        return result


def _apply(effect: EffectRecipe, container: Any, value: Any) -> None:
    if isinstance(container, types.CellType):
        container.cell_contents = value
    elif effect.kind == "dict":
        # An ordered dictionary keeps a list of its keys beside the table, which dict's own methods would not maintain.
        base: Any = OrderedDict if isinstance(container, OrderedDict) else dict
        for key in effect.deleted:
            base.pop(container, key, None)
        for key, item in value.items():
            base.__setitem__(container, key, item)
    elif effect.kind == "ordered dict":
        base = OrderedDict if isinstance(container, OrderedDict) else dict
        base.clear(container)
        for key, item in value.items():
            base.__setitem__(container, key, item)
    elif effect.kind == "attribute":
        setter: Any = type if isinstance(container, type) else object
        for name in effect.deleted:
            if hasattr(container, name):
                setter.__delattr__(container, name)
        for name, item in value.items():
            setter.__setattr__(container, name, item)
    elif effect.kind == "deque":
        container.clear()
        container.extend(value)
    elif effect.kind == "append":
        list.extend(container, value)
    elif effect.kind == "list":
        list.__setitem__(container, slice(None), value)
    else:
        removed, added = value
        set.difference_update(container, removed)
        set.update(container, added)
