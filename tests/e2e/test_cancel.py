"""An administrator cancels a request: the client gets the reason in its protocol, and the official SDKs never retry."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.e2e.helpers import (
    raw_request,
    single_slot_config,
    wait_for_queued,
    wait_for_running,
    wait_until,
    wait_until_idle,
)
from tests.e2e.protocols import CHAT, PROTOCOLS, Protocol, parse_events
from tests.live_server import LiveServer, live_server

REASON = "an administrator cancelled this request"


@pytest.fixture(scope="module")
def single_slot_server() -> Iterator[LiveServer]:
    with live_server(single_slot_config()) as running:
        yield running


@pytest.fixture
def background() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as executor:
        yield executor


@pytest.fixture(params=["running", "waiting"])
def cancelled(request: pytest.FixtureRequest, single_slot_server: LiveServer) -> Iterator[Callable[[], None]]:
    """Cancels the one request that the test has started, while it runs or waits in the queue."""
    server = single_slot_server

    def cancel() -> None:
        wait_until(lambda: len(live(server)) == 1 + waits, "the request is in the pool")
        newest = live(server)[-1]
        assert newest["state"] == request.param
        found = httpx.post(f"{server.url}/v1/admin/requests/{newest['id']}/cancel", headers=server.owner).json()
        assert found["cancelled"] == 1

    waits = request.param == "waiting"
    if not waits:
        yield cancel
    else:
        with raw_request(server, CHAT.path, CHAT.body("endless stream", stream=True)) as holder:
            holder.read_until(b"so far")
            yield cancel
    wait_until_idle(server)


def live(server: LiveServer) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = httpx.get(server.url + "/v1/admin/requests", headers=server.owner).json()["live"]
    return found


def test_a_whole_reply_is_answered_with_the_reason(
    single_slot_server: LiveServer, protocol: Protocol, cancelled: Callable[[], None], background: ThreadPoolExecutor
) -> None:
    url, body = single_slot_server.url + protocol.path, protocol.body("endless prefill")
    reply = background.submit(httpx.post, url, json=body, timeout=60)
    cancelled()
    check_error(reply.result(60))


@pytest.mark.parametrize("name", ["messages", "chat"])
@pytest.mark.parametrize("cancelled", ["waiting"], indirect=True)
def test_a_stream_that_waits_is_answered_with_the_reason(
    single_slot_server: LiveServer, name: str, cancelled: Callable[[], None], background: ThreadPoolExecutor
) -> None:
    protocol = PROTOCOLS[name]
    url, body = single_slot_server.url + protocol.path, protocol.body("endless prefill", stream=True)
    reply = background.submit(httpx.post, url, json=body, timeout=60)
    cancelled()
    check_error(reply.result(60))


def check_error(reply: httpx.Response) -> None:
    error = reply.json()["error"]
    assert (reply.status_code, error["message"], error["code"]) == (499, REASON, "cancelled")
    assert reply.headers["x-should-retry"] == "false"
    assert reply.headers["x-request-id"].startswith("req_")


def test_a_stream_of_responses_ends_with_a_failure_that_codex_does_not_repeat(
    single_slot_server: LiveServer, cancelled: Callable[[], None], background: ThreadPoolExecutor
) -> None:
    protocol = PROTOCOLS["responses"]
    url, body = single_slot_server.url + protocol.path, protocol.body("endless prefill", stream=True)
    reply = background.submit(httpx.post, url, json=body, timeout=60)
    cancelled()
    *_, last = parse_events(reply.result(60).text)
    assert last.event == "response.failed"
    assert last.data["response"]["error"] == {"code": "invalid_prompt", "message": REASON}


MESSAGES = [{"role": "user", "content": "endless prefill"}]


def openai_chat(server: LiveServer, **options: Any) -> Any:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=3) as client:
        create: Any = client.chat.completions.create
        return list(create(model="demo", messages=MESSAGES, **options))


def openai_responses(server: LiveServer, **options: Any) -> Any:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=3) as client:
        create: Any = client.responses.create
        *_, last = create(model="demo", input="endless prefill", **options)
        raise openai.OpenAIError(last.response.error.message)


def anthropic_messages(server: LiveServer, **options: Any) -> Any:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=3) as client:
        create: Any = client.messages.create
        return list(create(model="demo", max_tokens=100, messages=MESSAGES, **options))


@pytest.mark.parametrize("call", [openai_chat, openai_responses, anthropic_messages])
def test_the_official_sdks_do_not_send_the_request_again(
    single_slot_server: LiveServer,
    call: Callable[..., Any],
    stream: bool,
    cancelled: Callable[[], None],
    background: ThreadPoolExecutor,
) -> None:
    sent = requests_to_models(single_slot_server)
    reply: Future[Any] = background.submit(call, single_slot_server, stream=stream)
    cancelled()
    error: Any = reply.exception(60)
    assert REASON in str(error)
    assert stream or error.status_code == 499
    assert requests_to_models(single_slot_server) == sent + 1


def requests_to_models(server: LiveServer) -> float:
    lines = httpx.get(server.url + "/metrics").text.splitlines()
    counter = "modelyard_http_requests_total{"  # the same counts also go by another name
    counts = [line for line in lines if line.startswith(counter) and 'method="POST"' in line and "/admin/" not in line]
    return sum(float(line.rpartition(" ")[2]) for line in counts)


def test_a_client_that_disconnects_gets_nothing_and_leaves_no_error(
    single_slot_server: LiveServer, protocol: Protocol, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with raw_request(single_slot_server, CHAT.path, CHAT.body("endless stream", stream=True)) as holder:
        holder.read_until(b"so far")
        with raw_request(single_slot_server, protocol.path, protocol.body("text", stream=stream)):
            wait_for_queued(single_slot_server, 1)
        wait_for_queued(single_slot_server, 0)
        wait_for_running(single_slot_server, 1)
    wait_until_idle(single_slot_server)
    assert not [record for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")]
