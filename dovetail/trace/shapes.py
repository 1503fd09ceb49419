"""Symbolic sizes: which of them are symbolic, and what the symbols stand for at a later call.

A trace has one shape environment. Its symbols are sizes, strides and offsets of input tensors, so that the values of all of them
can be read off the tensors that an entry fetches, and every guard that the environment has recorded (while the program, its
backward, a decomposition or a backend was traced) can be checked there too: :class:`ShapeGuards`.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from dovetail.errors import CaptureError, InputError, UserLocation
from dovetail.guards.source import LARGEST_FLOAT
from dovetail.torch_private import sizes as private_sizes
from dovetail.torch_private import tracing as private_tracing

MARK = "_dovetail_dynamic"
NUMBER_SUFFIX = "<number>"
"""Ends the name of the input that carries a symbolic number as its size."""
ASSUMPTION = "assumed of a size that the data decides: "
"""Begins the message of the operators that check such assumptions while the graph runs."""


@dataclass(frozen=True)
class SizeRange:
    """Bounds of a marked size; None where there is none."""

    minimum: int | None = None
    maximum: int | None = None

    def __str__(self) -> str:
        low = "" if self.minimum is None else f"{self.minimum} <= "
        high = "" if self.maximum is None else f" <= {self.maximum}"
        return f"{low}size{high}"


def mark_dynamic(
    tensor: torch.Tensor, dimension: int, *, minimum: int | None = None, maximum: int | None = None
) -> torch.Tensor:
    """Say that a size of this tensor will change: it is symbolic from the first capture on. Returns the tensor.

    Raises :class:`InputError` for a dimension that the tensor does not have or a size outside of the bounds; a later call
    with a size outside of them compiles another entry.

    >>> batch = mark_dynamic(torch.ones(8, 3), 0, minimum=2, maximum=512)
    """
    if not -tensor.dim() <= dimension < tensor.dim():
        raise InputError(f"a tensor with {tensor.dim()} dimensions has no dimension {dimension}")
    bounds, size = SizeRange(minimum, maximum), tensor.shape[dimension]
    if (minimum is not None and size < minimum) or (maximum is not None and size > maximum):
        raise InputError(f"the size {size} of dimension {dimension} is outside of {bounds}")
    setattr(tensor, MARK, {**getattr(tensor, MARK, {}), dimension % tensor.dim(): bounds})
    return tensor


def marks_of(tensor: torch.Tensor) -> Mapping[int, SizeRange]:
    """The sizes of a tensor that were marked, also those that ``torch._dynamo.mark_dynamic`` and its kin have marked."""
    kinds = ("weak_dynamic", "unbacked", "strict_unbacked", "dynamic")
    marks = {dim: SizeRange() for kind in kinds for dim in private_sizes.marked_dimensions(tensor, kind)}
    marks.update({dim: SizeRange(*bounds) for dim, bounds in private_sizes.marked_ranges(tensor).items()})
    marks.update(vars(tensor).get(MARK, {}))
    return marks


@dataclass(frozen=True)
class ShapePolicy:
    """The choice of symbolic sizes and numbers, by the name of the source that they are read from.

    ``everything``: all sizes of tensors that are no parameters, and whole numbers that are arguments. ``data_sizes``: what
    happens where an operator makes a size or a number out of a tensor's data: a break, or a symbol that the graph itself
    computes; ``"ask"`` is a break that tells the caller to try the symbol. ``expects_changes``: a capture begins again where it
    comes to know of numbers that will change.
    """

    everything: bool = False
    sizes: Mapping[str, frozenset[int]] = field(default_factory=dict)
    numbers: frozenset[str] = frozenset()
    marked: bool = False
    allowed: bool = True
    data_sizes: Literal["break", "ask", "keep"] = "break"
    expects_changes: bool = False

    @property
    def is_static(self) -> bool:
        """Whether nothing can become symbolic."""
        return not self.allowed or not (self.everything or self.sizes or self.numbers or self.marked)

    @property
    def has_symbols(self) -> bool:
        """Whether the capture may meet a symbol of any kind."""
        return not self.is_static or self.data_sizes == "keep"

    def symbolic_sizes(self, tensor: torch.Tensor, name: str) -> dict[int, SizeRange]:
        """The symbolic dimensions of a tensor. Sizes of 0 and 1 stay as they are: operators treat them as special."""
        if self.is_static:
            return {}
        if name.endswith(NUMBER_SUFFIX):
            return {1: SizeRange()}
        chosen: dict[int, SizeRange] = dict.fromkeys(self.sizes.get(name, ()), SizeRange())
        if self.everything and not isinstance(tensor, torch.nn.Parameter):
            chosen.update(dict.fromkeys(range(tensor.dim()), SizeRange()))
        if self.marked:
            chosen.update(marks_of(tensor))
        static = private_sizes.marked_dimensions(tensor, "static")
        movable = {dim for dim, size in enumerate(tensor.shape) if size > 1 and dim not in static}
        return {dim: bounds for dim, bounds in chosen.items() if dim in movable}

    def is_symbolic_number(self, value: int | float, name: str, is_argument: bool) -> bool:
        """Whether a number that was read is symbolic; 0, 1 and floats only where they were seen to change."""
        if self.is_static:
            return False
        if name in self.numbers:
            return can_be_symbolic(value) or (value in (0, 1) and type(value) is int)
        return self.everything and is_argument and type(value) is int and can_be_symbolic(value)

    def has_symbolic_items(self, kind: type, name: str) -> bool:
        """Whether numbers in a tuple of leaves were seen to change, so that each of its items is looked at by itself."""
        return kind in (tuple, torch.Size) and name in self.numbers and not self.is_static


def can_be_symbolic(value: object) -> bool:
    """Whether a number is one that a symbol can stand for.

    >>> [can_be_symbolic(value) for value in (7, 1, True, 0.5, 0.0, 1e60)]
    [True, False, False, True, False, False]
    """
    if type(value) is float:
        return value != 0.0 and abs(value) <= LARGEST_FLOAT
    return type(value) is int and 2 <= value < 1 << 62


@dataclass(frozen=True)
class Recorded:
    """One guard of the shape environment, with the user's line that it came from."""

    expression: Any
    location: UserLocation | None


