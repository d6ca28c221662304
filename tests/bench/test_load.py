"""The load generator against the bare server: what it counts and what it calls an error."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import islice
from typing import cast

import pytest

from bench.bare import EVENTS, WHOLE, Bare
from bench.load import Job, Run, Turns, length_of, requests
from bench.subjects import body

BODY = body("bench", stream=False)
STREAM = body("bench", stream=True)


class Refusing(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.transport.write(b"HTTP/1.1 503 No\r\ncontent-length: 2\r\n\r\nno")


class Leaving(Refusing):
    def data_received(self, data: bytes) -> None:
        self.transport.close()


@asynccontextmanager
async def listening(make: Callable[[], Refusing | Bare]) -> AsyncIterator[int]:
    """Its port. Every connection is gone when the block has ended."""
    made: list[Refusing | Bare] = []

    def keep() -> asyncio.Protocol:
        made.append(make())
        return made[-1]

    server = await asyncio.get_running_loop().create_server(keep, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()
    for protocol in made:
        protocol.transport.abort()
    await asyncio.sleep(0)


@pytest.fixture
async def bare() -> AsyncIterator[int]:
    async with listening(lambda: Bare(0.0)) as port:
        yield port


def test_no_two_requests_are_the_same_and_each_is_as_long_as_it_says():
    made = list(islice(requests(8000, BODY), 3))
    assert len(set(made)) == 3
    for request in made:
        assert length_of(request) == len(request)
        assert json.loads(request.partition(b"\r\n\r\n")[2])["model"] == "bench"


@pytest.mark.parametrize(
    ("answer", "length"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-len", None),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", 43),
        (b"HTTP/1.1 204 No\r\n\r\n", 19),
        (WHOLE, len(WHOLE)),
    ],
)
def test_the_length_of_an_answer_is_known_with_its_head(answer: bytes, length: int | None):
    assert length_of(answer) == length


async def test_whole_answers_are_counted(bare: int):
    found = await Run(Job(kind="requests", port=bare, body=BODY, connections=3)).run()
    assert (found.answers, found.errors) == (3, 0)


async def test_streams_are_counted_with_their_events_and_times(bare: int):
    found = await Run(Job(kind="streams", port=bare, body=STREAM, connections=2)).run()
    assert (found.answers, found.errors) == (2, 0)
    assert found.events == 2 * (len(EVENTS) + 2)
    assert found.latencies is not None
    assert found.latencies.ttft_p50 > 0


async def test_paced_streams_come_event_by_event():
    async with listening(lambda: Bare(0.001)) as port:
        found = await Run(Job(kind="streams", port=port, body=STREAM)).run()
    assert found.events == len(EVENTS) + 2
    assert found.latencies is not None
    assert found.latencies.gap_p50 > 0


@pytest.mark.parametrize("kind", ["requests", "streams"])
@pytest.mark.parametrize(("protocol", "told"), [(Refusing, "503"), (Leaving, "without a word")])
async def test_a_refusal_and_a_lost_connection_are_errors(kind: str, protocol: type[Refusing], told: str):
    async with listening(protocol) as port:
        job = Job(kind=kind, port=port, body=STREAM, connections=2, seconds=5)  # type: ignore[arg-type]
        found = await Run(job).run()
    assert (found.answers, found.errors) == (0, 2)
    assert told in found.first_error


async def test_turns_alternate_between_two_servers(bare: int):
    found = await Turns(Job(kind="ttft", port=bare, beside=bare, body=STREAM, count=4)).run()
    assert len(found.ttft_ms) == len(found.beside_ms) == 4
    assert min(found.ttft_ms) > 0
