"""Symbolic sizes and numbers: shape environments, their symbols, their guards."""

from __future__ import annotations

import functools
import itertools
import math
import sys
import types
from collections.abc import Callable, Mapping, Set
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
    StrictMinMaxConstraint,
    SymT,
    symbol_is_type,
)
from torch.fx.passes.shape_prop import _extract_tensor_metadata
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.printers import PythonPrinter
from torch.utils._sympy.value_ranges import ValueRanges


def is_symbolic(value: object) -> bool:
    """Whether a number of a fake tensor is no plain Python number; the ragged size of a jagged tensor is the program's own."""
    is_wrapped = isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))
    return is_wrapped and (value.node.is_symbolic() or not value.node.is_nested_int())


def has_symbols(value: object) -> bool:
    """Whether a fake tensor's size, strides or offset are symbolic."""
    if isinstance(value, torch.Tensor):
        return {*map(type, value.shape), *map(type, value.stride()), type(value.storage_offset())} != {int}
    return is_symbolic(value)


def hint(value: Any) -> int:
    """The number that a size had at capture, or a guess where only the data decides; nothing is guarded."""
    if not is_symbolic(value):
        return int(value)
    if value.node.has_hint():
        return int(value.node.hint)
    environment, expression = value.node.shape_env, value.node.expr
    # Its name since torch 2.12 or 2.13.
    known = environment.backed_var_to_val if hasattr(environment, "backed_var_to_val") else environment.var_to_val
    return int(expression.xreplace({symbol: known.get(symbol, 4096) for symbol in expression.free_symbols}))


def expression_of(value: Any) -> Any:
    """The expression of a symbolic number, simplified by what is known by now; a plain number is its own."""
    return value.node.expr if is_symbolic(value) else value


def first_expression(value: Any) -> Any:
    """The expression of a symbolic number as it was made."""
    return value.node._expr


def is_symbol(expression: Any) -> bool:
    """Whether an expression is one symbol."""
    return isinstance(expression, sympy.Symbol)


def symbols_of(expression: Any) -> list[Any]:
    """The symbols in an expression."""
    return sorted(expression.free_symbols, key=str) if hasattr(expression, "free_symbols") else []


def range_of(environment: ShapeEnv, symbol: Any) -> tuple[int | None, int | None]:
    """The least and the greatest value that a symbol may have; None for no bound."""
    found = environment.var_to_range[symbol]
    bounds = [int(item) if isinstance(item, sympy.Integer) else None for item in (found.lower, found.upper)]
    return bounds[0], bounds[1]


class _TextPrinter(PythonPrinter):
    def __init__(self, variables: Mapping[Any, str]) -> None:
        super().__init__()
        self._variables = variables

    def _print_Symbol(self, expression: Any) -> str:
        return self._variables[expression]

    def _print_Float(self, expression: Any) -> str:
        # Sympy's own text has 15 digits, which is another number.
        return repr(float(expression))


def python_text(expression: Any, variables: Mapping[Any, str]) -> str:
    """An expression as Python, with the text for each of its symbols."""
    return str(_TextPrinter(variables).doprint(expression))


def python_text_globals() -> dict[str, Any]:
    """The names that :func:`python_text` uses."""
    return {"math": math, "torch": torch}


def symbolic_fake(
    mode: FakeTensorMode, real: torch.Tensor, name: str, bounds: Mapping[int, tuple[int | None, int | None]]
) -> torch.Tensor:
    """A fake tensor with symbolic sizes in the dimensions of ``bounds``."""
    sizes = [DimDynamic.DYNAMIC if dim in bounds else DimDynamic.STATIC for dim in range(real.dim())]
    constraints: list[Any] = [None] * real.dim()
    for dim, (low, high) in bounds.items():
        if low is not None or high is not None:
            span = ValueRanges(0 if low is None else low, int_oo if high is None else high)
            constraints[dim] = StrictMinMaxConstraint(vr=span, warn_only=False)
    # At the top it would cost every import of this package two seconds.
    from torch._dynamo.source import ConstantSource

    context: Any = StatelessSymbolicContext(dynamic_sizes=sizes, constraint_sizes=constraints)
    return mode.from_tensor(real, source=ConstantSource(name), symbolic_context=context)


