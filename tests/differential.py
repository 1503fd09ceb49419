"""Eager is the oracle: run a program eagerly and compiled, from the same state, and compare everything that can be seen.

:func:`same` and :func:`differences` compare two values, :func:`compare_call` compares one call on both sides, and
:func:`check`, :func:`check_calls` and :func:`check_training` compile a function or a module and compare several calls::

    check_calls(function, calls)
      compare_call(eager, compiled, args)     results, aliasing, random state, gradients, arguments after the call
        same(expected, actual)                AssertionError with the first few of
          differences(expected, actual)       type, dtype, shape, strides, flags, values
      compare_modules(eager, compiled)        parameters, their gradients, buffers

``tests/README.md`` shows how to write a test with them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves

import dovetail

# --- copies -----------------------------------------------------------------------------------------------------------


#: A capture makes a CUDA build of torch without a GPU start threads for backwards; a fork then runs none.
backward_in_forks = pytest.mark.skipif(
    torch.backends.cuda.is_built() and not torch.cuda.is_available(),
    reason="a CUDA build of torch without a GPU: no backward in a forked process",
)


def clone_inputs(values: Any) -> Any:
    """A deep copy: fresh leaves with the same values, strides and ``requires_grad``; shared storage is shared again.

    >>> x = torch.ones(2, requires_grad=True)
    >>> (y,) = clone_inputs([x])
    >>> y is not x and y.is_leaf and y.requires_grad
    True
    """
    memo: dict[int, Any] = {}
    # The memo goes by id, so the tensors in it must stay alive.
    alive: list[Any] = []
    for leaf in tree_leaves(values):
        if isinstance(leaf, torch.Generator):
            memo[id(leaf)] = leaf.clone_state()
        elif isinstance(leaf, torch.Tensor) and id(leaf) not in memo:
            if leaf.layout != torch.strided:
                memo[id(leaf)] = leaf.detach().clone().requires_grad_(leaf.requires_grad)
            elif not leaf.is_leaf:
                # copy.deepcopy refuses these.
                alive.append(leaf.detach())
                memo[id(leaf)] = copy.deepcopy(alive[-1], memo).requires_grad_(leaf.requires_grad)
    return copy.deepcopy(values, memo)


def _is_object(value: Any) -> bool:
    return hasattr(value, "__dict__") and not isinstance(value, (type, torch.nn.Module)) and not callable(value)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors of a result, in order, those in attributes of plain objects too."""
    found = []
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif _is_object(leaf):
            found.extend(tensors_in(vars(leaf)))
    return found


# --- two values -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """One thing that is not as in eager: what kind of thing, where, and both sides in words."""

    kind: str
    path: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind} of {self.path}: {self.text}"


@dataclass(frozen=True)
class Rule:
    """How two values are compared: ``values`` is "exact", "close" or "ignored".

    ``ignored`` names facets of tensors, or "sign of zero".

    ``tolerance`` is (relative, absolute) for "close"; without one, torch.testing's for the dtype hold.
    """

    values: str = "exact"
    tolerance: tuple[float, float] | None = None
    ignored: frozenset[str] = frozenset()
    #: Whether the stride of a dimension with one element counts.
    unit_strides: bool = True


EXACT, CLOSE, IGNORED = Rule(), Rule("close"), Rule("ignored")
RULES = {True: EXACT, False: CLOSE, "exact": EXACT, "close": CLOSE, "ignored": IGNORED}
#: A rule, or a name for one: ``True`` and "exact", ``False`` and "close", "ignored".
RuleLike = Rule | str | bool


def rule_of(rule: RuleLike) -> Rule:
    """The rule that is meant."""
    return rule if isinstance(rule, Rule) else RULES[rule]


