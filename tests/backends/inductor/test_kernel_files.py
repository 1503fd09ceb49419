"""Kernels of one graph share files, and Inductor's cache finds them in the next process."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor import async_compile, codecache, cpp_builder, cpu_vec_isa
from torch._inductor.utils import fresh_cache

import dovetail
from dovetail import cache
from dovetail.backends.inductor import backend
from dovetail.backends.inductor.job import Job
from dovetail.torch_private import inductor_kernels
from dovetail.torch_private.inductor_kernels import compile_headers, joined, kernels_in_few_files, trusting_compiler

HEADER = "#include <torch/csrc/inductor/cpp_prefix.h>\n"
TYPES = ["const float*", "float*", "int64_t"]


def source(body: str, before: str = "") -> str:
    parameters = "const float* in_ptr0,\n                       float* out_ptr0,\n   const int64_t ks0"
    loop = f"for (int64_t i = 0; i < ks0; i++) {{ {body} }}"
    return f'\n{HEADER}{before}extern "C"  void  kernel({parameters})\n{{\n    #pragma GCC ivdep\n    {loop}\n}}\n'


def build(*sources: str) -> list[Callable[..., Any]]:
    """What a generated module does: asks for kernels by name, then waits for all of them."""
    compiler = async_compile.AsyncCompile()
    scope: dict[str, Any] = {f"kernel{i}": compiler.cpp_pybinding(TYPES, text) for i, text in enumerate(sources)}
    compiler.wait(scope)
    return list(scope.values())


def results(kernels: list[Callable[..., Any]]) -> list[list[float]]:
    found = []
    for kernel in kernels:
        given, out = torch.arange(4.0), torch.empty(4)
        kernel(given, out, 4)
        found.append(out.tolist())
    return found


HELPER = "static inline float helper(float x) {{ return x {}; }}\n"
DOUBLED = source("out_ptr0[i] = helper(in_ptr0[i]);", HELPER.format("* 2"))
MORE = source("out_ptr0[i] = helper(in_ptr0[i]);", HELPER.format("+ 1"))


def test_kernels_with_equal_names_share_a_file() -> None:
    text = joined([(TYPES, DOUBLED), (TYPES, MORE)])
    assert text.count(HEADER) == 1 and 'extern "C"  void' not in text
    assert text.count("static inline float helper") == 2
    assert "namespace dovetail_kernel_1 {" in text and '"kernel_1"' in text


@pytest.mark.parametrize(
    ("lengths", "wanted"),
    [
        ([10] * 17, [8, 9]),
        ([400_000, *[10] * 16], [1, 16]),
        ([*[10] * 16, 900_000], [16, 1]),
        ([10] * 16 + [9_000_000] + [10] * 16, [16, 1, 16]),
        ([10, 20], [2]),
    ],
)
def test_files_take_the_compiler_equally_long(lengths: list[int], wanted: list[int]) -> None:
    kernels = [([str(number)], "x" * length) for number, length in enumerate(lengths)]
    groups = inductor_kernels._files_of(kernels)
    assert [len(group) for group in groups] == wanted and sum(groups, []) == kernels


@pytest.mark.parametrize("text", ["#define N 3\n", "#if 1\n#endif\n", 'extern "C" int other();\n'])
def test_what_would_reach_other_kernels_is_compiled_alone(text: str) -> None:
    assert inductor_kernels._without_directives(source("out_ptr0[i] = 1;", text)) is None


def test_doubles_are_reduced_in_registers_where_torch_has_no_code_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_there(*sources: str) -> bool:
        return "VecReduceAllSIMD<double" in joined([(TYPES, text) for text in sources])

    summing = source("at::vec::vec_reduce_all<double, 2>(plus, all);")
    assert is_there(summing) and is_there(MORE, summing) and not is_there(MORE, DOUBLED)
    assert inductor_kernels._is_joined([(TYPES, summing)]) and not inductor_kernels._is_joined([(TYPES, MORE)])
    monkeypatch.setattr(inductor_kernels, "_lacks_reduced_doubles", lambda: False)
    assert not is_there(summing) and not inductor_kernels._is_joined([(TYPES, summing)])


@pytest.mark.slow
@pytest.mark.parametrize("columns", [1, 7, 8, 20, 33])
def test_reductions_of_rows_of_doubles(columns: int) -> None:
    def reductions(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        both = x * y
        return (
            both.sum(1),
            both.amax(1),
            both.amin(1),
            both.prod(1),
            both.var(1, correction=0),
            both.argmax(1),
            x @ y,
            both.sum(),
        )

    x, y = torch.randn(13, columns, dtype=torch.float64), torch.randn(columns, dtype=torch.float64)
    x[3, -1], x[5, 0], x[7, columns // 2] = float("nan"), float("inf"), -float("inf")
    compiled = dovetail.compile(reductions, backend="inductor", tiers="wait")
    for one, other in zip(compiled(x, y), reductions(x, y), strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)


@pytest.mark.slow
def test_joined_kernels_compute_what_they_did() -> None:
    with fresh_cache(), kernels_in_few_files():
        kernels = build(DOUBLED, MORE)
    assert results(kernels) == [[0, 2, 4, 6], [1, 2, 3, 4]]
    assert kernels[0].__self__ is kernels[1].__self__  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="requires 3 args"):
        kernels[1](torch.ones(1))


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
def test_kernels_that_do_not_compile_together_are_compiled_one_by_one(threads: int) -> None:
    special = "template <typename T> struct Only { static_assert(std::is_same_v<decltype(&::kernel), decltype(&::kernel)>); };\n"
    alone = DOUBLED + special + "static Only<int> only;\n"
    with torch._inductor.config.patch(compile_threads=threads), fresh_cache(), kernels_in_few_files():
        kernels = build(alone, MORE)
        assert results(kernels) == [[0, 2, 4, 6], [1, 2, 3, 4]]
        assert kernels[0].__self__ is not kernels[1].__self__  # type: ignore[attr-defined]


@pytest.mark.slow
def test_other_compilers_of_the_process_are_left_alone() -> None:
    with kernels_in_few_files():
        pass
    with fresh_cache():
        kernels = build(DOUBLED, MORE)
    assert results(kernels) == [[0, 2, 4, 6], [1, 2, 3, 4]]
    assert kernels[0].__self__ is not kernels[1].__self__  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.skipif(cpu_vec_isa.platform.machine() != "x86_64", reason="the list is of x86")
def test_the_same_instructions_are_picked() -> None:
    with kernels_in_few_files():
        found = cpu_vec_isa.valid_vec_isa_list()
        assert str(codecache.pick_vec_isa()) == str(found[0])
    every = cpu_vec_isa.valid_vec_isa_list()
    assert list(map(str, found)) == list(map(str, every)) and bool(found) == bool(every)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache on disk of its own: the directory of its files of kernels."""
    monkeypatch.setenv("DOVETAIL_CACHE_DIR", str(tmp_path / "kept"))
    cache.switch(True)
    yield cache.directory() / "kernels"
    cache.switch(None)


