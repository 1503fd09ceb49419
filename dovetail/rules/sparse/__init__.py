"""Sparse and jagged tensors in a captured program."""
