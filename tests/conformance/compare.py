"""Copies of inputs, and comparison of everything a caller can see of a result."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]


def _dovetail(function: Callable[..., Any]) -> Callable[..., Any]:
    import dovetail

    return dovetail.compile(function, fullgraph=True, backend="aten")


def _aot_eager(function: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function, backend="aot_eager", fullgraph=True)


def _dovetail_with_breaks(function: Callable[..., Any]) -> Callable[..., Any]:
    import dovetail

    return dovetail.compile(function, backend="aten")


def _torch_compile(function: Callable[..., Any]) -> Callable[..., Any]:
    import dovetail

    torch._dynamo.reset()
    backend = dovetail.torch_backend("aten", fullgraph=True)
    return torch.compile(function, backend=backend, fullgraph=True, dynamic=False)


def breaks(compiled: Any) -> list[str]:
    """Each graph break of something made by Dovetail: the reason and the user's line."""
    from dovetail.face.compile import CompiledFunction, CompiledModule
    from dovetail.face.explanation import events_of

    if not isinstance(compiled, (CompiledFunction, CompiledModule)):
        return []
    found = [event for event in events_of(compiled).events if event.name == "graph break"]
    return list(dict.fromkeys(f"{event.details['reason']} at {event.details['where']}" for event in found))


COMPILERS: dict[str, Compiler] = {
    "dovetail": _dovetail,
    "dovetail-with-breaks": _dovetail_with_breaks,
    "identity": lambda function: function,
    "aot_eager": _aot_eager,
    "torch.compile": _torch_compile,
}


def not_compiled(compiled: Any) -> str:
    """Why the last call of something made by Dovetail did not run compiled code, or '' where it did.

    Without this a fall back to eager would pass every comparison.
    """
    try:
        from dovetail.face.compile import CompiledFunction, CompiledModule
        from dovetail.face.explanation import compiled_function
    except ImportError:
        return ""
    if not isinstance(compiled, (CompiledFunction, CompiledModule)):
        return ""
    entries = compiled_function(compiled).entries
    if not entries:
        return "no entry was made"
    if entries[0].resume_point is not None:
        return "the graph is broken"
    return "" if entries[0].run is not None else f"it fell back to eager: {entries[0].reason}"


@functools.cache
def refusal_types() -> tuple[type[BaseException], ...]:
    """The exceptions that count as a refusal."""
    kinds: list[type[BaseException]] = [torch._dynamo.exc.TorchDynamoException]
    try:
        from dovetail.errors import DovetailError
    except ImportError as error:
        # Half-built packages are normal while other compilers than Dovetail are tried.
        warnings.warn(f"dovetail cannot be imported: {error}", stacklevel=2)
    else:
        kinds.append(DovetailError)
    return tuple(kinds)


@dataclass(frozen=True)
class Difference:
    """One thing that is not as in eager: what kind of thing, where, and both sides in words."""

    kind: str
    path: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind} of {self.path}: {self.text}"


def clone(values: Any) -> Any:
    """Fresh leaves with the same values, strides and ``requires_grad``; tensors that shared storage share it again.

    >>> x = torch.ones(2, requires_grad=True)
    >>> (y,) = clone([x])
    >>> y is not x and y.is_leaf and y.requires_grad
    True
    """
    memo: dict[int, Any] = {}
    seen: dict[int, Any] = {}
    # The memo goes by id, so what it has seen must stay alive.
    alive: list[Any] = []

    def one(leaf: Any) -> Any:
        if isinstance(leaf, torch.Generator):
            return leaf.clone_state()
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in seen:
            # A sample may be a non-leaf, which deepcopy refuses.
            alive.append(leaf.detach())
            # Sparse tensors have no storage to share.
            fresh = alive[-1].__deepcopy__(memo) if leaf.layout == torch.strided else alive[-1].clone()
            seen[id(leaf)] = fresh.requires_grad_(leaf.requires_grad)
        return seen[id(leaf)]

    return tree_map(one, values)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors of a nested value, in order."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with NaNs made one value, so that only their places are compared."""
    if tensor.is_floating_point() or tensor.is_complex():
        return torch.where(tensor.isnan(), torch.zeros_like(tensor), tensor)
    return tensor


