"""``for part in x.split(4, dim=1)``: a loop over the parts of a tensor of which there are as many as a changing size says.

Unrolled, each number of parts is a graph of its own. Where the loop and what joins its results do nothing but compute, they are one
call for all sizes (:mod:`dovetail.rules.sizes.whole_regions`).
"""

from __future__ import annotations

from typing import Any

import torch

from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import rule
from dovetail.rules.sizes.whole_regions import Rounds, run_region_whole
from dovetail.torch_private import sizes as private_sizes


def _dimension(tensor: torch.Tensor, dim: Any) -> int | None:
    is_known = type(dim) is int and -tensor.dim() <= dim < tensor.dim()
    return dim % tensor.dim() if is_known else None


def _run(
    interpreter: TracingInterpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], rounds: Rounds | None
) -> Any:
    if rounds is None or not private_sizes.is_symbolic(rounds.count):
        return interpreter.call_torch(function, args, kwargs)
    region = run_region_whole(interpreter, interpreter.frames[-1], rounds)
    return interpreter.call_torch(function, args, kwargs) if region is None else region.value


def _split_rounds(input: Any, size: Any = None, dim: Any = 0) -> Rounds | None:
    if not isinstance(input, torch.Tensor) or type(size) is not int or size <= 0:
        return None
    at = _dimension(input, dim)
    if at is None or not private_sizes.is_symbolic(input.shape[at]) or private_sizes.is_data_number(input.shape[at]):
        return None
    return Rounds(torch.split, (input, size, at), (input.shape[at] + size - 1) // size)


def _unbind_rounds(input: Any, dim: Any = 0) -> Rounds | None:
    if not isinstance(input, torch.Tensor):
        return None
    at = _dimension(input, dim)
    if at is None or not private_sizes.is_symbolic(input.shape[at]) or private_sizes.is_data_number(input.shape[at]):
        return None
    return Rounds(torch.unbind, (input, at), input.shape[at])


def _register(function: Any, find: Any, names: tuple[str, ...]) -> None:
    def handler(interpreter: TracingInterpreter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        is_known = set(kwargs) <= set(names[len(args) :]) and len(args) <= len(names)
        given = {**dict(zip(names, args, strict=False)), **kwargs} if is_known else {}
        rounds = find(*given.values()) if list(given) == list(names[: len(given)]) and given else None
        return _run(interpreter, function, args, kwargs, rounds)

    rule(function)(handler)


_register(torch.split, _split_rounds, ("tensor", "split_size_or_sections", "dim"))
_register(torch.Tensor.split, _split_rounds, ("self", "split_size", "dim"))
_register(torch.unbind, _unbind_rounds, ("input", "dim"))
_register(torch.Tensor.unbind, _unbind_rounds, ("self", "dim"))
