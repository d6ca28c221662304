"""One run for the same request of several gateways: a client that sends again may reach another one than before.

Each gateway lets those join that reach it by itself; those that reached different ones meet here. A job says by its
`joint` that it may be shared, and by whom; everything else that it asks is compared. Whoever joins hears all from the
start, and the run is cancelled when the last has left.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import cast

from msgspec.structs import replace

from modelyard.core.engine import Chunk, End, Generation, Prompt, TextEngine
from modelyard.core.events import Usage
from modelyard.engines.generation_queue import GenerationQueue

_LONGEST = 4096  # chunks that are kept for somebody who may join
_TAIL = 16  # tokens at the end of a prompt by which a candidate is found


class RunDeduplicator:
    """The runs that may be joined."""

    def __init__(self) -> None:
        self._open: dict[Hashable, SharedRun] = {}

    def __len__(self) -> int:
        return len(self._open)

    def generate(self, engine: TextEngine, prompt: Prompt) -> Generation[Chunk]:
        if prompt.dedup_key is None:
            return engine.generate(prompt)
        ids = prompt.ids
        key = (id(engine), prompt.dedup_key, len(ids), tuple(ids[-_TAIL:]))
        shared = self._open.get(key)
        if shared is not None and shared.asked == _asked(prompt):
            return shared.join()
        source = engine.generate(prompt)
        if not isinstance(source, GenerationQueue):
            return source
        self._open[key] = shared = SharedRun(cast("GenerationQueue[Chunk]", source), prompt)
        shared.on_shut = partial(self._shut, key, shared)
        box = shared.join()
        shared.begin()
        return box

    def _shut(self, key: Hashable, shared: SharedRun) -> None:
        if self._open.get(key) is shared:
            del self._open[key]


def _asked(prompt: Prompt) -> Prompt:
    """All but whose it is among those who may share it."""
    return replace(prompt, trace="", priority="main")


class SharedRun:
    """One run and its readers' mailboxes."""

    def __init__(self, source: GenerationQueue[Chunk], prompt: Prompt) -> None:
        self.asked = _asked(prompt)
        self._source, self._usage = source, Usage(prompt.n_tokens)
        self._said: list[Chunk] = []
        self._readers: list[GenerationQueue[Chunk]] = []
        self._is_held = False
        self.on_shut: Callable[[], None] = lambda: None

    def begin(self) -> None:
        self._source.forward_to(self._heard)

    def join(self) -> GenerationQueue[Chunk]:
        box: GenerationQueue[Chunk] = GenerationQueue(on_cancel=lambda: self._left(box), on_drained=self._go_on)
        if self._said:
            box.put_many(self._said)
        self._readers.append(box)
        self._go_on()
        return box

    def _heard(self, chunks: list[Chunk], last: bool) -> None:
        self._said += chunks
        if last or len(self._said) > _LONGEST:
            self._said = []
            self.on_shut()
        for box in self._readers:
            box.put_many(chunks, last=last)
        if not last and all(box.full for box in self._readers):
            self._is_held = True
            self._source.forward_to(None)  # nobody reads: the engine is to hear of it

    def _go_on(self) -> None:
        if self._is_held:
            self._is_held = False
            self.begin()

    def _left(self, box: GenerationQueue[Chunk]) -> None:
        """The last one takes the run with it, and hears from it that it has ended."""
        if self._readers == [box]:
            self.on_shut()
            self._source.cancel()
            self._go_on()
            return
        self._readers = [other for other in self._readers if other is not box]
        box.put_many([End("cancelled", self._usage)], last=True)
        if all(other.full for other in self._readers):
            return
        self._go_on()
