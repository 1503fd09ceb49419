"""More functions of torch whose C++ asks for plain sizes, as the operators that they are made of, in the same order.

:mod:`dovetail.rules.sizes.plain_size_calls` covers poolings, this file statistics, products and grids. Each formula is for the
arguments that are common; for others, and with plain sizes, torch's own function is called (checked on torch 2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import method_rule, rule
from dovetail.rules.sizes.recurrent_networks import record_call
from dovetail.torch_private import sizes as private_sizes
from dovetail.torch_private import state as private_state

_functional = torch.nn.functional


class Call:
    """Calls functions of torch in the program of an interpreter."""

    def __init__(self, interpreter: TracingInterpreter) -> None:
        self._interpreter = interpreter

    def __call__(self, function: Any, *arguments: Any, **keywords: Any) -> Any:
        """One of torch's own."""
        if function is torch.linspace:
            return rule[function](self._interpreter, arguments, keywords)
        return self._interpreter.call_torch(function, arguments, keywords)

    @property
    def is_exact(self) -> bool:
        """Whether the graph is to be eager's to the last bit."""
        found: bool = self._interpreter.trace.settings.exact
        return found

    def record(self, function: Callable[..., Any], *tensors: torch.Tensor) -> Any:
        """One of Dovetail's: the program has it as one call."""
        return record_call(self._interpreter, function, tensors)


