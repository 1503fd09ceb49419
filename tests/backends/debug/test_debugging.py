"""The debugging backends name the operator, the line and the script for faults that are planted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dovetail
from dovetail.backends.common.memory import memory_of
from dovetail.backends.debug.float64 import PrecisionReport
from dovetail.backends.debug.subgraphs import GraphRun
from dovetail.errors import BackendError, OptionError
from dovetail.testing import check_backend, compare_graph
from dovetail.testing.models import ConvNet, Transformer
from tests.backends.debug import planted
from tests.backends.graphs import make_graph

ROOT = Path(__file__).parents[3]
assert planted.compile_planted


def tokens() -> torch.Tensor:
    return torch.randint(11, (3, 5))


def compiled(name: str, **options):
    return dovetail.compile(Transformer(), backend=name, backend_options={"inner": "planted", **options})


def run_script(path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fault", ["wrong", "raise"])
def test_the_first_wrong_operator_is_named_with_the_users_line(fault):
    with pytest.raises(BackendError) as caught:
        compiled("check_operators", fault=fault)(tokens())
    text = str(caught.value)
    assert "aten._softmax.default" in text
    assert "models.py" in text and ".softmax(-1)" in text
    assert "what to do" in text


def test_a_fault_of_two_operators_together_is_seen_though_each_is_right():
    f = dovetail.compile(
        lambda x: (x * 2).sin().cos().exp(),
        backend="check_operators",
        backend_options={"inner": "planted", "fault": "pair"},
    )
    with pytest.raises(BackendError, match="right by itself, but not all of them together"):
        f(torch.randn(3))


def test_calls_limits_the_checking():
    f = compiled("check_operators", fault="wrong", calls=0)
    assert f(tokens()).shape == (3, 11)


def test_a_wrong_meta_kernel_is_named():
    library = torch.library.Library("dovetail_planted", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: (x * 2).double(), "CPU")
    library.impl("twice", lambda x: x * 2, "Meta")
    f = dovetail.compile(
        lambda x: torch.ops.dovetail_planted.twice(x) + 1, backend="check_operators", backend_options={"inner": "aten"}
    )
    with pytest.raises(BackendError, match=r"twice.*gives dtype torch.float64, and torch.float32 was assumed"):
        f(torch.ones(2))


@pytest.mark.parametrize(
    ("fault", "category"),
    [
        pytest.param("wrong", "differs", marks=pytest.mark.slow),
        ("raise", "raised"),
        pytest.param("crash", "crashed", marks=pytest.mark.slow),
        pytest.param("hang", "timed out", marks=pytest.mark.slow),
    ],
)
@pytest.mark.sampled(2)
def test_bisect_writes_a_script_that_shows_the_fault(fault, category, tmp_path):
    path = tmp_path / "shown.py"
    # A hang costs its whole time limit at every trial that hangs.
    f = compiled("bisect", fault=fault, path=path, seconds=3 if fault == "hang" else 60)
    with pytest.raises(BackendError) as caught:
        f(tokens())
    text = str(caught.value)
    assert category in text and str(path) in text and "a script with 1 of them" in text
    assert ".softmax(-1)" in text
    source = path.read_text()
    assert "torch.ops.aten._softmax.default" in source
    assert "import tests.backends.debug.planted" in source
    assert source.count("torch.ops.") == 1
    if fault != "hang":
        ran = run_script(path)
        assert ran.returncode != 0, ran.stdout + ran.stderr
        if fault == "wrong":
            assert "differs by up to" in ran.stdout
        if fault == "crash":
            assert ran.returncode < 0
    if fault != "wrong":
        return
    # Without the fault the same script finds nothing: it depends on the backend only.
    path.write_text(source.replace(f"'fault': '{fault}'", "'fault': None"))
    ran = run_script(path)
    assert (ran.returncode, ran.stdout.strip()) == (0, "no difference"), ran.stdout + ran.stderr


def test_bisect_keeps_the_operators_that_must_be_together(tmp_path):
    def program(x):
        y = (x.exp() + 1).log() * 3
        return (y.sin().cos().tanh() - y.t()).sum()

    path = tmp_path / "pair.py"
    f = dovetail.compile(program, backend="bisect", backend_options={"inner": "planted", "fault": "pair", "path": path})
    with pytest.raises(BackendError, match="a script with 2 of them"):
        f(torch.randn(20, 20))
    source = path.read_text()
    assert "aten.sin.default" in source and "aten.cos.default" in source
    # An earlier script is kept.
    with pytest.raises(BackendError, match="pair-2.py"):
        f(torch.randn(20, 20))


def test_bisect_saves_inputs_that_matter(tmp_path):
    path = tmp_path / "saved.py"

    def picky(graph, inputs, *, kind, options):
        def run(values):
            found = any(bool((value == 12345.0).any()) for value in values)
            outputs = list(graph(*values))
            return [value + 1 if found else value for value in outputs]

        return run

    from dovetail.backends import Backend

    x = torch.randn(20, 20)
    x[3, 4] = 12345.0
    f = dovetail.compile(
        lambda x: x.t() * 2, backend="bisect", backend_options={"inner": Backend("picky", picky), "path": path}
    )
    with pytest.raises(BackendError, match="differs"):
        f(x)
    from safetensors.torch import load_file

    (saved,) = load_file(path.with_suffix(".safetensors")).values()
    assert 12345.0 in saved.tolist()


def test_float64_names_the_operator_that_loses_precision():
    reports: list[PrecisionReport] = []

    def cancels(x):
        large = x + 1e7
        return (large - 1e7) * 2

    x = torch.linspace(0, 1, 5)
    f = dovetail.compile(cancels, backend="float64", backend_options={"report": reports.append})
    assert torch.equal(f(x), cancels(x))
    (report,) = reports
    assert report.first is not None and report.first.operator == "aten.sub.Tensor"
    assert "test_debugging.py" in str(report.first.where)
    assert report.largest > 0.1
    f(x)
    assert len(reports) == 1, "one call unless more are asked for"


def test_float64_follows_random_numbers_and_branches(capsys):
    torch.manual_seed(3)
    model = Transformer(0.5)
    f = dovetail.compile(model, backend="float64")
    inputs = tokens()
    torch.manual_seed(5)
    wanted = model(inputs)
    after = torch.get_rng_state()
    torch.manual_seed(5)
    found = f(inputs)
    assert torch.equal(found, wanted)
    assert torch.equal(torch.get_rng_state(), after)
    found.sum().backward()
    printed = capsys.readouterr().err
    assert "the forward graph's outputs are off by up to" in printed
    assert "the backward graph's outputs are off by up to" in printed
    assert "first large error" not in printed


def test_float64_says_what_it_cannot_do():
    with pytest.raises(OptionError, match="decomposed"):
        dovetail.compile(torch.sin, backend="float64", backend_options={"inner": "inductor"})(torch.ones(2))
    with pytest.raises(OptionError, match="report must be callable"):
        dovetail.compile(torch.sin, backend="float64", backend_options={"report": 3})(torch.ones(2))


@pytest.mark.parametrize("name", ["check_operators", "float64", "bisect"])
@pytest.mark.sampled(3)
@pytest.mark.slow
def test_debugging_backends_conform(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    report = check_backend(
        name, groups=["mutation", "aliasing", "second order"], options={"inner": "aten"}, isolate=False, show=False
    )
    assert report.failures == ()
    assert not list(tmp_path.iterdir())


def test_subgraphs_are_right_where_memory_is_laid_out_in_unusual_ways():
    x = torch.arange(12.0).reshape(3, 4)

    def program(x, y):
        values, places = (x.t()[1:] * y).sort(-1)
        return [values.exp(), places + 1, torch.rand_like(x)]

    y = torch.ones(1, 3).expand(3, 3)
    graph, _, _ = make_graph(program, x, y)
    run = GraphRun.of(graph, [x, y])
    for operation in run.operations:
        subgraph = run.subgraph([operation])
        assert subgraph.try_backend(dovetail.backends.lookup_backend("aten"), {}) is None
    assert memory_of(y).tolist() == [1.0, 1.0, 1.0]


def test_compare_graph_sees_a_difference():
    def graph(x):
        return [torch.ops.aten._softmax.default(x, -1, False)]

    assert compare_graph(graph, [torch.randn(3)], backend="planted") == ""
    assert "differs" in compare_graph(graph, [torch.randn(3)], backend="planted", options={"fault": "wrong"})


@pytest.mark.slow
def test_inductor_operator_by_operator():
    torch.manual_seed(0)
    model = ConvNet()
    f = dovetail.compile(model, backend="check_operators", backend_options={"inner": "inductor"})
    f(torch.randn(2, 2, 8, 8)).sum().backward()
