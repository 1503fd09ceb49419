"""compile_with: whatever does not fit the protocol becomes a BackendError that says what to do."""

from __future__ import annotations

import pytest
import torch

from dovetail.backends import Backend, compile_with
from dovetail.errors import BackendError
from tests.backends.graphs import make_graph


def backend_returning(compiled):
    return Backend("odd", lambda graph, inputs, *, kind, options: compiled)


@pytest.fixture
def graph():
    made, fakes, _ = make_graph(lambda x: [x + 1, None], torch.ones(2))
    return made, fakes


def test_error_keeps_the_cause_and_names_backend_and_kind(graph):
    def broken(graph, inputs, *, kind, options):
        raise ZeroDivisionError("oh")

    with pytest.raises(BackendError, match="'odd' raised ZeroDivisionError while compiling the backward graph") as info:
        compile_with(Backend("odd", broken), *graph, "backward")
    assert isinstance(info.value.__cause__, ZeroDivisionError)
    assert "what to do" in str(info.value)


def test_result_that_cannot_be_called(graph):
    with pytest.raises(BackendError, match="cannot be called"):
        compile_with(backend_returning(3), *graph, "forward")


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ([torch.ones(2)], "returned 1 outputs, the graph has 2"),
        (torch.ones(2), "instead of one list"),
        ([None, None], "NoneType instead of a tensor as output 0"),
        ([torch.ones(2), torch.ones(2)], "instead of None as output 1"),
        ([torch.ones(2, dtype=torch.float64), None], "float64 instead of torch.float32"),
        ([torch.ones(3), None], r"shape \(3,\) instead of \(2,\)"),
    ],
)
def test_result_that_does_not_fit(graph, outputs, message):
    run = compile_with(backend_returning(lambda inputs: outputs), *graph, "forward")
    with pytest.raises(BackendError, match=message):
        run([torch.ones(2)])


def test_number_of_outputs_is_checked_on_later_calls(graph):
    answers = iter([[torch.ones(2), None], [torch.ones(2)]])
    run = compile_with(backend_returning(lambda inputs: next(answers)), *graph, "forward")
    run([torch.ones(2)])
    with pytest.raises(BackendError, match="returned 1 outputs"):
        run([torch.ones(2)])


def test_tuple_becomes_a_list(graph):
    run = compile_with(backend_returning(lambda inputs: (torch.ones(2), None)), *graph, "forward")
    assert isinstance(run([torch.ones(2)]), list)


def test_unknown_kind(graph):
    with pytest.raises(BackendError, match="kind must be one of"):
        compile_with(backend_returning(lambda inputs: inputs), *graph, "sideways")  # type: ignore[arg-type]


def test_options_reach_the_backend(graph):
    seen = {}

    def compile_graph(graph, inputs, *, kind, options):
        seen.update(options)
        return lambda values: [values[0] + 1, None]

    compile_with(Backend("odd", compile_graph), *graph, "forward", {"level": 3})
    assert seen == {"level": 3}
