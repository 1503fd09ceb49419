"""Reports of the conformance suite."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from dovetail.backends import Backend
from dovetail.testing.cases import GROUPS, CaseResult, Group

_WRONG = ("failed", "crashed", "timed out")


@dataclass(frozen=True)
class Report:
    """The results of all cases. A refusal, with a reason, is not wrong."""

    backend: Backend
    results: tuple[CaseResult, ...]

    @property
    def passed(self) -> bool:
        """Whether no case is wrong, and operators and models, if they ran, have a case that passed."""
        groups = {result.group for result in self.results} & {"operators", "models"}
        right = {result.group for result in self.results if result.status == "passed"}
        return not self.failures and groups <= right

    @property
    def failures(self) -> tuple[CaseResult, ...]:
        """The cases that are wrong."""
        return tuple(result for result in self.results if result.status in _WRONG)

    @property
    def refusals(self) -> tuple[CaseResult, ...]:
        """The cases that the backend, or Dovetail, refused."""
        return tuple(result for result in self.results if result.status == "refused")

    def counts(self) -> Iterator[tuple[Group, int, Counter[str]]]:
        """Yield each group that ran, with its number of cases and the number of cases by status."""
        for group in GROUPS:
            statuses = [result.status for result in self.results if result.group == group]
            if statuses:
                yield group, len(statuses), Counter(statuses)

    def rows(self) -> list[tuple[str, str, str, str]]:
        """Return the table: for each group its name, how many cases passed of all, were refused, and were wrong."""
        found: list[tuple[str, str, str, str]] = []
        for group, size, counts in self.counts():
            wrong = ", ".join(f"{counts[word]} {word}" for word in _WRONG if counts[word])
            found.append((group, f"{counts['passed']}/{size}", str(counts["refused"] or "-"), wrong or "-"))
        return found

    def promise(self) -> str:
        """Return the facts that the backend declares, in one line."""
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
        lines += [f"  {shortened(result)}" for result in (*self.failures, *self.refusals)]
        return "\n".join(line.rstrip() for line in lines)


def shortened(result: CaseResult, width: int = 200) -> str:
    """A result in one line, without advice."""
    text = " ".join(str(result).split("\n  what to do")[0].split())
    return text if len(text) <= width else text[: width - 3] + "..."
