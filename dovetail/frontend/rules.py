"""The tables in which rules put what they know of single functions, operators and kinds of object.

The interpreter looks here before it does anything by its own lights. The tables are empty until :func:`load_rules
<dovetail.face.loading.load_rules>` has imported the modules of rules; with empty tables a plain model is captured all the same.

=====================  ===========================================================================================
``@rule``              a call of exactly this function or class
``@method_rule``       a function or method of torch, by its name
``@layout_rule``       a function of torch that is given one of these layouts
``@code_rule``         a function that a library makes anew each time, by its code
``@callable_rule``     an object of this class that is called
``@operator_rule``     an operator on something else than numbers, texts and traced tensors
``@instance_rule``     ``isinstance`` with a class of this metaclass
``@branch_rule``       the truth of a value that depends on the data of tensors
``@data_rule``         a call that torch cannot trace because it needs the data of tensors
``@format_rule``       a number that is symbolic and about to become a text
``value_kind``         a kind of tensor for which the program sees a stand-in
=====================  ===========================================================================================

A rule that says ``NotImplemented`` has nothing to say of its arguments: the next one is asked, then the interpreter goes on. Rules
for one certain function (``@rule``) have the last word. What a rule reads of objects that existed before the capture it reads by
the interpreter (``load_attribute``, ``drain`` …) or guards by ``interpreter.values``. What it has to keep for the length of a
capture it keeps in an object of its own (:meth:`TracingInterpreter.state
<dovetail.frontend.protocol.TracingInterpreter.state>`).

>>> import math
>>> @rule(math.hypot)
... def _hypot(interpreter, args, kwargs):
...     return interpreter.call_native(math.sqrt, (sum(item * item for item in args),), {})
>>> CALLS.pop(math.hypot) is _hypot
True
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    import torch

    from dovetail.frontend.code.frame import Frame
    from dovetail.frontend.protocol import TracingInterpreter
    from dovetail.frontend.values.values import Values
    from dovetail.guards import Source
    from dovetail.runtime.recipe import Recipe
    from dovetail.runtime.recipe_builder import RecipeBuilder

Arguments = tuple[Any, ...]
Keywords = dict[str, Any]
_Rule = TypeVar("_Rule", bound=Callable[..., Any])


# --- calls ------------------------------------------------------------------------------------------------------------


class CallRule(Protocol):
    """Does a call of one certain function."""

    def __call__(self, interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords, /) -> Any:
        """The result of the call. For the function's own meaning: ``interpreter.call_torch`` or ``call_native``."""


class FunctionRule(Protocol):
    """Does calls of several functions, each of which is handed over; of a bound method ``function.__self__`` is the owner."""

    def __call__(self, interpreter: TracingInterpreter, function: Any, args: Arguments, kwargs: Keywords, /) -> Any:
        """The result of the call, or NotImplemented."""


class OperatorRule(Protocol):
    """Does operators on values of a kind."""

    def __call__(self, interpreter: TracingInterpreter, function: Any, operands: Arguments, /) -> Any:
        """The result, or NotImplemented; ``function`` is that of the module ``operator``, or ``max`` or ``min``."""


class InstanceRule(Protocol):
    """Guards an answer of ``isinstance``."""

    def __call__(self, interpreter: TracingInterpreter, value: Any, kind: type, /) -> None:
        """Guard all that decides whether ``value`` counts as an instance of ``kind``."""


class FormatRule(Protocol):
    """Says which number a symbolic one is in a text."""

    def __call__(self, interpreter: TracingInterpreter, frame: Frame, value: Any, /) -> Any:
        """A plain number, or NotImplemented; the frame stands at the instruction that makes the text."""


CALLS: dict[Any, CallRule] = {}
METHODS: dict[str, list[FunctionRule]] = {}
LAYOUTS: dict[torch.layout, FunctionRule] = {}
CODES: dict[int, FunctionRule] = {}
CALLABLES: dict[type, FunctionRule] = {}
OPERATORS: dict[Any, list[OperatorRule]] = {}
INSTANCES: dict[type, InstanceRule] = {}
FORMATS: list[FormatRule] = []


def _into(table: Any, keys: tuple[Any, ...], many: bool = False) -> Callable[[_Rule], _Rule]:
    def register(handler: _Rule) -> _Rule:
        for key in keys:
            if many:
                table.setdefault(key, []).append(handler)
            else:
                table[key] = handler
        return handler

    return register


def rule(*functions: Any) -> Callable[[_Rule], _Rule]:
    """Register a :class:`CallRule` for these functions. For a method of a builtin class it holds for bound ones too."""
    return _into(CALLS, functions)


def method_rule(*names: str) -> Callable[[_Rule], _Rule]:
    """Register a :class:`FunctionRule` for the functions of torch that have one of these names."""
    return _into(METHODS, names, many=True)


def layout_rule(*layouts: torch.layout) -> Callable[[_Rule], _Rule]:
    """Register a :class:`FunctionRule` for functions of torch that are given one of these layouts."""
    return _into(LAYOUTS, layouts)


