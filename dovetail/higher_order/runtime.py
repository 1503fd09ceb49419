"""The backward of a compiled entry as a function that can be differentiated itself (``create_graph=True``).

The backward of a compiled function is a function of the forward's inputs and of the incoming gradients (the tangents). Asked
for with gradients enabled, it runs as a compiled function of its own, with a backward of its own, and so on: each order is
captured when it is first needed (:mod:`dovetail.higher_order.capture`). What it needs of the forward's inputs is kept here.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from dovetail.errors import DovetailError, HigherOrderGradientError
from dovetail.guards.ambient import autocast_state
from dovetail.torch_private import autograd as private_autograd
from dovetail.torch_private import state as private_state

FREED = (
    "Trying to backward through the graph a second time (or directly access saved tensors after they have already been "
    "freed). Saved intermediate values of the graph are freed when you call .backward() or autograd.grad(). Specify "
    "retain_graph=True if you need to backward through the graph a second time or if you need to access saved tensors after "
    "calling backward."
)
BackwardFunction = Callable[[list[torch.Tensor]], list[torch.Tensor | None]]


@dataclass(frozen=True)
class NeededInputs:
    """What the derivatives of an entry's backward need of a call.

    ``indices`` are the inputs whose values the backward depends on; those in ``written`` are written to by the entry itself,
    so that a copy is kept. ``draws``: the entry draws random numbers, which must be the same again; ``cuda_devices`` are
    those on which it does so. ``varying`` are those of ``indices`` whose sizes may differ from call to call (the entry's guards
    hold those of the others, and everything else about them). ``of_outputs`` has for each differentiable output the inputs that it
    is computed from, where outputs are independent of each other; else it is empty.
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


@dataclass(frozen=True)
class Request:
    """One kind of backward to be captured: which tangents are defined, which inputs want a gradient, and the real tensors
    (the needed inputs by index, then the defined tangents) that it is captured on.
    """

    defined: tuple[bool, ...]
    wanted: tuple[int, ...]
    primals: dict[int, torch.Tensor]
    tangents: tuple[torch.Tensor, ...]


_version = operator.attrgetter("_version")


class Leaves:
    """Which of the needed inputs are leaves that require a gradient; the same at almost every call, and checked at each.

    ``saved`` is what the graph of one call has saved for its backward. Leaves among it are checked by autograd when that is
    read again: only of the others the version is ``noted``. To read the versions of all 757 leaves of a model with 400 modules
    took 105 us of the 600 us that a call took around its graph (benchmarks/bench_overhead.py, 4 cores, 2026-11).
    """

    def __init__(
        self, needed: NeededInputs, primals: Sequence[torch.Tensor], saved: Sequence[Any] | None = None
    ) -> None:
        self.indices = tuple(
            index
            for index in needed.indices
            if index not in needed.written and primals[index].requires_grad and primals[index].is_leaf
        )
        self.others = tuple(index for index in needed.indices if index not in self.indices)
        # A parameter cannot become anything but a leaf, and whether an input requires a gradient is guarded.
        self._checked = tuple(index for index in self.indices if not isinstance(primals[index], torch.nn.Parameter))
        places = {id(value): place for place, value in enumerate(saved or ())}
        self.held = tuple(index for index in self.indices if id(primals[index]) in places)
        self.noted = tuple(index for index in self.indices if index not in self.held)
        self.of = _getter(self.noted)
        #: Where among what the graph saves the leaves are that it saves.
        self.places = tuple(places[id(primals[index])] for index in self.held)
        #: Whether it is known what the graph saves.
        self.is_settled = saved is not None

    def hold(self, primals: Sequence[torch.Tensor]) -> bool:
        """Whether these inputs are leaves where those were; one that has become a leaf may still be kept like the others."""
        return all(primals[index].is_leaf for index in self._checked)

    def are_saved(self, primals: Sequence[torch.Tensor], saved: Sequence[Any]) -> bool:
        """Whether the graph has saved leaves again: a backend may return copies of its inputs from some call on. One of them
        tells; whether all of them are the very leaves is asked where that is relied on (:meth:`KeptInputs.check_saved`). To
        ask for all of them at every call took 3 us of the 126 us of a call with 100 modules (4 cores, 2026-11).
        """
        return not self.held or saved[self.places[0]] is primals[self.held[0]]


