"""The backward of a compiled entry as a function that can be differentiated itself (``create_graph=True``).

The backward of a compiled function is a function of the forward's inputs and of the incoming gradients (the tangents). Asked
for with gradients enabled, it runs as a compiled function of its own, with a backward of its own, and so on: each order is
captured when it is first needed (:mod:`dovetail.higher_order.capture`).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch

from dovetail.errors import DovetailError, HigherOrderGradientError
from dovetail.guards.ambient import autocast_state
from dovetail.higher_order.gradient_strides import Strides, keep_gaps
from dovetail.higher_order.kept_inputs import KeptInputs, Leaves, NeededInputs
from dovetail.higher_order.other_backwards import OtherBackwards
from dovetail.higher_order.read_results import ReadResults, watching
from dovetail.rules.gradients.nonlinear_backwards import refusal_of_summands
from dovetail.runtime.derivatives import FREED, Edges, Gradients, are_partial, refusal
from dovetail.torch_private import autograd as private_autograd
from dovetail.torch_private import autograd_nodes as private_autograd_nodes
from dovetail.torch_private import libraries as private_libraries
from dovetail.torch_private import state as private_state

BackwardFunction = Callable[[list[torch.Tensor]], Gradients]


@dataclass(frozen=True)
class Request:
    """One kind of backward to be captured: which tangents are defined, which inputs want a gradient, and the real tensors
    (the needed inputs by index, then the defined tangents) that it is captured on. ``twice``: whether its gradients are
    differentiated again, for which some operators have other formulas.
    """

    defined: tuple[bool, ...]
    wanted: tuple[int, ...]
    primals: dict[int, torch.Tensor]
    tangents: tuple[torch.Tensor, ...]
    twice: bool


class _Refused(torch.autograd.Function):
    """The gradients of a first order, whose own derivative is refused when it is asked for."""

    @staticmethod
    def forward(ctx: Any, refusal: HigherOrderGradientError, compute: Callable[[], list[Any]], *inputs: Any) -> Any:
        ctx.refusal = refusal
        return tuple(compute())

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise _anew(ctx.refusal)


def _distinct(values: list[torch.Tensor]) -> list[torch.Tensor]:
    """Make each tensor an object of its own: a captured function has one input for each."""
    if len(set(map(id, values))) == len(values):
        return values
    seen: set[int] = set()
    for position, value in enumerate(values):
        if id(value) in seen:
            values[position] = value.view_as(value)
        seen.add(id(values[position]))
    return values


def _has_class(value: torch.Tensor | None) -> bool:
    """Whether a tensor has a class of the program's with ``__torch_function__`` only, which autograd's own nodes do not call."""
    return not (value is None or type(value) is torch.Tensor) and private_libraries.is_plain_inside(type(value))


def _without_class(tangent: torch.Tensor) -> torch.Tensor:
    return tangent.as_subclass(torch.Tensor) if _has_class(tangent) else tangent


#: Gradients may differ by this many roundings of the largest one among them, and by the root of one (half of the digits) where the
#: type has few: what cancels out leaves nothing but roundings, as in the gradient of a bias in front of a normalisation.
_ROUNDINGS = 1000


def agree(ones: Sequence[torch.Tensor | None], others: Sequence[torch.Tensor | None]) -> bool:
    """Whether two lists of gradients are the same but for rounding; none is the same as zeros."""
    largest = max((_largest(other) for other in others if other is not None), default=0.0)
    return all(_is_close(one, other, largest) for one, other in zip(ones, others, strict=True))


def _is_close(one: torch.Tensor | None, other: torch.Tensor | None, largest: float) -> bool:
    if one is None or other is None:
        present = one if other is None else other
        return present is None or not bool(present.detach().count_nonzero())
    one, other = one.detach(), other.detach()
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    eps = torch.finfo(other.dtype).eps
    allowed = max(eps**0.5 * _largest(other), min(_ROUNDINGS * eps, eps**0.5) * largest)
    return bool(torch.isclose(one, other, eps**0.5, allowed, equal_nan=True).all())


def _largest(value: torch.Tensor) -> float:
    """The largest finite absolute value."""
    return float(value.detach().abs().nan_to_num(0, 0, 0).max()) if value.numel() else 0.0


Sizes = tuple[tuple[torch.Size, tuple[int, ...]], ...]


def sizes_and_strides(values: Sequence[torch.Tensor]) -> Sizes:
    """The parts of tensors that differ from call to call in a program whose shapes change."""
    return tuple([(value.shape, value.stride()) for value in values])


@dataclass(frozen=True, eq=False)
class CapturedBackward:
    """``run(flat)`` gives the wanted gradients. It was captured on ``sizes``; ``holds`` is None where it is for these only,
    else it says whether it is for other tensors too. ``key`` are the sizes of those that may have others. ``reused`` are the
    places of the saved values of the forward that it takes after the tangents. ``in_eager`` computes the same by eager's calls.
    """

    run: BackwardFunction
    sizes: Sizes
    holds: Callable[[Sequence[torch.Tensor]], bool] | None = None
    key: Sizes = ()
    reused: tuple[int, ...] = ()
    in_eager: BackwardFunction | None = None

    def fits(self, key: Sizes, flat: Sequence[torch.Tensor]) -> bool:
        """Whether it may run on these tensors."""
        return self.key == key if self.holds is None else self.holds(flat)


class _Kind(NamedTuple):
    """A kind of backward: the ``pattern`` of tangents, wanted gradients, what follows and types, and the ``sizes`` of one call."""

    pattern: tuple[Any, ...]
    sizes: Sizes


class Capture(Protocol):
    """Compiles the backward for a request, knowing the sizes it was captured on before."""

    def __call__(self, request: Request, earlier: Sequence[Sizes]) -> CapturedBackward:
        """The compiled backward."""

    def in_eager(self, request: Request) -> BackwardFunction:
        """The backward by the program's own calls, run eagerly; raises a refusal where they cannot run again."""


