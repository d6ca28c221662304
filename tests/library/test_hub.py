"""Downloads from a local hub over HTTP: references, errors, resuming, hashes, full disks, several processes."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest

from modelyard.core.errors import Forbidden, InvalidRequest, NotFound, RateLimited, Unavailable
from modelyard.library import hub as hub_module
from modelyard.library import models
from modelyard.library.hub import HubReference, parse_reference
from modelyard.library.model_files import LibraryEntry, locate_model_file
from modelyard.library.progress import ProgressReporter
from tests.library.files import gguf_bytes
from tests.library.web import COMMIT, Hub, serve_hub

REPO = "maker/Tiny-GGUF"
FILE = "Tiny-Q4_K_M.gguf"
DATA = gguf_bytes() + os.urandom(3 << 20)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr(hub_module, "pause", lambda attempt: None)
    with serve_hub() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        monkeypatch.setenv("HF_HOME", "/nonexistent")
        monkeypatch.delenv("HF_TOKEN", raising=False)
        running.repos[REPO] = {"README.md": b"words", FILE: DATA}
        yield running


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def progress(lines: list[str]) -> ProgressReporter:
    return ProgressReporter(write_line=lines.append)


def pull(progress: ProgressReporter, source: str = REPO, **more: Any) -> LibraryEntry:
    return models.pull(source, progress=progress, update=True, **more)


def parts(cache: Path) -> list[Path]:
    return list(cache.rglob("*.part"))


# --- references -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a/b", HubReference("a/b")),
        ("a/b.c_d-GGUF:Q4_K_M", HubReference("a/b.c_d-GGUF", "Q4_K_M")),
        ("hf.co/a/b", HubReference("a/b")),
        ("hf.co/a/b:q8_0", HubReference("a/b", "q8_0")),
        ("huggingface.co/a/b", HubReference("a/b")),
        ("https://huggingface.co/a/b", HubReference("a/b")),
        ("https://hf.co/a/b/", HubReference("a/b")),
        ("https://huggingface.co/a/b/tree/main", HubReference("a/b", None, "main")),
        ("https://huggingface.co/a/b/tree/main/UD-Q6_K_XL", HubReference("a/b", "UD-Q6_K_XL", "main")),
        ("https://huggingface.co/a/b/blob/main/x/y.gguf", HubReference("a/b", None, "main", "x/y.gguf")),
        ("https://huggingface.co/a/b/resolve/main/y.gguf?download=true", HubReference("a/b", None, "main", "y.gguf")),
        ("http://mirror:8080/a/b", HubReference("a/b")),
    ],
)
def test_repositories_are_written_as_ids_with_a_host_or_as_urls(text: str, expected: HubReference):
    assert parse_reference(text, {"HF_ENDPOINT": "http://mirror:8080"}) == expected


@pytest.mark.parametrize(
    "text",
    [
        "a",
        "a/b/c",
        "a/b:",
        "../a",
        "/a/b",
        "a b/c",
        "hf.co/a",
        "https://example.com/a/b",
        "https://hf.co/a",
        "-a/b",
        "http://[",
    ],
)
def test_other_texts_are_no_references(text: str):
    assert parse_reference(text, {}) is None


@pytest.mark.parametrize(("given", "sent"), [({"HF_TOKEN": "given"}, "given"), ({}, "stored")])
def test_the_token_comes_from_the_environment_or_from_the_login_file(
    hub: Hub, tmp_path: Path, given: dict[str, str], sent: str
):
    """huggingface_hub reads its folder when it is imported."""
    (tmp_path / "token").write_text("stored\n")
    hub.private.add(REPO)
    hub.token = sent
    environment = {**os.environ, "HF_HOME": str(tmp_path), **given}
    command = f"from modelyard.library.hub import HubClient; print(HubClient().list_files({REPO!r}).commit)"
    done = subprocess.run([sys.executable, "-c", command], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == COMMIT, done.stderr


# --- a download -------------------------------------------------------------------------------------------------------


def test_a_model_is_fetched_verified_and_named_after_its_repository(
    hub: Hub, progress: ProgressReporter, lines: list[str], cache: Path
):
    entry = pull(progress)
    assert (entry.name, entry.source, entry.owned, entry.quant) == ("Tiny", REPO, True, "Q4_K_M")
    assert Path(entry.path) == cache / "models/maker/Tiny-GGUF" / FILE
    assert Path(entry.path).read_bytes() == DATA
    assert locate_model_file("Tiny") == Path(entry.path)
    assert lines[0] == f"fetching {FILE}"
    assert "100 %" in lines[-1]
    assert not parts(cache)


def test_the_token_is_sent_to_the_hub_and_not_to_its_cdn(
    hub: Hub, progress: ProgressReporter, monkeypatch: pytest.MonkeyPatch
):
    hub.private.add(REPO)
    with pytest.raises(NotFound, match=r"no repository 'maker/Tiny-GGUF', or it is private: set HF_TOKEN"):
        pull(progress)
    monkeypatch.setenv("HF_TOKEN", hub.token)
    pull(progress)
    assert not [path for path, token in hub.authorized if token and path.startswith("/cdn/")]


def test_a_model_that_is_here_needs_no_network(hub: Hub, progress: ProgressReporter):
    entry = pull(progress)
    requests = len(hub.requested)
    for source in (REPO, "Tiny", f"{REPO}:q4_k_m", f"hf.co/{REPO}", f"{hub.url}/{REPO}/blob/main/{FILE}"):
        assert models.pull(source, progress=progress) == entry
    assert len(hub.requested) == requests


def test_a_second_pull_fetches_only_a_new_version(hub: Hub, progress: ProgressReporter):
    pull(progress)
    fetched = len(hub.downloads)
    pull(progress)
    assert len(hub.downloads) == fetched, "it is up to date"
    hub.repos[REPO][FILE] = new = DATA[:-1] + b"x"  # of the same size
    assert Path(pull(progress).path).read_bytes() == new


def test_a_file_from_an_older_version_of_the_program_is_hashed_and_kept(
    hub: Hub, progress: ProgressReporter, cache: Path
):
    file = cache / "models" / REPO / FILE
    file.parent.mkdir(parents=True)
    file.write_bytes(DATA)
    pull(progress, quant="Q4_K_M")
    assert hub.downloads == []


def test_what_the_hubs_own_programs_have_fetched_is_not_fetched_again(
    hub: Hub, progress: ProgressReporter, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hf"))
    theirs = huggingface_hub.hf_hub_download(REPO, FILE, endpoint=hub.url, cache_dir=tmp_path / "hf")
    sent = len(hub.downloads)
    entry = pull(progress, quant="Q4_K_M")
    assert len(hub.downloads) == sent
    assert Path(entry.path) == cache / "models" / REPO / FILE
    assert Path(entry.path).samefile(theirs)
    models.remove_model(entry.name)
    assert not Path(entry.path).exists()
    assert Path(theirs).read_bytes() == DATA


# --- interrupted downloads --------------------------------------------------------------------------------------------


def test_a_download_continues_after_disconnects(hub: Hub, progress: ProgressReporter):
    hub.cut[FILE] = [1 << 20, 0, 5, 1 << 20]
    assert Path(pull(progress, quant="Q4_K_M").path).read_bytes() == DATA
    assert hub.ranges == [
        f"bytes={1 << 20}-",
        f"bytes={1 << 20}-",
        f"bytes={(1 << 20) + 5}-",
        f"bytes={(2 << 20) + 5}-",
    ]


def test_a_download_that_makes_no_progress_fails_and_keeps_what_has_arrived(
    hub: Hub, progress: ProgressReporter, lines: list[str], cache: Path
):
    hub.cut[FILE] = [2 << 20, 0, 0, 0, 0, 0]
    with pytest.raises(Unavailable, match=r"2.0 MiB of 3.0 MiB are kept, and the next pull continues there"):
        pull(progress, quant="Q4_K_M")
    assert [part.stat().st_size for part in parts(cache)] == [2 << 20]
    assert models.list_models() == []
    hub.cut.clear()
    pull(progress, quant="Q4_K_M")
    assert hub.ranges[-1] == f"bytes={2 << 20}-"
    assert f"fetching {FILE}: continuing at 60 % of 3.0 MiB" in lines


def test_a_server_without_ranges_sends_the_file_again(hub: Hub, progress: ProgressReporter):
    hub.without_ranges.add(FILE)
    hub.cut[FILE] = [1 << 20]
    assert Path(pull(progress, quant="Q4_K_M").path).read_bytes() == DATA


def test_errors_of_the_server_are_tried_again(hub: Hub, progress: ProgressReporter):
    hub.failures = [503, 502]
    assert pull(progress).name == "Tiny"


def test_a_killed_process_leaves_a_part_that_the_next_one_continues(hub: Hub, progress: ProgressReporter, cache: Path):
    hub.held.add(FILE)
    command = f"from modelyard.library import models; models.pull({REPO!r}, quant='Q4_K_M')"
    with subprocess.Popen([sys.executable, "-c", command], stderr=subprocess.DEVNULL) as process:
        assert hub.holding.wait(30)
        while sum(part.stat().st_size for part in parts(cache)) < 1 << 20:
            assert process.poll() is None
        process.send_signal(signal.SIGKILL)
    hub.held.clear()
    (part,) = parts(cache)
    size = part.stat().st_size
    assert Path(pull(progress, quant="Q4_K_M").path).read_bytes() == DATA
    assert hub.ranges[-1] == f"bytes={size}-"


def test_a_part_of_an_old_version_is_not_continued(hub: Hub, progress: ProgressReporter, cache: Path):
    hub.cut[FILE] = [1 << 20, 0, 0, 0, 0, 0]
    with pytest.raises(Unavailable):
        pull(progress, quant="Q4_K_M")
    hub.cut.clear()
    hub.repos[REPO][FILE] = new = gguf_bytes() + bytes(1000)
    assert Path(pull(progress, quant="Q4_K_M").path).read_bytes() == new
    assert not parts(cache)


def test_a_second_pull_waits_for_the_first(hub: Hub, progress: ProgressReporter, lines: list[str]):
    hub.held.add(FILE)
    found: list[LibraryEntry] = []
    pulls = [threading.Thread(target=lambda: found.append(pull(progress, quant="Q4_K_M"))) for _ in range(2)]
    pulls[0].start()
    assert hub.holding.wait(30)
    pulls[1].start()
    while f"another process is fetching {REPO}: waiting for it" not in lines:
        assert pulls[1].is_alive()
    hub.gate.set()
    for thread in pulls:
        thread.join(30)
    assert found[0] == found[1]
    assert len(hub.downloads) == 1


# --- damaged files and full disks -------------------------------------------------------------------------------------


def test_a_file_with_a_wrong_hash_is_removed(hub: Hub, progress: ProgressReporter, cache: Path):
    hub.corrupted.add(FILE)
    with pytest.raises(InvalidRequest, match=r"does not have the checksum that the hub lists, and was removed"):
        pull(progress, quant="Q4_K_M")
    assert not list(cache.rglob("*.gguf"))
    assert not parts(cache)
    hub.corrupted.clear()
    assert pull(progress).name == "Tiny"


def test_a_part_with_wrong_bytes_is_fetched_again(hub: Hub, progress: ProgressReporter, cache: Path):
    hub.cut[FILE] = [1 << 20, 0, 0, 0, 0, 0]
    with pytest.raises(Unavailable):
        pull(progress, quant="Q4_K_M")
    hub.cut.clear()
    (part,) = parts(cache)
    part.write_bytes(bytes(1 << 20))
    assert Path(pull(progress, quant="Q4_K_M").path).read_bytes() == DATA


def test_a_small_file_with_a_wrong_git_hash_is_refused(hub: Hub, progress: ProgressReporter):
    hub.repos["maker/Folder"] = {"config.json": b"{} ", "model.safetensors": b"12345"}
    hub.corrupted.add("config.json")
    with pytest.raises(InvalidRequest, match=r"config\.json does not have the checksum"):
        pull(progress, "maker/Folder")


def test_a_download_larger_than_the_disk_is_not_started(
    hub: Hub, progress: ProgressReporter, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("modelyard.library.hub.shutil.disk_usage", lambda folder: SimpleNamespace(free=3))
    with pytest.raises(Unavailable, match=r"needs 3\.0 MiB and .* has 3 B free: free some space") as caught:
        pull(progress, quant="Q4_K_M")
    assert caught.value.code == "disk_full"
    assert hub.downloads == []


def test_a_disk_that_fills_up_is_one_sentence_and_the_download_continues_later(
    hub: Hub, progress: ProgressReporter, monkeypatch: pytest.MonkeyPatch, cache: Path
):
    update = hub_module._Hasher.update

    def fail(self: Any, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(hub_module._Hasher, "update", fail)
    with pytest.raises(Unavailable, match=r"the disk of .* is full: free some space, then pull again") as caught:
        pull(progress, quant="Q4_K_M")
    assert caught.value.code == "disk_full"
    monkeypatch.setattr(hub_module._Hasher, "update", update)
    assert parts(cache)
    assert Path(pull(progress, quant="Q4_K_M").path).read_bytes() == DATA


def test_a_listing_cannot_write_outside_its_folder(hub: Hub, progress: ProgressReporter, cache: Path):
    hub.repos["maker/Evil"] = {"config.json": b"{}", "model.safetensors": b"1", "..\\x.json": b"{}"}
    with pytest.raises(InvalidRequest, match="outside the model's folder"):
        pull(progress, "maker/Evil")


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_gated_missing_and_unsuitable_repositories_are_one_sentence(
    hub: Hub, progress: ProgressReporter, monkeypatch: pytest.MonkeyPatch
):
    hub.gated.add(REPO)
    hub.repos["maker/Other"] = {"pytorch_model.bin": b""}
    with pytest.raises(Forbidden, match=r"is gated: accept its terms on http.*/maker/Tiny-GGUF and set HF_TOKEN"):
        pull(progress)
    with pytest.raises(NotFound, match="no repository 'maker/Nothing'"):
        pull(progress, "maker/Nothing")
    with pytest.raises(NotFound, match="has no model that an engine here can use"):
        pull(progress, "maker/Other")
    with pytest.raises(NotFound, match="no such branch, tag or commit"):
        pull(progress, f"{hub.url}/maker/Other/tree/none")
    hub.failures = [429]
    with pytest.raises(RateLimited, match="rate limit"):
        pull(progress)
    monkeypatch.setenv("HF_TOKEN", hub.token)
    assert pull(progress).name == "Tiny"


def test_an_unreachable_hub_is_an_error(monkeypatch: pytest.MonkeyPatch, progress: ProgressReporter):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(Unavailable, match=r"maker/Tiny-GGUF could not be fetched from http://.*:9: .*refused"):
        pull(progress)
    monkeypatch.setenv("HF_ENDPOINT", "ftp://x")
    with pytest.raises(InvalidRequest, match="HF_ENDPOINT is not an http or https URL"):
        pull(progress)
