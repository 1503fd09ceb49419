"""The tool that looks private names of torch up, and that the torch that runs has those that Dovetail needs."""

from __future__ import annotations

from tests import torch_names


def test_this_torch_has_every_name_that_is_needed() -> None:
    uses = torch_names.private_uses()
    assert len(uses) > 100
    lacking = [name for name, use in uses.items() if not use.optional and torch_names.look_up(name) == "missing"]
    assert lacking == []


def test_names_are_found_through_imports_aliases_and_questions() -> None:
    source = """
import torch
import torch._dynamo.config as settings
from torch._inductor import config
engine = torch._C._autograd

def reads():
    return engine._get_sequence_nr(), config.cpp, settings.suppress_errors

def tries():
    try:
        from torch._new import name
    except ImportError:
        return None
    return name

class Holder:
    def asks(self):
        return getattr(engine, "_made_up", None), hasattr(torch, "_two"), getattr(engine, "_needed"), torch.fx.Graph
"""
    uses = torch_names.uses_of({"room": source})
    assert uses["torch._C._autograd._get_sequence_nr"].users == {"room.reads"}
    assert uses["torch._inductor.config.cpp"].users == {"room.reads"}
    assert uses["torch._dynamo.config.suppress_errors"].users == {"room.reads"}
    optional = {name for name, use in uses.items() if use.optional}
    assert optional == {"torch._C._autograd._made_up", "torch._two", "torch._new.name"}
    assert uses["torch._C._autograd._needed"].users == {"room.Holder.asks"}
    assert not any("fx" in name for name in uses)


def test_a_missing_and_a_changed_name_are_in_the_table() -> None:
    uses = torch_names.uses_of({"room": "import torch\ntorch._a, torch._b, torch._c"})
    old = {"torch._a": "(x)", "torch._b": "(x)", "torch._c": "present"}
    new = {"torch._a": "(x, y)", "torch._b": "(x)", "torch._c": "missing"}
    found = [line[:3] for line in torch_names.rows(uses, {"1": old, "2": new})]
    assert found == [
        ("torch._a", "present", "changed"),
        ("torch._b", "present", "present"),
        ("torch._c", "present", "missing"),
    ]


def test_what_a_name_stands_for_is_looked_up() -> None:
    assert torch_names.look_up("torch._C._autograd.no_such_name") == "missing"
    assert torch_names.look_up("torch.no_such_package._inside") == "missing"
    assert torch_names.look_up("torch.Tensor._base") == "present"
