"""Pools that Inductor computes wrongly are left to eager's kernels, each with the program that shows the fault."""

from __future__ import annotations

import functools

import torch
from torch.nn import functional as F

from dovetail.backends.inductor.job import WORKAROUNDS, Job
from dovetail.backends.inductor.workarounds import example
from dovetail.quirks.registry import quirk
from dovetail.torch_private import inductor as private_inductor

_FRACTIONAL = frozenset({torch.ops.aten.fractional_max_pool2d.default, torch.ops.aten.fractional_max_pool3d.default})


def _fractional(x: torch.Tensor) -> torch.Tensor:
    samples = torch.tensor([[[0.5, 0.0, 0.0]]])
    return F.fractional_max_pool3d(x.cumsum(2), 2, (4, 4, 4), _random_samples=samples) * 1  # type: ignore[no-any-return]


@quirk(WORKAROUNDS, example=example(_fractional, (1, 1, 7, 7, 7), stays=True))
def pool_fractions_by_kernel(job: Job) -> None:
    """Pool by eager's kernel: Inductor takes the samples of three dimensions in reverse, and rounds their places otherwise."""
    found = _FRACTIONAL & {node.target for node in job.graph.graph.nodes}
    if found:
        job.before.append(lambda: private_inductor.inductor_runs_as_is(found, instead=True))


_MAXIMA = frozenset({torch.ops.aten.max_pool2d_with_indices.default, torch.ops.aten.max_pool3d_with_indices.default})


def _places_of_maxima(x: torch.Tensor) -> torch.Tensor:
    return F.max_pool2d(x.transpose(2, 3), (5, 6), stride=1, return_indices=True)[1]  # type: ignore[no-any-return]


@quirk(WORKAROUNDS, example=example(_places_of_maxima, (1, 1, 7, 8), stays=True))
def pool_large_windows_by_kernel(job: Job) -> None:
    """Find the maxima of large windows by eager's kernel: Inductor goes through a window in the order of the memory, counts the
    places in that order, and the gradient of a transposed image was silently wrong. The kernel takes 0.3 to 0.7 of the time.
    """
    for found in _MAXIMA & {node.target for node in job.graph.graph.nodes}:
        job.before.append(functools.partial(private_inductor.inductor_pools_by_kernel, found))


_AVERAGES = (torch.ops.aten.avg_pool2d_backward.default, torch.ops.aten.avg_pool3d_backward.default)


def _averaged(x: torch.Tensor) -> torch.Tensor:
    return F.avg_pool2d(x.cumsum(2), 2, ceil_mode=True).square()


@quirk(WORKAROUNDS, example=example(_averaged, (1, 1, 7, 7), order=1, stays=True))
def average_cut_windows_by_kernel(job: Job) -> None:
    """Give the gradient of ``avg_pool`` with ``ceil_mode`` by eager's kernel: Inductor divides the windows that are cut off at
    the end by the size of whole ones.
    """
    graph = job.graph.graph
    nodes = [node for target in _AVERAGES for node in graph.find_nodes(op="call_function", target=target)]
    # (gradient, input, kernel_size, stride, padding, ceil_mode, ...)
    cut = {node.target for node in nodes if node.args[5]}
    if cut:
        job.before.append(lambda: private_inductor.inductor_runs_as_is(cut, instead=True))
