"""The only door to torch's private names: one small function or re-export each.

Checked on torch 2.13 (CPU) and meant for 2.11 and later; where versions differ, the difference is handled here and nowhere else.
"""

from __future__ import annotations

