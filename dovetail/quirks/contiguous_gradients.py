"""Gradients that eager's formulas make contiguous, in a backward for some of the results only.

A formula's ``grad.contiguous()`` leaves nothing in the graph where the gradient is contiguous at capture. A sum of two is; where
one of the two does not come, the other one alone need not be, and the kernel reads its memory as if it were. So a layer with
the old ``weight_norm``, which keeps its weight as a result of the call, had wrong gradients for channels-last images.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from dovetail.aot.tangents import FOR_PATTERN
from dovetail.quirks.functionalisation import new_strides, strides_of
from dovetail.quirks.registry import Example, quirk
from dovetail.trace.overrides import GRAPHS

_aten = torch.ops.aten
#: By their first argument, the gradient.
_READ_AS_CONTIGUOUS = (_aten._weight_norm_interface_backward.default, _aten.native_group_norm_backward.default)
_WITH_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
_KEPT: dict[str, torch.Tensor] = {}


def _kept(x: torch.Tensor, computed: torch.Tensor, take: Any) -> torch.Tensor:
    """What ``take`` makes of a computed tensor, which stays in an object beyond the call, as the layer's weight does."""
    _KEPT["value"] = computed
    return take(x, computed).square().sum()


def _convolved(x: torch.Tensor, v: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    return _kept(x, _aten._weight_norm(v, g, 0), torch.nn.functional.conv2d)


def _image(channels: int = 3) -> torch.Tensor:
    return torch.rand(2, channels, 4, 4).contiguous(memory_format=torch.channels_last)


def _of_groups(x: torch.Tensor) -> torch.Tensor:
    return _kept(x[0, 0], torch.nn.functional.group_norm(x, 2), lambda x, made: made.movedim(1, -1) @ x)


def _of_image(x: torch.Tensor) -> torch.Tensor:
    return _kept(x[0, 0], torch.nn.functional.group_norm(x, 2), lambda x, made: made @ x)


@quirk(
    GRAPHS,
    example=lambda: Example(_convolved, [(_image(), torch.rand(4, 3, 3, 3), torch.rand(4, 1, 1, 1))]),
)
def gradients_stay_contiguous(graph: torch.fx.Graph) -> None:
    """Copy the gradient in front of a kernel that reads it as contiguous, in backwards that leave a summand out."""
    _copy_gradients(graph, _aten._weight_norm_interface_backward.default)


@quirk(
    GRAPHS,
    until="2.15",
    example={
        "of groups": lambda: Example(_of_groups, [(torch.rand(3, 4, 4, 5),)]),
        "of an image": lambda: Example(_of_image, [(_image(6),)]),
    },
)
def gradients_of_group_norm_stay_contiguous(graph: torch.fx.Graph) -> None:
    """Copy the gradient in front of the kernel of ``group_norm`` likewise."""
    _copy_gradients(graph, _aten.native_group_norm_backward.default)


def _copy_gradients(graph: torch.fx.Graph, target: Any) -> None:
    for node in graph.find_nodes(op="call_function", target=target):
        memory_format = _format_of(node.args[0].meta["val"])
        if memory_format is not None:
            node.meta[FOR_PATTERN] = functools.partial(_with_gradient, memory_format)


def _format_of(gradient: torch.Tensor) -> torch.memory_format | None:
    """The memory format that a gradient has at capture, if it has one."""
    strides, shape = strides_of(gradient), gradient.shape
    if strides == new_strides(shape):
        return torch.contiguous_format
    first, *rest, last = new_strides([*shape[:1], *shape[2:], *shape[1:2]])
    return _WITH_CHANNELS_LAST.get(len(shape)) if strides == [first, last, *rest] else None


def _with_gradient(
    memory_format: torch.memory_format, args: tuple[Any, ...], defined: Sequence[bool]
) -> tuple[Any, ...]:
    gradient = args[0]
    graph = gradient.graph
    user = next(iter(reversed(graph.nodes)))
    if user.target not in _READ_AS_CONTIGUOUS:
        # A decomposition hands the mark on to the operators that stand for the kernel: they take any memory.
        return args
    with graph.inserting_before(user):
        copied = graph.call_function(_aten.clone.default, (gradient,), {"memory_format": memory_format})
    copied.meta = dict(gradient.meta, val=torch.empty_like(gradient.meta["val"], memory_format=memory_format))
    return (copied, *args[1:])
