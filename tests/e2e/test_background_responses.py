"""Background responses and conversations with OpenAI's SDK: without their client, read again, cancelled, after a
restart."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response

from modelyard.gateway import background_responses, records
from tests.e2e.helpers import config, wait_for_running, wait_until, wait_until_idle
from tests.live_server import LiveServer, live_server

KEYS = [{"name": "ada", "key": "sk-ada", "admin": True}, {"name": "bob", "key": "sk-bob"}]


def sdk(server: LiveServer, key: str = "sk-ada") -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key=key, max_retries=0)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    path = tmp_path_factory.mktemp("objects") / "objects.sqlite"
    with live_server(config(keys=KEYS, store={"objects": str(path)})) as running:
        yield running


@pytest.fixture
def client(server: LiveServer) -> openai.OpenAI:
    return sdk(server)


def finished(client: openai.OpenAI, id: str) -> Response:
    """As users poll."""
    deadline = time.monotonic() + 60
    while (response := client.responses.retrieve(id)).status in ("queued", "in_progress"):
        assert time.monotonic() < deadline
        time.sleep(0.03)
    return response


def text_of(response: Response) -> str:
    return response.output_text


def test_a_background_response_is_answered_at_once_and_fetched_later(client: openai.OpenAI) -> None:
    queued = client.responses.create(model="demo", input="text", background=True, metadata={"job": "7"})
    assert (queued.status, queued.background, queued.output) == ("queued", True, [])
    response = finished(client, queued.id)
    assert (response.status, text_of(response)) == ("completed", "Hello there, friend.")
    assert (response.id, response.background, response.metadata) == (queued.id, True, {"job": "7"})
    assert response.usage is not None
    items = client.responses.input_items.list(queued.id).data
    assert [item.content[0].text for item in items] == ["text"]  # type: ignore[union-attr]
    follow = client.responses.create(model="demo", input="thinking", previous_response_id=queued.id)
    assert text_of(follow) == "Forty-two."
    client.responses.delete(queued.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(queued.id)


def test_a_running_response_goes_on_without_its_client_and_is_cancelled_once(
    server: LiveServer, client: openai.OpenAI
) -> None:
    body = {"model": "demo", "input": "endless stream", "background": True, "stream": True}
    id = ""
    with httpx.stream(
        "POST", server.url + "/v1/responses", json=body, headers={"authorization": "Bearer sk-ada"}
    ) as reply:
        for line in reply.iter_lines():
            if "so far" in line:
                break
            if line.startswith("data: ") and not id:
                id = openai.types.responses.ResponseCreatedEvent.model_validate_json(line[6:]).response.id
    running = client.responses.retrieve(id)
    assert running.status == "in_progress"
    with pytest.raises(openai.ConflictError):
        client.responses.create(model="demo", input="text", previous_response_id=id)
    cancelled = client.responses.cancel(id)
    assert (cancelled.id, cancelled.status, cancelled.error) == (id, "cancelled", None)
    assert client.responses.cancel(id).status == client.responses.retrieve(id).status == "cancelled"
    wait_until_idle(server)


def test_a_queued_response_can_be_cancelled(tmp_path: Path) -> None:
    settings = config(
        caches={"main": {"model": "demo", "n_ctx": 4096, "parallel": 1}},
        routes=[{"match": "*", "cache": "main"}],
        store={"objects": str(tmp_path / "objects.sqlite")},
    )
    with live_server(settings) as server:
        client = sdk(server)
        first = client.responses.create(model="demo", input="endless stream", background=True)
        wait_for_running(server, 1)
        second = client.responses.create(model="demo", input="text", background=True)
        assert client.responses.retrieve(second.id).status == "queued"
        assert client.responses.cancel(second.id).status == "cancelled"
        client.responses.delete(first.id)
        wait_until_idle(server)


def test_events_are_read_again_from_a_number_on_and_then_as_they_come(client: openai.OpenAI) -> None:
    stream = client.responses.create(model="demo", input="text", background=True, stream=True)
    first = list(stream)
    assert [event.type for event in first[:3]] == ["response.created", "response.queued", "response.in_progress"]
    assert [event.sequence_number for event in first] == list(range(len(first)))
    assert first[-1].type == "response.completed"
    id = first[-1].response.id
    again = list(client.responses.retrieve(id, stream=True))
    assert [event.to_dict() for event in again] == [event.to_dict() for event in first]
    rest = list(client.responses.retrieve(id, stream=True, starting_after=4))
    assert [event.to_dict() for event in rest] == [event.to_dict() for event in first[5:]]
    assert list(client.responses.retrieve(id, stream=True, starting_after=first[-1].sequence_number)) == []
    running = client.responses.create(model="demo", input="slow prefill", background=True)
    live = list(client.responses.retrieve(running.id, stream=True, starting_after=1))
    assert [live[0].sequence_number, live[-1].type] == [2, "response.completed"]


def test_a_failed_background_response_is_kept_with_its_reason(client: openai.OpenAI) -> None:
    response = finished(client, client.responses.create(model="demo", input="error during", background=True).id)
    assert (response.status, response.error and response.error.code) == ("failed", "server_error")
    assert "out of memory" in (response.error.message if response.error else "")
    last = list(client.responses.retrieve(response.id, stream=True))[-1]
    assert last.type == "response.failed"


def test_another_key_sees_no_response(server: LiveServer, client: openai.OpenAI) -> None:
    id, bob = client.responses.create(model="demo", input="text", background=True).id, sdk(server, "sk-bob")
    for call in (bob.responses.retrieve, bob.responses.cancel, bob.responses.delete, bob.responses.input_items.list):
        with pytest.raises(openai.NotFoundError):
            call(id)
    with pytest.raises(openai.NotFoundError):
        bob.responses.retrieve(id, stream=True)
    finished(client, id)


def test_what_is_not_in_the_background_is_neither_cancelled_nor_read_again(client: openai.OpenAI) -> None:
    id = client.responses.create(model="demo", input="text").id
    for call in (client.responses.cancel, lambda id: client.responses.retrieve(id, stream=True)):
        with pytest.raises(openai.BadRequestError, match="background"):
            call(id)
    with pytest.raises(openai.BadRequestError, match="store"):
        client.responses.create(model="demo", input="text", background=True, store=False)
    with pytest.raises(openai.BadRequestError, match="starting_after"):
        client.responses.retrieve(id, stream=True, extra_query={"starting_after": "x"})


def test_a_store_that_cannot_be_written_refuses_and_frees_the_slot(tmp_path: Path) -> None:
    with live_server(config(store={"objects": str(tmp_path)})) as server:  # a folder
        client = sdk(server)
        with pytest.raises(openai.InternalServerError) as error:
            client.responses.create(model="demo", input="endless stream", background=True)
        assert error.value.code == "store_unusable"
        assert str(tmp_path) not in str(error.value)
        wait_until_idle(server)
        assert text_of(client.responses.create(model="demo", input="text")) == "Hello there, friend."


def test_a_result_that_cannot_be_stored_is_served_and_stored_later(
    server: LiveServer, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background_responses, "_SAVE_AGAIN_S", (0.01,))
    background: Any = server.app.gateway.stored.background  # type: ignore[union-attr]
    store, failures = background._records.store, [0]
    real_swap = store.swap

    async def swap(scope: str, *args: Any) -> bool:
        if scope.startswith("background/") and failures[0] < 20:
            failures[0] += 1
            raise background_responses.Unavailable("database or disk is full")
        return await real_swap(scope, *args)

    monkeypatch.setattr(store, "swap", swap)
    response = finished(client, client.responses.create(model="demo", input="text", background=True).id)
    assert text_of(response) == "Hello there, friend."
    wait_until(lambda: not background._running, "it is stored")
    assert text_of(client.responses.retrieve(response.id)) == "Hello there, friend."


def test_after_a_restart_a_running_response_has_failed_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "OWNER_TTL_S", 0.5)
    monkeypatch.setattr(records, "_RENEW_S", 0.1)
    settings = config(store={"objects": str(tmp_path / "objects.sqlite")})
    with live_server(settings) as server:
        client = sdk(server)
        stopped = client.responses.create(model="demo", input="endless stream", background=True).id
        done = client.responses.create(model="demo", input="text", background=True).id
        finished(client, done)
    with live_server(settings) as server:
        client = sdk(server)
        assert text_of(client.responses.retrieve(done)) == "Hello there, friend."
        assert list(client.responses.retrieve(done, stream=True))[-1].type == "response.completed"
        response = finished(client, stopped)
        assert (response.status, response.error and response.error.code) == ("failed", "server_error")
        assert "stopped" in (response.error.message if response.error else "")


def test_a_response_whose_process_was_killed_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "OWNER_TTL_S", 0.01)
    monkeypatch.setattr(records, "_RENEW_S", 60.0)
    settings = config(store={"objects": str(tmp_path / "objects.sqlite")})
    with live_server(settings) as first, live_server(settings) as second:
        id = sdk(first).responses.create(model="demo", input="endless stream", background=True).id
        wait_until(lambda: sdk(second).responses.retrieve(id).status == "failed", "its owner gives no sign of life")
        events = list(sdk(second).responses.retrieve(id, stream=True))
        assert events[-1].type == "response.failed"
        assert "stopped" in str(events[-1].response.error)
        sdk(first).responses.delete(id)


def test_another_gateway_process_reads_and_cancels_a_response(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "_RENEW_S", 0.05)
    monkeypatch.setattr(background_responses, "_FLUSH_S", 0.05)
    monkeypatch.setattr(background_responses, "_POLL_S", 0.02)
    settings = config(store={"objects": str(tmp_path / "objects.sqlite")})
    with live_server(settings) as first, live_server(settings) as second:
        id = sdk(first).responses.create(model="demo", input="endless stream", background=True).id
        seen = []
        for event in sdk(second).responses.retrieve(id, stream=True):
            seen.append(event)
            if event.type == "response.output_text.delta":
                assert sdk(second).responses.cancel(id).status == "cancelled"
        assert [event.sequence_number for event in seen] == list(range(len(seen)))
        assert seen[-1].type == "response.incomplete"
        assert seen[-1].response.status == "cancelled"
        wait_until_idle(first)


def test_a_client_that_leaves_a_stream_ends_nothing(server: LiveServer, client: openai.OpenAI) -> None:
    body = {"model": "demo", "input": "slow prefill", "background": True, "stream": True}
    with httpx.Client(headers={"authorization": "Bearer sk-ada"}) as http:
        with http.stream("POST", server.url + "/v1/responses", json=body) as reply:
            head = next(reply.iter_text())
        id = head.partition('"id":"')[2].partition('"')[0]
    assert text_of(finished(client, id)) == "done"


def test_background_work_is_among_the_live_requests(server: LiveServer, client: openai.OpenAI) -> None:
    id = client.responses.create(model="demo", input="endless stream", background=True).id
    wait_for_running(server, 1)
    found = httpx.get(server.url + "/v1/admin/requests", headers={"authorization": "Bearer sk-ada"}).json()
    assert id.removeprefix("resp_") in [request["trace"] for request in found["live"]]
    client.responses.cancel(id)
    wait_until_idle(server)
