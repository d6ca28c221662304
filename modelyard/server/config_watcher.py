"""Watches the configuration's files and has them read anew when they change, and when SIGHUP says so."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from pathlib import Path

from modelyard.core.errors import ModelyardError
from modelyard.http.admin.context import ReloadResult

log = logging.getLogger(__name__)

_LOOK_S = 1.0

Reload = Callable[[], Awaitable[ReloadResult]]
Stamps = Mapping[Path, tuple[int, int] | None]


def stamps(files: Iterable[Path]) -> Stamps:
    """Time and size of each; None for one that is not there: an editor may be writing it."""
    return {file: _stamp(file) for file in files}


def _stamp(file: Path) -> tuple[int, int] | None:
    try:
        told = file.stat()
    except OSError:
        return None
    return told.st_mtime_ns, told.st_size


async def watch(files: tuple[Path, ...], reload: Reload, look_s: float = _LOOK_S) -> None:
    """Until cancelled. A change counts when it has stayed for one look: half a file is no configuration."""
    known = seen = stamps(files)
    while True:
        await asyncio.sleep(look_s)
        now = await asyncio.to_thread(stamps, files)
        if now != known and now == seen and None not in now.values():
            known = now
            await told(reload)
        seen = now


async def told(reload: Reload) -> None:
    """A configuration that is wrong, or anything else that goes wrong, leaves the old one in place and is logged."""
    try:
        done = await reload()
    except ModelyardError as error:
        log.error("%s", error.message)
        return
    for warning in done.warnings:
        log.warning("%s", warning)
    sums = (("added", done.added), ("removed", done.removed), ("changed", done.changed))
    what = "; ".join(f"{word} {', '.join(names)}" for word, names in sums if names)
    log.info("the configuration was read anew: %s", what or "no model changed")


@contextlib.contextmanager
def on_hangup(reload: Reload) -> Iterator[None]:
    """SIGHUP reads it anew, where there is such a signal."""
    loop, tasks = asyncio.get_running_loop(), set[asyncio.Task[None]]()

    def hear() -> None:
        task = loop.create_task(told(reload))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    with contextlib.suppress(NotImplementedError, AttributeError):
        loop.add_signal_handler(signal.SIGHUP, hear)
    try:
        yield
    finally:
        with contextlib.suppress(NotImplementedError, AttributeError):
            loop.remove_signal_handler(signal.SIGHUP)
