"""``python -m dovetail.testing.child JOB OUTPUT``: a part of the suite, or probes of backends, in a process of its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from dovetail.backends.debug.children import writer
from dovetail.testing.probe import probe_here
from dovetail.testing.suite import run_job

if __name__ == "__main__":
    job, write = json.loads(sys.argv[1]), writer(Path(sys.argv[2]))
    if "probe" in job:
        for name in job["probe"]:
            write(vars(probe_here(name)))
    else:
        run_job(job, write)
