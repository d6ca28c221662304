"""Remote models: every protocol with every kind of upstream, and how errors of the upstream are mapped."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from tests.e2e.helpers import RawClient, config, wait_for_running, wait_until_idle
from tests.e2e.protocols import CHAT, MESSAGES, PROTOCOLS, Protocol, parse_events, send
from tests.e2e.test_protocols import CASES
from tests.engines.fake_upstream import Answer, FakeUpstream, chat_stream, error_answer, fake_upstream
from tests.live_server import LiveServer, live_server

KINDS = ("chat_completions", "responses", "anthropic_messages")
CONSENT = {"x-modelyard-allow-remote": "true"}
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


def remote_config(url: str, kind: str = "chat_completions", **more: Any) -> dict[str, Any]:
    remote = {"backend": "openai_remote", "remote_base_url": url, "remote_model": "demo", "remote_api_kind": kind}
    return {"models": {"demo": {**remote, "parallel": 4, **more}}}


@pytest.fixture(scope="module")
def upstream() -> Iterator[LiveServer]:
    with live_server(config()) as running:
        yield running


@pytest.fixture(scope="module", params=KINDS)
def gateway_client(upstream: LiveServer, request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    settings = remote_config(upstream.url + "/v1", request.param, remote_extensions=True)
    with live_server(settings) as server, httpx.Client(base_url=server.url, headers=CONSENT) as client:
        yield client


def test_replies_of_the_upstream_reach_the_client_unchanged(
    gateway_client: httpx.Client, protocol: Protocol, stream: bool
) -> None:
    for name, case in CASES.items():
        parsed = send(gateway_client, protocol, stream, name, **case.fields)
        assert (parsed.text, parsed.thinking, parsed.calls) == (case.text, case.thinking, case.calls), name
        # Only one of the three upstream protocols reports the stop string.
        assert parsed.stop == case.stop(protocol) or (name, parsed.stop) == ("stop string", "end_turn"), name


def test_usage_is_that_of_the_upstream(
    gateway_client: httpx.Client, upstream: LiveServer, protocol: Protocol, stream: bool
) -> None:
    usage = send(gateway_client, protocol, stream, "thinking").usage
    with httpx.Client(base_url=upstream.url) as direct:
        direct_usage = send(direct, protocol, stream, "thinking").usage
    assert (usage.prompt, usage.output) == (direct_usage.prompt, direct_usage.output)


def test_a_tool_result_reaches_the_upstream(gateway_client: httpx.Client) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
    messages = [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    reply = gateway_client.post("/v1/chat/completions", json=CHAT.body("") | {"messages": messages})
    assert reply.json()["choices"][0]["message"]["content"] == "Take a hat: it is sunny."


def test_tokens_are_counted_by_the_upstream(upstream: LiveServer) -> None:
    body = MESSAGES.body("How many tokens is this?")
    counted = httpx.post(upstream.url + "/v1/messages/count_tokens", json=body).json()["input_tokens"]
    for kind in KINDS[1:]:
        with live_server(remote_config(upstream.url + "/v1", kind)) as server:
            reply = httpx.post(server.url + "/v1/messages/count_tokens", json=body, headers=CONSENT)
            assert reply.json()["input_tokens"] == counted
    with live_server(remote_config(upstream.url + "/v1")) as server:
        assert httpx.post(server.url + "/v1/messages/count_tokens", json=body, headers=CONSENT).status_code == 501


def test_nothing_is_sent_to_the_upstream_without_consent(
    upstream: LiveServer, protocol: Protocol, stream: bool
) -> None:
    with live_server(remote_config(upstream.url + "/v1")) as server:
        reply = httpx.post(server.url + protocol.path, json=protocol.body("text", stream=stream))
        assert reply.status_code == 403
        assert reply.json()["error"]["code"] == "remote_not_allowed"
        wait_until_idle(upstream)


def test_a_disconnect_frees_the_slot_of_the_upstream(upstream: LiveServer) -> None:
    settings = remote_config(upstream.url + "/v1") | {"routes": [{"match": "*", "model": "demo", "allow_remote": True}]}
    with live_server(settings) as server:
        client = RawClient(server, "/v1/chat/completions", CHAT.body("endless stream", stream=True))
        client.read_until(b"so far")
        wait_for_running(upstream, 1)
        client.close()
        wait_until_idle(upstream)
        wait_until_idle(server)


# --- a fake upstream -------------------------------------------------------------------------------------------------


@asynccontextmanager
async def gateway_for(fake: FakeUpstream, **more: Any) -> AsyncIterator[httpx.AsyncClient]:
    settings = remote_config(fake.url, **more)
    context = live_server(settings)
    server = await asyncio.to_thread(context.__enter__)
    try:
        async with httpx.AsyncClient(base_url=server.url, headers=CONSENT, timeout=60) as client:
            yield client
    finally:
        await asyncio.to_thread(context.__exit__, None, None, None)


OVERFLOW = error_answer(
    400,
    message="This model's maximum context length is 100 tokens. However, your messages resulted in 123 tokens.",
    code="context_length_exceeded",
)


async def test_an_overflow_of_the_upstream_is_reported_in_each_protocol() -> None:
    async with fake_upstream(OVERFLOW) as fake, gateway_for(fake) as client:
        replies = [
            await client.post(protocol.path, json=protocol.body("text", stream=True)) for protocol in PROTOCOLS.values()
        ]
    messages, chat_, responses = replies
    assert messages.json()["error"]["message"] == "prompt is too long: 123 tokens > 100 maximum"
    assert chat_.json()["error"] | {"n_prompt_tokens": 123, "n_ctx": 100} == chat_.json()["error"]
    failed = parse_events(responses.text)[-1].data["response"]["error"]
    assert (responses.status_code, failed["code"]) == (200, "context_length_exceeded")


@pytest.mark.parametrize(
    ("answer", "statuses", "retry_after"),
    [
        (error_answer(429, {"retry-after": "9"}), (429, 429, 429), "9"),
        (error_answer(401), (529, 503, 503), "1"),
        (error_answer(403), (529, 503, 503), "1"),
        (error_answer(400), (400, 400, 400), None),
        (error_answer(404), (404, 404, 404), None),
        (error_answer(413), (413, 413, 413), None),
        (error_answer(500), (500, 500, 500), None),
        (error_answer(503, {"retry-after": "4"}), (529, 503, 503), "4"),
        (error_answer(504), (504, 504, 504), None),
    ],
)
async def test_an_error_status_of_the_upstream_is_mapped_and_not_retried(
    answer: Answer, statuses: tuple[int, ...], retry_after: str | None
) -> None:
    async with fake_upstream(answer) as fake, gateway_for(fake) as client:
        replies = [await client.post(protocol.path, json=protocol.body("text")) for protocol in PROTOCOLS.values()]
    assert tuple(reply.status_code for reply in replies) == statuses
    assert {reply.headers.get("retry-after") for reply in replies} == {retry_after}
    assert len(fake.requests) == 3


async def test_a_stream_cut_off_by_the_upstream_is_an_error_in_each_protocol() -> None:
    async with fake_upstream(Answer(body=chat_stream("Half an")[:1], breaks=True)) as fake, gateway_for(fake) as client:
        replies = [
            await client.post(protocol.path, json=protocol.body("text", stream=True)) for protocol in PROTOCOLS.values()
        ]
    messages, chat_, responses = (parse_events(reply.text) for reply in replies)
    assert messages[-1].event == "error"
    assert "error" in chat_[-1].data
    assert responses[-1].event == "response.failed"
    assert len(fake.requests) == 3


async def test_an_image_reaches_the_upstream_as_a_data_url() -> None:
    url = f"data:image/png;base64,{PIXEL}"
    content = [{"type": "text", "text": "Look"}, {"type": "image_url", "image_url": {"url": url}}]
    body = {"model": "demo", "messages": [{"role": "user", "content": content}]}
    async with (
        fake_upstream(Answer(body=chat_stream("A dot."))) as fake,
        gateway_for(fake, modalities=["text", "image"]) as client,
    ):
        reply = await client.post("/v1/chat/completions", json=body)
        assert reply.json()["choices"][0]["message"]["content"] == "A dot."
    assert fake.requests[0].body["messages"][0]["content"] == content


async def test_only_explicit_sampling_parameters_are_sent() -> None:
    """The upstream has its own defaults; those for local models are not sent."""
    async with (
        fake_upstream(Answer(body=chat_stream("Hi"))) as fake,
        gateway_for(fake, decoding={"top_p": 0.5}) as client,
    ):
        await client.post("/v1/chat/completions", json=CHAT.body("text"))
    assert "temperature" not in fake.requests[0].body
    assert fake.requests[0].body["top_p"] == 0.5


async def test_several_choices_are_several_upstream_requests() -> None:
    async with fake_upstream(Answer(body=chat_stream("Hi"))) as fake, gateway_for(fake) as client:
        reply = await client.post("/v1/chat/completions", json=CHAT.body("text", n=2))
    assert [choice["message"]["content"] for choice in reply.json()["choices"]] == ["Hi", "Hi"]
    assert ["n" in fields.body for fields in fake.requests] == [False, False]
