"""Guards: where a value is found again, what must hold for it, the generated check, and the sentence for a miss.

An entry may be used for a call if every value that its capture read would be read again. So whoever reads a value during a capture
adds a guard on its *source* (:mod:`~dovetail.guards.source`): a *predicate* (:mod:`~dovetail.guards.predicate`) that holds for all
values with which the capture would have gone the same way. ``docs/inside/guards.md`` says how this stays sound.

Sources, predicates and the two helpers that make checks of them are offered here; everything else is imported from its module.
"""

from dovetail.guards.ambient import AmbientState
from dovetail.guards.ambient_change import AmbientChange, autocast_nesting
from dovetail.guards.checker import Checker, compile_checker
from dovetail.guards.container_predicate import ClassBody, DictKeys, HasNoKey, Length, NoHooks, SetEquals
from dovetail.guards.guard import FrozenGuards, Guard, are_decided_by
from dovetail.guards.guard_set import GuardSet
from dovetail.guards.predicate import (
    Answers,
    Distinct,
    Equals,
    HasNoSlot,
    Identity,
    Predicate,
    SameObject,
    TypeIs,
    Unbound,
)
from dovetail.guards.source import (
    ArgumentSource,
    AttributeSource,
    CalleeSource,
    CellSource,
    ComputedSource,
    FloatSource,
    GradSource,
    InstanceDictSource,
    ItemSource,
    KeywordSource,
    NumberSource,
    Pinned,
    PinnedSource,
    Source,
    Step,
)
from dovetail.guards.tensor_predicate import Leafness, TensorFacts, TensorMatch
