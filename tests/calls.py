"""Run one function over a sequence of calls with changing sizes and numbers, eagerly and compiled, and compare."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

import dovetail
from tests.differential import backward, clone_inputs, same, same_tensor, tensors_in


def check_calls(
    function: Callable[..., Any],
    calls: Sequence[tuple[Any, ...]],
    *,
    entries: int | None = None,
    backend: str = "aten",
    exact: bool = True,
    dynamic: bool | None = None,
) -> Any:
    """Every call must return and leave behind what eager does, with its gradients; ``entries`` bounds what was compiled.

    A module is called directly: its parameters and buffers are compared after every call.
    """
    twin = copy.deepcopy(function) if isinstance(function, torch.nn.Module) else function
    compiled = dovetail.compile(twin, backend=backend, fullgraph=True, dynamic=dynamic)
    for number, args in enumerate(calls):
        eager_args, compiled_args = clone_inputs(args), clone_inputs(args)
        torch.manual_seed(number)
        expected = function(*eager_args)
        state = torch.get_rng_state()
        torch.manual_seed(number)
        actual = compiled(*compiled_args)
        assert torch.equal(state, torch.get_rng_state()), f"call {number}: random state"
        same(expected, actual, f"call {number}", exact=exact)
        backward(expected)
        backward(actual)
        same(list(eager_args), list(compiled_args), f"call {number}: argument", exact)
        for left, right in zip(tensors_in(eager_args), tensors_in(compiled_args), strict=True):
            if left.is_leaf and right.is_leaf:
                assert (left.grad is None) == (right.grad is None), f"call {number}: gradient"
                if left.grad is not None and right.grad is not None:
                    same_tensor(left.grad, right.grad, f"call {number}: gradient", exact)
        if isinstance(function, torch.nn.Module) and isinstance(twin, torch.nn.Module):
            for name, left in function.state_dict(keep_vars=True).items():
                right = twin.state_dict(keep_vars=True)[name]
                same_tensor(left.detach(), right.detach(), f"call {number}: {name}", exact)
                if left.grad is not None:
                    assert right.grad is not None, f"call {number}: gradient of {name}"
                    same_tensor(left.grad, right.grad, f"call {number}: gradient of {name}", exact)
    if entries is not None:
        made = entries_of(compiled)
        assert made <= entries, f"{made} entries: {[str(event) for event in dovetail.events_of(compiled).events]}"
    return compiled


def entries_of(compiled: Any) -> int:
    """How many entries a compiled function or module has."""
    from dovetail.face.explanation import compiled_function

    return len(compiled_function(compiled).entries)


def randn(*shape: int, grad: bool = False) -> torch.Tensor:
    """Random numbers that depend on the shape alone."""
    generator = torch.Generator().manual_seed(hash(shape) % 1000)
    return torch.randn(*shape, generator=generator).requires_grad_(grad)