class RecordingShapeEnv(private_sizes.QuickShapeEnv):
    """A shape environment that knows the user's line of each of its guards."""

    def __init__(self) -> None:
        # Each size is a symbol of its own: two that are equal today may differ tomorrow.
        super().__init__(duck_shape=False)
        self.locate: Callable[[], UserLocation | None] = lambda: None
        #: Whether something may be assumed of sizes that the data decides: the graph is still to check it.
        self.may_assume = False
        self.assumed_elsewhere: list[Any] = []  # conditions on its sizes that another process has found, as data
        self._locations: list[UserLocation | None] = []

    def evaluate_sym_node(self, *args: Any, **kwargs: Any) -> Any:
        """See the base class."""
        if private_sizes.is_for_node_metadata(sys._getframe(1)) and args[0].has_hint():
            return args[0].hint
        try:
            result = super().evaluate_sym_node(*args, **kwargs)
        except private_tracing.DATA_DEPENDENT_ERRORS:
            if not (self.may_assume and private_sizes.assume_usual_sizes(self, args[0].expr)):
                raise
            result = super().evaluate_sym_node(*args, **kwargs)
        if len(self._locations) < len(self.guards):
            self._locations += [self.locate()] * (len(self.guards) - len(self._locations))
        return result

    def recorded(self) -> list[Recorded]:
        """All guards so far."""
        locations = self._locations + [None] * (len(self.guards) - len(self._locations))
        return [Recorded(guard.expr, place) for guard, place in zip(self.guards, locations, strict=True)]


