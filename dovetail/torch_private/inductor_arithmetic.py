"""How Inductor writes arithmetic in C++: places where other C++ is written for one operation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def _written(**methods: tuple[Any, Any]) -> Iterator[None]:
    """In the block, classes have other methods: by name, a class and its method."""
    before = {name: vars(owner)[name] for name, (owner, _) in methods.items()}
    for name, (owner, method) in methods.items():
        setattr(owner, name, method)
    try:
        yield
    finally:
        for name, (owner, _) in methods.items():
            setattr(owner, name, before[name])


def exact_near_zero() -> contextlib.AbstractContextManager[None]:
    """In the block, vectors have the ``expm1`` and ``atanh`` of eager's kernels, whose error is that of the last bit."""
    from torch._inductor.codegen.cpp import CppVecOverrides

    # Where all vectors of a loop hold one number, Inductor looks up the method for numbers by the function's name.
    def expm1(x: Any) -> str:
        return f"{x}.expm1()"

    def atanh(x: Any) -> str:
        return f"{x}.atanh()"

    return _written(expm1=(CppVecOverrides, staticmethod(expm1)), atanh=(CppVecOverrides, staticmethod(atanh)))


def finite_for_large() -> contextlib.AbstractContextManager[None]:
    """In the block, the ``acosh`` of vectors is the logarithm of twice the number, from where on that is all there is of it."""
    from torch._inductor.codegen.cpp import CppVecOverrides

    def acosh(x: Any) -> str:
        kind = f"decltype({x})"
        large = f"{x}.log() + {kind}(0.69314718055994530942)"
        return f"{kind}::blendv({x}.acosh(), {large}, {x} > {kind}(1e9))"

    return _written(acosh=(CppVecOverrides, staticmethod(acosh)))


class _Wide:
    """A number that the code has as one of 64 bits."""

    def __init__(self, number: Any) -> None:
        """Nothing is looked at yet."""
        self.number = number

    def __str__(self) -> str:
        return f"static_cast<int64_t>({self.number})"


def steps_of_64_bits() -> contextlib.AbstractContextManager[None]:
    """In the block, the step of a row of whole numbers in a vector is a number of 64 bits, as the numbers are."""
    from torch._inductor.codegen.cpp import CppVecKernel

    arange: Any = CppVecKernel.arange
    return _written(arange=(CppVecKernel, lambda kernel, index, step: arange(kernel, index, _Wide(step))))


def magnitudes_that_wrap() -> contextlib.AbstractContextManager[None]:
    """In the block, the magnitude of a small whole number has its type; C++ gives that of an ``int``."""
    from torch._inductor.codegen.cpp import CppOverrides

    return _written(abs=(CppOverrides, staticmethod(lambda x: f"decltype({x})(std::abs({x}))")))


def bounds_of_truth_values() -> contextlib.AbstractContextManager[None]:
    """In the block, truth values whose bounds are known can be compared with each other; Inductor asks which one is less.

    What is used as a truth value and has bounds of another kind (Inductor's of ``a & b``) may be true or false.
    """
    from torch.utils._sympy.value_ranges import SymPyValueRangeAnalysis, ValueRanges

    eq, min_or_max = SymPyValueRangeAnalysis.eq, SymPyValueRangeAnalysis.min_or_max

    def equal(analysis: Any, one: Any, other: Any) -> Any:
        first, second = ValueRanges.wrap(one), ValueRanges.wrap(other)
        if not (first.is_bool or second.is_bool):
            return eq(one, other)
        is_known = first.is_bool and second.is_bool and first.is_singleton() and second.is_singleton()
        return ValueRanges.wrap(first.lower == second.lower) if is_known else ValueRanges.unknown_bool()

    def extreme(one: Any, other: Any, function: Any) -> Any:
        first, second = ValueRanges.wrap(one), ValueRanges.wrap(other)
        is_bool = first.is_bool or second.is_bool
        return ValueRanges.unknown_bool() if is_bool else min_or_max(one, other, function)

    def boolify(self: Any) -> Any:
        return self if self.is_bool else ValueRanges.unknown_bool()

    return _written(
        eq=(SymPyValueRangeAnalysis, classmethod(equal)),
        min_or_max=(SymPyValueRangeAnalysis, staticmethod(extreme)),
        boolify=(ValueRanges, boolify),
    )
