"""The inputs that a call keeps until a derivative of its backward is asked for."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.runtime.derivatives import Edges, refusal
from dovetail.torch_private import autograd_nodes as private_autograd_nodes
from dovetail.torch_private import state as private_state


@dataclass(frozen=True)
class NeededInputs:
    """The needs of the derivatives of an entry's backward.

    ``indices`` are the inputs whose values the backward depends on; the entry itself writes to those in ``written``, so that a
    copy is kept. ``draws``: the entry draws random numbers, which must be the same again; ``cuda_devices`` are those on which it
    does so. ``varying`` are those of ``indices`` whose sizes may differ from call to call (the entry's guards hold those of the
    others, and everything else about them). ``of_outputs`` has for each differentiable output the inputs that it is computed
    from, where outputs are independent of each other; else it is empty.
    """

    indices: tuple[int, ...]
    written: frozenset[int] = frozenset()
    draws: bool = False
    cuda_devices: tuple[int, ...] = ()
    varying: tuple[int, ...] = ()
    of_outputs: tuple[frozenset[int], ...] = ()

    def for_outputs(self, defined: Sequence[bool]) -> frozenset[int] | None:
        """The inputs that a backward from some outputs can depend on; None: any of them."""
        if not self.of_outputs or all(defined):
            return None
        return frozenset().union(*(item for item, flag in zip(self.of_outputs, defined, strict=True) if flag))


_version, _is_leaf = operator.attrgetter("_version"), operator.attrgetter("is_leaf")


class Leaves:
    """Which of the needed inputs are leaves that require a gradient; the same at almost every call, and checked at each.

    ``saved`` are the values that the graph of one call has saved for its backward. Leaves among them are checked by autograd when
    they are read again: only of the others the version is ``noted``. To read the versions of all 757 leaves of a model with 400
    modules took 105 us of the 600 us that a call took around its graph (benchmarks/bench_overhead.py, 4 cores, 2026-11).
    """

    def __init__(
        self, needed: NeededInputs, primals: Sequence[torch.Tensor], saved: Sequence[Any] | None = None
    ) -> None:
        self.needed = needed
        self.indices = tuple(
            index
            for index in needed.indices
            if index not in needed.written and primals[index].requires_grad and primals[index].is_leaf
        )
        self.others = tuple(index for index in needed.indices if index not in self.indices)
        # A parameter cannot become anything but a leaf, and whether an input requires a gradient is guarded.
        self._checked = _getter(
            tuple(index for index in self.indices if not isinstance(primals[index], torch.nn.Parameter))
        )
        places = {id(value): place for place, value in enumerate(saved or ())}
        self.held = tuple(index for index in self.indices if id(primals[index]) in places)
        self.noted = tuple(index for index in self.indices if index not in self.held)
        self.of = _getter(self.noted)
        #: The places of the held leaves among the values that the graph saves.
        self.places = tuple(places[id(primals[index])] for index in self.held)
        #: Whether the values that the graph saves are known.
        self.is_settled = saved is not None

    def hold(self, primals: Sequence[torch.Tensor]) -> bool:
        """Whether these inputs are leaves where those were; one that has become a leaf may still be kept like the others."""
        return all(map(_is_leaf, self._checked(primals)))

    def are_saved(self, primals: Sequence[torch.Tensor], saved: Sequence[Any]) -> bool:
        """Whether the graph has saved leaves again: a backend may return copies of its inputs from some call on.

        One of them tells; whether all of them are the very leaves is asked where that is relied on
        (:meth:`KeptInputs.check_saved`). To ask for all of them at every call took 3 us of the 126 us of a call with 100 modules
        (4 cores, 2026-11).
        """
        return not self.held or saved[self.places[0]] is primals[self.held[0]]


def _getter(indices: tuple[int, ...]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    # Of fewer than two, an itemgetter gives no tuple.
    return operator.itemgetter(*indices) if len(indices) > 1 else lambda values: [values[index] for index in indices]


class KeptInputs:
    """The inputs of one call.

    A parameter is found again through the autograd graph and only its version is noted, for eager's error about a write
    between forward and backward; anything else is kept as autograd keeps its saved tensors.
    """

    __slots__ = ("by", "held", "leaves", "results", "saved", "states", "versions")

    def __init__(self, primals: Sequence[torch.Tensor], leaves: Leaves) -> None:
        found, needed = leaves.of(primals), leaves.needed
        self.by, self.leaves, self.held = leaves, leaves.noted, leaves.held
        # By map: a loop in Python is several times as slow, and this is done for every parameter in every call.
        self.versions = list(map(_version, found))
        self.saved: list[tuple[int, Any]] = []
        for index in leaves.others:
            value = primals[index]
            if index in needed.written:
                with torch.enable_grad():
                    value = value.clone()
            self.saved.append((index, private_autograd_nodes.make_saved_tensor(value)))
        self.states = private_state.random_states(needed.cuda_devices) if needed.draws else None
        #: Inputs that the backward reads (:mod:`dovetail.higher_order.read_results`).
        self.results: Sequence[Any] = ()

    def note_held(self, primals: Sequence[torch.Tensor]) -> None:
        """Rely no longer on the graph's saved values. None of the leaves has been written to so far."""
        self.leaves += self.held
        self.versions += [primals[index]._version for index in self.held]
        self.held = ()

    def check_saved(self, edges: Edges, saved: Sequence[Any]) -> None:
        """Refuse a derivative where the graph of this call has saved a copy of a leaf that it saved itself before: nobody
        knows whether the leaf was written to since.
        """
        for index, place in zip(self.held, self.by.places, strict=False):
            if saved[place] is not edges[index][0].variable:
                raise refusal("the backend has copied an input at this call that it did not copy at earlier ones")

    def unpack(self, edges: Edges, only: Collection[int] | None = None) -> dict[int, torch.Tensor]:
        """The needed inputs by index, or ``only`` some of them; raises eager's error for one that was written to.

        For those that the graph has saved itself, the saved value must be read first, which raises that error.
        """
        found: dict[int, torch.Tensor] = {}
        for index, version in zip(self.leaves, self.versions, strict=True):
            if only is None or index in only:
                value = found[index] = edges[index][0].variable
                if value._version != version:
                    raise RuntimeError(
                        "one of the variables needed for gradient computation has been modified by an inplace operation: "
                        f"[{value.type().removeprefix('torch.')} {list(value.shape)}] is at version {value._version}; expected "
                        f"version {version} instead. Hint: it is an input of a compiled function."
                    )
        for index in self.held:
            if only is None or index in only:
                found[index] = edges[index][0].variable
        for index, saved in self.saved:
            if only is None or index in only:
                found[index] = saved.unpack()
        # In one order, whichever of them are leaves in this call: the captured backward takes them by position.
        return {index: found[index] for index in self.by.needed.indices if index in found}
