"""Other Pythons on this machine, for tests that run in them."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

VERSIONS = ((3, 11), (3, 12), (3, 13), (3, 14), (3, 15))


def _candidates(version: tuple[int, int]) -> list[str]:
    name = f"{version[0]}.{version[1]}"
    found = [os.environ.get(f"DOVETAIL_PYTHON_{version[0]}_{version[1]}"), shutil.which(f"python{name}")]
    found += [str(path) for path in sorted(Path.home().glob(f".pyenv/versions/{name}.*/bin/python{name}"))]
    return [sys.executable] * (sys.version_info[:2] == version) + [path for path in found if path]


@functools.cache
def interpreter(version: tuple[int, int]) -> str | None:
    """A Python of that version, or None. DOVETAIL_PYTHON_3_12 names one; else PATH and pyenv are searched."""
    for path in _candidates(version):
        answer = subprocess.run(
            [path, "-c", "import sys; print(*sys.version_info[:2])"], capture_output=True, text=True, timeout=20
        )
        if answer.stdout.split() == [str(part) for part in version]:
            return path
    return None


@functools.cache
def has_torch(path: str) -> bool:
    """Whether that Python can import torch."""
    return subprocess.run([path, "-c", "import torch"], capture_output=True, timeout=60).returncode == 0
