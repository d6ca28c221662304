"""Stored responses: ownership by key, limits, and restarts."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from modelyard.gateway import stored_responses
from modelyard.store import MemoryStore
from tests.e2e.helpers import SCRIPT, config
from tests.e2e.protocols import parse_events
from tests.live_server import LiveServer, demo_config, live_server

PATH = "/v1/responses"
WEATHER_TOOL = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}


def connect(server: LiveServer, key: str = "none") -> httpx.Client:
    return httpx.Client(base_url=server.url, headers={"authorization": f"Bearer {key}"})


def create(connect: httpx.Client, given: str | list[dict[str, Any]], **more: Any) -> Any:
    reply = connect.post(PATH, json={"model": "demo", "input": given, **more})
    assert reply.status_code == 200, reply.text
    return reply.json()


def expect_no_previous(reply: httpx.Response, id: str) -> None:
    error = reply.json()["error"]
    assert (reply.status_code, error["type"]) == (400, "invalid_request_error")
    assert (error["code"], error["param"]) == ("previous_response_not_found", "previous_response_id")
    assert id in error["message"]


def expect_not_found(reply: httpx.Response, id: str) -> None:
    error = reply.json()["error"]
    assert (reply.status_code, error["type"], error["code"]) == (404, "not_found_error", "response_not_found")
    assert id in error["message"]


@pytest.fixture(scope="module")
def two_key_server() -> Iterator[LiveServer]:
    with live_server(config(keys=[{"name": "ada", "key": "sk-ada"}, {"name": "bob", "key": "sk-bob"}])) as running:
        yield running


def test_a_key_reads_only_its_own_responses(two_key_server: LiveServer) -> None:
    with connect(two_key_server, "sk-ada") as ada, connect(two_key_server, "sk-bob") as bob:
        response = create(ada, "text")
        assert ada.get(f"{PATH}/{response['id']}").json() == response
        expect_not_found(bob.get(f"{PATH}/{response['id']}"), response["id"])
        expect_not_found(bob.get(f"{PATH}/{response['id']}/input_items"), response["id"])


def test_a_key_cannot_continue_or_count_responses_of_another_key(two_key_server: LiveServer) -> None:
    with connect(two_key_server, "sk-ada") as ada, connect(two_key_server, "sk-bob") as bob:
        response = create(ada, "text")
        body = {"model": "demo", "input": "thinking", "previous_response_id": response["id"]}
        for stream in (False, True):
            expect_no_previous(bob.post(PATH, json=body | {"stream": stream}), response["id"])
        expect_no_previous(bob.post(PATH + "/input_tokens", json=body), response["id"])
        assert ada.post(PATH, json=body).status_code == 200


def test_a_key_cannot_delete_responses_of_another_key(two_key_server: LiveServer) -> None:
    with connect(two_key_server, "sk-ada") as ada, connect(two_key_server, "sk-bob") as bob:
        response = create(ada, "text")
        expect_not_found(bob.delete(f"{PATH}/{response['id']}"), response["id"])
        deleted = ada.delete(f"{PATH}/{response['id']}").json()
        assert deleted == {"id": response["id"], "object": "response", "deleted": True}
        expect_not_found(ada.get(f"{PATH}/{response['id']}"), response["id"])
        expect_not_found(ada.delete(f"{PATH}/{response['id']}"), response["id"])


def test_store_false_stores_nothing(two_key_server: LiveServer) -> None:
    with connect(two_key_server, "sk-ada") as ada:
        for stream in (False, True):
            reply = ada.post(PATH, json={"model": "demo", "input": "text", "store": False, "stream": stream})
            response = parse_events(reply.text)[-1].data["response"] if stream else reply.json()
            assert response["store"] is False
            expect_not_found(ada.get(f"{PATH}/{response['id']}"), response["id"])


def test_a_streamed_response_is_stored_before_its_last_event(two_key_server: LiveServer) -> None:
    with connect(two_key_server, "sk-ada") as ada:
        for _ in range(20):
            reply = ada.post(PATH, json={"model": "demo", "input": "text", "stream": True})
            response = parse_events(reply.text)[-1].data["response"]
            follow = {"model": "demo", "input": "thinking", "previous_response_id": response["id"]}
            assert ada.post(PATH, json=follow).json()["output_text"] == "Forty-two."
            assert ada.get(f"{PATH}/{response['id']}").json() == response


def test_a_failed_response_is_not_stored(two_key_server: LiveServer) -> None:
    with connect(two_key_server, "sk-ada") as ada:
        reply = ada.post(PATH, json={"model": "demo", "input": "error during", "stream": True})
        failed = parse_events(reply.text)[-1].data["response"]
        expect_not_found(ada.get(f"{PATH}/{failed['id']}"), failed["id"])


def test_a_chain_keeps_the_conversation_but_not_the_instructions() -> None:
    with live_server(demo_config(SCRIPT)) as server, connect(server) as client:
        first = create(client, "text one", instructions="Be brief.")
        second = create(client, "text two", previous_response_id=first["id"], instructions="Be long.")
        third = create(client, "text three", previous_response_id=second["id"])
        inputs = [input_texts(client, response["id"]) for response in (first, second, third)]
        assert inputs[0] == ["text one"]
        assert inputs[2] == ["text one", "Hello there, friend.", "text two", "Hello there, friend.", "text three"]
        assert third["instructions"] is None
        counted = client.post("/v1/responses/input_tokens", json={"model": "demo", "input": "text three"}).json()
        assert third["usage"]["input_tokens"] > counted["input_tokens"]


def input_texts(connect: httpx.Client, id: str) -> list[str]:
    """The input texts of a response, oldest first."""
    found = connect.get(f"{PATH}/{id}/input_items").json()["data"]
    return [part["text"] for item in reversed(found) for part in item["content"]]


def test_the_store_evicts_the_oldest_entries_first() -> None:
    with live_server(config(store={"max_entries": 2})) as server, connect(server) as client:
        first, second, third = [create(client, "text")["id"] for _ in range(3)]
        expect_not_found(client.get(f"{PATH}/{first}"), first)
        assert [client.get(f"{PATH}/{id}").status_code for id in (second, third)] == [200, 200]


def test_the_sqlite_store_survives_a_restart(tmp_path: Path) -> None:
    settings = config(store={"backend": "sqlite", "path": str(tmp_path / "store.sqlite")})
    with live_server(settings) as server, connect(server) as client:
        response = create(client, "text")
    with live_server(settings) as server, connect(server) as client:
        assert client.get(f"{PATH}/{response['id']}").json() == response
        assert create(client, "thinking", previous_response_id=response["id"])["output_text"] == "Forty-two."
        assert client.delete(f"{PATH}/{response['id']}").status_code == 200


def test_the_memory_store_is_empty_after_a_restart() -> None:
    with live_server(config()) as server, connect(server) as client:
        response = create(client, "text")
    with live_server(config()) as server, connect(server) as client:
        expect_not_found(client.get(f"{PATH}/{response['id']}"), response["id"])


def test_an_unknown_previous_response_names_the_field(server: LiveServer) -> None:
    with connect(server) as client:
        reply = client.post(PATH, json={"model": "demo", "input": "text", "previous_response_id": "resp_nowhere"})
        expect_no_previous(reply, "resp_nowhere")


# --- references to items ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("text", ["thinking", "one tool"])
def test_a_reference_stands_for_an_item_of_a_stored_response(
    two_key_server: LiveServer, text: str, stream: bool
) -> None:
    """Reasoning, texts and calls: the prompt is the one that the items themselves give."""
    body: dict[str, Any] = {"model": "demo", "input": text, "tools": [WEATHER_TOOL], "stream": stream}
    with connect(two_key_server, "sk-ada") as ada:
        reply = ada.post(PATH, json=body)
        items = (parse_events(reply.text)[-1].data["response"] if stream else reply.json())["output"]
        outputs = [
            {"type": "function_call_output", "call_id": item["call_id"], "output": "sunny"}
            for item in items
            if item["type"] == "function_call"
        ]
        references = [{"type": "item_reference", "id": item["id"]} for item in items]
        prompts: list[int] = []
        for between in (items, references, references[:1] + items[1:]):
            given = [{"role": "user", "content": text}, *between, *outputs, {"role": "user", "content": "text"}]
            follow = {"model": "demo", "input": given, "tools": [WEATHER_TOOL]}
            prompts.append(create(ada, given, tools=[WEATHER_TOOL])["usage"]["input_tokens"])
            counted = ada.post(PATH + "/input_tokens", json=follow).json()
            assert counted["input_tokens"] == prompts[-1]
        assert len(set(prompts)) == 1
        assert prompts[0] > create(ada, "text", tools=[WEATHER_TOOL])["usage"]["input_tokens"]


@pytest.mark.parametrize("stripped", [{"summary": []}, {"summary": [], "content": [], "status": "in_progress"}])
def test_reasoning_that_a_client_returns_by_its_id_only_is_the_stored_one(
    two_key_server: LiveServer, stripped: dict[str, Any]
) -> None:
    """Clients written for OpenAI's service, which does not show the reasoning, keep nothing else of the item."""
    with connect(two_key_server, "sk-ada") as ada, connect(two_key_server, "sk-bob") as bob:
        thought, answer = create(ada, "thinking")["output"]
        shorter = {"type": "reasoning", "id": thought["id"]} | stripped

        def tokens(client: httpx.Client, item: dict[str, Any], **fields: Any) -> int:
            """The reasoning is in the prompt until the user speaks again."""
            given = [{"role": "user", "content": "thinking"}, item]
            used: int = create(client, given, **fields)["usage"]["input_tokens"]
            return used

        assert answer["type"] == "message"
        whole = tokens(ada, thought)
        assert tokens(ada, shorter) == whole
        assert tokens(bob, shorter) < whole
        conversation = ada.post("/v1/conversations", json={"items": [shorter]}).json()["id"]
        assert tokens(ada, shorter, conversation=conversation) > whole


