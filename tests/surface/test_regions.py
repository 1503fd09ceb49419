"""``regional=True``: the repeated blocks of a model share one capture, and the model trains like eager."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dovetail
from dovetail.errors import OptionError
from dovetail.surface.regions import repeated_blocks
from tests.differential import compare_modules, randn


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(4), nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x))


class Model(nn.Module):
    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.first, self.blocks, self.last = (
            nn.Linear(4, 4),
            nn.ModuleList([Block() for _ in range(depth)]),
            nn.Linear(4, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.last(x)
        return result


def captures(model: Model) -> int:
    return sum(dovetail.events_of(block.forward).count("capture") for block in model.blocks)


def test_training_with_one_capture() -> None:
    eager = Model()
    model = copy.deepcopy(eager)
    compiled = dovetail.compile(model, regional=True, backend="aten", fullgraph=True)
    assert compiled is model
    for step in range(3):
        x = randn(3, 4) + step
        for one in (eager, model):
            one.zero_grad()
            one(x).square().sum().backward()
            with torch.no_grad():
                for parameter in one.parameters():
                    parameter.sub_(0.1 * parameter.grad)
    compare_modules(eager, model, "model")
    assert captures(model) == 1
    assert model.state_dict().keys() == eager.state_dict().keys()


def test_hooks_and_modes_are_those_of_the_block() -> None:
    eager = Model()
    model = dovetail.compile(copy.deepcopy(eager), regional=True, backend="aten")
    seen: list[Any] = []
    for one in (eager, model):
        one.blocks[1].register_forward_hook(lambda module, args, result: seen.append(module.training) or result * 2)
    for training in (True, False):
        x = randn(3, 4)
        assert torch.equal(eager.train(training)(x), model.train(training)(x))
    assert seen == [True, True, False, False]


@pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_copies_are_independent(again: Any) -> None:
    model = dovetail.compile(Model(), regional=True, backend="aten")
    x = randn(3, 4)
    before = model(x)
    other = again(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1.0)
    assert torch.equal(model(x), before)
    assert not torch.equal(other(x), before)


def test_state_is_saved_and_loaded() -> None:
    eager, file = Model(), io.BytesIO()
    torch.save(dovetail.compile(copy.deepcopy(eager), regional=True, backend="aten").state_dict(), file)
    file.seek(0)
    loaded = dovetail.compile(Model(), regional=True, backend="aten")
    loaded.load_state_dict(torch.load(file))
    x = randn(3, 4)
    assert torch.equal(loaded(x), eager(x))


def test_the_whole_model_may_be_compiled_around_its_regions() -> None:
    eager = Model()
    model = dovetail.compile(copy.deepcopy(eager), regional=True, backend="aten")
    whole = dovetail.compile(model, backend="aten", fullgraph=True)
    x = randn(3, 4)
    assert torch.equal(whole(x), eager(x))
    assert captures(model) == 0


def test_which_blocks_are_regions() -> None:
    shared = Block()
    model = nn.ModuleDict(
        {"a": nn.Sequential(Block(), nn.Sequential(nn.ReLU()), Block()), "b": nn.ModuleList([shared, shared])}
    )
    assert repeated_blocks(model) == [model["a"][0], model["a"][2]]
    assert repeated_blocks(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))) == []
    whole = dovetail.compile(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), regional=True, backend="aten")
    whole(randn(2, 4))
    assert dovetail.events_of(whole).count("capture") == 1


def test_compiled_again_takes_the_new_options() -> None:
    model = dovetail.compile(Model(), regional=True, backend="aten")
    again = dovetail.compile(regional=True, backend="eager")(model)
    assert again is model
    assert {block.forward.options.backend for block in model.blocks} == {"eager"}


def test_only_for_modules() -> None:
    with pytest.raises(OptionError, match="regional=True looks for the blocks of a module, and a builtin"):
        dovetail.compile(torch.sin, regional=True)
    with pytest.raises(OptionError, match="regional must be True or False"):
        dovetail.compile(Model(), regional="yes")  # type: ignore[call-overload]
