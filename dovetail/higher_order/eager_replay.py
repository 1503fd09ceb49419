"""A derivative of the next order without a capture: the program is run again in eager, and eager's autograd differentiates it.

For a backward that cannot be captured or compiled. The program holds torch's calls, so that none of the user's code runs again.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence

import torch

from dovetail.aot.joint_graph import JointGraph
from dovetail.higher_order.backward import BackwardFunction, Request
from dovetail.torch_private import sizes as private_sizes
from dovetail.trace import Program
from dovetail.whole_calls.whole import Whole


def eager_backward(joint: JointGraph, request: Request) -> BackwardFunction | None:
    """The wanted gradients as a function of the needed inputs and the tangents; None where the user's code would run again."""
    program = joint.program
    if program is None or program.unreplayable or joint.order > 1 or _runs_users_code(program):
        return None
    written = {mutation.input_index for mutation in joint.spec.mutations}
    written |= {change.input_index for change in joint.spec.metadata_changes}
    unknown = [node.meta["val"] for index, node in enumerate(joint.primals) if index not in request.primals]
    if any(map(private_sizes.has_symbols, unknown)):
        return None
    # Not the request itself, whose tensors are those of one call.
    places, defined, wanted_indices = tuple(request.primals), request.defined, request.wanted

    def run(flat: list[torch.Tensor]) -> Sequence[torch.Tensor | None]:
        primals = dict(zip(places, flat[: len(places)], strict=True))
        tangents = flat[len(places) : len(places) + sum(defined)]
        with torch.enable_grad():
            # Aliases: an input may have been computed from another one, and is a variable of its own here.
            sources = [_source(joint, index, primals) for index in range(len(joint.primals))]
            given = [value.clone() if index in written else value for index, value in enumerate(sources)]
            outputs = program.run(given, sources)
            differentiable = [
                value for value, flag in zip(outputs, joint.spec.output_differentiable, strict=True) if flag
            ]
            roots = [value for value, flag in zip(differentiable, defined, strict=True) if flag]
            wanted = [sources[index] for index in wanted_indices]
            if not roots or not wanted:
                return [None] * len(wanted)
            return torch.autograd.grad(roots, wanted, tangents, create_graph=True, allow_unused=True)

    return run


def _source(joint: JointGraph, index: int, primals: Mapping[int, torch.Tensor]) -> torch.Tensor:
    value = primals.get(index)
    if value is not None:
        return value.view_as(value) if value.requires_grad else value
    # No gradient depends on its value.
    fake = joint.primals[index].meta["val"]
    return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device).requires_grad_(
        joint.spec.input_requires_grad[index]
    )


def _runs_users_code(program: Program) -> bool:
    for call in program.calls:
        function = call.function.func if isinstance(call.function, functools.partial) else call.function
        if isinstance(function, Whole):
            continue
        owner = getattr(function, "__self__", None)
        if isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
            return True
        if inspect.isfunction(function) and not (function.__module__ or "").startswith(("torch.", "dovetail.")):
            return True
    return False
