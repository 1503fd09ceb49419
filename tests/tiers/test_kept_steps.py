"""Compilations in the cache on disk: what comes from there runs as what was compiled, and under keys that hold all that decides."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dovetail
from dovetail import cache
from dovetail.aot import steps
from dovetail.aot.compiled_graph import CompiledGraph
from dovetail.aot.steps import CompileSettings, Lowering
from dovetail.backends import lookup_backend
from dovetail.backends.inductor import backend as inductor_backend
from dovetail.errors import BackendError, EagerFallbackWarning
from dovetail.tiers import kept_steps
from tests.differential import same

Run = Callable[[list[Any]], Any]


@pytest.fixture(autouse=True)
def runs(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Run]]:
    """In the place of machine code: the graphs that Inductor would compile, run by operators, by the keys of their code."""
    kept: dict[str, Run] = {}

    def compile_graph(job: Any, *args: Any) -> tuple[Run, bool]:
        return lambda inputs: list(job.graph(*inputs)), False

    def keep(key: str, run: Run, *sizes: Any) -> None:
        kept[key] = run
        cache.write("code", key, b"code")

    def take(key: str, sizes: Any = None) -> Run | None:
        return kept.get(key)

    for name, function in (("_compile", compile_graph), ("keep_code", keep), ("take_code", take)):
        monkeypatch.setattr(inductor_backend, name, function)
    monkeypatch.setattr(inductor_backend.private_inductor, "generated_file", lambda run: "code.py")
    monkeypatch.setattr(inductor_backend.private_inductor, "straight_call", lambda run: run)
    monkeypatch.setattr(kept_steps, "take_code", take)
    yield kept


def lowering_of(function: Callable[..., Any], *inputs: torch.Tensor, **settings: Any) -> Lowering:
    joint = dovetail.capture(function, inputs)
    return Lowering(joint, lookup_backend("inductor"), CompileSettings(**settings))


def leaf(*sizes: int) -> torch.Tensor:
    return (torch.arange(torch.Size(sizes).numel()).reshape(sizes) / 7).requires_grad_()


def once(function: Callable[..., Any], *inputs: torch.Tensor, **settings: Any) -> CompiledGraph:
    return kept_steps.run_once(lowering_of(function, *inputs, **settings))


def twice(function: Callable[..., Any], *inputs: torch.Tensor, **settings: Any) -> CompiledGraph:
    """As the second process has it; no step is run."""
    assert once(function, *inputs, **settings).lowering.complete is None
    with pytest.MonkeyPatch.context() as patch:
        for name in ("run_steps", "decompose", "split", "lower_backward"):
            patch.setattr(kept_steps, name, None)
        found = once(function, *inputs, **settings)
    assert found.lowering.complete is not None
    return found


def program(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x).sum(0)


def _several(x: torch.Tensor) -> Any:
    one, two = F.layer_norm(x, (4,)).split(2, 1)
    return one.t() * 2, two.exp(), x * 3


def _normed(x: torch.Tensor) -> torch.Tensor:
    average, scale = torch.zeros(4), torch.ones(4)
    return F.batch_norm(x, average, scale, training=True).sigmoid() + average


PROGRAMS: list[tuple[Callable[..., Any], tuple[int, ...]]] = [
    (program, (3, 4)),
    (_several, (3, 4)),
    (_normed, (3, 4)),
    (lambda x: F.dropout(x, 0.5).sin(), (3, 4)),
    (lambda x: F.conv2d(x, x[:2] * 2).relu(), (3, 2, 5, 5)),
    (lambda x: (x.mul(2), x.detach() + 1), (3, 4)),
]


def gradients(run: Callable[[torch.Tensor], Any], x: torch.Tensor, *, only: int | None = None) -> list[Any]:
    torch.manual_seed(3)
    x = x.detach().clone().requires_grad_()
    found = run(x)
    values = [item for item in (found if isinstance(found, tuple) else (found,)) if item.requires_grad]
    values = values if only is None else [values[only]]
    grads = torch.autograd.grad(values, x, [torch.randn(item.shape) for item in values], create_graph=only is None)
    return [found, *grads]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_what_comes_from_the_cache_runs_as_what_was_compiled(number: int) -> None:
    function, sizes = PROGRAMS[number]
    compiled = twice(function, leaf(*sizes))
    plain = lowering_of(function, leaf(*sizes)).joint.compile("aten")
    for _ in range(2):
        same(gradients(plain, leaf(*sizes)), gradients(compiled, leaf(*sizes)), exact=False)


def test_a_graph_without_a_backward_is_kept_too() -> None:
    compiled = twice(program, leaf(3, 4).detach())
    same(program(leaf(3, 4).detach()), compiled(leaf(3, 4).detach()), exact=False)


# --- graphs, when somebody asks for them ------------------------------------------------------------------------------


def test_other_tangents_where_code_and_compiler_have_gone(
    runs: dict[str, Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backward for all tangents is there, and is not compiled again for the graphs of the others."""
    compiled = twice(_several, leaf(3, 4))
    plain = lowering_of(_several, leaf(3, 4)).joint.compile("aten")

    def fail(*args: Any) -> Any:
        raise BackendError("no compiler is there")

    runs.clear()
    monkeypatch.setattr(inductor_backend, "_compile", fail)
    for only in (1, None):
        with pytest.warns(EagerFallbackWarning) if only is not None else contextlib.nullcontext():
            found = gradients(compiled, leaf(3, 4), only=only)
        same(gradients(plain, leaf(3, 4), only=only), found, exact=False)


