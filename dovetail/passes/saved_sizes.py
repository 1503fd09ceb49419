"""Sizes that a compiler of the backward must be able to read off its inputs: they are saved beside the tensors whose sizes they
make. Of ``x.chunk(2)[0]`` the backward is given tensors of ``(s + 1) // 2`` rows, from which nobody can tell ``s``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from dovetail.aot.partition import ChooseSaved, Saved, Split
from dovetail.torch_private import sizes as private_sizes


def saving_sizes(choose: ChooseSaved) -> ChooseSaved:
    """What ``choose`` saves, and the sizes that are missing among it."""

    def choose_both(split: Split) -> Saved:
        saved = choose(split)
        missing = _missing(split, saved.nodes) if split.has_backward else ()
        return dataclasses.replace(saved, nodes=[*saved.nodes, *missing])

    return choose_both


def _missing(split: Split, saved: Iterable[torch.fx.Node]) -> Iterator[torch.fx.Node]:
    """A node for each symbol in the sizes of the backward's inputs that is no size of one."""
    given = [expression for node in (*saved, *split.tangents) for _, expression in _sizes(node)]
    wanted = dict.fromkeys(symbol for expression in given for symbol in private_sizes.symbols_of(expression))
    for symbol in (item for item in wanted if item not in given):
        found = next((node for node in split.nodes if node not in split.of_backward and _is(node, symbol)), None)
        if found is not None:
            yield found
            continue
        places = ((node, dim) for node in split.primals for dim, item in _sizes(node) if item == symbol)
        place = next(((node, dim) for node, dim in places if dim is not None), None)
        if place is not None:
            yield _read(split, *place)


def _sizes(node: torch.fx.Node) -> Iterator[tuple[int | None, Any]]:
    """The symbolic sizes and strides of a value, or itself where it is a number; with the dimension where it is a size."""
    value = node.meta.get("val")
    if isinstance(value, torch.SymInt):
        yield None, private_sizes.expression_of(value)
    elif isinstance(value, torch.Tensor) and private_sizes.has_symbols(value):
        numbers = [*enumerate(value.shape), *((None, step) for step in value.stride())]
        yield from (
            (dim, private_sizes.expression_of(item)) for dim, item in numbers if private_sizes.is_symbolic(item)
        )


def _is(node: torch.fx.Node, symbol: Any) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.SymInt) and private_sizes.expression_of(value) == symbol


def _read(split: Split, primal: torch.fx.Node, dim: int) -> torch.fx.Node:
    """A node that reads the size, behind all inputs."""
    last = [node for node in split.nodes if node.op == "placeholder"][-1]
    with primal.graph.inserting_after(last):
        made = primal.graph.call_function(torch.ops.aten.sym_size.int, (primal, dim))
    made.meta = {"val": primal.meta["val"].shape[dim], "phase": "forward"}
    split.nodes.insert(split.nodes.index(last) + 1, made)
    return made
