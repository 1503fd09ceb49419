"""Code of whole graphs in the cache on disk: what decides about its key, and what happens to entries that are damaged."""

from __future__ import annotations

import base64
import json
import marshal
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor import config
from torch._inductor.utils import fresh_cache

import dovetail
from dovetail import cache
from dovetail.backends.common.sizes_elsewhere import sizes_of_mode
from dovetail.backends.inductor import backend, kept_code
from dovetail.backends.inductor.job import Job
from dovetail.backends.protocol import Kind
from dovetail.cache import versions
from dovetail.torch_private import inductor as private_inductor
from dovetail.torch_private import inductor_code as private_code
from dovetail.torch_private.inductor_cache import NotCachedError, only_from_cache
from tests.differential import same

pytestmark = pytest.mark.usefixtures("own_cache")


def program(x: torch.Tensor) -> torch.Tensor:
    return (x.sin() * 2.5).sum(0)


def job_of(function: Callable[..., Any] = program, *inputs: torch.Tensor, **settings: Any) -> Job:
    joint = dovetail.capture(function, inputs or (torch.ones(3, 4),))
    graph = joint.graph_module
    return Job(graph, [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")], settings)


def key_of(job: Job, kind: Kind = "inference", visible: tuple[int, ...] = (0,)) -> str | None:
    return kept_code.key_of_code(job, kind, visible, sizes_of_mode(backend.find_fake_mode(job.graph)))


def test_equal_graphs_have_one_key() -> None:
    key = key_of(job_of())
    assert key is not None and key == key_of(job_of())


CHANGED: list[Callable[[], str | None]] = [
    lambda: key_of(job_of(program, torch.ones(4, 3))),
    lambda: key_of(job_of(program, torch.ones(4, 3).t())),
    lambda: key_of(job_of(program, torch.ones(3, 4, dtype=torch.float64))),
    lambda: key_of(job_of(program, torch.ones(3, 5)[:, 1:])),
    lambda: key_of(job_of(lambda x: (x.sin() * 2.25).sum(0))),
    lambda: key_of(job_of(lambda x: (x.sin() * 2.5).sum(1))),
    lambda: key_of(job_of(epilogue_fusion=False)),
    lambda: key_of(job_of(), kind="forward"),
    lambda: key_of(job_of(), visible=()),
]


@pytest.mark.parametrize("change", range(len(CHANGED)))
def test_another_graph_has_another_key(change: int) -> None:
    key = CHANGED[change]()
    assert key is not None and key != key_of(job_of())


@pytest.mark.parametrize("change", ["setting", "threads", "dtype", "switch", "torch", "file", "CPU", "environment"])
def test_what_decides_about_code_is_in_the_key(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of()
    key = key_of(job)
    with config.patch({"cpp.simdlen": 8} if change == "setting" else {}):
        if change == "threads":
            monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
        elif change == "dtype":
            monkeypatch.setattr(torch, "get_default_dtype", lambda: torch.float64)
        elif change == "switch":
            monkeypatch.setattr(kept_code.private_state, "kernel_flags", lambda: ("others",))
        elif change == "torch":
            monkeypatch.setattr(cache, "software", lambda: ("others",))
        elif change == "file":
            # An edited file of the package: tests/cache/test_versions.py
            versions.software.cache_clear()
            monkeypatch.setattr(versions, "__file__", str(Path(__file__).parents[1] / "x.py"))
        elif change == "CPU":
            monkeypatch.setattr(kept_code, "_cpu", lambda: "another one")
        elif change == "environment":
            monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
        assert key_of(job) not in (None, key)
    versions.software.cache_clear()


def test_what_cannot_be_written_into_a_key_is_not_kept() -> None:
    job = job_of()
    assert key_of(job_of(unknown=object())) is None
    with config.patch({"post_grad_custom_pre_pass": lambda graph: None}):
        assert key_of(job) is None
    with config.patch({"trace.enabled": True}):
        assert key_of(job) is None
    constant = torch.arange(4.0)
    assert key_of(job_of(lambda x: x + constant.clone())) is not None
    job.graph.register_buffer("held", constant.to_sparse())
    with job.graph.graph.inserting_before(job.graph.graph.output_node()):
        job.graph.graph.get_attr("held")
    assert key_of(job) is None
    conjugated = job_of(lambda x: x.abs(), torch.ones(3, dtype=torch.complex64).conj())
    assert key_of(conjugated) is None
    cache.switch(False)
    assert key_of(job_of()) is None


@pytest.mark.parametrize("count", [1, 40])
def test_constants_are_kept_with_the_code(count: int) -> None:
    """A few numbers are written into the kernels, more lie beside them."""

    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * torch.tensor([[float(number)] for number in range(count)]).sin()

    def results() -> torch.Tensor:
        return dovetail.compile(scaled, tiers="wait", fullgraph=True)(x)  # type: ignore[no-any-return]

    x = torch.randn(count, 5)
    kept = results()
    with only_from_cache(ours=True):
        assert torch.equal(results(), kept)
    same(scaled(x), kept, exact=False)


def of_any_size(size: int, function: Callable[..., Any] = program, **bounds: int) -> Job:
    return job_of(function, dovetail.mark_dynamic(torch.ones(size, 4), 0, **bounds))


def test_the_sizes_of_the_call_are_not_in_the_key_of_symbolic_ones() -> None:
    key = key_of(of_any_size(3))
    assert key is not None and key == key_of(of_any_size(7)) != key_of(job_of())


@pytest.mark.parametrize(
    "change",
    [
        lambda: of_any_size(3, maximum=9),
        lambda: of_any_size(3, lambda x: program(x) if x.shape[0] < 9 else x),
        lambda: job_of(program, dovetail.mark_dynamic(torch.ones(4, 3), 1)),
    ],
)
def test_what_is_known_of_a_symbolic_size_is_in_the_key(change: Callable[[], Job]) -> None:
    assert key_of(change()) not in (None, key_of(of_any_size(3)))


def test_sizes_that_the_data_decides_are_not_kept() -> None:
    job = job_of(lambda x: x[x > 0].sin(), torch.ones(3, 4))
    assert key_of(job) is None


def test_who_takes_code_assumes_what_it_assumes() -> None:
    """Sizes of the call for which that does not hold are a miss, and nothing is assumed of them."""
    code = private_code.code_from_data({**NAMES, "source": SOURCE})
    assert code is not None
    for size, is_taken in ((3, True), (12, False)):
        sizes = sizes_of_mode(backend.find_fake_mode(of_any_size(size).graph))
        assert sizes is not None and sizes.assumed() == []
        condition = {"call": "StrictLessThan", "args": [{"symbol": 0}, 10]}
        cache.write("code", KEY, f"{json.dumps({**NAMES, 'assumed': [condition]})}\n{SOURCE}".encode())
        assert (kept_code.take_code(KEY, sizes) is not None) is is_taken
        assert sizes.count == is_taken and sizes.assumed() == [condition] * is_taken


SOURCE = """class Runner:
    def __init__(self, partitions):
        self.partitions = partitions
    def call(self, args):
        x, = args
        args.clear()
        return (torch.ops.aten.sin.default(x),)"""
BYTECODE = base64.b64encode(marshal.dumps(compile(SOURCE, "x", "exec"))).decode()
NAMES = {"kernels": {}, "helpers": {}, "extern": ["mm"], "constants": {}, "bytecode": BYTECODE}
WHOLE = f"{json.dumps(NAMES)}\n{SOURCE}"
KEY = cache.key_of("an example")


def test_code_runs_without_inductor() -> None:
    assert cache.write("code", KEY, WHOLE.encode())
    run = kept_code.take_code(KEY)
    assert run is not None and torch.equal(run([torch.ones(2)])[0], torch.ones(2).sin())
    assert kept_code.take_code(None) is None
    assert kept_code.take_code(cache.key_of("another")) is None


@pytest.mark.parametrize(
    "call, is_kept",
    [
        ("torch.ops.aten.sin.default(x)", True),
        ("aten.sin.default(x)", True),
        ("torch.ops.inductor.sin.default(x)", False),
        ("helper(x)", False),
        ("extern_kernels.mm(x, x)", True),
    ],
)
def test_comments_decide_nothing(call: str, is_kept: bool) -> None:
    source = SOURCE.replace("torch.ops.aten.sin.default(x)", call)
    source = source.replace(
        "        x, =", "        # Original ATen: [aten.addmm], torch.ops.inductor.sin\n        x, ="
    )
    names: dict[str, Any] = {"torch": torch, "aten": torch.ops.aten, "extern_kernels": torch, "helper": len}
    exec(source, names)
    compiled = types.SimpleNamespace(
        current_callable=names["Runner"]([]).call,
        device_types={"cpu"},
        inputs_to_check=[],
        constants={},
        torchbind_constants={},
        source_code=source,
    )
    data = private_code.code_as_data(compiled)
    assert (data is not None) is is_kept and (data is None or "Original ATen" in data["source"])


def test_entries_that_mean_nothing_are_misses() -> None:
    bad: list[str] = ["", "null", "[]", "{}", "\0", WHOLE[1:], WHOLE.replace(BYTECODE, BYTECODE[:80])]
    for name in NAMES:
        wrong = [None, 3, "x", ["no_such_function"], {"a": 1}]
        wrong += [{"cpp_fused_0": [KEY, "kernel_0"]}, {"cpp_fused_0": ["../../etc", "kernel_0"]}]
        bad += [f"{json.dumps({**NAMES, name: value})}\n{SOURCE}" for value in wrong]
    for content in bad:
        assert cache.write("code", KEY, content.encode())
        assert kept_code.take_code(KEY) is None, content


def test_an_entry_that_is_damaged_on_disk_is_a_miss(own_cache: Path) -> None:
    assert cache.write("code", KEY, WHOLE.encode())
    path = own_cache / "code" / KEY
    whole = path.read_bytes()
    for place in range(0, len(whole), 7):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        assert kept_code.take_code(KEY) is None
        path.write_bytes(whole[:place])
        assert kept_code.take_code(KEY) is None
    path.write_bytes(whole)
    assert kept_code.take_code(KEY) is not None


def test_nothing_is_looked_for_in_inductors_cache() -> None:
    graph = job_of().graph
    with only_from_cache(ours=True), pytest.raises(NotCachedError, match="code of the inference graph is not there"):
        backend.compile_inductor(graph, [], kind="inference", options={})


@pytest.mark.parametrize(
    "program", [program, lambda x: (x.to(torch.complex64) * 2j).abs()], ids=["kernel", "operators"]
)
def test_code_is_kept_with_the_checks_of_this_torch(
    program: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each torch has other functions for them: one for all inputs from torch 2.15 on, and one in Python for operators."""
    x = torch.randn(3, 4)
    with fresh_cache(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        backend.compile_inductor(job_of(program, x).graph, [], kind="inference", options={})
        monkeypatch.setattr(private_inductor, "inductor_compile", _refuse)
        run = backend.compile_inductor(job_of(program, x).graph, [], kind="inference", options={})
    same(run([x])[0], program(x), exact=False)
    with pytest.raises((AssertionError, RuntimeError)):
        run([torch.randn(4, 3)])


def _refuse(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("Inductor was asked")


@pytest.mark.slow
def test_a_training_step_comes_from_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    models = [torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.LayerNorm(8)) for _ in range(3)]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    x, found = torch.randn(5, 6), []
    for number, model in enumerate(models):
        if number == 2:
            monkeypatch.setattr(private_inductor, "inductor_compile", _refuse)
        compiled = dovetail.compile(model, backend="inductor", tiers="wait") if number else model
        with fresh_cache():
            y = compiled(x)
            y.square().sum().backward()
        found.append([y.detach(), *(item.grad for item in model.parameters())])
    same(found[0], found[1], exact=False)
    for one, other in zip(found[1], found[2], strict=True):
        assert torch.equal(one, other)
    assert {entry.kind for entry in cache.ls()} >= {"code", "kernels"}
