"""Files of public packages are fetched once, whole and verified."""

from __future__ import annotations

import hashlib
import io
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.public_files import PublicFiles, fetch


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MODELYARD_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "demo-1.0.tar.gz"
    with tarfile.open(path, "w:gz") as out:
        for name in ("demo-1.0/templates/a.jinja", "demo-1.0/templates/../../out.jinja", "demo-1.0/other.txt"):
            member = tarfile.TarInfo(name)
            member.size = 5
            out.addfile(member, io.BytesIO(b"hello"))
    return path


def _wanted(archive: Path) -> PublicFiles:
    return PublicFiles("demo==1.0", hashlib.sha256(archive.read_bytes()).hexdigest(), r".*\.jinja")


def test_the_wanted_files_are_fetched_once_by_whoever_needs_them_first(archive: Path) -> None:
    found: list[str] = []

    def find(package: str) -> str:
        found.append(package)
        return archive.as_uri()

    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(lambda _: fetch(_wanted(archive), find), range(8)))
    assert found == ["demo==1.0"]
    assert len(set(folders)) == 1
    files = [path.relative_to(folders[0]) for path in folders[0].rglob("*") if path.is_file()]
    assert files == [Path("templates/a.jinja")]


def test_an_archive_with_another_hash_leaves_nothing_behind(archive: Path) -> None:
    wanted = PublicFiles("demo==1.0", "0" * 64, ".*")
    with pytest.raises(RuntimeError, match="has the hash"):
        fetch(wanted, lambda _: archive.as_uri())
    assert [path for path in wanted.folder.parent.rglob("*") if path.suffix != ".lock"] == []
