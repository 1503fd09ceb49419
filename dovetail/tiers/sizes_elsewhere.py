"""Symbolic sizes on their way to another process: the same symbols there, under the same names, with what is assumed of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail.artefacts.size_expressions import encode_expression, evaluate
from dovetail.errors import ArtefactError
from dovetail.tiers.unportable import UnportableError
from dovetail.torch_private import assumptions as private_assumptions
from dovetail.torch_private import sizes as private_sizes
from dovetail.torch_private import tracing as private_tracing
from dovetail.trace.shapes import RecordingShapeEnv


class SizesHere:
    """The sizes of one shape environment as data; raises :class:`UnportableError` for a number that does not follow from them."""

    def __init__(self, environment: RecordingShapeEnv) -> None:
        self._environment = environment
        self._symbols = private_assumptions.sizes_of(environment)
        self._numbers = {symbol: place for place, symbol in enumerate(self._symbols)}

    def described(self) -> dict[str, Any]:
        """The symbols, and what is assumed of them."""
        recorded = (item.expression for item in self._environment.recorded())
        assumed = [item for item in recorded if self._numbers.keys() >= set(private_sizes.symbols_of(item))]
        facts = [private_assumptions.facts_of(self._environment, symbol) for symbol in self._symbols]
        return {"symbols": facts, "assumed": list(map(self._encoded, assumed))}

    def encode(self, number: Any) -> Any:
        """A number, which may be symbolic; with its text, by which the other process sees that it means the same."""
        if not private_sizes.is_symbolic(number):
            return number
        expression = private_sizes.expression_of(number)
        return {"size": self._encoded(expression), "text": str(expression)}

    def _encoded(self, expression: Any) -> Any:
        try:
            return encode_expression(expression, self._numbers)
        except ArtefactError as error:
            raise UnportableError(error.what) from error


def new_fake_mode(environment: RecordingShapeEnv) -> Any:
    """The fake mode of graphs from elsewhere."""
    return private_tracing.FakeTensorMode(shape_env=environment, allow_fallback_kernels=False)


class SizesThere:
    """The same sizes in the other process; the graphs of one capture share them, and the fake mode that they are in."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        environment = RecordingShapeEnv()
        self.fake_mode = new_fake_mode(environment)
        self._symbols = [private_assumptions.size_of_facts(environment, *item) for item in data["symbols"]]
        for item in data["assumed"]:
            if not evaluate(item, self._symbols):
                raise UnportableError("an assumption about a size does not hold elsewhere")
        #: These sizes as data again.
        self.here = SizesHere(environment)

    def decode(self, data: Any) -> Any:
        """The number that :meth:`SizesHere.encode` has written."""
        if not isinstance(data, dict):
            return data
        number = evaluate(data["size"], self._symbols)
        if str(private_sizes.expression_of(number)) != data["text"]:
            raise UnportableError(f"the size {data['text']} is another expression elsewhere")
        return number
