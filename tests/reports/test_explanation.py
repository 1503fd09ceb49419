"""``dovetail.explain(compiled)`` without a call says what there is so far."""

from __future__ import annotations

import torch

import dovetail


def test_it_can_be_printed_before_and_after_calls() -> None:
    compiled = dovetail.compile(lambda x: x * 2, backend="aten")
    assert str(dovetail.explain(compiled)).startswith("0 compiled entries")
    compiled(torch.ones(2))
    explainer = dovetail.explain(compiled)
    lines = str(explainer).splitlines()
    assert lines[0] == "1 compiled entry" and lines[1] == "  entry 0: compiled"
    assert "dovetail.explain(compiled)(*args)" in lines[-1]
    assert "compiled" in explainer._repr_html_() and "<function" not in repr(explainer)
    # It was shown and not called: nothing was captured for that.
    assert len(explainer(torch.ones(2)).entries) == 1
    assert explainer(torch.ones(2)).entries == ("hit",)
    assert "miss" in explainer(torch.ones(2, dtype=torch.int32)).entries[0]
