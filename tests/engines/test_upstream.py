"""Forwarding to another server: the HTTP client, jobs that each end once, retries and errors."""

from __future__ import annotations

import asyncio
import json
import ssl
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import uvloop

from modelyard.core.errors import (
    Cancelled,
    ContextOverflow,
    Forbidden,
    Incomplete,
    Internal,
    InvalidRequest,
    ModelyardError,
    Overloaded,
    RateLimited,
    Timeout,
    Unauthenticated,
    Unavailable,
    Unsupported,
)
from modelyard.core.events import BlockDelta, BlockEnd, Event, Failed, Finished, Started, TokenLogprob, Usage
from modelyard.core.protocol import WireProtocol
from modelyard.core.request import Request
from modelyard.engines.upstream import (
    Emit,
    RetryableError,
    RetryPolicy,
    Upstream,
    UpstreamAddress,
    UpstreamJobs,
    append_fields,
    map_auth_error,
    merge_deltas,
    reject_bare_prompts,
    transport_error,
)
from modelyard.engines.upstream_client import IncompleteResponse, ReadTimeout
from modelyard.engines.upstream_connection import ClientError, ConnectFailed, ConnectionLost, ConnectTimeout
from modelyard.protocols import openai_chat
from tests.engines.fake_upstream import Answer, FakeUpstream, chat_stream, error_answer, fake_upstream

# As in test_upstream_client.py.
EVENT_LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (ConnectFailed("refused"), Unavailable, "upstream_unreachable"),
        (ConnectTimeout(), Unavailable, "upstream_unreachable"),
        (ReadTimeout(), Timeout, "upstream_timeout"),
        (ConnectionLost(), Unavailable, "upstream_lost"),
        (IncompleteResponse("peer closed"), Unavailable, "upstream_lost"),
    ],
)
def test_transport_error_names_the_upstream(error: ClientError, kind: type, code: str) -> None:
    mapped = transport_error(error, "the upstream of 'm'")
    assert (type(mapped), mapped.code) == (kind, code)
    assert "the upstream of 'm'" in mapped.message


async def test_requests_go_through_the_proxy_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    async with fake_upstream(Answer(body=chat_stream("Hi"))) as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        monkeypatch.setenv("no_proxy", "")
        collector, connected = Collector(), Upstream(UpstreamAddress(name="it", base_url="http://api.invalid/v1"))
        await connected.stream_chat("/chat/completions", b"{}", PROTOCOL, collector.emit)
        await connected.close()
    assert collector.text == "Hi"
    assert proxy.requests[0].path == "http://api.invalid/v1/chat/completions"


