"""The benchmarks run from end to end; how fast anything is, is not a test's business."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A benchmark, of the package beside these tests."""
    command = [sys.executable, str(ROOT / "benchmarks" / script), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


@pytest.mark.slow
def test_bench_capture_measures_both_compilers_and_saves_every_round(tmp_path: Path) -> None:
    sizes = ["--layers=1", "--width=24", "--block=8", "--batch=2", "--threads=1", "--rounds=2"]
    done = run("bench_capture.py", *sizes, f"--output={tmp_path}")
    assert done.returncode in (0, 1), done.stderr  # 1: slower than promised, which noise can do at this size
    assert "Dovetail / torch.compile: graphs ready" in done.stdout, done.stdout + done.stderr
    (saved,) = tmp_path.glob("capture-*.json")
    data = json.loads(saved.read_text())
    assert set(data["ratios"]) == {"graphs_ready", "first_forward", "first_step", "capture"}
    for name in ("torch.compile (aot_eager)", "Dovetail (aten)"):
        assert len(data["rounds"][name]) == 2
        assert all(result["graphs_ready"] > 0 for result in data["rounds"][name])


@pytest.mark.slow
def test_bench_overhead_measures_both_compilers_and_saves_every_round(tmp_path: Path) -> None:
    done = run("bench_overhead.py", "--models", "3 modules", "--rounds=2", f"--output={tmp_path}")
    assert done.returncode in (0, 1), done.stderr
    assert "worst ratio" in done.stdout, done.stdout + done.stderr
    (saved,) = tmp_path.glob("overhead-*.json")
    data = json.loads(saved.read_text())
    assert set(data["ratios"]) == {"3 modules, inference", "3 modules, training"}
    for result in data["results"].values():
        for name in ("torch.compile", "Dovetail", "Dovetail's guards alone"):
            assert len(result["seconds"][name]) == 2 and min(result["seconds"][name]) > 0


@pytest.mark.slow
def test_bench_second_order_saves_every_round_and_has_eagers_losses(tmp_path: Path) -> None:
    arguments = ["--examples", "hessian_vector", "--backend", "aten", "--rounds", "2", "--steps", "1", "--threads", "1"]
    done = run("second_order.py", *arguments, "--output", str(tmp_path))
    assert done.returncode == 0, done.stderr
    (saved,) = tmp_path.glob("second-order-*.json")
    results = json.loads(saved.read_text(encoding="utf-8"))["results"]
    assert set(results) == {"hessian_vector, part", "hessian_vector, whole"}
    for result in results.values():
        assert result["dovetail_difference"] < 1e-6
        assert {len(times) for times in result["seconds_per_step"].values()} == {2}
