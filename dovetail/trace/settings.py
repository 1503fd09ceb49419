"""The settings and the findings of a capture, and its request to begin again.

Settings go down: :class:`CaptureSettings` is frozen, and the open trace carries it as ``trace.settings``. Results come up:
``trace.findings`` collects what later captures of the same function should know. An attempt that cannot succeed with its settings
raises :class:`Retry`, which says what to change.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from dovetail.errors import Interruption
from dovetail.trace.shapes import ShapePolicy

#: In place of an observed value: captures have seen different ones.
CHANGES: Final = "changes"
#: Strategies of the core. A rule names its own strategies. This one begins with the name of a number.
AS_SYMBOL: Final = " as a symbol"
GRAPH_BREAKS: Final = "graph breaks"
DATA_GUARDS: Final = "guards on the data of inputs, for branches of the program's"
SAYS_COMPILING: Final = "torch.compiler.is_compiling() is true"
#: The program itself is told what eager tells it, so that what it keeps by the answer is the same in every part of a function.
SAYS_EAGER: Final = "torch.compiler.is_compiling() is false for the program"
#: The joint graph has the calls that run again in the backward; a program that is replayed call by call has not.
RECOMPUTES: Final = "calls that run again in the backward"
EAGER_INSTEAD: Final = "eager in the place of a graph that passes have not edited"


@dataclass(frozen=True)
class CaptureSettings:
    """The settings of one attempt.

    ``shapes`` says which sizes and numbers are symbolic. ``exact``: the graph computes eager's numbers to the last bit.
    ``one_graph``: graph breaks are errors, so what cannot be traced is kept as one opaque call where that is possible.
    ``stop_before``: the number of the instruction before which the graph ends; 0 for none. ``math_attention``: fused attention
    kernels, which have no second derivative, are replaced by the operators that they are made of. ``marks_gradients``: gradients
    that go into ``.grad`` are marked in the graph for a pass. ``without``: names of strategies that earlier attempts gave up.
    ``observed``: see :meth:`dovetail.trace.trace.Trace.changes`.

    >>> CaptureSettings(without=frozenset({"schedules after the graph"})).allows("schedules after the graph")
    False
    """

    shapes: ShapePolicy = field(default_factory=ShapePolicy)
    exact: bool = False
    one_graph: bool = False
    stop_before: int = 0
    math_attention: bool = False
    marks_gradients: bool = False
    without: frozenset[str] = frozenset()
    observed: Mapping[Hashable, Any] = field(default_factory=dict)

    def allows(self, strategy: str) -> bool:
        """Whether no attempt has given up this strategy."""
        return strategy not in self.without

    @property
    def ends_at_breaks(self) -> bool:
        """Whether the graph may end at the first graph break, without another attempt."""
        return not self.stop_before and self.shapes.data_sizes != "keep" and self.allows(GRAPH_BREAKS)

    def giving_up(self, strategy: str) -> CaptureSettings:
        """These settings without a strategy."""
        return dataclasses.replace(self, without=self.without | {strategy})

    def with_data_sizes(self) -> CaptureSettings:
        """These settings with symbols for sizes that an operator makes out of a tensor's data."""
        return dataclasses.replace(self, shapes=dataclasses.replace(self.shapes, data_sizes="keep"))

    def with_fewer_symbols(self) -> CaptureSettings:
        """These settings without symbols for sizes of data; without any symbols where these are off already.

        >>> settings = CaptureSettings(ShapePolicy(everything=True)).with_data_sizes()
        >>> settings.with_fewer_symbols().shapes.has_symbols, settings.with_fewer_symbols().with_fewer_symbols().shapes.has_symbols
        (True, False)
        """
        if self.shapes.data_sizes == "keep":
            return dataclasses.replace(self, shapes=dataclasses.replace(self.shapes, data_sizes="break"))
        return dataclasses.replace(self, shapes=ShapePolicy(allowed=False, data_sizes=self.shapes.data_sizes))


@dataclass
class Findings:
    """Findings of a capture for later captures of the same function, also where it fails.

    ``asked_numbers``: the program asked for the number in a tensor. ``told_compiling``: what it was told when it asked
    whether it is compiled.
    ``observed``: values that rules have noted, or :data:`CHANGES`. ``changing_numbers``: names of numbers that will change.
    ``raised``: the last ``KeyboardInterrupt``, ``SystemExit`` or other ``BaseException`` that the program itself raised.
    ``interrupt`` was raised by the handler of a signal. ``ended``: the graph break before which the graph ends.
    """

    asked_numbers: bool = False
    told_compiling: set[bool] = field(default_factory=set)
    observed: dict[Hashable, Any] = field(default_factory=dict)
    changing_numbers: set[str] = field(default_factory=set)
    raised: BaseException | None = None
    interrupt: BaseException | None = None
    ended: Any = None


class Retry(Interruption):
    """The capture must begin again, without a strategy or with settings changed otherwise.

    A strategy that was given up stays given up in all later captures of the function; other changes are for this call only.

    >>> retry = Retry("a rate is read after the schedule's step()", without="schedules after the graph")
    >>> retry.changed(CaptureSettings()).without
    frozenset({'schedules after the graph'})
    """

    def __init__(
        self, reason: str, *, without: str = "", change: Callable[[CaptureSettings], CaptureSettings] | None = None
    ) -> None:
        self.reason = reason
        self._without = without
        self._change = change
        super().__init__(reason)

    def changed(self, settings: CaptureSettings) -> CaptureSettings:
        """The settings for the next attempt."""
        settings = settings if self._change is None else self._change(settings)
        return settings.giving_up(self._without) if self._without else settings
