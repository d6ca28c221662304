"""The last prompts of each session, bounded in number and characters: what the next one is held against. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from modelyard.telemetry.cause import Asked, Reuse, judge

_EACH = 4  # of one session: side requests come under the same name as the conversation
_SESSIONS = 1024
_CHARACTERS = 16 << 20  # of rendered prompts; the messages that they were made of are as many again

Key = tuple[str, ...]  # a cache, who asks, and the session


class Sessions:
    def __init__(self, characters: int = _CHARACTERS, sessions: int = _SESSIONS) -> None:
        self._asked: OrderedDict[Key, list[Asked]] = OrderedDict()
        self._most, self._sessions, self._held = characters, sessions, 0

    def __len__(self) -> int:
        return len(self._asked)

    def look(
        self,
        key: Key,
        now: Asked,
        reused: int,
        characters: Callable[[int], int],
        page: int = 1,
        elsewhere: int = 0,
    ) -> Reuse:
        """What was reused of this prompt and why not more; it is remembered as its session's last, and whoever hears
        its answer notes it there."""
        earlier = self._asked.get(key)
        if earlier is None:
            earlier = self._asked[key] = []
        else:
            self._asked.move_to_end(key)
        if earlier and earlier[-1].trace == now.trace:
            self._drop(earlier)  # a second try: its own first one is no earlier prompt
        found = judge(earlier, now, reused, characters, page, elsewhere)
        earlier.append(now)
        held = self._held + len(now.text)
        if len(earlier) > _EACH:
            held -= len(earlier.pop(0).text)
        self._held = held
        if held > self._most or len(self._asked) > self._sessions:
            self._shrink()
        return found

    def _drop(self, earlier: list[Asked]) -> None:
        self._held -= len(earlier.pop().text)

    def _shrink(self) -> None:
        while len(self._asked) > self._sessions or (self._held > self._most and len(self._asked) > 1):
            _, gone = self._asked.popitem(last=False)
            self._held -= sum(len(one.text) for one in gone)
