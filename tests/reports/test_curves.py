"""Charts and tables: what they draw, and what they do with values that cannot be drawn."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from dovetail.reports.curves import LOOKS, Curve, chart, relative_deviations, write_html
from dovetail.reports.page import template
from dovetail.reports.table import Table

SVG = "{http://www.w3.org/2000/svg}"


def svg_chart(curves: list[Curve], **options: Any) -> str:
    drawn: str = template("curves.html.j2").module.svg(chart(curves, **options))
    return drawn


def lines_of(svg: str) -> list[list[tuple[float, float]]]:
    found = ElementTree.fromstring(svg).iter(f"{SVG}polyline")
    return [
        [(float(x), float(y)) for x, y in (point.split(",") for point in line.attrib["points"].split())]
        for line in found
    ]


def test_a_falling_loss_is_drawn_downwards_from_left_to_right() -> None:
    (line,) = lines_of(svg_chart([Curve("a", (3.0, 2.0, 1.0))], title="t", unit="u"))
    assert [x for x, _ in line] == sorted(x for x, _ in line)
    assert [y for _, y in line] == sorted(y for _, y in line)  # y grows downwards in SVG


@pytest.mark.parametrize("logarithmic", [False, True])
@pytest.mark.parametrize("values", [(), (1.0,), (0.0, 0.0), (math.nan, math.inf), (1.0, math.nan, 2.0), (-1.0, 5.0)])
def test_any_values_give_a_well_formed_picture(values: tuple[float, ...], logarithmic: bool) -> None:
    chart = svg_chart([Curve("a <&> b", values)], title='a "title" & more', unit="<u>", logarithmic=logarithmic)
    for line in lines_of(chart):
        assert len(line) >= 2
        assert all(math.isfinite(x) and math.isfinite(y) for x, y in line)


def test_a_gap_splits_the_line() -> None:
    chart = svg_chart([Curve("a", (1.0, 2.0, math.nan, 1.0, 2.0))], title="t", unit="u")
    assert len(lines_of(chart)) == 2


def test_an_engine_has_one_look_in_all_charts() -> None:
    both = svg_chart([Curve("eager", (1.0, 2.0), 0), Curve("other", (2.0, 1.0), 1)], title="t", unit="u")
    alone = svg_chart([Curve("other", (2.0, 1.0), 1)], title="t", unit="u")
    assert f'stroke="{LOOKS[1][0]}"' in both and f'stroke="{LOOKS[1][0]}"' in alone
    assert f'stroke="{LOOKS[0][0]}"' in both and f'stroke="{LOOKS[0][0]}"' not in alone


def test_deviations() -> None:
    assert relative_deviations([1.0, 3.0, 0.0], [1.0, 2.0, 0.0]) == (0.0, 0.5, 0.0)
    assert relative_deviations([math.nan], [math.nan]) == (0.0,)
    assert relative_deviations([math.nan], [1.0]) == (math.inf,)
    assert relative_deviations([1e-9], [0.0]) == (math.inf,)


def test_the_page_needs_nothing_else_and_escapes_names(tmp_path: Path) -> None:
    page = write_html(
        tmp_path / "page.html",
        title="a & b",
        charts=[
            chart([Curve("<eager>", (1.0, 0.5))], title="loss", unit="1"),
            chart([], title="deviation", unit="1", logarithmic=True),
            chart([Curve("<eager>", (900.0, 30.0))], title="time", unit="ms", logarithmic=True),
        ],
        table=Table(("engine", "x"), (("<eager>", "1"),)),
        remarks=["1 < 2"],
    ).read_text()
    assert "<eager>" not in page and "&lt;eager&gt;" in page and "1 &lt; 2" in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")
