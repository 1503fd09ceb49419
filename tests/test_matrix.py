"""What the matrix of versions reads out of reports, and the table that it makes."""

from __future__ import annotations

from pathlib import Path

from tests import matrix

REPORT = """<testsuites><testsuite name="torch 2.15.0 python 3.12.1 commit abc1234" time="120" timestamp="2026-01-01T10:00:00">
<testcase classname="tests.a" name="one"/>
<testcase classname="tests.a" name="two"><failure message="x">text</failure></testcase>
<testcase classname="tests.b" name="three"><error message="x">text</error></testcase>
<testcase classname="tests.b" name="four"><skipped message="slow; run with --slow"/></testcase>
<testcase classname="tests.assumptions.a" name="five"/>
</testsuite></testsuites>"""

LATER = """<testsuites><testsuite name="torch 2.15.0 python 3.12.1 commit def5678" time="60" timestamp="2026-01-01T11:00:00">
<testcase classname="tests.a" name="one"><failure message="x">text</failure></testcase>
<testcase classname="tests.a" name="two"/>
</testsuite></testsuites>"""


def test_a_report_is_counted(tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text(REPORT)
    name, outcome = matrix.read_report(tmp_path / "report.xml")
    assert name == "torch 2.15.0 python 3.12.1 commit abc1234"
    assert [outcome.count(kind) for kind in ("passed", "failed", "skipped")] == [2, 2, 1]
    assert outcome.failed == ["tests.a::two", "tests.b::three"]
    assert outcome.skipped == {"slow; run with --slow": 1}


def test_a_later_report_of_the_pair_replaces_verdicts(tmp_path: Path) -> None:
    (tmp_path / "z.xml").write_text(REPORT)
    (tmp_path / "a.xml").write_text(LATER)
    (tmp_path / "b.xml").write_text(REPORT.replace("2.15.0", "2.9.1"))
    found = matrix.together(tmp_path.glob("*.xml"))
    assert list(found) == [("2.15.0", "3.12.1"), ("2.9.1", "3.12.1")]
    outcome = found["2.15.0", "3.12.1"]
    assert outcome.failed == ["tests.a::one", "tests.b::three"]
    assert outcome.mended == ["tests.a::two"]
    text = matrix.page(found)
    assert "| 2.15.0 | 3.12.1 | 1 of 1 | 2 | 2 | 1 | 3 | abc1234, def5678 |" in text.splitlines()
    assert "`tests.a::two` failed at first and passed in a later run" in text


def test_a_test_with_other_parameters_is_another_one(tmp_path: Path) -> None:
    first = REPORT.replace('name="two"', 'name="two[a]"').replace('name="three"', 'name="three[a]"')
    later = LATER.replace('name="one"', 'name="three[b]"').replace('name="two"', 'name="two[a-aten]"')
    (tmp_path / "a.xml").write_text(first)
    (tmp_path / "b.xml").write_text(later)
    outcome = matrix.together(tmp_path.glob("*.xml"))["2.15.0", "3.12.1"]
    assert outcome.mended == ["tests.a::two[a] (now with other parameters)"]
    # Where some of a test's parameters ran again, that says nothing of the others.
    (tmp_path / "b.xml").write_text(later.replace('name="two[a-aten]"', 'name="two[a]"').replace("three[b]", "two[b]"))
    outcome = matrix.together(tmp_path.glob("*.xml"))["2.15.0", "3.12.1"]
    assert outcome.failed == ["tests.b::three[a]", "tests.a::two[b]"] and outcome.mended == ["tests.a::two[a]"]


def test_the_table_has_a_line_for_each_pair() -> None:
    text = matrix.table([("2.15.0", "3.12.1", "19 of 19", "5", "0", "1", "8", "abc1234")])
    assert text.splitlines()[-1] == "| 2.15.0 | 3.12.1 | 19 of 19 | 5 | 0 | 1 | 8 | abc1234 |"


def test_a_report_says_what_ran() -> None:
    words = matrix.label("2.15.0", "3.12.1").split()
    assert words[:5] == ["torch", "2.15.0", "python", "3.12.1", "commit"] and len(words) == 6