def _no_compiler(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("something was compiled")


@pytest.mark.slow
def test_kernels_outlive_inductors_own_cache(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for load in (True, False):
        if not load:
            monkeypatch.setattr(inductor_kernels._joined_kernels(), "load_async", _no_compiler)
        with fresh_cache(), kernels_in_few_files():
            assert results(build(DOUBLED, MORE)) == [[0, 2, 4, 6], [1, 2, 3, 4]]


@pytest.mark.slow
@pytest.mark.parametrize("damage", [b"", b"\x7fELF of something else"])
def test_files_that_cannot_be_loaded_are_compiled_again(
    kept: Path, damage: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = inductor_kernels._key_of_file(joined([(TYPES, DOUBLED), (TYPES, MORE)]))
    # Another test may have loaded them.
    for name in [name for name in sys.modules if name.endswith(".kernel")]:
        monkeypatch.delitem(sys.modules, name)
    assert cache.write("kernels", key, damage)
    with fresh_cache(), kernels_in_few_files():
        assert results(build(DOUBLED, MORE)) == [[0, 2, 4, 6], [1, 2, 3, 4]]
    content = cache.read("kernels", key)
    assert content is not None and len(content) > 1000


@pytest.fixture(scope="module")
def same_key() -> str:
    return _key("source")


def _key(source: str) -> str:
    with kernels_in_few_files():
        return inductor_kernels._key_of_file(source)


def _with(monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    if change == "CPU":
        monkeypatch.setattr(inductor_kernels, "cpu_features", lambda: "another one")
    elif change == "torch":
        monkeypatch.setattr(torch, "__version__", "2.13.1")
    elif change == "compiler":
        monkeypatch.setattr(cpp_builder, "get_compiler_version_info", lambda compiler: "another one")
    else:
        monkeypatch.setenv(*change.split("="))


CHANGES: list[str | dict[str, Any]] = [
    {"cpp.enable_floating_point_contract_flag": "fast"},
    {"cpp.enable_unsafe_math_opt_flag": True},
    *([{"cpp.march": "haswell"}] if hasattr(torch._inductor.config.cpp, "march") else []),
    "CPU",
    "torch",
    "compiler",
    "ATEN_CPU_CAPABILITY=default",
]


@pytest.mark.parametrize("change", CHANGES)
def test_what_decides_about_machine_code_is_in_the_key(
    change: str | dict[str, Any], same_key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inductor_kernels._machine.cache_clear()
    with torch._inductor.config.patch(change) if isinstance(change, dict) else contextlib.nullcontext():
        if isinstance(change, str):
            _with(monkeypatch, change)
        assert _key("source") != same_key
    monkeypatch.undo()
    inductor_kernels._machine.cache_clear()
    assert _key("source") == same_key != _key("another source")


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="the CPU is described elsewhere")
def test_the_cpu_is_described_by_what_it_can_do() -> None:
    assert inductor_kernels.cpu_features() == inductor_kernels.cpu_features()
    assert len(inductor_kernels.cpu_features()) > 100


def test_only_instructions_that_work_are_remembered(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    class Instructions:
        def build_arch_flags(self) -> str:
            return "-mfast"

        def check_build(self, code: str) -> bool:
            tried.append(code)
            return code == "good"

    inductor_kernels._remember_checks(Instructions)
    with kernels_in_few_files():
        answers = [Instructions().check_build(code) for code in ("good", "bad", "good", "bad")]
    assert answers == [True, False, True, False] and tried == ["good", "bad", "bad"]
    assert Instructions().check_build("good") and tried[-1] == "good"  # Other compilers ask as before.


def _job(size: int) -> Job:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(4)
    made = graph.call_function(torch.ops.aten.relu.default, (x,))
    made.meta["val"] = torch.empty(size)
    graph.output([made])
    return Job(torch.fx.GraphModule({}, graph), [], {})


def test_the_values_of_all_nodes_are_in_the_key() -> None:
    """Inductor's own key has only the inputs: a custom operator whose fake kernel says something else had old code."""
    assert backend._key(_job(4)) == backend._key(_job(4)) != backend._key(_job(5))


PROGRAM = """
import json, sys, torch, dovetail
from torch._dynamo.utils import counters

def grow(x, extra=int(sys.argv[1])):
    return torch.cat([x, x.new_full((extra,), 5.0)])

torch.library.define("dovetail_test::grow", "(Tensor x) -> Tensor")
torch.library.impl("dovetail_test::grow", "default", grow)
torch.library.register_fake("dovetail_test::grow", lambda x: x.new_empty((x.shape[0] + int(sys.argv[1]),)))
x, y = torch.arange(4.0, requires_grad=True), torch.arange(4.0)
step = dovetail.compile(lambda x: (x.sin() * x).sum(), backend="inductor", fullgraph=True)
step(x).backward()
grown = dovetail.compile(lambda x: torch.ops.dovetail_test.grow(x) + 1, backend="inductor", fullgraph=True)(y)
kept = {name: counters["inductor"][f"fxgraph_cache_{name}"] for name in ("hit", "miss", "bypass")}
print(json.dumps([x.grad.tolist(), grown.tolist(), kept]))
"""


@pytest.fixture
def no_known_headers() -> Iterator[None]:
    """Torch remembers for the process where it has put a header, whatever folder holds them now."""
    header: Any = codecache._precompile_header
    remembers = header if hasattr(header, "cache_clear") else header.__wrapped__
    remembers.cache_clear()
    yield
    remembers.cache_clear()


@pytest.mark.slow
@pytest.mark.usefixtures("no_known_headers")
def test_what_all_kernels_need_is_made_ahead(kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codecache, "_HEADER_DIR", str(tmp_path / "headers"))
    monkeypatch.setattr(codecache, "_HEADER_LOCK_DIR", str(tmp_path / "locks"))
    compile_headers()
    made = list((tmp_path / "headers").rglob("*.gch"))
    assert len(made) == 1 and not any(entry.kind == "kernels" for entry in cache.ls())
    commands: list[str] = []
    compile_one = cpp_builder.run_compile_cmd
    monkeypatch.setattr(
        cpp_builder, "run_compile_cmd", lambda command, cwd: (commands.append(command), compile_one(command, cwd))
    )
    # The flags are those of a graph's kernels: theirs are the same headers. No other test has loaded these kernels.
    halved, less = (source("out_ptr0[i] = helper(in_ptr0[i]);", HELPER.format(rest)) for rest in ("/ 2", "- 1"))
    with kernels_in_few_files(), trusting_compiler():
        assert results(build(halved, less)) == [[0, 0.5, 1, 1.5], [-1, 0, 1, 2]]
    (command,) = commands
    assert str(made[0].with_suffix("")) in command
    assert list((tmp_path / "headers").rglob("*.gch")) == made


@pytest.mark.slow
def test_a_second_process_finds_what_is_the_same_and_nothing_else(tmp_path: Path) -> None:
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}

    def run(extra: int) -> Any:
        command = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(extra)]
        output = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True, timeout=300
        ).stdout
        return json.loads(output.splitlines()[-1])

    gradient, grown, counts = run(1)
    assert grown == [1, 2, 3, 4, 6] and counts == {"hit": 0, "miss": 3, "bypass": 0}
    assert run(1) == [gradient, grown, {"hit": 3, "miss": 0, "bypass": 0}]
    assert run(3) == [gradient, [1, 2, 3, 4, 6, 6, 6], {"hit": 2, "miss": 1, "bypass": 0}]
