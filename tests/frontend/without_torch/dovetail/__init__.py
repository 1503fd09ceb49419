"""The package dovetail without its public face, which needs torch: its modules are the real ones."""

from pathlib import Path

__path__ = [str(Path(__file__).parents[4] / "dovetail")]
