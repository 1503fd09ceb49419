"""The core's own tests, with rules, quirks and the wings that plug in switched off."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

#: Still imported by ``aot``. Only ever shortened; empty when the house is built.
LEFT = ("dovetail.rules.sparse", "dovetail.whole_calls", "dovetail.quirks.registry", "dovetail.quirks.replays")
PLUGS = ("dovetail.rules.", "dovetail.quirks.", "dovetail.whole_calls.", "dovetail.fast_guards.", "dovetail.switches.")
ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.skipif(
    sys.version_info >= (3, 14), reason="the instructions of Python 3.14 and later are rules"
)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "DOVETAIL_WITHOUT_RULES": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT, env=environment)


def test_a_capture_loads_no_rule_and_the_core_passes_its_tests_alone() -> None:
    program = (
        "import sys, torch, dovetail\n"
        "dovetail.compile(torch.nn.Linear(2, 2), backend='aten')(torch.ones(1, 2)).sum().backward()\n"
        "print(*sys.modules, flush=True)\n"
        "import pytest\n"
        "raise SystemExit(pytest.main(['-q', '-p', 'no:cacheprovider', 'tests/core']))"
    )
    done = run("-c", program)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    names = done.stdout.partition("\n")[0].split()
    assert "dovetail.face.compile" in names
    assert [name for name in names if name.startswith(PLUGS) and not name.startswith(LEFT)] == []
