"""Whole steps of modules under ``fully_shard``, one graph with its exchanges, against eager FSDP on the same ranks."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import dovetail
from dovetail.errors import GraphBreakError, GraphBreakWarning
from dovetail.torch_private import distributed as private_distributed
from dovetail.torch_private.fsdp import KEEPS_GRADIENTS
from tests.distributed.models import batches
from tests.distributed.test_fully_sharded import Model, same, whole
from tests.distributed.world import run

_compile = functools.partial(dovetail.compile, backend="aten", fullgraph=True)


class Tied(Model):
    """The head's weight is the first layer's of each block too: one parameter of the outermost module under three names."""

    def __init__(self) -> None:
        super().__init__()
        self.ends = nn.ModuleList(nn.Linear(4, 2) for _ in range(2))
        for end in self.ends:
            end.weight = self.head.weight

    def forward(self, x: torch.Tensor, **settings: Any) -> torch.Tensor:
        return super().forward(x) + self.ends[0](x) * self.ends[1](torch.tanh(x))


class Regions(Model):
    """Regions that are computed again: in one another, with a block, without one, and with a parameter of the outermost module."""

    def _first(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(self.blocks[0](x)["x"]) * x

    def _both(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[1](again(self._first, x))["x"]  # type: ignore[no-any-return]

    def forward(self, x: torch.Tensor, **settings: Any) -> torch.Tensor:
        x = again(lambda given: given @ self.head.weight.t() @ self.head.weight + given, x)
        return self.head(again(lambda given: given.sin() * given.cos(), again(self._both, x)))  # type: ignore[no-any-return]


again = functools.partial(checkpoint, use_reentrant=False)


def sharded(**options: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    with torch.device("meta" if options.pop("is_meta", False) else "cpu"):
        model: Any = options.pop("model", Model)()
    if "replicas" in options:
        copies = options.pop("replicas")
        shape = copies, torch.distributed.get_world_size() // copies
        options["mesh"] = torch.distributed.init_device_mesh("cpu", shape, mesh_dim_names=("copies", "parts"))
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    if model.head.weight.is_meta:
        model.to_empty(device="cpu")
        for parameter in model.parameters():
            torch.nn.init.constant_(parameter, 0.3)
    return model


def make_step(
    model: Any, optimizer: torch.optim.Optimizer, parts: int = 1, exchanges_once: bool = False, setting: str = ""
) -> Any:
    """A step that adds up the gradients of parts of its batch, each or their sum reduced over the ranks, and clips them.

    A ``setting`` of FSDP's is on for the last part only.
    """

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(())
        for number, (inputs, wanted) in enumerate(zip(x.chunk(parts), y.chunk(parts), strict=True)):
            if exchanges_once:
                model.set_requires_gradient_sync(number == parts - 1)
                model.set_is_last_backward(number == parts - 1)
            if setting.startswith("set_"):
                getattr(model, setting)(number == parts - 1)
            loss = nn.functional.mse_loss(model(inputs).float(), wanted) / parts
            loss.backward()
            total = total + loss.detach()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        if setting == "measures":
            # The outermost module stays gathered: FSDP's next forward does not see the update of its parameters.
            total = total + model(x).float().sum().detach()
        optimizer.step()
        optimizer.zero_grad()
        if setting == "evaluates":
            with torch.no_grad():
                total = total + model(x).float().sum()
        return torch.stack([total, norm.full_tensor()])

    return step


def policies() -> dict[str, dict[str, Any]]:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    low, half = torch.bfloat16, torch.float16
    mixed = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32)
    return {
        "freed": {"reshard_after_forward": True},
        "kept": {"reshard_after_forward": False},
        "mixed": {"mp_policy": mixed},
        "low": {"mp_policy": MixedPrecisionPolicy(param_dtype=low)},
        "parts": {"parts": 2},
        "once": {"parts": 2, "exchanges_once": True},
        "mixed once": {"parts": 2, "exchanges_once": True, "mp_policy": mixed},
        "half": {"mp_policy": MixedPrecisionPolicy(param_dtype=half, reduce_dtype=half), "parts": 2},
        "copies": {"replicas": 2},
        "copies once": {"replicas": 2, "parts": 2, "exchanges_once": True, "mp_policy": mixed},
        "half copies": {"replicas": 2, "mp_policy": MixedPrecisionPolicy(param_dtype=half, reduce_dtype=half)},
        "stay": {"parts": 2, "exchanges_once": True, "setting": "set_reshard_after_backward"},
        "partly copies": {"replicas": 2, "parts": 2, "setting": "set_requires_all_reduce", "mp_policy": mixed},
        "evaluated": {"setting": "evaluates", "reshard_after_forward": True},
        "sgd": {"optimizer": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1)},
        "adagrad": {"optimizer": functools.partial(torch.optim.Adagrad, lr=0.1)},
        "frozen": {"frozen": True},
        "tied": {"model": Tied, "parts": 2, "exchanges_once": True},
        "regions": {"model": Regions},
        "low regions": {"model": Regions, "mp_policy": MixedPrecisionPolicy(param_dtype=low)},
        "meta": {"is_meta": True},
    }


def trained(
    rank: int,
    compiles: bool,
    frozen: bool = False,
    parts: int = 1,
    exchanges_once: bool = False,
    optimizer: Any = None,
    setting: str = "",
    **options: Any,
) -> Any:
    """Losses and norms, parameters and optimizer state after training; the number of each exchange in the last graph."""
    model = sharded(**options)
    if frozen:
        model.blocks[1].up.weight.requires_grad_(False)
    made = (optimizer or functools.partial(torch.optim.AdamW, lr=0.01))(model.parameters())
    step = make_step(model, made, parts, exchanges_once, setting)
    called = _compile(step) if compiles else step
    found = [called(x, y) for x, y in batches(3, rank, torch.distributed.get_world_size())]
    state = [value for values in made.state.values() for value in values.values() if isinstance(value, torch.Tensor)]
    return [found, whole(model.parameters()), whole(state)], exchanges(called) if compiles else {}


def exchanges(compiled: Any) -> dict[str, int]:
    nodes = compiled.entries[0].compiled.joint.graph.nodes
    names = [str(node.target).split(".")[1] for node in nodes if "c10d" in str(node.target)]
    return {name: names.count(name) for name in names if name != "wait_tensor"}


def compared(rank: int, names: tuple[str, ...]) -> Any:
    wrong, counts = [], {}
    for name in names:
        options = policies()[name]
        if options.get("exchanges_once") and not KEEPS_GRADIENTS:
            with pytest.raises(GraphBreakError, match="keeps gradients that are not reduced in the parameters"):
                trained(rank, True, **options)
            continue
        wanted, _ = trained(rank, False, **options)
        found, counts[name] = trained(rank, True, **options)
        # A mean of three or more is divided before the sum, in eager behind it.
        alike = near if torch.distributed.get_world_size() == 3 else same
        wrong += [] if alike(found, wanted) else [name]
    return wrong, counts


def near(found: Any, wanted: Any) -> bool:
    return all(
        torch.allclose(left, right, rtol=1e-4, atol=1e-6)
        for values, others in zip(found, wanted, strict=True)
        for left, right in zip(values, others, strict=True)
    )


def life(rank: int, compiles: bool) -> list[Any]:
    """What may happen to a model between its steps; what a graph cannot hold runs as in eager."""
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = make_step(model, optimizer)
    called = dovetail.compile(step, backend="aten") if compiles else step
    found: list[Any] = []
    given = list(batches(8, rank, 2))
    found.append(called(*given[0]))
    step(*given[1])
    found.append(called(*given[2]))
    with torch.no_grad():
        found.append(model(given[3][0]))
    nn.functional.mse_loss(model(given[3][0]), given[3][1]).backward()
    found.append(called(*given[4]))
    model.set_requires_gradient_sync(False)
    nn.functional.mse_loss(model(given[5][0]), given[5][1]).backward()
    model.set_requires_gradient_sync(True)
    found.append(called(*given[6]))
    model.unshard()
    found.append(called(*given[7]))
    seen: list[Any] = []
    handle = model.blocks[0].register_forward_hook(lambda module, given, result: {**result, "x": result["x"] * 2})
    found.append(called(*given[0]))
    handle.remove()
    model.blocks[1].up.weight.register_hook(lambda gradient: seen.append(gradient.to_local().sum()))
    found.append(called(*given[1]))
    return [found, seen, whole(model.parameters())]


def lived(rank: int) -> bool:
    return same(life(rank, True), life(rank, False))


def refused(rank: int) -> list[str]:
    """What is said where one graph is asked for and none can be made."""
    texts = []

    def other(model: Any) -> Any:
        return make_step(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def outside(model: Any) -> Any:
        return lambda x, y: nn.functional.mse_loss(model(x), y)

    def stays_gathered(model: Any) -> Any:
        model.set_reshard_after_backward(False)
        return other(model)

    def measures(model: Any) -> Any:
        return make_step(model, torch.optim.SGD(model.parameters(), lr=0.1), setting="measures")

    for make in (outside, stays_gathered, measures):
        step = _compile(make(sharded()))
        with pytest.raises(GraphBreakError) as error:
            step(*next(batches(1, rank, 2)))
        texts.append(str(error.value))
    return texts


@pytest.mark.slow
def test_gathers_begin_ahead_of_their_use_in_the_same_place_on_each_rank() -> None:
    """A rank whose parts are filled up prepares more than others, and gathers no later; the last of seven that are not there."""
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("fake", store=private_distributed.fake_store(), rank=6, world_size=7)
    try:
        layers: Any = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(3, 4))
        for layer in (*layers, layers):
            fully_shard(layer, reshard_after_forward=True)
        optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            layers(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                return layers(x)  # type: ignore[no-any-return]

        compiled: Any = _compile(step)
        compiled(torch.ones(2, 4))
        nodes = compiled.entries[0].compiled.joint.graph.nodes
        names = [getattr(node.target, "_opname", "") for node in nodes]
        kinds = {"all_gather_into_tensor": "gather", "reduce_scatter_tensor": "scatter", "addmm": "layer"}
        found = [kinds[name] for name in names if name in kinds]
    finally:
        torch.distributed.destroy_process_group()
    # The first is gathered, and in front of each layer the next one.
    ahead = ["gather", "gather", "layer", "gather", "layer", "layer"]
    assert found[:6] == ahead and found[-6:] == ahead
    assert found.count("scatter") == 1


class Given(nn.Module):
    """A block that uses each of its arguments twice."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 16)

    def forward(self, x: Any, **others: Any) -> torch.Tensor:
        x, y = (x["x"], x["y"]) if isinstance(x, dict) else (x, others.get("y", x))
        return x * 1.7 + torch.tanh(self.up(x)) * y + y.exp()  # type: ignore[no-any-return]


