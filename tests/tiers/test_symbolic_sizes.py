"""Graphs whose sizes change from call to call run in tiers: for each size the results are eager's, before and behind the swap."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import silu

import dovetail
from dovetail.backends.common.sizes_elsewhere import SizesHere, SizesThere
from dovetail.cache.unportable import UnportableError
from dovetail.tiers.compiling import make_job
from dovetail.tiers.flat_graph import DecodedGraph
from dovetail.tiers.later import LaterGraph
from dovetail.tiers.process import Answer
from dovetail.torch_private import assumptions as private_assumptions
from dovetail.torch_private import sizes as private_sizes
from tests.differential import compare_modules, same
from tests.tiers.fakes import FakeWorker, SlowBackend
from tests.tiers.test_swap import NAME, layers, notes
from tests.tiers.test_swap import background as background
from tests.tiers.test_swap import slow as slow

pytestmark = pytest.mark.usefixtures("quiet")


def summed(x: Tensor) -> Tensor:
    return silu(x).sum() * x.shape[0]


def check(compiled: Any, size: int, *, exact: bool = False, program: Callable[[Tensor], Tensor] = summed) -> None:
    """One call and its backward, compared with eager."""
    x = torch.randn(size, 3, requires_grad=True)
    own = x.detach().clone().requires_grad_()
    expected, found = program(own), compiled(x)
    same(expected, found, exact=exact)
    same(torch.autograd.grad(expected, own), torch.autograd.grad(found, x), exact=exact)


def on_its_way(
    background: FakeWorker, program: Callable[[Tensor], Tensor] = summed, second: int = 5, **options: Any
) -> Any:
    """A compiled function with symbolic sizes whose kernels were asked for."""
    compiled = dovetail.compile(program, backend=NAME, dynamic=True, fullgraph=True, **options)
    for size in (4, second):
        check(compiled, size, exact=True, program=program)
    assert len(background.jobs) == 1, dovetail.events_of(compiled)
    return compiled


def test_a_second_batch_size_waits_for_nothing(background: FakeWorker, slow: SlowBackend) -> None:
    eager, model = layers(), layers()
    compiled = dovetail.compile(model, backend=NAME, fullgraph=True)
    for step, size in enumerate((8, 8, 8, 5, 8, 5, 7, 8, 5, 3, 6)):
        if step == 7:
            assert not slow.ran
            background.answer_all()
        results = []
        for module in (eager, compiled):
            torch.manual_seed(step)
            result = module(torch.randn(size, 6))
            result.square().sum().backward()
            results.append((result.detach(), torch.get_rng_state()))
        same(*results, exact=step < 7)
        compare_modules(eager, model, "model", exact=False)
    assert slow.ran == ["forward", "backward"] * 4
    # The entry for one size is not called again, once there is one for all of them.
    assert notes(compiled) == ["tier 0", "tier 1 asked for"] * 2 + ["tier 1"]


def test_other_sizes_than_the_kernels_are_for_get_an_entry_of_their_own(
    background: FakeWorker, slow: SlowBackend
) -> None:
    def few(inputs: list[Any]) -> None:
        size = next((value.shape[0] for value in inputs if value.dim() == 2), None)
        assert size is None or size <= 6 or size > 6

    slow.assume = few
    compiled = on_its_way(background)
    background.answer_all()
    check(compiled, 6)
    assert slow.ran == ["forward", "backward"]
    check(compiled, 7, exact=True)
    assert len(slow.ran) == 2
    (recompiled,) = [event for event in dovetail.events_of(compiled).events if event.name == "recompile"]
    assert "must be at most 6" in str(recompiled) or "<= 6" in str(recompiled)
    assert len(compiled.entries) == 2
    check(compiled, 9, exact=True)
    background.answer_all()
    # The second entry is found first, and has kernels for other sizes than this one.
    check(compiled, 5, exact=True)
    for size in (5, 8, 2, 30):
        check(compiled, size)
    assert slow.ran == ["forward", "backward"] * 5
    assert len(compiled.entries) == 2


def test_a_size_that_the_kernels_take_for_a_constant(background: FakeWorker, slow: SlowBackend) -> None:
    slow.assume = lambda inputs: [bool(value.shape[0] == 4) for value in inputs if value.dim() == 2]
    slow.change = lambda values: [item + (0 if item.dim() < 2 or item.shape[0] == 4 else 1e6) for item in values]
    compiled = on_its_way(background)
    background.answer_all()
    check(compiled, 7, exact=True)
    check(compiled, 4)
    check(compiled, 8, exact=True)
    assert slow.ran == ["forward", "backward"]


def test_what_runs_by_operators_hears_of_no_assumption(background: FakeWorker, slow: SlowBackend) -> None:
    slow.assume = lambda inputs: [bool(value.shape[0] == 4) for value in inputs if value.dim() == 2]
    compiled = on_its_way(background)
    (entry,) = compiled.entries
    joint = entry.compiled.lowering.joint
    known = private_assumptions.count_of_assumptions(joint.fake_mode.shape_env)
    background.answer_all()
    check(compiled, 4)
    assert slow.ran
    assert private_assumptions.count_of_assumptions(joint.fake_mode.shape_env) == known
    assert any(private_sizes.has_symbols(node.meta["val"]) for node in joint.primals)


@pytest.mark.parametrize("size", [0, 1])
def test_sizes_that_operators_take_for_special(background: FakeWorker, slow: SlowBackend, size: int) -> None:
    compiled = on_its_way(background)
    check(compiled, size, exact=True)
    background.answer_all()
    for other in (size, 6, size, 2, size):
        check(compiled, other)
    assert len(compiled.entries) == 2


def test_a_backward_of_another_size_is_outstanding(background: FakeWorker, slow: SlowBackend) -> None:
    compiled = on_its_way(background)
    x = torch.randn(9, 3, requires_grad=True)
    loss = compiled(x)
    background.answer_all()
    check(compiled, 2)
    assert slow.ran == ["forward", "backward"]
    same(torch.autograd.grad(loss, x), torch.autograd.grad(summed(x), x), exact=True)
    assert slow.ran == ["forward", "backward"]


@pytest.mark.slow
def test_second_derivatives_at_other_sizes(background: FakeWorker, slow: SlowBackend) -> None:
    slow.assume = lambda inputs: [bool(value.shape[0] <= 5) for value in inputs if value.dim() == 2]
    compiled = on_its_way(background)
    background.answer_all()
    for size in (4, 5, 8, 5, 3, 8, 9):
        background.answer_all()
        found = []
        for function in (summed, compiled):
            torch.manual_seed(size)
            x = torch.randn(size, 3, requires_grad=True)
            (slope,) = torch.autograd.grad(function(x), x, create_graph=True)
            found.append(torch.autograd.grad(slope.square().sum(), x))
        same(*found, exact=False)


def test_whole_numbers_and_views(background: FakeWorker, slow: SlowBackend) -> None:
    def windowed(x: Tensor, count: int) -> Tensor:
        return silu(x[:count].reshape(-1)).sum() / (count + 1) + x.new_zeros(count, 2).sum()

    compiled = dovetail.compile(windowed, backend=NAME, fullgraph=True)
    for call, count in enumerate((3, 4, 5, 6, 7, 8, 9, 2)):
        if call == 5:
            background.answer_all()
        x = torch.randn(20, 3)
        same(windowed(x, count), compiled(x, count), exact=False)
    assert slow.ran == ["inference"] * 3


def test_inputs_are_written_at_each_size(background: FakeWorker, slow: SlowBackend) -> None:
    def counted(x: Tensor, total: Tensor) -> Tensor:
        total += x.shape[0]
        x.mul_(2)
        return silu(x) + torch.rand_like(x)

    compiled, totals = dovetail.compile(counted, backend=NAME, dynamic=True), (torch.zeros(()), torch.zeros(()))
    for call, size in enumerate((4, 6, 3, 5, 9, 2)):
        if call == 3:
            background.answer_all()
        results = []
        for function, total in zip((counted, compiled), totals, strict=True):
            torch.manual_seed(call)
            x = torch.randn(size, 2)
            results.append((function(x, total), x, total.clone(), torch.get_rng_state()))
        same(*results, exact=call < 3)
    assert slow.ran == ["inference"] * 3


def test_the_call_that_compares_has_sizes_that_fit(background: FakeWorker, slow: SlowBackend) -> None:
    slow.assume = lambda inputs: [bool(value.shape[0] <= 5) for value in inputs if value.dim() == 2]
    compiled = on_its_way(background, check_swap=True)
    background.answer_all()
    check(compiled, 9, exact=True)
    assert "swap checked" not in notes(compiled)
    check(compiled, 3)
    assert "swap checked" in notes(compiled)


@pytest.mark.parametrize("status", ["failed", "left", "unfit"])
def test_a_background_that_cannot_do_it(background: FakeWorker, slow: SlowBackend, status: str) -> None:
    compiled = on_its_way(background)
    background.answer_all(Answer(status, "no such size"))
    for size in (3, 8, 5):
        check(compiled, size, exact=status != "unfit")
    assert bool(slow.ran) == (status == "unfit")


def test_threads_with_other_sizes(background: FakeWorker, slow: SlowBackend) -> None:
    slow.assume = lambda inputs: [bool(value.shape[0] <= 5) for value in inputs if value.dim() == 2]
    compiled, wrong = on_its_way(background), []
    background.answer_all()

    def work(size: int) -> None:
        for _ in range(10):
            x = torch.randn(size, 3)
            if not torch.allclose(compiled(x), summed(x)):
                wrong.append(size)

    threads = [threading.Thread(target=work, args=(size,)) for size in (2, 5, 7, 11)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# --- on the other side ------------------------------------------------------------------------------------------------


def attention(x: Tensor) -> Tensor:
    heads = x.view(x.shape[0], -1, 3).transpose(0, 1)
    found = nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True, scale=0.5)
    return found.flatten(1).softmax(-1).sum()


def halves(x: Tensor) -> Tensor:
    first, second = x.chunk(2)
    return torch.cat([first.t() @ first, (second.sum(0) / x.shape[0]).expand(3, 3)]).sum() + max(x.shape[0], 5)


def resized(x: Tensor) -> Tensor:
    """Its backward has a kernel of torch's that takes no symbolic sizes; while a program is captured, its Python form is taken."""
    return nn.functional.interpolate(x.t()[None], scale_factor=2.0, mode="linear").square().sum()


