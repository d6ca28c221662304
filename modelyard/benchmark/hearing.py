"""One streamed answer heard event by event, with the time at which each came. Pure: the clock is the caller's."""

from __future__ import annotations

import re
from collections.abc import Iterable

from modelyard.benchmark.sample import Arrivals, Sample
from modelyard.core.errors import ModelyardError
from modelyard.core.events import BlockDelta, BlockStart, Event, Failed, Finished, Usage

_OWN_ID = re.compile(r" \(id [0-9a-f]+\)$")


def words(error: ModelyardError) -> str:
    """What an error says, without what is its own alone: the same errors are counted together."""
    return _OWN_ID.sub("", error.message)


class Hearing:
    """Every delta is taken for a token until the server tells how many there were."""

    def __init__(self, asked_at: float) -> None:
        self._arrivals = Arrivals(asked_at)
        self._usage = Usage()
        self._visible = False
        self._error: str | None = None
        self.text = ""  # what was said aloud, to be repeated in the next turn
        self.is_over = False

    def hear(self, events: Iterable[Event], at: float) -> None:
        pieces = 0
        for event in events:
            if isinstance(event, BlockDelta):
                pieces += 1
                self.text += event.text if self._visible else ""
            elif isinstance(event, BlockStart):
                self._visible = event.kind == "text"
            elif isinstance(event, Finished):
                self._usage, self.is_over = event.usage, True
            elif isinstance(event, Failed):
                self._error, self.is_over = words(event.error), True
        self._arrivals.add(at, pieces)

    def sample(self, at: float, error: str | None = None) -> Sample:
        error = error or self._error or (None if self.is_over else "the answer broke off")
        told = self._usage != Usage()
        return self._arrivals.sample(
            at,
            prompt_tokens=self._usage.prompt,
            cached_tokens=self._usage.cached,
            output_tokens=self._usage.output if told else None,
            error=error,
        )
