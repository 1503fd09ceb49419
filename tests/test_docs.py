"""The examples in README.md and docs/ run, and print what they say; the files and names in them exist."""

from __future__ import annotations

import ast
import doctest
import functools
import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from tests import layout

ROOT = Path(__file__).parent.parent
INSIDE = sorted((ROOT / "docs" / "inside").glob("*.md"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *INSIDE]
#: ``from_scratch.md`` is one program, which a test of its own runs; the others have nothing to run.
WITHOUT_EXAMPLES = {
    "limits.md",
    "conformance.md",
    "performance.md",
    "from_scratch.md",
    "map.md",
    "decisions.md",
    "glossary.md",
    "torch_names.md",
    "matrix.md",
}
#: Their examples start processes or compile kernels; the features themselves have tests of their own.
SLOW_PAGES = {"backends.md", "distributed.md", "simulator.md"}


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.name, marks=[pytest.mark.slow] if page.name in SLOW_PAGES else [])
        for page in PAGES
        if page.name not in WITHOUT_EXAMPLES
    ],
)
def test_examples(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    # Everything outside of the examples becomes blank lines, so that a failure names the page's own line.
    kept, inside = [], False
    for line in text.splitlines():
        if line.startswith("```"):
            inside = line == "```python"
            kept.append("")
        else:
            kept.append(line if inside else "")
    source = "\n".join(kept) + "\n"
    assert ">>>" in source, f"{page.name} shows no example"
    test = doctest.DocTestParser().get_doctest(source, {"__name__": "__main__"}, page.name, str(page), 0)
    report: list[str] = []
    results = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=report.append)
    assert results.failed == 0, "".join(report)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_within_the_repository_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)\s]*)?\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_readme_names_make_targets_that_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for name in re.findall(r"make (?:PYTHON=\S+ )?([a-z-]+)", (ROOT / "README.md").read_text(encoding="utf-8")):
        assert re.search(rf"^{name}:", makefile, re.MULTILINE), f"README.md names make {name}"


# --- names of files, modules and classes ------------------------------------------------------------------------------


def _names_of_class(node: ast.ClassDef) -> set[str]:
    """What a class defines in its body, and the attributes that its methods set."""
    found = {item.name for item in ast.walk(node) if isinstance(item, ast.FunctionDef)}
    for item in ast.walk(node):
        if isinstance(item, ast.Attribute) and isinstance(item.value, ast.Name) and item.value.id == "self":
            found.add(item.attr)
        elif isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            found.add(item.target.id)
    return found


@functools.cache
def classes() -> dict[str, set[str]]:
    """The names of all classes of the package, and what they and their bases of the package define."""
    found: dict[str, set[str]] = {}
    bases: dict[str, set[str]] = {}
    for path in layout.MODULES:
        for node in ast.walk(layout.parse(path)):
            if isinstance(node, ast.ClassDef):
                found[node.name] = found.get(node.name, set()) | _names_of_class(node)
                bases.setdefault(node.name, set()).update(base.id for base in node.bases if isinstance(base, ast.Name))
    for name in found:
        for base in bases[name]:
            found[name] = found[name] | found.get(base, set())
    return found


@functools.cache
def top_level(path: Path) -> set[str]:
    """The names that a file defines at its top level."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def _resolve(name: str) -> Any:
    """A dotted name: the module as far as there is one, then attributes."""
    parts = name.split(".")
    found: Any = importlib.import_module(parts[0])
    for position, part in enumerate(parts[1:], 2):
        try:
            found = getattr(found, part)
        except AttributeError:
            found = importlib.import_module(".".join(parts[:position]))
    return found


def wrong_names(text: str) -> list[str]:
    """The files, dotted names and methods of classes in a text that do not exist."""
    wrong = []
    for place, name in re.findall(r"\b((?:dovetail|tests|benchmarks|examples)/[\w/.]*)(?::(\w+))?", text):
        path = ROOT / place.rstrip(".")
        if not path.exists() or (name and name not in top_level(path)):
            wrong.append(f"{place}:{name}" if name else place)
    for name in set(re.findall(r"(?<![/\w.-])dovetail(?:\.\w+)+", text)):
        try:
            _resolve(name)
        except (ImportError, AttributeError):
            wrong.append(name)
    for owner, name in re.findall(r"`([A-Z]\w+)\.(\w+)(?:\(.*?\))?`", text):
        if owner in classes() and name not in classes()[owner]:
            wrong.append(f"{owner}.{name}")
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_names_exist(page: Path) -> None:
    assert wrong_names(page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "text",
    [
        "see `dovetail/face/nowhere.py`",
        "see `dovetail/face/attempts.py:nothing`",
        "the name dovetail.face.attempts.nothing is gone",
        "`Dispatcher._nothing` does it",
        "its test is in tests/nowhere/",
    ],
)
def test_the_check_of_names_sees(text: str) -> None:
    assert len(wrong_names(text)) == 1
    assert wrong_names("`dovetail/face/attempts.py:Attempts`, dovetail.face.attempts.Attempts, `Attempts.run`") == []


@pytest.mark.parametrize(
    "page", [page for page in INSIDE if page.name != "from_scratch.md"], ids=lambda page: page.name
)
def test_classes_exist(page: Path) -> None:
    known = {"NotImplemented", "True", "False", "None"}
    known.update(*map(top_level, layout.MODULES))
    names = set(re.findall(r"`([A-Z][a-z]\w+)`", page.read_text(encoding="utf-8").split("## Names that went")[0]))
    assert names <= classes().keys() | known


def test_the_glossary_is_in_order() -> None:
    sections = (ROOT / "docs" / "inside" / "glossary.md").read_text(encoding="utf-8").split("## ")[1:]
    for section in sections:
        terms = re.findall(r"^\| (.+?) \|", section, re.MULTILINE)[1:]
        assert len(terms) > 10
        assert terms == sorted(terms, key=str.lower)
