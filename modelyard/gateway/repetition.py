"""Finds out whether an output repeats itself: a pattern of at most 512 tokens, again and again at its end. Pure.

The last tokens are searched once for every 64 of them, as bytes: where the output's last 16 tokens stand earlier in it
tells the sizes that the pattern may have, and two slices of a repetition of that size are equal. So a token costs about
a microsecond, however long the output is.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from modelyard.core.request import Sampling

MAX_PATTERN = 512  # tokens
MIN_COUNT = 5  # how often a pattern stands there
_STEP, _KEY = 64, 16
_MAX_SIZES = 64  # that are tried at a time: the next search begins at another place of the pattern
_CHARACTERS = 4  # of a token, about: where an engine gives text
# Long repetitions become impossible, and phrases of ordinary text and code stay as likely as they are.
NUDGE = Sampling(
    dry_multiplier=1.0,
    dry_base=1.75,
    dry_allowed_length=_KEY,
    dry_penalty_last_n=2 * MAX_PATTERN,
    dry_sequence_breakers=(),
)


class RepetitionDetector:
    """Reads an output. It repeats itself if its last `threshold` tokens, and at least `MIN_COUNT` patterns, do."""

    __slots__ = ("_bytes", "_last", "_new", "_pattern", "_scale", "_threshold")

    def __init__(self, threshold: int, *, is_text: bool = False) -> None:
        scale = _CHARACTERS if is_text else 1
        self._pattern, self._threshold, self._scale = MAX_PATTERN * scale, threshold * scale, scale
        self._last = array("i")
        self._bytes = self._last.itemsize
        self._new = 0

    def feed(self, ids: Iterable[int]) -> bool:
        before = len(self._last)
        self._last.extend(ids)
        self._new += len(self._last) - before
        if self._new < _STEP * self._scale:
            return False
        self._new = 0
        most = max(self._threshold, MIN_COUNT * self._pattern)
        if len(self._last) > 2 * most:
            del self._last[:-most]
        return self._repeats()

    def feed_text(self, text: str) -> bool:
        return self.feed(map(ord, text))

    def clear(self) -> None:
        """Begin again: what was read does not count."""
        del self._last[:]
        self._new = 0

    def _repeats(self) -> bool:
        if len(self._last) < self._threshold:
            return False
        data, unit = self._last.tobytes(), self._bytes
        key = data[-_KEY * unit :]
        last = len(data) - len(key)
        end = len(data) - 1
        for _ in range(_MAX_SIZES):
            at = data.rfind(key, max(0, last - self._pattern * unit), end)
            if at < 0:
                break
            size = last - at
            span = max(self._threshold * unit, MIN_COUNT * size)
            # A place between two tokens, and as long a repetition of that size.
            if size % unit == 0 and span <= len(data) and data[-span:-size] == data[size - span :]:
                return True
            end = at + len(key) - 1
        return False
