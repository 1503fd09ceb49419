"""Writes the check that remembers what the last hit found; see :mod:`dovetail.guards.remembered`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from dovetail.guards.checker import Checker, Generator, Group, Node, make_check
from dovetail.guards.guard import Guard
from dovetail.guards.native import NativeWriter
from dovetail.guards.predicate import RELATIONS, NoHooks, TensorMatch
from dovetail.guards.remembered import Check, Recorder, Remembering
from dovetail.guards.source import InstanceDictSource, PinnedSource
from dovetail.torch_private import guard_managers as private_guard_managers


def remember_hits(checker: Checker, generator: Generator, full: Check) -> None:
    """Let a checker replace its check by one that remembers, and back, as hits come."""
    if not private_guard_managers.sees_changed_dictionaries():
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
        if private_guard_managers.has_native_guards():
            native = NativeWriter(generator, {*recorder.values, *recorder.anchors})
            check = make_check(_FastGenerator(generator, recorder, anchors, unchanged, again, native))[0]
            if native.make_check()():
                return check
        return make_check(_FastGenerator(generator, recorder, anchors, unchanged, again, None))[0]

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
        native: NativeWriter | None,
    ) -> None:
        super().__init__(full.frozen, full.ambient, full)
        self.recorder = recorder
        self.anchors = anchors
        self.unchanged = unchanged
        self.again = again
        self.known: list[torch.Tensor | None] = [None] * len(self.frozen.tensors)
        self.native = native
        self._asked = False
        self._native_line: int | None = None
        self._unrelated = full.open_groups()
        if native is not None:
            for root in self.roots.values():
                self.take(native, root)
            self._unrelated = native.relate(self._unrelated)
        for node, value in recorder.values.items():
            for guard in node.guards:
                if isinstance(guard.predicate, TensorMatch):
                    self.known[guard.predicate.index] = value
                    self.names[f"t{guard.predicate.index}"] = value

    def take(self, native: NativeWriter, node: Node) -> None:
        """Have all guards asked in C++ that can be: those below what the function has at hand as a constant."""
        values = self.recorder.values
        if isinstance(node.source, PinnedSource) and node not in values:
            native.take(node, node.source.pinned.value)
        for child in node.children.values():
            if node in values and node not in self.anchors and child not in values:
                native.take_below(child, values[node])
            self.take(native, child)

    def walk(self, node: Node, depth: int) -> None:
        """As the full check does, up to where remembering starts."""
        if node in self.recorder.tables:
            if not self._asked:
                self.ask_first()
            self.remembered(node, depth, self.constant(self.recorder.values[node], "known_"))
            return
        if node not in self.anchors:
            if self.native is None or not self.native.is_complete(node):
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
        self.reserve_native()
        self.remembered(node, depth, variable)

    def guards_of(self, node: Node) -> list[Guard]:
        """Those that are not asked in C++."""
        native = self.native
        return node.guards if native is None else [guard for guard in node.guards if not native.has(guard)]

    def before_others(self) -> None:
        """What is remembered of globals and classes, and what is asked in C++, comes before the rest of the tree."""
        if not self._asked and self.recorder.tables:
            self.ask_first()
        self.reserve_native()

    def ask_first(self) -> None:
        """Have the full check decide if anything that is remembered has changed."""
        self.lines.append(f"        if not ({self.ask()}): return {self.start_again()}")
        self.reserve_native()

    def reserve_native(self) -> None:
        """A line for the guards that are asked in C++: before all that relies on the types that they ask for."""
        if self._native_line is None:
            self._native_line = len(self.lines)
            self.lines.append("")

    def _tail(self) -> None:
        if self._native_line is not None:
            native = self.native
            # Below a second object that is remembered, which is compared only further on, they are of no account where the
            # call has another object: the full check decides.
            miss = self.start_again() if len(self.anchors) > 1 else "None"
            line = (
                [f"        if not {self.constant(native.make_check(), 'native_')}(): return {miss}"]
                if native and native.count
                else []
            )
            self.lines[self._native_line : self._native_line + 1] = line
        super()._tail()

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
                if self.native is not None and self.native.is_complete(child):
                    continue
                if value != self.variable(depth):
                    self.lines.append(f"        {self.variable(depth)} = {value}")
                self.walk(child, depth + 1)

    def open_groups(self) -> list[Group]:
        """The groups of which not all are remembered."""
        values = self.recorder.values
        return [found for found in self._unrelated if any(node not in values for node in found[0])]

    def is_kept(self, node: Node) -> bool:
        """Whether a node's value is to be compared with that of another node."""
        return super().is_kept(node) and not (self.native is not None and self.native.is_related(node))

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
