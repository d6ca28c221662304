"""One engine run for identical requests from several gateways: a client's retry may reach another gateway.

Each gateway deduplicates its own requests; those of different gateways meet here. A prompt with a `dedup_key` may share
its run with prompts that have the same key and are otherwise equal. A reader that joins gets everything from the start.
The run is cancelled when the last reader leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import cast

from msgspec.structs import replace

from modelyard.core.engine import Chunk, End, Generation, Prompt, TextEngine
from modelyard.core.events import Usage
from modelyard.engines.generation_queue import GenerationQueue

_MAX_CHUNKS = 4096  # kept for readers that join; after that a run cannot be joined
_TAIL_TOKENS = 16  # of a prompt, used as part of the lookup key


class RunDeduplicator:
    """The runs that may be joined."""

    def __init__(self) -> None:
        self._runs: dict[Hashable, SharedRun] = {}

    def __len__(self) -> int:
        return len(self._runs)

    def generate(self, engine: TextEngine, prompt: Prompt) -> Generation[Chunk]:
        if prompt.dedup_key is None:
            return engine.generate(prompt)
        ids = prompt.ids
        key = (id(engine), prompt.dedup_key, len(ids), tuple(ids[-_TAIL_TOKENS:]))
        run = self._runs.get(key)
        if run is not None and run.prompt == _comparable(prompt):
            return run.join()
        source = engine.generate(prompt)
        if not isinstance(source, GenerationQueue):
            return source
        self._runs[key] = run = SharedRun(cast("GenerationQueue[Chunk]", source), prompt)
        run.on_closed = partial(self._remove, key, run)
        reader = run.join()
        run.start()
        return reader

    def _remove(self, key: Hashable, run: SharedRun) -> None:
        if self._runs.get(key) is run:
            del self._runs[key]


def _comparable(prompt: Prompt) -> Prompt:
    """Without the fields that may differ between requests that share a run."""
    return replace(prompt, trace="", priority="main")


class SharedRun:
    """One run of an engine and the queues of its readers. `on_closed` is called when it can no longer be joined."""

    def __init__(self, source: GenerationQueue[Chunk], prompt: Prompt) -> None:
        self.prompt = _comparable(prompt)
        self._source, self._usage = source, Usage(prompt.n_tokens)
        self._chunks: list[Chunk] = []
        self._readers: list[GenerationQueue[Chunk]] = []
        self._is_paused = False
        self.on_closed: Callable[[], None] = lambda: None

    def start(self) -> None:
        self._source.forward_to(self._on_chunks)

    def join(self) -> GenerationQueue[Chunk]:
        reader: GenerationQueue[Chunk] = GenerationQueue(on_cancel=lambda: self._leave(reader), on_drained=self._resume)
        if self._chunks:
            reader.put_many(self._chunks)
        self._readers.append(reader)
        self._resume()
        return reader

    def _on_chunks(self, chunks: list[Chunk], last: bool) -> None:
        self._chunks += chunks
        if last or len(self._chunks) > _MAX_CHUNKS:
            self._chunks = []
            self.on_closed()
        for reader in self._readers:
            reader.put_many(chunks, last=last)
        if not last and all(reader.full for reader in self._readers):
            self._is_paused = True
            self._source.forward_to(None)  # no reader keeps up: let the engine's queue fill

    def _resume(self) -> None:
        if self._is_paused:
            self._is_paused = False
            self.start()

    def _leave(self, reader: GenerationQueue[Chunk]) -> None:
        """The last reader cancels the run and gets its end from the engine."""
        if self._readers == [reader]:
            self.on_closed()
            self._source.cancel()
            self._resume()
            return
        self._readers = [other for other in self._readers if other is not reader]
        reader.put_many([End("cancelled", self._usage)], last=True)
        if not all(other.full for other in self._readers):
            self._resume()
