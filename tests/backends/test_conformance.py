"""The conformance suite passes for our own backends, and finds what it is meant to find."""

from __future__ import annotations

import pytest
import torch

from dovetail.backends import ATEN, INDUCTOR, Backend, lookup_backend
from dovetail.backends.debug.conformance import CASES, check_backend
from dovetail.torch_private import compilers as private_compilers


def test_aten_conforms():
    assert check_backend(ATEN) == ()


@pytest.mark.skipif(private_compilers.cpp_compiler() is None, reason="needs a C++ compiler")
def test_inductor_conforms():
    assert [str(failure) for failure in check_backend(INDUCTOR)] == []


@pytest.mark.parametrize("name", ["aot_eager", "eager_noexcept"])
def test_torchs_own_backends_conform(name):
    assert [str(failure) for failure in check_backend(lookup_backend(name))] == []


def test_failures_are_found():
    def wrong(graph, inputs, *, kind, options):
        def run(values):
            outputs = list(graph(*values))
            return [v + 1 if isinstance(v, torch.Tensor) and v.dtype is torch.float32 else v for v in outputs]

        return run

    failures = check_backend(Backend("wrong", wrong))
    assert {failure.case for failure in failures} >= {case.name for case in CASES[:2]}
    assert "other values" in str(failures[0])


def test_missing_version_counters_are_found():
    def careless(graph, inputs, *, kind, options):
        def run(values):
            with torch._C._AutoDispatchBelowADInplaceOrView():
                return list(graph(*values))

        return run

    failures = check_backend(Backend("careless", careless))
    assert any("share memory" in failure.problem for failure in failures)
