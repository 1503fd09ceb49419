"""``python -m dovetail.testing.child JOB OUTPUT``: runs cases of the suite in a process of its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from dovetail.backends.debug.processes import writer
from dovetail.testing.suite import run_job

if __name__ == "__main__":
    run_job(json.loads(sys.argv[1]), writer(Path(sys.argv[2])))
