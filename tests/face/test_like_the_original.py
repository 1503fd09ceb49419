"""A compiled module is used like the original: by libraries that look at its class, and with checkpoints of torch.compile."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

import dovetail
from tests.differential import same


class Network(nn.Module):
    """A network of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.first(x))


def compile_aten(module: nn.Module) -> nn.Module:
    return dovetail.compile(module, backend="aten")


def test_what_libraries_write_down() -> None:
    """A pipeline saves the module and the class of its parts by these names."""
    compiled = compile_aten(Network())
    assert (compiled.__module__, type(compiled).__name__) == (__name__, "CompiledModule")
    assert (compiled.__class__, compiled.__class__.__name__, compiled.__doc__) == (Network, "Network", Network.__doc__)


def test_containers() -> None:
    layers = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    compiled = compile_aten(layers)
    x = torch.randn(2, 3)
    same(layers(x), compiled(x))
    compiled[1] = nn.Tanh()
    del compiled[2]
    assert len(compiled) == len(layers) == 2 and layers[1] in compiled and "1" not in compiled
    same(layers(x), compiled(x))
    names = compile_aten(nn.ModuleDict({"a": nn.Linear(3, 3)}))
    assert "a" in names and "b" not in names


def test_the_original_by_torchs_name() -> None:
    module = Network()
    compiled = compile_aten(module)
    assert compiled._orig_mod is module
    assert copy.deepcopy(compiled)._orig_mod is not module


def state_of(module: nn.Module) -> dict[str, torch.Tensor]:
    stream = io.BytesIO()
    torch.save(module.state_dict(), stream)
    stream.seek(0)
    return torch.load(stream, weights_only=True)


@pytest.mark.parametrize("part", [False, True])
def test_checkpoints_of_torch_compile(part: bool) -> None:
    """The keys have ``_orig_mod`` in front, or where a part was compiled."""
    source, target = Network(), Network()
    source(torch.randn(5, 3))
    if part:
        wrapped: nn.Module = copy.deepcopy(source)
        wrapped.norm = torch.compile(wrapped.norm, backend="eager")
    else:
        wrapped = torch.compile(copy.deepcopy(source), backend="eager")
    state = state_of(wrapped)
    assert any("_orig_mod" in key for key in state)
    compiled = compile_aten(target)
    missing, unexpected = compiled.load_state_dict(state)
    assert not missing and not unexpected
    same(source.state_dict(), target.state_dict())
    # Metadata of BatchNorm says which version it is: without it, the number of batches would be set to 0.
    assert target.norm.num_batches_tracked == 1
    assert any("_orig_mod" in key for key in state)


def test_checkpoints_for_torch_compile() -> None:
    source, target = Network(), torch.compile(Network(), backend="eager")
    target._orig_mod.load_state_dict(state_of(compile_aten(source)))
    same(source.state_dict(), target._orig_mod.state_dict())


def test_other_states_are_as_they_were() -> None:
    module = Network()
    compiled = compile_aten(module)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        compiled.load_state_dict({**module.state_dict(), "more": torch.ones(1)})
    assert compiled.load_state_dict({"first.bias": torch.ones(4)}, strict=False).missing_keys
    assert torch.equal(module.first.bias, torch.ones(4))
    with pytest.raises(TypeError):
        compiled.load_state_dict(None)
    # A module that torch.compile has wrapped inside has such keys itself.
    inside = Network()
    inside.norm = torch.compile(inside.norm, backend="eager")
    assert not compile_aten(inside).load_state_dict(inside.state_dict()).missing_keys
