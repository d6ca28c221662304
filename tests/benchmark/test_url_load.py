"""Load over HTTP: our own server with scripted answers, servers that tell less, and such that never answer."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from modelyard.benchmark.lanes import Extent, play
from modelyard.benchmark.sample import Round
from modelyard.benchmark.url_load import UrlLoad, base_of
from modelyard.benchmark.workload import Workload, named
from modelyard.core.errors import InvalidRequest, ModelyardError, NotFound, Unavailable
from tests.serving import Served, demo, serving

CHAT = named("chat", prompt_tokens=60, output_tokens=24)
SCRIPT: list[dict[str, Any]] = [{"steps": [{"think": "Hm."}, {"tokens": 100}]}]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(demo(SCRIPT)) as running:
        yield running


async def measured(url: str, workload: Workload = CHAT, conversations: int = 1, **more: Any) -> Round:
    streams = more.pop("streams", 1)
    async with UrlLoad(url, **more) as load:
        return await play(load, workload, Extent(conversations=conversations), streams=streams)


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("http://h:8000", "http://h:8000/v1"),
        ("http://h:8000/", "http://h:8000/v1"),
        ("http://h:8000/v1", "http://h:8000/v1"),
        ("https://h/api/v1/", "https://h/api/v1"),
        ("http://h/v1/chat/completions", "http://h/v1"),
    ],
)
def test_an_address_is_taken_with_or_without_what_comes_after_it(url: str, base: str) -> None:
    assert base_of(url) == base


@pytest.mark.parametrize("url", ["localhost:8000", "", "ftp://h", "http://", "http://h:99999", "http://h:0"])
def test_what_is_no_url_is_told_how_one_looks(url: str) -> None:
    with pytest.raises(InvalidRequest, match=r"not a URL such as http://127\.0\.0\.1:8000"):
        base_of(url)


async def test_streams_of_a_real_server_are_measured(served: Served) -> None:
    found = await measured(served.url, conversations=3, streams=4, model="demo")
    assert {sample.error for sample in found.samples} == {None}
    assert {sample.output_tokens for sample in found.samples} == {24}
    assert not any(sample.is_counted for sample in found.samples)
    assert all(sample.ttft_s is not None and sample.ttft_s <= sample.total_s for sample in found.samples)


async def test_prompts_come_near_the_wanted_length_once_it_has_learned(served: Served) -> None:
    samples = (await measured(served.url, conversations=20, model="demo")).samples
    assert abs(sum(s.prompt_tokens for s in samples[5:]) / 15 - 60) < 12


async def test_each_turn_finds_the_turns_before_it_in_the_cache(served: Served) -> None:
    agent = named("agent", prompt_tokens=200, turn_tokens=20, output_tokens=5, turns=3)
    first, second, third = (await measured(served.url, agent, model="demo")).samples
    assert first.cached_tokens < 100 < second.cached_tokens < third.cached_tokens


async def test_without_a_model_the_first_that_is_listed_is_asked(served: Served) -> None:
    async with UrlLoad(served.url) as load:
        assert load.model == "demo"


async def test_fields_of_the_user_go_into_every_request(served: Served) -> None:
    found = await measured(served.url, model="demo", extra={"max_tokens": 3})
    assert found.samples[0].output_tokens == 3
    refused = await measured(served.url, model="demo", extra={"temperature": -1})
    assert refused.samples[0].error == "400: temperature must lie between 0 and 100, got -1.0"


async def test_a_wrong_key_is_an_error_in_words() -> None:
    config = demo(SCRIPT) | {"keys": [{"name": "me", "env": "ITS_KEY"}]}
    with serving(config, {"ITS_KEY": "sesame-open-please"}) as locked:
        (sample,) = (await measured(locked.url, model="demo")).samples
        assert sample.error is not None
        assert sample.error.startswith("401: ")
        assert (await measured(locked.url, key="sesame-open-please")).good
        with pytest.raises(ModelyardError, match="key"):
            await measured(locked.url)


def test_a_key_that_no_header_may_have_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="no HTTP header may have"):
        UrlLoad("http://h", key="schlüssel")


async def test_an_answer_that_breaks_in_the_middle_is_an_error_with_what_was_said() -> None:
    steps = [{"tokens": 5}, {"delay": 0.05}, {"fail": "out of memory", "kind": "unavailable"}]
    with serving(demo([{"steps": steps}])) as broken:
        (sample,) = (await measured(broken.url, model="demo")).samples
    assert sample.error is not None
    assert sample.error.endswith("out of memory")


async def test_a_server_that_hangs_is_left_after_the_time_limit() -> None:
    with serving(demo([{"steps": [{"text": "so far"}, {"hang": True}]}])) as stuck:
        (sample,) = (await measured(stuck.url, model="demo", limit_s=0.2)).samples
    assert sample.error == "not finished within 0.2 s"


@contextlib.asynccontextmanager
async def answering(reply: bytes) -> AsyncIterator[str]:
    """A server that reads a request and answers these bytes, whatever was asked; nothing is an answer, too."""
    hold = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                # All of it: closing before it was read would reset the connection, and the reply be lost.
                await reader.readexactly(int(head.partition(b"content-length: ")[2].split(b"\r\n")[0] or 0))
                writer.write(reply)
                await writer.drain()
                if not reply:
                    await hold.wait()
        finally:
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        hold.set()
        server.close()
        await server.wait_closed()


def stream(*data: str) -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
    return head + b"".join(f"data: {line}\n\n".encode() for line in data)


def piece(text: str, finish: str = "null") -> str:
    return f'{{"id":"1","choices":[{{"index":0,"delta":{{"content":"{text}"}},"finish_reason":{finish}}}]}}'


async def test_a_server_that_tells_no_usage_has_its_pieces_counted_and_it_is_said() -> None:
    async with answering(stream(piece("a"), piece("b"), piece("", '"stop"'), "[DONE]")) as url:
        (sample,) = (await measured(url, model="x")).samples
    assert (sample.error, sample.output_tokens, sample.is_counted) == (None, 2, True)


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (stream(piece("a")), "the upstream's stream ended before its answer did"),
        (b"HTTP/1.1 503 Busy\r\ncontent-length: 4\r\n\r\nbusy", "503: "),
        (b"nonsense\r\n\r\n", "the connection broke: "),
    ],
)
async def test_every_way_to_fail_is_an_error_in_words(reply: bytes, error: str) -> None:
    async with answering(reply) as url:
        (sample,) = (await measured(url, model="x")).samples
    assert sample.error is not None
    assert sample.error.startswith(error)


async def test_a_server_that_never_answers_is_left_after_the_time_limit() -> None:
    async with answering(b"") as url:
        (sample,) = (await measured(url, model="x", limit_s=0.2)).samples
        assert (sample.error, sample.ttft_s) == ("not finished within 0.2 s", None)
        with pytest.raises(Unavailable, match=r"does not answer: not finished within 0\.2 s"):
            await measured(url, limit_s=0.2)


async def test_a_server_that_gives_up_its_connections_without_a_word_has_not_failed() -> None:
    """No content-length, no `connection: close`, one answer a connection: as llama-server does after a stream."""
    body = stream(piece("a"), piece("", '"stop"'), "[DONE]").partition(b"\r\n\r\n")[2]
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    async with answering(head + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)) as url:
        found = await measured(url, model="x", conversations=20)
    assert [sample.error for sample in found.samples] == [None] * 20


async def test_where_nobody_listens_every_answer_says_so() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # taken, so that nobody else gets it, and not listening
        url = f"http://127.0.0.1:{held.getsockname()[1]}"
        found = await measured(url, model="x", conversations=9)
        assert [sample.error for sample in found.samples] == ["nobody listens there"] * 3
        with pytest.raises(Unavailable, match="does not answer: nobody listens there"):
            await measured(url)


async def test_a_server_without_a_list_of_models_asks_for_a_name() -> None:
    async with answering(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}") as url:
        with pytest.raises(NotFound, match="lists no models; name one with --model"):
            await measured(url)
