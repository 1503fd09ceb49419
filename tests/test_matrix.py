"""What the matrix of versions reads out of a report, and the table that it makes."""

from __future__ import annotations

from pathlib import Path

from tests import matrix

REPORT = """<testsuites><testsuite>
<testcase classname="tests.a" name="one"/>
<testcase classname="tests.a" name="two"><failure message="x">text</failure></testcase>
<testcase classname="tests.b" name="three"><error message="x">text</error></testcase>
<testcase classname="tests.b" name="four"><skipped message="slow; run with --slow"/></testcase>
</testsuite></testsuites>"""


def test_a_report_is_counted(tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text(REPORT)
    outcome = matrix.read_report(tmp_path / "report.xml")
    assert dict(outcome.counts) == {"passed": 1, "failed": 2, "skipped": 1}
    assert outcome.failed == ["tests.a::two", "tests.b::three"]
    assert outcome.skipped == {"slow; run with --slow": 1} and outcome.total == 4


def test_the_table_has_a_line_for_each_pair() -> None:
    text = matrix.table([("2.15.0", "3.12.1", "19 of 19", "5", "0", "1", "8")])
    assert text.splitlines()[-1] == "| 2.15.0 | 3.12.1 | 19 of 19 | 5 | 0 | 1 | 8 |"
