"""``benchmarks/gpu.py`` goes through, on the CPU with the simulated recorder where there is no GPU."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

PATH = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    spec = importlib.util.spec_from_file_location("bench_gpu", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "bench_gpu", module)
    monkeypatch.syspath_prepend(PATH.parent)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_engines_train_alike(
    bench: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engines = ["eager", "Dovetail, aten", "Dovetail, aten, whole step"]
    monkeypatch.setattr(bench, "ENGINES", {name: bench.ENGINES[name] for name in engines})
    # A few layers say as much as many.
    short = lambda small: (bench.Narrow(depth=2).to(bench.DEVICE), bench.narrow(small)[1])  # noqa: E731
    monkeypatch.setattr(bench, "MODELS", {"many small kernels": short})
    simulate = [] if torch.cuda.is_available() else ["--simulate"]
    arguments = ["--small", "--rounds=1", "--steps=1", f"--output={tmp_path}", *simulate]
    monkeypatch.setattr(sys, "argv", ["gpu.py", *arguments])
    precision = torch.get_float32_matmul_precision()
    try:
        assert bench.main() == 0
    finally:
        torch.set_float32_matmul_precision(precision)
    printed = capsys.readouterr().out
    (saved,) = tmp_path.glob("gpu-*.json")
    rows = json.loads(saved.read_text())["results"]["many small kernels"]
    assert list(rows) == engines
    for name in engines:
        assert name in printed
        assert rows[name].get("failed") is None
        assert rows[name]["loss_difference"] == 0.0, "the operators are eager's"


def test_without_a_gpu_it_says_so(
    bench: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    assert bench.main() == 0
    assert "no CUDA device" in capsys.readouterr().out
