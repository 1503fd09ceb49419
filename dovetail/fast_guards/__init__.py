"""Faster guard checks: values remembered from the last hit, and guards below fixed objects asked in C++.

Importing the room registers it (:data:`dovetail.guards.checker.ACCELERATORS`); without it all checks are right, only slower.
"""

from dovetail.fast_guards.ambient import matcher
from dovetail.fast_guards.generator import remember_hits
from dovetail.guards.ambient import MATCHERS
from dovetail.guards.checker import ACCELERATORS

ACCELERATORS.append(remember_hits)
MATCHERS.append(matcher)
