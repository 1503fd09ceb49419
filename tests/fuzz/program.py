"""A whole random program: its world, its function, and calls between which the world changes."""

from __future__ import annotations

import random

from tests.fuzz import awkward, effects, memory, training
from tests.fuzz.definitions import classes, global_line, helpers, indented, module
from tests.fuzz.generator import Scope
from tests.fuzz.statements import StatementWriter

_HEADER = """\
import abc
import collections
import contextlib
import dataclasses
import enum
import functools
import itertools
import logging
import math
import operator
import threading
import torch
import warnings
import dovetail
"""


#: What programs are about. The modules that write them say more.
THEMES = ("python", "python", "python", "memory", "memory", "memory", "training")


def program(seed: int, theme: str | None = None) -> str:
    """The source text of the program of a seed, about any theme or one of :data:`THEMES`.

    >>> program(1) == program(1) and program(1) != program(2)
    True
    """
    rng = random.Random(seed)
    theme = theme or rng.choice(THEMES)
    if theme == "training":
        return _HEADER + training.program(rng)
    return _Program(StatementWriter(rng, rng.random() < 0.35, about_memory=theme == "memory")).text()


class _Program:
    def __init__(self, writer: StatementWriter) -> None:
        self.writer = writer
        self.scope = Scope(breaks=writer.breaks)

    def text(self) -> str:
        writer = self.writer
        size = writer.rng.choice((5, 8, 12, 16) if writer.about_memory else (2, 3, 5, 8, 12))
        lines = [
            *self._globals(),
            *helpers(writer, self.scope),
            *classes(writer, self.scope),
            *module(writer, self.scope),
            *self._objects(),
        ]
        signature, scope = self._signature()
        body = writer.body(scope, size, returned="any")
        lines += [f"def function({signature}):", *indented(global_line(scope)), *indented(body)]
        for number in range(writer.rng.randint(3, 6)):
            lines += [f"def call_{number}(run):", *indented(self._call(number))]
        return _HEADER + "\n".join(lines) + "\n"

    def _globals(self) -> list[str]:
        scope = self.scope
        for kind, names in {
            "I": ["limit"],
            "F": ["factor"],
            "S": ["mode"],
            "LT": ["history"],
            "LI": ["numbers"],
            "DT": ["table"],
            "DI": ["counts"],
            "T": ["state", "square[0]"],
        }.items():
            for name in names:
                scope.add(kind, name, assignable=False)
        writer = self.writer
        for name in memory.MATRICES if writer.about_memory else ():
            scope.add("M", name, assignable=False)
            scope.add("T", name, assignable=False)
        requires_grad = ", requires_grad=True" if writer.chance(0.5) else ""
        history = writer.pick("[]", "[torch.ones(3)]", "[torch.randn(3), torch.randn(2, 3)]", "[state, state]")
        return [
            "class Problem(Exception): pass",
            "class Virtual(abc.ABC): pass",
            "Pair = collections.namedtuple('Pair', ['first', 'second'])",
            "class Mode(enum.Enum):",
            "    ON = 1",
            "    OFF = 2",
            f"tags = {writer.pick('set()', repr({'a'}))}",
            f"limit = {writer.pick('1', '2', '3')}",
            f"factor = {writer.pick('0.5', '2.0')}",
            f"mode = {writer.pick(repr('a'), repr('b'))}",
            "state = torch.randn(3)",
            f"square = torch.randn(3, 3{requires_grad})",
            f"history = {history}",
            f"numbers = {writer.pick('[]', '[1, 2]', '[3, 1, 2]')}",
            f"table = {writer.pick('{}', repr('x').join(('{', ': torch.randn(3)}')), '{repr_a: state}'.replace('repr_a', repr('a')))}",
            f"counts = {writer.pick('{}', '{repr_a: 1}'.replace('repr_a', repr('a')))}",
            *(f"base_{number} = torch.randn({size})" for number, size in enumerate(("2, 3", "2, 3", "1, 3", "3"))),
            f"nested = {{'a': {writer.pick('[state]', '[torch.ones(3), state]', 'history or [state]')}}}",
            *(f"leaf_{number} = torch.randn({size}, requires_grad=True)" for number, size in enumerate(("2, 3", "3"))),
        ]

    def _objects(self) -> list[str]:
        writer = self.writer
        self.scope.add("O", "thing", assignable=False)
        self.scope.add("O", "other", assignable=False)
        self.scope.add("T", "thing.weight")
        self.scope.add("F", "thing.scale")
        self.scope.add("I", "thing.count")
        self.scope.add("LT", "thing.items")
        self.scope.add("DT", "thing.table")
        self.scope.add("T", "net.weight", assignable=False)
        self.scope.add("T", "net.buffer", assignable=False)
        self.scope.add("I", "net.seen")
        self.scope.add("C", "counted", assignable=False)
        return [
            f"thing = Thing({writer.pick('state', 'torch.randn(3)', 'leaf_1', 'base_0')})",
            f"other = {writer.pick('thing', 'Thing(state, 2)', 'Thing(torch.randn(3))')}",
        ]

    def _signature(self) -> tuple[str, Scope]:
        writer = self.writer
        scope = self.scope.child()
        for name in ("x", "y"):
            scope.add("T", name, assignable=not writer.about_memory)
            if writer.about_memory:
                scope.add("M", name)
        self.parameters = [
            item
            for item in (
                ("n", "I", "2"),
                ("flag", "B", "True"),
                ("memo", "LT", "[]"),
                ("extra", "F", "1.0"),
                ("options", "DT", "{}"),
            )
            if writer.chance(0.4)
        ]
        parts = ["x", "y", *(f"{name}={default}" for name, _, default in self.parameters)]
        for name, kind, _ in self.parameters:
            scope.add(kind, name)
        self.rest = writer.chance(0.25)
        if self.rest:
            parts.append("*rest")
            scope.add("T", "sum(rest, x)", assignable=False)
            scope.add("I", "len(rest)", assignable=False)
        self.keywords = writer.chance(0.25)
        if self.keywords:
            parts.append("**named")
            scope.add("DT", "named", assignable=False)
        return ", ".join(parts), scope

    def _tensor(self) -> str:
        writer = self.writer
        if writer.about_memory:
            return writer.pick(*memory.ARGUMENTS)
        if writer.chance(0.85):
            return writer.pick(
                "base_0",
                "base_0",
                "base_1",
                "leaf_0",
                "leaf_0",
                "torch.randn(2, 3)",
                "torch.randn(2, 3, requires_grad=True)",
            )
        return writer.pick(
            "base_2",
            "base_3",
            "leaf_1",
            "torch.randn(4, 3)",
            "base_0.double()",
            "base_0[:1]",
            "base_0.T.contiguous().T",
            "leaf_0 * 2",
            "state",
            "thing.weight",
            "net.weight",
            "leaf_0.detach()",
            "base_0[0]",
            "torch.randn(2, 1)",
        )

    def _call(self, number: int) -> list[str]:
        writer = self.writer
        lines: list[str] = []
        scope = self.scope.child()
        scope.returns = False
        scope.assignable = {kind: [name for name in names if "." in name] for kind, names in scope.assignable.items()}
        if number:
            for _ in range(writer.rng.choice((0, 1, 1, 1, 2, 3))):
                if writer.chance(0.5):
                    lines.append(self._change())
                else:
                    writer._budget = 1
                    lines += writer.block(scope, 1, 0)
        x = self._tensor()
        y = x if writer.chance(0.12) else self._tensor()
        arguments = [x, y]
        by_position = True
        for name, kind, _ in self.parameters:
            if writer.chance(0.4):
                by_position = False
                continue
            value = writer._literal(kind) if writer.chance(0.7) else writer.expression(kind, self.scope, 1)
            arguments.append(value if by_position else f"{name}={value}")
        if self.rest and by_position and writer.chance(0.6):
            arguments += [self._tensor() for _ in range(writer.rng.randint(1, 2))]
        if self.keywords and writer.chance(0.6):
            arguments += [f"{key}={self._tensor()}" for key in writer.rng.sample(["a", "b", "c"], 2)]
        if writer.about_memory:
            lines.append(f"given[:] = [{x}, {y}]")
            arguments[:2] = ["given[0]", "given[1]"]
        call = f"return run({', '.join(arguments)})"
        lines = [*global_line(scope), *lines]
        if writer.chance(0.12):
            return [*lines, "with torch.no_grad():", "    " + call]
        if writer.chance(0.06):
            return [*lines, call.replace("return run(", "return in_thread(lambda _: run(") + ", None)"]
        return [*lines, call]

    def _change(self) -> str:
        """A change of the world between two calls."""
        writer = self.writer
        if writer.chance(0.25):
            return writer.rng.choice(awkward.CHANGES + effects.CHANGES)
        if writer.about_memory:
            return writer.rng.choice(memory.CHANGES)
        return writer.rng.choice(
            [
                "thing.count += 1",
                "thing.scale = 2.5",
                "history.append(torch.ones(3))",
                "history.clear()",
                "history.reverse()",
                "numbers.append(2)",
                "numbers[:] = [2, 1]",
                "counts['b'] = 2",
                "table['a'] = torch.ones(3)",
                "table['b'] = torch.zeros(3)",
                "counts['a'] = counts.pop('a', 0) + 1",
                "table.update({'a': table.pop('a', state)})",
                "globals().update(limit=limit + 1)",
                "globals().update(mode='b')",
                "globals().update(state=state.clone())",
                "globals().update(history=[state])",
                "globals().update(table={'a': state, 'b': state})",
                "globals().update(factor=0.75)",
                "Thing.LIMIT = 5",
                "Base.LIMIT = 7",
                "Base.method = lambda self, t: t - 1",
                "Thing.action = lambda self, t: t + 3",
                "thing.method = torch.sin",
                "Base.level = 4",
                "Thing.extra_property = property(lambda self: 3)",
                "net.eval()",
                "net.train()",
                "net.seen += 1",
                "net.weight.requires_grad_(False)",
                "net.layer = torch.nn.Linear(3, 3)",
                "net.layers[0] = torch.nn.ReLU()",
                "net.buffer.mul_(2)",
                "net.weight.data.mul_(0.5)",
                "thing.items.append(state)",
                "thing.items = history",
                "thing.weight = torch.zeros(3)",
                "thing.weight = leaf_1",
                "thing.weight = thing.weight.detach()",
                "thing.table = table",
                "other.count = thing.count",
                "globals().update(other=thing)",
                "globals().update(thing=Thing(state, 3))",
                "globals().update(counted=make_counted())",
                "helper.__defaults__ = (3,)",
                "Thing.late = 9",
                "thing.late = 2",
                "thing.__dict__.pop('late', None)",
                "base_0.add_(1)",
                "square.data = square.data * 2",
                "net.forward = lambda t: t * 3",
                "net.drop.p = 0.25",
                "tags.add('q')",
                "nested['a'].append(state)",
                "nested.update(c=history)",
                "Mode.ON.note = 1",
                "net._forward_hooks.update({0: lambda module, args, result: result * 2})",
                "net.last = base_0",
                "net.layer.weight.data.zero_()",
                "net.requires_grad_(False)",
                "thing.__class__ = Base" if writer.chance(0.1) else "thing.count = 0",
                "Thing.weight_property = 1",
                "del Thing.method" if writer.chance(0.3) else "thing.level = 3",
                "Thing.__len__ = lambda self: 4",
                "Thing.__len__ = Base.bump",
                "Thing.__iter__ = lambda self: iter([torch.ones(3)])",
                "Thing.__call__ = lambda self, t, **options: t * 5",
                "Thing.__bool__ = lambda self: self.count > 1",
                "Base.__bool__ = lambda self: False",
                "Base.__contains__ = lambda self, item: item == 1",
                "Base.__eq__ = lambda self, other: self.count == 1",
                "Base.__hash__ = object.__hash__",
                "Base.__enter__ = lambda self: self",
                "Thing.__enter__ = lambda self: other",
                "Base.late = 6",
                "Mode.late = 3",
                "leaf_1.late = 2",
                "helper.late = 3",
                "net.weight.late = 4",
                "globals().update(late_global=2)",
                "globals().pop('late_global', None)",
                "globals().update(abs=lambda value: value + 5)",
                "globals().pop('abs', None)",
                "Virtual.register(Thing)" if writer.chance(0.2) else "Virtual.register(list)",
                "function.__defaults__ = function.__defaults__" if writer.chance(0.5) else "thing.label = 'b'",
            ]
        )
