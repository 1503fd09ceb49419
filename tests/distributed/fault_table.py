"""Each fault many times, as a table: ``python -m tests.distributed.fault_table --times 20``.

A fault is a test of this folder that asserts what the ranks say, when, and that nothing is lost; it counts as survived if all of
that holds. Each runs in processes of its own. What has been counted is printed after each run, for tables that are interrupted.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from dovetail.reports.table import Table
from tests.distributed import test_eager_ranks, test_failures, test_faults

FAULTS: dict[str, Callable[[Path], None]] = {
    "another graph": lambda folder: test_failures.test_ranks_that_take_different_ways_say_so_and_go_on(),
    "a graph break on one rank alone": lambda folder: (
        test_eager_ranks.test_a_rank_that_leaves_the_graph_between_forward_and_backward()
    ),
    "parameters of other shapes": lambda folder: (
        test_failures.test_models_of_different_shape_are_refused_before_anything_is_sent()
    ),
    "another version": lambda folder: test_faults.test_other_versions_are_refused_by_name(),
    "dies and starts again": lambda folder: test_faults.test_what_starts_again_goes_on_bit_for_bit(
        folder, "replicated"
    ),
    "slow": lambda folder: test_faults.test_a_rank_that_is_slow_changes_nothing(),
    "dies and three of four go on": lambda folder: test_faults.test_three_of_four_ranks_come_back(folder, "replicated"),
    "torchrun starts again": test_faults.test_torchrun_starts_again,
    "torchrun loses a machine": test_faults.test_torchrun_goes_on_without_a_machine,
    "hangs": lambda folder: test_faults.test_a_rank_that_hangs("replicated"),
}


def main() -> int:
    """Run the faults that the command line names; returns 1 if one was not survived."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--faults", default=",".join(FAULTS))
    chosen = parser.parse_args()
    rows, lost = [], 0
    for name in chosen.faults.split(","):
        took, survived = [], 0
        for number in range(chosen.times):
            begin = time.monotonic()
            with tempfile.TemporaryDirectory() as folder:
                try:
                    FAULTS[name](Path(folder))
                    survived += 1
                except Exception:  # noqa: BLE001  (a fault that was not survived is what is counted)
                    traceback.print_exc()
            took.append(time.monotonic() - begin)
            print(f"{name}: {survived} of {number + 1}, {took[-1]:.0f} s", file=sys.stderr, flush=True)
        lost += chosen.times - survived
        rows.append((name, str(chosen.times), str(survived), f"{max(took):.0f} s"))
    print(Table(("fault", "times", "nothing lost", "longest"), tuple(rows)))
    return int(lost > 0)


if __name__ == "__main__":
    sys.exit(main())
