"""Output items on their way in: told one at a time and in order, whatever the upstream sends and omits.

Text may come in deltas, in the finished item, or only in the last event's `response.output`; none of it is told twice.
Items may overlap on the wire: what arrives for a later one waits until the earlier one has ended.
"""

from __future__ import annotations

from collections.abc import Iterator

from modelyard.core.events import BlockDelta, BlockEnd, Event, TokenLogprob
from modelyard.protocols.openai_responses.arrived import CALLS, KNOWN, OutputItem

Logprobs = tuple[TokenLogprob, ...]


class Arriving:
    """One item: what it is, what has come of it, and what of that has not been told yet."""

    def __init__(self, item: OutputItem) -> None:
        self.item = item
        self.is_begun = self.is_done = False
        self.is_complete = True
        self._length = 0
        self._source = ""
        self._waiting: list[tuple[str, Logprobs]] = []

    def add(self, text: str, logprobs: Logprobs, source: str) -> None:
        """Reasoning may come twice, as itself and as its summary: the first of the two to speak is heard."""
        self._source = self._source or source
        if source == self._source and (text or logprobs):
            self._length += len(text)
            self._waiting.append((text, logprobs))

    def next_summary(self) -> None:
        if "summary" in self._source:
            self.add("\n\n", (), self._source)

    def finish(self, item: OutputItem) -> None:
        """The whole item: what no delta brought is added now."""
        if not self.is_done:
            rest, logprobs = item.text[self._length :], () if self._length else item.logprobs
            self.add(rest, logprobs, self._source)
            self.item, self.is_done = item, True
            self.is_complete = item.type not in CALLS or item.status in (None, "completed")

    def cut(self) -> None:
        """The end came first: a call that nobody finished is not a call to run."""
        if not self.is_done:
            self.is_done, self.is_complete = True, self.item.type not in CALLS

    def begin(self, block: int) -> Iterator[Event]:
        if not self.is_begun:
            self.is_begun = True
            yield self.item.start(block)

    def tell(self, block: int) -> Iterator[Event]:
        for text, logprobs in self._waiting:
            yield BlockDelta(block, text, logprobs)
        self._waiting.clear()

    def end(self, block: int) -> BlockEnd:
        return BlockEnd(block, self.item.encrypted_content or "", self.is_complete)


class Arrivals:
    """All items of one response. An unknown kind of item keeps its place and is not told."""

    def __init__(self) -> None:
        self._items: dict[int, Arriving | None] = {}
        self._queue: list[Arriving] = []
        self._block = 0
        self._latest = -1  # the place of the item spoken of last, for servers that do not say
        self.has_calls = False

    def open(self, item: OutputItem, place: int | None) -> None:
        place = len(self._items) if place is None else place
        self._latest = place
        if place not in self._items:
            arriving = Arriving(item) if item.type in KNOWN else None
            self._items[place] = arriving
            self._queue += [arriving] if arriving else []

    def find(self, place: int | None) -> Arriving | None:
        return self._items.get(self._latest if place is None else place)

    def done(self, item: OutputItem, place: int | None) -> None:
        if place is None and self._is_open(item):
            place = self._latest
        self.open(item, place)
        if arriving := self.find(place):
            arriving.finish(item)

    def _is_open(self, item: OutputItem) -> bool:
        latest = self._items.get(self._latest)
        return latest is not None and not latest.is_done and latest.item.type == item.type

    def settle(self, output: list[OutputItem]) -> None:
        """The last word on what is still open; the only word where no item was ever announced."""
        is_silent = not self._items
        for place, item in enumerate(output):
            arriving = self._items.get(place)
            if is_silent or (arriving and arriving.item.type == item.type):
                self.done(item, place)
        for left in self._queue:
            left.cut()

    def tell(self) -> Iterator[Event]:
        while self._queue:
            head = self._queue[0]
            yield from head.begin(self._block)
            yield from head.tell(self._block)
            if not head.is_done:
                return
            yield head.end(self._block)
            self.has_calls |= head.item.type in CALLS and head.is_complete
            self._queue.pop(0)
            self._block += 1
