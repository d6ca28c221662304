"""Stored responses: whose they are, how many are kept, and what outlives a restart."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.helpers import SCRIPT, config
from tests.e2e.protocols import parse_events
from tests.live_server import LiveServer, demo_config, live_server

PATH = "/v1/responses"


def client(served: LiveServer, key: str = "none") -> httpx.Client:
    return httpx.Client(base_url=served.url, headers={"authorization": f"Bearer {key}"})


def ask(client: httpx.Client, text: str, **more: Any) -> Any:
    reply = client.post(PATH, json={"model": "demo", "input": text, **more})
    assert reply.status_code == 200, reply.text
    return reply.json()


def refused(reply: httpx.Response, id: str) -> None:
    error = reply.json()["error"]
    assert (reply.status_code, error["type"], error["code"]) == (404, "not_found_error", "response_not_found")
    assert id in error["message"]


@pytest.fixture(scope="module")
def shared() -> Iterator[LiveServer]:
    with live_server(config(keys=[{"name": "ada", "key": "sk-ada"}, {"name": "bob", "key": "sk-bob"}])) as running:
        yield running


def test_a_key_reads_its_own_responses_and_nobody_elses(shared: LiveServer) -> None:
    with client(shared, "sk-ada") as ada, client(shared, "sk-bob") as bob:
        made = ask(ada, "text")
        assert ada.get(f"{PATH}/{made['id']}").json() == made
        refused(bob.get(f"{PATH}/{made['id']}"), made["id"])
        refused(bob.get(f"{PATH}/{made['id']}/input_items"), made["id"])


def test_a_key_cannot_continue_or_count_what_is_not_its_own(shared: LiveServer) -> None:
    with client(shared, "sk-ada") as ada, client(shared, "sk-bob") as bob:
        made = ask(ada, "text")
        body = {"model": "demo", "input": "thinking", "previous_response_id": made["id"]}
        for stream in (False, True):
            refused(bob.post(PATH, json=body | {"stream": stream}), made["id"])
        refused(bob.post(PATH + "/input_tokens", json=body), made["id"])
        assert ada.post(PATH, json=body).status_code == 200


def test_a_key_cannot_delete_what_is_not_its_own(shared: LiveServer) -> None:
    with client(shared, "sk-ada") as ada, client(shared, "sk-bob") as bob:
        made = ask(ada, "text")
        refused(bob.delete(f"{PATH}/{made['id']}"), made["id"])
        deleted = ada.delete(f"{PATH}/{made['id']}").json()
        assert deleted == {"id": made["id"], "object": "response", "deleted": True}
        refused(ada.get(f"{PATH}/{made['id']}"), made["id"])
        refused(ada.delete(f"{PATH}/{made['id']}"), made["id"])


def test_what_the_client_does_not_want_stored_is_not(shared: LiveServer) -> None:
    with client(shared, "sk-ada") as ada:
        for stream in (False, True):
            reply = ada.post(PATH, json={"model": "demo", "input": "text", "store": False, "stream": stream})
            made = parse_events(reply.text)[-1].data["response"] if stream else reply.json()
            assert made["store"] is False
            refused(ada.get(f"{PATH}/{made['id']}"), made["id"])


def test_a_streamed_response_is_there_as_soon_as_its_last_event(shared: LiveServer) -> None:
    with client(shared, "sk-ada") as ada:
        for _ in range(20):
            reply = ada.post(PATH, json={"model": "demo", "input": "text", "stream": True})
            made = parse_events(reply.text)[-1].data["response"]
            follow = {"model": "demo", "input": "thinking", "previous_response_id": made["id"]}
            assert ada.post(PATH, json=follow).json()["output_text"] == "Forty-two."
            assert ada.get(f"{PATH}/{made['id']}").json() == made


def test_a_failed_response_is_not_stored(shared: LiveServer) -> None:
    with client(shared, "sk-ada") as ada:
        reply = ada.post(PATH, json={"model": "demo", "input": "error during", "stream": True})
        failed = parse_events(reply.text)[-1].data["response"]
        refused(ada.get(f"{PATH}/{failed['id']}"), failed["id"])


def test_a_chain_carries_the_whole_conversation_but_not_the_instructions() -> None:
    with live_server(demo_config(SCRIPT)) as served, client(served) as sdk:
        first = ask(sdk, "text one", instructions="Be brief.")
        second = ask(sdk, "text two", previous_response_id=first["id"], instructions="Be long.")
        third = ask(sdk, "text three", previous_response_id=second["id"])
        told = [items(sdk, made["id"]) for made in (first, second, third)]
        assert told[0] == ["text one"]
        assert told[2] == ["text one", "Hello there, friend.", "text two", "Hello there, friend.", "text three"]
        assert third["instructions"] is None
        counted = sdk.post("/v1/responses/input_tokens", json={"model": "demo", "input": "text three"}).json()
        assert third["usage"]["input_tokens"] > counted["input_tokens"]


def items(client: httpx.Client, id: str) -> list[str]:
    """The texts that a response was given, oldest first."""
    found = client.get(f"{PATH}/{id}/input_items").json()["data"]
    return [part["text"] for item in reversed(found) for part in item["content"]]


def test_the_store_is_bounded_and_the_oldest_leave_first() -> None:
    with live_server(config(store={"max_entries": 2})) as served, client(served) as sdk:
        first, second, third = [ask(sdk, "text")["id"] for _ in range(3)]
        refused(sdk.get(f"{PATH}/{first}"), first)
        assert [sdk.get(f"{PATH}/{id}").status_code for id in (second, third)] == [200, 200]


def test_a_file_keeps_them_over_a_restart(tmp_path: Path) -> None:
    settings = config(store={"backend": "sqlite", "path": str(tmp_path / "store.sqlite")})
    with live_server(settings) as served, client(served) as sdk:
        made = ask(sdk, "text")
    with live_server(settings) as served, client(served) as sdk:
        assert sdk.get(f"{PATH}/{made['id']}").json() == made
        assert ask(sdk, "thinking", previous_response_id=made["id"])["output_text"] == "Forty-two."
        assert sdk.delete(f"{PATH}/{made['id']}").status_code == 200


def test_memory_forgets_them_at_a_restart() -> None:
    with live_server(config()) as served, client(served) as sdk:
        made = ask(sdk, "text")
    with live_server(config()) as served, client(served) as sdk:
        refused(sdk.get(f"{PATH}/{made['id']}"), made["id"])


def test_an_unknown_response_to_continue_from_names_the_field(served: LiveServer) -> None:
    with client(served) as sdk:
        reply = sdk.post(PATH, json={"model": "demo", "input": "text", "previous_response_id": "resp_nowhere"})
        refused(reply, "resp_nowhere")
        assert reply.json()["error"]["param"] == "previous_response_id"
