"""The client of the admin API and the protocols, against a real server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from modelyard.core.chat import Chat, Turn
from modelyard.core.errors import Conflict, InvalidRequest, NotFound, Unauthenticated
from modelyard.core.request import Text
from modelyard.http.errors import load_protocol
from modelyard.processes.ports import listen
from modelyard.workbench.api_client import ApiClient, ServerUnreachable
from modelyard.workbench.chat_request import PROTOCOLS, chat_request
from tests.live_server import LiveServer, demo_config, live_server

KEYS = [{"name": "owner", "key": "secret", "admin": True}, {"name": "other", "key": "another", "admin": True}]
SCRIPT: list[dict[str, Any]] = [
    {"when": "^endless", "steps": [{"text": "so far"}, {"hang": True}]},
    {"steps": [{"text": "Hello there."}]},
]
CHAT = load_protocol("openai_chat")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    store = {"chats": str(tmp_path_factory.mktemp("chats") / "chats.sqlite")}
    config = {**demo_config(SCRIPT, replica_max=2), "keys": KEYS, "log": {"history_texts": True}, "store": store}
    with live_server(config) as running:
        yield running


@pytest.fixture
async def client(served: LiveServer) -> AsyncIterator[ApiClient]:
    made = ApiClient(served.url, "secret")
    yield made
    await made.close()


def body(protocol: str = "openai_chat", text: str = "hi") -> bytes:
    return load_protocol(protocol).write_request(chat_request(chat(text), "demo"))


def chat(text: str = "hi") -> Chat:
    made = Chat()
    made.add(Turn(role="user", parts=(Text(text),)))
    return made


@pytest.mark.parametrize("name", PROTOCOLS)
async def test_an_answer_is_streamed_in_every_protocol(client: ApiClient, name: str) -> None:
    protocol = load_protocol(name)
    received = b"".join([data async for data in client.stream(protocol, body(name))])
    reader = protocol.reader()
    events = [*reader.feed(received), *reader.finish()]
    assert "".join(getattr(event, "text", "") for event in events) == "Hello there."


async def test_closing_the_stream_cancels_the_request(client: ApiClient) -> None:
    stream = client.stream(CHAT, body(text="endless"))
    assert await anext(stream)
    (live,) = (await client.get("requests", limit=10, since=0))["live"]
    assert live["state"] == "running"
    await stream.aclose()  # type: ignore[attr-defined]
    while (await client.get("requests", limit=10, since=0))["live"]:
        pass


async def test_requests_are_listed_since_a_time_and_read_by_id(client: ApiClient) -> None:
    async for _ in client.stream(CHAT, body()):
        pass
    (newest, *_) = (await client.get("requests", limit=1, since=0))["ended"]
    assert (await client.get("requests", limit=10, since=newest["at"] + 1))["ended"] == []
    prompt = (await client.get("requests", newest["id"]))["texts"]["prompt"]
    assert "hi" in prompt
    assert prompt.startswith(await client.prompt_prefix("demo", prompt, newest["usage"]["prompt"] // 2))


async def test_actions_on_models_succeed_or_raise_the_servers_error(client: ApiClient) -> None:
    assert (await client.post("models", "demo", "estimate", body={"token_delay": 1}))["fits"] is True
    await client.post("models", "demo", "replicas", body={"replicas": 2}, wait=False)
    with pytest.raises(Conflict, match="loaded with other settings"):
        await client.post("models", "demo", "load", body={"token_delay": 1}, wait=False)
    with pytest.raises(InvalidRequest, match="path cannot be set"):
        await client.post("models", "demo", "estimate", body={"path": "/etc/passwd"})
    with pytest.raises((Conflict, InvalidRequest)):
        await client.post("models", "demo", "replicas", body={"replicas": 3}, wait=False)
    with pytest.raises(NotFound):
        await client.post("models", "unknown", "estimate", body={})
    with pytest.raises(NotFound):
        await client.post("requests", "req_none", "cancel")


async def test_everything_that_the_pages_show_can_be_read(client: ApiClient) -> None:
    assert [record["id"] for record in await client.rows("models")] == ["demo"]
    assert {row["cache"] for row in await client.rows("caches")} == {"main", "fast"}
    assert (await client.get("gpu-memory"))["ram"]["total"] > 0
    assert (await client.get("route", model="claude-haiku", endpoint="/v1/messages"))["cache"] == "fast"
    assert (await client.get("history"))["texts"] is True
    await client.post("history", body={"texts": True})
    assert isinstance(await client.rows("tune"), list)


async def test_a_wrong_key_and_an_unreachable_server_are_different_errors(served: LiveServer) -> None:
    wrong = ApiClient(served.url, "wrong")
    with pytest.raises(Unauthenticated):
        await wrong.rows("models")
    await wrong.close()
    with listen("127.0.0.1", 0, shared=False) as closed:
        port = closed.getsockname()[1]
    unreachable = ApiClient(f"http://127.0.0.1:{port}")
    with pytest.raises(ServerUnreachable, match="no server answers"):
        await unreachable.rows("models")
    await unreachable.close()


async def test_a_refused_stream_raises_the_servers_error(client: ApiClient) -> None:
    stream = client.stream(load_protocol("anthropic_messages"), b"{")
    with pytest.raises(InvalidRequest, match="JSON"):
        await anext(stream)


async def test_a_chat_is_stored_found_by_its_text_and_deleted(client: ApiClient) -> None:
    stored = chat("What is 100% of \u00c4pfel_Kuchen?")
    stored.revision = await client.store_chat(stored)
    assert await client.chat(stored.id) == stored
    for text, hits in (("100%", 1), ("\u00e4pfel_", 1), ("100_", 0), ("", 1)):
        assert len([one for one in await client.chats(text) if one.id == stored.id]) == hits, text
    await client.delete_chat(stored.id)
    with pytest.raises(NotFound):
        await client.chat(stored.id)


async def test_a_chat_that_was_changed_in_another_tab_is_not_overwritten(client: ApiClient) -> None:
    stored = chat()
    await client.store_chat(stored)
    elsewhere = await client.chat(stored.id)
    elsewhere.title = "renamed"
    await client.store_chat(elsewhere)
    with pytest.raises(Conflict, match="changed elsewhere"):
        await client.store_chat(stored)
    assert (await client.chat(stored.id)).title == "renamed"


async def test_chats_belong_to_the_key_that_stored_them(served: LiveServer, client: ApiClient) -> None:
    stored = chat("private")
    await client.store_chat(stored)
    other = ApiClient(served.url, "another")
    assert await other.chats() == []
    with pytest.raises(NotFound):
        await other.chat(stored.id)
    await other.close()


async def test_the_tokens_of_a_message_are_counted_with_the_window(client: ApiClient) -> None:
    few, window = await client.count_tokens(chat_request(chat("hi"), "demo"))
    more, _ = await client.count_tokens(chat_request(chat("hi"), "demo", draft=(Text("and much more text"),)))
    assert 0 < few < more
    assert window == 4096
