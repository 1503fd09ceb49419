"""The graphs of one job, compiled at the same time in forks of the background process."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
from torch._inductor import codecache, cpp_builder
from torch._inductor.codegen import cpp
from torch.utils._sympy.functions import FloorDiv, ModularIndexing

import dovetail
from dovetail.tiers import branches, compiling, process
from dovetail.tiers.process import Worker
from dovetail.torch_private import inductor, inductor_kernels
from tests.tiers import jobs
from tests.tiers.jobs import job
from tests.tiers.test_process import answer_of, wait_for, wait_until_gone

needs_forks = pytest.mark.skipif(
    sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2, reason="graphs are compiled one after the other here"
)


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker(f"{jobs.HERE}:nothing")
    yield made
    made.stop()


@needs_forks
@pytest.mark.parametrize(
    ("then", "status", "reason"),
    [
        ("end", "compiled", ""),
        ("fail", "failed", "RuntimeError: no such instruction"),
        ("refuse", "unfit", "UnportableError: other switches"),
        ("crash", "failed", f"its process has ended with status {-signal.SIGABRT}"),
    ],
)
def test_tasks_run_at_the_same_time(worker: Worker, tmp_path: Path, then: str, status: str, reason: str) -> None:
    # Each waits for the other one, so that one after the other they would never end.
    answer = answer_of(worker.submit(job("in_branches", path=str(tmp_path), then=then)))
    assert (answer.status, answer.reason) == (status, reason)
    assert len({(tmp_path / name).read_text() for name in "01"} | {str(worker.pid)}) == 3
    assert worker.exit_status() is None


@needs_forks
def test_branches_end_with_the_process(worker: Worker, tmp_path: Path) -> None:
    item = worker.submit(job("in_branches", path=str(tmp_path), then="hang"))
    hanging, pid = int(wait_for(tmp_path / "1")), worker.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert answer_of(item).status == "failed"
    wait_until_gone(hanging)


@pytest.mark.slow
@needs_forks
def test_a_branch_that_hangs_is_stopped(worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "SECONDS", 1.0)
    answer = answer_of(worker.submit(job("in_branches", path=str(tmp_path), then="hang")))
    assert (answer.status, answer.reason) == ("failed", "it took longer than 1 seconds and was stopped")
    wait_until_gone(int(wait_for(tmp_path / "1")))


@needs_forks
def test_more_tasks_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    heard: list[int] = []
    errors = branches.side_by_side([lambda: None, lambda: sys.exit("no"), lambda: None], heard.append)
    assert [str(error) for error in errors] == ["None", "SystemExit: no", "None"]
    assert heard == [0, 1, 2]


@needs_forks
def test_what_fails_on_trust_is_compiled_again_without(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said = tmp_path / "said"

    def compile_graphs(part: Any, said_to: Any) -> None:
        trust = inductor_kernels._trust.get()
        with said.open("a") as stream:
            stream.write(f"{part['graphs'][0]} {trust}\n")
        if part["graphs"] == ["bad"] and trust == "compiler":
            raise RuntimeError("unrecognized command-line option '-mavx512vnni'")
        if part["graphs"] == ["worse"]:
            raise RuntimeError("it never compiles")

    monkeypatch.setattr(compiling, "_compile_graphs", compile_graphs)
    monkeypatch.setattr(compiling, "_compile_headers_beside", lambda: said.write_text("headers\n"))
    compiling._compile_in_branches({"graphs": ["good", "bad"], "sizes": None}, lambda text: None)
    lines = said.read_text().split("\n")
    assert sorted(lines) == ["", "bad compiler", "bad nobody", "good compiler", "headers"]
    assert lines[0] == "headers", "they begin first: the kernels of the first graph come later than half of its Python"
    with pytest.raises(branches.BranchError, match="RuntimeError: it never compiles"):
        compiling._compile_in_branches({"graphs": ["good", "worse"], "sizes": None}, lambda text: None)


# --- headers and instructions -------------------------------------------------------------------------------------------


@pytest.fixture
def headers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    inductor_kernels._install()
    monkeypatch.setattr(codecache, "_HEADER_DIR", str(tmp_path))
    return tmp_path


def test_headers_are_known_by_a_note(headers: Path) -> None:
    calls: list[str] = []

    def precompile(header: str, command: str, **options: Any) -> str:
        calls.append(command)
        (headers / "made.h").write_text("")
        (headers / "made.h.gch").write_text("")
        return str(headers / "made.h")

    take = inductor_kernels._header_taken(precompile)
    with inductor_kernels.kernels_in_few_files():
        with inductor_kernels.trusting_compiler():
            assert take("prefix.h", "g++ -O3") == "", "a graph does not wait for headers"
        assert take("prefix.h", "g++ -O3") == str(headers / "made.h")
        with inductor_kernels.trusting_compiler():
            assert take("prefix.h", "g++ -O3") == str(headers / "made.h")
            assert take("prefix.h", "g++ -O2") == "", "other flags are another header"
        assert calls == ["g++ -O3"]
        (headers / "made.h.gch").unlink()
        with inductor_kernels.trusting_compiler():
            assert take("prefix.h", "g++ -O3") == "", "the note has outlived the header"
        (headers / "made.h.gch").write_text("half")
        with inductor_kernels.trusting_compiler("nobody"):
            assert take("prefix.h", "g++ -O3") == ""
        assert not list(headers.glob("*.gch")), "a header that may be broken is made anew"
        assert take("prefix.h", "g++ -O3") == str(headers / "made.h")
        assert calls == ["g++ -O3"] * 2
    assert take("prefix.h", "g++ -O3") == str(headers / "made.h")
    assert len(calls) == 3, "Inductor on its own does as ever"


@pytest.mark.parametrize("text", ["", "../../etc/passwd", "\x00", "gone.h"])
def test_a_damaged_note_is_none(headers: Path, text: str) -> None:
    take = inductor_kernels._header_taken(lambda header, command, **options: "anew")
    with inductor_kernels.kernels_in_few_files():
        take("prefix.h", "g++")
        (note,) = headers.glob("dovetail-*")
        note.write_text(text)
        assert take("prefix.h", "g++") == "anew"


def test_half_a_header_is_never_there(headers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = headers / "whole.h.gch"
    seen: list[Any] = []

    def killed(command: str, cwd: str) -> None:
        (place,) = [word for word in command.split() if word.endswith(".gch")]
        Path(place).write_text("half")
        seen.append((place, wanted.exists()))
        if len(seen) == 1:
            raise KeyboardInterrupt

    def load_async(source: str, device: str) -> None:
        cpp_builder.run_compile_cmd(f"g++ whole.h -O3 -o {wanted} ", str(headers))

    monkeypatch.setattr(cpp_builder, "run_compile_cmd", killed)
    monkeypatch.setattr(inductor_kernels._joined_kernels(), "load_async", load_async)
    with pytest.raises(KeyboardInterrupt):
        inductor_kernels.compile_headers()
    assert not list(headers.glob("*.gch")), "nothing is left of it"
    (headers / "part-whole.h.gch").write_text("what a killed process has left")
    inductor_kernels.compile_headers()
    assert wanted.read_text() == "half" and list(headers.glob("*.gch")) == [wanted]
    assert cpp_builder.run_compile_cmd is killed
    assert all(place != str(wanted) and not was_there for place, was_there in seen)


def test_instructions_are_tried_out_unless_the_compiler_is_trusted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DOVETAIL_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("DOVETAIL_CACHE", "1")
    tried: list[str] = []

    class Instructions:
        def build_arch_flags(self) -> str:
            return "-mmany"

        def check_build(self, code: str) -> bool:
            tried.append(code)
            return False

    inductor_kernels._remember_checks(Instructions)
    with inductor_kernels.kernels_in_few_files():
        with inductor_kernels.trusting_compiler():
            assert Instructions().check_build("a")
        assert tried == []
        for trust in ("nobody", ""):
            with inductor_kernels.trusting_compiler(trust):
                assert not Instructions().check_build("a")
    assert tried == ["a", "a"], "what was taken on trust is not remembered"


# --- what Inductor computes again and again -----------------------------------------------------------------------------


def test_strides_are_those_of_algebra() -> None:
    x, y, z = sympy.symbols("x0 x1 x2", integer=True, nonnegative=True)
    indices = [x, 64 * x + y, x + y + z + 7, sympy.Integer(3), -2 * x + 5 * z, 4096 * x + 64 * (y + 1) - z, x * y]
    indices += [
        FloorDiv(x, 16) + y,
        3 * ModularIndexing(x, 1, 32) + y,
        x * (x + 1),
        8 * FloorDiv(y, 16) + ModularIndexing(y, 1, 16),
    ]
    assert [inductor.is_linear(index) for index in indices] == [True] * 6 + [False] * 5
    for index in indices:
        for var in (x, y, z):
            for length in (8, 16):
                cpp.stride_at_vec_range.cache_clear()
                expected = cpp.stride_at_vec_range(index, var, length)
                cpp.stride_at_vec_range.cache_clear()
                with inductor._strides_without_algebra():
                    assert cpp.stride_at_vec_range(index, var, length) == expected


def test_dtypes_of_operators_are_found_when_a_rule_comes_late(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import lowering, utils  # noqa: F401  (its import registers rules)
    from torch._inductor.dtype_propagation import DtypePropagationOpsHandler as Handler

    rule = next(iter(utils.op_dtype_propagation_rules.values()))
    with inductor._rules_of_dtypes_made_once():
        Handler()
        monkeypatch.setitem(utils.op_dtype_propagation_rules, "dovetail_late", rule)
        assert Handler().dovetail_late is not None  # type: ignore[attr-defined]


@pytest.mark.slow
@needs_forks
def test_the_kernels_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sources that a branch leaves in Inductor's cache are those of Inductor with nothing of this."""
    sources = []
    for name in ("plain", "quick"):
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / name))
        monkeypatch.setenv("DOVETAIL_CACHE_DIR", str(tmp_path / f"own-{name}"))

        def compile_one(is_plain: bool = name == "plain") -> None:
            if is_plain:
                inductor._rules_of_dtypes_made_once = inductor._strides_without_algebra = contextlib.nullcontext
                inductor._memory_of_fusions_only_where_it_is_shared = contextlib.nullcontext
            x, norm = torch.randn(6, 48, requires_grad=True), torch.nn.LayerNorm(48)
            step = dovetail.compile(
                lambda x: torch.softmax(norm(x).t() @ x, 0).square().sum(), backend="inductor", tiers="wait"
            )
            step(x).backward()

        branches.Branch(compile_one).wait()
        sources.append(sorted(path.name for path in (tmp_path / name).rglob("*.main.cpp")))
        assert sources[-1]
    assert sources[0] == sources[1]
