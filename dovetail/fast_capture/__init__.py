"""Faster captures: operators that were recorded before in the same capture are recorded again without asking torch."""