async def tls_server(folder: Path) -> tuple[ssl.SSLContext, Path]:
    """The TLS settings of a server on localhost, and the certificate that a client has to trust."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    command += f" -addext subjectAltName=DNS:localhost -keyout {key} -out {cert}"
    await asyncio.to_thread(subprocess.run, command.split(), check=True, capture_output=True, timeout=60)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, key)
    return context, cert


async def test_an_upstream_with_tls_needs_a_certificate_that_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context, cert = await tls_server(tmp_path)
    async with fake_upstream(Answer(body=chat_stream("Hi")), tls=context) as upstream:
        upstream.url = upstream.url.replace("http://127.0.0.1", "https://localhost")
        with pytest.raises(Unavailable, match=r"cannot be reached: .*certificate"):
            await forward(upstream)
        monkeypatch.setenv("SSL_CERT_FILE", str(cert))
        assert (await forward(upstream)).text == "Hi"


@pytest.mark.parametrize("credentials", ["", "user:pass@"])
async def test_tls_goes_through_the_tunnel_of_a_proxy_and_the_connection_is_kept(
    credentials: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def tunnel(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append((await reader.readuntil(b"\r\n\r\n")).decode())
        host, port = heads[-1].split(" ")[1].split(":")
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1" if host == "localhost" else host, int(port))
        writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        await asyncio.gather(copy(reader, far_writer), copy(far_reader, writer))

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
        except ConnectionError:
            pass
        finally:
            writer.close()

    heads: list[str] = []
    context, cert = await tls_server(tmp_path)
    proxy = await asyncio.start_server(tunnel, "127.0.0.1", 0)
    monkeypatch.setenv("SSL_CERT_FILE", str(cert))
    monkeypatch.setenv("https_proxy", f"http://{credentials}127.0.0.1:{proxy.sockets[0].getsockname()[1]}")
    monkeypatch.setenv("no_proxy", "")
    async with fake_upstream(Answer(body=chat_stream("Hi")), tls=context) as upstream:
        upstream.url = upstream.url.replace("http://127.0.0.1", "https://localhost")
        connected = connect(upstream)
        for _ in range(3):
            collector = Collector()
            await connected.stream_chat("/x", b"{}", PROTOCOL, collector.emit)
            assert collector.text == "Hi"
        await connected.close()
    proxy.close()
    (head,) = heads
    assert head.startswith("CONNECT localhost:")
    assert ("Proxy-Authorization: Basic dXNlcjpwYXNz" in head) is bool(credentials)
    assert (len(upstream.requests), upstream.connections) == (3, 1)
    assert all("proxy-authorization" not in request.headers for request in upstream.requests)


async def test_a_proxy_that_refuses_the_tunnel_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    async with fake_upstream(Answer(status=407, body=[b"no"])) as proxy:
        monkeypatch.setenv("https_proxy", proxy.url)
        monkeypatch.setenv("no_proxy", "")
        connected = Upstream(UpstreamAddress(name="it", base_url="https://api.invalid/v1"))
        with pytest.raises(Unavailable, match="it cannot be reached: the proxy refused the connection: 407"):
            await connected.request_json("GET", "/x")
        await connected.close()


async def test_short_request_returns_status_and_json() -> None:
    async with fake_upstream(Answer(200, [b"[1,", b"2]"]), Answer(404, [b"what?"])) as upstream:
        http = Upstream(UpstreamAddress(name="it", base_url=upstream.url, headers={"x-team": "t"}))
        assert await http.request_json("GET", "/a") == (200, [1, 2])
        assert await http.request_json("POST", "/b", b"[]") == (404, None)
        await http.close()
    assert [(r.method, r.path, r.body) for r in upstream.requests] == [("GET", "/a", None), ("POST", "/b", [])]
    assert upstream.requests[1].headers["x-team"] == "t"
    assert upstream.requests[1].headers["content-type"] == "application/json"


async def test_reply_that_is_too_long_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modelyard.engines.upstream._MAX_BODY", 10)
    answer = Answer(200, [b"12345678", b"12345678"], {"content-type": "application/json"})
    async with fake_upstream(answer) as upstream:
        with pytest.raises(Incomplete, match="longer than 10 bytes"):
            await forward(upstream)


# Jobs of a forwarding engine: each ends once, however its task ends.

DONE = Finished("end", Usage())


async def read(generation: object) -> list[Event]:
    return [event async for batch in generation for event in batch]  # type: ignore[attr-defined]


async def hang(_: Emit) -> None:
    await asyncio.Event().wait()


async def test_events_after_the_end_are_dropped() -> None:
    has_ended: list[bool] = []

    async def run(emit: Emit) -> None:
        has_ended.append(await emit([BlockDelta(0, "a")]))
        has_ended.append(await emit([DONE]))
        has_ended.append(await emit([BlockDelta(0, "late")]))

    jobs = UpstreamJobs()
    assert await read(jobs.start(run)) == [BlockDelta(0, "a"), DONE]
    await jobs.join()
    assert has_ended == [False, True, True]
    assert len(jobs) == 0


async def test_finished_answer_does_not_count_while_its_task_continues() -> None:
    release = asyncio.Event()

    async def run(emit: Emit) -> None:
        await emit([DONE])
        await release.wait()

    jobs = UpstreamJobs()
    assert await read(jobs.start(run)) == [DONE]
    assert len(jobs) == 0
    release.set()
    await jobs.join()


async def test_missing_end_and_every_kind_of_error_become_a_final_event() -> None:
    async def silent(_: Emit) -> None:
        pass

    async def known(_: Emit) -> None:
        raise Timeout("late")

    async def unknown(_: Emit) -> None:
        raise KeyError("x")

    jobs = UpstreamJobs()
    lasts = [(await read(jobs.start(run)))[-1] for run in (silent, known, unknown)]
    errors = [last.error for last in lasts if isinstance(last, Failed)]
    assert [type(error) for error in errors] == [Incomplete, Timeout, Internal]


async def test_absurd_counts_of_an_upstream_are_bounded() -> None:
    """They would be more than a database of sums takes."""

    async def run(emit: Emit) -> None:
        await emit([Started("1", "m", 0, Usage(10**30))])
        await emit([Finished("end", Usage(10**30, -5, 7))])

    events = [event async for batch in UpstreamJobs().start(run) for event in batch]
    assert [event.usage for event in events] == [Usage(1 << 40), Usage(1 << 40, 0, 7)]


async def test_cancel_works_before_the_first_step_later_and_from_a_thread() -> None:
    jobs = UpstreamJobs()
    early, late, threaded = jobs.start(hang), jobs.start(hang), jobs.start(hang)
    early.cancel()
    await asyncio.sleep(0)
    late.cancel()
    late.cancel()
    thread = threading.Thread(target=threaded.cancel)
    thread.start()
    for generation in (early, late, threaded):
        assert await read(generation) == [Failed(Cancelled("the job was cancelled"))]
    thread.join()
    assert len(jobs) == 0


async def test_close_fails_running_and_later_jobs() -> None:
    jobs = UpstreamJobs()
    running = jobs.start(hang)
    await asyncio.sleep(0)
    jobs.close(Unavailable("gone"))
    assert await read(running) == await read(jobs.start(hang)) == [Failed(Unavailable("gone"))]
    await jobs.join()


async def test_slow_reader_holds_the_upstream_back() -> None:
    emitted: list[int] = []

    async def run(emit: Emit) -> None:
        for n in range(5000):
            await emit([BlockDelta(0, str(n))])
            emitted.append(n)
        await emit([DONE])

    generation = UpstreamJobs().start(run)
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(emitted) < 1100
    assert len(await read(generation)) == 5001


# Forwarding over a real socket: streams, errors, retries, and clients that leave early.

PROTOCOL = cast(WireProtocol, openai_chat)
ADDRESS = UpstreamAddress(name="the upstream of 'm'", base_url="http://x", key_source="the variable 'KEY'")


class Collector:
    def __init__(self) -> None:
        self.events: list[Event] = []

    async def emit(self, events: Sequence[Event]) -> bool:
        self.events += events
        return isinstance(self.events[-1], Finished | Failed)

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, BlockDelta))


def connect(upstream: FakeUpstream, retries: RetryPolicy = RetryPolicy(), **fields: Any) -> Upstream:
    address = UpstreamAddress(name="the upstream", base_url=upstream.url, **{"timeout": 60.0} | fields)
    return Upstream(address, retries)


async def forward(upstream: FakeUpstream, retries: RetryPolicy = RetryPolicy(), **fields: Any) -> Collector:
    collector, connected = Collector(), connect(upstream, retries, **fields)
    try:
        await connected.stream_chat("/chat/completions", b'{"model":"m"}', PROTOCOL, collector.emit)
    finally:
        await connected.close()
    return collector


@pytest.fixture
def delays(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The delays between retries, which do not pass."""
    found: list[float] = []

    async def sleep(seconds: float) -> None:
        found.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    return found