class Bindings:
    """Where each symbol can be read at a later call: (input index, "size" | "stride" | "offset" | "value", dimension)."""

    def __init__(self) -> None:
        self.symbols: dict[Any, tuple[int, str, int]] = {}
        self.relations: list[tuple[int, str, int, Any]] = []
        self.names: list[str] = []

    def add(self, values: Sequence[torch.Tensor], names: Sequence[str]) -> Bindings:
        """These bindings, with more inputs behind those that are known."""
        first, self.names = len(self.names), [*self.names, *names]
        for index, value in enumerate(values, first):
            parts: list[tuple[str, int, Any]] = [("size", dim, size) for dim, size in enumerate(value.shape)]
            parts += [("stride", dim, step) for dim, step in enumerate(value.stride())]
            parts.append(("offset", 0, value.storage_offset()))
            carried = private_sizes.carried_float(value)
            if carried is not None:
                parts.append(("value", 0, carried))
            for kind, dim, part in parts:
                if not private_sizes.is_symbolic(part):
                    continue
                expression = private_sizes.first_expression(part)
                if private_sizes.is_symbol(expression) and expression not in self.symbols:
                    self.symbols[expression] = (index, kind, dim)
                else:
                    self.relations.append((index, kind, dim, expression))
        return self

    def text(self, place: tuple[int, str, int]) -> str:
        """The place as a user would write it."""
        index, kind, dim = place
        name = self.names[index]
        if name.endswith(NUMBER_SUFFIX):
            return name.removesuffix(NUMBER_SUFFIX)
        return {"size": f"{name}.shape[{dim}]", "stride": f"{name}.stride({dim})"}.get(kind, f"{name}.storage_offset()")

    def code(self, place: tuple[int, str, int]) -> str:
        """Python that reads it from the list of fetched tensors."""
        index, kind, dim = place
        calls = {"size": f"size({dim})", "stride": f"stride({dim})", "value": "item()"}
        return f"tensors[{index}].{calls.get(kind, 'storage_offset()')}"

    def function(self, expressions: Sequence[Any]) -> Callable[[Sequence[torch.Tensor]], tuple[Any, ...]]:
        """``compute(tensors)``: the values of expressions over the symbols.

        Raises :class:`CaptureError` for an expression that Python cannot compute from them.
        """
        texts = [private_sizes.python_text(item, self._variables(item)) for item in expressions]
        body = "".join(f"{text}, " for text in texts)
        source = f"def compute(tensors):\n    return ({body})\n"
        space: dict[str, Any] = private_sizes.python_text_globals()
        exec(compile(source, "<shapes>", "exec"), space)
        return space["compute"]  # type: ignore[no-any-return]

    def _variables(self, expression: Any) -> dict[Any, str]:
        variables = {}
        for symbol in private_sizes.symbols_of(expression):
            if symbol not in self.symbols:
                raise CaptureError(
                    f"a size depends on {symbol}, which cannot be read off the inputs",
                    advice="keep sizes independent of the data",
                )
            variables[symbol] = self.code(self.symbols[symbol])
        return variables

    def sentence(self, expression: Any) -> str:
        """An expression in the user's words."""
        shown = {symbol: self.text(place) for symbol, place in self.symbols.items()}
        return private_sizes.python_text(
            expression, {symbol: shown[symbol] for symbol in private_sizes.symbols_of(expression)}
        )


@dataclass(eq=False)
class ShapeGuards:
    """Conditions on the sizes, strides and numbers of a call. ``holds(tensors)`` checks all of them."""

    holds: types.FunctionType
    sentences: tuple[tuple[str, UserLocation | None, Callable[[Sequence[torch.Tensor]], bool]], ...]

    def failures(self, tensors: Sequence[torch.Tensor]) -> list[tuple[str, UserLocation | None]]:
        """The conditions that do not hold, as sentences with the user's line."""
        return [(text, place) for text, place, holds in self.sentences if not holds(tensors)]


#: A condition that is not even defined, such as a remainder by a size that is 0 here, does not hold.
_CHECK = """
def holds(tensors):
    try:
        return {0}
    except ArithmeticError:
        return False
"""


def shape_guards(environment: RecordingShapeEnv, bindings: Bindings) -> ShapeGuards | None:
    """All that a shape environment assumes, as a check of the fetched tensors; None where it assumes nothing.

    Raises :class:`CaptureError` for an assumption that cannot be checked from them.
    """
    if not bindings.symbols and not environment.guards:
        return None
    texts: list[tuple[str, str, UserLocation | None]] = []
    for symbol, place in bindings.symbols.items():
        low, high = private_sizes.range_of(environment, symbol)
        code, text = bindings.code(place), bindings.text(place)
        if low is not None:
            texts.append((f"{low} <= {code}", f"`{text}` must be at least {low}", None))
        if high is not None:
            texts.append((f"{code} <= {high}", f"`{text}` must be at most {high}", None))
    for index, kind, dim, expression in bindings.relations:
        part = (index, kind, dim)
        value = private_sizes.python_text(expression, bindings._variables(expression))
        shown = bindings.sentence(expression)
        texts.append((f"{bindings.code(part)} == {value}", f"`{bindings.text(part)}` must be `{shown}`", None))
    for item in environment.recorded():
        code = private_sizes.python_text(item.expression, bindings._variables(item.expression))
        texts.append((code, f"`{bindings.sentence(item.expression)}` must hold", item.location))
    # A recorded guard knows the user's line; the ranges that follow from it do not.
    texts.sort(key=lambda item: item[2] is None)
    unique = list({item[0]: item for item in reversed(texts)}.values())[::-1]
    joined = " and ".join(f"({code})" for code, _, _ in unique) or "True"
    space: dict[str, Any] = private_sizes.python_text_globals()
    exec(compile(_CHECK.format(joined), "<shape guards>", "exec"), space)
    joined_holds = space["holds"]
    sentences: list[tuple[str, UserLocation | None, Callable[[Sequence[torch.Tensor]], bool]]] = []
    for code, text, line in unique:
        exec(compile(_CHECK.format(code), "<shape guards>", "exec"), space)
        sentences.append((text, line, space["holds"]))
    return ShapeGuards(joined_holds, tuple(sentences))
