"""Arithmetic that Inductor does in another way than eager's kernels, with other numbers or types (torch 2.13, on the CPU).

Where an operator can be said in others that Inductor has right, it is decomposed (:func:`arithmetic`):

- the remainder of floats, and their division rounded down, from the exact remainder of a division that is cut off. Inductor takes
  them from the rounded quotient: ``1.0 // 0.1`` was 10, ``5.0 % inf`` not a number, ``1e20 % 3`` zero;
- ``x ** -0.5`` as eager's kernel has it, for which -inf has no result;
- ``any`` of bytes, which are bytes. They were truth values;
- ``ldexp``, which has the type of a product;
- the place of the largest or smallest of numbers of 8 bits or truth values, from wider ones: in a vector, it was 0;
- the place of the largest or smallest of all numbers, from them in a row: ``x.t().sin().argmax()`` counted by memory;
- products of small matrices of whole numbers, which Inductor takes apart into sums of 64 bits: these become numbers of the type of
  the matrices. A product of which eager leaves a term out, as its factor is 0, stays a call;
- ``index_select``, ``index_add`` and ``index_copy``, which refuse negative indices. Inductor counted these from the end.

What Inductor writes in C++ is a quirk each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from dovetail.backends.inductor.job import WORKAROUNDS, Job
from dovetail.quirks.registry import Example, quirk
from dovetail.torch_private import inductor as private_inductor
from dovetail.torch_private import inductor_arithmetic as private_arithmetic

Rule = Callable[..., Any]
_aten = torch.ops.aten


def or_else(rule: Rule, other: Rule | None) -> Rule:
    """Return a decomposition that leaves to ``other`` what ``rule`` does not take apart."""
    if other is None:
        return rule

    def apply(*args: Any, **kwargs: Any) -> Any:
        result = rule(*args, **kwargs)
        return other(*args, **kwargs) if result is NotImplemented else result

    return apply


def _floats(one: Any, other: Any) -> tuple[Tensor, Tensor] | None:
    """Both as tensors of the type of the result; None for whole numbers, and for numbers that change."""
    if any(isinstance(item, (torch.SymFloat, torch.SymInt)) for item in (one, other)):
        return None
    dtype = torch.result_type(one, other)
    if not dtype.is_floating_point:
        return None
    device = next(item.device for item in (one, other) if isinstance(item, Tensor))
    # From a number of Python's, so that it is rounded as a number of this type, once.
    first, second = (
        item.to(dtype) if isinstance(item, Tensor) else torch.full((), item, dtype=dtype, device=device)
        for item in (one, other)
    )
    return first, second


def _has_other_side(rest: Tensor, divisor: Tensor) -> Tensor:
    return (rest != 0) & ((divisor < 0) != (rest < 0))


def remainder(one: Any, other: Any) -> Any:
    """Return the remainder that has the sign of the divisor."""
    pair = _floats(one, other)
    if pair is None:
        return NotImplemented
    rest = torch.fmod(*pair)
    return torch.where(_has_other_side(rest, pair[1]), rest + pair[1], rest)


def divided_down(one: Any, other: Any) -> Any:
    """Return the quotient rounded down, as Python has it."""
    pair = _floats(one, other)
    if pair is None:
        return NotImplemented
    dividend, divisor = pair
    rest, quotient = torch.fmod(dividend, divisor), dividend / divisor
    # The vectorised remainder is not a number where the quotient overflows.
    overflows = quotient.isinf() & ~dividend.isinf()
    exact = torch.where(overflows, dividend, dividend - rest) / divisor
    exact = torch.where(_has_other_side(rest, divisor), exact - 1, exact)
    down = torch.floor(exact)
    down = torch.where(exact - down > 0.5, down + 1, down)
    down = torch.where(exact != 0, down, torch.copysign(torch.zeros_like(quotient), quotient))
    return torch.where(divisor == 0, quotient, down)


def _divided(one: Any, other: Any, *, rounding_mode: str | None = None) -> Any:
    return divided_down(one, other) if rounding_mode == "floor" else NotImplemented


def _power(base: Tensor, exponent: Any) -> Any:
    is_root = type(exponent) is float and exponent == -0.5 and base.is_floating_point()
    return torch.rsqrt(base) if is_root else NotImplemented


def _any(value: Tensor, *args: Any, **kwargs: Any) -> Any:
    if value.dtype != torch.uint8:
        return NotImplemented
    return torch.any(value != 0, *args, **kwargs).to(torch.uint8)


_PRODUCTS = (_aten.mm, _aten.mv, _aten.dot, _aten.addmm, _aten.addmv)
_ALONG = (_aten.index_select, _aten.index_add, _aten.index_copy)


def _product(rule: Rule) -> Rule:
    def apply(first: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = rule(first, *args, **kwargs)
        is_sum = isinstance(result, Tensor) and not result.is_floating_point() and not result.is_complex()
        return result.to(first.dtype) if is_sum else result

    return apply


def _batches(rule: Rule) -> Rule:
    def apply(one: Tensor, other: Tensor, *args: Any, **kwargs: Any) -> Any:
        is_whole = not one.is_floating_point() and not one.is_complex()
        if not is_whole or not any(type(size) is int and size == 1 for size in (one.shape[1], other.shape[2])):
            return rule(one, other, *args, **kwargs)
        # Inductor writes this itself where a size is 1.
        return (one.unsqueeze(-1) * other.unsqueeze(1)).sum(2).to(one.dtype)

    return apply


def _without_a_term(rule: Rule) -> Rule:
    def apply(*args: Any, **kwargs: Any) -> Any:
        factors = [kwargs.get(name, 1) for name in ("alpha", "beta")]
        is_left_out = any(type(factor) in (int, float) and factor == 0 for factor in factors)
        return NotImplemented if is_left_out else rule(*args, **kwargs)

    return apply


def _counted_from_the_front(rule: Rule) -> Rule:
    """A decomposition that takes indices along a dimension, for an operator that refuses negative ones.

    Inductor would count these from the end. They become indices that it refuses.
    """

    def apply(value: Tensor, dim: int, index: Tensor, *args: Any, **kwargs: Any) -> Any:
        if value.dim():
            index = index.masked_fill(index < 0, value.shape[dim])
        return rule(value, dim, index, *args, **kwargs)

    return apply


def _scaled(value: Tensor, exponent: Tensor) -> Tensor:
    return value * torch.pow(2.0, exponent)


def _places(operator: Any) -> Rule:
    """A decomposition of an operator that gives the place of a number, and maybe its value: for numbers of 8 bits and truth values,
    and for the place among the numbers of several dimensions.
    """

    def apply(value: Tensor, dim: Any = None, keepdim: bool = False) -> Any:
        if dim is None and value.dim() > 1:
            found = operator(value.reshape(-1), 0)
            return found.reshape([1] * value.dim()) if keepdim else found
        if value.dtype.itemsize > 1:
            return NotImplemented
        found = operator(value.to(torch.int32), dim, keepdim)
        return found if isinstance(found, Tensor) else (found[0].to(value.dtype), found[1])

    return apply


def arithmetic(table: Mapping[Any, Rule]) -> dict[Any, Rule]:
    """Return the decompositions by operator; whatever they leave alone goes to those of ``table``."""
    found: dict[Any, Rule] = {
        **{getattr(_aten.remainder, name): remainder for name in ("Tensor", "Scalar", "Scalar_Tensor")},
        **{getattr(_aten.floor_divide, name): divided_down for name in ("default", "Scalar")},
        **{getattr(_aten.div, name): _divided for name in ("Tensor_mode", "Scalar_mode")},
        **{getattr(_aten.any, name): _any for name in ("default", "dim", "dims")},
        _aten.pow.Tensor_Scalar: _power,
        _aten.ldexp.Tensor: _scaled,
        **{item: _places(item) for item in (_aten.argmin.default, _aten.argmax.default, _aten.min.dim, _aten.max.dim)},
    }
    found = {operator: or_else(rule, table.get(operator)) for operator, rule in found.items()}
    changed = [(packet, _product) for packet in _PRODUCTS]
    changed += [
        (_aten.bmm, _batches),
        (_aten.addmm, _without_a_term),
        *((packet, _counted_from_the_front) for packet in _ALONG),
    ]
    for packet, change in changed:
        if packet.default in table:
            found[packet.default] = change(found.get(packet.default, table[packet.default]))
    return found


def _example(function: Callable[..., Any], *arguments: Any, **more: Any) -> Callable[[], Example]:
    return lambda: Example(function, [arguments] * 2, order=0, exact=False, options={"backend": "inductor"}, **more)


def _has(job: Job, *targets: Any) -> bool:
    return any(node.target in targets for node in job.graph.graph.nodes)


@quirk(
    WORKAROUNDS,
    example={
        "expm1": _example(lambda x: torch.expm1(x * 1e-6) * 1e6, torch.arange(1.0, 33)),
        "atanh": _example(lambda x: torch.atanh(x * 1e-6) * 1e6, torch.arange(1.0, 33)),
    },
)
def keep_digits_near_zero(job: Job) -> None:
    """Write ``expm1`` and ``atanh`` as calls: Inductor's formulas for vectors lose all digits of small numbers.

    ``expm1(1e-8)``, the difference of two numbers near 1, was 0.
    """
    if _has(job, _aten.expm1.default, _aten.atanh.default):
        job.during.append(private_arithmetic.exact_near_zero)


@quirk(WORKAROUNDS, example=_example(lambda x: torch.acosh(x * 1e20), torch.arange(1.0, 33)))
def keep_large_acosh(job: Job) -> None:
    """Take the inverse hyperbolic cosine of a large number from its logarithm: in a vector, one of 2e19 was infinite."""
    if _has(job, _aten.acosh.default):
        job.during.append(private_arithmetic.finite_for_large)


@quirk(
    WORKAROUNDS,
    example=_example(lambda x: torch.arange(x.shape[0]) * 1500000000, torch.zeros(33)),
    issue="https://github.com/pytorch/pytorch/issues/183901",
)
def count_in_64_bits(job: Job) -> None:
    """Count with steps of 64 bits: in a vector, multiples of a step were products of 32 bits, and wrong from 2**31 on."""
    if _has(job, torch.ops.prims.iota.default):
        job.during.append(private_arithmetic.steps_of_64_bits)


@quirk(WORKAROUNDS, example=_example(lambda x: x.abs() < 0, torch.full((3,), -(2**15), dtype=torch.int16)))
def wrap_magnitudes(job: Job) -> None:
    """Give the magnitude of a small whole number its type: that of -32768 was 32768 in ``int16`` until it was stored."""
    if any(
        node.target is _aten.abs.default and node.meta["val"].dtype in (torch.int8, torch.int16)
        for node in job.graph.graph.nodes
    ):
        job.during.append(private_arithmetic.magnitudes_that_wrap)


#: Operators that compare or combine truth values, for which Inductor looks at the bounds of both.
_COMPARING = (
    *(getattr(packet, name) for packet in (_aten.eq, _aten.ne) for name in ("Tensor", "Scalar")),
    *(_aten.maximum.default, _aten.minimum.default),
    *(getattr(_aten, name).Tensor for name in ("bitwise_and", "bitwise_or", "bitwise_xor")),
)


def _finite(x: torch.Tensor) -> torch.Tensor:
    y = torch.arange(8).float()
    return torch.where(y.isinf() & ~y.isnan(), y, y + 1)


@quirk(
    WORKAROUNDS,
    example={
        "compared": _example(
            lambda x: ((torch.arange(8) < 4) != (torch.arange(8) < 6)) | torch.maximum(torch.arange(8) < 0, x > 3),
            torch.arange(8.0),
        ),
        "combined": _example(_finite, torch.arange(8.0)),
    },
)
def compare_truth_values(job: Job) -> None:
    """Compare truth values that come of known numbers: Inductor asks which of their bounds is less, which raises a TypeError.

    Where it knows no bounds of two of them, it takes their combination to be a whole number, and refuses that as a condition.
    """
    if any(
        node.target in _COMPARING and node.args[0].meta["val"].dtype is torch.bool  # type: ignore[union-attr]
        for node in job.graph.graph.nodes
    ):
        job.during.append(private_arithmetic.bounds_of_truth_values)


#: Operators whose kernels look at the numbers that they are given, and refuse some.
LOOKING = (_aten.binary_cross_entropy.default, _aten.multilabel_margin_loss_forward.default)


def _certain(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.binary_cross_entropy(x, torch.ones_like(x))


def _labelled(x: torch.Tensor) -> torch.Tensor:
    labels = torch.tensor([[1, -1, 2, 3], [-1, 0, 0, 0]])
    return torch.nn.functional.multilabel_margin_loss(x, labels, reduction="none")


@quirk(
    WORKAROUNDS,
    example={
        "binary_cross_entropy": lambda: Example(
            _certain,
            [(torch.full((3,), value),) for value in (0.5, 1.5)],
            exact=False,
            options={"backend": "inductor"},
            stays=True,
        ),
        "multilabel_margin_loss": _example(_labelled, torch.arange(8.0).reshape(2, 4), stays=True),
    },
    issue="https://github.com/pytorch/pytorch/issues/193757",
)
def look_at_targets(job: Job) -> None:
    """Take two losses by eager's kernels, which refuse some targets; Inductor computed something of them.

    ``binary_cross_entropy`` refuses what is no probability. Of the labels of ``multilabel_margin_loss``, torch's decomposition
    also counts those behind the first -1, which ends them.
    """
    found = {target for target in LOOKING if _has(job, target)}
    if found:
        job.before.append(lambda: private_inductor.inductor_runs_as_is(found, instead=True))


def _next(x: torch.Tensor) -> torch.Tensor:
    y = x.bfloat16()
    return torch.nextafter(y, y + 1) > y


@quirk(WORKAROUNDS, example=_example(_next, torch.ones(33), stays=True))
def take_steps_by_kernel(job: Job) -> None:
    """Take the next number of half precision by eager's kernel: the next one of single precision, rounded, is the number itself."""
    steps = job.graph.graph.find_nodes(op="call_function", target=_aten.nextafter.default)
    if any(node.meta["val"].dtype.itemsize == 2 for node in steps):
        job.before.append(lambda: private_inductor.inductor_runs_as_is({_aten.nextafter.default}, instead=True))
