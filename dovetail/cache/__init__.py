"""Entries kept between processes: which code runs a captured graph, decomposed graphs, compiled kernels with the code that
calls them, what operators record in a capture, and which vector instructions the compiler and this CPU know.

An entry is found by a digest of everything that decides about it, and read only if it is whole and comes from a place that
nobody else can write to. Anything else is a miss, never an exception: training goes on without the cache.

>>> from dovetail import cache
>>> cache.stat().entries >= 0
True

Environment: ``DOVETAIL_CACHE_DIR`` (the directory), ``DOVETAIL_CACHE_SHARED`` (another one that is only read),
``DOVETAIL_CACHE_SIZE`` (the most bytes, 1 GiB unless given), ``DOVETAIL_CACHE=0`` (no cache). :mod:`.folders` finds the
directories, :mod:`.entries` reads and writes, :mod:`.bundles` exports and imports, :mod:`.versions` names the
programs that an entry depends on.
"""

from __future__ import annotations

from dovetail.cache.bundles import export_file, import_file, packed, unpacked
from dovetail.cache.entries import Entry, Stat, clear, key_of, ls, making, read, stat, write
from dovetail.cache.folders import Held, directory, held, holding, is_on, switch
from dovetail.cache.versions import runtime, software

__all__ = [
    "Entry",
    "Held",
    "Stat",
    "clear",
    "directory",
    "export_file",
    "held",
    "holding",
    "import_file",
    "is_on",
    "key_of",
    "ls",
    "making",
    "packed",
    "read",
    "runtime",
    "software",
    "stat",
    "switch",
    "unpacked",
    "write",
]
