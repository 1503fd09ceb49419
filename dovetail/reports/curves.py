"""Loss curves of training runs as one self-contained HTML page."""

from __future__ import annotations

import html
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dovetail.reports.table import Table

#: Colour, dash pattern and width of each curve. The colours differ in brightness too (Okabe and Ito); where curves lie on each
#: other, the dashes of the upper one show those below it.
LOOKS = (
    ("#0072b2", "", 5.0),
    ("#e69f00", "14 7", 4.0),
    ("#009e73", "7 7", 3.0),
    ("#cc79a7", "2 6", 2.5),
    ("#d55e00", "10 4 2 4", 2.0),
    ("#56b4e9", "4 10", 2.0),
)
_WIDTH, _HEIGHT = 860, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 80, 20, 40, 50
_STYLE = """
    :root { color-scheme: light dark; --text: #222; --faint: #ddd; --page: #fff; }
    @media (prefers-color-scheme: dark) { :root { --text: #ddd; --faint: #444; --page: #181a1b; } }
    body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--page);
           max-width: 920px; margin: 2rem auto; padding: 0 1rem; }
    svg { width: 100%; height: auto; } svg text { fill: var(--text); font-size: 13px; }
    svg text.title { font-size: 15px; font-weight: 600; } svg text.key { font-size: 12px; }
    svg line.grid { stroke: var(--faint); }
    .scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
    th, td { padding: .25rem .8rem; text-align: right; border-bottom: 1px solid var(--faint); }
    th:first-child, td:first-child { text-align: left; padding-left: 0; }
"""


@dataclass(frozen=True)
class Curve:
    """A named series; step ``i + 1`` has the value ``values[i]``. ``look`` is its place in :data:`LOOKS`: one for each engine,
    whatever charts it is in; None: that of its place among the curves.
    """

    name: str
    values: tuple[float, ...]
    look: int | None = None


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


def svg_chart(curves: Sequence[Curve], *, title: str, unit: str, logarithmic: bool = False) -> str:
    """Return the curves over their steps as an inline SVG; a logarithmic axis leaves out values that are not above zero."""
    drawn = [value for curve in curves for value in curve.values if _can_draw(value, logarithmic)]
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{html.escape(title, quote=True)}" '
        'xmlns="http://www.w3.org/2000/svg">',
        _text(_LEFT, 22, title, 'class="title"'),
    ]
    if not drawn:
        return "\n".join([*parts, _text(_LEFT, _HEIGHT / 2, "nothing to draw: all values are zero"), "</svg>"])
    scale: Callable[[float], float] = math.log10 if logarithmic else float
    low, high = scale(min(drawn)), scale(max(drawn))
    if logarithmic:
        low, high = math.floor(low), math.ceil(high)
    if high - low < 1e-12:
        low, high = low - 0.5, high + 0.5
    steps = max(len(curve.values) for curve in curves)

    def x_of(step: float) -> float:
        return _LEFT + (step - 1) / max(1, steps - 1) * (_WIDTH - _LEFT - _RIGHT)

    def y_of(scaled: float) -> float:
        return _TOP + (high - scaled) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    for tick in _ticks(low, high, whole=logarithmic):
        y = y_of(tick)
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        parts.append(_text(_LEFT - 8, y + 4, f"1e{tick:.0f}" if logarithmic else f"{tick:.4g}", 'text-anchor="end"'))
    for tick in _ticks(1, steps, whole=True):
        parts.append(_text(x_of(tick), _HEIGHT - _BOTTOM + 20, f"{tick:.0f}", 'text-anchor="middle"'))
    parts.append(_text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 8, "step", 'text-anchor="middle"'))
    turn = f'transform="translate(18 {(_TOP + _HEIGHT - _BOTTOM) / 2}) rotate(-90)" text-anchor="middle"'
    parts.append(_text(0, 0, unit, turn))
    for number, curve in enumerate(curves):
        look = number if curve.look is None else curve.look
        colour, dash, thickness = LOOKS[look % len(LOOKS)]
        style = f'fill="none" stroke="{colour}" stroke-width="{thickness}" stroke-dasharray="{dash or "none"}"'
        for piece in _pieces(curve.values, logarithmic):
            points = " ".join(f"{x_of(step):.1f},{y_of(scale(value)):.1f}" for step, value in piece)
            parts.append(f'<polyline points="{points}" {style}><title>{html.escape(curve.name)}</title></polyline>')
        key = 240 + number * (_WIDTH - _RIGHT - 240) // max(4, len(curves))
        parts.append(f'<line x1="{key}" x2="{key + 24}" y1="18" y2="18" {style}/>')
        parts.append(_text(key + 28, 22, curve.name, 'class="key"'))
    return "\n".join([*parts, "</svg>"])


def _text(x: float, y: float, text: str, attributes: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {attributes}>{html.escape(text)}</text>'


def write_html(
    path: str | os.PathLike[str],
    *,
    title: str,
    losses: Sequence[Curve],
    deviations: Sequence[Curve],
    milliseconds: Sequence[Curve],
    table: Table,
    remarks: Sequence[str] = (),
) -> Path:
    """Write one page that needs no other file: the three charts, the table and the remarks."""
    items = "\n".join(f"<li>{html.escape(remark)}</li>" for remark in remarks)
    target = Path(path)
    target.write_text(
        f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body>
<h1>{html.escape(title)}</h1>
<div class="scroll">{table.to_html()}</div>
<ul>{items}</ul>
{svg_chart(losses, title="Training loss", unit="loss")}
{svg_chart(milliseconds, title="Time of each step", unit="milliseconds", logarithmic=True)}
{svg_chart(deviations, title="Deviation from eager", unit="relative deviation", logarithmic=True)}
</body></html>
""",
        encoding="utf-8",
    )
    return target


def _can_draw(value: float, logarithmic: bool) -> bool:
    return math.isfinite(value) and (value > 0 or not logarithmic)


def _pieces(values: Sequence[float], logarithmic: bool) -> list[list[tuple[int, float]]]:
    """Return the stretches of a curve that can be drawn as one line."""
    pieces: list[list[tuple[int, float]]] = [[]]
    for step, value in enumerate(values, 1):
        if _can_draw(value, logarithmic):
            pieces[-1].append((step, value))
        elif pieces[-1]:
            pieces.append([])
    # A line through one point is invisible, so a single point is drawn as a short dash.
    return [piece if len(piece) > 1 else [piece[0], (piece[0][0] + 1, piece[0][1])] for piece in pieces if piece]


def _ticks(low: float, high: float, *, whole: bool) -> list[float]:
    """Return about six round numbers from ``low`` to ``high``."""
    rough = (high - low) / 6
    if rough <= 0:
        return [low]
    power = 10.0 ** math.floor(math.log10(rough))
    distance = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    if whole:
        distance = max(1.0, round(distance))
    first = math.ceil(low / distance)
    return [number * distance for number in range(first, math.floor(high / distance + 1e-9) + 1)]