def test_a_reference_to_an_item_that_is_not_stored_for_this_key_is_refused(two_key_server: LiveServer) -> None:
    with connect(two_key_server, "sk-ada") as ada, connect(two_key_server, "sk-bob") as bob:
        stored, unstored = create(ada, "text"), create(ada, "text", store=False)
        mine, other = stored["output"][0]["id"], unstored["output"][0]["id"]
        missing = mine.rpartition("_")[0] + "_7"
        for client, id in ((bob, mine), (ada, other), (ada, missing), (ada, "msg_1"), (ada, "rs_68af")):
            reply = client.post(PATH, json={"model": "demo", "input": [{"type": "item_reference", "id": id}]})
            error = reply.json()["error"]
            assert (reply.status_code, error["code"], error["param"]) == (400, "item_not_found", "input")
            assert id in error["message"]


# --- a store that fails -----------------------------------------------------------------------------------------------


async def fail(*_: Any) -> None:
    raise sqlite3.OperationalError("database or disk is full")


async def hang(*_: Any) -> None:
    await asyncio.Event().wait()


@pytest.fixture(params=[fail, hang])
def broken_store(request: pytest.FixtureRequest, server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> LiveServer:
    monkeypatch.setattr(MemoryStore, "put", request.param)
    monkeypatch.setattr(stored_responses, "_SAVE_S", 0.05)
    return server


def expect_not_stored(response: Any, log: pytest.LogCaptureFixture) -> None:
    assert (response["status"], response["output_text"]) == ("completed", "Hello there, friend.")
    assert (response["store"], response["store_error"]["code"]) == (False, "not_stored")
    (record,) = [record for record in log.records if record.message == "a response was not stored"]
    assert vars(record)["fields"]["response"] == response["id"]


def test_a_whole_reply_is_sent_though_it_cannot_be_stored(
    broken_store: LiveServer, caplog: pytest.LogCaptureFixture
) -> None:
    with connect(broken_store) as client:
        response = create(client, "text")
        expect_not_stored(response, caplog)
        expect_not_found(client.get(f"{PATH}/{response['id']}"), response["id"])


def test_a_stream_has_its_last_event_though_it_cannot_be_stored(
    broken_store: LiveServer, caplog: pytest.LogCaptureFixture
) -> None:
    with connect(broken_store) as client:
        events = parse_events(client.post(PATH, json={"model": "demo", "input": "text", "stream": True}).text)
    assert events[-1].event == "response.completed"
    expect_not_stored(events[-1].data["response"], caplog)


def test_a_reply_that_need_not_be_stored_reports_nothing(
    broken_store: LiveServer, caplog: pytest.LogCaptureFixture
) -> None:
    with connect(broken_store) as client:
        response = create(client, "text", store=False)
    assert response["store"] is False
    assert "store_error" not in response
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