class Beside(nn.Module):
    """What the block is given is used in front of it and behind it too."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.ends, self.block = way, nn.ModuleList(nn.Linear(16, 16) for _ in range(2)), Given()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.ends[0](x)
        before, y = x.cos(), x.sin()
        if self.way == "alone":
            found = self.block(x)
        elif self.way == "keyword":
            found = self.block(x, y=y)
        else:
            found = self.block({"x": x, "y": y})
        return self.ends[1](found * x + before * y)  # type: ignore[no-any-return]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_gradients_of_what_a_module_is_given_are_added_up_in_its_order(dtype: torch.dtype | None) -> None:
    """Those of its uses inside are added up first, in FSDP's node of autograd, then those of its uses outside."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        for way in ("alone", "keyword", "dictionary"):
            gradients = []
            for compiles in (False, True):
                torch.manual_seed(0)
                model: Any = Beside(way)
                for module in (model.block, model):
                    fully_shard(module, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))

                def step(x: torch.Tensor, model: Any = model) -> None:
                    model(x).float().square().mean().backward()

                (_compile(step) if compiles else step)(torch.randn(32, 16))
                gradients.append(whole(parameter.grad for parameter in model.parameters()))
            assert same(gradients[1], gradients[0]), way
    finally:
        torch.distributed.destroy_process_group()


