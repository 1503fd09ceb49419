"""Tests of the core alone: they pass with rules, quirks and wings as well as without them (``DOVETAIL_WITHOUT_RULES=1``)."""
