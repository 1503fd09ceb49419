"""Tools that all benchmarks share: flags, rounds in alternating order, examples as modules, and raw numbers saved as JSON."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

# What is measured is what was asked for, from the first call on; the benchmark of tiers asks for them.
os.environ.setdefault("DOVETAIL_TIERS", "wait")
RESULTS = Path(__file__).parent / "results"
EXAMPLES = Path(__file__).parents[1] / "examples"


def make_parser(text: str | None, *, rounds: int) -> argparse.ArgumentParser:
    """Return a parser with the flags of every benchmark; ``text`` is the benchmark's docstring."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=positive, default=rounds, help=f"measured rounds ({rounds})")
    parser.add_argument("--threads", type=positive, default=os.cpu_count() or 1, help="torch's threads (all cores)")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the raw numbers")
    return parser


def positive(text: str) -> int:
    """Read a flag that is a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def alternating(names: Sequence[str], rounds: int) -> Iterator[tuple[int, str]]:
    """Yield (round, name) with all names in every round, and their order reversed from round to round."""
    for number in range(rounds):
        for name in names if number % 2 else reversed(names):
            yield number, name


def relative_difference(actual: Sequence[float], expected: Sequence[float]) -> float:
    """Return the largest relative difference of two series of losses."""
    return max(abs(one - other) / max(abs(other), 1e-12) for one, other in zip(actual, expected, strict=True))


def load_example(name: str) -> Any:
    """Load a program of ``examples/`` as a module."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # torch.compile looks for the module by its name.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def describe(error: BaseException) -> str:
    """Return the type and the first line of an error."""
    lines = [text for text in str(error).strip().splitlines() if text]
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"


def save(name: str, options: argparse.Namespace, **numbers: Any) -> Path:
    """Write the raw numbers of a benchmark to a new file in ``options.output``, say so, and return its path."""
    now = datetime.now(UTC)
    options.output.mkdir(parents=True, exist_ok=True)
    target: Path = options.output / f"{name}-{now:%Y%m%d-%H%M%S}.json"
    about = {
        "when": now.isoformat(timespec="seconds"),
        "machine": {"platform": platform.platform(), "cores": os.cpu_count(), "python": platform.python_version()},
        "torch": torch.__version__,
        "settings": {key: value for key, value in vars(options).items() if key != "output"},
        **numbers,
    }
    target.write_text(json.dumps(about, indent=1, default=str), encoding="utf-8")
    print(f"wrote {target}")
    return target


def peak_of_tensors(run: Callable[[], None]) -> int:
    """Return the most bytes that torch's allocator held at once during a run, of those that it allocated meanwhile.

    The profiler does not see what another thread frees, such as that of gloo: there the next block at the same address tells.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        rows = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    held: dict[int, int] = {}
    total = peak = 0
    for row in sorted((row for row in rows if row.get("name") == "[memory]"), key=lambda row: row["ts"]):
        size, address = row["args"]["Bytes"], row["args"]["Addr"]
        total += size - (held.pop(address, 0) if size > 0 else 0)
        if size > 0:
            held[address] = size
        else:
            held.pop(address, None)
        peak = max(peak, total)
    return peak
