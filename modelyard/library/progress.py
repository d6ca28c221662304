"""Progress of downloads and conversions: a bar on a terminal, elsewhere a line for every 10 %."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

OnBytes = Callable[[int, int], None]  # done, total


class ProgressReporter:
    """Draws a bar if `console` is a terminal, else passes lines to `write_line`."""

    def __init__(self, console: Console | None = None, write_line: Callable[[str], None] | None = None) -> None:
        self.console = console or Console(stderr=True)
        self.write_line = write_line or (lambda line: print(line, file=sys.stderr))

    @contextmanager
    def track(self, name: str, verb: str = "fetching") -> Iterator[OnBytes]:
        if self.console.is_terminal:
            with Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                DownloadColumn(),
                TransferSpeedColumn(),
                TimeRemainingColumn(),
                console=self.console,
                transient=True,
            ) as bar:
                task = bar.add_task(name, total=None)
                yield lambda done, total: bar.update(task, completed=done, total=total or None)
        else:
            self.write_line(f"{verb} {name}")
            yield self._lines(f"{verb} {name}")

    def _lines(self, title: str) -> OnBytes:
        reported = 0

        def on_bytes(done: int, total: int) -> None:
            nonlocal reported
            tenths = 10 * done // total if total else 0
            if tenths > reported:
                reported = tenths
                self.write_line(f"{title}: {tenths * 10} % of {format_size(total)}")

        return on_bytes


def format_size(count: float) -> str:
    """A number of bytes with a unit: 92.6 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1000
    return f"{count:.3g} TB"
