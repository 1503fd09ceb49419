"""``docs/inside/from_scratch.md`` is a program: its code runs in order and prints what the page says."""

from __future__ import annotations

import ast
import contextlib
import io
import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent.parent / "docs" / "inside" / "from_scratch.md"
BLOCKS = re.findall(r"^```(python|text)\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
#: The example of section 2 and the training of section 8 use the compiler; the rest is the compiler.
EXAMPLES = ("trace, example = ", "def residual(")


def _lines_of_code(block: str) -> int:
    """Lines that are neither blank, nor a comment, nor part of a docstring."""
    skipped: set[int] = set()
    for node in ast.walk(ast.parse(block)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node):
            skipped |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    lines = enumerate(block.splitlines(), 1)
    return sum(1 for number, line in lines if line.strip() and line.lstrip()[0] != "#" and number not in skipped)


def test_the_page_runs_and_prints_what_it_says() -> None:
    space: dict[str, Any] = {"__name__": "from_scratch"}
    printed = ""
    compared = 0
    for kind, text in BLOCKS:
        if kind == "python":
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile(text, str(PAGE), "exec"), space)
            printed = out.getvalue()
        else:
            assert printed == text
            compared += 1
    assert compared == 2


def test_the_compiler_has_at_most_300_lines() -> None:
    compiler = [text for kind, text in BLOCKS if kind == "python" and not text.startswith(EXAMPLES)]
    assert sum(map(_lines_of_code, compiler)) <= 300


def test_its_guards_notice_what_changes() -> None:
    space: dict[str, Any] = {"__name__": "from_scratch"}
    with contextlib.redirect_stdout(io.StringIO()):
        for kind, text in BLOCKS:
            if kind == "python":
                exec(compile(text, str(PAGE), "exec"), space)
    torch, model = space["torch"], space["Model"]()
    compiled = space["CompiledFunction"](model)
    for rows in (4, 4, 6):
        x = torch.randn(rows, 8)
        assert torch.equal(compiled(x), model(x))
    assert len(compiled.entries) == 2
    model.scale = 0.25
    assert torch.equal(compiled(x), model(x))
    model.layers.append(torch.nn.Linear(8, 8))
    assert torch.equal(compiled(x), model(x))
    assert len(compiled.entries) == 4

    def add(a: Any, b: Any) -> Any:
        return a + b

    two = space["CompiledFunction"](add)
    x, y = torch.randn(3), torch.randn(3)
    assert torch.equal(two(x, x), x + x)
    assert torch.equal(two(x, y), x + y)
    assert torch.equal(two(y, y), y + y)
