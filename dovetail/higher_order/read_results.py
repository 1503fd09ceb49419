"""Results that the backward itself reads, as that of ``exp`` does: in eager, a derivative of the backward reaches their hooks.

The gradient of ``y = x.exp()`` is ``g * y``. Its derivative arrives at ``y`` by two ways, through ``g`` and as a factor, and
eager's hooks of ``y`` get the sum. The backward of a graph computes the factor from the inputs, and its derivative goes straight
there. Where somebody asks for the gradient of such a result, the derivative is refused.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from dovetail.aot.joint_graph import JointGraph
from dovetail.runtime.derivatives import Gradients, refusal
from dovetail.runtime.output_dependencies import is_edge, prepare_hooks
from dovetail.torch_private import autograd as private_autograd
from dovetail.torch_private import state as private_state

_aten = torch.ops.aten
_SAME = (_aten.detach.default, _aten.alias.default)
#: It has no derivative with respect to the value that it compares.
_COMPARES = _aten.threshold_backward.default


class _Noted(NamedTuple):
    """A result of a call, its hooks, and how many of them were known at the end of the call."""

    result: weakref.ref[torch.Tensor]
    hooks: Mapping[int, Any]
    known: int

    @classmethod
    def of(cls, result: torch.Tensor) -> _Noted:
        """The hooks are held: they run whether or not somebody has the result."""
        hooks = prepare_hooks(result)
        return cls(weakref.ref(result), hooks, len(hooks))

    def is_asked(self) -> bool:
        """Whether somebody asks for the gradient of the result."""
        if len(self.hooks) > self.known or (result := self.result()) is None:
            return len(self.hooks) > self.known
        edge = result.grad_fn, result.output_nr
        return result.retains_grad or any(is_edge(item, *edge) for item in private_autograd.wanted_gradients())


class _Place(NamedTuple):
    """Where a result is found after a call: a forward output, or the input that it was written back to."""

    output: int
    input: int | None


class ReadResults(tuple[_Place, ...]):
    """The results of a joint graph that gradients are computed from."""

    __slots__ = ()

    @classmethod
    def of(cls, joint: JointGraph) -> ReadResults:
        """The results of one joint graph that its backward reads."""
        read = _read_by(joint.gradients)
        written = {item.output_index: item.input_index for item in joint.spec.mutations if item.differentiable}
        flags = enumerate(zip(joint.results, joint.spec.output_differentiable, strict=False))
        return cls(_Place(index, written.get(index)) for index, (node, flag) in flags if flag and _value(node) in read)

    def note(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        """Have the call keep what is to be asked of its results later."""
        found = [outputs[place.output] if place.input is None else inputs[place.input] for place in self]
        call = _call_of(outputs[self[0].output])
        if call is not None and call.kept is not None and private_state.functorch_level() is None:
            call.kept.results = [_Noted.of(value) for value in found if value.grad_fn is not None]


def _read_by(gradients: Sequence[torch.fx.Node | None]) -> set[torch.fx.Node]:
    """The values from which gradients are computed, as far as gradients have a derivative with respect to them."""
    found: set[torch.fx.Node] = set()
    stack = [node for node in gradients if node is not None]
    while stack:
        node = stack.pop()
        value = node.meta.get("val")
        has_derivative = not isinstance(value, torch.Tensor) or value.is_floating_point() or value.is_complex()
        if node not in found and has_derivative:
            found.add(node)
            stack += node.all_input_nodes[: 1 if node.target is _COMPARES else None]
    return {_value(node) for node in found}


def _value(node: Any) -> Any:
    while isinstance(node, torch.fx.Node) and node.target in _SAME:
        node = node.args[0]
    return node


def _call_of(output: torch.Tensor) -> Any:
    """The call that computed an output, perhaps behind other nodes of autograd."""
    node: Any = output.grad_fn
    while node is not None and not hasattr(node, "call"):
        node = next((edge[0] for edge in node.next_functions), None)
    return None if node is None else node.call


class _Watching(torch.autograd.Function):
    """Gradients as they are, with edges to results; their derivative looks whether the gradient of one of these is asked for."""

    @staticmethod
    def forward(ctx: Any, noted: Sequence[_Noted], count: int, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.noted, ctx.count = noted, count
        ctx.set_materialize_grads(False)
        return tuple(gradient.detach() for gradient in values[count:])

    @staticmethod
    def backward(ctx: Any, *tangents: torch.Tensor | None) -> Any:
        if any(noted.is_asked() for noted in ctx.noted):
            raise refusal(
                "the gradient of a result is asked for too (by torch.autograd.grad, a hook or retain_grad()), and the "
                "backward reads this result itself"
            )
        return None, None, *[None] * ctx.count, *tangents


def watching(results: Sequence[_Noted], gradients: Gradients) -> Gradients:
    """The gradients, whose derivative is refused where the gradient of one of these results is asked for."""
    places = [place for place, gradient in enumerate(gradients) if gradient is not None and gradient.requires_grad]
    if not places:
        return gradients
    found = list(gradients)
    alive = [result for noted in results if (result := noted.result()) is not None]
    with torch.enable_grad():
        watched = _Watching.apply(results, len(alive), *alive, *[found[place] for place in places])  # type: ignore[no-untyped-call]
    for place, gradient in zip(places, watched, strict=True):
        found[place] = gradient
    return found
