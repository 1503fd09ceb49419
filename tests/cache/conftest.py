"""A cache of its own for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dovetail.cache import entries, folders


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory of the cache, which does not exist yet."""
    for name in ("DOVETAIL_CACHE", "DOVETAIL_CACHE_SHARED", "DOVETAIL_CACHE_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DOVETAIL_CACHE_DIR", str(tmp_path / "own"))
    monkeypatch.setattr(folders, "_warned", set())
    monkeypatch.setattr(entries, "_written", {})
    yield tmp_path / "own" / folders.FORMAT
    folders.switch(None)
