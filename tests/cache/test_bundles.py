"""Entries move to another machine as one file, which is read as data."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from dovetail import cache
from dovetail.cli import main
from dovetail.errors import ArtefactError

KEYS = [cache.key_of(number) for number in range(3)]


def fill() -> None:
    for number, key in enumerate(KEYS):
        cache.write("kernels" if number else "instructions", key, bytes([number]) * 50)


def test_export_and_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, base: Path) -> None:
    fill()
    (base / "kernels" / KEYS[2]).write_bytes(b"damaged")
    assert cache.export_file(tmp_path / "bundle") == 2
    monkeypatch.setenv("DOVETAIL_CACHE_DIR", str(tmp_path / "other"))
    assert cache.import_file(tmp_path / "bundle") == 2
    assert cache.read("kernels", KEYS[1]) == b"\1" * 50 and cache.read("kernels", KEYS[2]) is None


def test_a_damaged_file_is_refused_and_changes_nothing_wrongly(tmp_path: Path) -> None:
    fill()
    cache.export_file(tmp_path / "bundle")
    whole, dice = (tmp_path / "bundle").read_bytes(), random.Random(0)
    for _ in range(100):
        data = bytearray(whole)
        if dice.random() < 0.7:
            data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        else:
            del data[dice.randrange(1, len(data)) :]
        (tmp_path / "damaged").write_bytes(data)
        cache.clear()
        try:
            cache.import_file(tmp_path / "damaged")
        except ArtefactError:
            assert len(cache.ls()) < 3
        for number, key in enumerate(KEYS):
            assert cache.read("kernels" if number else "instructions", key) in (None, bytes([number]) * 50)


def test_names_in_a_file_lead_nowhere_else(tmp_path: Path, base: Path) -> None:
    (tmp_path / "evil").write_bytes(b"dovetail cache bundle 1\nkernels ../../../evil 3\nabc")
    with pytest.raises(ArtefactError, match="is damaged"):
        cache.import_file(tmp_path / "evil")
    cache.switch(False)
    with pytest.raises(ArtefactError, match="switched off"):
        cache.import_file(tmp_path / "evil")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill()
    file = str(tmp_path / "bundle")
    assert [
        main(["cache", *action]) for action in (["ls"], ["stat"], ["export", file], ["clear"], ["import", file])
    ] == [0] * 5
    text = capsys.readouterr().out
    for part in (KEYS[1][:16], "3 entries, ", "3 entries written", "3 entries deleted", "3 entries read"):
        assert part in text
    (tmp_path / "foreign").write_text("no entries")
    for action, name, said in (
        ("import", "missing", "No such file or directory"),
        ("export", "nowhere/file", "No such file or directory"),
        ("import", "foreign", "is no file of cache entries"),
    ):
        assert main(["cache", action, str(tmp_path / name)]) == 2
        told = capsys.readouterr().err
        assert told.startswith("dovetail cache: ") and said in told and name in told
