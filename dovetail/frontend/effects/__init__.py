"""Writes to objects that existed before the capture: journalled, undone, replayed."""
