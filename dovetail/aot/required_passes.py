"""Passes that a graph needs because of operators in it, whoever compiles it: those who make such operators register them here."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from dovetail.aot.joint_graph import JointGraph, Pass

_registered: list[tuple[Callable[[JointGraph], bool], Pass]] = []


def register_required_pass(applies: Callable[[JointGraph], bool], graph_pass: Pass) -> None:
    """Have ``graph_pass`` run on each joint graph that ``applies`` is true of, in front of the backend."""
    _registered.append((applies, graph_pass))


def required_passes(joint: JointGraph) -> Iterator[Pass]:
    """The passes that a graph needs."""
    for applies, graph_pass in _registered:
        if applies(joint):
            yield graph_pass
