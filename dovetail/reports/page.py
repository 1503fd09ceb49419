"""A report as one HTML page that needs no other file and no network."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dovetail.face.warnings import count

_FILES = Path(__file__).parent


def render(data: Mapping[str, Any]) -> str:
    """The page of a report; every name and every line of code in it is escaped."""
    texts = {name: (_FILES / f"page.{name}").read_text(encoding="utf-8") for name in ("css", "js")}
    text: str = template("page.html.j2").render(data=data, css=texts["css"], script=texts["js"])
    return text


@functools.cache
def template(name: str) -> Any:
    """A template of this folder, which escapes what it is given."""
    # Loaded here: a program that makes no report has no need of it.
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FILES), autoescape=True, undefined=jinja2.ChainableUndefined
    )
    environment.filters |= {"tail": os.path.basename, "duration": duration, "count": count}
    return environment.get_template(name)


def duration(seconds: float) -> str:
    """A time in words.

    >>> duration(0.0123), duration(75.2)
    ('12.3 ms', '75.2 s')
    """
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:,.1f} s"
