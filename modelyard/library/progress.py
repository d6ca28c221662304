"""How far a download or a conversion is: a bar on a terminal, a line every tenth otherwise."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

OnBytes = Callable[[int, int], None]  # done, total
Say = Callable[[str], None]

_TENTHS = 10


class ProgressReporter:
    """Where progress is shown: `console` where that is a terminal, else sentences to `say`."""

    def __init__(self, console: Console | None = None, say: Say | None = None) -> None:
        self.console = console or Console(stderr=True)
        self.say: Say = say or _to_stderr

    @contextmanager
    def watch(self, what: str, doing: str = "fetching") -> Iterator[OnBytes]:
        if self.console.is_terminal:
            with _bar(self.console) as bar:
                task = bar.add_task(what, total=None)
                yield lambda done, total: bar.update(task, completed=done, total=total or None)
        else:
            self.say(f"{doing} {what}")
            yield _Lines(f"{doing} {what}", self.say)


class _Lines:
    def __init__(self, what: str, say: Say) -> None:
        self._what, self._say, self._told = what, say, 0

    def __call__(self, done: int, total: int) -> None:
        tenth = _TENTHS * done // total if total else 0
        if tenth > self._told:
            self._told = tenth
            self._say(f"{self._what}: {tenth * 100 // _TENTHS} % of {format_size(total)}")


def _bar(console: Console) -> Progress:
    text = TextColumn("{task.description}", markup=False)
    return Progress(
        text,
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )


def _to_stderr(line: str) -> None:
    sys.stderr.write(line + "\n")


def format_size(count: float) -> str:
    """Bytes for people: 92.6 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1000
    return f"{count:.3g} TB"