def _getter(indices: tuple[int, ...]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    # Of fewer than two, an itemgetter gives no tuple.
    return operator.itemgetter(*indices) if len(indices) > 1 else lambda values: [values[index] for index in indices]


class KeptInputs:
    """The inputs of one call, kept for a derivative of its backward.

    A parameter is found again through the autograd graph and only its version is noted, for eager's error about a write
    between forward and backward; anything else is kept as autograd keeps what it saves.
    """

    __slots__ = ("by", "errors", "held", "leaves", "saved", "states", "versions")

    def __init__(self, needed: NeededInputs, primals: Sequence[torch.Tensor], leaves: Leaves) -> None:
        found = leaves.of(primals)
        self.by, self.leaves, self.held = leaves, leaves.noted, leaves.held
        # By map: a loop in Python is several times as slow, and this is done for every parameter in every call.
        self.versions = list(map(_version, found))
        self.errors: dict[int, Exception] = {}
        self.saved: list[tuple[int, Any]] = []
        for index in leaves.others:
            value = primals[index]
            if index in needed.written:
                with torch.enable_grad():
                    value = value.clone()
            self.saved.append((index, private_autograd.make_saved_tensor(value)))
        self.states = private_state.random_states(needed.cuda_devices) if needed.draws else None

    def note_held(self, variables: Mapping[int, torch.Tensor]) -> None:
        """Rely no longer on what the graph has saved. None of the leaves has been written to so far."""
        self.leaves += self.held
        self.versions += [variables[index]._version for index in self.held]
        self.held = ()

    def let_go(self, saved: Any, edges: Sequence[tuple[Any, int]]) -> None:
        """Some of what the graph has saved is about to be freed; ``saved[place]`` raises eager's error for what was written to."""
        for index, place in zip(self.held, self.by.places, strict=False):
            try:
                is_leaf = saved[place] is edges[index][0].variable
            except RuntimeError as error:
                self.errors[index] = error
            else:
                if not is_leaf:
                    self.errors[index] = _copied()
        self.note_held({index: edges[index][0].variable for index in self.held})

    def check_held(self, saved: Any, only: Collection[int]) -> None:
        """Raise eager's error where one of these inputs was written to; it is ``saved[place]`` that raises it."""
        for index, place in zip(self.held, self.by.places, strict=False):
            if index in only:
                saved[place]

    def check_saved(self, edges: Sequence[tuple[Any, int]], saved: Sequence[Any]) -> None:
        """Refuse a derivative where the graph of this call has saved a copy of a leaf that it saved itself before: nobody
        knows whether the leaf was written to since. ``saved`` has None for what is not wanted.
        """
        for index, place in zip(self.held, self.by.places, strict=False):
            if saved[place] is not None and saved[place] is not edges[index][0].variable:
                raise _copied()

    def unpack(self, edges: Sequence[tuple[Any, int]], only: Collection[int] | None = None) -> dict[int, torch.Tensor]:
        """The needed inputs by index, or ``only`` some of them; raises eager's error for one that was written to. For those that
        the graph has saved itself, what it has saved must be read first, which raises that error.
        """
        for index, error in self.errors.items():
            if only is None or index in only:
                raise error
        found: dict[int, torch.Tensor] = {}
        for index, version in zip(self.leaves, self.versions, strict=True):
            if only is not None and index not in only:
                continue
            value = edges[index][0].variable
            if value._version != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"[{value.type().removeprefix('torch.')} {list(value.shape)}] is at version {value._version}; expected "
                    f"version {version} instead. Hint: it is an input of a compiled function."
                )
            found[index] = value
        for index in self.held:
            if only is None or index in only:
                found[index] = edges[index][0].variable
        for index, saved in self.saved:
            if only is None or index in only:
                found[index] = saved.unpack()
        # In one order, whichever of them are leaves in this call: the captured backward takes them by position.
        return dict(sorted(found.items()))


