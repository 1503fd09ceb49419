"""Tables of text cells for the terminal and for HTML pages.

>>> print(Table(("engine", "steps/s"), (("eager", "3.1"), ("dovetail-aten", "3.0"))))
engine         steps/s
-------------  -------
eager              3.1
dovetail-aten      3.0
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """A table whose first column is aligned left, the others right."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def __str__(self) -> str:
        widths = [max(map(len, column)) for column in zip(self.head, *self.rows, strict=True)]

        def line(cells: Sequence[str]) -> str:
            rest = [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
            return "  ".join([cells[0].ljust(widths[0]), *rest]).rstrip()

        return "\n".join(map(line, [self.head, ["-" * width for width in widths], *self.rows]))

    def to_html(self) -> str:
        """Return the table as HTML."""

        def row(cells: Sequence[str], tag: str) -> str:
            return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

        body = "\n".join(row(cells, "td") for cells in self.rows)
        return f"<table><thead>{row(self.head, 'th')}</thead><tbody>\n{body}\n</tbody></table>"
