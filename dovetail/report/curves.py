"""Loss curves and result tables of training runs: a terminal table, one self-contained HTML page, and a PNG.

>>> table = Table(("engine", "steps/s"), (("eager", "3.1"), ("dovetail-aten", "3.0")))
>>> print(table)
engine         steps/s
-------------  -------
eager              3.1
dovetail-aten      3.0
"""

from __future__ import annotations

import html
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import util
from pathlib import Path

#: Colours that differ in brightness too, so that they can be told apart without seeing hue (Okabe and Ito).
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9")
#: One dash pattern per curve: where curves lie on each other, the one on top lets those below it show through.
DASHES = ("", "14 7", "7 7", "2 6", "10 4 2 4", "4 10")
WIDTHS = (5.0, 4.0, 3.0, 2.5, 2.0, 2.0)


@dataclass(frozen=True)
class Curve:
    """A named series; step ``i + 1`` has the value ``values[i]``."""

    name: str
    values: tuple[float, ...]


@dataclass(frozen=True)
class Table:
    """A table of text cells: the first column is aligned left, the others right."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def __str__(self) -> str:
        widths = [max(len(row[column]) for row in (self.head, *self.rows)) for column in range(len(self.head))]

        def line(cells: Sequence[str]) -> str:
            first = cells[0].ljust(widths[0])
            rest = [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
            return "  ".join([first, *rest]).rstrip()

        return "\n".join([line(self.head), line(["-" * width for width in widths]), *(line(row) for row in self.rows)])

    def to_html(self) -> str:
        """The table as HTML."""

        def row(cells: Sequence[str], tag: str) -> str:
            return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

        body = "\n".join(row(cells, "td") for cells in self.rows)
        return f"<table><thead>{row(self.head, 'th')}</thead><tbody>\n{body}\n</tbody></table>"


def relative_deviations(values: Sequence[float], reference: Sequence[float]) -> tuple[float, ...]:
    """Per step, how far ``values`` are from ``reference``, relative to the reference.

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
    """The curves over their steps as an inline SVG; a logarithmic axis leaves out what is not above zero."""
    width, height, left, right, top, bottom = 860, 360, 80, 20, 40, 50
    drawn = [value for curve in curves for value in curve.values if _can_draw(value, logarithmic)]
    parts = [
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{html.escape(title, quote=True)}" '
        'xmlns="http://www.w3.org/2000/svg">',
        f'<text x="{left}" y="22" class="title">{html.escape(title)}</text>',
    ]
    if not drawn:
        parts.append(f'<text x="{left}" y="{height / 2}">nothing to draw: all values are zero</text></svg>')
        return "\n".join(parts)

    scale: Callable[[float], float] = math.log10 if logarithmic else float
    low, high = scale(min(drawn)), scale(max(drawn))
    if logarithmic:
        low, high = math.floor(low), math.ceil(high)
    if high - low < 1e-12:
        low, high = low - 0.5, high + 0.5
    steps = max(len(curve.values) for curve in curves)

    def x_of(step: float) -> float:
        return left + (step - 1) / max(1, steps - 1) * (width - left - right)

    def y_of(value: float) -> float:
        return top + (high - scale(value)) / (high - low) * (height - top - bottom)

    for tick in _ticks(low, high, whole=logarithmic):
        value = 10.0**tick if logarithmic else tick
        label = f"1e{tick:.0f}" if logarithmic else f"{tick:.4g}"
        y = y_of(value)
        parts.append(f'<line x1="{left}" x2="{width - right}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    for tick in _ticks(1, steps, whole=True):
        parts.append(f'<text x="{x_of(tick):.1f}" y="{height - bottom + 20}" text-anchor="middle">{tick:.0f}</text>')
    parts.append(f'<text x="{(left + width - right) / 2}" y="{height - 8}" text-anchor="middle">step</text>')
    parts.append(
        f'<text transform="translate(18 {(top + height - bottom) / 2}) rotate(-90)" text-anchor="middle">'
        f"{html.escape(unit)}</text>"
    )
    for number, curve in enumerate(curves):
        colour, dash, thickness = (look[number % len(look)] for look in (COLOURS, DASHES, WIDTHS))
        style = f'fill="none" stroke="{colour}" stroke-width="{thickness}" stroke-dasharray="{dash or "none"}"'
        for piece in _pieces(curve.values, logarithmic):
            points = " ".join(f"{x_of(step):.1f},{y_of(value):.1f}" for step, value in piece)
            parts.append(f'<polyline points="{points}" {style}><title>{html.escape(curve.name)}</title></polyline>')
        key = 240 + number * (width - right - 240) // max(4, len(curves))
        parts.append(f'<line x1="{key}" x2="{key + 24}" y1="18" y2="18" {style}/>')
        parts.append(f'<text x="{key + 28}" y="22" class="key">{html.escape(curve.name)}</text>')
    parts.append("</svg>")
    return "\n".join(parts)


def write_html(
    path: str | os.PathLike[str],
    *,
    title: str,
    losses: Sequence[Curve],
    deviations: Sequence[Curve],
    table: Table,
    remarks: Sequence[str] = (),
) -> Path:
    """Write one page that needs nothing else: both charts, the table and the remarks."""
    style = """
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
    said = "\n".join(f"<li>{html.escape(remark)}</li>" for remark in remarks)
    page = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{html.escape(title)}</title><style>{style}</style></head><body>
<h1>{html.escape(title)}</h1>
<div class="scroll">{table.to_html()}</div>
<ul>{said}</ul>
{svg_chart(losses, title="Training loss", unit="loss")}
{svg_chart(deviations, title="Deviation from eager", unit="relative deviation", logarithmic=True)}
</body></html>
"""
    target = Path(path)
    target.write_text(page, encoding="utf-8")
    return target


def write_png(path: str | os.PathLike[str], *, losses: Sequence[Curve], deviations: Sequence[Curve]) -> Path | None:
    """Write both charts with matplotlib; None (and no file) where matplotlib is not installed."""
    if util.find_spec("matplotlib") is None:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 8), layout="constrained")
    FigureCanvasAgg(figure)
    loss_axes, deviation_axes = figure.subplots(2, 1)
    for number, curve in enumerate(losses):
        dash = DASHES[number % len(DASHES)]
        thickness = WIDTHS[number % len(WIDTHS)] * 0.7
        pattern = tuple(float(length) / 3 for length in dash.split())
        loss_axes.plot(
            range(1, len(curve.values) + 1),
            curve.values,
            label=curve.name,
            color=COLOURS[number % len(COLOURS)],
            linewidth=thickness,
            linestyle=(0, pattern) if pattern else "solid",
        )
    loss_axes.set(title="Training loss", xlabel="step", ylabel="loss")
    loss_axes.legend()
    drawn = False
    for number, curve in enumerate(deviations):
        points = [(step, value) for step, value in enumerate(curve.values, 1) if _can_draw(value, True)]
        name = curve.name if points else f"{curve.name} (exactly zero)"
        drawn = drawn or bool(points)
        steps, values = zip(*points) if points else ((), ())
        deviation_axes.plot(steps, values, ".-", label=name, color=COLOURS[number % len(COLOURS)], linewidth=1)
    if drawn:
        deviation_axes.set_yscale("log")
    deviation_axes.set(title="Deviation from eager", xlabel="step", ylabel="relative deviation")
    if deviations:
        deviation_axes.legend()
    target = Path(path)
    figure.savefig(target, dpi=120)
    return target


def _can_draw(value: float, logarithmic: bool) -> bool:
    return math.isfinite(value) and (value > 0 or not logarithmic)


def _pieces(values: Sequence[float], logarithmic: bool) -> list[list[tuple[int, float]]]:
    """The stretches of a curve that can be drawn as one line."""
    pieces: list[list[tuple[int, float]]] = [[]]
    for step, value in enumerate(values, 1):
        if _can_draw(value, logarithmic):
            pieces[-1].append((step, value))
        elif pieces[-1]:
            pieces.append([])
    # A line through one point is invisible, so a lonely point is drawn as a short dash.
    return [piece if len(piece) > 1 else [piece[0], (piece[0][0] + 1, piece[0][1])] for piece in pieces if piece]


def _ticks(low: float, high: float, *, whole: bool) -> list[float]:
    """About six round numbers from ``low`` to ``high``."""
    rough = (high - low) / 6
    if rough <= 0:
        return [low]
    power = 10.0 ** math.floor(math.log10(rough))
    distance = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    if whole:
        distance = max(1.0, round(distance))
    first = math.ceil(low / distance)
    return [number * distance for number in range(first, math.floor(high / distance + 1e-9) + 1)]
