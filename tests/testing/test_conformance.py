"""The suite's cases on operators pass for our own backends, and find the faults that they are meant to find."""

from __future__ import annotations

import pytest
import torch

from dovetail.backends import ATEN, INDUCTOR, Backend, lookup_backend
from dovetail.testing import check_backend
from dovetail.torch_private import compilers as private_compilers


def failures(backend):
    report = check_backend(backend, groups=["operators"], isolate=False, show=False)
    assert report.results and not report.refusals
    return report.failures


def test_aten_conforms():
    assert failures(ATEN) == ()


@pytest.mark.slow
@pytest.mark.skipif(private_compilers.cpp_compiler() is None, reason="needs a C++ compiler")
def test_inductor_conforms():
    assert [str(failure) for failure in failures(INDUCTOR)] == []


@pytest.mark.parametrize("name", ["aot_eager", "eager_noexcept"])
@pytest.mark.sampled(2)
@pytest.mark.slow
def test_torchs_own_backends_conform(name):
    assert [str(failure) for failure in failures(lookup_backend(name))] == []


def test_failures_are_found():
    def wrong(graph, inputs, *, kind, options):
        def run(values):
            outputs = list(graph(*values))
            return [v + 1 if isinstance(v, torch.Tensor) and v.dtype is torch.float32 else v for v in outputs]

        return run

    found = failures(Backend("wrong", wrong))
    cases = {failure.case for failure in found}
    assert cases >= {"pointwise operators (forward)", "matrix products and reductions (backward)"}
    assert "output 0 differs by up to" in str(found[0])


@pytest.mark.slow
def test_missing_version_counters_are_found():
    def careless(graph, inputs, *, kind, options):
        def run(values):
            with torch._C._AutoDispatchBelowADInplaceOrView():
                return list(graph(*values))

        return run

    assert any("share memory" in failure.problem for failure in failures(Backend("careless", careless)))
