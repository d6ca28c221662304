"""The admin API and the protocols as the page sees them, over a real server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from modelyard.core.errors import Conflict, InvalidRequest, NotFound, Unauthenticated
from modelyard.processes.ports import listen
from modelyard.workbench.client import Client, Lost
from modelyard.workbench.talk import WIRES, Talk, wire
from tests.serving import Served, demo, serving

KEYS = [{"name": "owner", "key": "secret", "admin": True}]
SCRIPT = [
    {"when": "^endless", "steps": [{"text": "so far"}, {"hang": True}]},
    {"steps": [{"text": "Hello there."}]},
]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving({**demo(SCRIPT, replica_max=2), "keys": KEYS, "log": {"history_texts": True}}) as running:
        yield running


@pytest.fixture
async def client(served: Served) -> AsyncIterator[Client]:
    made = Client(served.url, "secret")
    yield made
    await made.close()


def body(name: str, text: str = "hi") -> bytes:
    talk = Talk()
    talk.knobs.model = "demo"
    talk.say(text)
    return wire(name).write_request(talk.request())


@pytest.mark.parametrize("name", WIRES)
async def test_an_answer_is_streamed_in_every_protocol(client: Client, name: str) -> None:
    came = b"".join([data async for data in client.stream(wire(name), body(name))])
    reader = wire(name).reader()
    events = [*reader.feed(came), *reader.finish()]
    assert "".join(getattr(event, "text", "") for event in events) == "Hello there."


async def test_hanging_up_ends_the_work(client: Client, served: Served) -> None:
    stream = client.stream(wire("openai_chat"), body("openai_chat", "endless"))
    assert await anext(stream)
    (live,) = (await client.requests(10, 0))["live"]
    assert live["state"] == "running"
    await stream.aclose()  # type: ignore[attr-defined]
    while (await client.requests(10, 0))["live"]:
        pass


async def test_requests_are_read_from_a_moment_on_and_one_by_its_id(client: Client) -> None:
    async for _ in client.stream(wire("openai_chat"), body("openai_chat")):
        pass
    (newest, *_) = (await client.requests(1, 0))["ended"]
    assert (await client.requests(10, newest["at"] + 1))["ended"] == []
    found = await client.request(newest["id"])
    assert "hi" in found["texts"]["prompt"]
    tokens = newest["usage"]["prompt"]
    assert found["texts"]["prompt"].startswith(await client.covered("demo", found["texts"]["prompt"], tokens // 2))


async def test_orders_are_given_and_their_refusals_told(client: Client) -> None:
    assert (await client.estimate("demo", {"token_delay": 1}))["fits"] is True
    await client.scale("demo", 2)
    with pytest.raises(Conflict, match="loaded with other settings"):
        await client.load("demo", {"token_delay": 1})
    with pytest.raises(InvalidRequest, match="path cannot be set"):
        await client.estimate("demo", {"path": "/etc/passwd"})
    with pytest.raises((Conflict, InvalidRequest)):
        await client.scale("demo", 3)
    with pytest.raises(NotFound):
        await client.estimate("nobody", {})
    with pytest.raises(NotFound):
        await client.cancel("req_none")


async def test_everything_that_the_pages_read_is_there(client: Client) -> None:
    assert [record["id"] for record in await client.models()] == ["demo"]
    assert {row["cache"] for row in await client.caches()} == {"main", "fast"}
    assert (await client.memory())["ram"]["total"] > 0
    assert (await client.route("claude-haiku", "/v1/messages"))["cache"] == "fast"
    assert (await client.history())["texts"] is True
    await client.keep_texts(True)
    assert isinstance(await client.tune(), list)


async def test_a_wrong_key_is_told_apart_from_a_server_that_is_not_there(served: Served) -> None:
    wrong = Client(served.url, "wrong")
    with pytest.raises(Unauthenticated):
        await wrong.models()
    await wrong.close()
    with listen("127.0.0.1", 0, shared=False) as held:  # nobody accepts here
        port = held.getsockname()[1]
    nobody = Client(f"http://127.0.0.1:{port}")
    with pytest.raises(Lost, match="no server answers"):
        await nobody.models()
    await nobody.close()


async def test_a_refused_question_raises_what_the_server_says(client: Client) -> None:
    stream = client.stream(wire("anthropic_messages"), b"{")
    with pytest.raises(InvalidRequest, match="JSON"):
        await anext(stream)