#: Integers as long as the elements of a tensor.
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with NaNs made one value, so that only their places are compared."""
    if tensor.is_floating_point() or tensor.is_complex():
        return torch.where(tensor.isnan(), torch.zeros_like(tensor), tensor)
    return tensor


def equal_values(left: torch.Tensor, right: torch.Tensor, signs: bool = True) -> bool:
    """Bitwise, except that any NaN equals any NaN; ``signs``: the sign of zero counts.

    >>> equal_values(torch.tensor([float("nan"), 0.0]), torch.tensor([float("nan"), 0.0]))
    True
    >>> equal_values(torch.tensor([0.0]), torch.tensor([-0.0]))
    False
    """
    left, right = left.detach(), right.detach()
    if left.layout == torch.strided and not (left.is_conj() or left.is_neg() or right.is_conj() or right.is_neg()):
        whole = _INTEGERS.get(left.dtype.itemsize)
        if whole is not None and torch.equal(left.view(whole), right.view(whole)):
            return True
    if left.dtype == torch.complex32:
        # There is no comparison kernel for it, and the wider type holds every one of its values.
        left, right = left.to(torch.complex64), right.to(torch.complex64)
    if left.layout != torch.strided:
        left, right = left.to_dense(), right.to_dense()
    if not torch.equal(_bits(left), _bits(right)):
        return False
    if not signs:
        return torch.equal(left.isnan(), right.isnan())
    if left.is_complex():
        left, right = torch.view_as_real(left.resolve_conj()), torch.view_as_real(right.resolve_conj())
    if left.is_floating_point():
        nan = left.isnan()
        return torch.equal(nan, right.isnan()) and torch.equal(left.signbit() | nan, right.signbit() | nan)
    return True


def close(left: torch.Tensor, right: torch.Tensor, rule: Rule = CLOSE) -> bool:
    """Whether two tensors are equal by the rule's tolerances."""
    options = {} if rule.tolerance is None else dict(zip(("rtol", "atol"), rule.tolerance, strict=True))
    try:
        torch.testing.assert_close(right, left, equal_nan=True, check_stride=False, **options)
    except AssertionError:
        return False
    return True


def max_abs_diff(left: torch.Tensor, right: torch.Tensor) -> float:
    """Largest absolute difference; inf where the shapes differ or only one side is NaN."""
    if left.shape != right.shape:
        return math.inf
    if left.numel() == 0:
        return 0.0
    a, b = (tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64) for tensor in (left, right))
    equal = (a == b) | (a.isnan() & b.isnan())
    gap = torch.where(equal, torch.zeros((), dtype=torch.float64), (a - b).abs())
    return math.inf if gap.isnan().any() else float(gap.max())


def _facets(tensor: torch.Tensor, rule: Rule) -> dict[str, Any]:
    facets: dict[str, Any] = {
        "type": type(tensor),
        "dtype": tensor.dtype,
        "shape": tuple(tensor.shape),
        "layout": tensor.layout,
        "device": tensor.device,
        "requires_grad": tensor.requires_grad,
        "is_leaf": tensor.is_leaf,
        "conj/neg bit": (tensor.is_conj(), tensor.is_neg()),
    }
    if tensor.layout == torch.strided:
        sizes = zip(tensor.shape, tensor.stride(), strict=True)
        facets["strides"] = tuple(stride for size, stride in sizes if rule.unit_strides or size != 1)
    return {name: value for name, value in facets.items() if name not in rule.ignored}


def tensor_differences(left: torch.Tensor, right: torch.Tensor, path: str, rule: RuleLike) -> Iterator[Difference]:
    """Compare two tensors; of tensor subclasses, their inner tensors."""
    rule = rule_of(rule)
    comparable = True
    expected, actual = _facets(left, rule), _facets(right, rule)
    for name, facet in expected.items():
        if facet != actual.get(name, facet):
            comparable = comparable and name not in ("dtype", "shape", "layout", "type")
            yield Difference(name, path, f"eager {facet}, compiled {actual[name]}")
    if not comparable or rule.values == "ignored":
        return
    if type(left) is type(right) and hasattr(left, "__tensor_flatten__"):
        (names, left_rest), (_, right_rest) = left.__tensor_flatten__(), right.__tensor_flatten__()
        for name in names:
            yield from differences(getattr(left, name), getattr(right, name), f"{path}.{name}", rule)
        if left_rest != right_rest:
            yield Difference("other attributes", path, f"eager {left_rest}, compiled {right_rest}")
        return
    if equal_values(left, right, signs="sign of zero" not in rule.ignored):
        return
    near = close(left, right, rule)
    if rule.values == "close" and near:
        return
    # Both are wrong answers; the name of the second helps to find the cause.
    kind = "values, by rounding" if near else "values"
    yield Difference(kind, path, f"largest difference {max_abs_diff(left, right):.3g}")


def differences(left: Any, right: Any, path: str = "result", rule: RuleLike = EXACT) -> Iterator[Difference]:
    """Compare two values, containers and plain objects included. The left one is eager's."""
    rule = rule_of(rule)
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        yield from tensor_differences(left, right, path, rule)
    elif left is right:
        return
    elif type(left) is not type(right):
        yield Difference("type", path, f"eager {type(left).__name__}, compiled {type(right).__name__}")
    elif isinstance(left, dict):
        if list(left) != list(right):
            yield Difference("keys", path, f"eager {list(left)}, compiled {list(right)}")
            return
        for key in left:
            yield from differences(left[key], right[key], f"{path}[{key!r}]", rule)
    elif isinstance(left, (list, tuple)):
        if len(left) != len(right):
            yield Difference("length", path, f"eager {len(left)}, compiled {len(right)}")
            return
        for position, (a, b) in enumerate(zip(left, right, strict=True)):
            yield from differences(a, b, f"{path}[{position}]", rule)
    elif isinstance(left, float):
        near = rule.values != "exact" and math.isclose(left, right, rel_tol=1e-5, abs_tol=1e-8)
        if rule.values != "ignored" and left != right and not near and not (left != left and right != right):
            yield Difference("values", path, f"eager {left!r}, compiled {right!r}")
    elif isinstance(left, torch.Generator):
        yield from differences(left.get_state(), right.get_state(), f"{path} state", rule)
    elif isinstance(left, np.ndarray):
        if left.dtype != right.dtype or not np.array_equal(left, right, equal_nan=left.dtype.kind in "fc"):
            yield Difference("values", path, f"eager {left!r}, compiled {right!r}"[:300])
    elif _is_object(left) or isinstance(left, torch.nn.Module):
        yield from differences(vars(left), vars(right), f"{path}.__dict__", rule)
    elif left != right:
        yield Difference("values", path, f"eager {left!r}, compiled {right!r}")


