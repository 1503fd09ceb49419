"""Modules that ``fully_shard`` and FSDP1 have spread over the ranks, compiled block by block and as a whole."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import dovetail
from dovetail.distributed import data_parallel
from dovetail.errors import EagerFallbackWarning, GraphBreakError, GraphBreakWarning, ShardedModuleError
from dovetail.torch_private import fsdp as private_fsdp
from tests.distributed.models import batches
from tests.distributed.world import run


class Block(nn.Module):
    """A residual block with a norm, an argument with a default, and a dictionary as its result."""

    gives_hidden = True

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(4, 7), nn.LayerNorm(7), nn.Linear(7, 4)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> dict[str, torch.Tensor]:
        hidden = torch.tanh(self.norm(self.up(x)))
        x = x + self.down(hidden) * scale
        return {"x": x, "hidden": hidden} if self.gives_hidden else {"x": x}


class Model(nn.Module):
    """Two blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, **settings: Any) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, **settings)["x"]
        return self.head(x)  # type: ignore[no-any-return]


class Checkpointed(nn.Module):
    """A module that is computed again in the backward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.inner, x, use_reentrant=False)


KINDS = (EagerFallbackWarning, GraphBreakWarning)
_compile = functools.partial(dovetail.compile, backend="aten")


def sharded(place: str, recomputes: str = "", **options: Any) -> tuple[Any, Any]:
    """The model, and what is called in its place."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import fully_shard

    model: Any = Model()
    for index, block in enumerate(model.blocks):
        block.gives_hidden = not recomputes
        block = checkpoint_wrapper(block) if recomputes == "inside" else block  # noqa: PLW2901
        block = _compile(block, fullgraph=True) if place == "before" else block  # noqa: PLW2901
        fully_shard(block, **options)
        block = _compile(block, fullgraph=True) if place in ("after", "whole after") else block  # noqa: PLW2901
        model.blocks[index] = Checkpointed(block) if recomputes == "outside" else block
    model = _compile(model) if place == "root" else model
    fully_shard(model, **options)
    return model, _compile(model) if place in ("whole", "whole after") else model


