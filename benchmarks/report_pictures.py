"""Make the pictures of ``docs/report.md``: reports of a small GPT, measured too, of 60 graph breaks, and of 5,000 nodes.

    python benchmarks/report_pictures.py docs/images [NAME ...]

It needs Chromium or Chrome; ``DOVETAIL_BROWSER`` names another one.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import dovetail
from dovetail.cli.gpt import GPT, GPTConfig

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


def small_gpt() -> Any:
    """Two calls of a small GPT, the second one with another number of tokens."""
    torch.manual_seed(1)
    model = GPT(GPTConfig(vocabulary=64, block=32, layers=2, heads=2, width=32))
    compiled = dovetail.compile(model, backend="inductor", tiers="wait")
    for length in (16, 24):
        compiled(torch.zeros(2, length, dtype=torch.long)).sum().backward()
    return compiled


def larger_gpt() -> Any:
    """The model of ``dovetail demo``, large enough to be measured."""
    torch.manual_seed(1)
    model = GPT(GPTConfig(vocabulary=64, block=64, layers=2, heads=4, width=128))
    compiled = dovetail.compile(model, backend="aten")
    compiled(torch.zeros(8, 64, dtype=torch.long)).sum().backward()
    return compiled


def sixty_breaks() -> Any:
    """A graph break at 60 places."""
    lines = [f"    x = (x * {number + 1}).sin()\n    print(end='')" for number in range(60)]
    folder = Path(tempfile.mkdtemp())
    (folder / "breaks.py").write_text("\n".join(["def program(x):", *lines, "    return x", ""]), encoding="utf-8")
    namespace: dict[str, Any] = {}
    source = folder / "breaks.py"
    exec(compile(source.read_text(encoding="utf-8"), str(source), "exec"), namespace)
    compiled = dovetail.compile(namespace["program"], backend="aten")
    compiled(torch.ones(3))
    return compiled


def large_step() -> Any:
    """A forward and backward of 5,000 operators."""
    parts = [part for _ in range(210) for part in (torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.GELU())]
    compiled = dovetail.compile(torch.nn.Sequential(*parts), backend="aten")
    compiled(torch.ones(2, 8)).sum().backward()
    return compiled


_ONLY_MEASURED = """for (const item of document.querySelectorAll("header, nav, h3, .times, .panes, section > p, h2")) item.remove();
document.querySelector(".columns").style.display = "block";"""
#: The program, whether the picture is dark, and what is done in the page before.
PICTURES: dict[str, tuple[Callable[[], Any], bool, str]] = {
    "report": (small_gpt, False, "mark(1, 10)"),
    "report-measured": (larger_gpt, False, _ONLY_MEASURED),
    "report-breaks": (sixty_breaks, False, ""),
    "report-large": (large_step, True, "mark(1, 12)"),
}
_MARK = """<script>
const mark = (list, row) => document.querySelectorAll(".list")[list].querySelectorAll(".row.has")[row]
  .dispatchEvent(new MouseEvent("click", { bubbles: true }));
setTimeout(() => { %s }, 200);
</script></body>"""


def main() -> None:
    """Write the pictures to the folder that is named."""
    folder, names = Path(sys.argv[1]), sys.argv[2:] or list(PICTURES)
    folder.mkdir(parents=True, exist_ok=True)
    browser = os.environ.get("DOVETAIL_BROWSER") or next(filter(None, map(shutil.which, BROWSERS)))
    warnings.simplefilter("ignore")
    sys.argv[:] = ["train.py"]
    for name in names:
        make, is_dark, action = PICTURES[name]
        with tempfile.TemporaryDirectory() as work:
            page = dovetail.report(make(), f"{work}/page.html", measure=name == "report-measured")
            root = f"{Path(__file__).parent.parent}/"
            text = page.read_text(encoding="utf-8").replace(root, "").replace("</body>", _MARK % action)
            if is_dark:
                text = text.replace("(prefers-color-scheme: dark)", "all")
            page.write_text(text, encoding="utf-8")
            options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=3000"]
            command = [
                browser,
                *options,
                f"--user-data-dir={work}/browser",
                f"--window-size=1280,{1400 if name == 'report-measured' else 860}",
            ]
            subprocess.run(
                [*command, f"--screenshot={folder.absolute()}/{name}.png", page.as_uri()],
                check=True,
                capture_output=True,
            )
        _shrink(folder / f"{name}.png")


def _shrink(picture: Path) -> None:
    """Keep 64 colours, where Pillow is installed."""
    if importlib.util.find_spec("PIL") is not None:
        from PIL import Image

        Image.open(picture).convert("RGB").quantize(64).save(picture, optimize=True)


if __name__ == "__main__":
    main()
