"""Entries of the cache as one file, for a container or another machine.

The file is read as data: a header, then for each entry a line with its kind, key and length, and the entry as it lies on disk.
Kernels are machine code, though: import only a file that you would run.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from dovetail.cache.entries import KINDS, _read, decode, encode, is_name, ls, write
from dovetail.cache.folders import directory, is_own, uses_disk
from dovetail.errors import ArtefactError

_HEADER = b"dovetail cache bundle 1\n"
_LONGEST_LINE = 200
_LARGEST_ENTRY = 256 << 20


def export_file(path: str | os.PathLike[str]) -> int:
    """Write all whole entries of this user's cache to a file, and return how many."""
    count, target = 0, Path(path)
    beside = target.with_name(f"{target.name}.{os.getpid()}.new")
    try:
        with beside.open("wb") as file:
            for count, part in enumerate(packed(_own_entries())):  # noqa: B007  (the header is the part before the first entry)
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)
    return count


def _own_entries() -> Iterator[tuple[str, str, bytes]]:
    for entry in reversed(ls()):
        content = _read(directory(), entry.kind, entry.key, is_own)
        if content is not None:
            yield entry.kind, entry.key, content


def packed(entries: Iterable[tuple[str, str, bytes]]) -> Iterator[bytes]:
    """The parts of a file with these entries (kind, key, content): a header, and one part for each."""
    yield _HEADER
    for kind, key, content in entries:
        data = encode(kind, key, content)
        yield f"{kind} {key} {len(data)}\n".encode() + data


def import_file(path: str | os.PathLike[str]) -> int:
    """Put the entries of a file into this user's cache, and return how many.

    Entries of other versions or CPUs are harmless: nothing looks for them. Raises :class:`ArtefactError` for a file that is no
    bundle or is damaged; the entries before the damage are kept.
    """
    if not uses_disk():
        raise ArtefactError("the cache is switched off", advice="unset DOVETAIL_CACHE, or cache.switch(True)")
    count = 0
    with Path(path).open("rb") as file:
        for kind, key, content in unpacked(file, str(path)):
            if not write(kind, key, content):
                raise ArtefactError("the cache cannot be written to", advice="set DOVETAIL_CACHE_DIR")
            count += 1
    return count


def unpacked(file: BinaryIO, path: str) -> Iterator[tuple[str, str, bytes]]:
    """The entries of a file that :func:`packed` has made; raises :class:`ArtefactError` at the first damage."""
    if file.readline(_LONGEST_LINE) != _HEADER:
        raise ArtefactError(f"{path} is no file of cache entries", advice="write one with dovetail cache export")
    while line := file.readline(_LONGEST_LINE):
        yield _next(file, line, path)


def _next(file: BinaryIO, line: bytes, path: str) -> tuple[str, str, bytes]:
    damaged = ArtefactError(f"{path} is damaged", advice=f"export it again; kinds of entries are {', '.join(KINDS)}")
    parts = line.decode("ascii", "replace").split()
    if len(parts) != 3 or not is_name(parts[0], parts[1]) or not parts[2].isdecimal() or len(parts[2]) > 10:
        raise damaged
    length = int(parts[2])
    content = decode(parts[0], parts[1], file.read(length)) if length <= _LARGEST_ENTRY else None
    if content is None:
        raise damaged
    return parts[0], parts[1], content
