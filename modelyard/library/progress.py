"""Progress of downloads and conversions: a bar on a terminal, elsewhere a line for every 10 %."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING

from modelyard.core.units import format_duration as format_duration
from modelyard.core.units import format_size as format_size

if TYPE_CHECKING:  # slow to import, and most processes fetch nothing
    from rich.console import Console
    from rich.progress import Progress

OnBytes = Callable[[int, int], None]  # done, total


class ProgressReporter:
    """Draws a bar if `console` is a terminal, else passes lines to `write_line`."""

    def __init__(
        self,
        console: Console | None = None,
        write_line: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console, self._clock = console, clock
        self.write_line = write_line or (lambda line: print(line, file=sys.stderr))

    @cached_property
    def console(self) -> Console:
        from rich.console import Console

        return self._console or Console(stderr=True)

    @contextmanager
    def track(self, name: str, verb: str = "fetching") -> Iterator[OnBytes]:
        if self.console.is_terminal:
            with _bar(self.console) as bar:
                task = bar.add_task(name, total=None)
                started = False

                def on_bytes(done: int, total: int) -> None:
                    nonlocal started
                    if not started:  # a resumed download does not count what was there before as its speed
                        started = True
                        bar.reset(task, completed=done, total=total or None)
                    bar.update(task, completed=done, total=total or None)

                yield on_bytes
        else:
            self.write_line(f"{verb} {name}")
            yield self._lines(f"{verb} {name}")

    def _lines(self, title: str) -> OnBytes:
        reported = first = -1
        started = 0.0

        def on_bytes(done: int, total: int) -> None:
            nonlocal reported, first, started
            tenths = 10 * done // total if total else 0
            if first < 0 and tenths < 10:
                reported, first, started = tenths, done, self._clock()
                if tenths:
                    self.write_line(f"{title}: continuing at {tenths * 10} % of {format_size(total)}")
            elif tenths > reported:
                reported = tenths
                rate = format_rate(done - first, total - done, self._clock() - started)
                self.write_line(f"{title}: {tenths * 10} % of {format_size(total)}{rate}")

        return on_bytes


def _bar(console: Console) -> Progress:
    from rich.progress import BarColumn, DownloadColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
    from rich.text import Text

    class SpeedColumn(ProgressColumn):
        """Rich's own is decimal."""

        def render(self, task: Task) -> Text:
            speed = task.finished_speed or task.speed
            return Text(f"{format_size(speed)}/s" if speed else "?", style="progress.data.speed")

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        SpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )


def format_rate(done: int, left: int, seconds: float) -> str:
    """ ", 35 MiB/s, 12 s left" once it can be told."""
    if seconds < 0.5 or not done:
        return ""
    rate = done / seconds
    return f", {format_size(rate)}/s" + (f", {format_duration(left / rate)} left" if left else "")
