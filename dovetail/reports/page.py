"""A report as one HTML page that needs no other file and no network."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dovetail.face.warnings import count

_FILES = Path(__file__).parent
_LANE = 18
#: A pause between two stages is drawn as no more of the time line than this.
_LONGEST_PAUSE = 0.02


def render(data: Mapping[str, Any]) -> str:
    """The page of a report; every name and every line of code in it is escaped.

    >>> page = render({**EMPTY, "command": "<b>.py"})
    >>> "&lt;b&gt;.py" in page, "<b>.py" in page
    (True, False)
    """
    texts = {name: (_FILES / f"page.{name}").read_text(encoding="utf-8") for name in ("css", "js")}
    text: str = _template().render(data=data, css=_trusted(texts["css"]), script=_trusted(texts["js"]))
    return text


@functools.cache
def _template() -> Any:
    # Loaded here: a program that makes no report has no need of it.
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FILES), autoescape=True, undefined=jinja2.ChainableUndefined
    )
    environment.filters |= {"tail": os.path.basename, "duration": duration, "lanes": lanes, "count": count}
    return environment.get_template("page.html.j2")


def _trusted(text: str) -> Any:
    import markupsafe

    return markupsafe.Markup(text)


def duration(seconds: float) -> str:
    """A time in words.

    >>> duration(0.0123), duration(75.2)
    ('12.3 ms', '75.2 s')
    """
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:,.1f} s"


def lanes(timeline: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Where each stage is drawn: per cent from the left, pixels from the top. Long pauses, in which the program runs, are cut.

    >>> rows = [dict(name="a", start=s, seconds=1.0, depth=0, thread=0, details="") for s in (0.0, 999.0)]
    >>> [round(row["left"]) for row in lanes(rows)["rows"]], round(lanes(rows)["end"])
    ([0, 50], 1000)
    """
    end = max(row["start"] + (row["seconds"] or 0) for row in timeline)
    busy = sum(row["seconds"] or 0 for row in timeline if not row["depth"]) or 1e-6
    drawn: list[dict[str, Any]] = []
    depth_of = {row["thread"]: 1 for row in timeline}
    for row in timeline:
        depth_of[row["thread"]] = max(depth_of[row["thread"]], row["depth"] + 1)
    top_of = {thread: sum(depth_of[other] for other in depth_of if other < thread) for thread in depth_of}
    cut = reached = 0.0
    for row in timeline:
        pause = row["start"] - reached
        cut += max(0.0, pause - busy * _LONGEST_PAUSE)
        reached = max(reached, row["start"] + (row["seconds"] or 0))
        drawn.append({"at": row["start"] - cut, "long": row["seconds"] or 0.0, "row": row})
    whole = max(max(item["at"] + item["long"] for item in drawn), 1e-6)
    rows = []
    for item in drawn:
        row, is_note = item["row"], item["row"]["seconds"] is None
        took = "" if is_note else f" {duration(item['long'])}"
        rows.append(
            {
                "name": row["name"],
                "left": round(100 * item["at"] / whole, 3),
                "width": round(100 * item["long"] / whole, 3),
                "top": _LANE * (top_of[row["thread"]] + row["depth"]) + 1,
                "title": f"{row['name']}{took} {row['details']}".strip(),
                "note": is_note,
            }
        )
    return {"rows": rows, "height": _LANE * sum(depth_of.values()), "end": end}


#: A report with nothing in it.
EMPTY: dict[str, Any] = {
    "command": "",
    "made": "",
    "process": 0,
    "rank": "",
    "ended": "",
    "versions": {},
    "functions": [],
    "functions_left_out": 0,
}
