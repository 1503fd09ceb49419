"""Eager is the oracle: run a program eagerly and compiled, from the same state, and compare everything that can be seen."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

import dovetail


def clone_inputs(values: Any) -> Any:
    """Deep copies of tensors that keep leaf-ness, strides and requires_grad."""
    return copy.deepcopy(values)


def same_tensor(left: torch.Tensor, right: torch.Tensor, path: str, exact: bool = True) -> None:
    """Assert that two tensors agree in value and in everything that can be asked of them."""
    assert left.dtype == right.dtype, f"{path}: dtype {left.dtype} and {right.dtype}"
    assert left.shape == right.shape, f"{path}: shape {tuple(left.shape)} and {tuple(right.shape)}"
    assert left.device == right.device, f"{path}: device"
    assert left.requires_grad == right.requires_grad, (
        f"{path}: requires_grad {left.requires_grad}, {right.requires_grad}"
    )
    assert left.is_leaf == right.is_leaf, f"{path}: is_leaf {left.is_leaf}, {right.is_leaf}"
    assert left.stride() == right.stride(), f"{path}: stride {left.stride()} and {right.stride()}"
    if exact:
        assert torch.equal(left.nan_to_num(), right.nan_to_num()), f"{path}: {(left - right).abs().max()}"
        assert torch.equal(left.isnan(), right.isnan()), f"{path}: nan"
    else:
        torch.testing.assert_close(left, right, msg=lambda text: f"{path}: {text}")


def same(left: Any, right: Any, path: str = "result", exact: bool = True) -> None:
    """Assert that two results agree, containers and objects included."""
    if isinstance(left, torch.Tensor):
        assert isinstance(right, torch.Tensor), f"{path}: {type(right)}"
        same_tensor(left, right, path, exact)
        return
    assert type(left) is type(right), f"{path}: {type(left)} and {type(right)}"
    if isinstance(left, dict):
        assert list(left) == list(right), f"{path}: keys"
        for key in left:
            same(left[key], right[key], f"{path}[{key!r}]", exact)
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right), f"{path}: length"
        for position, (a, b) in enumerate(zip(left, right, strict=True)):
            same(a, b, f"{path}[{position}]", exact)
    elif hasattr(left, "__dict__") and not isinstance(left, (type, torch.nn.Module)) and not callable(left):
        same(vars(left), vars(right), f"{path}.__dict__", exact)
    else:
        assert left == right or (left != left and right != right), f"{path}: {left!r} and {right!r}"


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors of a result, in order."""
    leaves, _ = tree_flatten(value)
    found = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif hasattr(leaf, "__dict__") and not isinstance(leaf, (type, torch.nn.Module)) and not callable(leaf):
            found.extend(tensors_in(vars(leaf)))
    return found


def backward(result: Any) -> None:
    """Run a backward from every differentiable output, with fixed incoming gradients."""
    roots = [tensor for tensor in tensors_in(result) if tensor.requires_grad]
    if not roots:
        return
    generator = torch.Generator().manual_seed(7)
    torch.autograd.backward(
        roots, [torch.randn(root.shape, generator=generator, dtype=torch.float32).to(root.dtype) for root in roots]
    )


def check(
    function: Callable[..., Any],
    *args: Any,
    backend: str = "aten",
    exact: bool = True,
    fullgraph: bool = True,
    calls: int = 2,
) -> Any:
    """Run ``function`` eagerly and compiled on copies of ``args``, forward and backward, and compare. Returns the compiled."""
    compiled = dovetail.compile(function, backend=backend, fullgraph=fullgraph)
    eager_args, compiled_args = clone_inputs(args), clone_inputs(args)
    for _ in range(calls):
        torch.manual_seed(0)
        expected = function(*eager_args)
        expected_state = torch.get_rng_state()
        torch.manual_seed(0)
        actual = compiled(*compiled_args)
        assert torch.equal(expected_state, torch.get_rng_state()), "random state"
        same(expected, actual, exact=exact)
        backward(expected)
        backward(actual)
        same(list(eager_args), list(compiled_args), "argument", exact)
        for left, right in zip(tensors_in(eager_args), tensors_in(compiled_args), strict=True):
            if left.is_leaf and right.is_leaf:
                assert (left.grad is None) == (right.grad is None), "a gradient is missing or too many"
                if left.grad is not None:
                    assert right.grad is not None
                    same_tensor(left.grad, right.grad, "gradient", exact)
    return compiled


def check_module(module: torch.nn.Module, *args: Any, backend: str = "aten", exact: bool = True, calls: int = 2) -> Any:
    """The same for a module: its parameters' gradients and its buffers are compared as well."""
    twin = copy.deepcopy(module)
    compiled = dovetail.compile(twin, backend=backend, fullgraph=True)
    eager_args, compiled_args = clone_inputs(args), clone_inputs(args)
    for _ in range(calls):
        torch.manual_seed(0)
        expected = module(*eager_args)
        torch.manual_seed(0)
        actual = compiled(*compiled_args)
        same(expected, actual, exact=exact)
        backward(expected)
        backward(actual)
        for (name, left), right in zip(module.named_parameters(), twin.parameters(), strict=True):
            assert (left.grad is None) == (right.grad is None), f"gradient of {name}"
            if left.grad is not None:
                assert right.grad is not None
                same_tensor(left.grad, right.grad, f"gradient of {name}", exact)
        for (name, left), right in zip(module.named_buffers(), twin.buffers(), strict=True):
            same_tensor(left, right, f"buffer {name}", exact)
    return compiled