# --- streams ----------------------------------------------------------------------------------------------------------


async def test_stream_becomes_events() -> None:
    async with fake_upstream(Answer(body=chat_stream("Hi", " you"))) as upstream:
        collector = await forward(upstream, headers={"authorization": "Bearer k"})
    assert collector.text == "Hi you"
    assert isinstance(collector.events[-1], Finished)
    (request,) = upstream.requests
    assert (request.method, request.path, request.body) == ("POST", "/chat/completions", {"model": "m"})
    assert request.headers["authorization"] == "Bearer k"


async def test_a_stream_that_is_longer_than_the_buffers_is_read_to_its_end() -> None:
    """The connection is paused meanwhile."""
    words = [f"{n:06}" * 40 for n in range(2500)]
    async with fake_upstream(Answer(body=chat_stream(*words))) as upstream:
        collector, connected = Collector(), connect(upstream)

        async def emit(events: Sequence[Event]) -> bool:
            await asyncio.sleep(0.001)
            return await collector.emit(events)

        await connected.stream_chat("/chat/completions", b'{"model":"m"}', PROTOCOL, emit)
        await connected.close()
    assert collector.text == "".join(words)


def test_neighbouring_texts_of_a_block_become_one() -> None:
    first, second = TokenLogprob("a", -1.0), TokenLogprob("b", -2.0)
    events = [BlockDelta(0, "a", (first,)), BlockDelta(0, "b", (second,)), BlockEnd(0), BlockDelta(1, "c"), DONE]
    assert merge_deltas(events) == [BlockDelta(0, "ab", (first, second)), BlockEnd(0), BlockDelta(1, "c"), DONE]
    assert merge_deltas([BlockDelta(0, "a"), BlockDelta(1, "b")]) == [BlockDelta(0, "a"), BlockDelta(1, "b")]


