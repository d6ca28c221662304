"""Request deduplication: an identical request joins the stream that runs already.

Only where both would get the same reply anyway (greedy, seeded, or the same idempotency key), where everything in the
request is equal, and under the same API key. A new reader gets the stream from its start. The generation is cancelled
when the last reader leaves.

No extra task runs: the first reader that needs more fetches it and wakes the others. A reader that leaves while it
fetches stays until the fetch returns, so nothing of the stream is lost.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Self

from msgspec.structs import replace

from modelyard.core.errors import Cancelled, ModelyardError
from modelyard.core.events import CacheReuse, Failed
from modelyard.gateway.prepared_request import PreparedRequest
from modelyard.gateway.stream import EventBatch, Stream

_MAX_BATCHES = 4096  # kept for new readers; a longer stream is not shared any more

DedupKey = tuple[object, ...]


def is_same_request(new: PreparedRequest, running: PreparedRequest) -> bool:
    """Compare everything, also what an idempotency key would vouch for."""
    same_reply = new.is_deterministic() or new.caller.idempotency == running.caller.idempotency is not None
    return (
        same_reply
        and new.caller.key == running.caller.key
        and (new.target, new.sampling, new.constraint) == (running.target, running.sampling, running.constraint)
        and new.prompts == running.prompts
        and new.model is running.model
        # How the reply is sent does not matter: a client whose stream broke may ask for the whole reply.
        and replace(new.request, stream=False, include_usage=False)
        == replace(running.request, stream=False, include_usage=False)
    )


def _key(prepared: PreparedRequest) -> DedupKey:
    """Find the candidate; `is_same_request` decides. Strings cache their hashes."""
    texts = (hash(prompt.text) for prompt in prepared.prompts)
    return prepared.caller.key, prepared.target.cache, prepared.request.session, *texts


class RequestDeduplicator:
    """Of requests that are shareable (`PreparedRequest.is_shareable`)."""

    def __init__(self) -> None:
        self._open: dict[DedupKey, SharedStream] = {}
        self._joined: dict[str, SharedReader] = {}  # by trace, until they are closed; the pool does not know them

    def __len__(self) -> int:
        return len(self._open)

    def find(self, prepared: PreparedRequest) -> SharedReader | None:
        """A reader of the stream that an identical request runs, if there is one."""
        shared = self._open.get(_key(prepared)) if self._open else None
        if shared is None or not is_same_request(prepared, shared.source.prepared):
            return None
        trace = prepared.caller.trace
        reader = SharedReader(prepared, shared, on_close=lambda: self._joined.pop(trace, None))
        self._joined[trace] = reader
        return reader

    def cancel(self, trace: str, reason: ModelyardError) -> bool:
        """Ends the request that joined another one under this trace; whether there was one. The other goes on."""
        reader = self._joined.get(trace)
        if reader is not None:
            reader.cancel(reason)
        return reader is not None

    def share(self, stream: Stream) -> SharedReader:
        """The stream as its own client reads it."""
        key = _key(stream.prepared)
        self._open[key] = shared = SharedStream(stream, self, key)
        return SharedReader(stream.prepared, shared)

    def remove(self, key: DedupKey, shared: SharedStream) -> None:
        if self._open.get(key) is shared:
            del self._open[key]


class SharedStream:
    """One stream and its readers. `batches` holds what arrived, from batch number `base` on."""

    def __init__(self, source: Stream, registry: RequestDeduplicator, key: DedupKey) -> None:
        self.source, self._registry, self._key = source, registry, key
        self.batches: deque[EventBatch] = deque()
        self.base = 0
        self.over = self._closed_to_new = self._fetching = False
        self._progress = asyncio.Event()
        self._readers: set[SharedReader] = set()  # not yet closed
        self._active: set[SharedReader] = set()  # of those, not cancelled

    @property
    def end(self) -> int:
        return self.base + len(self.batches)

    def add(self, reader: SharedReader) -> None:
        self._readers.add(reader)
        self._active.add(reader)

    async def wait(self) -> None:
        """Return when something may have changed: a new batch, the end, or a reader that left."""
        if self._fetching:
            await self._progress.wait()
            return
        self._fetching = True
        try:
            self.batches.append(await self.source.__anext__())
        except StopAsyncIteration:
            self.over = True
            self._close_to_new()
        finally:
            self._fetching = False
            self._wake()
        if len(self.batches) > _MAX_BATCHES:
            self._close_to_new()

    def _wake(self) -> None:
        self._progress.set()
        self._progress.clear()

    def drop_read(self) -> None:
        """Drop what every reader has read, once no new reader can join."""
        if self._closed_to_new and self._readers:
            lowest = min(reader.position for reader in self._readers)
            while self.base < lowest:
                self.batches.popleft()
                self.base += 1

    def _close_to_new(self) -> None:
        self._closed_to_new = True
        self._registry.remove(self._key, self)

    def on_cancel(self, reader: SharedReader, reason: ModelyardError | None) -> bool:
        """True for the last active reader: then the generation itself is cancelled and reports it."""
        if self._active == {reader}:
            self._close_to_new()
            self.source.cancel(reason)
            return True
        self._active.discard(reader)
        self._wake()
        return False

    def on_close(self, reader: SharedReader) -> None:
        self._readers.discard(reader)
        self._active.discard(reader)
        if not self._active:
            self._close_to_new()
            if self._readers:  # a cancelled reader still fetches; it must reach its end
                self.source.cancel()
        if not self._readers:
            self.source.close()


class SharedReader:
    """One reader of a shared stream, and a `Stream` itself."""

    def __init__(
        self, prepared: PreparedRequest, shared: SharedStream, on_close: Callable[[], object] = lambda: None
    ) -> None:
        self.prepared, self.position = prepared, 0
        self._shared, self._on_close = shared, on_close
        self._cancel_reason: ModelyardError | None = None
        self._failed_choices = 0
        self._closed = False
        shared.add(self)

    @property
    def reuse(self) -> CacheReuse | None:
        return self._shared.source.reuse

    @property
    def ignored(self) -> tuple[str, ...]:
        return self._shared.source.ignored

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> EventBatch:
        shared = self._shared
        while self._cancel_reason is None and self.position == shared.end:
            if shared.over:
                raise StopAsyncIteration
            await shared.wait()
        if self._cancel_reason is not None:
            if self._failed_choices == self.prepared.choices:
                raise StopAsyncIteration
            self._failed_choices += 1
            return self._failed_choices - 1, [Failed(self._cancel_reason)]
        batch = shared.batches[self.position - shared.base]
        self.position += 1
        shared.drop_read()
        return batch

    def cancel(self, reason: ModelyardError | None = None) -> None:
        """Idempotent. This reader leaves; the stream goes on while others read it."""
        if self._cancel_reason is None and not self._closed and not self._shared.on_cancel(self, reason):
            self._cancel_reason = reason or Cancelled("the client disconnected")

    def close(self) -> None:
        """Idempotent."""
        if not self._closed:
            self._closed = True
            self._shared.on_close(self)
            self._on_close()
