"""Functions of torch whose C++ asks for plain sizes, written with operators that take symbolic ones.

Called as they are, they would hold the graph to the sizes of today's call. What is called here instead are the operators that
they are made of, so that the numbers are theirs; with plain sizes nothing changes. Found by calling torch's functions with
sizes that change and looking at which of them made a graph for each (torch 2.13).
"""

from __future__ import annotations

from typing import Any

import torch

from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import rule
from dovetail.torch_private import sizes as private_sizes

_functional = torch.nn.functional
_aten = torch.ops.aten


def _have_symbols(*values: Any) -> bool:
    return all(isinstance(value, torch.Tensor) for value in values) and any(map(private_sizes.has_symbols, values))


def _one(value: Any) -> Any:
    """A number that may also be given as a sequence of one; None where it is neither."""
    items = list(value) if isinstance(value, (list, tuple)) else [value]
    return items[0] if len(items) == 1 and type(items[0]) in (int, torch.SymInt) else None


def _pooled(
    interpreter: TracingInterpreter,
    input: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Maxima and indices, by the operator for images of one row; None where torch's own function does it, or refuses it."""
    if not _have_symbols(input) or input.dim() not in (2, 3):
        return None
    stride = kernel_size if stride is None or stride in ((), []) else stride
    numbers = [_one(value) for value in (kernel_size, stride, padding, dilation)]
    if any(number is None for number in numbers) or numbers[1] <= 0:
        return None
    kernel, step, border, spread = numbers
    image = interpreter.call_torch(torch.Tensor.unsqueeze, (input, -2), {})
    sizes = ([1, kernel], [1, step], [0, border], [1, spread], ceil_mode)
    results = interpreter.call_torch(_aten.max_pool2d_with_indices.default, (image, *sizes), {})
    maxima, indices = (interpreter.call_torch(torch.Tensor.squeeze, (item, -2), {}) for item in results)
    return maxima, indices


def _register_pooling(function: Any, always_indices: bool) -> None:
    def handler(interpreter: TracingInterpreter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = _pooled(interpreter, *args, **kwargs)
        if result is None:
            return interpreter.call_torch(function, args, kwargs)
        with_indices = always_indices or kwargs.get("return_indices", args[6] if len(args) > 6 else False)
        return result if with_indices else result[0]

    rule(function)(handler)


_register_pooling(_functional.max_pool1d, always_indices=False)
_register_pooling(torch.max_pool1d, always_indices=False)
_register_pooling(_functional.max_pool1d_with_indices, always_indices=True)
_register_pooling(torch.max_pool1d_with_indices, always_indices=True)


@rule(_functional.cosine_similarity, torch.cosine_similarity)
def _cosine_similarity(interpreter: TracingInterpreter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = _cosine(interpreter, *args, **kwargs)
    return interpreter.call_torch(_functional.cosine_similarity, args, kwargs) if result is None else result


def _cosine(interpreter: TracingInterpreter, x1: Any, x2: Any, dim: int = 1, eps: float = 1e-8) -> Any:
    if not _have_symbols(x1, x2) or x1.dtype != x2.dtype or not x1.is_floating_point() or type(eps) is not float:
        return None

    def call(function: Any, *arguments: Any, **keywords: Any) -> Any:
        return interpreter.call_torch(function, arguments, keywords)

    first, second = call(torch.broadcast_tensors, x1, x2)
    bounded = []
    for vector in (first, second):
        norm = call(_aten.linalg_vector_norm.default, vector, 2, [dim], True)
        # The bound has no gradient of its own: what divides is the norm, with another value.
        value = call(torch.Tensor.clone, norm)
        with torch.no_grad():
            bound = call(torch.scalar_tensor, eps, dtype=vector.dtype, device=vector.device)
            call(torch.Tensor.copy_, value, call(_aten.clamp_min.Tensor, value, bound))
        bounded.append(value)
    directions = [call(torch.div, *pair) for pair in zip((first, second), bounded, strict=True)]
    return call(torch.sum, call(torch.mul, *directions), [dim])


def _register_random(function: Any) -> None:
    def handler(interpreter: TracingInterpreter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if "generator" in kwargs and kwargs["generator"] is None:
            # The same numbers; only the operator without the argument takes symbolic sizes.
            kwargs = {name: value for name, value in kwargs.items() if name != "generator"}
        return interpreter.call_torch(function, args, kwargs)

    rule(function)(handler)


for _function in (torch.randn, torch.rand, torch.randint):
    _register_random(_function)
