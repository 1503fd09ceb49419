"""The tables in which rules register themselves."""

from __future__ import annotations

import pytest

from dovetail.frontend.rules import Table


def test_two_rules_for_one_function_are_an_error() -> None:
    table: Table[object] = Table()  # type: ignore[type-var]
    table("one")(len)
    with pytest.raises(ValueError, match="'one'.* a rule already"):
        table("one", "two")(repr)
    assert table == {"one": len}
    table["one"] = repr
    assert table == {"one": repr}
