"""Derivatives of any order through compiled functions."""
