"""Writes the check that remembers the values of the last hit; see :mod:`dovetail.fast_guards.remembered`."""

from __future__ import annotations

import weakref

import torch

from dovetail.fast_guards.native import NativeWriter
from dovetail.fast_guards.remembered import Recorder, Remembering
from dovetail.guards.ambient import AmbientState
from dovetail.guards.checker import Check, Checker
from dovetail.guards.generator import Generator
from dovetail.guards.guard import FrozenGuards, Guard
from dovetail.guards.predicate import Relation
from dovetail.guards.source import InstanceDictSource, PinnedSource
from dovetail.guards.tensor_predicate import TensorMatch
from dovetail.guards.tree import Group, Node, Tree
from dovetail.torch_private import guard_managers as private_guard_managers


def remember_hits(checker: Checker, tree: Tree) -> None:
    """Let a checker replace its check by one that remembers, and back, as hits come."""
    if not private_guard_managers.sees_changed_dictionaries():
        return
    frozen, ambient = checker.guards, checker.ambient
    # A strong reference would let the checker keep itself alive, and with it the tensors that its check remembers.
    target = weakref.ref(checker)

    def install(check: Check) -> None:
        found = target()
        if found is not None:
            found.check = check

    def generate(recorder: Recorder, again: Check) -> Check:
        if private_guard_managers.has_native_guards():
            native = NativeWriter(tree, {*recorder.values, *recorder.anchors})
            check = _FastGenerator(frozen, ambient, tree, recorder, again, native).make_check()[0]
            if native.make_check()():
                return check
        return _FastGenerator(frozen, ambient, tree, recorder, again, None).make_check()[0]

    checker.check = Remembering(checker.check, tree, generate, install).first


class _FastGenerator(Generator):
    """Asks whether remembered values have changed, and walks the tree for the others only.

    Guards below fixed objects are asked by ``native``, where there is one; ``again`` is the full check.
    """

    def __init__(
        self,
        frozen: FrozenGuards,
        ambient: AmbientState | None,
        tree: Tree,
        recorder: Recorder,
        again: Check,
        native: NativeWriter | None,
    ) -> None:
        super().__init__(frozen, ambient, tree)
        self.recorder = recorder
        self.again = again
        self.anchors = recorder.outermost
        self.known: list[torch.Tensor | None] = [None] * len(frozen.tensors)
        self.native = native
        self._asked = False
        self._native_line: int | None = None
        groups = tree.groups
        if native is not None:
            for root in tree.roots.values():
                self.take(native, root)
            groups = native.relate(groups)
        #: Nodes with a value that is not remembered, and all nodes in them.
        self._open = [found for found in groups if any(node not in recorder.values for node in found[0])]
        self._in_open = {node for found in self._open for node in found[0]}
        for node, value in self.recorder.values.items():
            for guard in node.guards:
                if isinstance(guard.predicate, TensorMatch):
                    self.known[guard.predicate.index] = value
                    self.names[f"t{guard.predicate.index}"] = value

    def take(self, native: NativeWriter, node: Node) -> None:
        """Let C++ ask guards below objects that the function has at hand as constants."""
        values = self.recorder.values
        if isinstance(node.source, PinnedSource) and node not in values:
            native.take(node, node.source.pinned.value)
        for child in node.children.values():
            if node in values and node not in self.anchors and child not in values:
                native.take(child, values[node], below=True)
            self.take(native, child)

    def walk(self, node: Node, depth: int) -> None:
        """Walk as the full check does, up to where remembering starts."""
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
        self.lines.append(f"        {variable} = {node.source.expression(self, self.variable(depth - 1))}")
        own = next(child for child in node.children.values() if isinstance(child.source, InstanceDictSource))
        anchor, table = self.constant(self.anchors[node], "model_"), self.constant(self.recorder.anchors[node], "own_")
        same = f"{variable} is {anchor}() and {own.source.expression(self, variable)} is {table}"
        if not self._asked:
            same += f" and {self.ask()}"
        self.lines.append(f"        if not ({same}): return {self.start_again()}")
        self.reserve_native()
        self.remembered(node, depth, variable)

    def guards_of(self, node: Node) -> list[Guard]:
        """The guards of a node that C++ does not ask."""
        native = self.native
        return node.guards if native is None else [guard for guard in node.guards if not native.has(guard)]

    def before_others(self) -> None:
        """Ask about remembered globals and classes, and the guards in C++, before the rest of the tree."""
        if not self._asked and self.recorder.tables:
            self.ask_first()
        self.reserve_native()

    def ask_first(self) -> None:
        """Let the full check decide if a remembered value has changed."""
        self.lines.append(f"        if not ({self.ask()}): return {self.start_again()}")
        self.reserve_native()

    def reserve_native(self) -> None:
        """Reserve a line for the guards that C++ asks, before everything that relies on the types that they ask for."""
        if self._native_line is None:
            self._native_line = len(self.lines)
            self.lines.append("")

    def write_tail(self) -> None:
        """Ask the guards that C++ takes, on the line that was reserved for them; then go on as the full check does."""
        if self._native_line is not None:
            native = self.native
            # A second outermost object is compared only further on: where the call has another one, the answer of the guards
            # below the remembered one says nothing, and the full check decides.
            miss = self.start_again() if len(self.anchors) > 1 else "None"
            line = (
                [f"        if not {self.constant(native.make_check(), 'native_')}(): return {miss}"]
                if native and native.count
                else []
            )
            self.lines[self._native_line : self._native_line + 1] = line
        super().write_tail()

    def ask(self) -> str:
        """The expression that is true if no remembered value has changed."""
        self._asked = True
        unchanged = f"{self.constant(self.recorder.unchanged, 'unchanged_')}()"
        hooks = self.recorder.hooks
        return f"{unchanged} and not any({self.constant(tuple(hooks), 'hooks_')})" if hooks else unchanged

    def start_again(self) -> str:
        """The expression that lets the full check decide."""
        return f"{self.constant(self.again, 'again_')}(callee, args, kwargs)"

    def remembered(self, node: Node, depth: int, value: str) -> None:
        """Ask the guards at and below a remembered value that may fail although nothing has changed."""
        recorder = self.recorder
        for guard in node.guards:
            predicate = guard.predicate
            if isinstance(predicate, (Relation, TensorMatch)) or self.is_implied_by_tensors(node, predicate):
                continue
            if node in self.anchors or not recorder.implies(node, predicate):
                self.require(predicate.condition(self, node.source, value))
        if node.kept is not None and node in self._in_open:
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
        """The groups with a value that is not remembered."""
        return self._open

    def is_kept(self, node: Node) -> bool:
        """Whether a node's value is to be compared with that of another node."""
        return super().is_kept(node) and not (self.native is not None and self.native.is_related(node))

    def gather(self) -> None:
        """Put the remembered tensors and the fetched ones in one list."""
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
