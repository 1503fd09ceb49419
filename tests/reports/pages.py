"""What tests ask of a page: that it is well-formed, that its links lead somewhere, and what a browser makes of it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

_EMPTY = {"meta", "link", "br", "img", "input", "hr"}


class Page(HTMLParser):
    """Reads a page; raises where elements are not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open, f"left open: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in _EMPTY:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open and self._open.pop() == tag, f"</{tag}> closes nothing, at {self.getpos()}"

    def handle_data(self, data: str) -> None:
        if self._open:
            self.texts.setdefault(self._open[-1], []).append(data)

    def ids(self) -> list[str]:
        return [str(attributes["id"]) for _, attributes in self.elements if "id" in attributes]

    def links(self) -> list[str]:
        return [str(attributes["href"]) for _, attributes in self.elements if "href" in attributes]

    def data(self) -> dict[str, Any]:
        """The report that the page holds."""
        found: dict[str, Any] = json.loads(self.texts["script"][0])
        return found


def check_page(text: str) -> Page:
    """The page, if it is whole: ids are unique, links stay inside, each entry that it names is in its data, nothing is loaded."""
    page = Page(text)
    ids = page.ids()
    assert len(ids) == len(set(ids))
    assert all(link.startswith("#") and link[1:] in ids for link in page.links())
    assert not [item for item in page.elements if item[1].keys() & {"src", "srcset"} or item[0] in ("link", "iframe")]
    data = page.data()
    for _, attributes in page.elements:
        if "data-entry" in attributes:
            function, part, entry = map(int, str(attributes["data-entry"]).split())
            assert data["functions"][function]["parts"][part]["entries"][entry]
    return page


def find_browser() -> str | None:
    """A browser that runs without a screen."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
    return os.environ.get("DOVETAIL_BROWSER") or next(filter(None, map(shutil.which, names)), None)


def in_browser(browser: str, path: Path, script: str) -> Any:
    """What an asynchronous function of JavaScript returns in the page."""
    done = f"document.body.dataset.result = JSON.stringify(await (async () => {{ {script} }})());"
    probe = path.with_name(f"probe-{path.name}")
    text = path.read_text(encoding="utf-8").replace("</body>", f"<script>(async () => {{ {done} }})();</script></body>")
    probe.write_text(text, encoding="utf-8")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=10000", "--dump-dom"]
    output = subprocess.run(
        [*command, f"--user-data-dir={path.parent}/browser", probe.as_uri()],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    ).stdout
    (result,) = [attributes["data-result"] for tag, attributes in Page(output).elements if tag == "body"]
    return json.loads(str(result))
