"""Ollama's and Google's APIs over a socket: the same answers as on Chat, errors of their own, cancellation and keys."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.helpers import config, raw_request, single_slot_config, wait_until, wait_until_idle
from tests.e2e.protocols import CHAT, OTHER_WIRES, OtherWire, ParsedReply, send
from tests.e2e.test_protocols import CASES
from tests.live_server import LiveServer, live_server

_STOPS = {"length": "limit", "stop string": "string", "one tool": "tools", "parallel tools": "tools"}


@pytest.fixture(params=list(OTHER_WIRES))
def wire(request: pytest.FixtureRequest) -> OtherWire:
    return OTHER_WIRES[request.param]


def post(client: httpx.Client, wire: OtherWire, stream: bool, text: str, **fields: Any) -> httpx.Response:
    return client.post(wire.path(stream), json=wire.body(text, stream=stream, **fields))


def ask(client: httpx.Client, wire: OtherWire, stream: bool, text: str, **fields: Any) -> ParsedReply:
    reply = post(client, wire, stream, text, **fields)
    assert reply.status_code == 200, reply.text
    return wire.parse(reply, stream)


@pytest.fixture(scope="module", params=["text", "chat"])
def engine_kind_client(request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    settings = config()
    settings["models"]["demo"]["kind"] = request.param
    with live_server(settings) as server, httpx.Client(base_url=server.url) as client:
        yield client


def test_replies_and_usage_are_those_of_chat(engine_kind_client: httpx.Client, wire: OtherWire, stream: bool) -> None:
    for name, case in CASES.items():
        parsed = ask(engine_kind_client, wire, stream, name, **case.fields)
        assert (parsed.text, parsed.thinking, parsed.calls) == (case.text, case.thinking, case.calls), name
        assert parsed.stop == wire.stops[_STOPS.get(name, "end")], name
        chat = send(engine_kind_client, CHAT, False, name, **case.fields).usage
        assert (parsed.usage.prompt, parsed.usage.output) == (chat.prompt, chat.output), name


def test_a_call_cut_off_by_the_limit_is_dropped(client: httpx.Client, wire: OtherWire, stream: bool) -> None:
    parsed = ask(client, wire, stream, "one tool", tools=True, limit=18)
    assert (parsed.calls, parsed.stop) == ([], wire.stops["limit"])


# --- errors -----------------------------------------------------------------------------------------------------------


def error_of(reply: httpx.Response) -> str:
    """The message, after checks of the form."""
    (error,) = reply.json().values()
    if isinstance(error, str):
        return error
    assert error["code"] == reply.status_code
    assert error["status"].isupper()
    return str(error["message"])


def test_an_error_before_the_first_byte_has_its_status(client: httpx.Client, wire: OtherWire, stream: bool) -> None:
    for text, status in (("error before", 500), ("busy before", 503)):
        reply = post(client, wire, stream, text)
        assert reply.status_code == status
        assert error_of(reply)
    assert ask(client, wire, stream, "text").text == "Hello there, friend."


def test_a_failure_within_a_stream_is_its_last_object(client: httpx.Client, wire: OtherWire) -> None:
    text = post(client, wire, True, "error during").text
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith(("data: ", "{"))]
    assert "out of memory" in str(json.loads(lines[-1])["error"])


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{", b'{"messages": 5, "contents": 5}', b'{"model": "demo", "a": "\\ud800"}']
)
def test_a_bad_body_is_refused_in_the_words_of_the_protocol(client: httpx.Client, wire: OtherWire, body: bytes) -> None:
    reply = client.post(wire.path(False), content=body)
    assert reply.status_code == 400, reply.text
    assert error_of(reply)


def test_a_prompt_that_does_not_fit_is_refused(client: httpx.Client, wire: OtherWire, stream: bool) -> None:
    reply = post(client, wire, stream, "a b " * 4000)
    assert reply.status_code == 400
    assert "4096" in error_of(reply)


def test_unknown_paths_and_methods_are_refused_in_the_words_of_the_protocol(client: httpx.Client) -> None:
    for reply, status in (
        (client.get("/api/nothing"), 404),
        (client.get("/api/chat"), 405),
        (client.get("/v1beta/nothing"), 404),
        (client.post("/v1beta/models/demo:nothing", json={}), 404),
    ):
        assert reply.status_code == status
        assert "error" in reply.json()


def test_an_unknown_model_is_not_found() -> None:
    settings = config()
    del settings["routes"]
    with live_server(settings) as server, httpx.Client(base_url=server.url) as client:
        chat = client.post("/api/chat", json={"model": "none", "messages": [{"role": "user", "content": "a"}]})
        content = client.post("/v1beta/models/none:generateContent", json={"contents": [{"parts": [{"text": "a"}]}]})
        assert [chat.status_code, content.status_code] == [404, 404]
        tagged = client.post(
            "/api/chat",
            json={"model": "Demo:latest", "stream": False, "messages": [{"role": "user", "content": "text"}]},
        )
        assert tagged.json()["message"]["content"] == "Hello there, friend."


# --- cancellation -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def single_slot_server() -> Iterator[LiveServer]:
    with live_server(single_slot_config(http={"keepalive_s": 0.05})) as running:
        yield running


def test_a_disconnect_frees_the_slot(single_slot_server: LiveServer, wire: OtherWire, stream: bool) -> None:
    body = wire.body("endless stream", stream=stream)
    with raw_request(single_slot_server, wire.path(stream), body) as caller:
        if stream:
            caller.read_until(b"so far")
        else:
            wait_until(lambda: single_slot_server.status("demo").running == 1, "it runs")
    wait_until_idle(single_slot_server)


def test_a_waiting_client_gets_signs_of_life_that_it_can_read(single_slot_server: LiveServer, wire: OtherWire) -> None:
    with httpx.Client(base_url=single_slot_server.url, timeout=60) as client:
        assert ask(client, wire, True, "slow prefill").text == "done"


# --- keys -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def keyed_server() -> Iterator[LiveServer]:
    def key(name: str, **more: Any) -> dict[str, Any]:
        return {"name": name, "hash": "sha256:" + hashlib.sha256(name.encode()).hexdigest(), **more}

    keys = [key("ann"), key("root", admin=True), key("slow", requests_per_minute=1)]
    with live_server(config(keys=keys)) as running:
        yield running


def test_a_key_comes_in_a_header_or_in_the_query(keyed_server: LiveServer) -> None:
    url, body = keyed_server.url + "/v1beta/models/demo:generateContent", {"contents": [{"parts": [{"text": "text"}]}]}
    assert httpx.post(url, json=body).status_code == 401
    assert httpx.post(url, json=body, headers={"x-goog-api-key": "bob"}).status_code == 401
    assert httpx.post(url, json=body, headers={"x-goog-api-key": "ann"}).status_code == 200
    assert httpx.post(url + "?key=ann", json=body).status_code == 200
    refused = httpx.get(keyed_server.url + "/api/tags")
    assert (refused.status_code, [*refused.json()]) == (401, ["error"])
    assert httpx.get(keyed_server.url + "/api/tags", headers={"authorization": "Bearer ann"}).status_code == 200


def test_limits_of_a_key_hold_on_the_other_wires(keyed_server: LiveServer) -> None:
    headers = {"authorization": "Bearer slow"}
    with httpx.Client(base_url=keyed_server.url, headers=headers) as client:
        assert ask(client, OTHER_WIRES["ollama"], False, "text").text
        for wire in OTHER_WIRES.values():
            reply = post(client, wire, False, "text")
            assert reply.status_code == 429
            assert int(reply.headers["retry-after"]) > 0


@pytest.mark.parametrize("path", ["pull", "copy", "create", "delete", "push", "blobs/sha256:" + "0" * 64])
def test_changes_of_the_library_need_an_admin_key(keyed_server: LiveServer, path: str) -> None:
    method = "DELETE" if path == "delete" else "POST"
    body = {"model": "demo", "source": "demo", "destination": "other", "from": "demo"}
    reply = httpx.request(method, f"{keyed_server.url}/api/{path}", json=body, headers={"authorization": "Bearer ann"})
    assert (reply.status_code, reply.json()["error"]) == (403, "this needs an admin key")


def test_requests_are_in_the_log_under_their_paths(keyed_server: LiveServer) -> None:
    with httpx.Client(base_url=keyed_server.url, headers={"authorization": "Bearer root"}) as client:
        for wire in OTHER_WIRES.values():
            ask(client, wire, False, "text")
        recent = client.get("/v1/admin/requests?limit=2").json()["ended"]
        assert {each["key"] for each in recent} == {"root"}
        metrics = client.get("/metrics").text
    assert '"/api/chat"' in metrics
    assert '"/v1beta/models/{id}:generateContent"' in metrics


# --- as a client ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def forwarding_client(server: LiveServer) -> Iterator[httpx.Client]:
    """A gateway whose model is another server's, reached as an Ollama."""
    model = {
        "backend": "openai_remote",
        "remote_api_kind": "ollama",
        "remote_base_url": server.url,
        "remote_model": "demo",
        "remote_health_check": "models",
    }
    routes = [{"match": "*", "model": "far", "allow_remote": True}]
    with (
        live_server({"models": {"far": model}, "routes": routes}) as gateway,
        httpx.Client(base_url=gateway.url) as client,
    ):
        yield client