def equal_values(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Bitwise, except that any NaN equals any NaN (the sign of zero counts).

    >>> equal_values(torch.tensor([float("nan"), 0.0]), torch.tensor([float("nan"), 0.0]))
    True
    >>> equal_values(torch.tensor([0.0]), torch.tensor([-0.0]))
    False
    """
    left, right = left.detach(), right.detach()
    if left.dtype == torch.complex32:
        # There is no comparison kernel for it, and the wider type holds every one of its values.
        left, right = left.to(torch.complex64), right.to(torch.complex64)
    if left.layout != torch.strided:
        left, right = left.to_dense(), right.to_dense()
    if not torch.equal(_bits(left), _bits(right)):
        return False
    if left.is_complex():
        left, right = torch.view_as_real(left.resolve_conj()), torch.view_as_real(right.resolve_conj())
    if left.is_floating_point():
        nan = left.isnan()
        return torch.equal(nan, right.isnan()) and torch.equal(left.signbit() | nan, right.signbit() | nan)
    return True


def max_abs_diff(left: torch.Tensor, right: torch.Tensor) -> float:
    """Largest absolute difference; inf where the shapes differ or only one side is NaN."""
    if left.shape != right.shape:
        return math.inf
    if left.numel() == 0:
        return 0.0
    a, b = (tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64) for tensor in (left, right))
    same = (a == b) | (a.isnan() & b.isnan())
    gap = torch.where(same, torch.zeros((), dtype=torch.float64), (a - b).abs())
    return math.inf if gap.isnan().any() else float(gap.max())


def _strides(tensor: torch.Tensor) -> tuple[int, ...] | None:
    return tensor.stride() if tensor.layout == torch.strided else None


def close(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors are equal by ``torch.testing``'s tolerances for their dtype."""
    try:
        torch.testing.assert_close(right, left, equal_nan=True, check_stride=False)
    except AssertionError:
        return False
    return True


def tensor_differences(left: torch.Tensor, right: torch.Tensor, path: str, values: str) -> Iterator[Difference]:
    """Compare two tensors; ``values`` is "exact", "close" or "ignored"."""
    facets: dict[str, Callable[[torch.Tensor], Any]] = {
        "type": type,
        "dtype": lambda tensor: tensor.dtype,
        "shape": lambda tensor: tuple(tensor.shape),
        "layout": lambda tensor: tensor.layout,
        "strides": _strides,
        "device": lambda tensor: tensor.device,
        "requires_grad": lambda tensor: tensor.requires_grad,
        "conj/neg bit": lambda tensor: (tensor.is_conj(), tensor.is_neg()),
    }
    comparable = True
    for name, read in facets.items():
        expected, actual = read(left), read(right)
        if expected != actual:
            comparable = comparable and name not in ("dtype", "shape", "layout")
            yield Difference(name, path, f"eager {expected}, compiled {actual}")
    if not comparable or values == "ignored" or equal_values(left, right):
        return
    near = close(left, right)
    if values == "close" and near:
        return
    # Both are wrong answers; the name of the second helps to find the cause.
    kind = "values, by rounding" if near else "values"
    yield Difference(kind, path, f"largest difference {max_abs_diff(left, right):.3g}")


def differences(left: Any, right: Any, path: str = "result", values: str = "exact") -> Iterator[Difference]:
    """Compare two results, containers and plain objects included. The left one is eager's."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        yield from tensor_differences(left, right, path, values)
    elif type(left) is not type(right):
        yield Difference("type", path, f"eager {type(left).__name__}, compiled {type(right).__name__}")
    elif isinstance(left, dict):
        if list(left) != list(right):
            yield Difference("keys", path, f"eager {list(left)}, compiled {list(right)}")
            return
        for key in left:
            yield from differences(left[key], right[key], f"{path}[{key!r}]", values)
    elif isinstance(left, (list, tuple)):
        if len(left) != len(right):
            yield Difference("length", path, f"eager {len(left)}, compiled {len(right)}")
            return
        for position, (a, b) in enumerate(zip(left, right, strict=True)):
            yield from differences(a, b, f"{path}[{position}]", values)
    elif isinstance(left, float) and (values != "exact" or left != left):
        if values != "ignored" and not math.isclose(left, right, rel_tol=1e-5, abs_tol=1e-8) and left == left:
            yield Difference("values", path, f"eager {left!r}, compiled {right!r}")
        if (left != left) != (right != right):
            yield Difference("values", path, f"eager {left!r}, compiled {right!r}")
    elif hasattr(left, "__dict__") and not callable(left) and "__eq__" not in vars(type(left)):
        yield from differences(vars(left), vars(right), f"{path}.__dict__", values)
    elif isinstance(left, torch.Generator):
        yield from differences(left.get_state(), right.get_state(), f"{path} state", values)
    elif left is not right and left != right:
        yield Difference("values", path, f"eager {left!r}, compiled {right!r}")


def aliasing(result: Any, inputs: Any) -> tuple[tuple[Any, ...], ...]:
    """For each returned tensor: the inputs it *is*, those and earlier results that share its storage, its offset."""
    given, returned = tensors_in(inputs), tensors_in(result)

    def storage(tensor: torch.Tensor) -> int:
        if tensor.layout != torch.strided or tensor.untyped_storage().nbytes() == 0:
            return -1
        return tensor.untyped_storage().data_ptr()

    facts = []
    for place, tensor in enumerate(returned):
        here = storage(tensor)
        same = tuple(index for index, other in enumerate(given) if other is tensor)
        shared = tuple(index for index, other in enumerate(given) if here != -1 and storage(other) == here)
        earlier = tuple(index for index in range(place) if here != -1 and storage(returned[index]) == here)
        again = tuple(index for index in range(place) if returned[index] is tensor)
        facts.append((same, shared, earlier, again, tensor.storage_offset() if shared else 0))
    return tuple(facts)
