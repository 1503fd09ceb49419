"""What is in every key: the content of all of the package's files, wherever they lie, and the versions of what runs them."""

from __future__ import annotations

import importlib.util
import os
import platform
from collections.abc import Callable
from pathlib import Path

import pytest

from dovetail.cache import versions

CHANGES: dict[str, Callable[[Path], object]] = {
    "edited": lambda folder: (folder / "room" / "deep" / "a.py").write_text("x = 2"),
    "moved": lambda folder: (folder / "room" / "deep" / "a.py").rename(folder / "room" / "a.py"),
    "renamed": lambda folder: (folder / "top.py").rename(folder / "pot.py"),
    "new": lambda folder: (folder / "new.py").touch(),
    "gone": lambda folder: (folder / "top.py").unlink(),
    "swapped": lambda folder: [
        (folder / name).write_text(text) for name, text in (("top.py", "x = 1"), ("room/deep/a.py", "y = 1"))
    ],
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    found = tmp_path / "package"
    (found / "room" / "deep").mkdir(parents=True)
    (found / "top.py").write_text("y = 1")
    (found / "room" / "deep" / "a.py").write_text("x = 1")
    monkeypatch.setattr(versions, "__file__", str(found / "cache" / "versions.py"))
    return found


def software() -> tuple[str, ...] | None:
    return versions.software.__wrapped__()


@pytest.mark.parametrize("name", CHANGES)
def test_a_file_that_is_another_one_changes_all_keys(folder: Path, name: str) -> None:
    before = software()
    times = os.stat(folder / "top.py")
    CHANGES[name](folder)
    if (folder / "top.py").exists():
        os.utime(folder / "top.py", ns=(times.st_atime_ns, times.st_mtime_ns))
    after = software()
    assert before is not None and after is not None and before[0] != after[0] and before[1:] == after[1:]


def test_what_is_no_python_file_changes_none(folder: Path) -> None:
    before = software()
    (folder / "notes.txt").write_text("x")
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "top.cpython-311.pyc").write_bytes(b"x")
    assert before == software() is not None


def test_files_that_cannot_be_read_have_no_key(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise PermissionError

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", refuse)
        assert software() is None
    for path in (folder / "top.py", folder / "room" / "deep" / "a.py"):
        path.unlink()
    assert software() is None


def test_another_bytecode_has_other_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    before = software()
    monkeypatch.setattr(importlib.util, "MAGIC_NUMBER", b"other")
    assert software() != before is not None


def test_another_kernel_has_the_same_keys_and_another_c_library_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container runs on hosts with other kernels; no compiled code depends on them."""

    def on(release: str, library: str) -> tuple[str, ...] | None:
        monkeypatch.setattr(platform, "release", lambda: release)
        monkeypatch.setattr(platform, "platform", lambda: f"Linux-{release}-x86_64-with-{library}")
        return software()

    assert on("6.1.0-18-amd64", "glibc2.36") == on("5.10.0", "glibc2.36") != on("5.10.0", "glibc2.39")
