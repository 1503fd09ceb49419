"""``python -m dovetail.cli`` is the same as the command ``dovetail``."""

from __future__ import annotations

import sys

from dovetail.cli import main

if __name__ == "__main__":
    sys.exit(main())
