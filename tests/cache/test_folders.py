"""Where the cache lies."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

from dovetail import cache
from dovetail.cache import folders


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have other places")
def test_the_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "platformdirs", None)
    assert cache.directory().parts[-2:] == ("own", folders.FORMAT)
    monkeypatch.delenv("DOVETAIL_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache.directory() == Path("/xdg/dovetail") / folders.FORMAT
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/somebody")
    assert cache.directory() == Path("/somebody/.cache/dovetail") / folders.FORMAT
    installed = types.SimpleNamespace(user_cache_dir=lambda name, appauthor: f"/platform/{name}")
    monkeypatch.setitem(sys.modules, "platformdirs", installed)
    assert cache.directory() == Path("/platform/dovetail") / folders.FORMAT