def _no_plain_backward() -> list[torch.Tensor | None]:
    raise AssertionError("the backward was captured for another autocast state")


class _Refused(torch.autograd.Function):
    """The gradients of a first order, whose own derivative is refused when it is asked for."""

    @staticmethod
    def forward(ctx: Any, refusal: HigherOrderGradientError, compute: Callable[[], list[Any]], *inputs: Any) -> Any:
        ctx.refusal = refusal
        return tuple(compute())

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise ctx.refusal


def _distinct(values: list[torch.Tensor]) -> list[torch.Tensor]:
    """The same tensors, each an object of its own: a captured function has one input for each."""
    seen: set[int] = set()
    for position, value in enumerate(values):
        if id(value) in seen:
            values[position] = value.view_as(value)
        seen.add(id(values[position]))
    return values


def _agree(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Whether two gradients are the same but for rounding; none is the same as zeros."""
    if one is None or other is None:
        given = one if other is None else other
        return given is None or not bool(given.detach().count_nonzero())
    one, other = one.detach(), other.detach()
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    scale = other.abs().nan_to_num(0, 0, 0).max() if other.numel() else 0
    tolerance = torch.finfo(other.dtype).eps ** 0.5
    return bool(torch.isclose(one, other, tolerance, float(tolerance * scale), equal_nan=True).all())


def _kind(value: torch.Tensor) -> tuple[Any, ...]:
    return (value.dim(), value.dtype, value.device, value.requires_grad)


Sizes = tuple[tuple[torch.Size, tuple[int, ...]], ...]


def sizes_and_strides(values: Sequence[torch.Tensor]) -> Sizes:
    """What of the tensors differs from call to call in a program whose shapes change."""
    return tuple([(value.shape, value.stride()) for value in values])


@dataclass(frozen=True, eq=False)
class CapturedBackward:
    """``run(flat)`` gives the wanted gradients. It was captured on ``sizes``; ``holds`` is None where it is for these only,
    else it says whether it is for other tensors too. ``key`` are the sizes of those that may have others. ``given`` are the
    places of what it takes, after the tangents, of the values that the forward has saved.
    """

    run: BackwardFunction
    sizes: Sizes
    holds: Callable[[Sequence[torch.Tensor]], bool] | None = None
    key: Sizes = ()
    given: tuple[int, ...] = ()

    def fits(self, key: Sizes, flat: Sequence[torch.Tensor]) -> bool:
        """Whether it may run on these tensors."""
        return self.key == key if self.holds is None else self.holds(flat)


Capture = Callable[[Request, Sequence[Sizes]], CapturedBackward]
_MAXIMUM_VERSIONS = 8


class DifferentiableBackward:
    """The backward of one entry, as a differentiable function of inputs and tangents.

    ``capture(request, earlier)`` compiles it for one pattern of tangents and wanted gradients, knowing the sizes it was
    captured on before; what it raises becomes a refusal, given when the second derivative is really asked for.
    """

    def __init__(self, needed: NeededInputs, capture: Capture) -> None:
        self.needed = needed
        self._capture = capture
        self._compiled: dict[Any, list[CapturedBackward]] = {}
        self._refusals: dict[Any, HigherOrderGradientError] = {}
        self._leaves: Leaves | None = None
        self._lock = threading.RLock()
        # The first result of each is compared with that of the ordinary backward, which was captured together with the forward.
        self._compared: set[CapturedBackward] = set()

    def keep(self, primals: Sequence[torch.Tensor]) -> KeptInputs:
        """Keep what a call's inputs are needed for."""
        leaves = self._leaves
        if leaves is None or not leaves.hold(primals):
            # Not under a lock: whichever is kept is checked before it is used.
            leaves = self._leaves = Leaves(self.needed, primals)
        return KeptInputs(self.needed, primals, leaves)

    def settle(self, kept: KeptInputs, primals: Sequence[torch.Tensor], saved: Sequence[Any]) -> None:
        """The forward has run: rely on what its graph has saved, from the next call on, or no longer."""
        if not kept.by.is_settled:
            self._leaves = Leaves(self.needed, primals, saved)
        elif kept.held and not kept.by.are_saved(primals, saved):
            # The graph is pure: it has written to no leaf.
            kept.note_held(dict(enumerate(primals)))
            self._leaves = Leaves(self.needed, primals, ())

    def first_order(
        self,
        kept: KeptInputs | None,
        edges: Sequence[tuple[Any, int]],
        tangents: Sequence[torch.Tensor | None],
        saved: Sequence[Any],
    ) -> tuple[torch.Tensor | None, ...]:
        """One gradient for each input, captured in the autocast state of the moment and connected to nothing."""
        with torch.enable_grad():
            found = self.run(kept, edges, tangents, _no_plain_backward, saved)
        return tuple(None if gradient is None else gradient.detach() for gradient in found)

    def run(
        self,
        kept: KeptInputs | None,
        edges: Sequence[tuple[Any, int]],
        tangents: Sequence[torch.Tensor | None],
        plain: Callable[[], list[torch.Tensor | None]],
        saved: Sequence[Any] = (),
    ) -> tuple[torch.Tensor | None, ...]:
        """One gradient for each input, connected to inputs and tangents. ``plain()`` is the ordinary backward, ``saved`` what the
        forward has saved for it.
        """
        if kept is None:
            raise RuntimeError(FREED)
        defined = tuple([tangent is not None for tangent in tangents])
        kept.check_saved(edges, saved)
        primals = kept.unpack(edges, self.needed.for_outputs(defined))
        wanted = private_autograd.wanted_edges(edges)
        given = tuple(tangent for tangent in tangents if tangent is not None)
        flat = _distinct([*primals.values(), *given])
        found = self._find(defined, wanted, primals, flat)
        if isinstance(found, HigherOrderGradientError):
            if plain is _no_plain_backward:
                raise found
            return self._refused(found, flat, plain)
        # Detached: one that is a result of the forward's node would lead back to it.
        inputs = [*flat, *[saved[place].detach() for place in found.given]]
        if kept.states is None:
            gradients = found.run(inputs)
        else:
            with private_state.random_states_set(kept.states, self.needed.cuda_devices):
                gradients = found.run(inputs)
        if found not in self._compared and not private_state.is_any_autocast_on():
            with torch.no_grad():
                expected = plain()
            if not all(_agree(gradient, expected[index]) for index, gradient in zip(wanted, gradients, strict=True)):
                error = self._disagrees(self._key(defined, wanted, primals, flat))
                return self._refused(error, flat, lambda: expected)
            self._compared.add(found)
        result: list[torch.Tensor | None] = [None] * len(edges)
        for index, gradient in zip(wanted, gradients, strict=True):
            result[index] = gradient
        return tuple(result)

    def _disagrees(self, key: tuple[Any, Sizes]) -> HigherOrderGradientError:
        error = refusal(
            "replayed, the program has other gradients than when it was captured",
            "what a custom autograd.Function reads may have changed since; take both derivatives inside the function",
        )
        with self._lock:
            self._refusals[key] = error
            self._compiled[key[0]] = []
        return error

    def _key(
        self,
        defined: tuple[bool, ...],
        wanted: tuple[int, ...],
        primals: Mapping[int, torch.Tensor],
        flat: list[torch.Tensor],
    ) -> tuple[Any, Sizes]:
        """The pattern and the sizes of a call; ``flat`` are the needed inputs, then the defined tangents."""
        autocast = autocast_state() if private_state.is_any_autocast_on() else None
        tangents = flat[len(primals) :]
        pattern = (defined, wanted, autocast, tuple([_kind(value) for value in tangents]))
        varying = [index for index in self.needed.varying if index in primals]
        return pattern, sizes_and_strides([*[primals[index] for index in varying], *tangents] if varying else tangents)

    def _find(
        self,
        defined: tuple[bool, ...],
        wanted: tuple[int, ...],
        primals: Mapping[int, torch.Tensor],
        flat: list[torch.Tensor],
    ) -> CapturedBackward | HigherOrderGradientError:
        pattern, sizes = self._key(defined, wanted, primals, flat)
        found = self._look(pattern, sizes, flat)
        if found is None:
            with self._lock:
                found = self._look(pattern, sizes, flat)
                if found is None:
                    values = iter(flat)
                    request = Request(defined, wanted, {index: next(values) for index in primals}, tuple(values))
                    found = self._add(request, pattern, sizes)
        return found

    def _look(
        self, pattern: Any, sizes: Sizes, flat: list[torch.Tensor]
    ) -> CapturedBackward | HigherOrderGradientError | None:
        for version in self._compiled.get(pattern, ()):
            if version.fits(sizes, flat):
                return version
        return self._refusals.get((pattern, sizes))

    def _add(self, request: Request, pattern: Any, sizes: Sizes) -> CapturedBackward | HigherOrderGradientError:
        versions = self._compiled.get(pattern, [])
        if len(versions) >= _MAXIMUM_VERSIONS:
            return refusal(f"it was captured for {_MAXIMUM_VERSIONS} different shapes already")
        try:
            version = self._capture(request, [version.sizes for version in versions])
        except Exception as error:  # noqa: BLE001  (whatever fails, the refusal says so; the first order is not lost)
            refused = _refusal_of(error)
            self._refusals[pattern, sizes] = refused
            return refused
        version = replace(version, key=sizes)
        # A new list: other threads may be going through the old one.
        self._compiled[pattern] = [version, *versions]
        return version

    @staticmethod
    def _refused(
        error: HigherOrderGradientError, inputs: list[torch.Tensor], plain: Callable[[], list[torch.Tensor | None]]
    ) -> tuple[torch.Tensor | None, ...]:
        with torch.no_grad():
            gradients = plain()
        present = [gradient is not None for gradient in gradients]
        values = [gradient for gradient in gradients if gradient is not None]
        if not values:
            return tuple(gradients)
        marked = iter(_Refused.apply(error, lambda: values, *inputs))  # type: ignore[no-untyped-call]
        return tuple(next(marked) if flag else None for flag in present)


def _refusal_of(error: Exception) -> HigherOrderGradientError:
    if isinstance(error, HigherOrderGradientError):
        return error
    if isinstance(error, DovetailError):
        return refusal(error.what, error.advice)
    return refusal(f"{type(error).__name__}: {error}")


class _Freed(torch.autograd.Function):
    """A tensor whose graph was freed by a backward inside of the compiled function."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, holder: list[torch.Tensor]) -> torch.Tensor:
        return holder[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError(FREED)


def freed(value: torch.Tensor) -> torch.Tensor:
    """The tensor as eager leaves it after a backward: it requires a gradient, and to ask for one is eager's error."""
    with torch.enable_grad():
        result: torch.Tensor = _Freed.apply(torch.empty((), requires_grad=True), [value.detach()])  # type: ignore[no-untyped-call]
    return result


def _copied() -> HigherOrderGradientError:
    return refusal("the backend has copied an input at this call that it did not copy at earlier ones")


def refusal(reason: str, advice: str = "") -> HigherOrderGradientError:
    """The error for a derivative of the next order that a compiled function cannot give."""
    return HigherOrderGradientError(
        f"a derivative of a compiled function's backward is asked for (create_graph=True), and it cannot be captured: {reason}",
        advice=advice or "take both derivatives inside the compiled function, or run this one eagerly",
    )
