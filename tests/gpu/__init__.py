"""Tests that need a CUDA device; all are marked ``gpu`` and skipped where there is none."""