MOST_VERSIONS = 8
"""For tangents of more sizes and strides than this, a backward runs eagerly."""


@dataclass(eq=False)
class DifferentiableBackward:
    """See :class:`dovetail.runtime.derivatives.DifferentiableBackward`.

    ``capture(request, earlier)`` compiles the backward for one pattern of tangents and wanted gradients, knowing the sizes it
    was captured on before; what it raises becomes a refusal, given when the second derivative is really asked for. ``gaps`` are
    the strides of non-contiguous gradients; a capture takes out those that a second derivative has not. ``differs`` is as in the
    protocol, ``between`` is :class:`dovetail.higher_order.between_outputs.BetweenOutputs`. ``read`` are the results that the
    backward reads.
    """

    needed: NeededInputs
    _capture: Capture
    _gaps: Strides
    differs: OtherBackwards
    _between: Callable[..., Gradients]
    _read: ReadResults
    _compiled: dict[Any, list[CapturedBackward]] = field(default_factory=dict)
    _refusals: dict[_Kind, HigherOrderGradientError] = field(default_factory=dict)
    _leaves: Leaves | None = None
    _lock: threading.RLock = field(default_factory=threading.RLock)
    # The first result of each is compared with that of the ordinary backward, which was captured together with the forward.
    _compared: set[CapturedBackward] = field(default_factory=set)

    def prepare(self, inputs: list[torch.Tensor]) -> None:
        """See the protocol."""
        if self._gaps:
            keep_gaps(inputs, self._gaps)

    def keep(self, primals: Sequence[torch.Tensor]) -> KeptInputs:
        """See the protocol."""
        leaves = self._leaves
        if private_autograd.has_saved_tensor_hooks():
            # They have to get the same tensors when the call is made again, and they hand back no leaf.
            return KeptInputs(primals, Leaves(self.needed, primals))
        if leaves is None or not leaves.hold(primals):
            # Not under a lock: whichever is kept is checked before it is used.
            leaves = self._leaves = Leaves(self.needed, primals)
        return KeptInputs(primals, leaves)

    def settle(self, kept: KeptInputs, primals: Sequence[torch.Tensor], saved: Sequence[Any]) -> None:
        """Rely on the graph's saved values, from the next call on, or no longer."""
        if not kept.by.is_settled:
            self._leaves = Leaves(self.needed, primals, saved)
        elif kept.held and not kept.by.are_saved(primals, saved):
            # The graph is pure: it has written to no leaf.
            kept.note_held(primals)
            self._leaves = Leaves(self.needed, primals, ())

    def watch(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        """See the protocol."""
        if self._read:
            self._read.note(inputs, outputs)

    def first_order(
        self, kept: KeptInputs | None, edges: Edges, tangents: Gradients, saved: Sequence[Any]
    ) -> Gradients:
        """See the protocol."""
        with torch.enable_grad():
            found = self.run(kept, edges, tangents, None, saved)
        return tuple(
            gradient if gradient is None or private_autograd_nodes.is_batched(gradient) else gradient.detach()
            for gradient in found
        )

    def divide(self, dependent: Any, tangent: torch.Tensor) -> Gradients:
        """See the protocol."""
        node = dependent.next_functions[0][0]
        return self._between(functools.partial(self._with_its_numbers, node.call.kept), node, dependent, tangent)

    def run(
        self,
        kept: KeptInputs | None,
        edges: Edges,
        tangents: Gradients,
        plain: Callable[[], Gradients] | None,
        saved: Sequence[Any] = (),
    ) -> Gradients:
        """See the protocol; without ``plain`` the ordinary backward is another one than eager's, and no derivative is wanted."""
        if kept is None:
            raise RuntimeError(FREED)
        defined = tuple([tangent is not None for tangent in tangents])
        if not any(defined):
            return (None,) * len(edges)
        if are_partial() and self.differs.takes_whole_gradients(defined):
            raise refusal_of_summands()
        kept.check_saved(edges, saved)
        primals = kept.unpack(edges, self.needed.for_outputs(defined))
        wanted = private_autograd_nodes.wanted_edges(edges)
        flat = _distinct([*primals.values(), *(_without_class(tangent) for tangent in tangents if tangent is not None)])
        twice = plain is not None
        if self.differs(defined):
            plain = None  # it would give other gradients than eager
        if any(map(private_autograd_nodes.is_batched, flat)):
            needed, given = dict(zip(primals, flat)), tuple(flat[len(primals) :])
            return self._in_batches(kept, Request(defined, wanted, needed, given, twice), flat, len(edges))
        kind = self._kind(defined, wanted, primals, flat[len(primals) :], twice)
        found = self._look(kind, flat)
        if found is None:
            needed, given = dict(zip(primals, flat)), tuple(flat[len(primals) :])
            found = self._find(kind, Request(defined, wanted, needed, given, twice))
        if isinstance(found, HigherOrderGradientError):
            if plain is None:
                raise _anew(found)
            return _refused(found, flat, plain)
        # Detached: one that is a result of the forward's node would lead back to it.
        inputs = [*flat, *[saved[place].detach() for place in found.reused]]
        gradients = self._with_its_numbers(kept, found.run, inputs)
        if found not in self._compared and plain is not None and not private_state.is_any_autocast_on():
            with torch.no_grad():
                expected = plain()
            if not agree(gradients, [expected[index] for index in wanted]) and (
                # Terms that cancel out in the formula of a gradient differ by more than the gradient is large.
                found.in_eager is None or not agree(gradients, self._with_its_numbers(kept, found.in_eager, inputs))
            ):
                return _refused(self._disagrees(kind), flat, lambda: expected)
            if any(_has_class(expected[index]) for index in wanted):
                refused = refusal("eager hands an incoming gradient on as it is, with its class")
                return _refused(refused, flat, lambda: expected)
            self._compared.add(found)
        result: list[torch.Tensor | None] = [None] * len(edges)
        if kept.results and twice:
            gradients = watching(kept.results, gradients)
        for index, gradient in zip(wanted, gradients, strict=True):
            result[index] = gradient
        return tuple(result)

    def _in_batches(self, kept: KeptInputs, request: Request, flat: list[torch.Tensor], count: int) -> Gradients:
        """The gradients for tangents of which torch has wrapped a batch (``is_grads_batched=True``).

        No trace takes those, and autograd is below the wrapping: what a node of Python's computes there is connected to nothing.
        """
        with private_autograd_nodes.outside_of_batches():
            gradients = self._with_its_numbers(kept, self._capture.in_eager(request), flat)
        result: list[torch.Tensor | None] = [None] * count
        for index, gradient in zip(request.wanted, gradients, strict=True):
            result[index] = gradient
        return tuple(result)

    def _with_its_numbers(self, kept: KeptInputs, run: BackwardFunction, inputs: list[torch.Tensor]) -> Gradients:
        """Run with the random state of the call's forward."""
        if kept.states is None:
            return run(inputs)
        devices = self.needed.cuda_devices
        with torch.random.fork_rng(devices=list(devices)):
            private_state.set_random_states(kept.states, devices)
            return run(inputs)

    def _disagrees(self, kind: _Kind) -> HigherOrderGradientError:
        error = refusal(
            "replayed, the program has other gradients than when it was captured",
            "what a custom autograd.Function reads may have changed since; take both derivatives inside the function",
        )
        with self._lock:
            self._refusals[kind] = error
            self._compiled[kind.pattern] = []
        return error

    def _kind(
        self,
        defined: tuple[bool, ...],
        wanted: tuple[int, ...],
        primals: Mapping[int, torch.Tensor],
        tangents: Sequence[torch.Tensor],
        twice: bool,
    ) -> _Kind:
        autocast = autocast_state() if private_state.is_any_autocast_on() else None
        types = tuple([(value.dim(), value.dtype, value.device, value.requires_grad) for value in tangents])
        varying = [primals[index] for index in self.needed.varying if index in primals]
        return _Kind((defined, wanted, twice, autocast, types), sizes_and_strides([*varying, *tangents]))

    def _find(self, kind: _Kind, request: Request) -> CapturedBackward | HigherOrderGradientError:
        with self._lock:
            return self._look(kind, [*request.primals.values(), *request.tangents]) or self._add(request, kind)

    def _look(self, kind: _Kind, flat: Sequence[torch.Tensor]) -> CapturedBackward | HigherOrderGradientError | None:
        for version in self._compiled.get(kind.pattern, ()):
            if version.fits(kind.sizes, flat):
                return version
        return self._refusals.get(kind) if self._refusals else None

    def _add(self, request: Request, kind: _Kind) -> CapturedBackward | HigherOrderGradientError:
        versions = self._compiled.get(kind.pattern, [])
        try:
            version = self._capture(request, [version.sizes for version in versions])
        except Exception as error:  # noqa: BLE001  (whatever fails, the refusal says so; the first order is not lost)
            refused = self._refusals[kind] = _refusal_of(error)
            return refused
        version = replace(version, key=kind.sizes)
        # A new list: other threads may be going through the old one.
        self._compiled[kind.pattern] = [version, *versions][:MOST_VERSIONS]
        return version


def _refused(error: HigherOrderGradientError, inputs: list[torch.Tensor], plain: Callable[[], Gradients]) -> Gradients:
    """The first-order gradients, which raise the error where they are differentiated."""
    with torch.no_grad():
        gradients = plain()
    values = [gradient for gradient in gradients if gradient is not None]
    if not values:
        return tuple(gradients)
    marked = iter(_Refused.apply(error, lambda: values, *inputs))  # type: ignore[no-untyped-call]
    return tuple(None if gradient is None else next(marked) for gradient in gradients)


def _anew(error: HigherOrderGradientError) -> HigherOrderGradientError:
    """A copy of the error without its traceback, whose frames would keep the tensors of an earlier call."""
    return HigherOrderGradientError(error.what, where=error.where, advice=error.advice)


def _refusal_of(error: Exception) -> HigherOrderGradientError:
    if isinstance(error, HigherOrderGradientError):
        return _anew(error)
    if isinstance(error, DovetailError):
        return refusal(error.what, error.advice)
    return refusal(f"{type(error).__name__}: {error}")
