"""``dovetail doctor`` and ``dovetail check-backend``, with and without what they look for."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch

from dovetail.backends import register_backend, unregister_backend
from dovetail.backends.aten import compile_aten
from dovetail.cli import doctor, main
from dovetail.testing import probe_backends
from tests.differential import backward_in_forks


@pytest.fixture
def register():
    names = []

    def add(name, backend):
        register_backend(name, backend)
        names.append(name)

    yield add
    for name in names:
        unregister_backend(name)


@pytest.fixture(scope="module")
def probes():
    """Each backend is tried in a process of its own: once for all tests of the report."""
    return list(probe_backends(["aten", "no_such_backend"]))


@pytest.fixture
def probed(probes, monkeypatch):
    known = {probe.name: probe for probe in probes}
    monkeypatch.setattr(doctor, "probe_backends", lambda names, seconds: [known[name] for name in names])


def executable(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.mark.slow
def test_the_report_names_versions_and_backends(probed, capsys):
    status = main(["doctor", "--backends=aten,no_such_backend"])
    printed = capsys.readouterr().out
    assert status == 0
    for word in ("Dovetail", "Python", f"torch {torch.__version__.split('+')[0]}", "C++ compiler", "GPU", "by default"):
        assert word in printed, printed
    lines = {line.split()[0]: line for line in printed.splitlines() if line.strip()}
    assert " works " in lines["aten"]
    assert "does not work" in lines["no_such_backend"] and "no backend named" in lines["no_such_backend"]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_cuda_graphs_without_a_gpu_work_but_record_nothing():
    (probe,) = probe_backends(["cudagraphs"])
    assert probe.works
    assert "but records nothing: " in str(probe)


def test_no_compiler(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("CXX", "/nowhere/g++")
    finding = doctor.compiler_finding()
    assert not finding.good
    assert "none was found" in str(finding)
    assert "what to do: install g++" in str(finding)


def test_a_compiler_that_does_not_work(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", str(executable(tmp_path / "c++", "#!/bin/sh\necho 'no licence' >&2\nexit 1\n")))
    finding = doctor.compiler_finding()
    assert not finding.good
    assert "does not work: no licence" in finding.found


def test_a_compiler_that_hangs(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", str(executable(tmp_path / "c++", "#!/bin/sh\nexec sleep 1000\n")))
    monkeypatch.setattr(doctor, "_COMPILER_SECONDS", 0.5)
    begun = time.monotonic()
    finding = doctor.compiler_finding()
    assert not finding.good and "timed out" in finding.found
    assert time.monotonic() - begun < 60


@pytest.mark.slow
@backward_in_forks
def test_backends_that_crash_hang_or_leave_do_not_take_the_doctor_with_them(register, capsys):
    def compile_nothing(what):
        def compile_graph(graph, inputs, *, kind, options):
            what()
            return compile_aten(graph, inputs, kind=kind)

        return compile_graph

    register("crashes", compile_nothing(lambda: os.kill(os.getpid(), signal.SIGSEGV)))
    register("hangs", compile_nothing(lambda: time.sleep(1000)))
    register("leaves", compile_nothing(lambda: os._exit(0)))
    register("sound", compile_aten)
    status = main(["doctor", "--backends=crashes,hangs,leaves,sound", "--seconds=3"])
    printed = capsys.readouterr().out
    assert status == 0
    lines = {line.split()[0]: line for line in printed.splitlines() if line.strip()}
    assert "SIGSEGV" in lines["crashes"]
    assert "took longer than 3 seconds" in lines["hangs"]
    assert "does not work" in lines["leaves"] and "the process ended" in lines["leaves"]
    assert " works " in lines["sound"]


@backward_in_forks
def test_wrong_backends_are_told_apart(register):
    def changed(change):
        def compile_graph(graph, inputs, *, kind, options):
            run = compile_aten(graph, inputs, kind=kind)
            return lambda values: change(run(values))

        return compile_graph

    def only_tensors(change):
        return lambda outputs: [change(value) if isinstance(value, torch.Tensor) else value for value in outputs]

    register("too_few", changed(lambda outputs: outputs[:-1]))
    register("other_dtype", changed(only_tensors(lambda value: value.double())))
    register("other_shape", changed(only_tensors(lambda value: value[None])))
    register("other_values", changed(only_tensors(lambda value: value + 1)))
    register("no_list", changed(lambda outputs: outputs[0]))
    found = {
        probe.name: probe
        for probe in probe_backends(["too_few", "other_dtype", "other_shape", "other_values", "no_list"])
    }
    assert not any(probe.works for probe in found.values())
    assert "outputs, the graph has" in found["too_few"].reason
    assert "torch.float64 instead of torch.float32" in found["other_dtype"].reason
    assert "shape" in found["other_shape"].reason
    assert "differs by up to" in found["other_values"].reason
    assert "instead of one list" in found["no_list"].reason


@pytest.mark.slow
def test_the_default_that_does_not_work_is_bad_news(probed, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "default_backend", lambda: type("Missing", (), {"name": "no_such_backend"})())
    assert main(["doctor", "--backends=no_such_backend"]) == 1
    assert 'say backend="aten"' in capsys.readouterr().out


@pytest.mark.parametrize("reason", ["timed out: took longer than 90 seconds and was stopped", "raised"])
def test_a_default_that_is_not_done_in_time(reason, monkeypatch):
    monkeypatch.setattr(doctor, "default_backend", lambda: type("Slow", (), {"name": "slow"})())
    found = doctor.default_finding([doctor.Probe("slow", False, reason, 90.0)])
    assert not found.good and ("--seconds=600" in found.advice) == reason.startswith("timed out")


def test_names_to_probe_leave_out_what_finds_torchs_own_mistakes():
    names = doctor.names_to_probe()
    assert names.index("aten") < names.index("aot_eager")
    assert not any("TESTING_ONLY" in name for name in names)


def test_bad_arguments_are_named(capsys):
    with pytest.raises(SystemExit):
        main(["doctor", "--seconds=0"])
    assert "positive number of seconds" in capsys.readouterr().err


@pytest.mark.slow
def test_check_backend_on_the_command_line(register, capsys):
    assert main(["check-backend", "aten", "--groups=aliasing"]) == 0
    assert "backend 'aten' conforms" in capsys.readouterr().out
    register("wrong", lambda graph, inputs, *, kind, options: lambda values: [1 for _ in range(99)])
    assert main(["check-backend", "wrong", "--groups=aliasing"]) == 1
    assert "does not conform" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nosuch"], "dovetail check-backend: there is no backend named 'nosuch'"),
        (["aten", "--groups=nosuch"], "dovetail check-backend: the suite has no group 'nosuch'"),
        (["aten", "--device=nosuch"], "argument --device: Expected one of cpu"),
    ],
)
def test_a_wrong_argument_is_one_sentence(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status: object = main(["check-backend", *arguments])
    except SystemExit as refusal:
        status = refusal.code
    told = capsys.readouterr().err
    assert status == 2 and said in told and "Traceback" not in told


def test_seconds_that_are_no_number(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["doctor", "--seconds", "x"])
    assert "must be a positive number of seconds" in capsys.readouterr().err
