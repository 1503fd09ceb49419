"""The memory that a step frees stays with the process until the next one."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest
import torch

import dovetail
from dovetail.passes.memory_between_steps import show_block

#: Faults of the pages of memory in each step of a process of its own; the tensors of a step are some 20 MB.
_STEPS = """
import resource
import torch, dovetail

torch.set_num_threads(1)
layers = [layer for _ in range(10) for layer in (torch.nn.Linear(256, 256), torch.nn.Tanh())]
model = torch.nn.Sequential(*layers)
x = torch.ones(1024, 256)
step = dovetail.compile(model, backend="aten")
for number in range(25):
    if number == 5:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step(x).square().mean().backward()
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 20)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library keeps other memory")
def test_a_step_asks_the_system_for_no_memory() -> None:
    done = subprocess.run([sys.executable, "-c", _STEPS], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 50


def test_the_block_is_as_large_as_what_a_graph_makes() -> None:
    model = torch.nn.Linear(64, 64)
    x = torch.ones(32, 64)
    small = show_block(dovetail.capture(model, (x,)).graph)
    assert 2 * 32 * 64 * 4 <= small <= 2**20
    assert small < show_block(dovetail.capture(model, (torch.ones(2**14, 64),)).graph) < 32 * 2**20
    assert show_block(dovetail.capture(lambda x: x.T, (torch.ones(3, 4, device="meta"),)).graph) == 0
