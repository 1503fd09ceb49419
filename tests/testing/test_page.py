"""The backend on the page docs/backends.md is short, and conforms."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from dovetail.backends import unregister_backend
from dovetail.testing import check_backend

PAGE = Path(__file__).parents[2] / "docs" / "backends.md"


def source_on_the_page() -> str:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (source,) = [block for block in blocks if ">>>" not in block]
    return source


@pytest.fixture
def machine(tmp_path):
    path = tmp_path / "machine.py"
    path.write_text(source_on_the_page(), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("machine", path)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    yield "machine"
    unregister_backend("machine")


def test_it_has_forty_lines():
    assert len([line for line in source_on_the_page().splitlines() if line.strip()]) <= 40


@pytest.mark.slow
def test_it_conforms(machine):
    report = check_backend(machine, show=False)
    assert report.failures == ()
    assert {result.case for result in report.refusals} <= {
        "a whole step, optimizer included",
        "inputs that share memory",
        "through the compiled function",
    }