@pytest.mark.parametrize("program", [resized, summed, attention, halves])
@pytest.mark.sampled(2)
def test_the_same_sizes_on_the_other_side(
    background: FakeWorker, slow: SlowBackend, program: Callable[[Tensor], Tensor]
) -> None:
    on_its_way(background, program, second=4)
    (job,) = background.jobs
    data = json.loads(json.dumps(job.data))
    there = SizesThere(data["sizes"])
    for graph in data["graphs"]:
        other = DecodedGraph(graph, there)
        assert any(private_sizes.has_symbols(value) for value in other.examples)
        # Written down there again, it is what was written here.
        again = make_job(NAME, [LaterGraph(other.graph, [], other.kind, other.options)], there.fake_mode.shape_env)
        for wanted, found in zip(graph["nodes"], json.loads(json.dumps(again))["graphs"][0]["nodes"], strict=True):
            assert _plain(found) == _plain(wanted)
    assert there.described()["symbols"] == data["sizes"]["symbols"]


def _plain(node: dict[str, Any]) -> dict[str, Any]:
    """Without what a value is in its memory, which is said of inputs alone."""
    value = node.get("value")
    if node["op"] == "placeholder" or not isinstance(value, dict):
        return {**node, "value": None if isinstance(value, list) else value}
    return {**node, "value": {name: value[name] for name in ("shape", "stride", "number") if name in value}}


def test_a_size_that_means_something_else_there_is_refused(background: FakeWorker, slow: SlowBackend) -> None:
    on_its_way(background)
    data = copy.deepcopy(background.jobs[0].data)
    text = json.dumps(data["graphs"])
    changed = json.loads(text.replace('"text": "', '"text": "1 + '))
    assert text != json.dumps(changed)
    with pytest.raises(UnportableError, match="another expression"):
        DecodedGraph(changed[0], SizesThere(data["sizes"]))
    data["sizes"]["assumed"] = [{"call": "GreaterThan", "args": [{"symbol": 0}, 10**6]}]
    with pytest.raises(UnportableError, match="does not hold"):
        SizesThere(data["sizes"])


def test_sizes_that_nobody_knows_are_refused(background: FakeWorker, slow: SlowBackend) -> None:
    compiled = on_its_way(background)
    joint = compiled.entries[0].compiled.lowering.joint
    here = SizesHere(joint.fake_mode.shape_env)
    with joint.fake_mode:
        size = joint.fake_mode.shape_env.create_unbacked_symint()
    with pytest.raises(UnportableError):
        here.encode(size)
