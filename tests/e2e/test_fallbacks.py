"""Routes with several models: the next one answers where one cannot, in every protocol, until the first token."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.helpers import raw_request, wait_until
from tests.e2e.protocols import CHAT, OTHER_WIRES, Protocol, parse_events, send
from tests.engines.fake_upstream import Answer, FakeUpstream, chat_stream, error_answer
from tests.live_server import LiveServer, live_server

HEADER = "x-modelyard-fallback"
PIXEL = (
    "data:image/png;base64,"
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


def scripted(*steps: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"backend": "fake", "token_delay": 0, "script": [{"steps": list(steps)}], **more}


def remote(url: str, **more: Any) -> dict[str, Any]:
    return {"backend": "openai_remote", "remote_base_url": url, "remote_model": "up", "remote_max_retries": 0, **more}


class UpstreamThread:
    """A fake upstream in a loop of its own. `answers` may be changed."""

    def __init__(self) -> None:
        self.fake = FakeUpstream([])
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> UpstreamThread:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._open(), self._loop).result(60)
        return self

    async def _open(self) -> None:
        self._server = await asyncio.start_server(self.fake.serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/v1"

    async def _close(self) -> None:
        self._server.close()
        await self.fake.close()

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()


FAILING = {
    "stopped": ("model_not_loaded", "is not loaded"),
    "broken": ("engine_unavailable", "out of order"),
    "bug": ("internal_error", "a bug"),
    "busy": ("rate_limit_exceeded", "try later"),
    "dying": ("engine_unavailable", "segmentation fault"),
    "accepting": ("engine_unavailable", "after the prompt"),
}


def settings(upstream: str, folder: Path) -> dict[str, Any]:
    models = {
        "good": scripted({"text": "From good."}, parallel=4),
        "other": scripted({"text": "From other."}, parallel=4),
        "seeing": scripted({"text": "I see."}, modalities=["text", "image"]),
        "stopped": scripted({"text": "never"}, enabled=False),
        "broken": scripted({"fail": "out of order", "kind": "unavailable"}),
        "bug": scripted({"fail": "a bug"}),
        "busy": scripted({"fail": "try later", "kind": "rate_limited"}),
        "dying": scripted({"die": "segmentation fault"}),
        "accepting": scripted({"prefill": 0.001}, {"fail": "after the prompt", "kind": "unavailable"}),
        "half": scripted({"text": "Half an answer"}, {"fail": "out of memory", "kind": "unavailable"}),
        "invalid": scripted({"fail": "wrong for all", "kind": "invalid"}),
        "slow": scripted({"text": "so far"}, {"hang": True}, parallel=1),
        "stuck": scripted({"prefill": 0.001}, {"hang": True}, parallel=4),
        "small": scripted({"text": "From small."}, n_ctx=64),
        "up": remote(upstream),
    }
    routes = [{"match": f"try-{name}", "model": name, "fallback": "good"} for name in models if name != "good"]
    routes += [
        {"match": "chain", "model": "broken", "fallback": ["stopped", "busy", "good"]},
        {"match": "none", "model": "broken", "fallback": ["stopped"]},
        {"match": "blind", "model": "good", "fallback": ["seeing"]},
        {"match": "impatient", "model": "slow", "fallback": ["good"], "fallback_wait_s": 0},
        {"match": "upstreams", "model": "up", "fallback": ["good"], "allow_remote": True},
        {"match": "stuck-second", "model": "broken", "fallback": ["stuck", "good"]},
    ]
    keys = [
        {"name": "k", "key": "secret", "admin": True},
        {"name": "once", "key": "once-secret", "requests_per_minute": 2},
    ]
    return {"models": models, "routes": routes, "keys": keys, "accounts": {"path": str(folder / "accounts.sqlite")}}


@pytest.fixture(scope="module")
def upstream() -> Iterator[UpstreamThread]:
    with UpstreamThread() as running:
        yield running


@pytest.fixture(scope="module")
def server(upstream: UpstreamThread, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with live_server(settings(upstream.url, tmp_path_factory.mktemp("accounts"))) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, headers={"x-api-key": "secret"}) as client:
        yield client


def records(client: httpx.Client, reply: httpx.Response) -> list[Any]:
    """The newest first."""
    ended: list[Any] = client.get(f"/v1/admin/requests/{reply.headers['request-id']}").json()["ended"]
    return sorted(ended, key=lambda one: -one["at"])


# --- the next model answers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", FAILING)
def test_the_next_model_answers_and_the_header_says_why(
    client: httpx.Client, model: str, protocol: Protocol, stream: bool
) -> None:
    reply = client.post(protocol.path, json=protocol.body("hi", stream=stream) | {"model": f"try-{model}"})
    assert reply.status_code == 200, reply.text
    parsed = protocol.parse_stream(parse_events(reply.text)) if stream else protocol.parse_reply(reply.json())
    assert parsed.text == "From good."
    assert parsed.usage.output > 0
    reason, message = FAILING[model]
    assert reply.headers[HEADER] == f"from={model}; reason={reason}; to=good"
    assert f"try-{model}" in reply.text, "the reply names the model as the client does"
    record = records(client, reply)[0]
    assert (record["model"], record["failed"]) == ("good", False)
    (skipped,) = record["skipped"]
    assert (skipped["model"], skipped["reason"]) == (model, reason)
    assert message in skipped["message"]


@pytest.mark.parametrize("wire", OTHER_WIRES)
def test_ollama_and_gemini_fall_back_too(client: httpx.Client, wire: str, stream: bool) -> None:
    other = OTHER_WIRES[wire]
    body = other.body("hi", stream=stream)
    if wire == "ollama":
        body["model"] = "try-broken"
    reply = client.post(other.path(stream).replace("demo", "try-broken"), json=body)
    assert reply.status_code == 200, reply.text
    assert other.parse(reply, stream).text == "From good."
    assert reply.headers[HEADER] == "from=broken; reason=engine_unavailable; to=good"


def test_models_are_tried_in_their_order(client: httpx.Client) -> None:
    reply = client.post(CHAT.path, json=CHAT.body("hi") | {"model": "chain"})
    assert reply.json()["choices"][0]["message"]["content"] == "From good."
    assert reply.headers[HEADER].split(", ") == [
        "from=broken; reason=engine_unavailable; to=stopped",
        "from=stopped; reason=model_not_loaded; to=busy",
        "from=busy; reason=rate_limit_exceeded; to=good",
    ]
    metrics = client.get("/metrics").text
    assert 'modelyard_fallbacks_total{model="stopped",reason="model_not_loaded"}' in metrics


def test_a_model_that_answers_has_no_header(client: httpx.Client) -> None:
    for model in ("try-other", "good"):
        reply = client.post(CHAT.path, json=CHAT.body("hi") | {"model": model})
        assert reply.status_code == 200
        assert HEADER not in reply.headers


def test_a_request_that_does_not_fit_a_model_goes_to_the_next(client: httpx.Client) -> None:
    image = {"type": "image_url", "image_url": {"url": PIXEL}}
    body = CHAT.body("hi") | {"model": "blind", "messages": [{"role": "user", "content": [image]}]}
    reply = client.post(CHAT.path, json=body)
    assert reply.json()["choices"][0]["message"]["content"] == "I see."
    assert reply.headers[HEADER].startswith("from=good; reason=")
    long = client.post(CHAT.path, json=CHAT.body("word " * 100) | {"model": "try-small"})
    assert long.json()["choices"][0]["message"]["content"] == "From good."
    assert long.headers[HEADER] == "from=small; reason=context_length_exceeded; to=good"


def test_several_replies_come_from_one_model(client: httpx.Client) -> None:
    reply = client.post(CHAT.path, json=CHAT.body("hi") | {"model": "try-accepting", "n": 2})
    assert [choice["message"]["content"] for choice in reply.json()["choices"]] == ["From good."] * 2


def test_a_full_model_is_not_waited_for_if_the_route_says_so(server: LiveServer, client: httpx.Client) -> None:
    body = CHAT.body("hi", stream=True) | {"model": "slow"}
    with client.stream("POST", CHAT.path, json=body) as first:
        next(first.iter_bytes())
        reply = client.post(CHAT.path, json=CHAT.body("hi") | {"model": "impatient"})
        assert reply.json()["choices"][0]["message"]["content"] == "From good."
        assert reply.headers[HEADER] == "from=slow; reason=timeout; to=good"
    wait_until(lambda: server.status("slow").running == 0, "its slot is free")


# --- upstreams --------------------------------------------------------------------------------------------------------

PARTIAL = chat_stream("Half", " of it")[:1]


@pytest.mark.parametrize(
    "answer",
    [
        error_answer(500),
        error_answer(429),
        error_answer(401),
        error_answer(404),
        Answer(breaks=True),
        Answer(body=[b'data: {"id": "1", "choices": [{"index": 0, "delta": {"role": "assistant"}}]}\n\n'], breaks=True),
    ],
    ids=["500", "429", "401", "404", "breaks", "breaks after its headers"],
)
def test_an_upstream_that_fails_before_its_first_token_is_replaced(
    client: httpx.Client, upstream: UpstreamThread, answer: Answer, stream: bool
) -> None:
    upstream.fake.answers = [answer]
    reply = client.post(CHAT.path, json=CHAT.body("hi", stream=stream) | {"model": "upstreams"})
    assert reply.status_code == 200, reply.text
    text = CHAT.parse_stream(parse_events(reply.text)) if stream else CHAT.parse_reply(reply.json())
    assert text.text == "From good."
    assert reply.headers[HEADER].startswith("from=up; reason=")


def test_an_upstream_that_breaks_after_its_first_token_is_not_replaced(
    client: httpx.Client, upstream: UpstreamThread
) -> None:
    upstream.fake.answers = [Answer(body=PARTIAL, breaks=True)]
    reply = client.post(CHAT.path, json=CHAT.body("hi", stream=True) | {"model": "upstreams"})
    assert "Half" in reply.text
    assert "From good" not in reply.text
    assert HEADER not in reply.headers
    assert '"error"' in reply.text


def test_a_client_that_may_not_use_the_remote_model_gets_the_next(client: httpx.Client) -> None:
    reply = client.post(CHAT.path, json=CHAT.body("hi") | {"model": "try-up"})
    assert reply.json()["choices"][0]["message"]["content"] == "From good."
    assert reply.headers[HEADER] == "from=up; reason=remote_not_allowed; to=good"


# --- no other model is tried ------------------------------------------------------------------------------------------


def test_after_the_first_token_the_answer_fails(client: httpx.Client, stream: bool) -> None:
    reply = client.post(CHAT.path, json=CHAT.body("hi", stream=stream) | {"model": "try-half"})
    assert "out of memory" in reply.text
    assert "From good" not in reply.text


def test_what_is_wrong_for_every_model_is_the_clients_error(client: httpx.Client) -> None:
    reply = client.post(CHAT.path, json=CHAT.body("hi") | {"model": "try-invalid"})
    assert (reply.status_code, reply.json()["error"]["message"]) == (400, "wrong for all")


def test_if_no_model_answers_the_error_names_each(client: httpx.Client, protocol: Protocol, stream: bool) -> None:
    reply = client.post(protocol.path, json=protocol.body("hi", stream=stream) | {"model": "none"})
    assert reply.status_code in (503, 529), "Anthropic's own code for it"
    assert "broken: out of order" in reply.text
    assert "stopped: the model 'stopped' is not loaded" in reply.text


def test_a_limit_of_the_key_counts_each_request_once(server: LiveServer) -> None:
    with httpx.Client(base_url=server.url, headers={"x-api-key": "once-secret"}) as client:
        for _ in range(2):
            assert client.post(CHAT.path, json=CHAT.body("hi") | {"model": "try-broken"}).status_code == 200
        limited = client.post(CHAT.path, json=CHAT.body("hi") | {"model": "try-broken"})
    assert limited.status_code == 429
    assert limited.json()["error"]["message"] == "the key 'once' may use 2 requests a minute"


def test_a_client_that_leaves_while_the_second_model_is_tried_ends_it(server: LiveServer, client: httpx.Client) -> None:
    body = CHAT.body("hi", stream=True) | {"model": "stuck-second"}
    with raw_request(server, CHAT.path, body, key="secret"):
        wait_until(lambda: server.status("stuck").running == 1, "the second model has it")
    wait_until(lambda: server.status("stuck").running == 0, "the engine was told")
    (newest,) = client.get("/v1/admin/requests?limit=1").json()["ended"]
    assert (newest["model"], newest["status"]) == ("stuck", "cancelled")


def test_usage_is_that_of_the_model_that_answered(client: httpx.Client) -> None:
    def used(model: str) -> Any:
        rows = client.get("/v1/admin/usage?by=model").json()["data"]
        return next((row for row in rows if row["model"] == model), {"output": 0, "failed": 0})

    good, broken = used("good"), used("broken")
    send(client, CHAT, False, "hi", model="try-broken")
    assert used("good")["output"] > good["output"]
    assert used("broken")["output"] == broken["output"] == 0
    assert used("broken")["failed"] == broken["failed"] + 1
