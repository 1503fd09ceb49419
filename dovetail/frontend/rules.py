"""The tables in which rules put what they know of single functions, operators and kinds of object.

The interpreter looks here before it does anything by its own lights. The tables are empty until :func:`load_rules
<dovetail.face.loading.load_rules>` has imported the modules of rules; with empty tables a plain model is captured all the same.
A table is its own decorator: ``@rule(torch.stft)`` puts a function into the table ``rule``, which the interpreter asks by
``rule.get(torch.stft)``.

A rule that returns ``NotImplemented`` has nothing to say of its arguments: the next one is asked, then the interpreter goes on.
Rules for one certain function (``@rule``) have the last word. A rule reads objects that existed before the capture by the
interpreter (``load_attribute``, ``drain`` …), which guards them, or guards them by ``interpreter.values``. State that it needs for
the length of a capture is an object of its own (:meth:`TracingInterpreter.state
<dovetail.frontend.protocol.TracingInterpreter.state>`).

>>> import math
>>> @rule(math.hypot)
... def _hypot(interpreter, args, kwargs):
...     return interpreter.call_native(math.sqrt, (sum(item * item for item in args),), {})
>>> rule.pop(math.hypot) is _hypot
True
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    import types

    import torch

    from dovetail.frontend.code.frame import Frame
    from dovetail.frontend.protocol import TracingInterpreter
    from dovetail.frontend.values.values import Values
    from dovetail.guards import Source
    from dovetail.runtime.recipe import Recipe
    from dovetail.runtime.recipe_builder import RecipeBuilder

Arguments = tuple[Any, ...]
Keywords = dict[str, Any]
Rule = TypeVar("Rule", bound=Callable[..., Any])


class Table(dict[Any, Rule], Generic[Rule]):
    """One rule for each key; a rule in the place of another one is put there as an item."""

    def __call__(self, *keys: Any) -> Callable[[Rule], Rule]:
        """A decorator that registers a rule."""

        def register(handler: Rule) -> Rule:
            if taken := self.keys() & set(keys):
                raise ValueError(f"{taken} have a rule already")
            self.update(dict.fromkeys(keys, handler))
            return handler

        return register


class Chains(dict[Any, list[Rule]], Generic[Rule]):
    """Several rules for each key, which are asked in turn."""

    def __call__(self, *keys: Any) -> Callable[[Rule], Rule]:
        """A decorator that registers a rule."""

        def register(handler: Rule) -> Rule:
            for key in keys:
                self.setdefault(key, []).append(handler)
            return handler

        return register


class Chain(list[Rule], Generic[Rule]):
    """Rules that are asked in turn."""

    def __call__(self, handler: Rule) -> Rule:
        """A decorator that registers a rule."""
        self.append(handler)
        return handler


# --- calls ------------------------------------------------------------------------------------------------------------


#: ``rule(interpreter, args, kwargs)`` does a call of one certain function. For the function's own meaning it asks
#: ``interpreter.call_torch`` or ``call_native``.
CallRule = Callable[["TracingInterpreter", Arguments, Keywords], Any]


@dataclass(frozen=True)
class Instead:
    """The result of a rule that has another call made in the place of this one: the graph may break in there."""

    function: Any
    args: Arguments
    kwargs: Keywords


#: ``rule(interpreter, function, args, kwargs)`` does calls of several functions; a bound method has its owner in ``__self__``.
FunctionRule = Callable[["TracingInterpreter", Any, Arguments, Keywords], Any]

#: Every call, before anything else is asked.
first_rule: Chain[FunctionRule] = Chain()
#: A call of exactly this function or class; of a method of a builtin class also where it is bound.
rule: Table[CallRule] = Table()
#: A function or method of torch, by its name.
method_rule: Chains[FunctionRule] = Chains()
#: A function of torch that is given this keyword.
keyword_rule: Table[FunctionRule] = Table()
#: A function of torch that is given one of these layouts.
layout_rule: Table[FunctionRule] = Table()
#: An object of this very class that is called.
callable_rule: Table[FunctionRule] = Table()
#: Native code of a module, by the module's name, that is not just called.
native_rule: Table[FunctionRule] = Table()
#: ``rule(function, args, kwargs)`` says whether a Python function that runs natively by its module is interpreted in this call.
interpreted_rule: Chain[Callable[[types.FunctionType, Arguments, Keywords], bool]] = Chain()
#: ``rule(interpreter, function, args, kwargs, result)`` guards what a function of torch, called as it is, has read.
called_rule: Chain[Callable[[TracingInterpreter, Any, Arguments, Keywords, Any], None]] = Chain()
#: ``rule(interpreter, wrapper, args, kwargs)`` says what is called in the place of a Python function or module, if something is.
wrapper_rule: Chain[Callable[[TracingInterpreter, Any, Arguments, Keywords], Instead | None]] = Chain()
#: An object of a class is about to be made: :class:`Break` may be raised.
class_rule: Chain[Callable[[type], None]] = Chain()

# --- attributes, operators, texts -------------------------------------------------------------------------------------


#: ``rule(interpreter, tensor, name_or_value)`` reads an attribute by its name, or sets it to a value.
AttributeRule = Callable[["TracingInterpreter", "torch.Tensor", Any], Any]
#: ``rule(interpreter, function, operands)`` does an operator, by its function of the module ``operator``, or ``max`` or ``min``.
OperatorRule = Callable[["TracingInterpreter", Any, Arguments], Any]

#: An attribute of a traced tensor that is read, or set, by its name; ``threading.local`` stands for all of such an object.
attribute_rule: Table[AttributeRule] = Table()
setter_rule: Table[AttributeRule] = Table()
#: An operator on something else than numbers, texts and traced tensors.
operator_rule: Chains[OperatorRule] = Chains()
#: A pure function of numbers, at least one of them symbolic.
number_rule: Chain[OperatorRule] = Chain()
#: A value that a comparison or a hash by its class's own methods depends on: :class:`Break` may be raised.
comparison_rule: Chain[Callable[[Any], None]] = Chain()
#: The text of a symbolic number that the instruction at which a frame stands formats by a specification.
format_rule: Chain[Callable[[TracingInterpreter, Frame, Any, str], Any]] = Chain()
#: An error that Python or torch has raised, with the operands of the call: its text may be mended, another one raised.
error_rule: Chain[Callable[[TracingInterpreter, BaseException, Arguments], None]] = Chain()
#: The end of the program: effects may be added, or :class:`Break` raised.
end_rule: Chain[Callable[[TracingInterpreter], None]] = Chain()
#: All items of a list that existed before are about to be read, and held to what they are: :class:`Break` may be raised.
whole_rule: Chain[Callable[[Values, Any, Source, Any], None]] = Chain()
#: A traced tensor leaves the program: :class:`Break` may be raised.
leaving_rule: Chain[Callable[[TracingInterpreter, torch.Tensor], None]] = Chain()
#: Whether a frame is code of a library that knows no tensors: a call into it in which the graph breaks runs for real as a whole.
without_tensors_rule: Chain[Callable[[Frame], bool]] = Chain()
#: After a graph break, how many instructions from where a frame stands run for real too, as each would break the graph again.
real_rule: Chain[Callable[[Frame], int]] = Chain()

# --- data -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Jump:
    """An instruction of a frame that jumps to ``target`` where a truth is ``wanted``."""

    frame: Frame
    target: int
    wanted: bool


#: ``rule(interpreter, value, jump)`` gives the truth of a traced tensor or of a number made of data; ``jump`` is the instruction
#: that asks, where it is one. An answer that another call may not share is guarded, or asserted in the graph.
BranchRule = Callable[["TracingInterpreter", Any, "Jump | None"], Any]
#: The truth of a value that depends on the data of tensors.
branch_rule: Chain[BranchRule] = Chain()
#: A call that torch cannot trace because it needs the data of tensors.
data_rule: Chain[FunctionRule] = Chain()

# --- kinds of value ---------------------------------------------------------------------------------------------------


#: How the number or text that an immutable object of a library holds is read; None for other objects.
content_rule: Chain[Callable[[Any], Callable[[Any], Any] | None]] = Chain()
#: ``rule(values, object, source)`` gives the stand-in of an immutable object that holds a number that was seen to change.
changing_rule: Chain[Callable[[Values, Any, Source], Any]] = Chain()


def content_of(value: Any) -> Callable[[Any], Any] | None:
    """The reader of an immutable object's content, by which it is guarded; None for other objects."""
    for handler in content_rule:
        reader = handler(value)
        if reader is not None:
            return reader
    return None


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
        """The recipe that makes a real tensor of the program's own stand-in when the graph has run."""
        raise NotImplementedError

    def attribute(self, interpreter: TracingInterpreter, value: Any, name: str) -> Any:
        """``value.name``."""
        raise NotImplementedError

    def store(self, interpreter: TracingInterpreter, value: Any, name: str, item: Any) -> None:
        """``value.name = item``."""
        setattr(value, name, item)

    def call(self, interpreter: TracingInterpreter, function: Any, args: Arguments, kwargs: Keywords) -> Any:
        """A function of torch, or an operator, that is given a stand-in; NotImplemented: as if it were any object."""
        raise NotImplementedError


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
            for item in value if type(value) in (list, tuple) else (value,):
                if type(item) in STAND_INS:
                    return STAND_INS[type(item)]
    return None
