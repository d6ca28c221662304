"""Load of one prepared request, sent again and again at the least cost, also from a process of its own."""

from __future__ import annotations

import asyncio
import gc
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from bench.raw_http import HttpClient
from modelyard.core.errors import InvalidRequest
from modelyard_bench.http_client import HttpResponse
from modelyard_bench.load import LoadGenerator, Round, RoundLength, Sample, TokenTimer, base_url
from modelyard_bench.workload import UserTurn

ROOT = Path(__file__).resolve().parent.parent
COUNTER = "00000000"  # occurs once in the body of a prepared request and counts up: no two prompts are equal
_CONTENT = re.compile(rb'"content": ?"[^"]')  # a delta with text; the first event of a stream has an empty one


class RequestTarget:
    """Sends one prepared chat request again and again on keep-alive connections, at the least cost per request.

    Streams are not decoded: events are counted, and those with text are timed. Use it in `async with`.
    """

    def __init__(self, url: str, body: str, *, key: str | None = None, limit_s: float = 60.0) -> None:
        if urlsplit(url).scheme != "http":
            raise InvalidRequest(f"{url!r} is not a URL such as http://127.0.0.1:8000")
        self.name, self._limit_s = url, limit_s
        self._is_stream = bool(msgspec.json.decode(body.encode()).get("stream"))
        self.client = HttpClient(url, key=key, keep_alive=True)
        path = urlsplit(base_url(url)).path + "/chat/completions"
        self._requests = numbered(self.client.request("POST", path, body.encode()))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.aclose()

    def start(self) -> Self:
        return self

    async def send(self, turn: UserTurn) -> Sample:
        del turn
        return self._sample(await self.client.send(next(self._requests), self._limit_s))

    def _sample(self, response: HttpResponse) -> Sample:
        total = response.ended - response.sent
        if response.error is not None or response.status != 200:
            shown = response.body[:500].decode(errors="replace")
            return Sample(total_s=total, error=response.error or f"{response.status}: {shown}")
        if not self._is_stream:
            return Sample(total_s=total)
        body = response.body
        timer = TokenTimer(response.sent)
        for at in token_times(response):
            timer.add(at)
        is_whole = b"data: [DONE]" in body and timer.tokens > 0
        events = body.count(b"\ndata: ") + body.startswith(b"data: ")
        return timer.sample(response.ended, events=events, error=None if is_whole else "the stream is incomplete")


def numbered(request: bytes) -> Iterator[bytes]:
    """The request with another number in place of `COUNTER` each time; without it, always the same."""
    before, found, after = request.partition(COUNTER.encode())
    for number in count(1):
        yield b"%b%08d%b" % (before, number, after) if found else request


def token_times(response: HttpResponse) -> list[float]:
    """When each event with text was complete; events that arrive in one read have the same time."""
    times: list[float] = []
    rest = b""
    for at, data in response.parts:
        head, end, rest = (rest + data).rpartition(b"\n\n")
        if end:
            times += [at] * len(_CONTENT.findall(head))
    return times


class LoadJob(Struct, frozen=True, kw_only=True):
    """A round of one prepared request, run by another process. It ends with the requests that are then in flight.
    `start_at`, a time of `time.time`, lets several processes begin together."""

    url: str
    body: str
    key: str | None = None
    streams: int = 1
    seconds: float = 0.0
    ramp_s: float = 0.0
    limit_s: float = 60.0
    start_at: float = 0.0

    async def run(self) -> Round:
        await asyncio.sleep(max(0.0, self.start_at - time.time()))
        async with RequestTarget(self.url, self.body, key=self.key, limit_s=self.limit_s) as target:
            length = RoundLength(seconds=self.seconds)
            return await LoadGenerator(target, None, length, streams=self.streams, ramp_s=self.ramp_s).run()

    def run_in_process(self) -> Round:
        """In a process of its own, whose CPU time is not the caller's."""
        with tempfile.TemporaryDirectory(prefix="modelyard-load-") as folder:
            result = Path(folder) / "result.json"
            command = [sys.executable, "-m", __name__, str(result)]
            done = subprocess.run(
                command, input=msgspec.json.encode(self), cwd=ROOT, stderr=subprocess.PIPE, check=False
            )
            if done.returncode:
                raise RuntimeError(f"the load generator failed:\n{done.stderr.decode(errors='replace')[-3000:]}")
            return msgspec.json.decode(result.read_bytes(), type=Round)


def main(argv: Sequence[str]) -> None:
    import uvloop

    job = msgspec.json.decode(sys.stdin.buffer.read(), type=LoadJob)
    gc.disable()  # memory is bounded by the job, and a collection would look like a late token
    Path(argv[0]).write_bytes(msgspec.json.encode(uvloop.run(job.run())))


if __name__ == "__main__":
    main(sys.argv[1:])
