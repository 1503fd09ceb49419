"""Runs a small program eagerly and compiled, and notes everything about memory and autograd that can be seen afterwards."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import dovetail
from tests.differential import differences, tensors_in

Inputs = Sequence[torch.Tensor]
Later = Callable[[Any, Inputs], Any]


def _nothing_more(result: Any, inputs: Inputs) -> Any:
    return None


@dataclass(frozen=True)
class Program:
    """``function`` on the tensors that ``make`` makes anew for each run; ``later`` is run on result and inputs, uncompiled."""

    function: Callable[..., Any]
    make: Callable[[], Inputs]
    later: Later = _nothing_more
    name: str = ""
    grad_enabled: bool = True

    def __str__(self) -> str:
        return self.name or self.function.__name__


def _facts(value: torch.Tensor) -> dict[str, Any]:
    return {
        "values": value.detach().resolve_conj().resolve_neg().clone().double()
        if not value.is_complex()
        else torch.view_as_real(value.detach().resolve_conj().clone()),
        "dtype": value.dtype,
        "shape": tuple(value.shape),
        "stride": value.stride(),
        "offset": value.storage_offset(),
        "storage bytes": value.untyped_storage().nbytes() if value._base is not None else None,
        "requires_grad": value.requires_grad,
        "is_leaf": value.is_leaf,
        "has base": value._base is not None,
        "class": type(value).__name__,
        "inference": value.is_inference(),
    }


def _groups(items: Sequence[Any]) -> list[int]:
    """For each item, the place of the first one that is equal."""
    return [items.index(item) for item in items]


def _relations(inputs: Inputs, outputs: Sequence[torch.Tensor]) -> dict[str, Any]:
    everything = [*inputs, *outputs]
    bases = [value._base if value._base is not None else value for value in everything]
    return {
        "same object": _groups([id(value) for value in everything]),
        "same storage": _groups([value.untyped_storage()._cdata for value in everything]),
        "same base": _groups([id(value) for value in bases]),
    }


def _counters(values: Sequence[torch.Tensor]) -> list[list[int]]:
    """For each tensor, which versions go up when its own does."""
    values = [value for value in values if not value.is_inference()]
    found = []
    for value in values:
        before = [other._version for other in values]
        torch.autograd.graph.increment_version(value)
        found.append([place for place, other in enumerate(values) if other._version != before[place]])
    return found


def _gradient(value: torch.Tensor) -> Any:
    try:
        if not value.is_leaf or value.grad is None:
            return None
    except RuntimeError as error:  # a view whose base was written to, and that may not be asked for its history
        return _error(error)
    return _facts(value.grad)


def _error(error: BaseException) -> tuple[str, str]:
    text = str(error)
    for part in ("modified by an inplace operation", "leaf Variable", "view was created", "does not require grad"):
        if part in text:
            return (type(error).__name__, part)
    return (type(error).__name__, "")


def observe(run: Callable[..., Any], program: Program) -> dict[str, Any]:
    """Everything that can be seen of one run, as plain data."""
    torch.manual_seed(0)
    inputs = list(program.make())
    seen: dict[str, Any] = {}
    versions = [None if value.is_inference() else value._version for value in inputs]
    nodes = [value.grad_fn for value in inputs]
    before = [value.detach().clone() for value in inputs]
    try:
        with torch.set_grad_enabled(program.grad_enabled):
            result = run(*inputs)
    except RuntimeError as error:
        seen["error"] = _error(error)
        seen["inputs after the error"] = [_facts(value) for value in inputs]
        return seen
    outputs = tensors_in(result)
    seen["inputs"] = [_facts(value) for value in inputs]
    seen["outputs"] = [_facts(value) for value in outputs]
    returned = outputs
    # Of an input whose values are what they were, nobody needs to know that it was written to.
    seen["written"] = [
        version is not None and value._version > version and not (value.shape == old.shape and torch.equal(value, old))
        for value, version, old in zip(inputs, versions, before, strict=True)
    ]
    seen["relations"] = _relations(inputs, outputs)
    try:
        later = program.later(result, inputs)
        seen["later"] = [_facts(value) for value in tensors_in(later)]
        outputs = [*outputs, *tensors_in(later)]
        # The gradient of an input that was no result of the call is summed up in another order: not to the last bit.
        outputs += [value for value, node in zip(inputs, nodes, strict=True) if value.grad_fn is not node]
        roots = [value for value in dict.fromkeys(outputs) if value.requires_grad and value.grad_fn is not None]
        if roots:
            generator = torch.Generator().manual_seed(3)
            tangents = [torch.randn(root.shape, generator=generator).to(root.dtype) for root in roots]
            torch.autograd.backward(roots, tangents)
    except (RuntimeError, AssertionError) as error:
        seen["later error"] = _error(error)
    seen["gradients"] = [_gradient(value) for value in [*inputs, *outputs]]
    seen["gradients of roots"] = [_gradient(getattr(value, "root", value)) for value in inputs]
    seen["same version counter"] = _counters([*inputs, *returned])
    return seen


def compare(program: Program, backend: str = "aten", calls: int = 2, **options: Any) -> tuple[list[str], str]:
    """Differences over some calls, and why the program did not run as one graph (empty if it did)."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compiled = dovetail.compile(program.function, backend=backend, **options)
        found: list[str] = []
        for call in range(calls):
            expected = observe(program.function, program)
            actual = observe(compiled, program)
            found += [str(difference) for difference in differences(expected, actual, f"call {call}")]
    categories = (dovetail.errors.EagerFallbackWarning, dovetail.errors.GraphBreakWarning)
    reasons = [str(item.message).splitlines()[0] for item in caught if issubclass(item.category, categories)]
    return found, "; ".join(reasons)