def test_an_ollama_upstream_answers(forwarding_client: httpx.Client, stream: bool) -> None:
    for name in ("text", "thinking", "one tool", "parallel tools", "length"):
        case = CASES[name]
        parsed = send(forwarding_client, CHAT, stream, name, **case.fields)
        assert (parsed.text, parsed.thinking, parsed.calls) == (case.text, case.thinking, case.calls), name
        assert parsed.stop == case.stop(CHAT), name


def test_errors_of_an_upstream_keep_their_meaning(forwarding_client: httpx.Client) -> None:
    for text, status in (("busy before", 503), ("a b " * 4000, 400)):
        reply = forwarding_client.post(CHAT.path, json=CHAT.body(text))
        assert reply.status_code == status, reply.text
    assert "4096" in reply.json()["error"]["message"]


# --- the start page, and a model's life -------------------------------------------------------------------------------


def test_the_start_page_is_for_browsers_and_for_clients_of_ollama(client: httpx.Client) -> None:
    assert client.get("/").text == "Ollama is running"
    assert client.head("/").status_code == 200
    page = client.get("/", headers={"accept": "text/html,*/*"}, follow_redirects=False)
    assert page.headers["location"] == "/workbench"
    assert client.get("/", headers={"accept": "application/json"}).json()["name"] == "modelyard"


def test_keep_alive_unloads_and_the_next_request_loads() -> None:
    with live_server(config()) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        chat = OTHER_WIRES["ollama"]
        assert ask(client, chat, False, "text", keep_alive="10m").text
        (loaded,) = client.get("/api/ps").json()["models"]
        assert loaded["expires_at"] < "2300"
        assert client.post("/api/chat", json={"model": "demo", "keep_alive": 0}).json()["done_reason"] == "unload"
        wait_until(lambda: server.status("demo").state == "stopped", "it is unloaded")
        assert client.get("/api/ps").json() == {"models": []}
        again = client.post("/api/generate", json={"model": "demo", "keep_alive": -1}).json()
        assert (again["done"], again["done_reason"]) == (True, "load")
        assert server.status("demo").state == "ready"
        assert client.get("/api/ps").json()["models"][0]["expires_at"].startswith("2318")
        assert ask(client, chat, False, "text", keep_alive=0).text
        wait_until(lambda: server.status("demo").state == "stopped", "it is unloaded after the request")
