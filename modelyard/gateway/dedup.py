"""An identical resend joins the job that runs already: one answer, several readers, each of whom may leave at any time.

Only where both were to get the same answer anyway: greedy, seeded, or sent under one idempotency key; and only where
all that was asked is the same, under the same API key. Whoever joins reads from the start. The work is cancelled when
the last reader leaves.

No task is made for it: whichever reader first wants more fetches it, and the others hear of it. A reader that leaves
while it fetches stays until something came: nothing of the answer is lost, and another one fetches what follows.
"""

from __future__ import annotations

import asyncio
from collections import deque

from msgspec.structs import replace

from modelyard.core.errors import Cancelled, ModelyardError
from modelyard.core.events import Event, Failed
from modelyard.core.request import Request
from modelyard.gateway.answer import ChoiceStream
from modelyard.gateway.choices import MultiChoiceStream
from modelyard.gateway.prepared_request import PreparedRequest
from modelyard.telemetry.cache_diagnostics import CacheReuse

_LONGEST = 4096  # batches that are kept for somebody who may join: an answer that has more is not joined any more

Key = tuple[object, ...]
Batch = tuple[int, list[Event]]


def joins(job: PreparedRequest, running: PreparedRequest) -> bool:
    """Everything is compared, also what a key would be trusted for: nobody gets an answer to another question."""
    sure = job.is_repeatable() or job.caller.idempotency == running.caller.idempotency is not None
    return (
        sure
        and job.caller.key == running.caller.key
        and (job.target, job.sampling, job.constraint) == (running.target, running.sampling, running.constraint)
        and job.runs == running.runs
        and job.model is running.model
        and _asked(job.request) == _asked(running.request)
    )


def _asked(request: Request) -> Request:
    """All but how the answer is sent: a client whose stream broke may ask for the whole."""
    return replace(request, stream=False, include_usage=False)


def _key(job: PreparedRequest) -> Key:
    """Finds the candidate; `joins` decides. The texts' hashes are kept by the texts."""
    return job.caller.key, job.target.cache, job.request.session, *(hash(run.text) for run in job.runs)


class RequestDeduplicator:
    """The answers that may be joined, by what was asked."""

    def __init__(self) -> None:
        self._open: dict[Key, SharedStream] = {}

    def __len__(self) -> int:
        return len(self._open)

    def find(self, job: PreparedRequest) -> SharedReader | None:
        """A seat at the answer to the very same question, where one runs."""
        if not self._open or not job.may_be_joined():
            return None
        shared = self._open.get(_key(job))
        return SharedReader(job, shared) if shared is not None and joins(job, shared.source.job) else None

    def opened(self, answer: ChoiceStream | MultiChoiceStream) -> ChoiceStream | MultiChoiceStream | SharedReader:
        """The answer as its own client reads it: at a shared table, where others may come."""
        if not answer.job.may_be_joined():
            return answer
        key = _key(answer.job)
        self._open[key] = shared = SharedStream(answer, self, key)
        return SharedReader(answer.job, shared)

    def shut(self, key: Key, shared: SharedStream) -> None:
        if self._open.get(key) is shared:
            del self._open[key]


class SharedStream:
    """One answer and its readers. `said` is what came, from batch `base` on."""

    def __init__(self, source: ChoiceStream | MultiChoiceStream, home: RequestDeduplicator, key: Key) -> None:
        self.source, self._home, self._key = source, home, key
        self.said: deque[Batch] = deque()
        self.base = 0
        self.over = self._is_shut = self._fetching = False
        self._news = asyncio.Event()
        self._seats: set[SharedReader] = set()
        self._wanting: set[SharedReader] = set()

    @property
    def end(self) -> int:
        return self.base + len(self.said)

    def join(self, listener: SharedReader) -> None:
        self._seats.add(listener)
        self._wanting.add(listener)

    async def more(self) -> None:
        """Returns when there may be something new: more was said, it is over, or somebody left."""
        if self._fetching:
            await self._news.wait()
            return
        self._fetching = True
        try:
            self.said.append(await self.source.__anext__())
        except StopAsyncIteration:
            self.over = True
            self._shut()
        finally:
            self._fetching = False
            self._tell()
        if len(self.said) > _LONGEST:
            self._shut()

    def _tell(self) -> None:
        self._news.set()
        self._news.clear()

    def was_read(self) -> None:
        """What everybody has read is kept only while somebody may still join."""
        if self._is_shut and self._seats:
            lowest = min(listener.at for listener in self._seats)
            while self.base < lowest:
                self.said.popleft()
                self.base += 1

    def _shut(self) -> None:
        self._is_shut = True
        self._home.shut(self._key, self)

    # --- readers leave ----------------------------------------------------------------------------------------------

    def cancelled(self, listener: SharedReader, why: ModelyardError | None) -> bool:
        """True where it was the last: then the work itself is cancelled, and says so."""
        if self._wanting == {listener}:
            self._shut()
            self.source.cancel(why)
            return True
        self._wanting.discard(listener)
        self._tell()
        return False

    def closed(self, listener: SharedReader) -> None:
        self._seats.discard(listener)
        self._wanting.discard(listener)
        if not self._wanting:
            self._shut()
            if self._seats:  # one that left is still fetching: it must come to its end
                self.source.cancel()
        if not self._seats:
            self.source.close()


class SharedReader:
    """One reader of a shared answer: the same reading surface as the answer itself."""

    def __init__(self, job: PreparedRequest, shared: SharedStream) -> None:
        self.job, self.at = job, 0
        self._shared = shared
        self._why: ModelyardError | None = None
        self._goodbyes = 0  # choices that were told of it
        self._closed = False
        shared.join(self)

    @property
    def reuse(self) -> CacheReuse | None:
        return self._shared.source.reuse

    def __aiter__(self) -> SharedReader:
        return self

    async def __anext__(self) -> Batch:
        shared = self._shared
        while self._why is None and self.at == shared.end:
            if shared.over:
                raise StopAsyncIteration
            await shared.more()
        if self._why is not None:
            return self._goodbye(self._why)
        batch = shared.said[self.at - shared.base]
        self.at += 1
        shared.was_read()
        return batch

    def _goodbye(self, why: ModelyardError) -> Batch:
        if self._goodbyes == self.job.choices:
            raise StopAsyncIteration
        self._goodbyes += 1
        return self._goodbyes - 1, [Failed(why)]

    def cancel(self, why: ModelyardError | None = None) -> None:
        """Idempotent. This reader leaves; the answer goes on while others read it."""
        if self._why is None and not self._closed and not self._shared.cancelled(self, why):
            self._why = why or Cancelled("the client went away")

    def close(self) -> None:
        """Idempotent."""
        if not self._closed:
            self._closed = True
            self._shared.closed(self)