def test_the_backward_of_an_entry_is_for_the_tangents_that_were_known() -> None:
    known = (True, False, True)
    once(_several, leaf(3, 4), expected=known)
    compiled = once(_several, leaf(3, 4))
    assert compiled.lowering.backward is not None and list(compiled.lowering.backward._compiled) == [known]
    plain = lowering_of(_several, leaf(3, 4)).joint.compile("aten")
    for only in (0, 1, 2, None):
        same(gradients(plain, leaf(3, 4), only=only), gradients(compiled, leaf(3, 4), only=only), exact=False)


def test_other_tangents_have_their_backward() -> None:
    compiled = twice(_several, leaf(3, 4))
    plain = lowering_of(_several, leaf(3, 4)).joint.compile("aten")
    assert compiled.lowering.backward is not None and len(compiled.lowering.backward._compiled) == 1
    for only in (1, 0, 2, 1):
        same(gradients(plain, leaf(3, 4), only=only), gradients(compiled, leaf(3, 4), only=only), exact=False)


def test_its_backward_has_a_derivative() -> None:
    compiled, x = twice(lambda x: x.sin().square().sum(0), leaf(3, 4)), leaf(3, 4)

    def second(run: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        (first,) = torch.autograd.grad(run(x).sum(), x, create_graph=True)
        (found,) = torch.autograd.grad(first.square().sum(), x)
        return found

    same(second(lambda x: x.sin().square().sum(0)), second(compiled), exact=False)


def test_a_report_shows_the_graphs_that_were_compiled() -> None:
    first, found = once(program, leaf(3, 4)), once(program, leaf(3, 4))
    with torch.inference_mode():
        assert str(found) == str(first)
    operators = [[node.target for node in item.joint.graph.nodes] for item in (first, found)]
    assert operators[0] == operators[1] and torch.ops.aten.erf.default in operators[1]


def test_graphs_that_cannot_be_made_again_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = twice(lambda x: (F.gelu(x), x.exp()), leaf(3, 4))
    # The partition decides otherwise: what the forward saves is not what this backward would take.
    monkeypatch.setattr(steps, "choose_saved", steps.Place())
    with pytest.raises(BackendError, match="cannot be made again"):
        gradients(compiled, leaf(3, 4), only=1)


@pytest.mark.parametrize("draws", [False, True])
def test_code_that_raises_is_finished_by_operators(runs: dict[str, Run], draws: bool) -> None:
    function = (lambda x: F.dropout(x, 0.5)) if draws else program
    once(function, leaf(3, 4))

    def failing(inputs: list[Any]) -> Any:
        torch.rand(int(draws))
        raise RuntimeError("the kernel has failed")

    for key in runs:
        runs[key] = failing
    compiled = once(function, leaf(3, 4))
    with pytest.warns(EagerFallbackWarning, match="operator by operator"):
        found = gradients(compiled, leaf(3, 4))
    same(gradients(lowering_of(function, leaf(3, 4)).joint.compile("aten"), leaf(3, 4)), found, exact=False)


# --- keys -------------------------------------------------------------------------------------------------------------


OTHERS: dict[str, Callable[[], Lowering]] = {
    "graph": lambda: lowering_of(lambda x: F.gelu(x, approximate="tanh").sum(0), leaf(3, 4)),
    "inference": lambda: lowering_of(program, leaf(3, 4).detach()),
    "options": lambda: lowering_of(program, leaf(3, 4), options={"max_autotune": True}),
    "guards": lambda: lowering_of(program, leaf(3, 4), guarded_inputs=True),
    "numerics": lambda: lowering_of(program, leaf(3, 4), numerics="exact"),
    "result": lambda: lowering_of(lambda x: (program(x), x), leaf(3, 4)),
    "marked": lambda: _marked("save", True),
    "checkpoint": lambda: _marked("checkpointed", True),
}


def _marked(name: str, value: Any) -> Lowering:
    found = lowering_of(program, leaf(3, 4))
    next(node for node in found.joint.graph.nodes if node.op == "call_function").meta[name] = value
    return found


@pytest.mark.parametrize("name", OTHERS)
def test_another_compilation_has_another_key(name: str) -> None:
    key, other = (kept_steps.key_of_steps(item) for item in (lowering_of(program, leaf(3, 4)), OTHERS[name]()))
    assert key is not None and other not in (None, key)


def test_the_place_in_the_process_is_no_part_of_the_key() -> None:
    """Another process has run autograd's engine more or less often, and has its files elsewhere."""
    key = kept_steps.key_of_steps(lowering_of(program, leaf(3, 4)))
    leaf(2).sum().backward()
    assert key == kept_steps.key_of_steps(lowering_of(program, leaf(3, 4))) is not None


@pytest.mark.parametrize("change", ["threads", "deterministic", "environment", "hook"])
def test_what_decides_about_a_step_is_in_the_key(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lowering = lowering_of(program, leaf(3, 4))
    key = kept_steps.key_of_steps(lowering)
    if change == "threads":
        monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    elif change == "deterministic":
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    elif change == "environment":
        monkeypatch.setenv("ATEN_CPU_CAPABILITY", "other")
    else:
        monkeypatch.setattr(steps, "after_partition", [*steps.after_partition][1:])
    assert kept_steps.key_of_steps(lowering) not in (None, key)


NOT_KEPT: dict[str, Callable[[], Lowering]] = {
    "budget": lambda: lowering_of(program, leaf(3, 4), memory_budget=0.5),
    "option": lambda: lowering_of(program, leaf(3, 4), options={"post_grad_custom_post_pass": print}),
    "mark": lambda: _marked("mine", object()),
    "name of a mark": lambda: _marked(3, True),  # type: ignore[arg-type]
    "reused": lambda: lowering_of(program, leaf(3, 4), find_reused=lambda joint: {}),
}


@pytest.mark.parametrize("name", NOT_KEPT)
def test_what_cannot_be_written_into_a_key_has_none(name: str) -> None:
    assert kept_steps.key_of_steps(NOT_KEPT[name]()) is None


def test_steps_of_the_programs_are_run_each_time() -> None:
    def mine(lowering: Lowering) -> Lowering:
        return lowering

    steps.after_partition(mine)
    try:
        assert kept_steps.key_of_steps(lowering_of(program, leaf(3, 4))) is None
    finally:
        steps.after_partition.remove(mine)


def test_a_graph_that_writes_to_its_inputs_is_not_kept() -> None:
    x = torch.ones(3, 4)
    for _ in range(2):
        assert once(lambda x: x.mul_(2), x).lowering.complete is None
    assert "steps" not in {entry.kind for entry in cache.ls()}


def test_what_cannot_be_written_down_runs_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(lowering: Lowering) -> str:
        raise KeyError("val")

    monkeypatch.setattr(kept_steps, "_digest", fail)
    same(gradients(program, leaf(3, 4)), gradients(once(program, leaf(3, 4)), leaf(3, 4)), exact=False)
    assert "steps" not in {entry.kind for entry in cache.ls()}


def test_code_that_is_gone_is_compiled_again(runs: dict[str, Run]) -> None:
    twice(program, leaf(3, 4))
    runs.popitem()
    assert once(program, leaf(3, 4)).lowering.complete is None
    assert once(program, leaf(3, 4)).lowering.complete is not None


@pytest.mark.slow
def test_entries_that_mean_nothing_are_misses() -> None:
    lowering = lowering_of(program, leaf(3, 4))
    key = kept_steps.key_of_steps(lowering)
    once(program, leaf(3, 4))
    assert key is not None
    data = json.loads(cache.read("steps", key) or b"")
    wrong: list[Any] = [None, 3, "x", [], {}, [[]], data[:-1], data[1:], [*data, data[-1]], [data[0], [], *data[2:]]]
    for place in (2, 3):
        for item in range(len(data[place])):
            for value in (None, "../../x", 7, {}):
                if data[place][item] != value:
                    part = [*data[place][:item], value, *data[place][item + 1 :]]
                    wrong.append([*data[:place], part, *data[place + 1 :]])
    for item in wrong:
        assert cache.write("steps", key, json.dumps(item).encode())
        found = once(program, leaf(3, 4))
        assert found.lowering.complete is None, item
        same(gradients(program, leaf(3, 4)), gradients(found, leaf(3, 4)), exact=False)


def test_a_model_trains_on_it() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.BatchNorm1d(4), nn.Dropout(0.2)).double()
    x = torch.randn(6, 4).double()
    compiled = twice(model, x)
    state = {name: item.clone() for name, item in model.state_dict().items()}

    def train(run: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        torch.manual_seed(1)
        model.load_state_dict(state)
        model.zero_grad()
        run(x).square().sum().backward()
        return [*(item.grad for item in model.parameters() if item.grad is not None), *model.buffers()]

    expected = [item.clone() for item in train(model)]
    same(expected, train(compiled), exact=False)


# --- calls that wait for their kernels ----------------------------------------------------------------------------------


def waiting(function: Callable[..., Any] = program, **settings: Any) -> Any:
    """As a new process compiles it."""
    return dovetail.compile(function, backend="inductor", tiers="wait", **settings)


def hits(compiled: Any) -> int:
    """How often a graph came whole from the cache."""
    return sum("cache=hit" in str(event) for event in dovetail.events_of(compiled).events)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_a_call_that_waits_starts_from_what_an_earlier_process_has_kept(number: int) -> None:
    function, sizes = PROGRAMS[number]
    expected = gradients(function, leaf(*sizes))
    first = waiting(function)
    same(expected, gradients(first, leaf(*sizes)), exact=False)
    second = waiting(function)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("decompose", "split", "lower_forward", "lower_backward"):
            patch.setattr(sys.modules["dovetail.aot.compile_joint"], name, None)
        found = gradients(second, leaf(*sizes), only=0)
    assert (hits(first), hits(second)) == (0, 1)
    same(gradients(function, leaf(*sizes), only=0), found, exact=False)
    same(expected, gradients(second, leaf(*sizes)), exact=False)


def test_a_call_that_cannot_swap_starts_from_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOVETAIL_TIERS", "auto")
    torch.use_deterministic_algorithms(True)
    try:
        runs = [waiting(), waiting()]
        first, second = (gradients(run, leaf(3, 4), only=0) for run in runs)
    finally:
        torch.use_deterministic_algorithms(False)
    same(first, second)
    assert [hits(run) for run in runs] == [0, 1]
    other = waiting()
    gradients(other, leaf(3, 4), only=0)
    assert hits(other) == 0, "deterministic algorithms are in the key"


@pytest.mark.parametrize("settings", [{"memory_budget": 0.5}, {"check_swap": True}])
def test_a_call_that_waits_for_what_is_not_kept_compiles_it(settings: dict[str, Any]) -> None:
    for _ in range(2):
        compiled = waiting(**settings)
        same(gradients(program, leaf(3, 4)), gradients(compiled, leaf(3, 4)), exact=False)
        assert hits(compiled) == 0


def test_a_whole_step_that_waits_takes_its_code_graph_by_graph() -> None:
    def train(compiled: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.gelu(model(x)).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        run = waiting(step) if compiled else step
        return [*(run(leaf(3, 4).detach()) for _ in range(4)), *model.parameters()]

    expected = train(False)
    for _ in range(2):
        same(expected, train(True), exact=False)


def test_a_failure_of_the_cache_is_no_failure_of_a_call_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("nobody has thought of this")

    for name in ("key_of_steps", "take"):
        with monkeypatch.context() as patch:
            patch.setattr(kept_steps, name, fail)
            compiled = waiting()
            same(gradients(program, leaf(3, 4)), gradients(compiled, leaf(3, 4)), exact=False)
        assert dovetail.events_of(compiled).count("cache miss")


def test_an_error_of_the_backend_is_said_where_a_call_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> Any:
        raise BackendError("no kernels today", advice="wait")

    monkeypatch.setattr(inductor_backend, "_compile", fail)
    with pytest.warns(EagerFallbackWarning, match="no kernels today"):
        same(gradients(program, leaf(3, 4)), gradients(waiting(), leaf(3, 4)), exact=False)
