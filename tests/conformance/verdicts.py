"""Verdicts on one call, on all samples of an operator or a module, and how they are counted and printed.

Both runners share this: :mod:`tests.conformance.opinfo_runner` and :mod:`tests.conformance.module_runner`.
"""

from __future__ import annotations

import collections
import random
import re
import sys
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.conformance.compilers import refusal_types

# Worst first: an operator's verdict is the worst of its samples.
VERDICTS = ("wrong", "error", "refused", "passed", "eager cannot", "not applicable")


# The kind of a "passed" that is eager's but for the order of a sum, see tests/conformance/rounding.py.
ROUNDING = "by rounding"


@dataclass
class SampleResult:
    """What became of one sample (or of a whole operator, where its process died)."""

    verdict: str
    kind: str = ""
    reason: str = ""
    sample: int = -1


@dataclass
class OperatorResult:
    """All samples of one operator, by variant."""

    name: str
    samples: dict[str, list[SampleResult]] = field(default_factory=dict)
    seconds: float = 0.0

    def verdict(self, variant: str) -> str:
        """The worst verdict among the samples; a sample that eager cannot run says nothing about the others."""
        found = {sample.verdict for sample in self.samples.get(variant, ())}
        return next((verdict for verdict in VERDICTS if verdict in found), "not applicable")

    @staticmethod
    def from_json(data: dict[str, Any]) -> OperatorResult:
        """Rebuild from what :func:`dataclasses.asdict` made."""
        samples = {key: [SampleResult(**entry) for entry in value] for key, value in data["samples"].items()}
        return OperatorResult(data["name"], samples, data["seconds"])


def seed_everything() -> None:
    """Every generator that a sample may draw from, to one state."""
    torch.manual_seed(0)
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)


def cotangent_like(root: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """A cotangent in the layout of its output, which is what autograd hands on between operators."""
    if root.layout != torch.strided or 0 in root.stride():
        return values.to(root.dtype)
    return torch.empty_strided(root.shape, root.stride(), dtype=root.dtype).copy_(values.to(root.dtype))


def first_line(text: str) -> str:
    """The start of a message, in one line."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    return " | ".join(lines[:3])[:500]


def failure(error: Exception) -> SampleResult:
    """The verdict on a compiled call that raised: a refusal where the error is one by its type."""
    kind, text = type(error).__name__, first_line(str(error))
    if isinstance(error, refusal_types()):
        return SampleResult("refused", kind, text)
    frames = traceback.extract_tb(error.__traceback__)
    place = f" [{Path(frames[-1].filename).name}:{frames[-1].lineno}]" if frames else ""
    return SampleResult("error", kind, text + place)


def totals(results: Sequence[OperatorResult], variants: Iterable[str]) -> dict[str, dict[str, int]]:
    """How many operators got which verdict, for each variant."""
    return {
        variant: {verdict: sum(result.verdict(variant) == verdict for result in results) for verdict in VERDICTS}
        for variant in variants
    }


def _cause(text: str) -> str:
    """A reason with what is particular to one operator taken out, so that equal causes count together."""
    text = re.sub(r"'[^']*'|\"[^\"]*\"|`[^`]*`", "'…'", text)
    text = re.sub(r"0x[0-9a-f]+", "0x…", text)
    return re.sub(r"\d+(\.\d+)?(e-?\d+)?", "#", text)[:160]


def grouped(results: Sequence[OperatorResult], verdicts: Iterable[str]) -> list[tuple[str, str, list[str], str]]:
    """Failures by cause, most frequent first: verdict, cause, operators (with variant), and one full reason."""
    groups: dict[tuple[str, str], list[str]] = collections.defaultdict(list)
    example: dict[tuple[str, str], str] = {}
    wanted = set(verdicts)
    for result in results:
        for variant, samples in result.samples.items():
            for sample in samples:
                if sample.verdict in wanted:
                    key = (sample.verdict, f"{sample.kind}: {_cause(sample.reason)}")
                    label = f"{result.name}/{variant}"
                    if label not in groups[key]:
                        groups[key].append(label)
                    example.setdefault(key, sample.reason)
    order = sorted(groups, key=lambda key: (VERDICTS.index(key[0]), -len(groups[key])))
    return [(key[0], key[1], groups[key], example[key]) for key in order]


def summary(results: Sequence[OperatorResult], variants: Iterable[str]) -> str:
    """The totals, then the failures by cause."""
    lines = [f"{'':10}" + "".join(f"{verdict:>16}" for verdict in VERDICTS) + f"{'passed, %':>12}"]
    for variant, counts in totals(results, variants).items():
        asked = sum(counts[verdict] for verdict in ("wrong", "error", "refused", "passed"))
        share = f"{100 * counts['passed'] / asked:.1f}" if asked else "-"
        lines.append(f"{variant:10}" + "".join(f"{counts[verdict]:16}" for verdict in VERDICTS) + f"{share:>12}")
    rounded = [
        result.name
        for result in results
        if any(sample.kind == ROUNDING for samples in result.samples.values() for sample in samples)
    ]
    if rounded:
        lines += ["", f"passed by rounding, checked in float64 x{len(rounded)}", f"    in {', '.join(rounded)}"]
    for verdict, cause, names, reason in grouped(results, ("wrong", "error", "refused")):
        shown = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
        lines += ["", f"{verdict} x{len(names)}  {cause}", f"    in {shown}", f"    such as: {reason[:300]}"]
    return "\n".join(lines)
