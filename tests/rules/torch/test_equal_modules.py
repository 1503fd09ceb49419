"""Modules of one class that are compiled one by one share entries where the guards hold, and nowhere else."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import dovetail
from tests.differential import captures, compare_call, randn

TABLE: dict[Any, float] = {}
FIRST: list[nn.Module] = []


class Block(nn.Module):
    """A residual block with a norm, a table of its own and dropout."""

    def __init__(self, width: int = 4, **own: Any) -> None:
        super().__init__()
        self.norm, self.inner, self.drop = nn.LayerNorm(width), nn.Linear(width, width), nn.Dropout(0.5)
        self.register_buffer("seen", torch.zeros(width))
        self.factor, self.calls, self.own = 1.5, 0, own

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(x.detach().sum(0))
        return x + self.drop(functional.gelu(self.inner(self.norm(x)))) * self.factor


def total_captures(modules: list[Any]) -> int:
    return sum(captures(module) for module in modules)


def compare(modules: list[nn.Module], change: Callable[[int, nn.Module], object] | None = None) -> list[Any]:
    """Each module once eagerly and once compiled, from equal states; returns the compiled modules."""
    if change is not None:
        for number, module in enumerate(modules):
            change(number, module)
    pairs = [(module, dovetail.compile(copy.deepcopy(module), backend="aten")) for module in modules]
    for module, compiled in pairs:
        for _ in range(2):
            compare_call(module, compiled, (randn(3, 4, grad=True),))
    return [compiled for _, compiled in pairs]


def test_one_capture_for_equal_blocks() -> None:
    assert total_captures(compare([Block() for _ in range(4)])) == 1


def test_shared_block_trains_like_eager() -> None:
    eager = nn.Sequential(Block(), Block(), Block())
    compiled = copy.deepcopy(eager)
    blocks = [dovetail.compile(block, backend="aten") for block in compiled]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in (eager, compiled)]
    for _ in range(3):
        x = randn(3, 4, grad=True)
        losses = []
        for run, optimizer in ((list(eager), optimizers[0]), (blocks, optimizers[1])):
            torch.manual_seed(3)
            y = x
            for block in run:
                y = block(y)
            optimizer.zero_grad()
            y.square().sum().backward()
            optimizer.step()
            losses.append(y.detach())
        assert torch.equal(*losses)
    for ours, theirs in zip(compiled.state_dict().values(), eager.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)
    assert total_captures(blocks) == 1


def test_methods_share_too() -> None:
    blocks = [Block().eval() for _ in range(3)]
    run = [dovetail.compile(block.forward, backend="aten") for block in blocks]
    for block, method in zip(blocks, run, strict=True):
        x = randn(3, 4)
        state = copy.deepcopy(block)
        assert torch.equal(method(x), state(x))
    assert total_captures(run) == 1


DIFFERENT: dict[str, Callable[[int, Any], object]] = {
    "a number": lambda i, block: setattr(block, "factor", 1.0 + i),
    "mode": lambda i, block: block.train(i == 0),
    "frozen": lambda i, block: block.inner.requires_grad_(i == 0),
    "dtype of a buffer": lambda i, block: (
        block.seen.data.__class__ and setattr(block, "seen", block.seen.to([torch.float32, torch.float64][i]))
    ),
    "a hook": lambda i, block: i and block.inner.register_forward_hook(lambda module, args, result: result * 2),
    "another part": lambda i, block: i and setattr(block, "drop", nn.Identity()),
    "no bias": lambda i, block: i and setattr(block, "inner", nn.Linear(4, 4, bias=False)),
    "forward of its own": lambda i, block: i and setattr(block, "forward", lambda x: x * 3),
    "part with a forward of its own": lambda i, block: i and setattr(block.inner, "forward", lambda x: x * 3),
    "strides": lambda i, block: i and setattr(block.inner, "weight", nn.Parameter(block.inner.weight.detach().t())),
    "tied": lambda i, block: i and setattr(block.norm, "weight", block.norm.bias),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", DIFFERENT)
def test_blocks_that_differ_are_captured_anew(name: str) -> None:
    compiled = compare([Block(), Block()], DIFFERENT[name])
    assert total_captures(compiled) == 2


class ByIdentity(nn.Module):
    """Asks which module it is."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.weight = how, nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "table":
            return x * self.weight * TABLE[self]
        if self.how == "id":
            return x * self.weight * TABLE[id(self)]
        if self.how == "is":
            return x * self.weight if self is FIRST[0] else x - self.weight
        if self.how == "in":
            return x * self.weight if self in FIRST else x - self.weight
        if self.how == "hash":
            return x * self.weight * (TABLE[hash(self)])
        if self.how == "weak reference":
            return x * self.weight * TABLE[weakref.ref(self)]
        return x * self.weight + FIRST[0].weight  # type: ignore[operator]


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("how", ["table", "id", "is", "in", "hash", "weak reference", "another's weight"])
def test_modules_that_ask_for_their_identity(how: str) -> None:
    modules = [ByIdentity(how) for _ in range(3)]
    FIRST[:] = [modules[1]]
    TABLE.clear()
    for number, module in enumerate(modules):
        for key in (module, id(module), hash(module), weakref.ref(module)):
            TABLE[key] = 2.0 + number
        module.weight.data += number
    for order in (modules, modules[::-1]):
        for module in order:
            x = randn(4, grad=True)
            compiled = dovetail.compile(module, backend="aten")
            for _ in range(2):
                assert torch.equal(compiled(x), module(x))
                (ours,) = torch.autograd.grad(compiled(x).sum(), module.weight)
                (wanted,) = torch.autograd.grad(module(x).sum(), module.weight)
                assert torch.equal(ours, wanted)


