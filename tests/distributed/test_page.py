"""The script of ``docs/from-one-machine-to-many.md``: alone, under torchrun, and started again after a process has died."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "from-one-machine-to-many.md"


def script() -> str:
    text = PAGE.read_text(encoding="utf-8")
    return text.split('```py title="train.py"\n')[1].split("```")[0]


def result(folder: Path, text: str, *launcher: str) -> float:
    """What the script prints."""
    folder.mkdir()
    (folder / "train.py").write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DOVETAIL_CACHE_DIR": str(folder)}
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # as the page says: torchrun may wait for ever without it
    found = subprocess.run(
        [sys.executable, *launcher, "train.py"],
        cwd=folder,
        env=environment,
        timeout=280,
        check=True,
        capture_output=True,
    )
    return float(found.stdout.split()[-1])


@pytest.mark.slow
def test_the_script_alone_and_on_two_processes(tmp_path: Path) -> None:
    text = script().replace("@data_parallel\n", '@functools.partial(data_parallel, backend="aten")\n')
    text = text.replace("import os\n", "import functools\nimport os\n", 1)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=3")
    two = result(tmp_path / "two", text, *torchrun)
    assert abs(result(tmp_path / "alone", text) - two) < 2e-3
    # The last process dies in front of a step, once.
    first = 'os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"'
    dying = text.replace(
        "    step(x", f"    if number == 7 and rank == 1 and {first}:\n        os._exit(3)\n    step(x", 1
    )
    assert dying != text
    assert result(tmp_path / "broken", dying, *torchrun) == two
