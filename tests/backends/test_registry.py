"""Finding backends by name, and torch's own."""

from __future__ import annotations

import warnings
from importlib.metadata import EntryPoint

import pytest
import torch

from dovetail.backends import (
    ATEN,
    EAGER,
    INDUCTOR,
    Backend,
    compile_with,
    default_backend,
    list_backends,
    lookup_backend,
    register_backend,
    registry,
    unregister_backend,
)
from dovetail.errors import BackendError, UnknownBackendError
from dovetail.torch_private import compilers as private_compilers
from tests.backends.graphs import make_graph, mlp, mlp_inputs


@pytest.fixture(autouse=True)
def clean_registry():
    before = dict(registry._registered)
    yield
    registry._registered.clear()
    registry._registered.update(before)


def mine(graph, example_inputs, *, kind, options):
    """Mine."""
    return lambda inputs: list(graph(*inputs))


def test_own_names_win_over_torchs():
    assert lookup_backend("eager") is EAGER
    assert lookup_backend("inductor") is INDUCTOR
    assert lookup_backend("aten") is ATEN
    assert EAGER.takes_program and not ATEN.takes_program


def test_register_and_unregister():
    made = register_backend("mine", mine, numerics="bitwise")
    assert lookup_backend("mine") is made
    assert made.description == "Mine."
    assert "mine" in list_backends(torch_backends=False)
    unregister_backend("mine")
    with pytest.raises(UnknownBackendError):
        lookup_backend("mine")
    with pytest.raises(UnknownBackendError):
        unregister_backend("mine")


def test_decorator_returns_the_function():
    assert register_backend("mine")(mine) is mine


def test_taken_names():
    register_backend("mine", mine)
    with pytest.raises(BackendError, match="registered already"):
        register_backend("mine", mine)
    register_backend("mine", mine, replace=True)
    with pytest.raises(BackendError, match="Dovetail's own"):
        register_backend("aten", mine, replace=True)
    with pytest.raises(BackendError, match="not empty"):
        register_backend("", mine)


def test_unknown_name_gives_near_ones():
    with pytest.raises(UnknownBackendError, match="did you mean 'inductor'"):
        lookup_backend("inducter")
    with pytest.raises(UnknownBackendError, match="use one of aten"):
        lookup_backend("qqqqq")
    with pytest.raises(UnknownBackendError, match="name or a callable"):
        lookup_backend(3)  # type: ignore[arg-type]


def test_callable_with_our_signature():
    backend = lookup_backend(mine)
    assert isinstance(backend, Backend)
    assert backend.name == "mine"
    assert lookup_backend(backend) is backend


def test_callable_written_for_torch_compile():
    def custom(graph, example_inputs):
        return graph.forward

    inputs = mlp_inputs()
    graph, fakes, _ = make_graph(mlp, *inputs)
    outputs = compile_with(lookup_backend(custom), graph, fakes, "inference")(list(inputs))
    assert torch.equal(outputs[0], mlp(*inputs)[0])


@pytest.mark.parametrize("name", ["aot_eager", "aot_eager_decomp_partition", "eager_debug", "pre_dispatch_eager"])
def test_torchs_own_backends(name):
    inputs = mlp_inputs()
    inputs[1].requires_grad_()
    graph, fakes, _ = make_graph(mlp, *inputs)
    run = compile_with(lookup_backend(name), graph, fakes, "forward")
    for _ in range(2):
        outputs = run(list(inputs))
        for got, want in zip(outputs, mlp(*inputs), strict=True):
            assert (got is None and want is None) or torch.allclose(got, want, atol=1e-6)
        assert not any(value.requires_grad for value in outputs[:3] if value is not None)


def test_entry_points(monkeypatch):
    points = [
        EntryPoint("good", "tests.backends.test_registry:mine", "dovetail.backends"),
        EntryPoint("missing", "no_such_module:thing", "dovetail.backends"),
        EntryPoint("odd", "math:pi", "dovetail.backends"),
    ]
    monkeypatch.setattr(registry, "entry_points", lambda group: points)
    assert lookup_backend("good").name == "good"
    assert "good" in list_backends()
    with pytest.raises(BackendError, match="cannot be loaded"):
        lookup_backend("missing")
    with pytest.raises(BackendError, match="gives float"):
        lookup_backend("odd")


def test_default_backend(monkeypatch):
    monkeypatch.setattr(private_compilers, "cpp_compiler", lambda: "/usr/bin/g++")
    assert default_backend() is INDUCTOR
    assert lookup_backend(None) is INDUCTOR
    monkeypatch.setattr(private_compilers, "cpp_compiler", lambda: None)
    monkeypatch.setattr(private_compilers, "has_triton", lambda: False)
    monkeypatch.setattr(registry, "_warned_no_compiler", False)
    with pytest.warns(UserWarning, match="install g"):
        assert default_backend() is ATEN
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert default_backend() is ATEN