def same(left: Any, right: Any, path: str = "result", exact: RuleLike = True) -> None:
    """Assert that two values agree in everything that can be asked of them. The left one is eager's."""
    found = [str(difference) for difference in differences(left, right, path, exact)]
    assert not found, "; ".join(found[:5])


# --- memory and autograd ----------------------------------------------------------------------------------------------


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
        identical = tuple(index for index, other in enumerate(given) if other is tensor)
        shared = tuple(index for index, other in enumerate(given) if here not in (-1, 0) and storage(other) == here)
        earlier = tuple(index for index in range(place) if here not in (-1, 0) and storage(returned[index]) == here)
        again = tuple(index for index in range(place) if returned[index] is tensor)
        facts.append((identical, shared, earlier, again, tensor.storage_offset() if shared else 0))
    return tuple(facts)


def set_seed(number: int) -> None:
    """Seed torch's generators; :func:`torch.manual_seed` prints the stack once for each kind of device that is not there."""
    if torch.cuda.is_available():
        torch.manual_seed(number)
    else:
        torch.default_generator.manual_seed(number)


def random_state() -> list[torch.Tensor]:
    """The state of torch's generators, the GPU's too where there is one."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_available() else [])]


def backward(result: Any) -> None:
    """Run a backward from every differentiable output, with fixed incoming gradients."""
    roots = [tensor for tensor in tensors_in(result) if tensor.requires_grad]
    if not roots:
        return
    generator = torch.Generator().manual_seed(7)
    torch.autograd.backward(
        roots, [torch.randn(root.shape, generator=generator, dtype=torch.float32).to(root.dtype) for root in roots]
    )


def gradients(tensors: Any) -> list[torch.Tensor | None]:
    """``.grad`` of the leaves among the tensors of a value, or of a module's parameters."""
    if isinstance(tensors, torch.nn.Module):
        tensors = list(tensors.parameters())
    return [tensor.grad for tensor in tensors_in(tensors) if tensor.is_leaf]


def compare_modules(eager: Any, compiled: Any, path: str, exact: RuleLike = True) -> None:
    """Parameters, their gradients and all buffers of two modules, those outside of the state dictionary too."""
    for name, of in (("parameter", "named_parameters"), ("buffer", "named_buffers")):
        both = [{key: item.detach() for key, item in getattr(module, of)()} for module in (eager, compiled)]
        same(both[0], both[1], f"{path}: {name}", exact)
    names = [name for name, _ in eager.named_parameters()]
    both = [dict(zip(names, gradients(module), strict=True)) for module in (eager, compiled)]
    same(both[0], both[1], f"{path}: gradient of", exact)


# --- calls ------------------------------------------------------------------------------------------------------------


def compare_call(
    eager: Callable[..., Any],
    compiled: Callable[..., Any],
    args: Sequence[Any],
    *,
    path: str = "result",
    seed: int = 0,
    exact: RuleLike = True,
) -> tuple[Any, Any]:
    """One call on both sides, on copies of ``args``, with a backward from all results. Returns both results."""
    return _compare_call(eager, compiled, (clone_inputs(args), clone_inputs(args)), path, seed, exact)


def _compare_call(
    eager: Callable[..., Any],
    compiled: Callable[..., Any],
    both: tuple[Sequence[Any], Sequence[Any]],
    path: str,
    seed: int,
    exact: RuleLike,
) -> tuple[Any, Any]:
    eager_args, compiled_args = both
    set_seed(seed)
    expected = eager(*eager_args)
    state = random_state()
    set_seed(seed)
    actual = compiled(*compiled_args)
    same(state, random_state(), f"{path}: random state")
    same(expected, actual, path, exact)
    same(aliasing(expected, eager_args), aliasing(actual, compiled_args), f"{path}: aliasing")
    backward(expected)
    backward(actual)
    same(list(eager_args), list(compiled_args), f"{path}: argument", exact)
    same(gradients(eager_args), gradients(compiled_args), f"{path}: gradient", exact)
    return expected, actual


