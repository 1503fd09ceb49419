"""Programs on ``cuda:0`` are eager's: on a GPU where there is one, else on the emulated device, in a process of its own.

Under Inductor they are so where Triton is installed: its interpreter runs the kernels that Inductor generates for a GPU.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu.emulated import interpreted
from tests.gpu.emulated.programs import PROGRAMS, check

ROOT = Path(__file__).parents[2]


@functools.cache
def differences(backend: str) -> dict[str, str]:
    """What the programs differed in, by name."""
    if backend == "inductor" and not interpreted.IS_INSTALLED:
        pytest.skip("needs Triton")
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("needs a C++ compiler")
    if torch.version.cuda is not None:
        pytest.skip("a CUDA build of torch has a device of its own")
    command = [sys.executable, "-W", "ignore", "-m", "tests.gpu.emulated.programs", backend]
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return {line.partition(" ")[0]: line.partition(": ")[2] for line in done.stdout.splitlines()}


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("backend", ["aten", "inductor"])
def test_as_eager(name: str, backend: str) -> None:
    found = check(name, backend) if torch.cuda.is_available() else differences(backend)[name]
    assert found in ("", "as eager"), found
