"""One prepared request, many times: counted and timed, in this process and in another."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from itertools import islice

import pytest

from bench.prepared_load import LoadJob, RequestTarget, numbered, token_times
from modelyard_bench.http_client import HttpResponse
from modelyard_bench.load import LoadGenerator, RoundLength
from modelyard_bench.workload import UserTurn
from tests.bench_command.raw_server import chunk, responding, sse
from tests.live_server import LiveServer, demo_config, live_server


@pytest.fixture(scope="module")
def served() -> Iterator[LiveServer]:
    with live_server(demo_config([{"steps": [{"think": "Hm."}, {"tokens": 100}]}])) as running:
        yield running


def prepared(*, stream: bool) -> str:
    return json.dumps(
        {"model": "demo", "messages": [{"role": "user", "content": "Number 00000000"}], "max_tokens": 24}
        | ({"stream": True} if stream else {})
    )


def test_no_two_prepared_requests_are_equal_and_their_length_stays() -> None:
    made = list(islice(numbered(b"POST / HTTP/1.1\r\n\r\n00000000"), 3))
    assert len(set(made)) == 3
    assert {len(request) for request in made} == {len(made[0])}


async def test_prepared_requests_are_counted_with_their_events(served: LiveServer) -> None:
    async with RequestTarget(served.url, prepared(stream=False)) as target:
        found = await LoadGenerator(target, None, RoundLength(conversations=2), streams=3).run()
    assert [sample.error for sample in found.samples] == [None] * 6
    async with RequestTarget(served.url, prepared(stream=True)) as target:
        found = await LoadGenerator(target, None, RoundLength(conversations=2), streams=3).run()
    assert [sample.error for sample in found.samples] == [None] * 6
    assert all(sample.events > 4 for sample in found.samples)
    assert all(sample.ttft_s is not None and sample.ttft_s > 0 for sample in found.samples)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_a_lost_connection_and_a_cut_stream_are_errors(stream: bool) -> None:
    async def error(reply: bytes) -> str:
        async with responding(reply) as url, RequestTarget(url, prepared(stream=stream)) as target:
            return (await target.send(UserTurn("", 0, 0))).error or ""

    assert "503: no" in await error(b"HTTP/1.1 503 No\r\ncontent-length: 2\r\n\r\nno")
    assert "the connection broke" in await error(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nno")
    if stream:
        assert "the stream is incomplete" in await error(sse(chunk("a")))
        assert "the stream is incomplete" in await error(sse("[DONE]"))


def test_an_event_counts_when_its_last_byte_arrives() -> None:
    role = b'data: {"delta":{"role":"assistant","content":""}}\n\n'
    event = b'data: {"delta":{"content":"a"}}\n\n'
    for cut in range(1, len(event)):
        parts = [(1.0, role + event[:cut]), (2.0, event[cut:] + event + b"data: [DONE]\n\n")]
        assert token_times(HttpResponse(0.0, parts=parts)) == [2.0, 2.0]


async def test_a_job_runs_in_a_process_of_its_own(served: LiveServer) -> None:
    job = LoadJob(url=served.url, body=prepared(stream=True), streams=2)
    found = await asyncio.to_thread(job.run_in_process)
    assert [sample.error for sample in found.samples] == [None, None]
    with pytest.raises(RuntimeError, match="the load generator failed"):
        await asyncio.to_thread(LoadJob(url="nowhere", body="{}").run_in_process)