def float_carrier(mode: FakeTensorMode, value: float, name: str) -> torch.Tensor:
    """A fake tensor without dimensions whose value is a symbolic float, with ``value`` as its hint."""
    number, _ = _unspecified(mode, value, name)
    with mode:
        fake = torch.empty((), dtype=torch.float64)
    fake.item_memo = number  # type: ignore[attr-defined]
    return fake


def small_number_carrier(mode: FakeTensorMode, value: int, name: str) -> torch.Tensor:
    """A fake empty tensor whose second size is a symbol that may be 0 or 1 as well, which ``value`` is now."""
    number, symbol = _unspecified(mode, value, name)
    mode.shape_env.var_to_range[symbol] = ValueRanges(0, int_oo)  # type: ignore[union-attr]
    with mode:
        return torch.empty_strided((0, number), (1, 1))


def _unspecified(mode: FakeTensorMode, value: int | float, name: str) -> tuple[Any, Any]:
    from torch._dynamo.source import ConstantSource

    environment: Any = mode.shape_env
    source = ConstantSource(name)
    symbol = environment.create_unspecified_symbol(value, source=source, dynamic_dim=DimDynamic.DYNAMIC)
    make = environment.create_symfloatnode if type(value) is float else environment.create_symintnode
    return make(symbol, hint=value, source=source), symbol


def carried_float(fake: object) -> Any:
    """The symbolic float that :func:`float_carrier` put into a fake tensor, or None."""
    memo = getattr(fake, "item_memo", None)
    return memo if isinstance(memo, torch.SymFloat) and memo.node.hint is not None else None


class KnownSymbols:
    """The symbols of a shape environment that were looked at, and those of them that were made out of data."""

    def __init__(self) -> None:
        self.count = 0
        self.found: set[Any] = set()


def data_symbols(environment: ShapeEnv, known: KnownSymbols) -> set[Any]:
    """The symbols of sizes and numbers that were made out of tensors' data; ``known`` are those that were found earlier."""
    symbols = environment.var_to_range
    if len(symbols) < known.count:
        known.count, known.found = 0, set()
    new = itertools.islice(symbols, known.count, None)
    known.found.update(symbol for symbol in new if is_made_of_data(symbol))
    known.count = len(symbols)
    return set(known.found)


@functools.lru_cache(maxsize=1 << 14)
def is_made_of_data(symbol: Any) -> bool:
    """Whether a symbol stands for a number that an operator has made out of a tensor's data."""
    return bool(symbol_is_type(symbol, (SymT.UNBACKED_INT, SymT.UNBACKED_FLOAT)))


def is_made_of_data_float(value: Any) -> bool:
    """Whether a number or truth value depends on a float out of a tensor's data; symbols are simplified as if it were no NaN."""
    return is_symbolic(value) and any(
        symbol_is_type(item, SymT.UNBACKED_FLOAT) for item in value.node.expr.free_symbols
    )


def is_settled(value: torch.SymInt | torch.SymFloat | torch.SymBool) -> bool:
    """Whether the truth of a symbolic number is the same whatever its symbols stand for."""
    truth = value if isinstance(value, torch.SymBool) else value != 0
    return isinstance(truth, bool) or truth.node.shape_env._maybe_evaluate_static(truth.node.expr) is not None


def assume_usual_sizes(environment: ShapeEnv, question: Any) -> bool:
    """Assume of the sizes made of data in a question that they are 2 or more, where that answers it; returns whether it does."""
    if environment._maybe_evaluate_static(question, size_oblivious=True) is None:
        return False
    for symbol in question.free_symbols & environment.size_like:
        environment.constrain_symbol_range(symbol, 2, int_oo)
    environment._version_counter += 1
    return True


