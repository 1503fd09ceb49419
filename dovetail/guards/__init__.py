"""Guards: where a value is found again, what must hold for it, the generated check, and the sentence for a miss.

**How a guard stays sound.** An entry may be used for a call if every value that its capture read would be read again. So

- whoever reads a value during a capture adds a guard on its *source* (:mod:`~dovetail.guards.source`): a *predicate*
  (:mod:`~dovetail.guards.predicate`) that holds for all values with which the capture would have gone the same way. Reading without
  a guard is the one way to make a wrong entry;
- checking runs none of the program's code and changes nothing (:mod:`~dovetail.guards.reading`); a value that can no longer be read
  that way is a miss, never an error;
- the generated check (:mod:`~dovetail.guards.generator`) and the slow one (:meth:`Checker.explain`) answer the same: both are
  made of the same sources and predicates, and the tests compare them;
- a shortcut in generated code relies only on guards that have passed before it (:mod:`~dovetail.guards.tree`);
- objects that are compared by identity are held, so that no other object gets their address: weakly where the program may let go of
  them, and a weak reference that is dead matches nothing.

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
    SizeSource,
    Source,
    Step,
)
from dovetail.guards.tensor_predicate import Leafness, TensorFacts, TensorMatch