def formula(*functions: Any, always: bool = False, when_exact: bool = False) -> Callable[[Any], Any]:
    """Register ``compute(call, *args, **kwargs)``, which returns None where torch's own function is to do it. ``always``: with
    plain sizes too; ``when_exact``: then where the graph is to be eager's to the last bit.
    """

    def register(compute: Any) -> Any:
        def computed(interpreter: TracingInterpreter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            arguments = tuple(map(interpreter.values.for_native, args))
            tensors = [item for item in (*arguments, *kwargs.values()) if isinstance(item, torch.Tensor)]
            own = always or (when_exact and interpreter.trace.settings.exact)
            if own or any(map(private_sizes.has_symbols, (*tensors, *_items(arguments)))):
                return compute(Call(interpreter), *arguments, **kwargs)
            return None

        for function in functions:

            def handler(
                interpreter: TracingInterpreter, args: tuple[Any, ...], kwargs: dict[str, Any], function: Any = function
            ) -> Any:
                result = computed(interpreter, args, kwargs)
                return interpreter.call_torch(function, args, kwargs) if result is None else result

            rule(function)(handler)

        def method(
            interpreter: TracingInterpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> Any:
            owner = getattr(function, "__self__", None)
            result = computed(interpreter, (owner, *args), kwargs) if isinstance(owner, torch.Tensor) else None
            return NotImplemented if result is None else result

        if hasattr(torch.Tensor, functions[0].__name__):
            method_rule(functions[0].__name__)(method)
        return compute

    return register


def _items(arguments: Sequence[Any]) -> list[Any]:
    return [item for argument in arguments if isinstance(argument, (list, tuple)) for item in argument]


# Its C++ compares numbers in tensors, which a trace does not always know.
@formula(torch.cov, always=True)
def _cov(call: Call, input: torch.Tensor, *, correction: int = 1, fweights: Any = None, aweights: Any = None) -> Any:
    if fweights is not None or aweights is not None or not 0 < input.dim() < 3 or type(correction) is not int:
        return None
    if not (input.is_floating_point() or input.is_complex()):
        return None
    rows = input if input.dim() == 2 else call(torch.unsqueeze, input, 0)
    if not rows.shape[1] > max(correction, 0):
        return None
    count = call(torch.scalar_tensor, rows.shape[1], dtype=torch.int64, device=input.device)
    mean = call(torch.div, call(torch.sum, rows, [1]), count)
    centred = call(torch.sub, rows, call(torch.unsqueeze, mean, 1))
    products = call(torch.mm, centred, call(torch.conj, call(torch.t, centred)))
    return call(torch.squeeze, call(torch.true_divide, products, call(torch.sub, count, correction)))


@formula(torch.corrcoef, always=True)
def _corrcoef(call: Call, input: torch.Tensor) -> Any:
    covariance = None if input.is_complex() else _cov(call, input)
    if covariance is None or covariance.dim() != 2:
        return None
    deviation = call(torch.sqrt, call(torch.diag, covariance))
    scaled = call(torch.div, covariance, call(torch.Tensor.view, deviation, [-1, 1]))
    return call(torch.clip, call(torch.div, scaled, call(torch.Tensor.view, deviation, [1, -1])), -1, 1)


@formula(torch.kron)
def _kron(call: Call, input: torch.Tensor, other: torch.Tensor) -> Any:
    if not isinstance(other, torch.Tensor):
        return None
    rank = max(input.dim(), other.dim())
    left = [1] * (rank - input.dim()) + list(input.shape)
    right = [1] * (rank - other.dim()) + list(other.shape)
    outer = call(torch.Tensor.reshape, input, [size for item in left for size in (item, 1)])
    inner = call(torch.Tensor.reshape, other, [size for item in right for size in (1, item)])
    return call(torch.Tensor.reshape, call(torch.mul, outer, inner), [a * b for a, b in zip(left, right, strict=True)])


@formula(torch.block_diag)
def _block_diag(call: Call, *tensors: torch.Tensor) -> Any:
    first = tensors[0]
    if not all(isinstance(item, torch.Tensor) and item.dim() == 2 for item in tensors):
        return None
    if any(item.dtype != first.dtype or item.device != first.device for item in tensors):
        return None
    height, width = (sum(item.shape[dim] for item in tensors) for dim in (0, 1))
    result = call(torch.zeros, [height, width], dtype=first.dtype, device=first.device)
    row = column = 0
    for item in tensors:
        place = call(torch.narrow, result, 0, row, item.shape[0])
        call(torch.Tensor.copy_, call(torch.narrow, place, 1, column, item.shape[1]), item)
        row, column = row + item.shape[0], column + item.shape[1]
    return result


def _from_minus_one(call: Call, theta: torch.Tensor, steps: Any, align_corners: bool | None) -> Any:
    line = call(torch.linspace, -1, 1, steps, dtype=theta.dtype, device=theta.device)
    return line if align_corners else call(torch.div, call(torch.mul, line, steps - 1), steps)


@formula(_functional.affine_grid)
def _affine_grid(call: Call, theta: torch.Tensor, size: Any, align_corners: bool | None = None) -> Any:
    is_image = isinstance(size, (list, tuple)) and len(size) == 4 and theta.dim() == 3 and align_corners is not None
    if not is_image or not theta.is_floating_point() or private_state.is_any_autocast_on():
        return None
    count, _, height, width = size
    if not (height > 1 and width > 1 and theta.shape[1] == 2 and theta.shape[2] == 3 and theta.shape[0] == count):
        return None
    grid = call(torch.empty, [count, height, width, 3], dtype=theta.dtype, device=theta.device)
    across = _from_minus_one(call, theta, width, align_corners)
    down = call(torch.unsqueeze, _from_minus_one(call, theta, height, align_corners), -1)
    call(torch.Tensor.copy_, call(torch.select, grid, -1, 0), across)
    call(torch.Tensor.copy_, call(torch.select, grid, -1, 1), down)
    call(torch.Tensor.fill_, call(torch.select, grid, -1, 2), 1)
    points = call(torch.Tensor.view, grid, [count, height * width, 3])
    moved = call(torch.bmm, points, call(torch.transpose, theta, 1, 2))
    return call(torch.Tensor.view, moved, [count, height, width, 2])


@formula(torch.gradient)
def _gradient(call: Call, input: torch.Tensor, *, spacing: Any = None, dim: Any = None, edge_order: int = 1) -> Any:
    if (spacing is not None and type(spacing) not in (int, float)) or edge_order not in (1, 2) or input.dim() == 0:
        return None
    dims = list(range(input.dim())) if dim is None else [dim] if type(dim) is int else list(dim)
    dims = [item + input.dim() if item < 0 else item for item in dims]
    if not all(0 <= item < input.dim() and input.shape[item] > edge_order for item in dims):
        return None
    step = 1 if spacing is None else spacing
    return tuple(_differences(call, input, item, step, edge_order) for item in dims)


def _differences(call: Call, input: torch.Tensor, dim: int, step: float, edge_order: int) -> torch.Tensor:
    length = input.shape[dim]

    def part(start: Any, count: Any = 1) -> torch.Tensor:
        found: torch.Tensor = call(torch.narrow, input, dim, start, count)
        return found

    def difference(left: torch.Tensor, right: torch.Tensor) -> Any:
        return call(torch.sub, left, right)

    # In the order in which the C++ makes its nodes, in which autograd adds up the gradients: right operands come first.
    lower, upper = part(0, length - 2), part(2, length - 2)
    within = call(torch.div, difference(upper, lower), step)
    if edge_order == 1:
        here, there = part(0), part(1)
        before = difference(there, here)
        here, there = part(length - 2), part(length - 1)
        after = difference(there, here)
    else:
        third, second, first = (call(torch.mul, part(at), by) for at, by in ((2, 0.5), (1, 2), (0, -1.5)))
        before = difference(call(torch.add, first, second), third)
        third, second, first = (call(torch.mul, part(length - at), by) for at, by in ((1, 1.5), (2, 2), (3, 0.5)))
        after = call(torch.add, difference(first, second), third)
    before, after = (call(torch.div, item, step) for item in (before, after))
    found: torch.Tensor = call(torch.cat, [before, call(torch.div, within, 2), after], dim)
    return found
