"""Operators of ``torch.library``: what of them a graph cannot hold as eager runs it, their registration; other tracers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch

from dovetail.frontend.code.frame import Break
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, Keywords, native_rule, rule
from dovetail.torch_private import libraries as private_libraries
from dovetail.torch_private import tensors as private_tensors
from dovetail.torch_private import trees as private_trees
from dovetail.trace.overrides import EVERY, RefusedOperatorError, Run

_OWN = frozenset({"aten", "prim", "prims", "dovetail", "higher_order"})


def _of_a_library(interpreter: TracingInterpreter, function: Any, args: Arguments, kwargs: Keywords) -> Any:
    """A function of ``torch.library``, or an operator as an object, which is called."""
    if (name := getattr(function, "__name__", "__call__")) == "__call__":
        return function(*args, **kwargs)
    # The interpreter's stand-ins of the user's functions would be kept.
    raise Break(f"{name} of torch.library is called", "register operators outside of the compiled function")


native_rule.update(dict.fromkeys(private_libraries.REGISTERING, _of_a_library))


@native_rule(private_libraries.TRACING)
def _traced_apart(interpreter: TracingInterpreter, function: Any, args: Arguments, kwargs: Keywords) -> Any:
    """``make_fx``, or what it returns: its graph would hold this capture's tensors as constants."""
    if getattr(function, "__name__", "") not in ("make_fx", "wrapped"):
        return function(*args, **kwargs)
    raise Break("make_fx traces a program", "call make_fx outside of the compiled function")


def _functionalizes(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> NoReturn:
    """The capture functionalises by the same state, and its tensors are wrapped already."""
    raise Break("tensors are functionalised", "use torch.func.functionalize, or do this outside of the function")


rule.update(dict.fromkeys(private_libraries.FUNCTIONALIZING, _functionalizes))


def _written(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    given = {**dict(zip((item.name for item in operator._schema.arguments), args)), **kwargs}
    found = [given.get(item.name) for item in operator._schema.arguments if item.is_write]
    if any(isinstance(item, list) and any(one is None for one in item) for item in found):
        # Torch's functionalisation takes the places of such a list for a dictionary: seen with 2.13.
        raise RefusedOperatorError(f"{operator} writes to a list of tensors with None in it", advice="leave None out")
    return [item for item in private_trees.tree_leaves(found) if item is not None]


@EVERY.append
def _check(run: Run, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    if operator.namespace not in _OWN:
        _check_kernel(operator, args, kwargs)
        _check_memory(operator, args, kwargs)
    return NotImplemented


def _check_kernel(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse an operator that autograd has no kernel for, where it records what the operator's own kernel does."""
    if not private_libraries.is_recorded_inside(operator):
        return
    tensors = [item for item in private_trees.tree_leaves((args, kwargs)) if isinstance(item, torch.Tensor)]
    if torch.is_grad_enabled() and any(item.requires_grad for item in tensors):
        raise RefusedOperatorError(
            f"{operator} has no gradient of its own, and eager differentiates what its kernel calls",
            advice="register one with torch.library.register_autograd, or define the operator with torch.library.custom_op",
        )
    # Autograd counts the writes of the kernel's own operators.
    torch.autograd.graph.increment_version(
        [item for item in _written(operator, args, kwargs) if not item.is_inference()]
    )


def _check_memory(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse a write to memory that another argument shares, unless autograd knows both as views of one tensor.

    Torch clones what each is a view of, and writes to the clones.
    """
    if not operator._schema.is_mutable:
        return
    if any(item.alias_info is not None for item in operator._schema.returns):
        raise RefusedOperatorError(
            f"{operator} writes to an argument and returns it",
            advice="define it without a result: (Tensor(a!) x) -> ()",
        )
    tensors = [item for item in private_trees.tree_leaves((args, kwargs)) if isinstance(item, torch.Tensor)]
    for written in _written(operator, args, kwargs):
        for other in tensors:
            if (
                other is not written
                and private_tensors.share_memory([written, other])
                and _base(written) is not _base(other)
            ):
                raise RefusedOperatorError(
                    f"{operator} writes to a tensor that shares memory with another argument",
                    advice="clone one of them",
                )


def _base(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if torch.is_inference_mode_enabled() or tensor._base is None else tensor._base
