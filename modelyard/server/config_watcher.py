"""Reloads the configuration when its files change, on SIGHUP, and when a model was pulled or removed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from pathlib import Path

from modelyard.core.errors import Conflict, ModelyardError
from modelyard.http.admin.context import ReloadResult
from modelyard.library.model_files import library_file

log = logging.getLogger(__name__)

_POLL_S = 1.0

Reload = Callable[[], Awaitable[ReloadResult]]
FileStamps = Mapping[Path, tuple[int, int] | None]


def file_stamps(files: Iterable[Path]) -> FileStamps:
    """Modification time and size of each file; None for a missing or empty one, which an editor may be writing."""
    return {file: _stamp(file) for file in files}


def _stamp(file: Path) -> tuple[int, int] | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return (status.st_mtime_ns, status.st_size) if status.st_size else None


async def watch(files: tuple[Path, ...], reload: Reload, poll_s: float = _POLL_S) -> None:
    """Run until cancelled. A change counts when it is stable for one interval: the file may be half written. A file
    that is missing at first may appear; one that disappears is being replaced."""
    known = seen = file_stamps(files)
    while True:
        await asyncio.sleep(poll_s)
        now = await asyncio.to_thread(file_stamps, files)
        gone = any(now[file] is None for file in files if known[file] is not None)
        if now != known and now == seen and not gone:
            known = now
            await reload_and_log(reload)
        seen = now


async def reload_and_log(reload: Reload) -> None:
    """Log the result. If the new configuration has errors, the old one stays."""
    try:
        done = await reload()
    except ModelyardError as error:
        log.error("%s", error.message)
        return
    for warning in done.warnings:
        log.warning("%s", warning)
    sums = (("added", done.added), ("removed", done.removed), ("changed", done.changed))
    what = "; ".join(f"{word} {', '.join(names)}" for word, names in sums if names)
    log.info("configuration reloaded: %s", what or "no model changed")


@contextlib.contextmanager
def on_hangup(reload: Reload) -> Iterator[None]:
    """Reload on SIGHUP, where the platform has it."""
    loop, tasks = asyncio.get_running_loop(), set[asyncio.Task[None]]()

    def on_signal() -> None:
        task = loop.create_task(reload_and_log(reload))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    with contextlib.suppress(NotImplementedError, AttributeError):
        loop.add_signal_handler(signal.SIGHUP, on_signal)
    try:
        yield
    finally:
        with contextlib.suppress(NotImplementedError, AttributeError):
            loop.remove_signal_handler(signal.SIGHUP)


# --- the library ------------------------------------------------------------------------------------------------------

_LIBRARY_POLL_S = 0.25


async def watch_library(reload: Callable[[], Awaitable[object]], poll_s: float = _LIBRARY_POLL_S) -> None:
    """Run until cancelled. `reload` is called when a model was pulled, added or removed: its list is replaced as a
    whole, so a change counts at once. A reload that is already running may have read the old list: then again."""
    file = library_file()
    known = _stamp(file)
    while True:
        await asyncio.sleep(poll_s)
        if (now := _stamp(file)) == known:
            continue
        try:
            await reload()
        except Conflict:
            continue
        except ModelyardError as error:
            log.error("the library has changed: %s", error.message)
        known = now
