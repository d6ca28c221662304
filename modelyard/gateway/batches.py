"""Batches: files of requests that run at low priority, without their client, and go on after a restart.

    validating ─→ in_progress ─→ finalizing ─→ completed | expired
                       │              └─ the output and error files are written
                       └─→ cancelling ─→ cancelled            validating ─→ failed

A batch is in the list of open work until it has ended. One gateway process runs it: the one named there. What became of
a line is stored before the next line starts, once, under the line's number. So a process that takes over runs just the
lines that have no result, and every count is made from the results.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import count
from typing import Literal

import msgspec
from msgspec.structs import replace
from pydantic import BaseModel, ConfigDict, Field

from modelyard.core.batch import Batch, BatchFault, BatchLine, BatchRow, BatchStatus, Outcome
from modelyard.core.errors import Conflict, InvalidRequest, KeyLimited, ModelyardError, NotFound
from modelyard.core.events import Usage
from modelyard.core.store import ObjectStore
from modelyard.gateway.batch_lines import count_lines, read_lines
from modelyard.gateway.files import Files, in_chunks, read_chunks
from modelyard.gateway.records import OwnerProcess, Records
from modelyard.processes.sandbox import Stopped, current_client
from modelyard.protocols import openai_batches
from modelyard.telemetry.log import log_event

log = logging.getLogger("modelyard.gateway")

Api = Literal["openai", "anthropic"]

_OPEN = "open-batches"  # the scope of the list of open work
SET_ASIDE = "set-aside-batches"  # of those that are not run again
_POLL_S, _IDLE_POLL_S = 1.0, 5.0
_REPORT_S = 1.0  # between two writes of the counts
_LISTED = 1000  # open batches, the oldest first
_MAX_CLAIMED = 16  # batches that a process runs at once
_PROVEN_S = 60.0  # after so long a batch is not suspected of the last process's death
_ROWS = 50  # results read at once
_WAIT_S = (1.0, 30.0)  # the shortest and the longest wait before a line is sent again
_ATTEMPTS = 4  # of a line whose model cannot be reached
_ALWAYS_AGAIN = frozenset({"rate_limit_exceeded", "server_is_overloaded"})
_NO_RESULT: dict[str, tuple[Outcome, str, str]] = {
    "expired": ("expired", "batch_expired", "the completion window ended before this request was run"),
    "cancelled": ("canceled", "batch_cancelled", "the batch was cancelled before this request was run"),
}


MAX_DEATHS = 2  # of processes, until a batch is not run again
_SET_ASIDE = BatchFault("set_aside", f"the server died {MAX_DEATHS} times while it ran this batch: it is not run again")
_FILE_DELETED = BatchFault("file_deleted", "the input file was deleted before all of its requests were run")


class BatchSettings(BaseModel):
    model_config = ConfigDict(extra="forbid")

    max_file_bytes: int = Field(
        default=200 * 1024**2, gt=0, description="Largest uploaded file, and largest body of a batch of Messages."
    )
    max_requests: int = Field(default=50_000, gt=0, description="Requests in one batch.")
    max_open: int = Field(default=50, gt=0, description="Batches of one key that have not ended.")
    concurrency: int = Field(
        default=8,
        gt=0,
        description="Requests of batches that a gateway process has in the queue or in an engine at a time. They have "
        "low priority: other requests overtake them in the queue.",
    )


class LineReply(msgspec.Struct, frozen=True):
    """The reply to a line. `error` is its code; `retry_after` in seconds."""

    status: int
    request_id: str
    body: bytes
    error: str = ""
    retry_after: float = 0.0


class OpenBatch(msgspec.Struct, frozen=True):
    """An entry in the list of open work. `owner` is the process that runs it; `deaths` counts those that died with
    it, or were killed because they hung."""

    api: Api
    key: str
    owner: str = ""
    deaths: int = 0


Execute = Callable[[Batch, bytes, str], Awaitable[LineReply]]  # a request of this body with this API key

_encode_row, _rows = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(BatchRow)
_encode_open, _open = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(OpenBatch)


class Batches:
    """`execute` runs one request; it is set before `open`."""

    def __init__(
        self,
        store: ObjectStore,
        files: Files,
        owner: OwnerProcess,
        settings: BatchSettings,
        ttl_s: float,
        max_line: int,
    ) -> None:
        """`max_line` is the most bytes of a request."""
        self._store, self._files, self._owner, self.settings, self._ttl = store, files, owner, settings, ttl_s
        self._max_line = max_line
        self._records: dict[Api, Records[Batch]] = {
            "openai": Records(store, "batches", Batch, "batch", ttl_s),
            "anthropic": Records(store, "message-batches", Batch, "batch", ttl_s),
        }
        self.execute: Execute | None = None
        self._slots = asyncio.Semaphore(settings.concurrency)
        self._claimed: dict[str, _BatchRun] = {}
        self._news = asyncio.Event()
        self._loop: asyncio.Task[None] | None = None
        self._fault = ""  # the last reason why the list of open work could not be read

    # --- what clients ask for -----------------------------------------------------------------------------------------

    async def create(self, batch: Batch, key: str, lines: AsyncIterator[bytes] | None = None) -> Batch:
        """`lines` are the requests, if they are not in a file."""
        records = self._records[batch.api]
        if sum(entry.key == key for _, _, entry in await self._open_batches()) >= self.settings.max_open:
            raise KeyLimited(
                f"{self.settings.max_open} batches of this key have not ended, which are the most (batches.max_open): "
                "wait for one of them, or cancel it",
                retry_after=60.0,
            )
        if lines is None:
            await self._check_input(batch.input_file, key)
        else:
            size, scope = 0, f"{records.parts(batch.id, key)}/input"
            async for chunk in in_chunks(lines):
                size += len(chunk)
                await self._store.put(scope, f"{size:015d}", chunk, self._ttl)
        await records.put(batch.id, key, batch)
        await self._store.put(_OPEN, batch.id, _encode_open.encode(OpenBatch(batch.api, key)), self._ttl)
        self._news.set()
        return batch

    async def _check_input(self, file: str, key: str) -> None:
        try:
            found = await self._files.get(file, key)
        except NotFound as error:
            raise InvalidRequest(error.message, param="input_file_id", code="file_not_found") from None
        if found.purpose != "batch":
            raise InvalidRequest(
                f"the purpose of the file {file!r} is {found.purpose!r}: upload it with purpose batch",
                param="input_file_id",
            )

    async def get(self, api: Api, id: str, key: str) -> Batch:
        return await self._records[api].get(id, key)

    async def page(
        self, api: Api, key: str, after: str, limit: int, *, newest_first: bool = True
    ) -> tuple[list[Batch], bool]:
        return await self._records[api].page(key, after, limit, newest_first=newest_first)

    async def cancel(self, api: Api, id: str, key: str) -> Batch:
        def change(batch: Batch) -> Batch | None:
            if batch.has_ended:
                raise Conflict(f"the batch {id!r} has ended: its state is {batch.status}")
            return None if batch.status == "cancelling" else _entering(batch, "cancelling", ending="cancelled")

        batch = await self._records[api].update(id, key, change)
        if (run := self._claimed.get(id)) is not None:
            run.end("cancelled")
        self._news.set()
        return batch

    async def delete(self, api: Api, id: str, key: str) -> None:
        if not (await self.get(api, id, key)).has_ended:
            raise Conflict(f"the batch {id!r} still runs: cancel it, and delete it when it has ended")
        await self._records[api].delete(id, key)

    async def results(self, batch: Batch, key: str) -> AsyncIterator[BatchRow]:
        """What became of each line. A line of a batch that was cancelled or has expired may have no result."""
        done: set[int] = set()
        async for row in self._stored_rows(batch, key):
            done.add(row.line)
            yield row
        if len(done) >= batch.total or batch.ending not in _NO_RESULT:
            return
        outcome, code, message = _NO_RESULT[batch.ending]
        async for number, read in read_lines(self._input(batch, key), batch, self._max_line):
            if number not in done:
                yield BatchRow(number, read.custom_id, outcome, code=code, message=message)

    async def _stored_rows(self, batch: Batch, key: str) -> AsyncIterator[BatchRow]:
        scope, after = self._rows_scope(batch, key), ""
        while page := await self._store.page(scope, after=after, limit=_ROWS):
            for _, row in page:
                yield _rows.decode(row)
            after = page[-1][0]

    def _rows_scope(self, batch: Batch, key: str) -> str:
        return f"{self._records[batch.api].parts(batch.id, key)}/rows"

    def _input(self, batch: Batch, key: str) -> AsyncIterator[bytes]:
        if batch.api == "openai":
            return self._files.content(batch.input_file, key)
        return read_chunks(self._store, f"{self._records[batch.api].parts(batch.id, key)}/input")

    # --- the list of open work ----------------------------------------------------------------------------------------

    def open(self) -> None:
        self._loop = asyncio.get_running_loop().create_task(self._work())

    async def _work(self) -> None:
        while True:
            try:
                await self._claim()
                self._fault = ""
            except ModelyardError as error:
                if error.message != self._fault:
                    log_event(log, logging.ERROR, "batches cannot be run", why=error.message)
                self._fault = error.message
            except Exception as error:
                log_event(log, logging.ERROR, "batches cannot be run", error=error)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_POLL_S if self._claimed else _IDLE_POLL_S):
                    await self._news.wait()
            self._news.clear()

    async def _claim(self) -> None:
        """Take what nobody runs, and see what became of what this process runs."""
        for id, run in list(self._claimed.items()):
            found = await self._store.get(_OPEN, id)
            entry = None if found is None else _open.decode(found)
            if entry is None or entry.owner != self._owner.id:
                run.task.cancel()  # another process has it
            elif (batch := await self._records[entry.api].find(id, entry.key)) and batch.status == "cancelling":
                run.end("cancelled")
            elif run.entry.deaths and time.monotonic() - run.began > _PROVEN_S:
                run.entry = replace(entry, deaths=0)
                await self._store.swap(_OPEN, id, found or b"", _encode_open.encode(run.entry))
        waiting = [found for found in await self._open_batches() if found[0] not in self._claimed]
        while waiting and len(self._claimed) < _MAX_CLAIMED:
            # The keys take turns, and there is always room for one that comes later. Of batches with which a process
            # has died one runs at a time, so that a second death is not counted for the others.
            running = Counter(run.entry.key for run in self._claimed.values())
            id, value, entry = min(waiting, key=lambda found: running[found[2].key])
            waiting.remove((id, value, entry))
            if running[entry.key] >= max(1, _MAX_CLAIMED // (len(running) + 1)):
                continue
            is_mine = entry.owner == self._owner.id
            if not is_mine and await self._owner.is_alive(entry.owner):
                continue
            died = replace(entry, owner=self._owner.id, deaths=entry.deaths + bool(entry.owner and not is_mine))
            if died.deaths and any(run.entry.deaths for run in self._claimed.values()):
                continue
            await self._owner.hold()
            if await self._store.swap(_OPEN, id, value, _encode_open.encode(died)):
                self._claimed[id] = _BatchRun(self._run(id, died), died)
            else:
                self._owner.release()

    async def _open_batches(self) -> list[tuple[str, bytes, OpenBatch]]:
        """The oldest first."""
        found, after = list[tuple[str, bytes, OpenBatch]](), ""
        while page := await self._store.page(_OPEN, after=after, limit=_LISTED):
            found += [(id, value, _open.decode(value)) for id, value in page]
            after = page[-1][0]
            if len(page) < _LISTED:
                break
        return found

    async def _run(self, id: str, entry: OpenBatch) -> None:
        current_client.set(entry.key)
        try:
            batch = await self._records[entry.api].find(id, entry.key)
            if batch is not None and entry.deaths >= MAX_DEATHS:
                log_event(log, logging.ERROR, "a batch was set aside", batch=id, key=entry.key, why=_SET_ASIDE.message)
                await self._store.put(SET_ASIDE, id, _encode_open.encode(entry), self._ttl)
                await self._change(
                    batch, entry.key, lambda found: replace(_entering(found, "failed"), faults=(_SET_ASIDE,))
                )
            elif batch is not None:
                await self._advance(batch, entry.key, self._claimed[id])
            await self._store.delete(_OPEN, id)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # the list still has it: it is run again
            log_event(log, logging.ERROR, "a batch was interrupted", error=error, batch=id)
            await asyncio.gather(self._put_back(id, entry), return_exceptions=True)
            await asyncio.sleep(_POLL_S)
        finally:
            del self._claimed[id]
            self._owner.release()
            self._news.set()

    async def set_aside(self) -> list[str]:
        """The batches with which processes died again and again."""
        return [id for id, _ in await self._store.page(SET_ASIDE, limit=_LISTED)]

    async def _put_back(self, id: str, entry: OpenBatch) -> None:
        mine = _encode_open.encode(replace(entry, owner=self._owner.id))
        await self._store.swap(_OPEN, id, mine, _encode_open.encode(replace(entry, owner="")))

    async def close(self) -> None:
        """Stop without ending a batch: this or another process goes on with it."""
        if self._loop is not None:
            self._loop.cancel()
            await asyncio.gather(self._loop, return_exceptions=True)
        claimed = dict(self._claimed)
        for run in claimed.values():
            run.task.cancel()
        await asyncio.gather(*(run.task for run in claimed.values()), return_exceptions=True)
        for id in claimed:
            with contextlib.suppress(ModelyardError):
                if (value := await self._store.get(_OPEN, id)) is not None:
                    await self._put_back(id, _open.decode(value))

    # --- one batch ----------------------------------------------------------------------------------------------------

    async def _advance(self, batch: Batch, key: str, run: _BatchRun) -> None:
        """From any state to its end."""
        try:
            await self._try_to_advance(batch, key, run)
        except Stopped as stopped:
            fault = BatchFault("invalid_file", f"the input file cannot be read: {stopped.why}")
            await self._change(batch, key, lambda found: replace(_entering(found, "failed"), faults=(fault,)))

    async def _try_to_advance(self, batch: Batch, key: str, run: _BatchRun) -> None:
        if batch.status == "validating":
            batch = await self._validate(batch, key)
        if batch.status == "cancelling":
            run.end("cancelled")
        if batch.status in ("in_progress", "cancelling"):
            await self._recount(batch, key, run)
            await self._run_lines(batch, key, run)
            is_whole = len(run.done) >= batch.total
            ending = run.ending or ("completed" if is_whole else "failed")
            batch = await self._change(batch, key, lambda found: _finalizing(found, ending))
        if not batch.has_ended:
            await self._finalize(batch, key)

    async def _change(self, batch: Batch, key: str, change: Callable[[Batch], Batch | None]) -> Batch:
        return await self._records[batch.api].update(batch.id, key, change)

    async def _validate(self, batch: Batch, key: str) -> Batch:
        """Only what no line can be blamed for fails the whole batch."""
        most, fault = self.settings.max_requests, None
        total, model = await count_lines(self._input(batch, key), batch, self._max_line, most)
        if total == 0:
            fault = BatchFault("empty_file", "the input file has no requests, or it was deleted")
        elif total > most:
            fault = BatchFault("too_many_requests", f"the input file has more than {most} requests, which are the most")

        def change(found: Batch) -> Batch | None:
            if fault is not None:  # also of one that is cancelled: its lines are not even counted
                return replace(_entering(found, "failed"), faults=(fault,))
            if found.status != "validating":
                return replace(found, total=total, model=model)
            return replace(_entering(found, "in_progress"), total=total, model=model)

        return await self._change(batch, key, change)

    async def _recount(self, batch: Batch, key: str, run: _BatchRun) -> None:
        """The lines that have a result, of an earlier process."""
        async for row in self._stored_rows(batch, key):
            run.add(row)

    async def _run_lines(self, batch: Batch, key: str, run: _BatchRun) -> None:
        reporting = asyncio.get_running_loop().create_task(self._report_often(batch, key, run))
        expiry = asyncio.get_running_loop().call_later(max(0.0, batch.expires - time.time()), run.end, "expired")
        seen: set[str] = set()
        try:
            async for number, read in read_lines(self._input(batch, key), batch, self._max_line):
                line = _once(read, number, seen)
                if number in run.done:
                    continue
                if not await run.acquire(self._slots):
                    break
                run.start(self._run_line(batch, key, number, line, run), self._slots.release)
            await run.wait()
        finally:
            expiry.cancel()
            reporting.cancel()
            await run.stop()

    async def _run_line(self, batch: Batch, key: str, number: int, line: BatchLine | BatchRow, run: _BatchRun) -> None:
        row = line if isinstance(line, BatchRow) else await self._reply_to(batch, key, number, line)
        data, scope = _encode_row.encode(row), self._rows_scope(batch, key)
        for attempt in count():
            try:
                await self._store.swap(scope, f"{number:09d}", None, data, self._ttl)
                break
            except ModelyardError as error:  # the answer is there: it is not thrown away
                what = "a line of a batch was not stored; trying again"
                log_event(log, logging.ERROR, what, batch=batch.id, line=number, why=error.message)
                await asyncio.sleep(min(_WAIT_S[1], _WAIT_S[0] * 2.0 ** min(attempt, 10)))
        run.add(row)

    async def _reply_to(self, batch: Batch, key: str, number: int, line: BatchLine) -> BatchRow:
        if self.execute is None:
            raise RuntimeError("batches cannot be run before `execute` is set")
        for attempt in count():
            reply = await self.execute(batch, line.body, key)
            if reply.error == "shutting_down":
                await asyncio.Event().wait()  # until `close` cancels this; the line is run again
            is_busy = reply.error in _ALWAYS_AGAIN or (reply.status in (503, 529) and attempt + 1 < _ATTEMPTS)
            if not is_busy:
                break
            await asyncio.sleep(min(_WAIT_S[1], max(reply.retry_after, _WAIT_S[0] * 2.0 ** min(attempt, 10))))
        outcome: Outcome = "succeeded" if reply.status < 300 else "errored"
        return BatchRow(number, line.custom_id, outcome, reply.status, reply.request_id, reply.body)

    async def _report_often(self, batch: Batch, key: str, run: _BatchRun) -> None:
        while True:
            await asyncio.sleep(_REPORT_S)
            if run.is_counted:
                continue
            counts, usage = dict(run.counts), run.usage
            try:
                await self._change(batch, key, lambda found: replace(found, counts=counts, usage=usage))  # noqa: B023
                run.is_counted = sum(counts.values()) == sum(run.counts.values())
            except ModelyardError as error:
                log_event(log, logging.WARNING, "the counts of a batch were not stored", why=error.message)

    async def _finalize(self, batch: Batch, key: str) -> None:
        counts, usage = Counter[str](), Usage()
        files: dict[str, str | None] = {"output": None, "error": None}
        async for row in self.results(batch, key):
            counts[row.outcome] += 1
            usage = _sum(usage, row)
        if batch.api == "openai":
            for kind, has_lines in (("output", counts["succeeded"]), ("error", counts.total() - counts["succeeded"])):
                if has_lines:
                    name, data = f"{batch.id}_{kind}.jsonl", self._written(batch, key, kind)
                    made = await self._files.create(
                        key, name, "batch_output", in_chunks(data), batch.output_ttl_s, bound=False
                    )
                    files[kind] = made.id

        def change(found: Batch) -> Batch:
            return replace(
                _entering(found, found.ending),
                counts=dict(counts),
                usage=usage,
                output_file=files["output"],
                error_file=files["error"],
            )

        await self._change(batch, key, change)

    async def _written(self, batch: Batch, key: str, kind: str) -> AsyncIterator[bytes]:
        async for row in self.results(batch, key):
            if (row.outcome == "succeeded") == (kind == "output"):
                yield openai_batches.write_row(row, batch)


class _BatchRun:
    """A batch that this process runs: its lines in progress, and the results so far."""

    def __init__(self, work: Awaitable[None], entry: OpenBatch) -> None:
        self.task, self.entry, self.began = asyncio.ensure_future(work), entry, time.monotonic()
        self.done: set[int] = set()
        self.counts, self.usage, self.is_counted = Counter[str](), Usage(), True
        self.ending: BatchStatus | None = None  # set when the lines that are left are not run
        self._ended = asyncio.Event()
        self._lines: set[asyncio.Task[None]] = set()

    def add(self, row: BatchRow) -> None:
        self.done.add(row.line)
        self.counts[row.outcome] += 1
        self.usage, self.is_counted = _sum(self.usage, row), False

    def end(self, ending: BatchStatus) -> None:
        if self.ending is None:
            self.ending = ending
            self._ended.set()
            for line in self._lines:
                line.cancel()

    def start(self, work: Awaitable[None], release: Callable[[], None]) -> None:
        task = asyncio.ensure_future(work)
        self._lines.add(task)
        task.add_done_callback(self._lines.discard)
        task.add_done_callback(lambda _: release())

    async def acquire(self, slots: asyncio.Semaphore) -> bool:
        """Wait for a slot. False if the batch is ended before."""
        waiting, ended = asyncio.ensure_future(slots.acquire()), asyncio.ensure_future(self._ended.wait())
        is_mine = False
        try:
            await asyncio.wait((waiting, ended), return_when=asyncio.FIRST_COMPLETED)
            is_mine = self.ending is None
        finally:
            ended.cancel()
            if not is_mine and not waiting.cancel() and not waiting.cancelled():
                slots.release()
        return is_mine

    async def wait(self) -> None:
        """Until every line that was started has ended. Raise if one failed unexpectedly."""
        for result in await asyncio.gather(*self._lines, return_exceptions=True):
            if isinstance(result, Exception):
                raise result

    async def stop(self) -> None:
        for line in self._lines:
            line.cancel()
        await asyncio.gather(*self._lines, return_exceptions=True)


# --- pure -----------------------------------------------------------------------------------------------------------


def _entering(batch: Batch, status: BatchStatus, *, ending: BatchStatus | None = None) -> Batch:
    times = {**batch.times, status: int(time.time())}
    return replace(batch, status=status, times=times, ending=ending or batch.ending)


def _finalizing(batch: Batch, ending: BatchStatus) -> Batch | None:
    """A batch that is cancelled stays `cancelling` until its files are written."""
    if batch.status == "cancelling":
        return None
    batch = _entering(batch, "cancelling" if ending == "cancelled" else "finalizing", ending=ending)
    return batch if ending != "failed" else replace(batch, faults=(_FILE_DELETED,))


def _once(read: BatchLine | BatchRow, number: int, seen: set[str]) -> BatchLine | BatchRow:
    """`seen` are the ids of the lines before it."""
    if isinstance(read, BatchRow):
        return read
    if (id := read.custom_id) in seen:
        message = f"line {number}: the custom_id {id!r} is used twice"
        return BatchRow(number, id, "errored", code="duplicate_custom_id", message=message)
    seen.add(id)
    return read


def _sum(usage: Usage, row: BatchRow) -> Usage:
    if row.outcome != "succeeded":
        return usage
    more = openai_batches.read_usage(row.body)
    return Usage(
        usage.prompt + more.prompt,
        usage.cached + more.cached,
        usage.output + more.output,
        usage.reasoning + more.reasoning,
    )
