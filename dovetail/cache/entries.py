"""Entries on disk: ``<directory>/<kind>/<key>``, a line with a digest and then the content.

A writer writes beside, syncs, and renames, so that a reader sees all of an entry or nothing, whenever the writer is killed.
Readers take no locks. The digest covers the kind and the key too: a file under another name is a miss. ``<key>.lock`` is held
by who makes an entry, while others wait for it with a time limit.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dovetail.cache.folders import directory, held, is_closed, is_own, make_own, shared_directory, uses_disk, warn_once

try:
    import fcntl
except ImportError:  # Windows: without locks several processes may compile the same.
    fcntl = None  # type: ignore[assignment]

#: The kinds of entries; a name that is not here is never read.
KINDS = ("code", "graphs", "instructions", "kernels", "operators", "steps", "tuned")
_MAGIC = b"dovetail cache 1 "
_KEY = re.compile(r"[0-9a-f]{64}")
_LARGEST = 256 << 20
_DEFAULT_SIZE = 1 << 30
#: Files beside entries that are older than this were left behind by a process that is gone.
_ABANDONED_SECONDS = 3600.0
_written: dict[str, int] = {}


@dataclass(frozen=True)
class Entry:
    """One entry: ``used`` is when it was last read or written, in seconds since the epoch."""

    kind: str
    key: str
    bytes: int
    used: float


@dataclass(frozen=True)
class Stat:
    """The cache in numbers."""

    directory: str
    entries: int
    bytes: int
    limit: int
    is_on: bool


def key_of(*parts: object) -> str:
    """The key of an entry: a digest of everything that decides about it, each part as text."""
    digest = hashlib.sha256()
    for part in parts:
        text = str(part).encode("utf-8", "surrogatepass")
        digest.update(f"{len(text)} ".encode() + text)
    return digest.hexdigest()


def is_name(kind: str, key: str) -> bool:
    """Whether these can name an entry."""
    return kind in KINDS and _KEY.fullmatch(key) is not None


def encode(kind: str, key: str, content: bytes) -> bytes:
    """An entry as it lies on disk."""
    return _MAGIC + _digest(kind, key, content) + b"\n" + content


def decode(kind: str, key: str, data: bytes) -> bytes | None:
    """The content of an entry; None where the data is anything but that entry, whole."""
    start = len(_MAGIC) + 65
    if len(data) < start or not data.startswith(_MAGIC) or data[start - 1 : start] != b"\n":
        return None
    content = data[start:]
    return content if data[len(_MAGIC) : start - 1] == _digest(kind, key, content) else None


def _digest(kind: str, key: str, content: bytes) -> bytes:
    made = hashlib.sha256(f"{kind} {key} {len(content)}\n".encode())
    made.update(content)
    return made.hexdigest().encode()


def read(kind: str, key: str) -> bytes | None:
    """The content of an entry that is held, of this user's directory, or of the shared one; None where none has it."""
    if not is_name(kind, key):
        return None
    kept = held()
    if kept is None:
        return _read_from_disk(kind, key)
    found = kept[kind, key] if (kind, key) in kept else _read_from_disk(kind, key)
    if found is not None:
        kept[kind, key] = found
    return found


def _read_from_disk(kind: str, key: str) -> bytes | None:
    if not uses_disk():
        return None
    own, shared = directory(), shared_directory()
    found = _read(own, kind, key, is_own)
    if found is not None:
        with contextlib.suppress(OSError):
            os.utime(own / kind / key)
        return found
    return None if shared is None else _read(shared, kind, key, is_closed)


def _read(base: Path, kind: str, key: str, is_trusted: object) -> bytes | None:
    assert callable(is_trusted)
    path = base / kind / key
    if not all(map(is_trusted, (base, base / kind, path))):
        return None
    try:
        with path.open("rb") as file:
            data = file.read(_LARGEST + 1)
    except OSError:
        return None
    return decode(kind, key, data) if len(data) <= _LARGEST else None


