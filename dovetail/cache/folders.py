"""Where the cache lies, and whether a directory or a file there may be believed."""

from __future__ import annotations

import contextlib
import contextvars
import importlib
import os
import stat
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

#: A part of every path, so that other formats are never read.
FORMAT = "v1"
_NO = ("0", "off", "false", "no")
_switched: list[bool] = []
#: Entries that are read before those on disk, by kind and key.
Held = dict[tuple[str, str], bytes]
_held: contextvars.ContextVar[Held | None] = contextvars.ContextVar("dovetail_held_entries", default=None)
_warned: set[str] = set()


@contextlib.contextmanager
def holding(entries: Held) -> Iterator[None]:
    """In the block these entries are read before those on disk, and what is read or written is put among them.

    The cache is on there; the disk is used only where it is elsewhere.
    """
    token = _held.set(entries)
    try:
        yield
    finally:
        _held.reset(token)


def held() -> Held | None:
    """The entries of :func:`holding`; None outside of such a block."""
    return _held.get()


def is_on() -> bool:
    """Whether there is a cache: on disk, or one that is held."""
    return held() is not None or uses_disk()


def uses_disk() -> bool:
    """Whether the cache on disk is used; :func:`switch` wins over ``DOVETAIL_CACHE``."""
    return _switched[-1] if _switched else os.environ.get("DOVETAIL_CACHE", "").lower() not in _NO


def switch(on: bool | None) -> None:
    """Use the cache in this process, or not; None: as the environment says."""
    _switched[:] = [] if on is None else [on]


def directory() -> Path:
    """The directory of the cache, which need not exist.

    ``DOVETAIL_CACHE_DIR``, or what platformdirs says where it is installed, or ``$XDG_CACHE_HOME/dovetail``, which is
    ``~/.cache/dovetail`` unless set.
    """
    given = os.environ.get("DOVETAIL_CACHE_DIR")
    if given:
        return Path(given) / FORMAT
    with contextlib.suppress(ImportError):
        return Path(importlib.import_module("platformdirs").user_cache_dir("dovetail", appauthor=False)) / FORMAT
    home = os.path.expanduser("~")
    places = {
        "win32": os.environ.get("LOCALAPPDATA") or os.path.join(home, "AppData", "Local"),
        "darwin": os.path.join(home, "Library", "Caches"),
    }
    default = places.get(sys.platform, os.path.join(home, ".cache"))
    return Path(os.environ.get("XDG_CACHE_HOME") or default) / "dovetail" / FORMAT


def shared_directory() -> Path | None:
    """The second directory, which is only read; None where none is named."""
    given = os.environ.get("DOVETAIL_CACHE_SHARED")
    return Path(given) / FORMAT if given else None


def is_own(path: Path) -> bool:
    """Whether a file or directory belongs to this user and nobody else can write to it (a link does not count as either)."""
    return _is_trusted(path, {os.getuid()} if hasattr(os, "getuid") else None)


def is_closed(path: Path) -> bool:
    """Whether not everybody can write to a file or directory: enough for a directory that the user has named to be shared."""
    return _is_trusted(path, None)


def _is_trusted(path: Path, owners: set[int] | None) -> bool:
    try:
        found = path.lstat()
    except OSError:
        return False
    if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
        return False
    if not hasattr(os, "getuid"):
        return True
    others = stat.S_IWOTH if owners is None else stat.S_IWOTH | stat.S_IWGRP
    return (owners is None or found.st_uid in owners) and not found.st_mode & others


def make_own(path: Path) -> bool:
    """Make a directory for this user alone; whether it is there and trusted. Raises ``OSError``."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return is_own(path)


def warn_once(problem: str) -> None:
    """Say once in a process that the cache cannot be used."""
    if not _warned:
        _warned.add(problem)
        warnings.warn(
            f"Dovetail's cache in {directory()} is not used: {problem}; what to do: set DOVETAIL_CACHE_DIR to a directory of "
            "your own that can be written to, or DOVETAIL_CACHE=0",
            stacklevel=2,
        )
