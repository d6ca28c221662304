"""The folder of saved KV: whole files only, bounded, private, and its own of each cache."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from modelyard.engines.llama_cpp import kv_store
from modelyard.engines.llama_cpp.kv_memory import KvLayout
from modelyard.engines.llama_cpp.kv_snapshot import KvOrigin, KvSnapshot
from modelyard.engines.llama_cpp.kv_store import SnapshotFolder

ORIGIN = KvOrigin("0.3.36", "ab12", "main", 512, KvLayout("f16", "f16", "off", 2, True), {})


def image(size: int = 100, count: int = 10) -> KvSnapshot:
    return KvSnapshot(np.arange(count, dtype=np.int32), np.zeros(size, np.uint8))


def store(folder: Path, limit: int = 1 << 20, model: str = "m") -> SnapshotFolder:
    return SnapshotFolder(folder / "kv", model, limit)


def write(where: SnapshotFolder, **fields: Any) -> Path:
    file = where.write(ORIGIN, image(**fields))
    assert file is not None
    return Path(file)


def test_files_are_found_newest_first_and_by_their_cache(tmp_path: Path) -> None:
    made = [write(where := store(tmp_path)) for _ in range(3)]
    assert where.files("main") == made[::-1]
    assert where.files("mai") == where.files("main2") == []
    assert store(tmp_path, model="other").files("main") == []
    assert where.touch(str(made[0]))
    assert where.files("main")[0] == made[0]
    made[1].unlink()
    assert not where.touch(str(made[1]))


def test_names_that_are_spelled_alike_are_apart(tmp_path: Path) -> None:
    assert store(tmp_path, model="a/b").folder != store(tmp_path, model="a_b").folder
    assert store(tmp_path, model="../../etc").folder.parent == tmp_path / "kv"
    assert store(tmp_path, model="..").folder.parent.resolve() == tmp_path / "kv"


def test_nobody_else_may_read_what_was_said(tmp_path: Path) -> None:
    file = write(store(tmp_path))
    assert file.stat().st_mode & 0o077 == 0
    assert file.parent.stat().st_mode & 0o077 == 0


def test_oldest_files_of_all_models_make_room(tmp_path: Path) -> None:
    other = write(store(tmp_path, model="other"), size=1000)
    where = store(tmp_path, limit=5000)
    made = [write(where, size=1000) for _ in range(6)]
    assert not other.exists()
    left = where.files("main")
    assert left == made[: -len(left) - 1 : -1]
    assert 2 <= len(left) <= 4
    assert sum(file.stat().st_size for file in left) <= 5000


def test_one_that_is_larger_than_all_room_is_not_saved_and_moves_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    small = write(where := store(tmp_path, limit=2000))
    assert where.write(ORIGIN, image(size=3000)) is None
    assert small.exists()
    assert "kv_store_mb" in caplog.text


def test_file_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    where = store(tmp_path)

    def broken() -> Iterator[bytes]:
        yield b"half"
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        where._write(10, broken(), "main.x-1")
    assert list(where.folder.iterdir()) == []
    (tmp_path / "file").touch()
    assert SnapshotFolder(tmp_path / "file", "m", 1 << 20).write(ORIGIN, image()) is None
    assert "cannot be saved" in caplog.text


def test_what_a_dead_process_left_half_written_goes(tmp_path: Path) -> None:
    where = store(tmp_path)
    where.folder.mkdir(parents=True)
    dead, mine, odd = (where.folder / f"x.{pid}.part" for pid in (2**22 + 1, os.getpid(), "odd"))
    for part in (dead, mine, odd):
        part.touch()
    write(where)
    assert [part.exists() for part in (dead, mine, odd)] == [False, True, True]


def test_file_that_does_not_fit_is_left_where_it_is_and_the_log_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = write(where := store(tmp_path))
    assert where.read(file, ORIGIN, lambda adapters: ()) is not None
    assert where.read(file, replace(ORIGIN, release="0.4"), lambda adapters: ()) is None
    assert f"the saved KV in {file} is left out: release was 0.3.36 and is 0.4" in caplog.text
    assert where.read(file, ORIGIN, lambda adapters: (("law", 1.0, "x"),)) is None
    assert "adapters were () and are (('law', 1.0, 'x'),)" in caplog.text
    assert where.read(file.with_name("gone.kv"), ORIGIN, lambda adapters: ()) is None
    assert file.exists()


def test_large_files_tell_how_far_they_are(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_store, "_LARGE", 1000)
    caplog.set_level(logging.INFO, kv_store.__name__)
    write(store(tmp_path), size=4000)
    assert "saving KV to" in caplog.text
