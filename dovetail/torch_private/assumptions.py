"""Assumptions of a shape environment about its symbols: kept apart for a while, and made again in another process."""

from __future__ import annotations

import copy
from collections.abc import MutableSet
from contextlib import AbstractContextManager
from typing import Any

from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, SymT, symbol_is_type
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges

from dovetail.torch_private.sizes import deferred_assumptions, hint, range_of

#: Caches of an environment, and of its numbers, are good for one value of these.
_COUNTERS = ("_version_counter", "_replacements_version_counter")


def count_of_assumptions(environment: ShapeEnv) -> tuple[int, int, int]:
    """Numbers that change when something more is assumed of a symbol."""
    return len(environment.guards), len(deferred_assumptions(environment)), len(environment.replacements)


class Aside:
    """Blocks in which more may be assumed of an environment's symbols: it holds in these blocks alone, and in the next of them.

    >>> import torch
    >>> environment = ShapeEnv()
    >>> size = environment.create_unbacked_symint()
    >>> aside = Aside(environment)
    >>> with aside:
    ...     torch._check(size == 4)
    ...     print(size)
    4
    >>> size is not None and str(size)
    'u0'
    >>> with aside:
    ...     print(size)
    4
    """

    def __init__(self, environment: ShapeEnv) -> None:
        self._environment = environment
        self._other = {name: _copied(value) for name, value in vars(environment).items()}

    def __enter__(self) -> None:
        self._exchange()

    def __exit__(self, *_error: object) -> None:
        self._exchange()

    def keep(self) -> None:
        """Outside of the blocks too, assume what is assumed in them."""
        self._exchange()

    def _exchange(self) -> None:
        state = vars(self._environment)
        now, other = dict(state), self._other
        state.update(other)
        for name in set(_COUNTERS) & now.keys():
            # The numbers of the environment remember what they are by these.
            state[name] = max(now[name], other[name]) + 1
        self._other = now


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        found = copy.copy(value)
        found.update({key: copy.copy(item) for key, item in value.items() if type(item) is list})
        return found
    return copy.copy(value) if isinstance(value, (list, MutableSet)) else value


def nothing_recorded(environment: ShapeEnv) -> AbstractContextManager[None]:
    """A block in which questions about sizes are answered for the present call, and not guarded."""
    return environment.suppress_guards()


def sizes_of(environment: ShapeEnv) -> list[Any]:
    """The symbols of sizes, strides and whole numbers that are read off inputs."""
    return [symbol for symbol in environment.var_to_range if symbol_is_type(symbol, SymT.SIZE)]


def number_of(environment: ShapeEnv, symbol: Any) -> Any:
    """The symbolic number that a symbol stands for, with its value at capture."""
    return environment.create_symintnode(symbol, hint=hint(environment.create_symintnode(symbol, hint=None)))


def facts_of(environment: ShapeEnv, symbol: Any) -> list[Any]:
    """The facts of which :func:`size_of_facts` makes a symbol again: plain numbers and a name."""
    return [
        str(symbol),
        int(number_of(environment, symbol).node.hint),
        *range_of(environment, symbol),
        symbol.is_positive,
    ]


def size_of_facts(
    environment: ShapeEnv, name: str, example: int, low: int | None, high: int | None, positive: bool | None
) -> None:
    """Make the symbol of a size under the name that it has in another process; raises ``ValueError`` where it cannot have it."""
    from torch._dynamo.source import ConstantSource

    source, number = ConstantSource(f"the size {name}"), int(name[1:])
    environment._generate_unique_id = lambda source_name: number  # type: ignore[method-assign]
    environment.unique_ids.add(number)
    try:
        symbol: Any = environment.create_symbol(
            example, source, DimDynamic.DYNAMIC, positive=positive, do_not_specialize_zero_one=True
        )
    finally:
        del environment._generate_unique_id
    if str(symbol) != name:
        raise ValueError(f"{name} is the name of no size")
    environment.var_to_range[symbol] = ValueRanges(-int_oo if low is None else low, int_oo if high is None else high)
