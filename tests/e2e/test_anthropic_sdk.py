"""The Anthropic SDK, sync and async, against a live server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic, AsyncAnthropic
from anthropic.types import MessageParam, ToolParam
from pydantic import BaseModel

from tests.e2e.helpers import config, raw_request, single_slot_config, wait_until_idle
from tests.e2e.protocols import CHAT, TOOLS
from tests.live_server import LiveServer, live_server

MODEL = "demo"
TEXT = "Hello there, friend."
TOOL_PARAMS: list[ToolParam] = [{"name": name, "input_schema": schema} for name, schema in TOOLS.items()]


class City(BaseModel):
    name: str
    people: int


def user(text: str) -> list[MessageParam]:
    return [{"role": "user", "content": text}]


def params(text: str, **more: Any) -> Any:
    return {"model": MODEL, "max_tokens": 200, "messages": user(text), **more}


@pytest.fixture(scope="module")
def sdk(server: LiveServer) -> Iterator[Anthropic]:
    with Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def async_sdk(server: LiveServer) -> AsyncIterator[AsyncAnthropic]:
    async with AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def test_create_message(sdk: Anthropic) -> None:
    reply = sdk.messages.create(**params("text"))
    (block,) = reply.content
    assert block.type == "text"
    assert (block.text, reply.stop_reason, reply.role, reply.model) == (TEXT, "end_turn", "assistant", MODEL)
    assert reply._request_id == "req_" + reply.id.removeprefix("msg_")


def test_what_has_no_effect_is_named_in_a_header(sdk: Anthropic) -> None:
    upload = {"type": "container_upload", "file_id": "file_1"}
    content = [{"type": "text", "text": "text"}, upload]
    search: Any = {"type": "web_search_20250305", "name": "web_search"}
    given = params("", messages=[{"role": "user", "content": content}], service_tier="auto", tools=[search])
    header = "service_tier, content.container_upload, tools.web_search_20250305"
    assert sdk.messages.with_raw_response.create(**given).headers["x-modelyard-ignored"] == header
    with sdk.messages.with_streaming_response.create(**given, stream=True) as streamed:
        assert streamed.headers["x-modelyard-ignored"] == header
    assert "x-modelyard-ignored" not in sdk.messages.with_raw_response.create(**params("text")).headers


def test_create_message_with_thinking(sdk: Anthropic) -> None:
    thinking, text = sdk.messages.create(**params("thinking", thinking={"type": "adaptive"})).content
    assert thinking.type == "thinking"
    assert (thinking.thinking, text.to_dict()["text"]) == ("Let me see.", "Forty-two.")
    assert thinking.signature


def test_a_tool_is_called_and_its_result_used(sdk: Anthropic) -> None:
    messages = user("one tool")
    first = sdk.messages.create(**params("one tool", tools=TOOL_PARAMS))
    assert first.stop_reason == "tool_use"
    call = first.content[-1]
    assert call.type == "tool_use"
    assert call.input == {"city": "Rome"}
    messages.append({"role": "assistant", "content": first.content})
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    messages.append({"role": "user", "content": [result]})
    second = sdk.messages.create(model=MODEL, max_tokens=200, messages=messages, tools=TOOL_PARAMS)
    assert second.content[0].to_dict()["text"] == "Take a hat: it is sunny."


def test_echoed_thinking_blocks_are_accepted(sdk: Anthropic) -> None:
    """A client echoes the blocks unchanged; the next turn must accept them."""
    messages = user("thinking")
    messages.append({"role": "assistant", "content": sdk.messages.create(**params("thinking")).content})
    messages += user("text")
    reply = sdk.messages.create(model=MODEL, max_tokens=200, messages=messages)
    assert reply.content[0].to_dict()["text"] == TEXT


def test_create_streamed_message(sdk: Anthropic) -> None:
    events = list(sdk.messages.create(**params("text", stream=True)))
    assert (events[0].type, events[-1].type) == ("message_start", "message_stop")


def test_stream_helper_text(sdk: Anthropic) -> None:
    with sdk.messages.stream(**params("text")) as stream:
        assert "".join(stream.text_stream) == TEXT
        final = stream.get_final_message()
    assert final.stop_reason == "end_turn"
    assert final.usage.output_tokens > 0
    assert stream.get_final_text() == TEXT


def test_stream_helper_thinking(sdk: Anthropic) -> None:
    with sdk.messages.stream(**params("thinking")) as stream:
        events = list(stream)
        thinking, text = stream.get_final_message().content
    assert "".join(event.thinking for event in events if event.type == "thinking") == "Let me see."
    assert [event.signature for event in events if event.type == "signature"] == [thinking.to_dict()["signature"]]
    assert text.to_dict()["text"] == "Forty-two."


def test_stream_helper_tool_input(sdk: Anthropic) -> None:
    with sdk.messages.stream(**params("parallel tools", tools=TOOL_PARAMS)) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    assert "".join(pieces) == '{"city": "Rome"}{"zone": "CET"}'
    calls = [(block.name, block.input) for block in final.content if block.type == "tool_use"]
    assert calls == [("get_weather", {"city": "Rome"}), ("get_time", {"zone": "CET"})]
    assert final.stop_reason == "tool_use"


def test_stop_sequence_is_reported(sdk: Anthropic) -> None:
    reply = sdk.messages.create(**params("stop string", stop_sequences=["STOP"]))
    assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", "STOP")


def test_parse_message(sdk: Anthropic) -> None:
    assert isinstance(sdk.messages.parse(**params("Rome", output_format=City)).parsed_output, City)


def test_counted_tokens_equal_the_usage(sdk: Anthropic) -> None:
    counted = sdk.messages.count_tokens(model=MODEL, messages=user("text"), tools=TOOL_PARAMS, system="Be kind.")
    usage = sdk.messages.create(**params("text", tools=TOOL_PARAMS, system="Be kind.")).usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_models_are_listed_in_pages_and_retrieved() -> None:
    settings = config()
    settings["models"]["demo"]["aliases"] = ["team/demo"]
    with live_server(settings) as server, Anthropic(base_url=server.url, api_key="none", max_retries=0) as sdk:
        page = sdk.models.list(limit=1)
        assert (len(page.data), page.has_more) == (1, True)
        assert {model.id for model in page} == {"demo", "team/demo"}
        found = sdk.models.retrieve("team/demo")
        assert (found.id, found.type, found.to_dict()["max_input_tokens"]) == ("team/demo", "model", 4096)


# --- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_an_overflow_is_a_bad_request_with_exact_numbers(sdk: Anthropic, stream: bool) -> None:
    text = "word " * 5000
    counted = sdk.messages.count_tokens(model=MODEL, messages=user(text)).input_tokens
    with pytest.raises(anthropic.BadRequestError) as caught:
        sdk.messages.create(**params(text, stream=stream))
    body: Any = caught.value.body
    assert body["error"]["message"] == f"prompt is too long: {counted} tokens > 4096 maximum"
    assert caught.value.request_id == body["request_id"]


def test_a_failure_during_a_stream_is_raised(sdk: Anthropic) -> None:
    with sdk.messages.stream(**params("error during")) as stream, pytest.raises(anthropic.APIStatusError) as caught:
        list(stream)
    assert "out of memory" in str(caught.value)


def test_an_unknown_model_is_a_404_that_lists_the_known_models() -> None:
    settings = config(routes=[{"match": "demo", "cache": "main"}])
    with live_server(settings) as server, Anthropic(base_url=server.url, api_key="none", max_retries=0) as sdk:
        for stream in (False, True):
            with pytest.raises(anthropic.NotFoundError, match="demo"):
                sdk.messages.create(**params("text", stream=stream) | {"model": "claude-9"})


def test_a_wrong_key_is_an_authentication_error_and_both_headers_are_accepted() -> None:
    with live_server(config(keys=[{"name": "ada", "key": "sk-right"}])) as server:
        with Anthropic(base_url=server.url, api_key="sk-wrong", max_retries=0) as sdk:
            with pytest.raises(anthropic.AuthenticationError) as caught:
                sdk.messages.create(**params("text"))
            assert isinstance(caught.value.body, dict)
            assert caught.value.body["error"]["type"] == "authentication_error"
        for right in ({"api_key": "sk-right"}, {"auth_token": "sk-right"}):
            with Anthropic(base_url=server.url, max_retries=0, **right) as sdk:
                assert sdk.messages.create(**params("text")).stop_reason == "end_turn"
        for header in ({"x-api-key": "sk-right"}, {"Authorization": "Bearer sk-right"}):
            with Anthropic(base_url=server.url, api_key="sk-wrong", default_headers=header, max_retries=0) as sdk:
                assert sdk.messages.create(**params("text")).stop_reason == "end_turn"


def test_a_full_queue_is_overloaded_with_retry_after() -> None:
    chat = CHAT
    with live_server(single_slot_config(scheduler={"max_waiting": 0})) as server:
        with raw_request(server, chat.path, chat.body("endless stream", stream=True)) as holder:
            holder.read_until(b"so far")
            sdk = Anthropic(base_url=server.url, api_key="none", max_retries=0)
            with sdk, pytest.raises(anthropic.APIStatusError) as caught:
                sdk.messages.create(**params("text"))
        assert caught.value.status_code == 529
        assert int(caught.value.response.headers["retry-after"]) >= 1
        wait_until_idle(server)


# --- async ----------------------------------------------------------------------------------------------------------


async def test_async_messages(async_sdk: AsyncAnthropic) -> None:
    messages = async_sdk.messages
    assert (await messages.create(**params("text"))).content[0].to_dict()["text"] == TEXT
    events = [event.type async for event in await messages.create(**params("text", stream=True))]
    assert events[-1] == "message_stop"
    async with messages.stream(**params("text")) as stream:
        assert "".join([text async for text in stream.text_stream]) == TEXT
        assert (await stream.get_final_message()).stop_reason == "end_turn"
    assert isinstance((await messages.parse(**params("Rome", output_format=City))).parsed_output, City)


async def test_async_counting_models_and_errors(async_sdk: AsyncAnthropic) -> None:
    assert (await async_sdk.messages.count_tokens(model=MODEL, messages=user("text"))).input_tokens > 0
    assert "demo" in [model.id async for model in async_sdk.models.list()]
    assert (await async_sdk.models.retrieve("demo")).id == "demo"
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 4096 maximum"):
        await async_sdk.messages.create(**params("word " * 5000))
