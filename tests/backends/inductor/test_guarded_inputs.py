"""Sizes and strides of inputs: generated code looks at them where no guard has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import dovetail
from dovetail import aot
from dovetail.backends.inductor.generated import code_of
from dovetail.errors import EagerFallbackWarning
from dovetail.reports.explanation import compiled_function


def looks_at(fake_mode: object) -> dict[str, bool]:
    """For each generated graph, whether its code looks at its inputs."""
    return {
        # From torch 2.14 on those of several inputs are one call.
        made.kind: bool(
            re.search(r"assert_size_stride\w*\([(\[\s]*(primals|arg|tangents)", Path(made.file).read_text("utf-8"))
        )
        for made in code_of(fake_mode)
    }


def cubed(x: torch.Tensor) -> torch.Tensor:
    return (x * x * x).sum(0)


def test_guarded_inputs_are_not_looked_at_again() -> None:
    compiled = dovetail.compile(cubed, backend="inductor", fullgraph=True, tiers="wait")
    x = torch.randn(3, 4, requires_grad=True)
    compiled(x)
    (entry,) = compiled_function(compiled).entries
    # What the forward has saved, and what the engine hands in, no guard has seen.
    assert looks_at(entry.compiled.joint.fake_mode) == {"forward": False, "backward": True}
    # The guards see another layout, also one that comes by the same tensor.
    for other in (torch.randn(4, 3).t(), torch.randn(3, 8)[:, ::2], torch.randn(3, 4)):
        for _ in range(2):
            assert torch.allclose(compiled(other), cubed(other))
    data = torch.randn(4, 3).t()
    x.data = data
    assert torch.allclose(compiled(x), cubed(x))


@pytest.mark.slow
def test_a_graph_without_guards_looks_at_its_inputs() -> None:
    joint = dovetail.capture(lambda x: x.cos() * 2, (torch.randn(3, 4),))
    compiled = aot.compile_joint(None, joint, "inductor")
    assert looks_at(joint.fake_mode) == {"inference": True}
    x = torch.randn(4, 3).t()
    with pytest.warns(EagerFallbackWarning, match="stride 1==4"):
        (result,) = compiled.run([x])
    assert torch.equal(result, x.cos() * 2)


@pytest.mark.slow
def test_symbolic_sizes_are_looked_at() -> None:
    compiled = dovetail.compile(lambda x: x.sin() * 3, backend="inductor", fullgraph=True, tiers="wait", dynamic=True)
    x = torch.randn(3, 4)
    assert torch.allclose(compiled(x), x.sin() * 3)
    (entry,) = compiled_function(compiled).entries
    assert looks_at(entry.compiled.joint.fake_mode) == {"inference": True}