def together(rank: int) -> Any:
    return compared(rank, ("mixed once",)), refused(rank)


@pytest.mark.slow
def test_a_step_is_one_graph_with_its_exchanges() -> None:
    for (wrong, counts), texts in run(together, 2, seconds=200.0):
        assert not wrong
        for found in counts.values():
            assert found["reduce_scatter_tensor"] == 1
            assert found["all_gather_into_tensor"] >= 2
        assert "gradients leave the graph" in texts[0]
        assert "set_reshard_after_backward" in texts[1]
        assert "a parameter that stays gathered is written to" in texts[2]


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_every_policy(size: int) -> None:
    """On three ranks rows are shared unevenly, and some ranks have none of a parameter."""
    names = [name for name in policies() if "copies" not in name]
    found = run(compared, size, tuple(names) if size == 2 else ("freed", "once", "evaluated"), seconds=600.0)
    for wrong, counts in found:
        assert not wrong
        if size == 2:
            assert counts["kept"]["all_gather_into_tensor"] < counts["freed"]["all_gather_into_tensor"]


@pytest.mark.slow
def test_a_mesh_of_shards_and_copies() -> None:
    for wrong, counts in run(compared, 4, ("copies", "copies once", "half copies", "partly copies"), seconds=500.0):
        assert not wrong
        # A question of each group, a bucket of copies, and the norm.
        assert counts["copies"]["all_reduce"] == 4 and counts["copies"]["reduce_scatter_tensor"] == 1


