"""The last lines that a child wrote: enough to explain its death, never more than was set aside."""

from __future__ import annotations

from collections import deque


class RingBuffer:
    """Bytes cut anywhere go in, whole lines come out. A line without end is cut at `max_line` bytes."""

    def __init__(self, max_lines: int = 200, max_line: int = 4096) -> None:
        self._lines: deque[str] = deque(maxlen=max_lines)
        self._max_line = max_line
        self._open = b""
        self._cut = False  # the rest of an overlong line is on its way: drop it
        self.dropped = 0

    def feed(self, data: bytes) -> None:
        *ended, rest = data.split(b"\n")
        for bit in ended:
            self._extend(bit)
            self._end_line()
        self._extend(rest)

    def lines(self) -> list[str]:
        """The oldest first; a line that has not ended yet is the last one."""
        return [*self._lines, _text(self._open)] if self._open else list(self._lines)

    def tail(self, count: int) -> str:
        return "\n".join(self.lines()[-count:]) if count > 0 else ""

    def __len__(self) -> int:
        return len(self._lines) + bool(self._open)

    def _extend(self, bit: bytes) -> None:
        if not self._cut:
            self._open += bit[: self._max_line - len(self._open)]
            self._cut = len(self._open) >= self._max_line

    def _end_line(self) -> None:
        self.dropped += len(self._lines) == self._lines.maxlen
        self._lines.append(_text(self._open))
        self._open, self._cut = b"", False


def _text(line: bytes) -> str:
    return line.removesuffix(b"\r").decode("utf-8", "replace")
