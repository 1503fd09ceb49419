"""Faster guard checks: values remembered from the last hit, and guards below fixed objects asked in C++.

Importing the room registers it with :mod:`dovetail.guards.accelerate`; without it all checks are right, only slower.
"""

from dovetail.fast_guards.generator import remember_hits
from dovetail.guards import accelerate

accelerate.register(remember_hits)
