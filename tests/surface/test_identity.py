"""A compiled module is found in tables of modules where its original is."""

from __future__ import annotations

import weakref

import torch
from torch import nn

import dovetail


def test_a_compiled_module_equals_its_original() -> None:
    inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    compiled = dovetail.compile(inner, backend="aten")
    table: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary({compiled: "found"})
    assert table[inner] == "found" and inner in {compiled} and compiled in {inner}
    assert compiled == dovetail.compile(inner) and compiled != nn.Sequential() and compiled != 1


def test_modules_below_a_parent_are_its_children() -> None:
    inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    compiled = dovetail.compile(inner, backend="aten")
    model = nn.ModuleList([compiled, inner])
    names = {name: module for name, module in model.named_modules()}
    assert list(names) == ["", "0", "0.0", "0.1"]
    assert names["0"] is compiled and names["0.0"] is inner[0]
    assert next(compiled.modules()) == compiled
    assert list(dict(model.named_parameters())) == ["0.0.weight", "0.0.bias"]


def test_parameters_of_a_model_with_compiled_parts_inside_of_a_step() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    model[0] = dovetail.compile(model[0], backend="aten")

    def step(x: torch.Tensor) -> tuple[torch.Tensor, list[str]]:
        model.zero_grad()
        model(x).sum().backward()
        names = [name for name, _ in model.named_parameters()]
        return nn.utils.clip_grad_norm_(model.parameters(), 0.1), names

    x = torch.randn(4, 2)
    wanted, found = step(x), dovetail.compile(step, backend="aten", fullgraph=True)(x)
    assert torch.equal(found[0], wanted[0]) and found[1] == wanted[1]