def code_rule(code: types.CodeType) -> Callable[[_Rule], _Rule]:
    """Register a :class:`FunctionRule` for the functions that have this code."""
    return _into(CODES, (id(code),))


def callable_rule(*kinds: type) -> Callable[[_Rule], _Rule]:
    """Register a :class:`FunctionRule` for objects of these very classes that are called."""
    return _into(CALLABLES, kinds)


def operator_rule(*functions: Any) -> Callable[[_Rule], _Rule]:
    """Register an :class:`OperatorRule`."""
    return _into(OPERATORS, functions, many=True)


def instance_rule(metaclass: type) -> Callable[[_Rule], _Rule]:
    """Register an :class:`InstanceRule` for the classes of a metaclass."""
    return _into(INSTANCES, (metaclass,))


def format_rule(handler: FormatRule) -> FormatRule:
    """Register a :class:`FormatRule`."""
    FORMATS.append(handler)
    return handler


# --- data -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Jump:
    """An instruction of a frame that jumps to ``target`` where a truth is ``wanted``."""

    frame: Frame
    target: int
    wanted: bool


class BranchRule(Protocol):
    """Knows which way a branch on data goes, or makes sure of it."""

    def __call__(self, interpreter: TracingInterpreter, value: Any, jump: Jump | None, /) -> Any:
        """The truth of ``value``, or NotImplemented. The value is a traced tensor or a number made of data; ``jump`` is the
        instruction that asks, where it is one. An answer that another call may not share is guarded, or asserted in the graph.
        """


class DataRule(Protocol):
    """Does a call that needs the data of tensors."""

    def __call__(
        self, interpreter: TracingInterpreter, function: Any, args: Arguments, kwargs: Keywords, result: Any, /
    ) -> Any:
        """The result, or NotImplemented. ``result`` is that of the call itself where it has one that no graph can hold (a view
        that lies where data says), else NotImplemented.
        """


BRANCHES: list[BranchRule] = []
DATA: list[DataRule] = []


def branch_rule(handler: BranchRule) -> BranchRule:
    """Register a :class:`BranchRule`; those registered first are asked first."""
    BRANCHES.append(handler)
    return handler


def data_rule(handler: DataRule) -> DataRule:
    """Register a :class:`DataRule`; those registered first are asked first."""
    DATA.append(handler)
    return handler


# --- kinds of value ---------------------------------------------------------------------------------------------------


class ValueKind:
    """A kind of tensor for which the program sees a stand-in, made of tensors that the graph can hold.

    A stand-in may be a tensor itself (of a subclass, whose operators take it apart), or an object of a class that is registered
    with the kind: then calls, operators and attributes come here.
    """

    def claims(self, real: torch.Tensor) -> bool:
        """Whether a tensor that existed before the capture is of this kind. Dense tensors of plain classes are not asked about."""
        raise NotImplementedError

    def holds(self, value: Any) -> bool:
        """Whether a value of the program is a stand-in of this kind."""
        raise NotImplementedError

    def stand_in(self, values: Values, real: torch.Tensor, source: Source) -> Any:
        """The stand-in for a tensor that was found at ``source``, with the guards that this needs; asked once a tensor."""
        raise NotImplementedError

    def example(self, values: Values, value: Any) -> Any:
        """An object that ``type`` and ``isinstance`` can be asked of in the place of a stand-in."""
        raise NotImplementedError

    def leave(self, interpreter: TracingInterpreter, builder: RecipeBuilder, value: Any) -> Recipe:
        """How a stand-in that the program has made becomes a real tensor when the graph has run."""
        raise NotImplementedError

    def attribute(self, value: Any, name: str) -> Any:
        """``value.name``."""
        raise NotImplementedError

    def call(self, interpreter: TracingInterpreter, function: Any, args: Arguments, kwargs: Keywords) -> Any:
        """A function of torch, or an operator, that is given a stand-in; NotImplemented: as if it were any object."""
        raise NotImplementedError

    def finish(self, interpreter: TracingInterpreter) -> None:
        """The program has ended; raise :class:`Break` for what it did to the parts of a stand-in and must not."""


KINDS: list[ValueKind] = []
STAND_INS: dict[type, ValueKind] = {}


def value_kind(kind: ValueKind, *stand_ins: type) -> None:
    """Register a kind of value, and the classes of its stand-ins that are no tensors."""
    KINDS.append(kind)
    STAND_INS.update(dict.fromkeys(stand_ins, kind))


def kind_of(value: Any) -> ValueKind | None:
    """The kind of which a value of the program is a stand-in."""
    return next((kind for kind in KINDS if kind.holds(value)), None)


def kind_among(values: Arguments) -> ValueKind | None:
    """The kind of which one of the values, or of the items of a list or tuple among them, is a stand-in that is no tensor."""
    if STAND_INS:
        for value in values:
            if type(value) in STAND_INS:
                return STAND_INS[type(value)]
            if type(value) in (list, tuple):
                for item in value:
                    if type(item) in STAND_INS:
                        return STAND_INS[type(item)]
    return None
