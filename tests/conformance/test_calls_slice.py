"""A slice of the calls of torch's functions and methods; ``calls_runner`` has all of them."""

from __future__ import annotations

import pytest

from tests.conformance import calls_runner
from tests.conformance.__main__ import SUITES, Row, outcome, page
from tests.conformance.call_forms import callables, forms

SLICE = ("torch.linalg.cholesky", "torch.nn.functional.softplus", "torch.Tensor.addcmul_", "torch.fft.rfft")


@pytest.mark.parametrize("compiler", ["dovetail-with-breaks", "dovetail-eager"])
@pytest.mark.parametrize("name", SLICE)
@pytest.mark.sampled(4)
def test_every_form_is_eagers(name: str, compiler: str) -> None:
    result = calls_runner.check_callable(name, compiler, samples=1)
    found = [sample for samples in result.samples.values() for sample in samples]
    assert found and all(sample.verdict == "passed" for sample in found), found


def test_a_wrong_answer_is_found() -> None:
    def lies(function: object) -> object:
        return lambda args, kwargs: args[0] * 2

    (form,) = [form for form in forms("torch.sin", False, 1) if form.name == "positional #0"]
    verdict = calls_runner.check_form(form, lies)  # type: ignore[arg-type]
    assert (verdict.verdict, verdict.kind) == ("wrong", "positional #0: values")


def test_most_of_torch_is_called() -> None:
    assert len(callables()) > 1000
    assert {"keyword #0", "out= slice #0", "result written #0"} <= {form.name for form in forms("torch.mul", False, 1)}
    assert {"method #0", "in place on a slice #0"} <= {form.name for form in forms("torch.Tensor.mul_", True, 1)}


def test_the_page_names_every_suite_that_ran() -> None:
    assert outcome("...\nforward  1  0  2  672  0  0  99.5\n") == "forward: 672 passed, 1 wrong, 2 refused"
    assert outcome("one\n12 passed\n") == "12 passed"
    rows = {suite.name: Row(suite.name, "12 passed", 1.0, "2026-01-01", "abc", "2.13.0") for suite in SUITES[:2]}
    assert page(rows).count("12 passed") == 2
