"""Joint graphs as data on disk: written, read back, never executed by being read."""
