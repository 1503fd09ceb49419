"""An entry is read whole or not at all, and nothing that is wrong with the cache reaches the program."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

from dovetail import cache
from dovetail.cache import entries, folders

KEY = cache.key_of("a", "kernel")
OTHER = cache.key_of("another")
needs_owners = pytest.mark.skipif(not hasattr(os, "getuid"), reason="files have no owners here")


def test_what_was_written_is_read() -> None:
    assert cache.read("kernels", KEY) is None
    assert cache.write("kernels", KEY, b"content")
    assert cache.read("kernels", KEY) == b"content"
    assert cache.read("kernels", OTHER) is None and cache.read("instructions", KEY) is None
    assert cache.write("kernels", KEY, b"") and cache.read("kernels", KEY) == b""


def test_each_part_of_a_key_counts() -> None:
    assert (
        len({cache.key_of(*parts) for parts in [("ab", "c"), ("a", "bc"), ("abc",), ("ab", "c", ""), ("", "abc")]}) == 5
    )


@pytest.mark.parametrize(
    "kind, key", [("../kernels", KEY), ("kernels", f"../{KEY[3:]}"), ("kernels", KEY.upper()), ("other", KEY)]
)
def test_names_lead_nowhere_else(kind: str, key: str) -> None:
    assert not cache.write(kind, key, b"x") and cache.read(kind, key) is None


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", entries.KINDS)
def test_damaged_entries_are_misses(kind: str) -> None:
    """100,000 entries in all with bytes flipped, cut off, moved, or added; the content of no other entry is ever read."""
    dice = random.Random(0)
    content = bytes(dice.randrange(256) for _ in range(300))
    whole = entries.encode(kind, KEY, content)
    for _ in range(100_000 // len(entries.KINDS)):
        data = damaged(whole, dice)
        assert entries.decode(kind, KEY, data) is None or data == whole
    others = [(other, KEY) for other in entries.KINDS if other != kind]
    assert all(entries.decode(*names, whole) is None for names in [(kind, OTHER), *others])


def damaged(whole: bytes, dice: random.Random) -> bytes:
    """A copy with a bit flipped, the end cut off, bytes behind it, or a byte more inside."""
    data = bytearray(whole)
    kind, place = dice.randrange(4), dice.randrange(len(data))
    if kind == 0:
        data[place] ^= 1 << dice.randrange(8)
    elif kind == 1:
        del data[place:]
    elif kind == 2:
        data += dice.randbytes(dice.randint(1, 9))
    else:
        data[place:place] = dice.randbytes(1)
    return bytes(data)


def test_damaged_files_are_misses_and_are_written_anew(base: Path) -> None:
    cache.write("kernels", KEY, b"content")
    path = base / "kernels" / KEY
    whole = path.read_bytes()
    for data in (b"", whole[:-1], whole[:40], whole.replace(b"content", b"contend"), b"\0" * 100):
        path.write_bytes(data)
        assert cache.read("kernels", KEY) is None
        assert cache.write("kernels", KEY, b"content") and path.read_bytes() == whole
    path.unlink()
    path.mkdir()
    assert cache.read("kernels", KEY) is None
    with pytest.warns(UserWarning, match="is not used"):
        assert not cache.write("kernels", KEY, b"content")
    cache.write("kernels", OTHER, b"other")
    (base / "kernels" / OTHER).rename(base / "instructions")  # A file in the place of a directory.
    assert cache.read("instructions", OTHER) is None and len(cache.ls()) == 0


@needs_owners
@pytest.mark.parametrize("place", ["", "kernels", f"kernels/{KEY}"])
@pytest.mark.parametrize("change", ["writable", "link", "owner"])
def test_what_others_may_have_written_is_a_miss(
    base: Path, place: str, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.write("kernels", KEY, b"content")
    path = base / place
    if change == "writable":
        path.chmod(0o777)
    elif change == "link":
        path.rename(base.parent / "moved")
        path.symlink_to(base.parent / "moved")
    else:
        monkeypatch.setattr(os, "getuid", lambda: path.lstat().st_uid + 1)
    assert cache.read("kernels", KEY) is None


@needs_owners
def test_one_warning_where_nothing_can_be_kept(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base.parent.mkdir()
    base.parent.joinpath("file").write_text("")
    for place in ("file", "file/below"):  # No directory can be made there; as root, permissions would not matter.
        monkeypatch.setenv("DOVETAIL_CACHE_DIR", str(base.parent / place))
        monkeypatch.setattr(folders, "_warned", set())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for key in (KEY, OTHER):
                assert not cache.write("kernels", key, b"content") and cache.read("kernels", key) is None
                with cache.making("kernels", key) as has_to:
                    assert has_to
        assert len(caught) == 1 and "DOVETAIL_CACHE=0" in str(caught[0].message)


def test_no_space_is_no_error(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.warns(UserWarning, match="No space left"):
        assert not cache.write("kernels", KEY, b"content")
    assert list((base / "kernels").iterdir()) == []


def test_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    cache.write("kernels", KEY, b"content")
    cache.switch(False)
    assert cache.read("kernels", KEY) is None and not cache.write("kernels", OTHER, b"") and not cache.stat().is_on
    cache.switch(None)
    monkeypatch.setenv("DOVETAIL_CACHE", "0")
    assert cache.read("kernels", KEY) is None and not cache.write("kernels", OTHER, b"")
    cache.switch(True)
    assert cache.read("kernels", KEY) == b"content"


def test_the_shared_directory_is_only_read(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.write("kernels", KEY, b"content")
    monkeypatch.setenv("DOVETAIL_CACHE_SHARED", str(base.parent))
    monkeypatch.setenv("DOVETAIL_CACHE_DIR", str(tmp_path / "new"))
    assert cache.read("kernels", KEY) == b"content"
    cache.write("kernels", OTHER, b"other")
    assert [entry.key for entry in cache.ls()] == [OTHER] and not (base / "kernels" / OTHER).exists()
    (base / "kernels").chmod(0o777)
    assert cache.read("kernels", KEY) is None


def test_the_oldest_go(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOVETAIL_CACHE_SIZE", "3000")
    keys = [cache.key_of(number) for number in range(6)]
    for age, key in zip((9, 8, 7, 6, 5), keys, strict=False):
        cache.write("kernels", key, bytes(600))
        if (path := base / "kernels" / key).exists():
            os.utime(path, (time.time() - age, time.time() - age))
    left_behind = base / "kernels" / f"{KEY}.abc.new"
    left_behind.write_text("half")
    os.utime(left_behind, (1, 1))
    assert cache.read("kernels", keys[1]) is not None  # It is the newest one from now on.
    cache.write("kernels", keys[5], bytes(600))
    found = {entry.key for entry in cache.ls()}
    assert cache.stat().bytes <= 3000 and keys[5] in found and keys[1] in found and keys[0] not in found
    assert not left_behind.exists()


def test_clear_deletes_entries_only(base: Path) -> None:
    cache.write("kernels", KEY, b"content")
    (base / "kernels" / "notes.txt").write_text("mine")
    assert cache.clear() == 1 and cache.ls() == [] and (base / "kernels" / "notes.txt").exists()


def test_others_wait_for_who_makes_it() -> None:
    with cache.making("kernels", KEY) as first:
        start = time.monotonic()
        with cache.making("kernels", KEY, seconds=0.1) as late:
            assert first and late and time.monotonic() - start > 0.09  # The time is over: it goes on by itself.
        cache.write("kernels", KEY, b"content")
        with cache.making("kernels", KEY) as second:
            assert not second


STRESS = """
import os, random, signal, sys, time
from dovetail import cache
from dovetail.cache import entries
rounds, dice = int(sys.argv[1]), random.Random(1)
names = [(kind, cache.key_of(number)) for kind in entries.KINDS for number in range(3)]
contents = {name: [bytes([number]) * size for size in (10, 5000, 70000)] for number, name in enumerate(names)}

