"""Symbolic sizes on their way to another process: the same symbols there, under the same names, with what is assumed of them."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from dovetail.backends.common.size_expressions import encode_expression, evaluate
from dovetail.cache.unportable import UnportableError
from dovetail.errors import ArtefactError
from dovetail.torch_private import assumptions as private_assumptions
from dovetail.torch_private import sizes as private_sizes
from dovetail.trace.modes import FakeMode, SymbolicFakeMode
from dovetail.trace.shapes import RecordingShapeEnv


class SizesHere:
    """The sizes of one shape environment as data; raises :class:`UnportableError` for a number that does not follow from them."""

    def __init__(self, environment: RecordingShapeEnv) -> None:
        self._environment = environment
        self._symbols = private_assumptions.sizes_of(environment)
        self._numbers = {symbol: place for place, symbol in enumerate(self._symbols)}
        #: Sizes are few and their uses many: what was written, and read.
        self._written: dict[Any, dict[str, Any]] = {}
        self._read: dict[str, tuple[dict[str, Any], Any]] = {}

    def described(self) -> dict[str, Any]:
        """The symbols, and what is assumed of them."""
        facts = [private_assumptions.facts_of(self._environment, symbol) for symbol in self._symbols]
        return {"symbols": facts, "assumed": self.assumed()}

    def assumed(self) -> list[Any]:
        """What is assumed of them, each condition once: in the process that they come from, then here."""
        recorded = (item.expression for item in self._environment.recorded())
        here = [item for item in recorded if self._numbers.keys() >= set(private_sizes.symbols_of(item))]
        every = [*self._environment.assumed_elsewhere, *map(self._encoded, here)]
        return list({json.dumps(item): item for item in every}.values())

    @property
    def count(self) -> int:
        """The number of conditions that are recorded here, for :meth:`recorded_since`."""
        return len(self._environment.guards)

    def recorded_since(self, count: int) -> list[Any]:
        """What was recorded behind the first ``count``; raises :class:`UnportableError` for what is about no size."""
        return [self._encoded(item.expression) for item in self._environment.recorded()[count:]]

    def unrecorded(self) -> AbstractContextManager[None]:
        """A block in which questions about sizes are answered for the present call, and assumed of no other."""
        return private_assumptions.nothing_recorded(self._environment)

    def decides(self) -> list[Any]:
        """All that a compiler may read of them, in the same words in each process: not the sizes of the calls that it was for."""
        facts = [private_assumptions.facts_of(self._environment, symbol) for symbol in self._symbols]
        return [[name, *others] for name, _, *others in facts] + sorted(map(json.dumps, self.assumed()))

    def assume(self, assumed: Sequence[Any]) -> None:
        """Assume more of them; raises :class:`UnportableError`, and assumes nothing, where that does not hold for this call."""
        examples = list(map(private_sizes.hint, self._live))
        if not all(evaluate(item, examples) for item in assumed):
            raise UnportableError("an assumption about a size does not hold for this call")
        for item in assumed:
            if not evaluate(item, self._live):
                raise UnportableError("an assumption about a size does not hold elsewhere")
        self._environment.assumed_elsewhere += assumed

    def encode(self, number: Any) -> Any:
        """A number, which may be symbolic; with its text, by which the other process sees that it means the same."""
        if not private_sizes.is_symbolic(number):
            return number
        expression = private_sizes.expression_of(number)
        if expression not in self._written:
            self._written[expression] = {"size": self._encoded(expression), "text": str(expression)}
        return self._written[expression]

    def decode(self, data: Any) -> Any:
        """The number that :meth:`encode` has written, here or elsewhere."""
        if not isinstance(data, dict):
            return data
        written, number = self._read.get(data["text"], (None, None))
        if written == data:
            return number
        number = evaluate(data["size"], self._live)
        found = private_sizes.expression_of(number) if private_sizes.is_symbolic(number) else number
        if str(found) != data["text"]:
            raise UnportableError(f"the size {data['text']} is another expression elsewhere")
        self._read[data["text"]] = (data, number)
        return number

    @functools.cached_property
    def _live(self) -> list[Any]:
        return [private_assumptions.number_of(self._environment, symbol) for symbol in self._symbols]

    def _encoded(self, expression: Any) -> Any:
        try:
            return encode_expression(expression, self._numbers)
        except ArtefactError as error:
            raise UnportableError(error.what) from error


def sizes_of_mode(fake_mode: Any) -> SizesHere | None:
    """The sizes of a capture's fake mode; None where it is not Dovetail's own, or has none."""
    environment = fake_mode.shape_env
    is_own = isinstance(environment, RecordingShapeEnv)
    return SizesHere(environment) if is_own and private_assumptions.sizes_of(environment) else None


def new_fake_mode(environment: RecordingShapeEnv) -> Any:
    """The fake mode of graphs from elsewhere: operators give there what they give while a program is captured."""
    kind = SymbolicFakeMode if private_assumptions.sizes_of(environment) else FakeMode
    return kind(shape_env=environment, allow_fallback_kernels=False)


class SizesThere(SizesHere):
    """The same sizes in the other process; the graphs of one capture share them, and the fake mode that they are in."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        environment = RecordingShapeEnv()
        for item in data["symbols"]:
            private_assumptions.size_of_facts(environment, *item)
        self.fake_mode = new_fake_mode(environment)
        super().__init__(environment)
        self.assume(data["assumed"])
