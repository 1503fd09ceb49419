"""What is printed of joint graphs, compiled graphs and entries."""

from __future__ import annotations

import re
import warnings

import pytest
import torch

import dovetail
from dovetail import JointGraph


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.q(x)
        return torch.softmax(scores, -1) @ x


class Blocks(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([Attention(), Attention()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.sum()


def groups(text: str, phase: str) -> list[str]:
    """The headings of a phase."""
    part = text.split(f"\n{phase}:\n")[1].split("\noutputs:")[0].split("\nbackward:")[0]
    return re.findall(r"^  (\S.*):$", part, re.MULTILINE)


@pytest.fixture
def joint() -> JointGraph:
    return dovetail.capture(Blocks(), (torch.randn(4, 4),))


def test_operators_stand_under_their_module(joint: JointGraph) -> None:
    text = str(joint)
    assert groups(text, "forward") == ["blocks.0.q", "blocks.0", "Blocks", "blocks.1.q", "blocks.1", "Blocks"]
    backward = groups(text, "backward")
    assert backward[0] == "Blocks" and backward.index("blocks.1") < backward.index("blocks.0.q")


def test_a_source_line_stands_once_above_its_operators(joint: JointGraph) -> None:
    forward = str(joint).split("\nforward:\n")[1].split("\nbackward:")[0]
    assert forward.count("scores = self.q(x)") == 2
    assert forward.count("return torch.softmax(scores, -1) @ x") == 2


def test_modules_of_a_plain_function_are_named_by_where_they_are_read() -> None:
    module = Attention()

    def function(x: torch.Tensor) -> torch.Tensor:
        return module(x * 2)

    text = str(dovetail.capture(function, (torch.randn(4, 4),)))
    # The first operator belongs to no module.
    assert text.split("\nforward:\n")[1].startswith("    # test_printing.py")
    inner, outer = groups(text, "forward")
    assert inner == f"{outer}.q"


def test_who_made_it_and_how_long_it_took(joint: JointGraph) -> None:
    assert re.search(r"joint graph of Blocks: 5 inputs, .* captured in \d+\.\d ms$", str(joint).splitlines()[0])
    edited = joint.apply(dovetail.aot.passes.clip_gradients(1.0))
    head = str(edited).splitlines()[:2]
    assert head[0].endswith("ms, 1 pass")
    assert re.fullmatch(r"  pass clip: \d+ -> \d+ nodes in \d+\.\d ms", head[1])


def test_reprs_are_one_line_for_a_terminal_and_markdown_for_a_notebook(joint: JointGraph) -> None:
    assert repr(joint).startswith("<joint graph of Blocks: 5 inputs") and "\n" not in repr(joint)
    markdown = joint._repr_markdown_()
    assert markdown.startswith("**joint graph of Blocks") and "blocks.1.q" in markdown
    # Names such as L['x'] and signs such as < must not be taken for markup.
    assert "<lambda>" not in dovetail.capture(lambda x: x * 2, (torch.ones(2),))._repr_markdown_().split("<pre>")[1]
    compiled = joint.compile("aten")
    assert repr(compiled).endswith("compiled by aten>") and "\n" not in repr(compiled)


def test_the_repr_of_an_entry_says_what_it_does() -> None:
    module = Blocks()
    compiled = dovetail.compile(module, backend="aten")
    compiled(torch.randn(4, 4))
    (entry,) = compiled.compiled_call.entries
    assert repr(entry).startswith("<entry of the whole call: joint graph of Blocks") and "\n" not in repr(entry)


def test_entries_and_compiled_graphs_are_pages_in_a_notebook() -> None:
    def step(x: torch.Tensor, tag: str) -> torch.Tensor:
        return x if tag == "<b>" else x * 2

    step.__qualname__ = "<script>"
    compiled = dovetail.compile(step, backend="aten")
    compiled(torch.ones(2), "<i>")
    (entry,) = compiled.entries
    for page in (entry._repr_html_(), entry.compiled._repr_html_()):
        assert page.startswith("<p>") and "mul.Tensor(" in page and "<summary>graph</summary>" in page
        assert "<script>" not in page and "&lt;script&gt;" in page and "<i>" not in page
    assert "&lt;i&gt;" in entry._repr_html_() and "saved_bytes" not in repr(entry)


def test_an_entry_that_runs_eagerly_says_why_in_a_notebook() -> None:
    compiled = dovetail.compile(lambda x: x if x.sum() > 0 else -x, backend="aten")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled(torch.ones(2))
    page = compiled.entries[-1]._repr_html_()
    assert "entry that runs eagerly" in page or "up to a graph break" in page
    assert "a branch depends on the values of a tensor" in page or "<summary>guards</summary>" in page


def test_an_explanation_and_a_log_are_tables_in_a_notebook() -> None:
    compiled = dovetail.compile(lambda x: x * 2, backend="aten")
    compiled(torch.ones(2))
    explanation = dovetail.explain(compiled)(torch.ones(2))
    assert repr(explanation).startswith("1 compiled entry\n  entry 0: hit")
    assert explanation._repr_html_().startswith("<p>1 compiled entry</p><ol start='0'><li><pre>hit</pre></li></ol>")
    log = dovetail.events_of(compiled)
    log.note("decision", reason="a < b")
    assert "\n  capture " in repr(log) and repr(log).endswith("\n  decision (reason=a < b)")
    html = log._repr_html_()
    assert "<tr><td>decision</td><td></td><td>reason: a &lt; b</td></tr>" in html


def test_the_program_backend_has_no_partition(joint: JointGraph) -> None:
    assert str(joint.compile("eager")) == "compiled by eager: the program, call by call"
