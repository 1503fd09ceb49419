"""The benchmark runs from end to end; how fast anything is, is not a test's business."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "bench_capture.py"


def test_bench_capture_measures_both_compilers_and_saves_every_round(tmp_path: Path) -> None:
    sizes = ["--layers=1", "--width=24", "--block=8", "--batch=2", "--threads=1", "--rounds=2"]
    command = [sys.executable, str(SCRIPT), *sizes, f"--output={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode in (0, 1), done.stderr  # 1: slower than promised, which noise can do at this size
    assert "Dovetail / torch.compile: graphs ready" in done.stdout, done.stdout + done.stderr
    (saved,) = tmp_path.glob("capture-*.json")
    data = json.loads(saved.read_text())
    assert set(data["ratios"]) == {"graphs_ready", "first_forward", "first_step", "capture"}
    for name in ("torch.compile (aot_eager)", "Dovetail (aten)"):
        assert len(data["rounds"][name]) == 2
        assert all(result["graphs_ready"] > 0 for result in data["rounds"][name])