async def test_connection_is_reused_after_a_complete_answer() -> None:
    async with fake_upstream(Answer(body=chat_stream("Hi"))) as upstream:
        connected = connect(upstream)
        for _ in range(3):
            await connected.stream_chat("/x", b"{}", PROTOCOL, Collector().emit)
        await connected.close()
    assert (len(upstream.requests), upstream.connections) == (3, 1)


async def test_stream_that_stays_open_after_its_answer_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modelyard.engines.upstream._DRAIN_S", 0.01)
    async with fake_upstream(Answer(body=chat_stream("Hi"), hangs=True)) as upstream:
        collector = await forward(upstream)
        await upstream.client_left.wait()
    assert isinstance(collector.events[-1], Finished)


async def test_reply_that_is_not_a_stream_becomes_events() -> None:
    choice = {"index": 0, "message": {"role": "assistant", "content": "whole"}, "finish_reason": "stop"}
    body = json.dumps({"id": "1", "model": "m", "choices": [choice]}).encode()
    async with fake_upstream(Answer(body=[body], headers={"content-type": "application/json"})) as upstream:
        assert (await forward(upstream)).text == "whole"


async def test_stream_without_a_final_event_is_incomplete() -> None:
    async with fake_upstream(Answer(body=chat_stream("Hi")[:1])) as upstream:
        (last,) = (await forward(upstream)).events[-1:]
    assert isinstance(last, Failed)
    assert isinstance(last.error, Incomplete)


@pytest.mark.parametrize(
    "answer", [Answer(body=chat_stream("Hi")[:1], hangs=True), Answer(body=[b": nothing yet\n\n"], hangs=True)]
)
async def test_cancelling_closes_the_connection_at_once(answer: Answer) -> None:
    async with fake_upstream(answer) as upstream:
        task = asyncio.create_task(forward(upstream))
        await upstream.hanging.wait()
        task.cancel()
        async with asyncio.timeout(60):
            await upstream.client_left.wait()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_short_request_returns_json() -> None:
    async with fake_upstream(Answer(200, [b'{"a": 1}']), Answer(404, [b"what?"])) as upstream:
        connected = connect(upstream)
        assert await connected.request_json("GET", "/a") == (200, {"a": 1})
        assert await connected.request_json("POST", "/b", b"[]") == (404, None)
        await connected.close()


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (error_answer(400), InvalidRequest),
        (
            error_answer(
                400, message="This model's maximum context length is 10 tokens. However, it resulted in 20 tokens"
            ),
            ContextOverflow,
        ),
        (error_answer(401), Unavailable),
        (error_answer(403), Unavailable),
        (error_answer(429, {"retry-after": "9"}), RateLimited),
        (error_answer(500), Internal),
        (error_answer(503), Unavailable),
        (error_answer(504), Timeout),
        (error_answer(529), Overloaded),
        (Answer(502, [b"<html>bad gateway</html>"]), Unavailable),
    ],
)
async def test_error_of_the_upstream_keeps_its_meaning(answer: Answer, kind: type[ModelyardError]) -> None:
    async with fake_upstream(answer) as upstream:
        with pytest.raises(kind) as caught:
            await forward(upstream)
    assert len(upstream.requests) == 1
    if kind is RateLimited:
        assert caught.value.retry_after == 9.0


async def test_unreachable_upstream_is_named() -> None:
    async with fake_upstream() as upstream:
        pass
    with pytest.raises(Unavailable, match="the upstream cannot be reached"):
        await forward(upstream)


async def test_silent_upstream_times_out() -> None:
    async with fake_upstream(Answer(body=chat_stream("Hi")[:1], hangs=True)) as upstream:
        with pytest.raises(Timeout, match="sent nothing for too long"):
            await forward(upstream, timeout=0.05)


async def test_upstream_that_does_not_read_a_long_body_times_out() -> None:
    async def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)

    writers: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(accept, "127.0.0.1", 0, limit=1024)
    host, port = server.sockets[0].getsockname()
    upstream = Upstream(UpstreamAddress(name="the upstream", base_url=f"http://{host}:{port}", timeout=0.2))
    try:
        with pytest.raises(Timeout, match="sent nothing for too long"):
            await upstream.request_json("POST", "/x", b" " * (64 << 20))
    finally:
        await upstream.close()
        for writer in writers:
            writer.transport.abort()
        server.close()
        await server.wait_closed()


