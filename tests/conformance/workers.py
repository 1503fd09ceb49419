"""Names handed to worker processes: one that takes its process down, or stalls, is an error, and the rest goes on.

A worker prints one line of JSON for each finished name (:class:`tests.conformance.verdicts.OperatorResult`), in the order given.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence

from tests.conformance.verdicts import OperatorResult, SampleResult


def run_in_workers(
    names: Sequence[str],
    variants: Sequence[str],
    arguments: Callable[[Sequence[str]], list[str]],
    jobs: int,
    *,
    chunk: int = 0,
    seconds: float = 300.0,
) -> list[OperatorResult]:
    """Check ``names`` in ``jobs`` processes, ``python -m *arguments(names)``; results in the order of ``names``.

    ``chunk``: names for one process, all by default; ``seconds`` for one name before its process is ended.
    """
    results: dict[str, OperatorResult] = {}

    def report(result: OperatorResult) -> None:
        results[result.name] = result
        line = "  ".join(f"{variant} {result.verdict(variant):14}" for variant in variants)
        print(f"[{len(results):4}/{len(names)}] {result.name:44} {line} {result.seconds:6.2f} s", flush=True)

    def serve(remaining: list[str]) -> None:
        while remaining:
            current = remaining[: chunk or None]
            command = [sys.executable, "-m", *arguments(current)]
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
                clock = threading.Timer(seconds, process.kill)
                clock.start()
                for line in process.stdout or ():
                    if line.startswith("{"):
                        clock.cancel()
                        result = OperatorResult.from_json(json.loads(line))
                        report(result)
                        remaining.remove(result.name)
                        current.remove(result.name)
                        clock = threading.Timer(seconds, process.kill)
                        clock.start()
                clock.cancel()
            if current:
                reason = f"the process ended with {process.returncode}"
                remaining.remove(current[0])
                report(OperatorResult(current[0], {variants[0]: [SampleResult("error", "crash", reason)]}))

    threads = [threading.Thread(target=serve, args=(list(names[at::jobs]),)) for at in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[name] for name in names if name in results]