def micro_steps(rank: int, compiles: bool, kinds: tuple[tuple[int, bool], ...], together: bool) -> Any:
    """Backwards through one of two heads, which exchange gradients or keep them; what ``.grad`` and the weights are."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model: Any = nn.ModuleList([nn.Linear(4, 6), nn.Linear(6, 2), nn.Linear(6, 2)])
    for layer in model:
        fully_shard(layer)

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model

        def forward(self, x: torch.Tensor, head: int) -> Any:
            return self.layers[1 + head](torch.tanh(self.layers[0](x)))

    heads: Any = fully_shard(Heads())
    optimizer = torch.optim.SGD(heads.parameters(), lr=0.1, momentum=0.9)

    def backward(x: torch.Tensor, head: int) -> None:
        heads(x, head).square().mean().backward()

    def every(x: torch.Tensor) -> None:
        for head, exchanges in kinds:
            heads.set_requires_gradient_sync(exchanges)
            backward(x, head)

    one, all_of_them = [dovetail.compile(f, backend="aten") if compiles else f for f in (backward, every)]
    seen: list[Any] = []
    for x, _ in batches(2, rank, 2):
        if together:
            all_of_them(x)
        for head, exchanges in () if together else kinds:
            heads.set_requires_gradient_sync(exchanges)
            one(x, head)
            seen.append(whole(p.grad for p in heads.parameters() if p.grad is not None))
        optimizer.step()
        optimizer.zero_grad()
    return [seen, whole(heads.parameters())]


def all_micro_steps(rank: int) -> list[Any]:
    """The last backward reaches all that was kept, or leaves something, which eager exchanges all the same."""
    plans = (
        ((0, False), (0, True)),
        ((0, False), (1, True)),
        ((0, False), (1, True), (0, True)),
        ((0, True), (1, False)),
    )
    found = []
    for together in (False, True):
        for plan in plans:
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                is_same = same(micro_steps(rank, True, plan, together), micro_steps(rank, False, plan, together))
            texts = [str(item.message) for item in seen if issubclass(item.category, GraphBreakWarning)]
            found.append((is_same, any("does not reach" in text for text in texts), len(texts)))
    return found


@pytest.mark.slow
def test_gradients_that_are_kept_between_calls() -> None:
    for found in run(all_micro_steps, 2, seconds=400.0):
        assert all(is_same for is_same, *_ in found), found
        for number in (0, 4):
            assert found[number] == (True, False, 0)
        for number in (1, 2, 5, 6):
            assert found[number][1]


@pytest.mark.slow
def test_state_that_changes_between_steps() -> None:
    assert run(lived, 2, seconds=300.0) == [True, True]