async def test_an_answer_that_is_not_http_is_reported_without_the_address() -> None:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\x00\xff garbage\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    upstream = Upstream(UpstreamAddress(name="the upstream", base_url=f"http://{host}:{port}"))
    try:
        with pytest.raises(Unavailable) as caught:
            await upstream.request_json("POST", "/x", b"{}")
    finally:
        await upstream.close()
        server.close()
        await server.wait_closed()
    assert caught.value.message == "the upstream sent an answer that is not valid HTTP"


@pytest.mark.parametrize("header", ["authorization", "Authorization"])
async def test_a_user_name_in_the_address_and_a_key_are_refused_before_a_request(header: str) -> None:
    with pytest.raises(InvalidRequest, match="only one of them can be sent") as refused:
        Upstream(
            UpstreamAddress(name="up", base_url="http://user:pa55word99@127.0.0.1:1", headers={header: "Bearer sk-1"})
        )
    assert refused.value.code == "remote_credentials"
    assert "pa55word99" not in refused.value.message


def test_rejected_key_is_not_an_error_of_the_client() -> None:
    for refused in (Unauthenticated("bad key sk-123"), Forbidden("no funds")):
        error = map_auth_error(refused, ADDRESS)
        assert isinstance(error, Unavailable)
        assert error.code == "upstream_auth_failed"
        assert "sk-123" not in error.message
    other = RateLimited("slow", retry_after=3)
    assert map_auth_error(other, ADDRESS) is other


# --- retries ----------------------------------------------------------------------------------------------------------

LATER = RateLimited("slow down", retry_after=7.0)


@pytest.mark.parametrize(
    ("error", "has_retry_after", "attempts", "max_retries", "delay"),
    [
        (LATER, True, 1, 1, 7.0),
        (LATER, False, 1, 1, 0.5),
        (Unavailable("down"), False, 3, 3, 2.0),
        (Overloaded("full", retry_after=3), True, 1, 2, 3.0),
        (Timeout("late"), False, 1, 1, 0.5),
        (LATER, True, 1, 0, None),
        (LATER, True, 3, 2, None),
        (RateLimited("much later", retry_after=3600), True, 1, 5, None),
        (InvalidRequest("bad"), False, 1, 5, None),
        (Unavailable("key", code="upstream_auth_failed"), False, 1, 5, None),
    ],
)
def test_retry_delay(
    error: ModelyardError, has_retry_after: bool, attempts: int, max_retries: int, delay: float | None
) -> None:
    assert RetryPolicy(max_retries).delay(RetryableError(error, has_retry_after), attempts) == delay


async def test_failure_before_the_first_byte_is_retried_after_the_delay_of_the_upstream(delays: list[float]) -> None:
    busy = error_answer(429, {"retry-after": "4"})
    async with fake_upstream(busy, busy, Answer(body=chat_stream("Hi"))) as upstream:
        assert (await forward(upstream, RetryPolicy(2))).text == "Hi"
    assert len(upstream.requests) == 3
    assert delays == [4.0, 4.0]


async def test_last_error_is_raised_when_the_retries_are_used_up(delays: list[float]) -> None:
    async with fake_upstream(error_answer(503)) as upstream:
        with pytest.raises(Unavailable):
            await forward(upstream, RetryPolicy(2))
    assert len(upstream.requests) == 3
    assert delays == [0.5, 1.0]


async def test_unreachable_upstream_is_retried(delays: list[float]) -> None:
    async with fake_upstream() as upstream:
        pass
    with pytest.raises(Unavailable):
        await forward(upstream, RetryPolicy(1))
    assert delays == [0.5]


async def test_failure_after_the_first_byte_is_not_retried(delays: list[float]) -> None:
    async with fake_upstream(Answer(body=chat_stream("Hi")[:1], breaks=True)) as upstream:
        with pytest.raises(Unavailable, match="closed the connection"):
            await forward(upstream, RetryPolicy(3))
    assert len(upstream.requests) == 1
    assert delays == []


# --- bodies -----------------------------------------------------------------------------------------------------------


def test_fields_are_appended_to_a_json_body() -> None:
    assert json.loads(append_fields(b'{"a":1}', {"b": [2], "c": None})) == {"a": 1, "b": [2], "c": None}
    assert append_fields(b'{"a":1}', {}) == b'{"a":1}'


def test_bare_prompts_are_rejected() -> None:
    reject_bare_prompts(Request(model="m"))
    with pytest.raises(Unsupported, match="conversations only"):
        reject_bare_prompts(Request(model="m", prompts=("Once",)))
