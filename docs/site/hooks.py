"""What the documentation site has beside the pages of this folder: the README as its first page, the changelog, the reference.

mkdocs calls ``on_files`` and ``on_page_markdown`` (https://www.mkdocs.org/user-guide/plugins/#events).
"""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8").replace("](docs/", "](")
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    for name, text in {"index.md": readme, "changelog.md": changes, "api.md": reference()}.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Keep the text of links to files that are in the repository and not on the site; a link to no file at all stays, and fails."""
    here = Path(page.file.src_uri).parent

    def resolved(match: re.Match[str]) -> str:
        target = match.group(3)
        if "://" in target or target.startswith("#"):
            return match.group(0)
        place = posixpath.normpath((here / target.split("#")[0]).as_posix())
        elsewhere = ROOT / place if page.file.generated_by else DOCS / place
        on_site = files.get_file_from_path(place) is not None
        return match.group(0) if on_site or not elsewhere.exists() else match.group(2)

    return _LINK.sub(resolved, markdown)


def public_names() -> dict[str, str]:
    """The public names and their modules, as ``dovetail/__init__.py`` has them; nothing is imported."""
    tree = ast.parse((ROOT / "dovetail" / "__init__.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == "_PLACES" and node.value is not None:
            found: dict[str, str] = ast.literal_eval(node.value)
            return found
    raise LookupError("dovetail/__init__.py has no _PLACES")


def reference() -> str:
    """The page of all public names, from their docstrings."""
    lines = ["# Reference", "", "The public names of `dovetail`, from their docstrings.", ""]
    for name, place in sorted(public_names().items(), key=lambda item: item[0].lower()):
        lines += [f"::: {place}.{name}", ""]
    lines += ["## Errors", "", "::: dovetail.errors", "    options:", "      show_root_heading: false", ""]
    return "\n".join(lines)
