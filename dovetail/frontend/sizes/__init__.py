"""Symbolic sizes and numbers in the program."""
