"""The formulas of native autograd nodes, and the engine's check of their results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.overrides import handle_torch_function, has_torch_function

from dovetail.frontend.rules import rule
from dovetail.torch_private import engine as private_engine

if TYPE_CHECKING:
    from dovetail.frontend.protocol import TracingInterpreter

#: A value without ``__torch_function__``: only a mode can make torch find one.
_NO_TENSOR = (None,)
_TRACING_PREFIX = "[Compiled Autograd Tracing:]"


class NodeFunction:
    """The formula of one kind of native autograd node: ``formula(gradients, *saved values) -> gradients``."""

    _known: ClassVar[dict[str, NodeFunction]] = {}

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name = name
        #: A node of a C++ extension, whose code cannot be traced.
        self.is_custom = name.startswith("CppNode")
        self.function = function
        self.__name__ = name
        self.__qualname__ = name
        self.__module__ = __name__

    @classmethod
    def named(cls, name: str) -> NodeFunction:
        """The formula with a name that the engine has bound."""
        if name not in cls._known:
            cls._known[name] = cls(name, private_engine.node_function(name))
        return cls._known[name]

    def __call__(self, *args: Any) -> Any:
        """Compute the gradients; ``__torch_function__`` of a mode may override the call, as it may for torch's functions."""
        if has_torch_function(_NO_TENSOR):
            return handle_torch_function(self, (), *args)
        return self.compute(*args)

    def compute(self, *args: Any) -> Any:
        """Compute the gradients of the node's inputs."""
        return self.function(*args)

    def __repr__(self) -> str:
        return self.name


class OutputCheck(NodeFunction):
    """The engine's check of a node's gradients: it sums them to the right shape and casts them to the right type."""

    def __init__(self, node_name: str) -> None:
        super().__init__("validate_outputs", private_engine.node_function("validate_outputs"))
        self.node_name = node_name

    def compute(self, *args: Any) -> Any:
        """Check the gradients; errors name the node, as eager's do."""
        try:
            return self.function(*args)
        except RuntimeError as error:
            text = str(error)
            if not text.startswith(_TRACING_PREFIX):
                raise
            words = text.removeprefix(_TRACING_PREFIX).strip()
        raise RuntimeError(f"Function {self.node_name} returned an {words}")


def copy_slices_prologue(
    gradients: Sequence[Any],
    base_sizes: Sequence[int],
    base_strides: Sequence[int],
    base_offset: int,
    view_sizes: Sequence[int],
    view_strides: Sequence[int],
    view_offset: int,
) -> tuple[Any, Any, Any]:
    """Split the gradient of a base whose view was written in place: a copy of it, its written part, and a copy of the part."""
    gradient = gradients[0]
    if gradient is None:
        return None, None, None
    result = gradient.new_empty_strided(base_sizes, base_strides)
    result.copy_(gradient)
    part = result.as_strided(view_sizes, view_strides, view_offset - base_offset)
    return result, part, part.clone(memory_format=torch.contiguous_format)


def copy_slices_epilogue(needed: Sequence[bool], result: Any, gradients: Sequence[Any], part: Any) -> list[Any]:
    """Put the gradient of the old values, from the write's own node, into that of the base."""
    results: list[Any] = [None] * len(needed)
    for index, (flag, gradient) in enumerate(zip(needed, gradients, strict=True)):
        if not flag or gradient is None:
            continue
        if index == 0:
            part.copy_(gradient)
            results[0] = result
        else:
            results[index] = gradient
    return results


@rule(NodeFunction.__call__)
def _call_formula(interpreter: TracingInterpreter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the formula natively: it computes on traced tensors like any function of torch."""
    formula, *values = args
    return interpreter.native(formula, tuple(values), kwargs)
