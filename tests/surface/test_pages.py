"""Pages for people who come from torch.compile, or have met an error: what they name exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

from dovetail import errors
from dovetail.backends import registry

ROOT = Path(__file__).parents[2]


def test_each_row_names_a_test() -> None:
    text = (ROOT / "docs" / "moving_from_torch_compile.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("|") and not line.startswith(("| You use", "|---"))]
    assert len(rows) >= 35
    for row in rows:
        found = re.search(r"`(tests/[\w/]+/test_\w+\.py)::(test_\w+)` \|$", row)
        assert found, row
        tree = ast.parse((ROOT / found[1]).read_text(encoding="utf-8"))
        (test,) = [item for item in tree.body if isinstance(item, ast.FunctionDef) and item.name == found[2]]
        # A test that a row rests on checks something, and runs where what it needs is installed and ``--slow`` is given.
        assert any(_checks(node) for node in ast.walk(test)), row
        assert not [
            item for item in test.decorator_list if "skip" in ast.unparse(item) or "fail" in ast.unparse(item)
        ], row


def _checks(node: ast.AST) -> bool:
    """An assertion, an error or a warning that is expected, or a comparison of two results."""
    called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
    return isinstance(node, ast.Assert) or called in ("pytest.raises", "pytest.warns", "same", "compare")


def test_the_first_block_of_the_readme_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    # Without a compiler, so that it takes a moment: the default is then "aten".
    monkeypatch.setattr(registry, "default_backend", lambda: registry.lookup_backend("aten"))
    block = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    assert block
    exec(block[1], names)
    assert names["model"][0].weight.grad is not None
    assert names["model"].compiled_call.backend.name == "aten"


def test_each_error_has_a_heading() -> None:
    classes = {
        name
        for name, item in vars(errors).items()
        if isinstance(item, type) and issubclass(item, (errors.DovetailError, Warning))
    }
    headings = re.findall(
        r"^## (\w+)$", (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert set(headings) == classes and len(headings) == len(set(headings))