def write_for_ever(seed):
    dice = random.Random(seed)
    while True:
        name = dice.choice(names)
        with cache.making(*name, seconds=0.01):
            cache.write(*name, dice.choice(contents[name]))

hits = 0
for number in range(rounds):
    writers = []
    for seed in range(4):
        child = os.fork()
        if not child:
            write_for_ever((number, seed).__hash__())
        writers.append(child)
    for child in writers:
        time.sleep(dice.random() * 0.004)
        os.kill(child, signal.SIGKILL)
        for name in names:
            found = cache.read(*name)
            assert found is None or found in contents[name], (name, found[:20])
            hits += found is not None
    for child in writers:
        os.waitpid(child, 0)
print(hits)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are made by fork")
@pytest.mark.parametrize("rounds", [5, pytest.param(250, marks=pytest.mark.slow)])
def test_writers_that_are_killed_leave_whole_entries(rounds: int) -> None:
    """Four writers at a time, each killed at a random instant: 1,000 kills in the slow run."""
    output = subprocess.run([sys.executable, "-c", STRESS, str(rounds)], capture_output=True, text=True, timeout=300)
    assert output.returncode == 0, output.stderr
    assert int(output.stdout) > rounds and all(entries.is_name(entry.kind, entry.key) for entry in cache.ls())
