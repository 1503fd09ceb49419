"""The autograd graph of a whole call, kept from its forward for its gradient: eager does not run a function twice either.

One more result of the call, a few bytes, owns the graph. It lives as long as their memory: saved for a backward it dies with what
that has saved, and where no backward asks for it, at the end of the forward. A backward that is given other memory than the call
was (recomputed, copied or written to since) runs the function again.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from dovetail.whole_calls.facts import SizesRule

_numbers = itertools.count(1)
_BYTES = 8


class _Tape(bytearray):
    """The number of a tape, with the arguments of one call as leaves and its results in their autograd graph."""

    leaves: tuple[torch.Tensor, ...]
    results: tuple[torch.Tensor, ...]
    versions: tuple[int, ...]


_TAPES: weakref.WeakValueDictionary[int, _Tape] = weakref.WeakValueDictionary()


def token(leaves: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> torch.Tensor:
    """The tensor that owns a graph, from the arguments of a call to its results."""
    number = next(_numbers)
    tape = _Tape(number.to_bytes(_BYTES, "little"))
    tape.leaves, tape.results = tuple(leaves), tuple(results)
    tape.versions = tuple(item._version for item in (*leaves, *results))
    _TAPES[number] = tape
    return torch.frombuffer(tape, dtype=torch.uint8)


def with_token(rule: SizesRule) -> SizesRule:
    """The rule for the sizes of the results and, behind them, of their token."""
    return lambda *tensors: [*rule(*tensors), ((_BYTES,), torch.uint8)]


def gradients(
    given: Sequence[torch.Tensor],
    roots: Sequence[int],
    tangents: Sequence[torch.Tensor],
    wanted: Sequence[int],
    kept: Sequence[torch.Tensor],
) -> list[torch.Tensor | None] | None:
    """The gradients of the results ``roots`` for the arguments ``wanted``; None where the graph is not that of these tensors.

    ``kept`` are the results of the call and its token. Kernels of a backend may write to memory without counting it, but not to
    that of a tensor that is still read: this is why the results are given as well.
    """
    *results, owner = kept
    tape = _TAPES.get(int.from_bytes(owner.numpy().tobytes(), "little"))
    if tape is None or len(tape.leaves) > len(given) or len(tape.results) != len(results):
        return None
    known = (*tape.leaves, *tape.results)
    pairs = zip(known, (*given[: len(tape.leaves)], *results), strict=True)
    if tape.versions != tuple(item._version for item in known) or not all(_is_same(*pair) for pair in pairs):
        return None
    if not all(tape.leaves[at].requires_grad for at in wanted):
        return None
    found = [(tape.results[at], tangent) for at, tangent in zip(roots, tangents, strict=True)]
    found = [pair for pair in found if pair[0].requires_grad]
    if not found:
        return [None] * len(wanted)
    return list(
        torch.autograd.grad(
            [root for root, _ in found],
            [tape.leaves[at] for at in wanted],
            [tangent for _, tangent in found],
            allow_unused=True,
            retain_graph=True,  # the backward of the program may run again
        )
    )


def _is_same(known: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether two tensors are the same part of the same memory."""
    is_there = known.data_ptr() == value.data_ptr() and known.device == value.device
    return is_there and _layout(known) == _layout(value)


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg()
