"""Compiling ahead of the first call: ``compiled.precompile(*example_args)``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dovetail.face.dispatcher import SURROUNDINGS
from dovetail.face.loading import load_rules
from dovetail.tiers.swap import wait
from dovetail.torch_private import sizes as private_sizes
from dovetail.torch_private import tensors as private_tensors
from dovetail.trace.shapes import MARK


def precompile(compiled: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Compile forward and backward for a call with these arguments, and wait for the kernels; the call does not happen.

    Nothing of the function's effects is visible, and no random numbers are drawn. Fake tensors stand for real ones of their kind.
    Returns whether the next call with such arguments runs compiled as a whole; what comes behind a graph break is compiled when
    it is reached.

    >>> import torch, dovetail
    >>> seen = []
    >>> compiled = dovetail.compile(lambda x: (seen.append(1), x.sin())[1], backend="aten")
    >>> compiled.precompile(torch.ones(3)), seen
    (True, [])
    """
    from dovetail.reports.explanation import compiled_function

    function = compiled_function(compiled)
    known: dict[int, torch.Tensor] = {}
    args, named = tuple(_as_real(item, known) for item in args), {key: _as_real(kwargs[key], known) for key in kwargs}
    load_rules()
    if function.find(args, named, function.entries) is None:
        taken = (surrounding(function, args, named) for surrounding in SURROUNDINGS)
        if next(filter(None, taken), None) is None:
            function.decide(args, named)
    wait(function)
    found = function.find(args, named, function.entries)
    return found is not None and found[0].run is not None and found[0].resume_point is None


def _as_real(value: Any, known: dict[int, torch.Tensor]) -> Any:
    """Arguments with zeros in the place of fake tensors, the same one for the same one."""
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(_as_real(item, known) for item in value)
    if type(value) is dict:
        return {key: _as_real(item, known) for key, item in value.items()}
    if not private_tensors.is_fake(value):
        return value
    if id(value) not in known:
        shape = tuple(private_sizes.hint(size) for size in value.shape)
        stride = tuple(private_sizes.hint(step) for step in value.stride())
        real = torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device).zero_()
        real.requires_grad_(value.requires_grad)
        for name, mark in vars(value).items():
            if name == MARK or name.startswith("_dynamo_"):
                setattr(real, name, mark)
        known[id(value)] = real
    return known[id(value)]