class Counting(nn.Module):
    """Writes to itself, and keeps a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.kept, self.scale = 0, [torch.zeros(4)], torch.rand(4)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.kept[0] = self.kept[0] + x.detach() * self.scale
        self.last = x * self.calls
        return x + self.kept[0]


def test_effects_go_to_the_module_that_is_called() -> None:
    eager = [Counting() for _ in range(3)]
    compiled = [dovetail.compile(copy.deepcopy(module), backend="aten") for module in eager]
    for number in (0, 1, 1, 2, 0, 2):
        x = randn(4)
        assert torch.equal(eager[number](x), compiled[number](x))
        for name in ("calls", "kept", "last"):
            ours, wanted = getattr(compiled[number], name), getattr(eager[number], name)
            assert torch.equal(
                torch.as_tensor(ours) if name != "kept" else ours[0],
                torch.as_tensor(wanted) if name != "kept" else wanted[0],
            )
    assert not hasattr(Counting(), "last")


def test_another_option_is_another_entry() -> None:
    modules = [nn.Linear(4, 4) for _ in range(2)]
    compiled = [dovetail.compile(modules[0], backend="aten"), dovetail.compile(modules[1], backend="eager")]
    for module in compiled:
        module(randn(2, 4))
    assert total_captures(compiled) == 2


def test_a_module_that_is_gone_leaves_its_entry_to_the_others() -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    compiled = dovetail.compile(first, backend="aten")
    compiled(randn(2, 4))
    reference = weakref.ref(first)
    other = dovetail.compile(second, backend="aten")
    other(randn(2, 4))
    del first, compiled
    gc.collect()
    assert reference() is None
    x = randn(2, 4)
    assert torch.equal(other(x), second(x))


def test_sizes_that_have_changed_once_are_symbolic_for_all() -> None:
    modules = [Block(5).eval() for _ in range(3)]
    compiled = [dovetail.compile(module, backend="aten") for module in modules]
    for length in (2, 3, 5, 7):
        for module, ours in zip(modules, compiled, strict=True):
            x, wanted = randn(length, 5), copy.deepcopy(module)
            assert torch.equal(ours(x), wanted(x))
    assert total_captures(compiled) == 2


def test_blocks_in_regions_of_checkpoint_share_too() -> None:
    # Each region takes the entry that it has run by at first.
    blocks = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)]
    eager = copy.deepcopy(blocks)
    compiled = [dovetail.compile(block, backend="aten") for block in blocks]
    for _ in range(2):
        x = randn(2, 6, grad=True)
        results = []
        for run in (eager, compiled):
            y = x
            for block in run:
                y = checkpoint(block, y, use_reentrant=False)
            results.append((y.detach(), *torch.autograd.grad(y.square().sum(), [x, *nn.ModuleList(run).parameters()])))
        assert all(map(torch.equal, *results))
    assert total_captures(compiled) == 1
