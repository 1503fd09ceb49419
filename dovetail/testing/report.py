"""What a run of the suite found, as a table for the terminal and for a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dovetail.backends import Backend
from dovetail.testing.cases import GROUPS, CaseResult

_WORDS = ("passed", "refused", "failed", "crashed", "timed out")
_SHOWN = 12
_ADVICE = "\n  what to do"
_WRONG = ("failed", "crashed", "timed out")


@dataclass(frozen=True)
class Report:
    """The results of all cases. A case that is refused, with a reason, is not wrong.

    ``label``: what a table calls the backend, its name unless given; ``note``: a sentence below the table.
    """

    backend: Backend
    results: tuple[CaseResult, ...]
    label: str = ""
    note: str = ""

    @property
    def passed(self) -> bool:
        """Whether no case failed, crashed or timed out, and each group of operators and models has a case that is right."""
        groups = {result.group for result in self.results} & {"operators", "models"}
        right = {result.group for result in self.results if result.status == "passed"}
        return not self.failures and groups <= right

    @property
    def failures(self) -> tuple[CaseResult, ...]:
        """The cases that are wrong."""
        return tuple(result for result in self.results if result.status in _WRONG)

    @property
    def refusals(self) -> tuple[CaseResult, ...]:
        """The cases that the backend, or Dovetail, says it cannot do."""
        return tuple(result for result in self.results if result.status == "refused")

    @property
    def seconds(self) -> float:
        """Time in all cases together."""
        return sum(result.seconds for result in self.results)

    def rows(self) -> list[tuple[str, str, str, str]]:
        """For each group: its name, how many passed of all, how many were refused, and how many were wrong."""
        found: list[tuple[str, str, str, str]] = []
        for group in GROUPS:
            mine = [result for result in self.results if result.group == group]
            if mine:
                counts = {word: sum(result.status == word for result in mine) for word in _WORDS}
                wrong = ", ".join(f"{counts[word]} {word}" for word in _WRONG if counts[word])
                found.append((group, f"{counts['passed']}/{len(mine)}", str(counts["refused"] or "-"), wrong or "-"))
        return found

    def promise(self) -> str:
        """What the backend says about itself, in one line."""
        relative, absolute = self.backend.tolerances
        numbers = "to the last bit" if self.backend.numerics == "bitwise" else f"within {relative:g} and {absolute:g}"
        table = self.backend.decompositions()
        return (
            f"eager's numbers {numbers}; {'symbolic sizes' if self.backend.takes_symbolic_shapes else 'static sizes'}; "
            f"{f'{len(table)} decompositions' if table else 'no decompositions'}; {', '.join(self.backend.kinds)} graphs"
        )

    def __str__(self) -> str:
        rows = [("", "passed", "refused", "wrong"), *self.rows()]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        verdict = "conforms" if self.passed else "does not conform"
        lines = [f"backend {self.backend.name!r} {verdict} ({self.promise()})"]
        lines += ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        lines += [f"  {_shortened(result)}" for result in (*self.failures, *self.refusals)]
        return "\n".join(line.rstrip() for line in lines)

    def cells(self) -> list[str]:
        """The row for a page: one cell for each group, such as "5/6, 1 refused"."""
        found = []
        for group in GROUPS:
            mine: list[str] = [result.status for result in self.results if result.group == group]
            counts = {word: mine.count(word) for word in _WORDS}
            words = [f"{counts['passed']}/{len(mine)}"]
            words += [f"{counts[word]} {word}" for word in _WORDS[1:] if counts[word]]
            found.append(", ".join(words) if mine else "")
        return found

    def markdown(self) -> str:
        """The table for a page, with the wrong and the refused cases below it."""
        return tables([self])


def tables(reports: Sequence[Report]) -> str:
    """One table of several backends for a page, then what each promises, gets wrong and refuses."""
    lines = [f"| backend | conforms | {' | '.join(GROUPS)} |", f"|---|---|{'---|' * len(GROUPS)}"]
    for report in reports:
        verdict = "yes" if report.passed else "no"
        lines.append(f"| `{report.label or report.backend.name}` | {verdict} | {' | '.join(report.cells())} |")
    for report in reports:
        lines += ["", f"`{report.label or report.backend.name}` promises {report.promise()}."]
        lines += [report.note] if report.note else []
        shown = [*report.failures, *report.refusals]
        lines += ["", *(f"- {_shortened(result)}" for result in shown[:_SHOWN])] if shown else []
        lines += [f"- and {len(shown) - _SHOWN} more"] if len(shown) > _SHOWN else []
    return "\n".join(lines) + "\n"


def _shortened(result: CaseResult, width: int = 200) -> str:
    text = " ".join(str(result).split(_ADVICE)[0].split())
    return text if len(text) <= width else text[: width - 3] + "..."
