"""Some random programs in every test run; ``python -m tests.fuzz`` runs any number."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.minimise import minimise
from tests.fuzz.program import program
from tests.fuzz.runner import EXCEPTION, FALL_BACK, ONE_GRAPH, run_program
from tests.fuzz.world import Comparison, Difference


@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 10**9))
def test_random_programs_do_compiled_what_they_do_eagerly(seed: int) -> None:
    _passes(seed, "memory" if seed % 2 else "python")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_random_training_is_compiled_what_it_is_eagerly(seed: int) -> None:
    _passes(seed, "training")


def _passes(seed: int, theme: str) -> None:
    source = program(seed, theme)
    outcome = run_program(source)
    assert not outcome.kind, f"{theme}, seed {seed}: {outcome.failure}\n{source}"


@pytest.mark.slow
def test_most_programs_are_captured() -> None:
    categories = [run_program(program(seed, "python")).category for seed in range(12)]
    assert categories.count(FALL_BACK) <= 2
    assert categories.count(ONE_GRAPH) >= 4


def _outcome(body: str) -> str:
    source = "import torch\nstate = torch.ones(3)\nhistory = []\n" + body
    return run_program(source).kind


def test_the_runner_sees_each_sort_of_difference() -> None:
    # The program asks which of the two runs it is in: a difference that Dovetail is not to blame for.
    calls = "def call_0(run):\n    return run(torch.ones(3), not isinstance(run, type(call_0)))\n"
    for change, kind in (
        ("return x * (2 if flag else 3)", "tensor"),
        ("return 2 if flag else 3", "value"),
        ("return x.double() if flag else x", "dtype"),
        ("return [x, x] if flag else [x, x.clone()]", "identity"),
        ("return [x, x[:2]] if flag else [x, x[:2].clone()]", "storage"),
        ("history.append(1 if flag else 2)", "value"),
        ("history.extend([1] * (1 + flag))", "length"),
        ("print(flag)", "printed"),
        ("torch.rand(1 + flag)", "random state"),
        ("raise ValueError(str(flag))", "exception ValueError ValueError"),
        ("return [1] if flag else (1,)", "type tuple list"),
        ("state.grad = x * (1 + flag)", "gradient"),
        ("return state[:] if flag else state.data", "base"),
    ):
        assert _outcome(f"def function(x, flag):\n    {change}\n{calls}") == kind, change


def test_a_program_that_raises_is_counted_as_such() -> None:
    source = "def function(): raise ValueError('x')\ndef call_0(run): return run()\n"
    assert run_program(source).category == EXCEPTION


def test_the_minimiser_keeps_what_matters() -> None:
    source = (
        "import torch\na = 1\nb = [2, 3]\ndef function(x, y):\n    for i in b:\n        c = x + 17 * i\n    return c\n"
    )
    small = minimise(source, lambda text: "17" in text)
    assert small == "def function(x, y):\n    c = 17\n"


def test_alike_worlds_are_alike() -> None:
    shared = [1]
    Comparison("m").same([shared, shared], [shared, shared], "x")
    try:
        Comparison("m").same([shared, shared], [[1], [1]], "x")
    except Difference as difference:
        assert difference.kind == "identity"
    else:
        raise AssertionError("two lists in the place of one were not noticed")
