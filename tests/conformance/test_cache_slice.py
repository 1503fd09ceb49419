"""A slice of the stress for the cache on disk, and a check that it sees a reader that believes too much."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests import layout

_COMMAND = "from tests.conformance.cache_stress import main; main({arguments!r})"
#: A reader that looks at the first line of an entry only.
_CREDULOUS = """
from dovetail.cache import entries
def decode(kind, key, data):
    return data[data.index(b"\\n") + 1 :] if b"\\n" in data else None
entries.decode = decode
"""


def _run(before: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    program = before + _COMMAND.format(arguments=list(arguments))
    return subprocess.run(
        [sys.executable, "-c", program], cwd=layout.ROOT, capture_output=True, text=True, timeout=600, check=False
    )


@pytest.mark.slow
def test_the_cache_survives() -> None:
    done = _run("", "--kills", "8", "--damaged", "60", "--meaningless", "20")
    assert done.returncode == 0, done.stderr[-3000:]
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == ["kills", "damaged", "meaningless"]


@pytest.mark.slow
def test_a_reader_that_believes_everything_is_found() -> None:
    done = _run(_CREDULOUS, "--only", "damaged", "--damaged", "400")
    assert done.returncode != 0
