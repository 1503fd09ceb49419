"""Loss curves of training runs as one self-contained HTML page."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dovetail.reports.table import Table

#: One colour for each engine; they differ in brightness too (Okabe and Ito).
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9")
_WIDTH, _HEIGHT = 860, 320
_STYLE = """
    body { font: 15px/1.5 system-ui, sans-serif; max-width: 920px; margin: 2rem auto; padding: 0 1rem; }
    svg { width: 100%; height: auto; } th, td { padding: .25rem .8rem; }
"""


@dataclass(frozen=True)
class Curve:
    """A named series; step ``i + 1`` has the value ``values[i]``. ``look`` is its place in :data:`COLOURS`."""

    name: str
    values: tuple[float, ...]
    look: int = 0


def relative_deviations(values: Sequence[float], reference: Sequence[float]) -> tuple[float, ...]:
    """Return for each step how far ``values`` are from ``reference``, relative to the reference.

    >>> relative_deviations([1.0, 2.0], [1.0, 4.0])
    (0.0, 0.5)
    """

    def deviation(value: float, expected: float) -> float:
        if value == expected or (math.isnan(value) and math.isnan(expected)):
            return 0.0
        if not (math.isfinite(value) and math.isfinite(expected)):
            return math.inf
        return abs(value - expected) / abs(expected) if expected else math.inf

    return tuple(deviation(value, expected) for value, expected in zip(values, reference))


def svg_chart(curves: Sequence[Curve], *, title: str) -> str:
    """Return the curves over their steps as an inline SVG, without values that are not finite; a thinner one lies above."""
    drawn = [value for curve in curves for value in curve.values if math.isfinite(value)]
    low, high = min(drawn, default=0.0), max(drawn, default=0.0)
    steps = max([0, *(len(curve.values) for curve in curves)])
    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT + 20}" role="img" xmlns="http://www.w3.org/2000/svg">']
    parts.append(f'<text y="{_HEIGHT + 16}">{low:.4g} to {high:.4g} in {steps} steps</text>')
    for number, curve in enumerate(curves):
        points = " ".join(
            f"{step / max(1, steps - 1) * _WIDTH:.1f},{(high - value) / (high - low or 1.0) * _HEIGHT:.1f}"
            for step, value in enumerate(curve.values)
            if math.isfinite(value)
        )
        colour, name = COLOURS[curve.look % len(COLOURS)], html.escape(curve.name)
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{max(1, 6 - 2 * number)}"/>'
        )
        parts.append(f'<text x="{_WIDTH}" y="{20 * number + 20}" fill="{colour}" text-anchor="end">{name}</text>')
    return "\n".join([f"<h2>{html.escape(title)}</h2>", *parts, "</svg>"])


def write_html(path: Path, *, title: str, charts: Sequence[str], table: Table, remarks: Sequence[str] = ()) -> Path:
    """Write one page that needs no other file: the table, the remarks and the charts."""
    head = f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
    items = [f"<p>{html.escape(remark)}</p>" for remark in remarks]
    body = "\n".join([f"<h1>{html.escape(title)}</h1>", table.to_html(), *items, *charts])
    path.write_text(f"{head}<style>{_STYLE}</style></head><body>\n{body}\n</body></html>\n", encoding="utf-8")
    return path
