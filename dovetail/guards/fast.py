"""Writes the check that remembers what the last hit found; see :mod:`dovetail.guards.remembered`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from dovetail import torch_private as private
from dovetail.guards.checker import Checker, Generator, Group, Node, make_check
from dovetail.guards.predicate import RELATIONS, NoHooks, TensorMatch
from dovetail.guards.remembered import Check, Recorder, Remembering
from dovetail.guards.source import InstanceDictSource


def remember_hits(checker: Checker, generator: Generator, full: Check) -> None:
    """Let a checker replace its check by one that remembers, and back, as hits come."""
    if not private.sees_changed_dictionaries():
        return
    # The checker would keep itself alive, and with it the tensors that its check remembers.
    target = weakref.ref(checker)

    def install(check: Check) -> None:
        found = target()
        if found is not None:
            found.check = check

    def generate(
        recorder: Recorder,
        anchors: dict[Node, weakref.ref[Any]],
        unchanged: Callable[[], bool],
        again: Check,
    ) -> Check:
        return make_check(_FastGenerator(generator, recorder, anchors, unchanged, again))[0]

    remembering = Remembering(full, generator, generate, install)
    checker.check = remembering.first


class _FastGenerator(Generator):
    """Asks whether what is remembered has changed, and walks the tree for the rest only."""

    def __init__(
        self,
        full: Generator,
        recorder: Recorder,
        anchors: Mapping[Node, weakref.ref[Any]],
        unchanged: Callable[[], bool],
        again: Check,
    ) -> None:
        super().__init__(full.frozen, full.ambient, full)
        self.recorder = recorder
        self.anchors = anchors
        self.unchanged = unchanged
        self.again = again
        self.known: list[torch.Tensor | None] = [None] * len(self.frozen.tensors)
        self._asked = False
        for node, value in recorder.values.items():
            for guard in node.guards:
                if isinstance(guard.predicate, TensorMatch):
                    self.known[guard.predicate.index] = value
                    self.names[f"t{guard.predicate.index}"] = value

    def walk(self, node: Node, depth: int) -> None:
        """As the full check does, up to where remembering starts."""
        if node in self.recorder.tables:
            if not self._asked:
                self.lines.append(f"        if not ({self.ask()}): return {self.start_again()}")
            self.remembered(node, depth, self.constant(self.recorder.values[node], "known_"))
            return
        if node not in self.anchors:
            super().walk(node, depth)
            return
        variable = self.variable(depth)
        self.lines.append(f"        {variable} = {self.fetch(node.source, self.variable(depth - 1))}")
        own = next(child for child in node.children.values() if isinstance(child.source, InstanceDictSource))
        anchor, table = self.constant(self.anchors[node], "model_"), self.constant(self.recorder.anchors[node], "own_")
        same = f"{variable} is {anchor}() and {self.fetch(own.source, variable)} is {table}"
        if not self._asked:
            same += f" and {self.ask()}"
        self.lines.append(f"        if not ({same}): return {self.start_again()}")
        self.remembered(node, depth, variable)

    def ask(self) -> str:
        """The expression that is true if nothing that is remembered has changed."""
        self._asked = True
        unchanged = f"{self.constant(self.unchanged, 'unchanged_')}()"
        hooks = self.recorder.hooks
        return f"{unchanged} and not any({self.constant(tuple(hooks), 'hooks_')})" if hooks else unchanged

    def start_again(self) -> str:
        """The expression that has the full check decide."""
        return f"{self.constant(self.again, 'again_')}(callee, args, kwargs)"

    def remembered(self, node: Node, depth: int, value: str) -> None:
        """The guards at and below a remembered value that its not having changed does not imply."""
        recorder = self.recorder
        own = next((child for child in node.children.values() if isinstance(child.source, InstanceDictSource)), None)
        for guard in node.guards:
            predicate = guard.predicate
            if isinstance(predicate, (*RELATIONS, TensorMatch)) or self.implied_by_tensors(node, predicate):
                continue
            if isinstance(predicate, NoHooks) and own is not None and own not in recorder.values:
                continue  # asked of the dictionary
            implied = (
                recorder.implies(node, predicate)
                if node not in self.anchors or isinstance(predicate, NoHooks)
                else False
            )
            if not implied:
                self.require(self.condition(node.source, predicate, value))
        if node.kept is not None and any(node in group for group, _ in self.open_groups()):
            self.lines.append(f"        {node.kept} = {value}")
        for child in node.children.values():
            if child in recorder.values:
                self.remembered(child, depth + 1, self.constant(recorder.values[child], "known_"))
            else:
                if value != self.variable(depth):
                    self.lines.append(f"        {self.variable(depth)} = {value}")
                self.walk(child, depth + 1)

    def open_groups(self) -> list[Group]:
        """The groups of which not all are remembered."""
        values = self.recorder.values
        return [found for found in super().open_groups() if any(node not in values for node in found[0])]

    def gather(self) -> None:
        """Put the remembered tensors and those that were just fetched in one list."""
        self.lines.append(f"        tensors = {self.constant(self.known, 'known_tensors_')}.copy()")
        for index, tensor in enumerate(self.known):
            if tensor is None:
                self.lines.append(f"        tensors[{index}] = t{index}")

    def result(self) -> str:
        """The list of all input tensors."""
        return "tensors"

    def tensors(self) -> str:
        """All input tensors, as the arguments of a call."""
        return "*tensors"
