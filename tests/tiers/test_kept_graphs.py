"""Decomposed graphs in the cache on disk: read again they are the same graphs, under keys that hold all that decides about them."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor import config
from torch._inductor.utils import fresh_cache
from torch.nn import functional as F

import dovetail
from dovetail import cache
from dovetail.aot.compile_joint import compile_joint, decompose
from dovetail.aot.joint_graph import JointGraph
from dovetail.aot.steps import CompileSettings, Lowering
from dovetail.backends import lookup_backend
from dovetail.backends.common.sizes_elsewhere import sizes_of_mode
from dovetail.backends.inductor import backend as inductor_backend
from dovetail.backends.inductor import decompositions
from dovetail.backends.inductor.job import Job
from dovetail.cache.unportable import UnportableError
from dovetail.events import EventLog
from dovetail.options import Options
from dovetail.passes import decompose as passes_decompose
from dovetail.tiers import choice, kept_graphs, process, waiting
from dovetail.torch_private.inductor_cache import NotCachedError, only_from_cache
from tests.differential import same
from tests.tiers.fakes import FakeWorker

pytestmark = pytest.mark.usefixtures("own_cache")


def lowering_of(function: Callable[..., Any], *inputs: torch.Tensor) -> Lowering:
    joint = dovetail.capture(function, inputs)
    return Lowering(joint, lookup_backend("inductor"), CompileSettings())


def key_of(lowering: Lowering) -> str | None:
    try:
        return kept_graphs.key_of_graph(lowering)
    except UnportableError:
        return None


def leaf(*sizes: int) -> torch.Tensor:
    return (torch.arange(torch.Size(sizes).numel()).reshape(sizes) / 7).requires_grad_()


def program(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x).sum(0)


def _several(x: torch.Tensor) -> Any:
    one, two = F.layer_norm(x, (4,)).split(2, 1)
    values, indices = two.max(1)
    return one.t(), x[1:].expand(2, 2, 4), values * 2.5, indices, torch.full((2,), float("inf"))


PROGRAMS: list[tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = [
    (program, (leaf(3, 4),)),
    (program, (torch.ones(4, 3).t(),)),
    (_several, (leaf(3, 4),)),
    (lambda x, y: F.cross_entropy(x @ y.t(), torch.tensor([0, 1, 1])[x.shape[0] - 3 :]), (leaf(3, 4), leaf(2, 4))),
    (lambda x: (x.view(-1).view(torch.int32) + 1, F.silu(x).to(torch.float64)), (torch.ones(3, 4),)),
    (lambda x: x.sin_().add_(1) * F.dropout(x, 0.5), (torch.ones(3, 4),)),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_a_graph_read_again_is_the_same_graph(number: int) -> None:
    function, inputs = PROGRAMS[number]
    lowering = lowering_of(function, *inputs)
    made = decompose(lowering).joint
    entries = [entry for entry in cache.ls() if entry.kind == "graphs"]
    assert len(entries) == 1
    again = decompose(lowering).joint
    assert again.graph_module is not made.graph_module
    assert kept_graphs._means(again.graph_module) == kept_graphs._means(made.graph_module)
    assert facts(again) == facts(made)
    again.lint()


def step_with_a_schedule(monkeypatch: pytest.MonkeyPatch) -> Lowering:
    """The compilation of a whole step whose learning rate, counts of steps and number of the step change."""
    seen: list[Lowering] = []
    key_of_graph = kept_graphs.key_of_graph
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(x: torch.Tensor, number: int) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        if number >= 0:
            optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def key(lowering: Lowering) -> str:
        seen.append(lowering)
        return key_of_graph(lowering)

    compiled = dovetail.compile(step, backend="inductor", fullgraph=True)
    with monkeypatch.context() as changed:
        changed.setattr(kept_graphs, "key_of_graph", key)
        changed.setattr(process, "worker", FakeWorker)
        changed.delenv(choice.SWITCH, raising=False)
        for number in range(2, 6):
            optimizer.param_groups[0]["lr"] = 0.1 / number
            compiled(torch.ones(3, 4), number)
    return seen[-1]


def test_a_graph_whose_numbers_change_read_again_is_the_same_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    lowering = step_with_a_schedule(monkeypatch)
    assert choice.has_changing_numbers(lowering.joint)
    assert any(map(kept_graphs.is_unread, lowering.joint.primals))
    made = decompose(lowering).joint
    assert any(isinstance(node.meta.get("val"), torch.SymFloat) for node in made.graph.nodes)
    with only_from_cache(ours=True):
        again = decompose(lowering).joint
    assert kept_graphs._means(again.graph_module) == kept_graphs._means(made.graph_module)
    assert facts(again) == facts(made)
    again.lint()


def test_a_graph_for_which_a_number_was_looked_at_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    lowering = step_with_a_schedule(monkeypatch)
    cache.clear()
    number = next(value for node in lowering.joint.graph.nodes if type(value := node.meta.get("val")) is torch.SymFloat)
    looking(monkeypatch, lambda: number < 2)
    decompose(lowering)
    assert not [entry for entry in cache.ls() if entry.kind == "graphs"]


def looking(monkeypatch: pytest.MonkeyPatch, question: Callable[[], Any]) -> None:
    """While a graph is decomposed, a question about its numbers is asked, which is guarded."""
    decompose_graph = passes_decompose.decompose_graph

    def decompose_and_ask(*given: Any) -> Any:
        assert question()
        return decompose_graph(*given)

    monkeypatch.setattr(passes_decompose, "decompose_graph", decompose_and_ask)


def of_any_size(size: int, function: Callable[..., Any] = program) -> Lowering:
    return lowering_of(function, dovetail.mark_dynamic(leaf(size, 4), 0))


@pytest.mark.parametrize("size", [3, 7])
def test_the_sizes_of_the_call_are_not_in_the_key_of_symbolic_ones(size: int) -> None:
    made = decompose(of_any_size(3)).joint
    with only_from_cache(ours=True):
        again = decompose(of_any_size(size)).joint
    assert again.graph_module.code == made.graph_module.code
    assert facts(again) == facts(made)
    again.lint()


@pytest.mark.parametrize("size", [7, 12])
def test_who_takes_a_graph_assumes_what_decomposing_has_assumed(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lowering, other = of_any_size(3), of_any_size(size)
    with monkeypatch.context() as changed:
        looking(changed, lambda: lowering.joint.primals[0].meta["val"].shape[0] < 10)
        decompose(lowering)
    sizes = [sizes_of_mode(item.joint.fake_mode) for item in (lowering, other)]
    with only_from_cache(ours=True), contextlib.nullcontext() if size < 10 else pytest.raises(NotCachedError):
        decompose(other)
    first, second = [item.assumed() for item in sizes if item is not None]
    assert len(first) == 1 and second == (first if size < 10 else [])


def facts(joint: JointGraph) -> list[Any]:
    memories: dict[int, int] = {}
    sizes = sizes_of_mode(joint.fake_mode)
    return [kept_graphs._facts_of(node, memories, sizes) for node in joint.graph.nodes if node.op != "output"]


def test_a_hit_needs_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    with only_from_cache(ours=True), pytest.raises(NotCachedError):
        decompose(lowering_of(program, leaf(3, 4)))
    made = decompose(lowering_of(program, leaf(3, 4))).joint

    def refuse() -> Any:
        raise AssertionError("the table was made")

    monkeypatch.setattr(decompositions, "wanted_decompositions", refuse)
    with only_from_cache(ours=True):
        found = decompose(lowering_of(program, leaf(3, 4))).joint
    assert [node.name for node in found.graph.nodes] == [node.name for node in made.graph.nodes]
    marked = [node.name for node in found.primals if "in_gradients" in node.meta]
    assert marked == [node.name for node in made.primals if "in_gradients" in node.meta] != []


#: Parts of Inductor that load most others.
HEAVY = (
    "codecache", "codegen.wrapper", "compile_fx", "custom_graph_pass", "decomposition", "fx_passes.post_grad", "graph", "ir",
    "lowering", "scheduler", "virtualized",
)  # fmt: skip


def test_a_graph_of_which_all_is_kept_loads_nothing_of_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(choice.SWITCH, raising=False)
    joint = dovetail.capture(lambda x: F.gelu(x * 2).sum(0), (leaf(3, 4),))
    decompose(Lowering(joint, lookup_backend("inductor"), CompileSettings()))
    monkeypatch.setattr(inductor_backend, "take_code", lambda key, sizes: list)
    for name in HEAVY:
        owner, _, last = f"torch._inductor.{name}".rpartition(".")
        if hasattr(sys.modules.get(owner), last):
            monkeypatch.delattr(sys.modules[owner], last)
        monkeypatch.setitem(sys.modules, f"{owner}.{last}", None)
    log = EventLog()
    chosen = choice.in_tiers(lookup_backend("inductor"), Options())
    compile_joint(None, joint, chosen, events=log, for_entry=True)
    assert (log.count("tier 0"), log.count("tier 1")) == (0, 1)


MISSES: dict[str, tuple[Callable[..., Any], str]] = {
    "another": (program, "was not kept with these settings"),
    "constant": (lambda x: x + torch.tensor([[1.0] * 512] * 600).sum(), "is not kept, as a constant is large"),
    "damaged": (program, "entry of the graph cannot be read"),
    "code": (program, "code of the forward graph is not there"),
    "code is not kept": (program, "code of the forward graph is not kept, as a setting"),
}


@pytest.mark.parametrize("name", MISSES)
def test_a_miss_says_why(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, reason = MISSES[name]
    lowering = lowering_of(function, leaf(3, 4))
    if name not in ("another", "constant"):
        decompose(lowering)
        if name == "damaged":
            cache.write("graphs", str(key_of(lowering)), b"{}")
        elif name == "code is not kept":

            def not_kept(job: Job, *args: Any) -> None:
                job.not_kept = "a setting is an object"

            monkeypatch.setattr(inductor_backend, "key_of_code", not_kept)
    found = waiting.from_cache(lowering, choice.Tiers(lowering.backend, "auto"))
    (event,) = [event for event in lowering.settings.events.events if event.name == "cache miss"]
    assert found is None and re.search(reason, event.details["reason"])


OTHERS: list[Callable[[], Lowering]] = [
    lambda: lowering_of(program, leaf(4, 3)),
    lambda: lowering_of(program, leaf(3, 4).detach()),
    lambda: lowering_of(program, leaf(4, 3).detach().t().requires_grad_()),
    lambda: lowering_of(program, leaf(3, 4).detach().double().requires_grad_()),
    lambda: lowering_of(lambda x: F.gelu(x, approximate="tanh").sum(0), leaf(3, 4)),
    lambda: lowering_of(lambda x: F.gelu(x).sum(1), leaf(3, 4)),
    lambda: lowering_of(program, leaf(3, 4)).with_(write_backs={0: 0}),
    lambda: lowering_of(lambda x: program(x) * torch.tensor([1.0, 2.0, 3.0, 4.0]), leaf(3, 4)),
]


@pytest.mark.parametrize("number", range(len(OTHERS)))
def test_another_graph_has_another_key(number: int) -> None:
    key, other = key_of(lowering_of(program, leaf(3, 4))), key_of(OTHERS[number]())
    assert key is not None and other not in (None, key)


@pytest.mark.parametrize("change", ["setting", "dtype", "switch", "software", "quirk", "hook"])
def test_what_decides_about_a_graph_is_in_the_key(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lowering = lowering_of(program, leaf(3, 4))
    key = key_of(lowering)
    assert key == key_of(lowering_of(program, leaf(3, 4)))
    with config.patch({"emulate_precision_casts": True} if change == "setting" else {}):
        if change == "dtype":
            monkeypatch.setattr(torch, "get_default_dtype", lambda: torch.float64)
        elif change == "switch":
            monkeypatch.setattr(kept_graphs.private_state, "kernel_flags", lambda: ("others",))
        elif change == "software":
            monkeypatch.setattr(cache, "software", lambda: ("others",))
        elif change == "quirk":
            monkeypatch.setitem(kept_graphs.QUIRKS, "mine", None)
        elif change == "hook":
            monkeypatch.setattr(
                kept_graphs.steps, "decomposes", [*kept_graphs.steps.decomposes, test_a_hit_needs_no_table]
            )
        found = key_of(lowering)
    assert found is None if change == "hook" else found not in (None, key)


def test_what_cannot_be_written_down_is_decomposed_each_time() -> None:
    constant = torch.arange(4.0)
    conjugated = lowering_of(lambda x: x.abs(), torch.ones(3, dtype=torch.complex64).conj())
    assert key_of(conjugated) is None
    assert key_of(lowering_of(lambda x: x + constant, torch.ones(3, 4))) is not None
    cache.switch(False)
    assert key_of(lowering_of(program, torch.ones(3, 4))) is None


def test_the_numbers_of_constants_are_in_the_key() -> None:
    keys = set()
    for numbers in ([1.0, 2.0], [1.0, -2.0], [1.0, 2.0], [1.0, 2.0, 3.0]):
        lowering = lowering_of(lambda x, numbers=numbers: x.sum() + torch.tensor(numbers) * 2, torch.ones(3, 2))
        assert lowering.joint.graph.find_nodes(op="get_attr")
        keys.add(key_of(lowering))
    assert len(keys) == 3 and None not in keys


def test_a_table_with_a_function_of_the_programs_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def mine(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
        return x * 2

    table = {torch.ops.aten.gelu.default: mine}
    monkeypatch.setattr(decompositions, "wanted_decompositions", lambda: table)
    decompose(lowering_of(program, torch.ones(3, 4)))
    assert not cache.ls()


# Each is as bad as the next: a few of them in the default run.
@pytest.mark.parametrize("every", [16, pytest.param(1, marks=pytest.mark.slow)])
def test_entries_that_mean_nothing_are_misses(own_cache: Path, every: int) -> None:
    lowering = lowering_of(program, leaf(3, 4))
    made, key = decompose(lowering).joint, key_of(lowering)
    assert key is not None
    content = cache.read("graphs", key)
    assert content is not None
    data = json.loads(content)
    wrong: list[Any] = [None, 3, "x", [], {}, [[]], data[:-1], data[1:], [*data, 1]]
    for place, entry in enumerate(data[:-1]):
        for item in range(len(entry)):
            wrong += [
                [*data[:place], [*entry[:item], value, *entry[item + 1 :]], *data[place + 1 :]]
                for value in (None, "os::system.x", 7, [])
            ]
    right = kept_graphs._means(made.graph_module)
    for item in wrong[::every]:
        assert cache.write("graphs", key, json.dumps(item).encode())
        found = decompose(lowering).joint
        found.lint()
        assert found.num_primals == made.num_primals
    path = own_cache / "graphs" / key
    decompose(lowering)
    whole = path.read_bytes()
    for place in range(0, len(whole), 97 * every):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        assert kept_graphs._means(decompose(lowering).joint.graph_module) == right


def _train(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    loss = model(x).square().mean()
    loss.backward()
    return [loss.detach(), *(item.grad for item in model.parameters() if item.grad is not None)]


@pytest.mark.slow
def test_kernels_run_from_the_first_call_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(choice.SWITCH, raising=False)
    monkeypatch.setenv("DOVETAIL_CACHE", "1")  # for the process in the background
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8)) for _ in range(4)]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    x = torch.randn(5, 6)
    eager = _train(models[0], x)
    with process.stopped_at_end(), fresh_cache():
        first = dovetail.compile(models[1], backend="inductor")
        same(eager, _train(first, x))
        assert dovetail.wait(first, 300)
        assert dovetail.events_of(first).count("tier 0") == 1
    for model in models[2:]:
        dovetail.reset()  # or the entries of the equal module would be taken
        with fresh_cache():
            compiled = dovetail.compile(model, backend="inductor")
            same(eager, _train(compiled, x), exact=False)
            log = dovetail.events_of(compiled)
            assert (log.count("tier 0"), log.count("tier 1")) == (0, 1)
            assert dovetail.wait(compiled, 0)
