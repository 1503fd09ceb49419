"""Hugging Face models with changing batch sizes and sequence lengths: one more call that compiles, and eager's numbers each time.

``python -m tests.conformance.dynamic_runner --models bert,gpt2``; ``all`` takes every family of the model runner. Shown are
the graphs after each of the first sizes, and after all.

A model that has more than two graphs after the first sizes is then called with every length of a range, twice. It has
``passed`` where the graphs were all there after the second call that compiled: a program that compares its sizes with a
number of its own (a window of attention) has a graph for each side of that comparison. ``branches`` is the verdict where
later calls compiled a side, but the second round of lengths nothing; ``grows`` where that did too.

A model that is refused in one graph, or grows in one, is tried once more with graph breaks: ``breaks`` is the verdict where the
numbers are eager's at all sizes and the second round has compiled nothing; the captures are those of all its parts. Shown
too are the entries of each part after each of the first sizes and after all, whether each was compiled at most once more at the
second size and none later for its sizes (``once more``), and why anything was compiled after the second size. That is ``by data``
where the guards that failed ask for nothing but what an instruction has given that ran for real at a graph break, or where that
led to a part that no call had reached. A model whose first sizes are all of one length, since eager takes no other, sees ``a
first change`` where a later one differs.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
import traceback
import warnings
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

import dovetail
from tests.conformance.model_runner import FACTORIES, _step, build
from tests.conformance.more_models import BATCH, LENGTH, Batch
from tests.differential import Difference, differences

SHAPES = ((2, 12), (3, 9), (5, 7), (4, 11))
LIMIT_WITH_BREAKS = 64
BY_DATA, BY_SIZES, BY_A_FIRST_CHANGE = "by data", "by sizes", "by a first change"
SWEEP = tuple((rows, length) for length in range(LENGTH, 3, -1) for rows in (2, 4))


def resized(batch: Batch, rows: int, length: int) -> Batch:
    """A batch with other sizes, made of the same values; the last token stays last."""
    result: Batch = {}
    for name, value in batch.items():
        if isinstance(value, torch.Tensor) and value.dim() and value.shape[0] == BATCH:
            value = value[torch.arange(rows) % BATCH]
            if value.dim() == 2 and value.shape[1] == LENGTH and not value.is_floating_point():
                columns = torch.arange(length) % LENGTH
                columns[-1] = LENGTH - 1
                value = value[:, columns]
        result[name] = value
    return result


def _taken_by_eager(model: torch.nn.Module, batch: Batch) -> tuple[tuple[int, int], ...]:
    """The first sizes, with the nearest length that eager takes in the place of one that it raises for."""
    probe = copy.deepcopy(model)
    found = []
    for rows, length in SHAPES:
        for other in sorted(range(4, LENGTH + 1), key=lambda near: abs(near - length)):
            if _is_taken(probe, resized(batch, rows, other)):
                found.append((rows, other))
                break
    return tuple(found)


def _is_taken(probe: torch.nn.Module, batch: Batch) -> bool:
    try:
        _step(probe, probe, batch, 3)
    except (RuntimeError, ValueError, IndexError):
        return False
    return True


@dataclass
class DynamicResult:
    """What became of one model."""

    model: str
    verdict: str
    entries: list[int]
    reason: str = ""
    seconds: float = 0.0
    parts: dict[str, list[int]] = field(default_factory=dict)
    once_more: bool | None = None
    late: list[str] = field(default_factory=list)


def _differences(expected: Any, actual: Any) -> list[Difference]:
    return [
        *differences(expected.outputs, actual.outputs, "outputs"),
        *differences(expected.gradients, actual.gradients, "gradients"),
        *differences(expected.buffers, actual.buffers, "buffers"),
    ]


def check_model(name: str) -> DynamicResult:
    """One training step for each of the sizes, in eager and compiled; with graph breaks where it takes them."""
    outcome = _check(name, fullgraph=True)
    if outcome.verdict not in ("refused", "grows"):
        return outcome
    broken = _check(name, fullgraph=False)
    broken.seconds += outcome.seconds
    broken.reason = f"in one graph: {outcome.verdict}: {outcome.reason[:300]}; with breaks: {broken.reason}"
    return broken


def _note_parts(compiled: Any, result: DynamicResult) -> None:
    """Add the number of entries of each part."""
    call = compiled.compiled_call
    calls = 1 + max((len(counts) for counts in result.parts.values()), default=0)
    for position, part in enumerate((call, *call.continuations())):
        name = "start" if position == 0 else f"{position}: {part.__qualname__.rsplit('going on at ')[-1].rstrip(')')}"
        counts = result.parts.setdefault(name, [0] * (calls - 1))
        counts.append(sum(entry.run is not None for entry in part.entries))


def _once_more(parts: dict[str, list[int]], late: list[str]) -> bool:
    """Whether each part was compiled at most once more at the second size, and nothing for its sizes later."""
    grown = all(counts[1] <= max(1, 2 * counts[0]) for counts in parts.values())
    return grown and not any(item.startswith(BY_SIZES) for item in late)


def _late(
    events: list[Any], parts: dict[str, list[int]], before: list[tuple[int, int]], sizes: tuple[int, int]
) -> list[str]:
    """What a call has compiled after the second size, each with its cause; ``before`` are the sizes of the calls so far."""
    seen = [set(column) for column in zip(*before, strict=True)]
    is_first = any(len(known) == 1 and now not in known for known, now in zip(seen, sizes, strict=True))
    by_sizes = BY_A_FIRST_CHANGE if is_first else BY_SIZES
    missed = [item for item in events if item.name == "recompile"]
    found = [f"{BY_DATA if 'decided_by' in item.details else by_sizes} {sizes}: {item}" for item in missed]
    new = [name for name, counts in parts.items() if counts[-1] and not any(counts[:-1])]
    # Where nothing was compiled for other sizes, the way to a new part was chosen at a break.
    cause = by_sizes if any(item.startswith(by_sizes) for item in found) else BY_DATA
    return [*found, *(f"{cause} {sizes}: reached for the first time: {name}" for name in new)]


def _captures(compiled: Any, fullgraph: bool) -> int:
    if fullgraph:
        return len(compiled.compiled_call.entries)
    return sum(event.name == "compile" for event in dovetail.events_of(compiled).events)


def _has_whole_calls(compiled: Any) -> bool:
    """Whether a graph has a whole call in it, such as a recurrent network."""
    graphs = [entry.compiled.joint.graph for entry in compiled.compiled_call.entries if entry.compiled is not None]
    return any("dovetail.whole_call" in str(node.target) for graph in graphs for node in graph.nodes)


def _check(name: str, fullgraph: bool) -> DynamicResult:
    started = time.perf_counter()
    model, batches = build(name)
    model.train()
    twin = copy.deepcopy(model)
    outcome = DynamicResult(name, "passed", [])
    # A loop over layers with a break in it has an entry for each layer.
    limit = {} if fullgraph else {"recompile_limit": LIMIT_WITH_BREAKS}
    compiled: Any = dovetail.compile(twin, backend="aten", fullgraph=fullgraph, **limit)
    shapes = _taken_by_eager(model, batches[0])
    probe = copy.deepcopy(model)
    seen = 0
    called: list[tuple[int, int]] = []
    try:
        for rows, length in (*shapes, *SWEEP, *SWEEP):
            if len(outcome.entries) == len(SHAPES) and outcome.entries[-1] <= 2:
                break
            batch = resized(batches[0], rows, length)
            if len(outcome.entries) >= len(SHAPES) and not _is_taken(probe, batch):
                outcome.entries.append(outcome.entries[-1])
                continue
            expected = _step(model, model, batch, 3)
            actual = _step(twin, compiled, batch, 3)
            found = _differences(expected, actual)
            if not fullgraph or _has_whole_calls(compiled):
                # A tensor that two graphs share, or a loop that is one call and what comes after it, gets its gradient as a
                # sum of theirs: the same terms in another order.
                found = [difference for difference in found if difference.kind != "values, by rounding"]
            if found and all(item.kind.startswith("values") for item in found):
                # A model that asks whether it is compiled takes another algorithm; on that branch the numbers are eager's.
                with mock.patch("torch.compiler.is_compiling", lambda: True):
                    found = _differences(_step(model, model, batch, 3), actual)
            if found:
                outcome.verdict = "wrong"
                outcome.reason = f"{(rows, length)}: " + "; ".join(str(item) for item in found[:3])
                return outcome
            outcome.entries.append(_captures(compiled, fullgraph))
            if not fullgraph:
                _note_parts(compiled, outcome)
                events = dovetail.events_of(compiled).events
                if len(outcome.entries) > 2:
                    outcome.late += _late(events[seen:], outcome.parts, called, (rows, length))
                called.append((rows, length))
                seen = len(events)
    except Exception as error:
        outcome.verdict = "refused" if isinstance(error, dovetail.errors.DovetailError) else "error"
        frames = traceback.extract_tb(error.__traceback__)
        outcome.reason = f"{type(error).__name__}: {error} [{frames[-1].filename}:{frames[-1].lineno}]"
        return outcome
    finally:
        outcome.seconds = round(time.perf_counter() - started, 2)
    events = [event for event in dovetail.events_of(compiled).events if event.name in ("static shapes", "recompile")]
    if not fullgraph:
        events = [event for event in dovetail.events_of(compiled).events if event.name == "graph break"]
        outcome.once_more = _once_more(outcome.parts, outcome.late)
        outcome.parts = {name: [*counts[: len(SHAPES)], counts[-1]] for name, counts in outcome.parts.items()}
    settled = outcome.entries[max(0, len(outcome.entries) - len(SWEEP) - 1)]
    compiling = len(set(outcome.entries) - {0})
    late = len(set(outcome.entries[len(SHAPES) - 1 :])) - 1
    outcome.entries, final = outcome.entries[: len(SHAPES)], outcome.entries[-1]
    if final > 2:
        outcome.entries.append(final)
        outcome.verdict = "branches" if settled == final < len(SWEEP) // 3 else "grows"
        if fullgraph and compiling <= 2:
            outcome.verdict = "passed"
        call = compiled.compiled_call
        parts = [call, *call.continuations()]
        # A part at its limit runs eagerly from then on: that it compiles nothing more is no merit.
        is_full = any(len(part.entries) >= part.options.recompile_limit for part in parts)
        # Where most lengths of the first round have compiled something, there is a graph for each of them.
        few = late < len(SWEEP) // (3 if outcome.once_more else 6)
        if not fullgraph and settled == final and not is_full and few:
            outcome.verdict = "breaks"
    shown = dict.fromkeys(str(event) for event in events)
    outcome.reason = "; ".join(shown) if outcome.verdict != "passed" else ""
    return outcome


def main(arguments: list[str] | None = None) -> int:
    """Run the models and print a line for each; the exit status is 1 if any is wrong or fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="bert,gpt2,llama", help="names separated by commas, or all")
    chosen = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    names = list(FACTORIES) if chosen.models == "all" else chosen.models.split(",")
    results = []
    for name in names:
        result = check_model(name)
        results.append(result)
        print(f"{name:20} {result.verdict:8} entries {result.entries} {result.seconds} s", flush=True)
        if result.parts:
            shown = "; ".join(f"{part} {counts}" for part, counts in result.parts.items())
            data = sum(text.startswith(BY_DATA) for text in result.late)
            later = f" and {data} by data later" if data else ""
            print(f"    once more: {'yes' if result.once_more else 'no'}{later}; {shown}", flush=True)
            for text in result.late:
                print(f"    late {text[:300]}", flush=True)
        if result.reason:
            print(f"    {result.reason[:900]}", flush=True)
    verdicts = [result.verdict for result in results]
    print(
        ", ".join(
            f"{verdicts.count(kind)} {kind}"
            for kind in ("passed", "branches", "breaks", "grows", "refused", "wrong", "error")
        )
    )
    return 1 if "wrong" in verdicts or "error" in verdicts else 0


if __name__ == "__main__":
    sys.exit(main())
