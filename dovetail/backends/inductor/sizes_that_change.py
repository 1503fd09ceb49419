"""Inductor at sizes that change: what it makes constants of, and what it lays out otherwise than it was captured.

No single program shows these faults: ``tests/backends/inductor/test_sizes_that_change.py`` does, over several sizes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dovetail.backends.common.outputs import same_strides
from dovetail.backends.inductor.job import WORKAROUNDS, Job
from dovetail.backends.protocol import CompiledCallable, output_arguments
from dovetail.errors import CaptureError
from dovetail.torch_private import inductor as private_inductor
from dovetail.torch_private import sizes as private_sizes
from dovetail.trace.shapes import Bindings

_aten = torch.ops.aten
#: Operators for which Inductor asks for numbers (torch 2.13), so that the next size is compiled anew, with the sizes that it asks
#: for. ATen does not ask.
_ASKING: dict[Any, Callable[..., Sequence[Any]]] = {
    _aten.convolution_backward.default: lambda tangent, image, *rest: (*tangent.shape[1:], *image.shape[1:]),
    _aten.upsample_nearest2d_backward.default: lambda tangent, *rest: tangent.shape[-2:],
    _aten._adaptive_avg_pool2d.default: lambda image, *rest: image.shape[-2:],
    _aten.adaptive_max_pool2d.default: lambda image, *rest: image.shape[-2:],
    _aten.glu.default: lambda halves, dim=-1: halves.shape[dim : dim + 1 or None],
}


def call_what_makes_sizes_constant(job: Job) -> None:
    """Let ATen compute what Inductor could generate for constant sizes only."""
    found = {node.target for node in job.graph.graph.nodes if node.target in _ASKING and _is_asked(node)}
    if found:
        job.during.append(functools.partial(private_inductor.inductor_calls, frozenset(found)))


def _is_asked(node: torch.fx.Node) -> bool:
    values: Any = torch.fx.map_arg(node.args, lambda item: item.meta["val"])
    return any(map(private_sizes.is_symbolic, _ASKING[node.target](*values)))


WORKAROUNDS.append(call_what_makes_sizes_constant)


def give_views_their_strides(job: Job) -> None:
    """Give each result the strides of its capture where these are symbolic, and not those of a new tensor.

    Inductor keeps the order of the strides of a view (``x[:, :n]``), and may copy it; the backward is compiled for its strides.
    """
    outputs = output_arguments(job.graph)
    values = [node.meta.get("val") if isinstance(node, torch.fx.Node) else None for node in outputs]
    wanted = [index for index, value in enumerate(values) if _is_placed_oddly(value)]
    places = [index for index, value in enumerate(job.examples) if isinstance(value, torch.Tensor)]
    if not wanted:
        return
    try:
        bindings = Bindings().add([job.examples[index] for index in places], [""] * len(places))
        steps = [private_sizes.expression_of(step) for index in wanted for step in values[index].stride()]  # type: ignore[union-attr]
        compute = bindings.function(steps)
    except CaptureError:  # A size that no input says: the code asserts the strides that it was compiled for.
        return
    job.wrappers.append(lambda call: _with_strides(call, places, wanted, compute))


def _is_placed_oddly(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or not private_sizes.has_symbols(value):
        return False
    expected: Any = 1
    for size, step in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if private_sizes.expression_of(step) != private_sizes.expression_of(expected):
            return True
        expected = expected * size
    return False


def _with_strides(
    call: CompiledCallable, places: Sequence[int], wanted: Sequence[int], compute: Callable[..., tuple[int, ...]]
) -> CompiledCallable:
    def run(inputs: list[Any]) -> list[Any]:
        steps = iter(compute([inputs[place] for place in places]))
        outputs = list(call(inputs))
        for index in wanted:
            value = outputs[index]
            strides = tuple(next(steps) for _ in range(value.dim()))
            if not same_strides(value.shape, value.stride(), strides):
                outputs[index] = value.new_empty_strided(value.shape, strides).copy_(value)
        return outputs

    return run


WORKAROUNDS.append(give_views_their_strides)
