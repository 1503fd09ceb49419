"""Inductor's cache forgets which sizes its code is for, unless they are inputs; when torch is mended, the workaround can go."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import dovetail
from dovetail.backends.inductor import backend, workarounds
from dovetail.reports.explanation import compiled_function
from dovetail.torch_private import compilers as private_compilers

pytestmark = pytest.mark.skipif(private_compilers.cpp_compiler() is None, reason="needs a C++ compiler")


def assumes_small_sizes() -> bool:
    """Compile anew for a symbolic size; Inductor's kernels for small reductions assume at most 4096 rows."""
    compiled = dovetail.compile(lambda x: (x.exp().sum(0), x.softmax(0)), backend="inductor", fullgraph=True)
    for size in (8, 6):
        compiled(torch.randn(size, 3))
    shapes = [entry.checker.guards.shapes for entry in compiled_function(compiled).entries]
    return any("at most 4096" in text for item in shapes if item is not None for text, *_ in item.sentences)


@pytest.mark.parametrize("is_present", [True, False])
@pytest.mark.sampled(2)
@pytest.mark.slow
def test_code_from_the_cache_brings_its_assumptions_along(
    is_present: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    if not is_present:
        others = [item for item in backend.WORKAROUNDS if item is not workarounds.give_sizes_as_inputs]
        monkeypatch.setattr(backend, "WORKAROUNDS", others)
    assert assumes_small_sizes()
    assert assumes_small_sizes() is is_present, "without the workaround: torch is mended, delete give_sizes_as_inputs"


@pytest.mark.parametrize("name", ["inv", pytest.param("eigvals", marks=pytest.mark.slow)])
def test_derivatives_of_complex_matrices(name: str) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return getattr(torch.linalg, name)(torch.complex(x, x.mT))  # type: ignore[no-any-return]

    found = []
    for run in (program, dovetail.compile(program, backend="inductor", fullgraph=True)):
        x = torch.eye(4, dtype=torch.float64) + torch.arange(16.0, dtype=torch.float64).sin().reshape(4, 4)
        x.requires_grad_()
        order = 2 if name == "eigvals" else 1
        gradients = torch.autograd.grad(run(x).real.square().sum(), x, create_graph=order > 1)
        found += [gradients if order == 1 else torch.autograd.grad(gradients[0].square().sum(), x)]
    torch.testing.assert_close(found[1], found[0])


def _part(x: torch.Tensor) -> torch.Tensor:
    return torch.complex(x, x * 2).conj().imag


def test_negated_inputs_parts_and_tangents() -> None:
    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (_part(x) @ y.t()).sin()

    torch.manual_seed(0)
    x, negated = torch.randn(3, 4), _part(torch.randn(3, 4))
    tangent = _part(torch.randn(3, 3))
    found = []
    for function in (program, dovetail.compile(program, backend="inductor", fullgraph=True)):
        leaf = x.clone().requires_grad_()
        result = function(leaf, negated)
        result.backward(tangent)
        found.append((result.detach(), leaf.grad))
    torch.testing.assert_close(found[1], found[0])


def test_the_conjugate_of_a_number() -> None:
    """It is in the gradient of a product with a complex number."""
    found = []
    for function in (_turned, dovetail.compile(_turned, backend="inductor", tiers="wait", fullgraph=True)):
        x = torch.arange(1.0, 4.0).requires_grad_()
        result = function(x)
        result.sum().backward()
        found.append((result.detach(), x.grad))
    torch.testing.assert_close(found[1], found[0])


def _turned(x: torch.Tensor) -> torch.Tensor:
    return (x * (1 + 2j)).imag  # type: ignore[no-any-return]


@pytest.mark.slow
def test_a_backward_from_some_outputs() -> None:
    def program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (*torch.linalg.eigh(x + x.mT), *x.sin().unbind(0))

    compiled = dovetail.compile(program, backend="inductor", fullgraph=True)
    for place in (1, 3):
        found = []
        for function in (program, compiled):
            x = torch.arange(9.0).sin().reshape(3, 3).requires_grad_()
            function(x)[place].abs().sum().backward()
            found.append(x.grad)
        torch.testing.assert_close(found[1], found[0])


@pytest.mark.slow
def test_zeros_that_have_no_memory() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return x.abs() + x.sgn()

    compiled = dovetail.compile(program, backend="inductor", fullgraph=True)
    found = []
    for function in (program, compiled):
        x = torch.arange(-2.0, 3.0).requires_grad_()
        (gradient,) = torch.autograd.grad(function(x), x, x.detach().cos().requires_grad_(), create_graph=True)
        found.append((gradient.detach(), *torch.autograd.grad(gradient.sum(), x)))
    torch.testing.assert_close(found[1], found[0])
    assert not dovetail.events_of(compiled).count("the next order runs eagerly")


def test_statistics_of_batch_norm_are_not_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager's kernel keeps them in single precision, and the bits of rounded ones are computed number by number."""
    rounded, bits = [], workarounds._bits

    def noted(node: torch.fx.Node, dtype: torch.dtype) -> torch.fx.Node:
        rounded.append(node.name)
        return bits(node, dtype)

    monkeypatch.setattr(workarounds, "_bits", noted)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU())

    def loss(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).float().pow(2).mean()

    def explicit(x: torch.Tensor) -> torch.Tensor:
        return (x / 7).bfloat16().float() + 1

    x = torch.randn(2, 3, 8, 8)
    found = []
    for run in (loss, dovetail.compile(loss, backend="inductor")):
        model.zero_grad()
        run(x).backward()
        found.append([parameter.grad.clone() for parameter in model.parameters()])
    for expected, actual in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected, atol=2e-2, rtol=2e-2)
    assert not rounded
    torch.testing.assert_close(dovetail.compile(explicit, backend="inductor")(x), explicit(x))
    assert rounded


@pytest.mark.parametrize("mode", ["replicate", "reflect"])
def test_kernels_are_handed_what_lies_as_in_the_capture(mode: str) -> None:
    """A whole step is no backward for Inductor, which hands kernels anything outside of one: this one's result lies as it does."""
    torch.manual_seed(0)
    before, after = torch.nn.Conv2d(3, 4, 3, padding=1), torch.nn.Conv2d(4, 4, 3)
    weights = [*before.parameters(), *after.parameters()]

    def step(x: torch.Tensor) -> list[torch.Tensor]:
        y = torch.nn.functional.pad(before(x).relu(), [1, 1, 1, 1], mode=mode)
        return list(torch.autograd.grad(after(y).square().mean(), weights))

    compiled = dovetail.compile(step, backend="inductor", tiers="wait")
    for _ in range(3):
        x = torch.randn(2, 3, 5, 5)
        for expected, actual in zip(step(x), compiled(x), strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert not dovetail.events_of(compiled).count("backend given up")
