"""Background responses: they run without their client, which fetches the result, or reads the events again, later.

    queued ─→ in_progress ─→ completed | incomplete | failed | cancelled

The record is written before the client is answered. Events are kept as they were written, in pieces, so that any
gateway process can send them again. The process that runs a response is named in its record: if it dies, the response
has failed. It is not run again, because a client may have read a part of it and acted on it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from itertools import chain, repeat
from typing import Any

import msgspec
from msgspec.structs import replace

from modelyard.core.errors import Cancelled, Internal, InvalidRequest, ModelyardError, NotFound, Unavailable
from modelyard.core.events import Event, Failed, Finished, ReplyBuilder
from modelyard.core.request import Request
from modelyard.core.store import ObjectStore
from modelyard.gateway.conversations import Conversations
from modelyard.gateway.records import OwnerProcess, Records
from modelyard.gateway.stream import Stream
from modelyard.protocols.common.json import encode
from modelyard.protocols.common.openai_fields import field_of
from modelyard.protocols.common.sse import frame
from modelyard.protocols.openai_responses.errors import write_failure
from modelyard.protocols.openai_responses.reply import ResponsesStreamWriter
from modelyard.protocols.openai_responses.stored import StoredResponse, make_stored
from modelyard.telemetry.log import log_event

log = logging.getLogger("modelyard.gateway")

_RUNNING = ("queued", "in_progress")
_FLUSH_S = 1.0  # events reach the store after at most so long
_POLL_S = 0.5  # of a response that another process runs
_CANCEL_WAIT_S = 10.0
_SAVE_AGAIN_S = (0.2, 1.0, 5.0, 15.0, 60.0)  # until the next attempt to store a result
_PIECE_FRAMES = 10_000  # sent at once to a client that reads again
_PIECES = 20  # of the stored events, read at once
_LAST_EVENTS = (b"event: response.completed", b"event: response.incomplete", b"event: response.failed")
_LOST = Unavailable("the server that ran this response was stopped: send the request again", code="server_stopped")


class BackgroundResponse(msgspec.Struct, frozen=True):
    """`owner` is the process that runs it, or that ran it."""

    owner: str
    status: str
    stored: StoredResponse
    cancel: bool = False


class BackgroundResponses:
    def __init__(self, store: ObjectStore, ttl_s: float, conversations: Conversations, owner: OwnerProcess) -> None:
        self._store, self._ttl, self._conversations, self._owner = store, ttl_s, conversations, owner
        self._records = Records(store, "background", BackgroundResponse, "response", ttl_s)
        self._running: dict[tuple[str, str], BackgroundRun] = {}  # by id and key
        owner.on_sign.append(self._look_for_cancels)
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(
        self, source: Stream, request: Request, key: str, observer: BackgroundObserver
    ) -> tuple[str, bytes]:
        """Run a request that was started. Returns the response's id, and the object as it is now."""
        prepared = source.prepared
        writer = ResponsesStreamWriter(request, prepared.caller.trace)
        frames = _split(writer.queued(prepared.created))
        id, response = f"resp_{prepared.caller.trace}", bytes(_response_of(frames[-1]))
        try:
            await self._owner.hold()
            record = BackgroundResponse(self._owner.id, "queued", make_stored(request, response))
            await self._records.put(id, key, record)
        except BaseException:
            self._owner.release()
            source.cancel()
            source.close()
            raise
        run = self._running[id, key] = BackgroundRun(source, request, writer, frames, observer)
        self._spawn(self._run(id, key, run))
        return id, response

    async def _run(self, id: str, key: str, run: BackgroundRun) -> None:
        flusher = asyncio.get_running_loop().create_task(self._flush_often(id, key, run))
        try:
            async for _, events in run.source:
                if isinstance(events[-1], Finished | Failed):
                    await self._finish(id, key, run, events)
                    break
                if run.status == "queued":
                    run.status = "in_progress"
                    self._spawn(self._set_in_progress(id, key))
                run.add(events)
        except Exception as error:  # the writer failed
            log_event(log, logging.ERROR, "a background response failed", error=error, response=id)
            await self._finish(id, key, run, [Failed(Internal("the server made a mistake; its log has the details"))])
        finally:
            run.source.close()
            flusher.cancel()
            del self._running[id, key]
            self._owner.release()
            run.observer.on_end(b"".join(run.frames))

    async def _finish(self, id: str, key: str, run: BackgroundRun, events: list[Event]) -> None:
        """Store the result, and only then publish the last event: a follow-up may arrive at once."""
        reply = None
        if isinstance(events[-1], Finished):
            run.builder.feed(events)
            reply = run.builder.reply()
        elif isinstance(events[-1], Failed):
            events = [*events[:-1], Failed(run.observer.public_error(events[-1].error))]
        frames = run.write(events)
        response = bytes(_response_of(frames[-1]))
        stored = make_stored(run.request, response, reply)
        status = str(msgspec.json.decode(field_of(response, "status") or b'""'))
        run.result = result = BackgroundResponse(self._owner.id, status, stored)
        appended = reply is None
        for delay in chain(_SAVE_AGAIN_S, repeat(_SAVE_AGAIN_S[-1])):
            try:
                if not appended:
                    await self._conversations.append(run.request, response, key)
                    appended = True
                await self._flush(id, key, run, frames)
                await self._records.update(id, key, lambda _: result)
                break
            except NotFound:
                break  # it was deleted, or its conversation was
            except ModelyardError as error:
                log_event(log, logging.ERROR, "a response was not stored", response=id, why=error.message)
                run.publish(frames, over=True)  # until it can be stored, this process has it
                frames = []
                await asyncio.sleep(delay)
        run.publish(frames, over=True)

    async def _set_in_progress(self, id: str, key: str) -> None:
        def change(found: BackgroundResponse) -> BackgroundResponse | None:
            return None if found.status != "queued" else _with_status(found, "in_progress")

        try:
            await self._records.update(id, key, change)
        except ModelyardError as error:
            log_event(log, logging.WARNING, "the state of a response was not stored", response=id, why=error.message)

    # --- events -----------------------------------------------------------------------------------------------------

    async def _flush_often(self, id: str, key: str, run: BackgroundRun) -> None:
        while True:
            await asyncio.sleep(_FLUSH_S)
            try:
                await self._flush(id, key, run)
            except ModelyardError as error:
                log_event(log, logging.WARNING, "events of a response were not stored", response=id, why=error.message)

    async def _flush(self, id: str, key: str, run: BackgroundRun, more: Sequence[bytes] = ()) -> None:
        async with run.flushing:
            frames = [*run.frames[run.flushed :], *more]
            if frames:
                scope, name = self._records.parts(id, key), f"{run.flushed:010d}"
                await self._store.put(scope, name, b"".join(frames), self._ttl)
                run.flushed += len(frames)

    async def events(self, id: str, key: str, after: int, silence_s: float) -> AsyncIterator[bytes]:
        """The events with a higher number than `after`: first those that are stored, then each as it comes. Nothing
        (b"") after a silence."""
        await self._settled(id, key)
        position = after + 1
        while (run := self._running.get((id, key))) is not None:
            while position < len(run.frames):
                piece = run.frames[position : position + _PIECE_FRAMES]
                yield b"".join(piece)
                position += len(piece)
            if run.over:
                return
            if not await run.wait(silence_s):
                yield b""
        waited, name, has_ended = 0.0, "", False
        while True:
            record = await self._settled(id, key)  # first: the events of one that has ended are all stored
            pieces = await self._store.page(self._records.parts(id, key), after=name, limit=_PIECES)
            for name, data in pieces:
                frames = _split(data)
                has_ended = frames[-1].startswith(_LAST_EVENTS)
                if wanted := frames[max(0, position - int(name)) :]:
                    yield b"".join(wanted)
                    waited = 0.0
                position = max(position, int(name) + len(frames))
            if pieces:
                continue
            if record.status not in _RUNNING:
                if not has_ended:  # the process that ran it is gone
                    yield _last_event(record, position)
                return
            await asyncio.sleep(_POLL_S)
            waited += _POLL_S
            if waited >= silence_s:
                waited = 0.0
                yield b""

    # --- what clients ask for -----------------------------------------------------------------------------------------

    async def find(self, id: str, key: str) -> BackgroundResponse | None:
        if (run := self._running.get((id, key))) is not None and run.result is not None:
            return run.result
        record: BackgroundResponse | None = await self._records.find(id, key)
        if record is None or record.status not in _RUNNING:
            return record
        if run is not None:
            return record if record.status == run.status else _with_status(record, run.status)
        is_alive = record.owner != self._owner.id and await self._owner.is_alive(record.owner)
        return record if is_alive else await self._lost(id, key)

    async def _settled(self, id: str, key: str) -> BackgroundResponse:
        record = await self.find(id, key)
        return record if record is not None else await self._records.get(id, key)

    async def _lost(self, id: str, key: str) -> BackgroundResponse:
        """The process that ran it is gone."""

        def change(found: BackgroundResponse) -> BackgroundResponse | None:
            if found.status not in _RUNNING:
                return None
            status = "cancelled" if found.cancel else "failed"
            changed = _with_status(found, status, None if found.cancel else write_failure(_LOST))
            return replace(changed, owner="")

        return await self._records.update(id, key, change)

    async def cancel(self, id: str, key: str) -> BackgroundResponse:
        """The response when it has ended. One that has ended before stays as it is."""
        record = await self._settled(id, key)
        if record.status not in _RUNNING:
            return record
        run = self._running.get((id, key))
        if run is not None:
            run.source.cancel(Cancelled("the client cancelled this response"))
        else:
            record = await self._records.update(id, key, lambda found: replace(found, cancel=True))
        try:
            async with asyncio.timeout(_CANCEL_WAIT_S):
                while record.status in _RUNNING:
                    if run is None or not await run.wait_for_result():
                        await asyncio.sleep(_POLL_S)
                    record = await self._settled(id, key)
        except TimeoutError:
            pass  # the client sees that it still runs
        return record

    async def delete(self, id: str, key: str) -> bool:
        if (run := self._running.get((id, key))) is not None:
            run.source.cancel(Cancelled("the client deleted this response"))
        try:
            await self._records.delete(id, key)
        except NotFound:
            return False
        return True

    def _look_for_cancels(self) -> None:
        for (id, key), run in self._running.items():
            self._spawn(self._look_for_cancel(id, key, run))

    async def _look_for_cancel(self, id: str, key: str, run: BackgroundRun) -> None:
        """Another process may have been asked to cancel or delete it."""
        try:
            record = await self._records.find(id, key)
        except ModelyardError:
            return
        if record is None or record.cancel:
            run.source.cancel(Cancelled("the client cancelled this response"))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """The gateway has ended all streams: store how they ended."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_CANCEL_WAIT_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class BackgroundObserver(msgspec.Struct, frozen=True):
    """`public_error`: an error as the client may see it. `on_end` gets all events."""

    public_error: Callable[[ModelyardError], ModelyardError]
    on_end: Callable[[bytes], None]


class BackgroundRun:
    """A background response of this process. `frames` are its events, one each, by their numbers."""

    def __init__(
        self,
        source: Stream,
        request: Request,
        writer: ResponsesStreamWriter,
        frames: list[bytes],
        observer: BackgroundObserver,
    ) -> None:
        self.source, self.request, self._writer, self.frames = source, request, writer, frames
        self.observer = observer
        self.builder = ReplyBuilder()
        self.status, self.flushed, self.over = "queued", 0, False
        self.result: BackgroundResponse | None = None
        self.flushing = asyncio.Lock()
        self._news = asyncio.Event()

    def write(self, events: list[Event]) -> list[bytes]:
        return _split(b"".join([self._writer.write(event) for event in events]))

    def add(self, events: list[Event]) -> None:
        self.builder.feed(events)
        self.publish(self.write(events))

    def publish(self, frames: list[bytes], *, over: bool = False) -> None:
        self.frames += frames
        self.over = self.over or over
        self._news.set()
        self._news = asyncio.Event()

    async def wait(self, seconds: float) -> bool:
        """False if there was no news."""
        try:
            async with asyncio.timeout(seconds):
                await self._news.wait()
        except TimeoutError:
            return False
        return True

    async def wait_for_result(self) -> bool:
        return self.result is not None or await self.wait(_POLL_S)


def _last_event(record: BackgroundResponse, number: int) -> bytes:
    name = "response.failed" if record.status == "failed" else "response.incomplete"
    response = msgspec.Raw(record.stored.response)
    return frame(encode({"type": name, "sequence_number": number, "response": response}), name)


def _split(data: bytes) -> list[bytes]:
    return [frame + b"\n\n" for frame in data.split(b"\n\n") if frame]


def _response_of(frame: bytes) -> msgspec.Raw:
    """The response object in an event."""
    return field_of(frame.partition(b"data: ")[2], "response") or msgspec.Raw(b"{}")


def _with_status(record: BackgroundResponse, status: str, error: object = None) -> BackgroundResponse:
    fields = msgspec.json.decode(record.stored.response, type=dict[str, msgspec.Raw])
    fields["status"] = msgspec.Raw(encode(status))
    if error is not None:
        fields["error"] = msgspec.Raw(encode(error))
    return replace(record, status=status, stored=replace(record.stored, response=encode(fields)))


def not_in_background(id: str, verb: str) -> InvalidRequest:
    return InvalidRequest(
        f"only responses with background: true can be {verb}; {id[:100]!r} is not one", param="background"
    )
