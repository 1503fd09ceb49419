"""ONNX Runtime and OpenVINO, where they are installed; and what is said where they are not."""

from __future__ import annotations

import importlib.util

import pytest
import torch

import dovetail
from dovetail.backends import Backend, lookup_backend
from dovetail.backends.foreign import inference_only
from dovetail.backends.foreign.inference_only import ONNXRUNTIME, OPENVINO
from dovetail.errors import OptionError, UnsupportedGraphError
from dovetail.testing import check_backend
from dovetail.testing.models import Perceptron
from tests.testing.tables import BEGIN, END, ROWS, replace_tables

LIBRARIES = {"onnxruntime": ("onnxruntime", "onnx", "onnxscript"), "openvino": ("openvino",)}


def installed(name):
    return all(importlib.util.find_spec(package) is not None for package in LIBRARIES[name])


@pytest.fixture
def pretend_installed(monkeypatch):
    """Nothing of the library is needed to refuse a graph."""
    monkeypatch.setattr(inference_only, "_can_be_imported", lambda name: True)


@pytest.fixture(params=list(LIBRARIES))
def name(request):
    if not installed(request.param):
        pytest.skip(f"{request.param} is not installed")
    return request.param


@pytest.mark.parametrize("name", list(LIBRARIES))
def test_without_the_library_the_error_says_what_to_install(name, monkeypatch):
    monkeypatch.setattr(inference_only, "_can_be_imported", lambda one: one not in LIBRARIES[name])
    with torch.no_grad(), pytest.raises(UnsupportedGraphError, match=f"needs .*\n  what to do: pip install {name}"):
        dovetail.compile(torch.sin, backend=name)(torch.ones(2))


@pytest.mark.parametrize("backend", [ONNXRUNTIME, OPENVINO], ids=lambda backend: backend.name)
def test_they_promise_inference_with_static_sizes(backend):
    assert lookup_backend(backend.name) is backend
    assert backend.kinds == ("inference",) and not backend.takes_symbolic_shapes
    with pytest.raises(UnsupportedGraphError, match=r"takes inference graphs only"):
        dovetail.compile(Perceptron(), backend=backend)(torch.ones(2, 8))


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (lambda x: torch.nn.functional.dropout(x, 0.5), "other random numbers"),
        (lambda x: x.to(torch.bfloat16) * 2, "no torch.bfloat16"),
        (lambda x: x.to(torch.complex64) * 2, "no torch.complex64"),
    ],
)
@pytest.mark.parametrize("backend", [ONNXRUNTIME, OPENVINO], ids=lambda backend: backend.name)
def test_what_they_would_get_wrong_is_refused(backend, program, reason, pretend_installed):
    with torch.no_grad(), pytest.raises(UnsupportedGraphError, match=reason):
        dovetail.compile(program, backend=backend)(torch.ones(3))


def test_openvino_computes_no_whole_numbers(pretend_installed):
    with torch.no_grad(), pytest.raises(UnsupportedGraphError, match="32 bits"):
        dovetail.compile(lambda x: x // 3, backend=OPENVINO)(torch.arange(3))


@pytest.mark.parametrize("fault", [lambda values: [values[0] * 1.5], lambda values: [values[0].double()], None])
def test_what_is_converted_wrongly_is_refused(fault, pretend_installed, monkeypatch):
    """A library that gives other numbers, or another dtype; and one that is right."""

    def build(graph, examples):
        return lambda inputs: fault(graph(*inputs)) if fault else list(graph(*inputs))

    library = inference_only._Library("library", (), frozenset({torch.float32}), build)
    f = dovetail.compile(lambda x: (x * 2).tanh() + 1, backend=Backend("library", library.compile))
    x = torch.randn(5)
    with torch.no_grad():
        if fault:
            for _ in range(2):
                with pytest.raises(UnsupportedGraphError, match="computes this graph wrongly: output 0"):
                    f(x)
        else:
            assert torch.equal(f(x), (x * 2).tanh() + 1)


def test_they_conform(name):
    report = check_backend(name, show=False)
    assert report.failures == ()
    assert report.passed


def test_results_are_eagers(name):
    model = Perceptron().eval()
    compiled = dovetail.compile(model, backend=name)
    with torch.no_grad():
        for size in (1, 4, 9):
            x = torch.randn(size, 8)
            kept = compiled(x)
            torch.testing.assert_close(kept, model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", list(LIBRARIES))
def test_unknown_options_are_named(name, pretend_installed):
    with torch.no_grad(), pytest.raises(OptionError, match="no option 'speed'"):
        dovetail.compile(torch.sin, backend=name, backend_options={"speed": 1})(torch.ones(2))


def test_the_page_takes_tables():
    page = f"# Title\n\n{BEGIN}\nold\n{END}\n\nafter\n"
    assert replace_tables(page, "new\n") == f"# Title\n\n{BEGIN}\nnew\n{END}\n\nafter\n"
    with pytest.raises(ValueError, match="lacks the lines"):
        replace_tables("# Title\n", "new")
    assert {"aten", "inductor", "onnxruntime", "aot_eager", "cudagraphs over aten"} <= set(map(str, ROWS))
