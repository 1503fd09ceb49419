"""Programs on ``cuda:0`` are bitwise eager: on a GPU where there is one, else on the emulated device, in a process of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu.emulated.programs import PROGRAMS, check

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def differences() -> dict[str, str]:
    """What the programs differed in, by name."""
    if torch.cuda.is_available():
        return {}
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("needs a C++ compiler")
    if torch.version.cuda is not None:
        pytest.skip("a CUDA build of torch has a device of its own")
    command = [sys.executable, "-W", "ignore", "-m", "tests.gpu.emulated.programs", "aten"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return {line.partition(" ")[0]: line.partition(": ")[2] for line in done.stdout.splitlines()}


@pytest.mark.parametrize("name", PROGRAMS)
def test_as_eager(name: str, differences: dict[str, str]) -> None:
    found = check(name, "aten") if torch.cuda.is_available() else differences[name]
    assert found in ("", "as eager"), found
