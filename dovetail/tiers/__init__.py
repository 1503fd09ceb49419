"""Tiers: a graph runs at once by eager's operators, and by the chosen backend's kernels when they are there.

Tier 0 is the captured graph on ``aten``, bitwise eager, in this process. Tier 1 are the kernels of the backend, compiled by a
process in the background (:mod:`.process`, :mod:`.worker`) that leaves them in the compiler's cache on disk; this process takes
them from there, and swaps between two calls (:mod:`.swap`). The option ``tiers`` of :func:`dovetail.compile` decides
(:mod:`.choice`). With ``tune=True``, variants of the kernels compete from then on (:mod:`.tuning`).
"""
