"""Run typical mistakes under torch.compile and under Dovetail, and write the table of ``docs/messages.md``.

Counted are the lines that each prints, as a terminal of 100 columns shows them.

python benchmarks/messages.py docs/messages.md [--show NAME]
"""

from __future__ import annotations

import functools
import sys
import tempfile
from pathlib import Path

import torch

import dovetail

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.face.mistakes import MISTAKES, Mistake, lines_of, printed

BEGIN, END = "<!-- table: benchmarks/messages.py -->\n", "<!-- end of the table -->\n"


#: Without a function around them, which a traceback would show.
COMPILERS = {
    "torch.compile": functools.partial(torch.compile, backend="aot_eager"),
    "Dovetail": functools.partial(dovetail.compile, backend="aten"),
}


def outputs(mistake: Mistake) -> dict[str, str]:
    """What each prints."""
    found = {}
    for name, compiler in COMPILERS.items():
        torch._dynamo.reset()
        with tempfile.TemporaryDirectory() as folder:
            found[name] = printed(mistake, compiler, Path(folder), ours=name == "Dovetail")
    return found


def names_line(text: str, mistake: Mistake) -> str:
    """Whether the user's line is in a message; nothing where there is none."""
    if not text:
        return ""
    return "yes" if mistake.line and mistake.line in text else "no"


def main() -> None:
    """Write the table into the page that is named, or show one program's messages."""
    rows = [
        "| Mistake | torch.compile: lines | names your line | Dovetail: lines | names your line |",
        "|---|---|---|---|---|",
    ]
    for mistake in MISTAKES:
        if sys.argv[2:3] == ["--show"] and mistake.name not in sys.argv[3:]:
            continue
        found = outputs(mistake)
        if sys.argv[2:3] == ["--show"]:
            print(*(f"--- {name}\n{text}" for name, text in found.items()), sep="\n")
        cells = [
            cell for text in found.values() for cell in (str(lines_of(text) or "silent"), names_line(text, mistake))
        ]
        rows.append(f"| {mistake.name} | {' | '.join(cells)} |")
    print(*rows, sep="\n")
    if sys.argv[2:3] != ["--show"]:
        page = Path(sys.argv[1])
        before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
        after = rest.partition(END)[2]
        page.write_text(before + BEGIN + "\n".join(rows) + "\n" + END + after, encoding="utf-8")


if __name__ == "__main__":
    main()