def is_data_number(value: Any) -> bool:
    """Whether a number depends on a tensor's data."""
    return is_symbolic(value) and any(map(is_made_of_data, value.node.expr.free_symbols))


def marked_dimensions(tensor: torch.Tensor, mark: str) -> set[int]:
    """The dimensions that a program has marked by ``torch._dynamo``: dynamic, weak_dynamic, unbacked, strict_unbacked, static."""
    # Not getattr, which may be the code of a class of the user's.
    return set(vars(tensor).get(f"_dynamo_{mark}_indices", ()))


def marked_ranges(tensor: torch.Tensor) -> dict[int, tuple[int | None, int | None]]:
    """The bounds that a program has given to dimensions by ``torch._dynamo.mark_dynamic``."""
    return {each.dim: (each.min, each.max) for each in vars(tensor).get("_dynamo_dynamic_range", ())}


def deferred_assumptions(environment: ShapeEnv, truths: Set[Any] = frozenset()) -> list[Any]:
    """The assumptions of a shape environment about sizes made of data, as expressions, each once. That ``truths`` are 0 or
    1 is no assumption.
    """
    found: dict[Any, None] = {}
    for conditions in environment.deferred_runtime_asserts.values():
        for condition in conditions:
            # A conjunction of three is handed to Python's operator for two (torch 2.13).
            parts = condition.expr.args if isinstance(condition.expr, sympy.And) else (condition.expr,)
            found.update(dict.fromkeys(parts))
    for symbol, interval in environment.var_to_range.items():
        if not is_made_of_data(symbol) or symbol in truths:
            continue
        for bound, expression in (
            (interval.lower, symbol >= interval.lower),
            (interval.upper, symbol <= interval.upper),
        ):
            if bound.is_Integer and abs(int(bound)) < 1 << 62:
                found[expression] = None
    return [expression for expression in found if expression not in (True, False)]


def is_unhashable_number(error: BaseException) -> bool:
    """Whether an error says that a symbolic number has no hash (torch 2.11 to 2.13)."""
    return isinstance(error, TypeError) and "unhashable type: " in str(error) and "Sym" in str(error)


_METADATA_DEPTH = 12


def is_for_node_metadata(frame: types.FrameType | None) -> bool:
    """Whether a size is compared only to note a memory format beside a node, which nothing reads. Torch 2.13.

    Recording a slice of a window would guard on the window being all of the tensor, say.
    """
    for _ in range(_METADATA_DEPTH):
        if frame is None:
            return False
        if frame.f_code is _extract_tensor_metadata.__code__:
            return True
        frame = frame.f_back
    return False


def _cached_by(environment: ShapeEnv, method: Any) -> Callable[..., Any]:
    """A method of a shape environment with a cache of its own. The caches of torch's class keep every environment for ever."""
    cached = functools.lru_cache(maxsize=256)(functools.partial(method.__wrapped__, environment))
    if isinstance(method, functools._lru_cache_wrapper):
        return cached
    version = environment._version_counter

    def current(*args: Any, **kwargs: Any) -> Any:
        """The result depends on the facts about symbols: the cache is emptied when these change."""
        nonlocal version
        if version != environment._version_counter:
            cached.cache_clear()
            version = environment._version_counter
        return cached(*args, **kwargs)

    current.cache_clear = cached.cache_clear  # type: ignore[attr-defined]
    return current


class QuickShapeEnv(ShapeEnv):
    """A shape environment that does not look for the user's frame at each symbol and guard: under an interpreter there is none
    on Python's stack, and the search took 4 % of the capture of an optimizer's step. Torch 2.13.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name, method in vars(ShapeEnv).items():
            if hasattr(method, "cache_clear") and getattr(type(self), name) is method:
                setattr(self, name, _cached_by(self, method))

    def _get_user_frame(self) -> types.FrameType | None:
        return sys._getframe(1)
