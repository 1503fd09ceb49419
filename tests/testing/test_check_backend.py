"""``check_backend`` passes what is right, and sees each fault that is planted here."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dovetail.backends import Backend, lookup_backend, register_backend, unregister_backend
from dovetail.backends.aten import compile_aten
from dovetail.errors import OptionError
from dovetail.testing import check_backend
from dovetail.testing.suite import cases_for
from tests.differential import backward_in_forks
from tests.testing.tables import Entry, tables


def _backend(change: Callable[[Any, Any], Any], **promises: Any) -> Backend:
    """ATen operators, with ``change(graph, run)`` giving what runs instead."""

    def compile_graph(graph, example_inputs, *, kind, options):
        return change(graph, compile_aten(graph, example_inputs, kind=kind))

    return Backend("planted", compile_graph, **promises)


def _uses(graph: torch.fx.GraphModule, target: Any) -> bool:
    return bool(graph.graph.find_nodes(op="call_function", target=target))


@pytest.mark.parametrize("name", ["aten", "eager"])
@pytest.mark.slow
def test_our_own_reference_backends_conform(name, capsys):
    report = check_backend(name)
    assert report.failures == ()
    assert {result.group for result in report.results} == {
        "operators",
        "models",
        "mutation",
        "aliasing",
        "dynamic shapes",
        "second order",
        "errors",
    }
    printed = capsys.readouterr().out
    assert f"backend '{name}' conforms" in printed
    assert "dynamic shapes" in printed


def test_names_are_unique_and_kinds_are_respected():
    names = Counter(entry.name for entry in cases_for(lookup_backend("aten")))
    assert max(names.values()) == 1
    only = Backend("only", compile_aten, kinds=("inference",))
    assert all("(forward)" not in entry.name for entry in cases_for(only))


def test_unknown_groups_are_named():
    with pytest.raises(OptionError, match="no group 'speed'"):
        check_backend("aten", groups=["speed"])


@backward_in_forks
def test_a_crash_is_an_entry_of_the_table():
    def change(graph, run):
        if _uses(graph, torch.ops.aten.cumsum.default):
            os.kill(os.getpid(), signal.SIGSEGV)
        return run

    report = check_backend(_backend(change), groups=["aliasing"], show=False)
    (crashed,) = report.failures
    assert (crashed.case, crashed.status) == ("results stay what they were", "crashed")
    assert "SIGSEGV" in crashed.problem
    assert sum(result.status == "passed" for result in report.results) == len(report.results) - 1


@pytest.mark.slow  # tests/cli/test_doctor.py has both, of smaller graphs
@backward_in_forks
def test_a_hang_is_an_entry_of_the_table():
    def change(graph, run):
        if _uses(graph, torch.ops.aten.cumsum.default):
            time.sleep(1000)
        return run

    report = check_backend(_backend(change), groups=["aliasing"], seconds=4, show=False)
    (late,) = report.failures
    assert (late.case, late.status) == ("results stay what they were", "timed out")
    assert "4 seconds" in late.problem


@pytest.mark.slow  # tests/cli/test_doctor.py has both, of smaller graphs
@backward_in_forks
def test_a_backend_that_leaves_the_process_is_an_entry_of_the_table():
    def change(graph, run):
        if _uses(graph, torch.ops.aten.cumsum.default):
            os._exit(0)
        return run

    report = check_backend(_backend(change), groups=["aliasing"], show=False)
    assert [(result.case, result.status) for result in report.failures] == [("results stay what they were", "crashed")]


@backward_in_forks
def test_a_backend_registered_in_code_is_found():
    register_backend("planted_here", compile_aten, numerics="bitwise")
    try:
        assert check_backend("planted_here", groups=["mutation"], show=False).passed
    finally:
        unregister_backend("planted_here")


def test_memory_that_is_used_again_is_seen():
    def change(graph, run):
        kept: list[torch.Tensor | None] = []

        def call(inputs):
            outputs = run(inputs)
            for index, value in enumerate(outputs):
                if len(kept) <= index:
                    kept.append(value.clone() if isinstance(value, torch.Tensor) else None)
                elif kept[index] is not None and kept[index].shape == value.shape:
                    outputs[index] = kept[index].copy_(value)
            return outputs

        return call

    wrong = {result.case for result in check_backend(_backend(change), groups=["aliasing"], show=False).failures}
    assert "results stay what they were" in wrong


@pytest.mark.slow
def test_sizes_that_are_baked_in_are_seen():
    def change(graph, run):
        baked: list[torch.Tensor] = []

        def call(inputs):
            outputs = run(inputs)
            if not baked:
                baked.append(outputs[0].clone())
            outputs[0] = baked[0]
            return outputs

        return call

    report = check_backend(_backend(change), groups=["dynamic shapes"], show=False)
    assert any("in many sizes" in result.case or "change" in result.case for result in report.failures)


def test_a_wrong_gradient_is_seen():
    def compile_graph(graph, example_inputs, *, kind, options):
        run = compile_aten(graph, example_inputs, kind=kind)
        if kind != "backward":
            return run
        return lambda inputs: [value * 1.01 if isinstance(value, torch.Tensor) else value for value in run(inputs)]

    report = check_backend(Backend("planted", compile_graph), groups=["models"], isolate=False, show=False)
    wrong = {result.case for result in report.failures}
    assert wrong >= {"perceptron, trained", "gradients of two batches added up"}
    assert not any("inference" in case for case in wrong)


@pytest.mark.slow
def test_random_numbers_of_its_own_are_seen():
    def change(graph, run):
        def call(inputs):
            torch.rand(1)
            return run(inputs)

        return call

    report = check_backend(_backend(change), groups=["models"], isolate=False, show=False)
    assert any("dropout" in result.case for result in report.failures)


@pytest.mark.slow
def test_refusing_is_no_failure_for_training_if_the_backend_says_so():
    only = Backend("only", compile_aten, numerics="bitwise", kinds=("inference",))
    report = check_backend(only, isolate=False, show=False)
    assert report.passed
    refused = {result.case for result in report.refusals}
    assert "perceptron, trained" in refused
    assert "perceptron, inference" not in refused
    nothing = Backend("nothing", compile_aten, kinds=())
    report = check_backend(nothing, groups=["models"], isolate=False, show=False)
    assert not report.failures
    assert not report.passed, "who refuses everything does not conform"


@pytest.mark.slow
def test_a_device_is_where_tensors_are():
    seen = set()

    def compile_graph(graph, inputs, *, kind, options):
        seen.update(value.device.type for value in inputs)
        return compile_aten(graph, inputs, kind=kind)

    # "meta" holds no numbers, so nothing can be compared; the cases get there all the same.
    check_backend(Backend("where", compile_graph), groups=["operators"], device="meta", isolate=False, show=False)
    assert seen == {"meta"}


@pytest.mark.gpu
def test_the_reference_conforms_on_a_gpu():
    report = check_backend("aten", device="cuda", show=False)
    assert report.failures == ()


def test_the_table_for_a_page():
    report = check_backend("aten", groups=["second order"], isolate=False, show=False)
    page = tables([Entry("aten", report)])
    assert "| `aten` | yes |" in page
    assert "`aten` promises eager's numbers to the last bit" in page
    assert "| 2/3, 1 refused |" in page or "| 3/3 |" in page