def check_calls(
    function: Callable[..., Any],
    calls: Sequence[tuple[Any, ...]],
    *,
    compiler: Callable[[Callable[..., Any]], Any] | None = None,
    entries: int | None = None,
    exact: RuleLike = True,
    keep: bool = False,
    **options: Any,
) -> Any:
    """Every call must return and leave behind what eager does, with its gradients. Returns the compiled function.

    ``options`` are those of :func:`dovetail.compile`, or ``compiler`` compiles; ``entries`` bounds what was compiled.
    ``keep``: no later call may change the results of an earlier one. A module is called directly, and its parameters and
    buffers are compared after every call.
    """
    twin = copy.deepcopy(function) if isinstance(function, torch.nn.Module) else function
    if compiler is None:
        compiled = dovetail.compile(twin, **{"backend": "aten", "fullgraph": True, **options})
    else:
        compiled = compiler(twin)
    kept: list[tuple[Any, Any]] = []
    for number, args in enumerate(calls):
        path = f"call {number}"
        results = compare_call(function, compiled, args, path=path, seed=number, exact=exact)
        if isinstance(function, torch.nn.Module):
            compare_modules(function, twin, path, exact)
        if keep:
            for earlier in kept:
                same(*earlier, f"a result of an earlier call, after {path}", exact)
            kept.append(results)
    if entries is not None:
        made = entries_of(compiled)
        assert made <= entries, f"{made} entries: {[str(event) for event in dovetail.events_of(compiled).events]}"
    return compiled


def check(function: Callable[..., Any], *args: Any, calls: int = 2, exact: RuleLike = True, **options: Any) -> Any:
    """Compare ``calls`` calls with the same arguments: writes to them and their gradients add up. Returns the compiled."""
    compiled = dovetail.compile(function, **{"backend": "aten", "fullgraph": True, **options})
    both = clone_inputs(args), clone_inputs(args)
    for number in range(calls):
        _compare_call(function, compiled, both, f"call {number}", 0, exact)
    return compiled


def check_training(
    module: torch.nn.Module,
    loss: Callable[..., torch.Tensor],
    batches: Sequence[tuple[Any, ...]],
    compiler: Callable[[Callable[..., Any]], Any],
    *,
    exact: RuleLike = True,
    accumulate: int = 1,
) -> None:
    """Train a module and its twin with ``loss(module, *batch)``, compiled for the twin; all agrees after each batch.

    The optimizer steps after every ``accumulate`` batches. No loss of an earlier batch may change.
    """
    twin, compiled = copy.deepcopy(module), compiler(loss)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.05, momentum=0.9) for one in (module, twin)]
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    for number, batch in enumerate(batches):
        path = f"batch {number}"
        set_seed(number)
        expected = loss(module, *batch)
        state = random_state()
        set_seed(number)
        actual = compiled(twin, *batch)
        same(state, random_state(), f"{path}: random state")
        expected.backward()
        actual.backward()
        kept.append((expected.detach(), actual.detach()))
        for earlier in kept:
            same(*earlier, f"a loss, after {path}", exact)
        compare_modules(module, twin, path, exact)
        if (number + 1) % accumulate == 0:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            compare_modules(module, twin, f"{path}, updated", exact)


def check_entries(function: Callable[..., Any], calls: Sequence[tuple[Any, ...]], **options: Any) -> int:
    """:func:`check_calls`; returns how many entries there are, none of them for plain sizes where symbolic ones failed."""
    compiled = check_calls(function, calls, exact=options.get("backend", "aten") == "aten", **options)
    assert not dovetail.events_of(compiled).count("static shapes")
    return entries_of(compiled)


# --- how often something was compiled ---------------------------------------------------------------------------------


def entries_of(compiled: Any) -> int:
    """How many entries a compiled function or module has."""
    from dovetail.reports.explanation import compiled_function

    return len(compiled_function(compiled).entries)


def compilations(compiled: Any) -> int:
    """How many entries were compiled, those of continuations included."""
    return int(dovetail.events_of(compiled).count("compile"))


def captures(compiled: Any) -> int:
    """How many captures were begun."""
    return int(dovetail.events_of(compiled).count("capture"))


def leaf(*shape: int) -> torch.Tensor:
    """Random numbers that require a gradient."""
    return torch.randn(*shape, requires_grad=True)


def randn(*shape: int, grad: bool = False) -> torch.Tensor:
    """Random numbers that depend on the shape alone."""
    generator = torch.Generator().manual_seed(hash(shape) % 1000)
    return torch.randn(*shape, generator=generator).requires_grad_(grad)
