"""A changed file is reloaded once it is stable; an invalid one changes nothing and is logged."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from pathlib import Path

import pytest

from modelyard.core.errors import Conflict, InvalidRequest
from modelyard.http.admin.context import ReloadResult
from modelyard.library.model_files import LibraryEntry, put_entry, remove_entry
from modelyard.server import config_watcher
from modelyard.server.config_watcher import file_stamps, on_hangup, reload_and_log, watch


class Reload:
    def __init__(self, error: Exception | None = None) -> None:
        self.count, self.happened, self._error = 0, asyncio.Event(), error

    async def __call__(self) -> ReloadResult:
        self.count += 1
        self.happened.set()
        if self._error is not None:
            raise self._error
        return ReloadResult(added=("new",), changed=("old",), warnings=("http: changed",))


def test_a_missing_file_has_no_stamp(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    assert file_stamps([file]) == {file: None}
    file.write_text("x")
    before = file_stamps([file])
    file.write_text("longer")
    assert file_stamps([file]) != before


async def test_a_change_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text("one")
    reload = Reload()
    watching = asyncio.create_task(watch((file,), reload, poll_s=0.001))
    await asyncio.sleep(0)
    file.write_text("another")
    await asyncio.wait_for(reload.happened.wait(), 60)
    reload.happened.clear()
    file.write_text("and one more")
    await asyncio.wait_for(reload.happened.wait(), 60)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    assert reload.count == 2


async def test_a_file_that_appears_is_noticed_beside_one_that_stays_missing(tmp_path: Path) -> None:
    """The user's file may be written after the server has started."""
    own, project, never = tmp_path / "own.toml", tmp_path / "project.toml", tmp_path / "never.json"
    project.write_text("one")
    reload = Reload()
    watching = asyncio.create_task(watch((own, never, project), reload, poll_s=0.001))
    await asyncio.sleep(0)
    own.write_text("new")
    await asyncio.wait_for(reload.happened.wait(), 60)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    assert reload.count == 1


@pytest.mark.parametrize("content", ["", None])
async def test_an_empty_or_missing_file_is_one_that_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None
) -> None:
    file = tmp_path / "a.toml"
    file.write_text("one")
    reload, looks = Reload(), asyncio.Semaphore(0)
    loop = asyncio.get_running_loop()

    def look(files: tuple[Path, ...]) -> object:
        loop.call_soon_threadsafe(looks.release)
        return file_stamps(files)

    monkeypatch.setattr(config_watcher, "file_stamps", look)
    watching = asyncio.create_task(watch((file,), reload, poll_s=0.001))
    await looks.acquire()
    file.write_text(content) if content is not None else file.unlink()
    for _ in range(5):
        await asyncio.wait_for(looks.acquire(), 60)
    assert reload.count == 0
    file.write_text("another")
    await asyncio.wait_for(reload.happened.wait(), 60)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    assert reload.count == 1


async def test_an_invalid_configuration_does_not_stop_the_watcher(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "a.toml"
    file.write_text("one")
    reload = Reload(InvalidRequest("the configuration has errors"))
    watching = asyncio.create_task(watch((file,), reload, poll_s=0.001))
    await asyncio.sleep(0)
    for text in ("wrong", "wrong again"):
        reload.happened.clear()
        file.write_text(text)
        await asyncio.wait_for(reload.happened.wait(), 60)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    assert "the configuration has errors" in caplog.text


async def test_changes_and_settings_that_need_a_restart_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    await reload_and_log(Reload())
    assert "added new; changed old" in caplog.text
    assert "http: changed" in caplog.text


async def test_sighup_reloads() -> None:
    reload = Reload()
    with on_hangup(reload):
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.wait_for(reload.happened.wait(), 60)
    assert reload.count == 1


# --- the library ------------------------------------------------------------------------------------------------------


async def test_a_pulled_model_reloads_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELYARD_CACHE", str(tmp_path))
    reload = Reload()
    watching = asyncio.create_task(config_watcher.watch_library(reload, poll_s=0.001))
    await asyncio.sleep(0)
    put_entry(LibraryEntry("one", "/x.gguf"))
    await asyncio.wait_for(reload.happened.wait(), 60)
    reload.happened.clear()
    remove_entry("one")
    await asyncio.wait_for(reload.happened.wait(), 60)
    watching.cancel()
    assert reload.count == 2


async def test_a_reload_that_is_already_running_is_tried_again_and_an_error_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MODELYARD_CACHE", str(tmp_path))
    errors: list[Exception] = [Conflict("busy"), InvalidRequest("a broken file")]
    done = asyncio.Event()

    async def reload() -> None:
        error = errors.pop(0)
        if not errors:
            done.set()
        raise error

    watching = asyncio.create_task(config_watcher.watch_library(reload, poll_s=0.001))
    await asyncio.sleep(0)
    put_entry(LibraryEntry("one", "/x.gguf"))
    await asyncio.wait_for(done.wait(), 60)
    await asyncio.sleep(0)
    watching.cancel()
    assert "the library has changed: a broken file" in caplog.text