def write(kind: str, key: str, content: bytes) -> bool:
    """Keep an entry; whether that was possible. Where it was not, the user is told once."""
    if not is_name(kind, key) or len(content) > _LARGEST - 1024:
        return False
    kept = held()
    if kept is not None:
        kept[kind, key] = content
    if not uses_disk():
        return kept is not None
    base = directory()
    try:
        if not make_own(base) or not make_own(base / kind):
            warn_once("the directory belongs to somebody else, or others can write to it")
            return kept is not None
        _replace(base / kind, key, encode(kind, key, content))
        _keep_size(base, len(content))
    except OSError as error:
        warn_once(f"{type(error).__name__}: {error.strerror or error}")
        return kept is not None
    return True


def _replace(folder: Path, key: str, data: bytes) -> None:
    handle, beside = tempfile.mkstemp(prefix=f"{key}.", suffix=".new", dir=folder)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, folder / key)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise


def limit() -> int:
    """The most bytes that the cache may have."""
    text = os.environ.get("DOVETAIL_CACHE_SIZE", "")
    return int(text) if text.isdecimal() else _DEFAULT_SIZE


def _keep_size(base: Path, more: int) -> None:
    """Delete the oldest entries while there are too many bytes; looked at with the first write, and with each 16th of the limit."""
    place = str(base)
    since = _written.get(place)
    if since is not None and since + more < limit() // 16:
        _written[place] = since + more
        return
    _written[place] = 0
    found = sorted(_files(base), key=lambda item: item[1].st_mtime)
    total = sum(item.st_size for _, item in found)
    for path, item in found:
        is_entry = is_name(path.parent.name, path.name)
        is_abandoned = not is_entry and time.time() - item.st_mtime > _ABANDONED_SECONDS
        if is_abandoned or (is_entry and total > limit()):
            with contextlib.suppress(OSError):
                path.unlink()
                total -= item.st_size


def _files(base: Path) -> Iterator[tuple[Path, os.stat_result]]:
    for kind in KINDS:
        with contextlib.suppress(OSError), os.scandir(base / kind) as found:
            for item in found:
                with contextlib.suppress(OSError):
                    if item.is_file(follow_symlinks=False):
                        yield Path(item.path), item.stat(follow_symlinks=False)


def ls() -> list[Entry]:
    """All entries of this user's directory, the last used first."""
    found = [
        Entry(path.parent.name, path.name, item.st_size, item.st_mtime)
        for path, item in _files(directory())
        if is_name(path.parent.name, path.name)
    ]
    return sorted(found, key=lambda entry: -entry.used)


def stat() -> Stat:
    """How many entries there are, and how large they are."""
    found = ls()
    return Stat(str(directory()), len(found), sum(entry.bytes for entry in found), limit(), uses_disk())


def clear() -> int:
    """Delete all entries, and return how many; files that are no entries stay where they are."""
    count = 0
    for path, _ in _files(directory()):
        is_entry = is_name(path.parent.name, path.name)
        if is_entry or path.name.endswith((".new", ".lock")):
            with contextlib.suppress(OSError):
                path.unlink()
                count += is_entry
    return count


@contextlib.contextmanager
def making(kind: str, key: str, seconds: float = 120.0) -> Iterator[bool]:
    """A block in which an entry is made, by one process at a time; whether this one has to (another may have made it by then).

    Who has waited for ``seconds`` goes on as if there were no other. The lock goes with the process that holds it.
    """
    handle = _lock(kind, key, seconds)
    try:
        yield read(kind, key) is None
    finally:
        if handle is not None:
            os.close(handle)


def _lock(kind: str, key: str, seconds: float) -> int | None:
    if fcntl is None or not uses_disk() or not is_name(kind, key):
        return None
    folder = directory() / kind
    try:
        if not make_own(folder.parent) or not make_own(folder):
            return None
        handle = os.open(folder / f"{key}.lock", os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o600)
    except OSError:
        return None
    until = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < until and read(kind, key) is None:
                time.sleep(0.05)
                continue
        except OSError:  # A file system without locks.
            return handle
        return handle
