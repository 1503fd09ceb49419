"""``id()`` of what was there before the call."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

import dovetail
from dovetail.errors import GraphBreakWarning
from tests.differential import check_calls, entries_of, leaf, same


class Part:
    pass


def _layers() -> torch.nn.ModuleList:
    torch.manual_seed(0)
    return torch.nn.ModuleList([torch.nn.Linear(3, 3) for _ in range(2)])


def test_a_table_of_layers_and_parameters() -> None:
    layers, part = _layers(), Part()
    table = {id(layers[0]): 2.0, id(part): 3.0, id(layers[1].weight): 4.0}

    def scaled(x: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            x = layer(x) * table.get(id(layer), 1.0) * table.get(id(layer.weight), 1.0)
        return x * table[id(part)]

    compiled = check_calls(scaled, [(leaf(2, 3),), (leaf(2, 3) * 2,)])
    layers[0] = torch.nn.Linear(3, 3)
    x = torch.ones(2, 3)
    same(compiled(x), scaled(x))
    layers[1].weight = torch.nn.Parameter(torch.ones(3, 3))
    same(compiled(x), scaled(x))


def test_a_model_that_keeps_values_by_the_identity_of_its_nodes() -> None:
    nodes = [Part() for _ in range(3)]

    def run(x: torch.Tensor) -> torch.Tensor:
        values = {id(nodes[0]): x}
        for before, node in zip(nodes, nodes[1:], strict=False):
            values[id(node)] = values[id(before)].sin() + x
        return values[id(nodes[-1])]

    assert entries_of(check_calls(run, [(leaf(4),), (leaf(4) * 2,)])) == 1


def test_an_object_that_is_another_one_in_each_call_does_not_compile_for_ever() -> None:
    table: dict[int, float] = {}

    def scaled(part: Part, x: torch.Tensor) -> torch.Tensor:
        return x * table.setdefault(id(part), float(len(table)))

    compiled, kept = dovetail.compile(scaled, backend="aten"), [Part() for _ in range(6)]
    with pytest.warns(GraphBreakWarning, match="another object"):
        results = [compiled(part, torch.ones(2)) for part in kept]
    table.clear()
    same(results, [scaled(part, torch.ones(2)) for part in kept])
    assert entries_of(compiled) <= 3


@pytest.mark.parametrize(
    "program",
    [
        lambda x: len({id(x), id(x.detach())}),
        lambda x: len({id(item) for item in (x * 1, x * 2)}),
        lambda x: id(Part()) > 0,
    ],
)
def test_what_is_made_in_each_call_has_no_lasting_identity(program: Any) -> None:
    with pytest.warns(GraphBreakWarning, match="id"):
        check_calls(lambda x: (x * 2, program(x)), [(leaf(4),), (leaf(4),)], fullgraph=False)


def test_no_object_is_kept_alive() -> None:
    part = Part()
    compiled = dovetail.compile(lambda part, x: x * (id(part) > 0), backend="aten", fullgraph=True)
    compiled(part, torch.ones(2))
    dead = weakref.ref(part)
    del part
    gc.collect()
    assert dead() is None
