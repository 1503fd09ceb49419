"""The first compiled call of a process, inside of modes and transforms of the program."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import torch, dovetail

def program(x):
    return x.sin() * 2

x = torch.arange(6.0).reshape(2, 3)
compiled = dovetail.compile(program, backend="aten")
with torch.inference_mode(), torch.device("meta"):
    first = torch.func.vmap(compiled)(x)
assert torch.equal(first, program(x))
x.requires_grad_()
assert torch.equal(torch.autograd.grad(compiled(x).sum(), x)[0], torch.autograd.grad(program(x).sum(), x)[0])
layer = torch.nn.Linear(3, 3)
with torch.inference_mode():
    assert torch.equal(dovetail.compile(layer, backend="aten", fullgraph=True)(x), layer(x))
"""


@pytest.mark.slow
def test_rules_are_loaded_outside_of_the_modes_of_the_first_call() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
