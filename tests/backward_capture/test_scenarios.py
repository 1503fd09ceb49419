"""Every backward scenario three times: in eager, captured, and captured and compiled."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import pytest
import torch

import dovetail
from dovetail.backward_capture import BackwardSession, open_session
from tests.backward_capture.scenarios import LEFT_TO_EAGER, SCENARIOS, Run
from tests.differential import Rule, same

for _part in ("anomaly", "bad_input", "checkpoints_twice", "functions", "higher_order", "hooks", "subclasses"):
    importlib.import_module(f"tests.backward_capture.scenarios_{_part}")

#: Scenarios without a backward that could be captured.
NEVER_CAPTURED = {
    "backward_with_an_inner_input",
    "batched_gradients",
    "graph_not_kept_with_create_graph",
    "nothing_requires_grad",
    "retained_gradient_with_create_graph",
    "retained_gradients",
    "saved_value_was_written_to",
    "third_order_over_a_checkpoint",
}
SIZES = (3, 5)


def run_scenario(name: str, size: int) -> tuple[Any, list[Any], str]:
    """The result, the notes and the error's words of one run."""
    torch.manual_seed(size)
    run = Run(size)
    try:
        result = SCENARIOS[name](run)
    except Exception as error:
        return None, run.log, f"{type(error).__name__}: {error}"
    return result, run.log, ""


#: The stride of a dimension with one element may be another one.
RULE = Rule(unit_strides=False)


def assert_same(expected: Any, found: Any, where: str = "result") -> None:
    """The same to the last bit, with the same types, strides and flags."""
    same(expected, found, where, RULE)


#: The scenarios of these files are compiled by ``--slow`` only, but for one in four: they are long, and much alike.
MUCH_ALIKE = ("scenarios_checkpoints_twice", "scenarios_higher_order", "scenarios_functions")


def compiled_scenarios() -> list[Any]:
    """The names of all scenarios, those marked that the default run does not compile."""
    alike = [name for name, scenario in SCENARIOS.items() if scenario.__module__.endswith(MUCH_ALIKE)]
    left_out = set(alike) - set(alike[::4])
    return [pytest.param(name, marks=pytest.mark.slow) if name in left_out else name for name in SCENARIOS]


def check(name: str, session: BackwardSession) -> None:
    """Run a scenario in eager and in a session, with several sizes."""
    for size in SIZES:
        expected = run_scenario(name, size)
        assert not expected[2], "a scenario handles the errors that it is about by itself"
        with open_session(session), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = run_scenario(name, size)
        assert found[2] == ""
        assert_same(expected, found, f"{name}, size {size}")


def check_reasons(name: str, session: BackwardSession) -> None:
    """What was left to eager is what is meant to be."""
    reason = LEFT_TO_EAGER.get(name)
    assert session.runs or name in NEVER_CAPTURED or reason == "anomaly mode"
    if reason is None:
        assert session.fallbacks == []
    else:
        assert session.fallbacks and all(reason in item for item in session.fallbacks)


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.sampled(8)
def test_a_captured_backward_is_eagers(name: str) -> None:
    session = BackwardSession()
    check(name, session)
    check_reasons(name, session)


@pytest.mark.parametrize("name", compiled_scenarios())
@pytest.mark.sampled(14)
def test_a_compiled_backward_is_eagers(name: str) -> None:
    session = BackwardSession(lambda function: dovetail.compile(function, backend="aten"))
    check(name, session)
    check_reasons(name, session)


def test_there_are_enough_scenarios() -> None:
    assert len(SCENARIOS) >= 150