def whole(values: Any) -> list[torch.Tensor]:
    # In a world of one the whole tensor is the parameter itself.
    return [(value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone() for value in values]


def trained(place: str, rank: int, accumulate: bool = False, **options: Any) -> Any:
    """Losses, and parameters and their names after training on this rank's part of the batches."""
    model, forward = sharded(place, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(x: torch.Tensor, y: torch.Tensor) -> float:
        if accumulate:
            model.set_requires_gradient_sync(False)
            nn.functional.mse_loss(forward(x[:2]), y[:2]).backward()
            model.set_requires_gradient_sync(True)
        loss = nn.functional.mse_loss(forward(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    chosen = _compile(step, fullgraph=True) if place == "step" else step
    losses = [chosen(x, y) for x, y in batches(2, rank, 2)]
    return losses, list(model.state_dict()), whole(model.state_dict().values())


def same(found: Any, wanted: Any) -> bool:
    """Whether two lists of values, names and tensors are the same to the last bit."""
    if isinstance(wanted, torch.Tensor):
        return torch.equal(found, wanted)
    if isinstance(wanted, (list, tuple)):
        return len(found) == len(wanted) and all(map(same, found, wanted))
    return bool(found == wanted)


def variants(names: tuple[str, ...]) -> Iterator[tuple[str, dict[str, Any]]]:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    known: dict[str, dict[str, Any]] = {
        "plain": {},
        "accumulated": {"accumulate": True},
        "kept": {"reshard_after_forward": False},
        "freed": {"reshard_after_forward": True},
        "mixed": {"mp_policy": mixed, "accumulate": True},
        "offloaded": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
        "recomputed inside": {"recomputes": "inside"},
        "recomputed outside": {"recomputes": "outside"},
        "recomputed and kept": {"recomputes": "inside", "reshard_after_forward": False},
        "mixed and recomputed": {"recomputes": "outside", "mp_policy": mixed},
    }
    for name in names:
        yield name, known[name]


def compared(rank: int, names: tuple[str, ...], places: tuple[str, ...]) -> Any:
    """What differs from eager training, eager's parameters, and the warnings at each place."""
    wrong, texts, parameters = [], {}, {}
    for name, options in variants(names):
        wanted = trained("eager", rank, **options)
        parameters[name] = wanted[2]
        for place in places:
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                found = trained(place, rank, **options)
            wrong += [] if same(found, wanted) else [(name, place)]
            texts[name, place] = [str(item.message) for item in seen if issubclass(item.category, KINDS)]
    return wrong, parameters, texts


def alone(accumulate: bool = False) -> list[torch.Tensor]:
    """The parameters after eager training in one process on whole batches."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for x, y in batches(2):
        if accumulate:
            for part, wanted in zip(x.chunk(2), y.chunk(2), strict=True):
                (nn.functional.mse_loss(model(part[:2]), wanted[:2]) / 2).backward()
        nn.functional.mse_loss(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        optimizer.step()
        optimizer.zero_grad()
    return whole(model.state_dict().values())


def check_parameters(parameters: dict[str, list[torch.Tensor]]) -> None:
    """They are those of one process, but for rounding; mixed precision rounds much more."""
    for name, values in parameters.items():
        tolerance = 5e-2 if name.startswith("mixed") else 1e-5
        for value, wanted in zip(values, alone(name in ("mixed", "accumulated")), strict=True):
            torch.testing.assert_close(value, wanted, rtol=1e-4, atol=tolerance)


@pytest.mark.slow
def test_every_policy_at_every_place() -> None:
    names = ("plain", "accumulated", "kept", "freed", "mixed", "offloaded")
    places = ("before", "after", "whole", "whole after", "root", "step")
    for wrong, parameters, texts in run(compared, 2, names, places, seconds=400.0):
        assert not wrong
        check_parameters(parameters)
        for (name, place), found in texts.items():
            assert place in ("before", "after", "step") or ("gathered and freed" in found[0] and len(found) < 5)
            assert (place == "step") <= (not found)


@pytest.mark.slow
def test_activation_checkpoints() -> None:
    """A region computes with whole parameters in the backward too; in a compiled step all of it is one graph."""
    names = ("recomputed inside", "recomputed outside", "recomputed and kept", "mixed and recomputed")
    for wrong, parameters, texts in run(compared, 2, names, ("before", "after", "step"), seconds=400.0):
        assert not wrong
        check_parameters(parameters)
        assert not any(texts.values())


def life(place: str, rank: int) -> list[Any]:
    """What a program may do with a sharded model from call to call."""
    model, forward = sharded(place)
    found: list[Any] = []
    hooked = model.blocks[0]
    hooked.register_forward_pre_hook(lambda module, given: (found.append(module is not None), (given[0] * 1.5,))[1])
    model.blocks[1].register_forward_hook(lambda module, given, result: {**result, "x": result["x"] * 2})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(rank)

    def batch(size: int = 3) -> torch.Tensor:
        return torch.randn(size, 4, generator=generator)

    def step(x: torch.Tensor, **settings: Any) -> None:
        loss = forward(x, **settings).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())

    step(batch())
    step(batch(5), scale=0.5)
    model.eval()
    with torch.no_grad():
        found.append(forward(batch()))
    model.train()
    x = batch().requires_grad_()
    (forward(x).sum() + forward(x * 2).square().sum()).backward()
    loss = forward(batch()).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    found.append(x.grad)
    optimizer.step()
    optimizer.zero_grad()
    model.set_reshard_after_forward(False)
    step(batch())
    model.set_reshard_after_forward(True)
    try:
        forward(batch(), wrong=1)
    except TypeError:
        model.reset_iter_state()
    model.unshard()
    step(batch())
    model.blocks[0].up.weight.requires_grad_(False)
    step(batch())
    return [found, whole(model.state_dict().values())]


def lives(rank: int, places: tuple[str, ...]) -> list[str]:
    wanted = life("eager", rank)
    return [place for place in places if not same(life(place, rank), wanted)]


@pytest.mark.slow
def test_state_that_changes_between_calls() -> None:
    assert run(lives, 2, ("after", "before", "whole after"), seconds=200.0) == [[], []]


def told(rank: int) -> list[str]:
    """What is said where no graph can hold the hooks."""
    x = torch.ones(2, 4)
    texts = []
    attempts: list[tuple[Any, Callable[[Any], Any]]] = [
        (GraphBreakError, lambda model: _compile(model, fullgraph=True)(x)),
        (ShardedModuleError, lambda model: data_parallel(model, backend="aten")(x)),
        (ShardedModuleError, lambda model: data_parallel(lambda x: model(x).sum().backward(), backend="aten")(x)),
    ]
    for kind, attempt in attempts:
        model, _ = sharded("eager")  # a forward that was refused leaves a module's hooks in the middle
        with pytest.raises(kind) as error:
            attempt(model)
        texts.append(str(error.value))
    return texts


def together(rank: int) -> Any:
    """In one world, as each process takes seconds to load FSDP."""
    import torch.distributed.fsdp  # noqa: F401

    imported = private_fsdp.is_used()
    model = sharded("eager")
    assert (imported, private_fsdp.is_used()) == (False, True)
    del model
    return compared(rank, ("plain",), ("before", "after")), told(rank)


def test_blocks_are_compiled_between_the_hooks() -> None:
    for (wrong, parameters, found), texts in run(together, 2):
        assert not wrong
        assert not any(found.values())
        check_parameters(parameters)
        assert "gathered and freed" in texts[0] and "compile each module that is given to fully_shard" in texts[0]
        assert "DTensor" in texts[1] and "DTensor" in texts[2]


def first_version(rank: int) -> list[tuple[str, bool]]:
    """FSDP1: the module is wrapped, and its parameters are views of one flat tensor."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    def train(place: str, keeps_parameters: bool) -> Any:
        wrap = functools.partial(
            FullyShardedDataParallel, use_orig_params=keeps_parameters, device_id=torch.device("cpu")
        )
        model: Any = Model()
        for index, block in enumerate(model.blocks):
            inner = wrap(_compile(block, fullgraph=True) if place == "before" else block)
            model.blocks[index] = _compile(inner) if place == "after" else inner
        model = wrap(model)
        forward = _compile(model) if place == "whole" else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for x, y in batches(2, rank, 2):
            loss = nn.functional.mse_loss(forward(x), y)
            loss.backward()
            model.clip_grad_norm_(0.2)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        with FullyShardedDataParallel.summon_full_params(model):
            return losses, whole(model.parameters())

    wrong = []
    for keeps_parameters in (True, False):
        wanted = train("eager", keeps_parameters)
        for place in ("before", "after", "whole"):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if not same(train(place, keeps_parameters), wanted):
                    wrong.append((place, keeps_parameters))
    return wrong


@pytest.mark.slow
def test_the_first_version_of_fsdp() -> None:
    assert run(first_version, 2, seconds=200.0) == [[], []]


def written(rank: int, kind: str, compiles: bool) -> Any:
    """Training in which parameters change between a forward and its backward, which FSDP gathers anew for the backward."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        if kind == "stepped":
            other = model(x * 2).sin().mean()
            other.backward()
            optimizer.step()
        elif kind != "behind":
            with torch.no_grad():
                model[2].weight.mul_(0.5)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    chosen = _compile(step) if compiles else step
    return [chosen(x) for x, _ in batches(3, rank, 2)], whole(model.state_dict().values())


def all_written(rank: int) -> dict[str, tuple[bool, list[str]]]:
    found = {}
    for kind in ("behind", "stepped", "by hand"):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            is_same = same(written(rank, kind, True), written(rank, kind, False))
        found[kind] = is_same, [str(item.message) for item in seen if issubclass(item.category, KINDS)]
    return found


@pytest.mark.slow
def test_parameters_that_are_written_to_between_a_forward_and_its_backward() -> None:
    for found in run(all_written, 2, seconds=200.0):
        assert found.pop("behind") == (True, [])
        for is_same, texts in found.values():
            assert is_same and "is written to" in texts[0]
