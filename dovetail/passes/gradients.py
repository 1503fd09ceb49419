"""Passes that change gradients before they leave the graph."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable

import torch

from dovetail.aot.descriptors import Descriptor, Gradient, ParamInput
from dovetail.aot.joint_graph import JointGraph
from dovetail.errors import OptionError

aten = torch.ops.aten


def clip_gradients(max_norm: float, epsilon: float = 1e-6) -> Callable[[JointGraph], None]:
    """A pass: the gradients of all parameters together have at most the 2-norm ``max_norm``.

    What ``torch.nn.utils.clip_grad_norm_`` does after the backward happens inside of it, for the gradients of this one call:
    where ``.grad`` adds up over several calls, each of them is clipped by itself.
    """
    if not max_norm > 0:
        raise OptionError(f"max_norm must be greater than 0, not {max_norm!r}")

    def clip(joint: JointGraph) -> None:
        gradients = _gradients(joint, None)
        if not gradients:
            return
        dtype = next(iter(gradients.values())).meta["val"].dtype
        norms = [joint.call(aten.linalg_vector_norm.default, node, 2.0, dtype=dtype) for node in gradients.values()]
        total = joint.call(aten.linalg_vector_norm.default, joint.call(aten.stack.default, norms), 2.0)
        inverse = joint.call(aten.reciprocal.default, joint.call(aten.add.Tensor, total, epsilon))
        factor = joint.call(aten.clamp.default, joint.call(aten.mul.Tensor, inverse, float(max_norm)), None, 1.0)
        for descriptor, node in gradients.items():
            joint.replace_output(descriptor, joint.call(aten.mul.Tensor, node, factor))

    return clip


def scale_gradients(factor: float, names: Iterable[str] | None = None) -> Callable[[JointGraph], None]:
    """A pass: the gradients of these parameters (of all, if none are named) times ``factor``. Raises KeyError for a name."""
    wanted = None if names is None else set(names)

    def scale(joint: JointGraph) -> None:
        for descriptor, node in _gradients(joint, wanted).items():
            joint.replace_output(descriptor, joint.call(aten.mul.Tensor, node, float(factor)))

    return scale


def scale_loss(factor: float) -> Callable[[JointGraph], None]:
    """A pass: the backward runs with tangents times ``factor``, and divides its gradients by it at the end.

    In half precision that keeps small gradients from becoming zero on their way; with a power of two the rest stays as it is.
    """
    if not factor > 0:
        raise OptionError(f"factor must be greater than 0, not {factor!r}")

    def scale(joint: JointGraph) -> None:
        # The gradients first: one of them may be the tangent itself.
        divided = {
            descriptor: joint.call(aten.div.Tensor, node, float(factor))
            for descriptor, node in zip(
                joint.output_descriptors[joint.num_forward_outputs :], joint.gradients, strict=True
            )
            if descriptor is not None and node is not None
        }
        for descriptor, node in divided.items():
            joint.replace_output(descriptor, node)
        for tangent in joint.tangents:
            scaled = joint.call(aten.mul.Tensor, tangent, float(factor))
            tangent.replace_all_uses_with(scaled, delete_user_cb=functools.partial(operator.is_not, scaled))

    return scale


def _gradients(joint: JointGraph, names: set[str] | None) -> dict[Descriptor, torch.fx.Node]:
    """The gradients of parameters, by their descriptor."""
    found: dict[Descriptor, torch.fx.Node] = {
        descriptor: node
        for node, descriptor in zip(joint.results, joint.output_descriptors, strict=True)
        if node is not None and isinstance(descriptor, Gradient) and isinstance(descriptor.of, ParamInput)
    }
    if names is None:
        return found
    wanted = {name: Gradient(ParamInput(name)) for name in sorted(names)}
    for name, descriptor in wanted.items():
        if descriptor not in found:
            raise KeyError(f"there is no gradient of {name!r}")
    return {descriptor: node for descriptor, node in found.items() if descriptor in wanted.values()}
