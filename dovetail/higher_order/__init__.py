"""Derivatives of any order through compiled functions; loading it registers the hook that provides them."""

from dovetail.higher_order import capture  # noqa: F401
