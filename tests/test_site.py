"""The documentation site: every page is in it, it builds without a warning, and a link that leads nowhere fails.

It needs what ``make site`` installs (the extra ``docs``); where that is missing, only the pages themselves are checked.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import dovetail

ROOT = Path(__file__).parent.parent
BUILDS = all(importlib.util.find_spec(name) for name in ("mkdocs", "material", "mkdocstrings_handlers"))
needs_builder = pytest.mark.skipif(not BUILDS, reason="needs the extra docs: make site")
#: Pages that are made while the site is built.
MADE = {"index.md", "api.md", "changelog.md"}


def build(root: Path, target: Path) -> subprocess.CompletedProcess[str]:
    """Build the site of a checkout into a folder."""
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--config-file",
        str(root / "mkdocs.yml"),
        "--site-dir",
        str(target),
    ]
    variables = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=root, env=variables, capture_output=True, text=True, check=False)


class Links(HTMLParser):
    """The targets of a page's links and pictures, and the anchors that it has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.targets.append(value)
            elif name == "id" and value:
                self.anchors.add(value)


def test_every_page_has_a_place_in_the_navigation() -> None:
    listed = re.findall(r"^ +- ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert len(listed) == len(set(listed))
    assert set(listed) == pages | MADE


@needs_builder
def test_it_builds_without_a_warning_and_its_links_lead_somewhere(tmp_path: Path) -> None:
    done = build(ROOT, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    pages = {path: Links(path.read_text(encoding="utf-8")) for path in tmp_path.rglob("*.html")}
    for path, page in pages.items():
        for target in page.targets:
            place, _, anchor = target.partition("#")
            if re.match(r"\w+:", target) or path.name == "404.html":
                continue
            found = (path.parent / place).resolve() if place else path
            assert found.exists(), f"{path.name} links to {target}"
            if anchor and found in pages and not anchor.startswith("__"):
                assert anchor in pages[found].anchors, f"{path.name} links to {target}"
    reference = pages[tmp_path / "api.html"].anchors
    places = dovetail._PLACES
    assert {f"{place}.{name}" for name, place in places.items()} <= reference


@needs_builder
def test_a_link_that_leads_nowhere_fails(tmp_path: Path) -> None:
    copy = tmp_path / "checkout"
    for name in ("docs", "dovetail"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("mkdocs.yml", "README.md", "CHANGELOG.md"):
        shutil.copy(ROOT / name, copy / name)
    page = copy / "docs" / "limits.md"
    page.write_text(page.read_text(encoding="utf-8") + "\n[nowhere](nowhere.md)\n", encoding="utf-8")
    done = build(copy, tmp_path / "site")
    assert done.returncode != 0
    assert "nowhere.md" in done.stderr
