"""The check of one entry: generated code that says yes or no at every call, and the sentences that say why it said no.

>>> from dovetail.guards import ArgumentSource
>>> guards = GuardSet()
>>> index = guards.add_tensor(ArgumentSource(0, "L['x']"), torch.zeros(8))
>>> checker = compile_checker(guards)
>>> [tuple(tensor.shape) for tensor in checker.check(None, (torch.ones(8),), {})]
[(8,)]
>>> print(checker.explain(None, (torch.ones(16),), {})[0])
`x.shape[0]` was 8, is 16
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from dovetail.guards.ambient import AmbientState
from dovetail.guards.generator import DISJOINT, Generator
from dovetail.guards.guard import FrozenGuards, GuardFailure, failures_of
from dovetail.guards.guard_set import GuardSet
from dovetail.guards.predicate import Call
from dovetail.guards.tree import Tree

#: ``check(callee, args, kwargs)`` gives the input tensors in index order, or None for a miss.
Check = Callable[[Any, tuple[Any, ...], Mapping[str, Any]], list[torch.Tensor] | None]


class Checker:
    """The check of one entry. ``check`` is the generated function itself; an accelerator may replace it by an equal, faster one."""

    def __init__(self, frozen: FrozenGuards, ambient: AmbientState | None, check: Check, source_code: str) -> None:
        self.guards = frozen
        self.ambient = ambient
        self.check = check
        #: The generated function, to read.
        self.source_code = source_code

    def explain(self, callee: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[GuardFailure]:
        """Why ``check`` would say no: one failure per guard that does not hold, the call's shape and state first."""
        frozen = self.guards
        call = Call(callee, args, kwargs, tuple([item.facts for item in frozen.tensors]))
        failures: list[GuardFailure] = []
        if self.ambient is not None:
            failures += [GuardFailure(sentence) for sentence in self.ambient.differences()]
        if frozen.positional is not None and len(args) != frozen.positional:
            failures.append(GuardFailure(f"the call had {frozen.positional} positional arguments, has {len(args)}"))
        if frozen.keywords is not None and tuple(kwargs) != frozen.keywords:
            then, now = ", ".join(frozen.keywords) or "none", ", ".join(kwargs) or "none"
            failures.append(GuardFailure(f"the names of the keyword arguments were {then}, are {now}"))
        for guard in frozen.guards if not failures else ():
            failures += failures_of(guard, call)
        if not failures:
            tensors = [call.fetch(item.source) for item in frozen.tensors]
            failures += self._one_tensor_twice(tensors) or self._shared_memory(tensors)
            if not failures and frozen.shapes is not None:
                failures += [GuardFailure(text, needed_at=place) for text, place in frozen.shapes.failures(tensors)]
        return failures

    def _one_tensor_twice(self, tensors: list[torch.Tensor]) -> list[GuardFailure]:
        failures = []
        seen: dict[int, str] = {}
        for item, tensor in zip(self.guards.tensors, tensors, strict=True):
            first = seen.setdefault(id(tensor), item.source.name)
            if first != item.source.name:
                failures.append(GuardFailure(f"`{first}` and `{item.source.name}` were two tensors, and are one now"))
        return failures

    def _shared_memory(self, tensors: list[torch.Tensor]) -> list[GuardFailure]:
        inputs = self.guards.tensors
        memories = [
            {part.untyped_storage().data_ptr() for part in (tensor, *item.source.memory(tensor))}
            for item, tensor in zip(inputs, tensors, strict=True)
        ]
        return [
            GuardFailure(
                f"`{inputs[index].source.name}`, which is written to, did not share its memory with "
                f"`{inputs[other].source.name}`, and does now"
            )
            for index in self.guards.separate
            for other, memory in enumerate(memories)
            if other != index and tensors[index].untyped_storage().data_ptr() in memory - {0}
            if not any(rule(tensors, index) for rule in DISJOINT)
        ]


#: Each sees the check of a new entry and the tree of its sources, and may replace ``checker.check`` by a function that gives the
#: same answer to every call, then or later: it may know that nobody has written to anything since the last hit.
ACCELERATORS: list[Callable[[Checker, Tree], None]] = []


def compile_checker(guards: GuardSet | FrozenGuards, ambient: AmbientState | None = None) -> Checker:
    """Generate the check for a set of guards; ``ambient`` is the state of torch that must hold as well, if given."""
    frozen = guards.freeze() if isinstance(guards, GuardSet) else guards
    tree = Tree(frozen.guards)
    check, text = Generator(frozen, ambient, tree).make_check()
    checker = Checker(frozen, ambient, check, text)
    for accelerator in ACCELERATORS:
        accelerator(checker, tree)
    return checker
