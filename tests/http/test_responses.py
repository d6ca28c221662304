"""WebSocket mode of /v1/responses, with OpenAI's SDK and with plain messages; and /v1/responses/compact."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import CompactedResponse
from openai.types.responses.responses_server_event import ResponsesServerEvent
from pydantic import TypeAdapter
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from modelyard.http import responses
from tests.live_server import LiveServer, demo_config, live_server

SCRIPT = [
    {"when": "slow", "steps": [{"repeat": 2000, "steps": [{"text": "word "}, {"delay": 0.01}]}]},
    {"when": "pause", "steps": [{"text": "One "}, {"delay": 0.5}, {"text": "two."}]},
    {"when": "break", "steps": [{"text": "Half an ans"}, {"delay": 0.01}, {"fail": "out of memory"}]},
    {"when": "Summarize this conversation", "steps": [{"text": "The user likes teal."}]},
    {"when": "before this point:\\s+The user likes teal", "steps": [{"text": "You like teal."}]},
    {"steps": [{"text": "Hello there."}]},
]
RESULT = [{"type": "function_call_output", "call_id": "call_unknown", "output": "sunny"}]
ENDS = ("response.completed", "response.incomplete", "response.failed", "error")
EVENT: TypeAdapter[Any] = TypeAdapter(ResponsesServerEvent)


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    config = demo_config(SCRIPT) | {"keys": [{"name": "ada", "key": "sk-ada"}]}
    with live_server(config) as running:
        yield running


def open_socket(server: LiveServer, path: str = "/v1/responses", **headers: str) -> ClientConnection:
    url = server.url.replace("http", "ws") + path
    return connect(url, additional_headers={"authorization": "Bearer sk-ada"} | headers)


def create(socket: ClientConnection, text: str = "Hello", **fields: Any) -> None:
    socket.send(json.dumps({"type": "response.create", "model": "demo", "input": text} | fields))


def events(socket: ClientConnection) -> list[Any]:
    found: list[Any] = []
    while not found or found[-1]["type"] not in ENDS:
        found.append(json.loads(socket.recv(timeout=20)))
        EVENT.validate_python(found[-1])
    return found


@pytest.mark.filterwarnings("ignore:connect.. must be used as a context manager:DeprecationWarning")  # in the SDK
def test_the_sdk_receives_the_events_of_each_response_on_one_connection(server: LiveServer) -> None:
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="sk-ada")
    with client.responses.connect() as connection:
        for _ in range(2):
            connection.response.create(model="demo", input="Hello")
            text, last = "", None
            for event in connection:
                text += event.delta if event.type == "response.output_text.delta" else ""
                if event.type in ENDS:
                    last = event
                    break
            assert last is not None
            assert (text, last.type) == ("Hello there.", "response.completed")


def test_a_connection_continues_its_own_response_that_is_not_stored(server: LiveServer) -> None:
    with open_socket(server) as socket:
        create(socket, store=False)
        first = events(socket)[-1]["response"]
        create(socket, "And then?", previous_response_id=first["id"], store=False)
        second = events(socket)[-1]["response"]
        assert second["previous_response_id"] == first["id"]
        assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"] * 1.5
    with open_socket(server) as other:
        create(other, previous_response_id=second["id"])
        error = events(other)[-1]
        assert (error["status"], error["error"]["code"]) == (400, "previous_response_not_found")


@pytest.mark.parametrize("failing", [{"input": RESULT}, {"input": "Hello", "temperature": 9}, {"input": "break"}])
def test_a_response_whose_continuation_failed_can_be_continued_again_only_if_it_is_stored(
    server: LiveServer, failing: dict[str, Any]
) -> None:
    for store, end in ((False, "error"), (True, "response.completed")):
        with open_socket(server) as socket:
            create(socket, store=store)
            previous = events(socket)[-1]["response"]["id"]
            create(socket, previous_response_id=previous, store=store, **failing)
            assert events(socket)[-1]["type"] in ("error", "response.failed")
            create(socket, "Again", previous_response_id=previous, store=store)
            last = events(socket)[-1]
            assert last["type"] == end
            assert store or last["error"]["code"] == "previous_response_not_found"


def test_a_stored_response_continues_over_http_and_back(server: LiveServer) -> None:
    with open_socket(server) as socket:
        create(socket)
        id = events(socket)[-1]["response"]["id"]
        body = {"model": "demo", "input": "And then?", "previous_response_id": id}
        headers = {"authorization": "Bearer sk-ada"}
        next_id = httpx.post(server.url + "/v1/responses", json=body, headers=headers).json()["id"]
        create(socket, previous_response_id=next_id)
        assert events(socket)[-1]["type"] == "response.completed"


def test_a_warm_up_generates_nothing_and_can_be_continued(server: LiveServer) -> None:
    with open_socket(server) as socket:
        create(socket, "Read this.", generate=False)
        found = events(socket)
        assert [event["type"] for event in found] == ["response.created", "response.in_progress", "response.completed"]
        assert found[-1]["response"]["output"] == []
        create(socket, "Now answer.", previous_response_id=found[-1]["response"]["id"])
        assert events(socket)[-1]["response"]["output_text"] == "Hello there."


@pytest.mark.parametrize(
    ("message", "status", "part"),
    [
        ("{", 400, "JSON"),
        ("[]", 400, "object"),
        ("{}", 400, "response.create"),
        ('{"type": "response.steer"}', 400, "response.steer"),
        ('{"type": "response.create"}', 400, "input"),
        ('{"type": "response.create", "model": "demo", "input": 7}', 400, "input"),
        ("[" * 5000, 400, "nested"),
    ],
)
def test_a_bad_message_is_answered_with_an_error_and_the_connection_stays(
    server: LiveServer, message: str, status: int, part: str
) -> None:
    with open_socket(server) as socket:
        socket.send(message)
        error = events(socket)[-1]
        assert (error["type"], error["status"]) == ("error", status)
        assert part in error["error"]["message"]
        assert error["error"]["code"], "the specification requires a code"
        create(socket)
        assert events(socket)[-1]["type"] == "response.completed"


def test_lanes_run_at_once_and_their_events_name_them(server: LiveServer) -> None:
    with open_socket(server) as socket:
        create(socket, "slow", stream_id="a")
        while json.loads(socket.recv(timeout=20))["type"] != "response.output_text.delta":
            pass
        create(socket, stream_id="b")
        found = json.loads(socket.recv(timeout=20))
        while found["type"] not in ENDS:
            found = json.loads(socket.recv(timeout=20))
        assert (found["stream_id"], found["type"]) == ("b", "response.completed")


def test_requests_of_one_lane_wait_for_each_other(server: LiveServer) -> None:
    with open_socket(server) as socket:
        create(socket, "Hello one")
        create(socket, "Hello two")
        first, second = events(socket), events(socket)
        assert {event["response"]["id"] for event in first if "response" in event} == {first[-1]["response"]["id"]}
        assert first[-1]["response"]["id"] != second[-1]["response"]["id"]


def test_a_client_that_leaves_cancels_its_responses(server: LiveServer) -> None:
    with open_socket(server) as socket:
        create(socket, "slow")
        while json.loads(socket.recv(timeout=20))["type"] != "response.output_text.delta":
            pass
    deadline = time.monotonic() + 10
    while server.status("demo").running and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server.status("demo").running == 0


def test_a_response_in_the_background_goes_on_without_its_connection(server: LiveServer) -> None:
    with open_socket(server) as socket:
        create(socket, "pause", background=True)
        found = [json.loads(socket.recv(timeout=20)) for _ in range(2)]
        assert [event["type"] for event in found] == ["response.created", "response.queued"]
        while found[-1]["type"] != "response.output_text.delta":
            found.append(json.loads(socket.recv(timeout=20)))
            EVENT.validate_python(found[-1])
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="sk-ada")
    replayed = [event.type for event in client.responses.retrieve(found[0]["response"]["id"], stream=True)]
    assert replayed[: len(found)] == [event["type"] for event in found]
    assert replayed[-1] == "response.completed"
    assert client.responses.retrieve(found[0]["response"]["id"]).output_text == "One two."


@pytest.mark.parametrize("background", [False, True])
def test_a_silent_response_is_kept_alive_by_events_of_their_own(background: bool) -> None:
    """They count, but for a response in the background, whose numbers other readers get, too."""
    config = demo_config([{"steps": [{"delay": 0.4}, {"text": "Hello there."}]}]) | {"http": {"keepalive_s": 0.05}}
    with live_server(config) as running, connect(running.url.replace("http", "ws") + "/v1/responses") as socket:
        create(socket, background=background)
        found = [json.loads(socket.recv(timeout=20))]
        while found[-1]["type"] not in ENDS:
            found.append(json.loads(socket.recv(timeout=20)))
    types = [event["type"] for event in found]
    assert types.count("keepalive") >= 2
    assert [types.count(name) for name in ("response.created", "response.in_progress", "response.completed")] == [1] * 3
    counted = [event["sequence_number"] for event in found if not background or event["type"] != "keepalive"]
    assert counted == list(range(len(counted)))
    assert all(set(event) == {"type", "sequence_number"} for event in found if event["type"] == "keepalive")


def test_a_connection_ends_after_its_hour_but_not_within_a_response(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(responses, "_MAX_AGE_S", 0.2)
    with open_socket(server) as socket:
        create(socket, "pause")
        found = events(socket)
        assert found[-1]["type"] == "response.completed"
        refused = json.loads(socket.recv(timeout=20))
        assert (refused["type"], refused["status"]) == ("error", 400)
        assert refused["error"]["code"] == "websocket_connection_limit_reached"
        with pytest.raises(ConnectionClosed) as closed:
            socket.recv(timeout=20)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1000


def test_a_connection_without_a_key_or_from_a_foreign_page_is_refused_with_the_reason(
    server: LiveServer, caplog: pytest.LogCaptureFixture
) -> None:
    for headers, path, status, code in (
        ({"authorization": "Bearer wrong"}, "/v1/responses", 401, "invalid_api_key"),
        ({"origin": "https://evil.example"}, "/v1/responses", 403, "origin_not_allowed"),
        ({}, "/v1/chat/completions", 404, "path_not_found"),
    ):
        with pytest.raises(InvalidStatus) as refused:
            open_socket(server, path, **headers)
        assert refused.value.response.status_code == status
        assert json.loads(refused.value.response.body)["error"]["code"] == code
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_text_that_is_not_utf8_closes_the_connection_without_an_error_in_the_log(
    server: LiveServer, caplog: pytest.LogCaptureFixture
) -> None:
    with open_socket(server) as socket:
        socket.send(b"\xff\xfe", text=True)
        with pytest.raises(ConnectionClosed) as closed:
            socket.recv(timeout=20)
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1007
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


# --- compaction -------------------------------------------------------------------------------------------------------


def test_a_compacted_conversation_continues_from_its_summary(server: LiveServer) -> None:
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="sk-ada")
    turns: Any = [
        {"role": "user", "content": "I like teal."},
        {"role": "assistant", "content": "Noted." * 50},
        {"role": "user", "content": "Remember it."},
    ]
    compacted = client.responses.with_raw_response.compact(model="demo", input=turns).http_response.json()
    items = compacted["output"]
    assert [item["type"] for item in items] == ["message", "message", "compaction"]
    assert items[0]["content"][0]["text"] == "I like teal."
    CompactedResponse.model_validate(compacted | {"output": items[2:]})  # the type has no messages of the user
    answer = client.responses.create(model="demo", input=items)
    assert answer.output_text == "You like teal."


def test_a_stored_conversation_can_be_compacted_by_its_id(server: LiveServer) -> None:
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="sk-ada")
    first = client.responses.create(model="demo", input="I like teal.")
    compacted = client.responses.compact(model="demo", previous_response_id=first.id)
    assert [item.type for item in compacted.output] == ["message", "compaction"]
