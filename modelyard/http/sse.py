"""A streamed reply: our own response, because it must notice a client that leaves, pings one that waits, and give up on
one that stalls.

Headers wait for the answer's first event, so that a refusal still gets its real status, but never longer than one
keep-alive interval. Reading the answer happens in the request's own task with no task an event; a timer looks after
silence and stalls.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.types import Receive, Scope, Send

from modelyard.core.errors import Cancelled, ModelyardError
from modelyard.core.events import Event, Failed
from modelyard.core.protocol import EventWriter, WireError
from modelyard.gateway import ChoiceStream, SharedReader
from modelyard.gateway.choices import MultiChoiceStream
from modelyard.http.cycle import behind
from modelyard.http.disconnect import watch
from modelyard.http.request_context import RequestContext, headers, respond_error
from modelyard.http.settings import HttpSettings
from modelyard.http.together import own_task
from modelyard.telemetry.request_capture import RequestCapture

Remember = Callable[[int, list[Event]], Awaitable[None]]


class EventStream:
    def __init__(
        self,
        answer: ChoiceStream | MultiChoiceStream | SharedReader,
        writer: EventWriter,
        refusal: Callable[[ModelyardError], WireError],
        visit: RequestContext,
        settings: HttpSettings,
        entry: RequestCapture | None,
        remember: Remember | None = None,
    ) -> None:
        self._answer, self._writer, self._refusal, self._visit = answer, writer, refusal, visit
        self._keepalive_s, self._stall_s = settings.keepalive_s, settings.stall_s
        self._entry, self._remember = entry, remember
        self._started = self._over = False
        self._sending = 0.0  # since when a send has been waiting for the client to read; 0 = none is
        self._last = time.monotonic()
        self._ping: asyncio.Task[None] | None = None
        self._task: asyncio.Task[Any] | None = None

    async def run(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send_raw, self._cycle = send, behind(send)
        self._loop = loop = asyncio.get_running_loop()
        unwatch = watch(scope, receive, self._answer)
        self._timer = loop.call_later(self._keepalive_s, self._tick)
        try:
            await own_task(scope)
            self._task = asyncio.current_task()
            await self._relay()
        finally:
            self._over = True
            self._timer.cancel()
            unwatch()
            self._visit.reuse = self._answer.reuse  # for the log: headers that a ping brought knew nothing of it yet
            self._answer.close()

    async def _relay(self) -> None:
        async for choice, events in self._answer:
            if isinstance(events[-1], Failed):
                self._visit.failed(events[-1].error)
                if self._ping is not None:
                    await self._after(self._ping)
                if not self._started:
                    await self._refuse(events[-1].error)
                    return
            if self._remember is not None:
                await self._remember(choice, events)
            write = self._writer.write
            data = b"".join([write(event, choice) for event in events])
            if not self._passed(data):
                await self._send(data)
        await self._send(self._writer.end(), last=True)

    async def _refuse(self, error: ModelyardError) -> None:
        if isinstance(error, Cancelled):
            self._visit.status = 499  # nobody is there to read it
            return
        self._started = True
        refusal = self._refusal(error)
        if self._entry is not None:
            self._entry.response(refusal.body)
        await respond_error(self._send_raw, self._visit, refusal)

    def _passed(self, data: bytes) -> bool:
        """Sent past ASGI's messages, where nobody has to see them: as most events are. False: nothing is done."""
        if self._ping is not None or not self._started or self._cycle is None or self._entry is not None or not data:
            return False
        self._last = time.monotonic()
        return self._cycle.part(data)

    async def _send(self, data: bytes, last: bool = False) -> None:
        if self._ping is not None:
            await self._after(self._ping)
        await self._write(data, last)

    async def _after(self, ping: asyncio.Task[None]) -> None:
        """A ping under way goes first: it may bring the headers, and nothing may come between them and its body."""
        await asyncio.gather(ping, return_exceptions=True)
        self._ping = None

    async def _write(self, data: bytes, last: bool = False) -> None:
        self._last = self._sending = time.monotonic()
        if not self._started:
            self._started = True
            self._visit.status, self._visit.reuse = 200, self._answer.reuse
            start = headers(self._visit, b"text/event-stream; charset=utf-8", *_STREAM_HEADERS)
            await self._send_raw({"type": "http.response.start", "status": 200, "headers": start})
        if self._entry is not None:
            self._entry.response(data)
        if data or last:
            await self._send_raw({"type": "http.response.body", "body": data, "more_body": not last})
        self._sending = 0.0

    # --- the timer ------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        now = time.monotonic()
        if self._over:
            return
        if self._sending:
            if now - self._sending > self._stall_s:
                self._answer.cancel()
                if self._task is not None:
                    self._task.cancel()
                return
        elif now - self._last >= self._keepalive_s * 0.9:
            self._ping = self._loop.create_task(self._write(self._writer.keepalive()))
        due = self._keepalive_s - (now - self._last) if not self._sending else self._keepalive_s
        self._timer = self._loop.call_later(due if due > 0.05 else self._keepalive_s, self._tick)


_STREAM_HEADERS = (
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold events back
)
