"""Writes the check of one entry: a Python function that walks the tree of sources, asks all guards and returns the input tensors.

Every object is fetched once: the function walks the tree with one local variable per depth. The arguments come first, since they
change most often; then the tensors reached from them, in one C++ check; then the rest.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dovetail.guards.ambient import AmbientState
from dovetail.guards.guard import FrozenGuards, Guard, is_argument
from dovetail.guards.predicate import Predicate, Relation
from dovetail.guards.reading import FETCH_ERRORS
from dovetail.guards.source import Source
from dovetail.guards.tensor_predicate import Leafness, TensorMatch
from dovetail.guards.tree import Group, Node, Tree
from dovetail.guards.writer import Writer
from dovetail.torch_private import guards as private_guards

_storage = torch.Tensor.untyped_storage
_address = torch.UntypedStorage.data_ptr


class Generator(Writer):
    """Writes the function for one set of guards.

    ::

        generate
          |- write_head           the call's shape, torch's state
          |- walk                 arguments: fetch, ask, go on to the steps below
          |- before_others
          |- walk                 everything else
          +- write_tail           relations, all tensors, their memory, symbolic sizes, the result

    A faster check derives from it and overrides the methods that say what is left to ask.
    """

    def __init__(self, frozen: FrozenGuards, ambient: AmbientState | None, tree: Tree) -> None:
        super().__init__(tree)
        self.frozen = frozen
        self.ambient = ambient
        self.names["MISSES"] = FETCH_ERRORS

    def generate(self) -> str:
        """The text of the function."""
        frozen = self.frozen
        self.write_head()
        roots = list(self.tree.roots.values())
        for node in roots:
            if is_argument(node.source):
                self.walk(node, 0)
        if frozen.argument_bulk is not None:
            arguments = [f"t{index}" for index, item in enumerate(frozen.tensors) if is_argument(item.source)]
            self.require(f"{self.constant(frozen.argument_bulk, 'check_arguments_')}({', '.join(arguments)})")
        self.before_others()
        for node in roots:
            if not is_argument(node.source):
                self.walk(node, 0)
        self.write_tail()
        body = "\n".join(self.lines)
        return f"def check(callee, args, kwargs):\n    try:\n{body}\n    except MISSES:\n        return None\n"

    def make_check(self) -> tuple[Callable[..., list[torch.Tensor] | None], str]:
        """The function, and its text."""
        text = self.generate()
        namespace = dict(self.names)
        exec(compile(text, "<dovetail guards>", "exec"), namespace)
        # Not left in its own namespace: a cycle would keep what it remembers until the next garbage collection.
        return namespace.pop("check"), text

    # --- before and after the walk ------------------------------------------------------------------------------------

    def write_head(self) -> None:
        """Ask for the call's shape and the state of torch."""
        frozen = self.frozen
        if frozen.positional is not None:
            self.require(f"len(args) == {frozen.positional}")
        if frozen.keywords is not None:
            self.require(f"tuple(kwargs) == {frozen.keywords!r}" if frozen.keywords else "not kwargs")
        if self.ambient is not None:
            grad = self.constant(torch.is_grad_enabled, "is_grad_enabled_")
            self.require(f"{grad}() is {self.ambient.grad_mode}")
            self.require(f"{self.constant(self.ambient.matcher(), 'ambient_')}()")

    def write_tail(self) -> None:
        """Ask for everything that needs several values in hand, and return the tensors."""
        for group, is_same in self.open_groups():
            kept = ", ".join(str(node.kept) for node in group)
            if len(group) == 2:
                self.require(f"{group[0].kept} is {'' if is_same else 'not '}{group[1].kept}")
            else:
                self.require(f"len({{*map(id, ({kept}))}}) == {len(group)}")
        self.gather()
        if self.frozen.tensors:
            self._check_tensors(self.tensors())
        result = self.result()
        if self.frozen.shapes is not None:
            self.lines.append(f"        tensors = {result}")
            result = "tensors"
            self.require(f"{self.constant(self.frozen.shapes.holds, 'sizes_')}(tensors)")
        self.lines.append(f"        return {result}")

    def _check_tensors(self, names: str) -> None:
        frozen, count = self.frozen, len(self.frozen.tensors)
        if frozen.bulk is not None:
            self.require(f"{self.constant(frozen.bulk, 'check_tensors_')}({names})")
        else:
            for index, item in enumerate(frozen.tensors):
                self.require(f"not {self.constant(item.facts.differences, 'differences_')}('', t{index})")
        if count > 1 and (frozen.bulk is None or not private_guards.bulk_check_sees_duplicates()):
            self.require(f"len({{*map(id, ({names},))}}) == {count}")
        if frozen.separate and count > 1:
            separate = self.constant(separate_memory_check(frozen), "memory_is_separate_")
            self.require(f"{separate}(({names},), {frozen.separate!r})")

    def before_others(self) -> None:
        """Write what comes after the arguments and before everything else that is walked."""

    def gather(self) -> None:
        """Prepare what :meth:`tensors` names."""

    def tensors(self) -> str:
        """All input tensors, as the arguments of a call."""
        return ", ".join(f"t{index}" for index in range(len(self.frozen.tensors)))

    def result(self) -> str:
        """The list of all input tensors."""
        return f"[{self.tensors()}]"

    # --- the walk -----------------------------------------------------------------------------------------------------

    def walk(self, node: Node, depth: int) -> None:
        """Fetch a node's value, ask its guards, and go on with its children."""
        source = node.source
        variable = self.variable(depth)
        self.lines.append(f"        {variable} = {source.expression(self, self.variable(depth - 1))}")
        for condition in source.conditions(self, variable):
            self.require(condition)
        for guard in sorted(self.guards_of(node), key=lambda guard: not guard.predicate.asked_first):
            predicate = guard.predicate
            if isinstance(predicate, TensorMatch):
                self.lines.append(f"        t{predicate.index} = {variable}")
            elif not isinstance(predicate, Relation) and not self.is_implied_by_tensors(node, predicate):
                self.require(predicate.condition(self, source, variable))
        if self.is_kept(node):
            self.lines.append(f"        {node.kept} = {variable}")
        for child in node.children.values():
            self.walk(child, depth + 1)

    def variable(self, depth: int) -> str:
        """The local variable of a depth: a node's value is in use until its children are done."""
        return f"v{depth}"

    def guards_of(self, node: Node) -> list[Guard]:
        """The guards of a node that are to be asked where the tree is walked."""
        return node.guards

    def open_groups(self) -> list[Group]:
        """The groups of nodes whose values are kept in local variables, and must be one object or different ones."""
        return self.tree.groups

    def is_kept(self, node: Node) -> bool:
        """Whether a node's value is to be compared with that of another node."""
        return node.kept is not None

    def is_implied_by_tensors(self, node: Node, predicate: Predicate) -> bool:
        """Whether the check of all tensors comes to the same: a tensor that requires no gradient is a leaf."""
        if not isinstance(predicate, Leafness) or not predicate.is_leaf:
            return False
        matches = [guard.predicate.index for guard in node.guards if isinstance(guard.predicate, TensorMatch)]
        return any(not self.frozen.tensors[index].facts.requires_grad for index in matches)


#: ``rule(tensors, index)``: whether the others share no element with a tensor that is written to, though they share memory.
DISJOINT: list[Callable[[Sequence[torch.Tensor], int], bool]] = []


def separate_memory_check(frozen: FrozenGuards) -> Callable[[Sequence[torch.Tensor], tuple[int, ...]], bool]:
    """The check that some tensors share their memory with no other input."""
    standing = [
        (index, item.source)
        for index, item in enumerate(frozen.tensors)
        if type(item.source).memory is not Source.memory
    ]
    if not standing:
        return _is_separate

    def is_separate(tensors: Sequence[torch.Tensor], indices: tuple[int, ...]) -> bool:
        more = [part for index, source in standing for part in source.memory(tensors[index])]
        return _is_separate([*tensors, *more], indices)

    return is_separate


def _is_separate(tensors: Sequence[torch.Tensor], indices: tuple[int, ...]) -> bool:
    memories: list[Any] = [*map(_address, map(_storage, tensors))]
    if len({*memories}) == len(memories):
        return True
    counts = collections.Counter(memories)
    # An empty tensor has no memory to share.
    shared = [index for index in indices if memories[index] and counts[memories[index]] > 1]
    return all(any(rule(tensors, index) for rule in DISJOINT) for index in shared)
