"""The place where faster checks plug in.

A generated check asks every guard at every call. An accelerator may know a cheaper way to the same answer, such as asking whether
anything was written to since the last hit. It gets the :class:`Checker` of a new entry and the tree of its sources, and may replace
``checker.check`` by a function that gives the same answer to every call, then or later. With no accelerator all checks are
right, only slower.

>>> def count_calls(checker, tree):
...     full = checker.check
...     def check(callee, args, kwargs):
...         calls.append(args)
...         return full(callee, args, kwargs)
...     checker.check = check
>>> calls = []
>>> register(count_calls)
>>> from dovetail.guards import GuardSet, compile_checker
>>> compile_checker(GuardSet()).check(None, (), {}), calls
([], [()])
>>> ACCELERATORS.remove(count_calls)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dovetail.guards.checker import Checker
    from dovetail.guards.tree import Tree

Accelerator = Callable[["Checker", "Tree"], None]

#: The accelerators in use, in the order in which they see a new check.
ACCELERATORS: list[Accelerator] = []


def register(accelerator: Accelerator) -> None:
    """Let an accelerator see the check of every entry that is made from now on."""
    ACCELERATORS.append(accelerator)


def accelerate(checker: Checker, tree: Tree) -> None:
    """Let every accelerator see a new check."""
    for accelerator in ACCELERATORS:
        accelerator(checker, tree)
