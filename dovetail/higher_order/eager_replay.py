"""A derivative of the next order without a capture: the program is run again in eager, and eager's autograd differentiates it.

For a backward that cannot be captured or compiled. The program holds torch's calls, and custom functions as one call each.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch

from dovetail.aot.joint_graph import JointGraph
from dovetail.higher_order.backward import BackwardFunction, Request
from dovetail.torch_private import sizes as private_sizes
from dovetail.trace import Program


def eager_backward(joint: JointGraph, request: Request, any_order: bool = False) -> BackwardFunction | None:
    """The wanted gradients as a function of the needed inputs and the tangents; None where the program cannot run again."""
    program = joint.program
    if program is None or program.refusals or (joint.order > 1 and not any_order):
        return None
    unknown = [node.meta["val"] for index, node in enumerate(joint.primals) if index not in request.primals]
    if any(map(private_sizes.has_symbols, unknown)):
        return None
    # Not the request itself, whose tensors are those of one call.
    places, defined, wanted_indices, twice = tuple(request.primals), request.defined, request.wanted, request.twice

    def run(flat: list[torch.Tensor]) -> Sequence[torch.Tensor | None]:
        primals = dict(zip(places, flat[: len(places)], strict=True))
        tangents = flat[len(places) : len(places) + sum(defined)]
        with torch.enable_grad():
            sources, outputs = replay(joint, program, primals)
            differentiable = itertools.compress(outputs, joint.spec.output_differentiable)
            roots = [*itertools.compress(differentiable, defined)]
            wanted = [sources[index] for index in wanted_indices]
            if not roots or not wanted:
                return [None] * len(wanted)
            return torch.autograd.grad(roots, wanted, tangents, create_graph=twice, allow_unused=True)

    return run


def replay(
    joint: JointGraph, program: Program, primals: Mapping[int, torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The inputs, as variables of a replay's own, and the outputs."""
    # Aliases: an input may have been computed from another one.
    own = {index: value.view_as(value) if value.requires_grad else value for index, value in primals.items()}
    sources = [own[index] if index in own else unread_input(joint, index) for index in range(len(joint.primals))]
    return sources, program.run(as_written(joint, sources), sources)


def unread_input(joint: JointGraph, index: int) -> torch.Tensor:
    """In place of an input whose value no gradient depends on."""
    fake = joint.primals[index].meta["val"]
    made = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device)
    return made.requires_grad_(joint.spec.input_requires_grad[index])


def as_written(joint: JointGraph, sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Inputs that a program may write to: a leaf could not be written to, and the gradient is that of the value before."""
    written = {mutation.input_index for mutation in joint.spec.mutations}
    written |= {change.input_index for change in joint.spec.metadata_changes}
    return [value.clone() if index in written else value for index, value in enumerate(sources)]
