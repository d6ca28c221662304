"""`/v1/conversations` and paging of input items, with OpenAI's SDK."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.helpers import config, wait_until
from tests.live_server import LiveServer, live_server

KEYS = [{"name": "ada", "key": "sk-ada"}, {"name": "bob", "key": "sk-bob"}]
SCRIPT = [
    {"when": "weather", "steps": [{"call": {"name": "get_weather", "arguments": {"city": "Rome"}}}]},
    {"when": "think", "steps": [{"think": "Let me see."}, {"text": "Forty-two."}]},
    {"steps": [{"text": "Hello there."}]},
]
TOOL: Any = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": None,
}


def sdk(server: LiveServer, key: str = "sk-ada") -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key=key, max_retries=0)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    path = tmp_path_factory.mktemp("objects") / "objects.sqlite"
    settings = config(keys=KEYS, store={"objects": str(path)})
    settings["models"]["demo"]["script"] = SCRIPT
    with live_server(settings) as running:
        yield running


@pytest.fixture
def client(server: LiveServer) -> openai.OpenAI:
    return sdk(server)


def user(text: str) -> Any:
    return {"type": "message", "role": "user", "content": text}


def texts(client: openai.OpenAI, id: str, **query: Any) -> list[str]:
    return [item.content[0].text for item in client.conversations.items.list(id, **query)]  # type: ignore[union-attr]


def test_a_conversation_is_created_read_changed_and_deleted(client: openai.OpenAI) -> None:
    made = client.conversations.create(metadata={"topic": "demo"}, items=[user("Hi"), user("Ho")])
    assert (made.object, made.metadata, made.id[:5]) == ("conversation", {"topic": "demo"}, "conv_")
    assert client.conversations.retrieve(made.id) == made
    changed = client.conversations.update(made.id, metadata={"topic": "other"})
    assert (changed.metadata, changed.created_at) == ({"topic": "other"}, made.created_at)
    assert texts(client, made.id, order="asc") == ["Hi", "Ho"]
    deleted = client.conversations.delete(made.id)
    assert (deleted.id, deleted.deleted, deleted.object) == (made.id, True, "conversation.deleted")
    with pytest.raises(openai.NotFoundError):
        client.conversations.retrieve(made.id)
    with pytest.raises(openai.NotFoundError):
        client.conversations.items.list(made.id)


def test_items_are_added_listed_by_pages_read_and_deleted(client: openai.OpenAI) -> None:
    id = client.conversations.create().id
    for start in (0, 20, 40):
        added = client.conversations.items.create(id, items=[user(f"{n}") for n in range(start, start + 20)])
        assert (len(added.data), added.has_more) == (20, False)
        assert (added.first_id, added.last_id) == (added.data[0].id, added.data[-1].id)
    assert texts(client, id, order="asc") == [f"{n}" for n in range(60)]  # the SDK asks for page after page
    assert texts(client, id, limit=7) == [f"{n}" for n in reversed(range(60))]
    first = client.conversations.items.list(id, limit=7).data
    assert len(first) == 7
    item = client.conversations.items.retrieve(first[2].id or "", conversation_id=id)
    assert (item.id, item.type, item.status) == (first[2].id, "message", "completed")  # type: ignore[union-attr]
    assert client.conversations.items.delete(item.id or "", conversation_id=id).id == id
    assert texts(client, id, limit=100)[:3] == ["59", "58", "56"]
    with pytest.raises(openai.NotFoundError):
        client.conversations.items.retrieve(item.id or "", conversation_id=id)


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_continues_its_conversation_and_adds_to_it(client: openai.OpenAI, stream: bool) -> None:
    id = client.conversations.create(items=[user("Hi"), {"role": "assistant", "content": "Hello."}]).id
    alone = client.responses.create(model="demo", input="think").usage
    made: Any = client.responses.create(
        model="demo", input="think", conversation=id, instructions="Be brief.", stream=stream, store=False
    )
    if stream:
        made = next(event for event in made if event.type == "response.completed").response
    assert (made.conversation.id, made.previous_response_id) == (id, None)
    assert alone is not None
    assert made.usage.input_tokens > alone.input_tokens + 5
    items = client.conversations.items.list(id, order="asc").data
    assert [item.type for item in items] == ["message", "message", "message", "reasoning", "message"]
    assert [getattr(item, "role", "") for item in items] == ["user", "assistant", "user", "", "assistant"]
    again = client.responses.create(model="demo", input=[], conversation={"id": id})
    assert again.output_text == "Forty-two."
    assert len(client.conversations.items.list(id, limit=100).data) == 7


def test_tool_calls_and_their_results_stay_in_a_conversation(client: openai.OpenAI) -> None:
    id = client.conversations.create().id
    asked = client.responses.create(model="demo", input="weather?", conversation=id, tools=[TOOL])
    call = asked.output[-1]
    assert call.type == "function_call"
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    client.responses.create(model="demo", input=[result], conversation=id)
    items = client.conversations.items.list(id, order="asc").data
    assert [item.type for item in items] == ["message", "function_call", "function_call_output", "message"]
    assert items[1].id == call.id
    assert (items[2].call_id, items[2].output) == (call.call_id, "sunny")  # type: ignore[union-attr]


def test_a_background_response_adds_to_its_conversation(client: openai.OpenAI) -> None:
    id = client.conversations.create().id
    events = list(client.responses.create(model="demo", input="Hi", conversation=id, background=True, stream=True))
    assert events[-1].type == "response.completed"
    assert texts(client, id, order="asc") == ["Hi", "Hello there."]


def test_another_key_sees_no_conversation(server: LiveServer, client: openai.OpenAI) -> None:
    id, bob = client.conversations.create(items=[user("secret")]).id, sdk(server, "sk-bob")
    item = client.conversations.items.list(id).data[0].id or ""
    for call in (
        lambda: bob.conversations.retrieve(id),
        lambda: bob.conversations.update(id, metadata={}),
        lambda: bob.conversations.delete(id),
        lambda: bob.conversations.items.list(id),
        lambda: bob.conversations.items.create(id, items=[user("x")]),
        lambda: bob.conversations.items.retrieve(item, conversation_id=id),
        lambda: bob.conversations.items.delete(item, conversation_id=id),
        lambda: bob.responses.create(model="demo", input="Hi", conversation=id),
    ):
        with pytest.raises(openai.NotFoundError) as error:
            call()
        assert error.value.code == "conversation_not_found"
    assert texts(client, id) == ["secret"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"items": [{"role": "wizard", "content": "x"}]}, "items[0].role"),
        ({"items": [{"type": "function_call_output", "output": "x"}]}, "items[0].call_id"),
        ({"items": [{"type": "item_reference", "id": "x"}]}, "items[0].type"),
        ({"metadata": {"a": 7}}, "metadata"),
        ({"metadata": {str(n): "x" for n in range(17)}}, "metadata"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
        ({"items": 7}, "items"),
    ],
)
def test_a_bad_conversation_is_refused_with_the_field(client: openai.OpenAI, fields: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.conversations.create(extra_body=fields)
    assert (error.value.param or "").startswith(param)


def test_input_items_are_listed_by_pages_in_both_orders(client: openai.OpenAI) -> None:
    texts = [f"{n}" for n in range(50)]
    id = client.responses.create(model="demo", input=[user(text) for text in texts]).id

    def found(**query: Any) -> list[str]:
        return [item.content[0].text for item in client.responses.input_items.list(id, **query)]  # type: ignore[union-attr]

    assert found(limit=7) == found() == texts[::-1]
    assert found(limit=7, order="asc") == texts
    page = client.responses.input_items.list(id, limit=7, order="asc")
    assert (len(page.data), page.has_more) == (7, True)
    for query, param in (
        ({"limit": 0}, "limit"),
        ({"limit": 101}, "limit"),
        ({"order": "up"}, "order"),
        ({"after": "x"}, "after"),
    ):
        with pytest.raises(openai.BadRequestError) as error:
            client.responses.input_items.list(id, extra_query=query)
        assert error.value.param == param


def test_encrypted_reasoning_is_listed_only_on_request(client: openai.OpenAI) -> None:
    first = client.responses.create(model="demo", input="think", include=["reasoning.encrypted_content"])
    id = client.responses.create(model="demo", input="And?", previous_response_id=first.id).id

    def reasoning(**query: Any) -> Any:
        (item,) = [i for i in client.responses.input_items.list(id, **query) if i.type == "reasoning"]
        return item.encrypted_content

    conversation = client.conversations.create().id
    client.responses.create(
        model="demo", input="think", conversation=conversation, include=["reasoning.encrypted_content"]
    )
    for include, shown in (([], False), (["reasoning.encrypted_content"], True)):
        items: Any = client.conversations.items.list(conversation, include=include)  # type: ignore[arg-type]
        assert [bool(item.encrypted_content) for item in items if item.type == "reasoning"] == [shown]
    assert reasoning() is None


def test_conversations_survive_a_restart_and_expire(tmp_path: Path) -> None:
    store = {"objects": str(tmp_path / "objects.sqlite")}
    with live_server(config(store=store)) as server:
        id = sdk(server).conversations.create(items=[user("Hi")]).id
    with live_server(config(store=store)) as server:
        client = sdk(server)
        assert texts(client, id) == ["Hi"]
        assert client.responses.create(model="demo", input="text", conversation=id).status == "completed"
    with live_server(config(store=store | {"object_ttl_s": 0.2})) as server:
        client = sdk(server)
        client.conversations.items.create(id, items=[user("Ho")])
        wait_until(lambda: is_gone(client, id), "it expires")
        with pytest.raises(openai.NotFoundError):
            client.conversations.items.list(id)


def is_gone(client: openai.OpenAI, id: str) -> bool:
    try:
        client.conversations.retrieve(id)
    except openai.NotFoundError:
        return True
    return False


def test_a_full_store_refuses_and_says_so(tmp_path: Path) -> None:
    store = {"objects": str(tmp_path / "objects.sqlite"), "max_objects": 3}
    with live_server(config(store=store)) as server:
        client = sdk(server)
        id = client.conversations.create(items=[user("1"), user("2")]).id
        with pytest.raises(openai.InternalServerError) as error:
            client.conversations.items.create(id, items=[user("3")])
        assert (error.value.status_code, error.value.code) == (503, "store_full")
        response = client.responses.create(model="demo", input="text", conversation=id)
        assert response.output_text == "Hello there, friend."
        assert response.store is False  # type: ignore[attr-defined]
        client.conversations.delete(id)
        assert client.conversations.create(items=[user("1"), user("2")]).id
