"""Loss curves of training runs as one HTML page that needs no other file, drawn by ``curves.html.j2``."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dovetail.reports.page import template
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
#: The edges of a chart in its picture.
_LEFT, _RIGHT, _TOP, _BOTTOM = 80, 840, 40, 310


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


def chart(curves: Sequence[Curve], *, title: str, unit: str, logarithmic: bool = False) -> dict[str, Any]:
    """The curves over their steps, in the picture's units; a logarithmic axis leaves out values that are not above zero."""
    found: dict[str, Any] = {"title": title, "unit": unit, "lines": []}
    drawn = [value for curve in curves for value in curve.values if _can_draw(value, logarithmic)]
    if not drawn:
        return found
    scale: Callable[[float], float] = math.log10 if logarithmic else float
    low, high = scale(min(drawn)), scale(max(drawn))
    if logarithmic:
        low, high = math.floor(low), math.ceil(high)
    if high - low < 1e-12:
        low, high = low - 0.5, high + 0.5
    steps = max(len(curve.values) for curve in curves)

    def x_of(step: float) -> float:
        return round(_LEFT + (step - 1) / max(1, steps - 1) * (_RIGHT - _LEFT), 1)

    def y_of(scaled: float) -> float:
        return round(_TOP + (high - scaled) / (high - low) * (_BOTTOM - _TOP), 1)

    label = "1e{:.0f}" if logarithmic else "{:.4g}"
    found["rows"] = [(y_of(tick), label.format(tick)) for tick in _ticks(low, high, whole=logarithmic)]
    found["columns"] = [(x_of(tick), f"{tick:.0f}") for tick in _ticks(1, steps, whole=True)]
    for number, curve in enumerate(curves):
        look = LOOKS[(number if curve.look is None else curve.look) % len(LOOKS)]
        pieces = [
            " ".join(f"{x_of(step)},{y_of(scale(value))}" for step, value in piece)
            for piece in _pieces(curve.values, logarithmic)
        ]
        found["lines"].append((curve.name, look, pieces))
    return found


def write_html(
    path: str | os.PathLike[str],
    *,
    title: str,
    charts: Sequence[dict[str, Any]],
    table: Table,
    remarks: Sequence[str] = (),
) -> Path:
    """Write a page with the charts, the table and the remarks."""
    target = Path(path)
    text = template("curves.html.j2").render(title=title, charts=charts, table=table.to_html(), remarks=remarks)
    target.write_text(text, encoding="utf-8")
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
