"""The load generator, a process of its own: raw sockets on uvloop, requests built by hand, answers hardly looked at.

A job is a JSON object on standard input, the outcome one on standard output. Streams are kept as they came, with the
time of every read, and taken apart only when the last byte is there: looking must not slow down what is looked at.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Callable, Iterator
from itertools import count
from time import perf_counter
from typing import Literal, cast

import msgspec
import uvloop

from bench.stats import Latencies, Stream, in_flight, latencies

NUMBER = "00000000"  # stands once in a body and counts up, so that no two prompts are the same
_END = b"\r\n0\r\n\r\n"  # the last chunk, with the end of the one before: a header line may end in 0, too
_GRACE_S = 30.0  # for what is under way when the time is over


class Job(msgspec.Struct, kw_only=True):
    """`spread_s` spreads the first requests over this time; `beside` is a second port that `ttft` alternates with."""

    kind: Literal["requests", "streams", "ttft"]
    port: int
    body: str
    connections: int = 1
    seconds: float = 0.0
    spread_s: float = 0.0
    count: int = 0
    beside: int = 0


class Outcome(msgspec.Struct, kw_only=True):
    """`answers` came back whole; `errors` did not, or came with another status than 200."""

    answers: int = 0
    errors: int = 0
    seconds: float = 0.0
    events: int = 0
    in_flight: int = 0
    latencies: Latencies | None = None
    ttft_ms: list[float] = []
    beside_ms: list[float] = []
    first_error: str = ""


def requests(port: int, body: str) -> Iterator[bytes]:
    """The same request for ever, but for its number."""
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer bench\r\nContent-Length: {len(body.encode())}\r\n\r\n"
    )
    before, _, after = (head + body).encode().partition(NUMBER.encode())
    for number in count(1):
        yield b"%b%08d%b" % (before, number, after)


def length_of(answer: bytes) -> int | None:
    """How long an answer with a Content-Length is in all; None while its head is not whole."""
    end = answer.find(b"\r\n\r\n")
    if end < 0:
        return None
    lower = answer[:end].lower() + b"\r\n"
    at = lower.find(b"\r\ncontent-length:")
    size = int(lower[at + 17 : lower.index(b"\r\n", at + 17)]) if at >= 0 else 0
    return end + 4 + size


class Connection(asyncio.Protocol):
    """One keep-alive connection, one request at a time. `done` is told after every answer, and when it breaks."""

    def __init__(self, requests: Iterator[bytes], streams: bool, done: Callable[[Connection], None]) -> None:
        self.requests, self.streams, self.done = requests, streams, done
        self.sent = 0.0
        self.parts: list[tuple[float, bytes]] = []
        self.broken = False
        self._tail = b""
        self._answer = b""
        self._length: int | None = None
        self._busy = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def send(self) -> None:
        self.parts, self._tail, self._answer, self._length = [], b"", b"", None
        self._busy = True
        request = next(self.requests)
        self.sent = perf_counter()
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        if self.streams:
            self.parts.append((perf_counter(), data))
            self._tail = (self._tail + data)[-len(_END) :]
            if self._tail == _END:
                self._over()
            elif len(self.parts) == 1 and not data.startswith(b"HTTP/1.1 200"):
                self._break()
            return
        self._answer = self._answer + data if self._answer else data
        if self._length is None:
            self._length = length_of(self._answer)
        if self._length is not None and len(self._answer) >= self._length:
            self._over() if self._answer.startswith(b"HTTP/1.1 200") else self._break()

    @property
    def said(self) -> str:
        """What came, for an error message."""
        raw = b"".join(data for _, data in self.parts) or self._answer
        return raw[:2000].decode(errors="replace") or "the connection was closed without a word"

    def _over(self) -> None:
        self._busy = False
        self.done(self)

    def _break(self) -> None:
        self.broken = True
        self._over()
        self.transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        del error
        if self._busy:
            self._break()


class Run:
    """Every connection asks again as soon as it is answered, until the time is over; the rest is waited for."""

    def __init__(self, job: Job) -> None:
        self.job, self.outcome = job, Outcome()
        self.streams: list[Stream] = []
        self._running = 0
        self._idle = asyncio.Event()
        self._until = 0.0

    async def run(self) -> Outcome:
        connections = await self._connect()
        began = perf_counter()
        self._until = began + self.job.seconds
        self._running = len(connections)
        for n, connection in enumerate(connections):
            delay = self.job.spread_s * n / len(connections)
            asyncio.get_running_loop().call_later(delay, connection.send)
        await self._wait()
        self.outcome.seconds = perf_counter() - began
        for connection in connections:
            connection.transport.abort()
        return self._summed()

    async def _connect(self) -> list[Connection]:
        loop, made = asyncio.get_running_loop(), []
        asked = requests(self.job.port, self.job.body)
        for _ in range(self.job.connections):
            make = lambda: Connection(asked, self.job.kind == "streams", self._answered)  # noqa: E731
            _, connection = await loop.create_connection(make, "127.0.0.1", self.job.port)
            made.append(connection)
        return made

    def _answered(self, connection: Connection) -> None:
        if connection.broken:
            self.outcome.errors += 1
            self.outcome.first_error = self.outcome.first_error or connection.said
        else:
            self.outcome.answers += 1
            if connection.streams:
                self.streams.append(Stream(connection.sent, tuple(connection.parts)))
        if perf_counter() < self._until and not connection.broken:
            connection.send()
            return
        self._running -= 1
        if self._running == 0:
            self._idle.set()

    async def _wait(self) -> None:
        try:
            await asyncio.wait_for(self._idle.wait(), self.job.seconds + _GRACE_S)
        except TimeoutError:
            self.outcome.errors += self._running
            self.outcome.first_error = self.outcome.first_error or f"{self._running} were not answered in time"

    def _summed(self) -> Outcome:
        out = self.outcome
        if self.job.kind == "streams":
            cut = [stream for stream in self.streams if not stream.is_whole]
            out.errors += len(cut)
            out.answers -= len(cut)
            out.events = sum(stream.events for stream in self.streams)
            out.in_flight = in_flight(self.streams)
            out.latencies = latencies(self.streams)
        return out


class Turns:
    """One stream after another, in turns from the server and from the one beside it: the time to the first token."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._answer: asyncio.Future[Connection]

    async def run(self) -> Outcome:
        out = Outcome()
        pair = [(await self._connect(port), times) for port, times in self._sides(out)]
        for _ in range(self.job.count):
            for connection, times in pair:
                times.append(await self._once(connection) * 1000)
        for connection, _ in pair:
            connection.transport.abort()
        return out

    def _sides(self, out: Outcome) -> list[tuple[int, list[float]]]:
        return [(self.job.port, out.ttft_ms), (self.job.beside, out.beside_ms)]

    async def _connect(self, port: int) -> Connection:
        loop, asked = asyncio.get_running_loop(), requests(port, self.job.body)
        return (await loop.create_connection(lambda: Connection(asked, True, self._hear), "127.0.0.1", port))[1]

    def _hear(self, connection: Connection) -> None:
        self._answer.set_result(connection)

    async def _once(self, connection: Connection) -> float:
        self._answer = asyncio.get_running_loop().create_future()
        connection.send()
        await asyncio.wait_for(self._answer, _GRACE_S)
        stream = Stream(connection.sent, tuple(connection.parts))
        if not stream.is_whole:
            raise RuntimeError(f"the answer is not a whole stream: {connection.said}")
        return stream.token_times()[0] - stream.sent


def main() -> None:
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
    gc.disable()  # the work is bounded, and a collection would look like a late token
    outcome = uvloop.run((Turns(job) if job.kind == "ttft" else Run(job)).run())
    sys.stdout.buffer.write(msgspec.json.encode(outcome))


if __name__ == "__main__":
    main()
