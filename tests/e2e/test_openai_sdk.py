"""The OpenAI SDK, sync and async, against a live server."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam
from openai.types.responses import FunctionToolParam
from pydantic import BaseModel

from tests.e2e.helpers import config, raw_request, single_slot_config, wait_until_idle
from tests.e2e.protocols import CHAT, TOOLS
from tests.live_server import LiveServer, live_server

MODEL = "demo"
TEXT = "Hello there, friend."
CHAT_TOOLS: list[ChatCompletionToolParam] = [
    {"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in TOOLS.items()
]
RESPONSE_TOOLS: list[FunctionToolParam] = [
    {"type": "function", "name": name, "parameters": schema, "strict": False} for name, schema in TOOLS.items()
]


class City(BaseModel):
    name: str
    people: int
    districts: list[str]


def user(text: str) -> list[ChatCompletionMessageParam]:
    return [{"role": "user", "content": text}]


@pytest.fixture(scope="module")
def sdk(server: LiveServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def async_sdk(server: LiveServer) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


# --- chat completions -----------------------------------------------------------------------------------------------


def test_create_completion(sdk: OpenAI) -> None:
    reply = sdk.chat.completions.create(model=MODEL, messages=user("text"))
    assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == (TEXT, "stop")
    assert reply.usage is not None
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert reply._request_id == "req_" + reply.id.removeprefix("chatcmpl-")


def test_create_streamed_completion(sdk: OpenAI) -> None:
    options: Any = {"include_usage": True}
    stream = sdk.chat.completions.create(model=MODEL, messages=user("text"), stream=True, stream_options=options)
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == TEXT
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens > 0


def test_chat_stream_helper(sdk: OpenAI) -> None:
    with sdk.chat.completions.stream(model=MODEL, messages=user("one tool"), tools=CHAT_TOOLS) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done", "tool_calls.function.arguments.done"} <= set(kinds)
    (call,) = final.choices[0].message.tool_calls or ()
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Rome"})
    assert final.choices[0].finish_reason == "tool_calls"


def test_the_stream_helper_collects_a_call_of_a_custom_tool(sdk: OpenAI) -> None:
    """A delta has no other type than `function` in OpenAI's document: the helper fails on the type `custom`."""
    tools: Any = [{"type": "custom", "custom": {"name": "get_weather"}}]
    with sdk.chat.completions.stream(model=MODEL, messages=user("one tool"), tools=tools) as stream:
        chunks = [event.chunk for event in stream if event.type == "chunk"]
        (call,) = stream.get_final_completion().to_dict()["choices"][0]["message"]["tool_calls"]  # type: ignore[index]
    whole: Any = sdk.chat.completions.create(model=MODEL, messages=user("one tool"), tools=tools)
    assert call["custom"] == whole.choices[0].message.tool_calls[0].custom.to_dict()
    assert call["custom"]["name"] == "get_weather"
    assert {delta.type for c in chunks for delta in c.choices[0].delta.tool_calls or ()} == {None}


def test_parse_completion(sdk: OpenAI) -> None:
    reply = sdk.chat.completions.parse(model=MODEL, messages=user("Rome, please"), response_format=City)
    assert isinstance(reply.choices[0].message.parsed, City)


def test_parse_raises_if_the_completion_was_cut_off(sdk: OpenAI) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        sdk.chat.completions.parse(model=MODEL, messages=user("Rome"), response_format=City, max_completion_tokens=3)


def test_a_tool_is_called_and_its_result_used(sdk: OpenAI) -> None:
    messages = user("one tool")
    message = sdk.chat.completions.create(model=MODEL, messages=messages, tools=CHAT_TOOLS).choices[0].message
    assert message.tool_calls is not None
    messages.append(message.to_dict())  # type: ignore[arg-type]
    messages.append({"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"})
    answer = sdk.chat.completions.create(model=MODEL, messages=messages, tools=CHAT_TOOLS)
    assert answer.choices[0].message.content == "Take a hat: it is sunny."


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_time"}}])
def test_a_tool_choice_is_honoured(sdk: OpenAI, choice: Any) -> None:
    message = user("just talking")
    reply = sdk.chat.completions.create(model=MODEL, messages=message, tools=CHAT_TOOLS, tool_choice=choice)
    (call,) = reply.choices[0].message.tool_calls or ()
    assert call.type == "function"
    assert call.function.name == ("get_weather" if choice == "required" else "get_time")
    assert reply.choices[0].finish_reason == "tool_calls"


def test_several_choices(sdk: OpenAI) -> None:
    reply = sdk.chat.completions.create(model=MODEL, messages=user("text"), n=2)
    assert [(c.index, c.message.content) for c in reply.choices] == [(0, TEXT), (1, TEXT)]
    stream = sdk.chat.completions.create(model=MODEL, messages=user("text"), n=2, stream=True)
    texts = {0: "", 1: ""}
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == {0: TEXT, 1: TEXT}


def test_logprobs_of_every_visible_token(sdk: OpenAI) -> None:
    reply = sdk.chat.completions.create(model=MODEL, messages=user("text"), logprobs=True, top_logprobs=2)
    found = reply.choices[0].logprobs
    assert found is not None
    assert found.content is not None
    assert "".join(entry.token for entry in found.content) == TEXT
    assert {len(entry.top_logprobs) for entry in found.content} == {2}
    assert all(entry.logprob <= 0 and bytes(entry.bytes or ()).decode() == entry.token for entry in found.content)


def test_reasoning_content_is_separate_from_the_content(sdk: OpenAI) -> None:
    message = sdk.chat.completions.create(model=MODEL, messages=user("thinking")).choices[0].message
    assert (message.content, getattr(message, "reasoning_content", None)) == ("Forty-two.", "Let me see.")


# --- responses ------------------------------------------------------------------------------------------------------


def test_create_response(sdk: OpenAI) -> None:
    reply = sdk.responses.create(model=MODEL, input="text")
    assert (reply.output_text, reply.status) == (TEXT, "completed")
    assert reply.usage is not None
    assert reply.usage.total_tokens == reply.usage.input_tokens + reply.usage.output_tokens


def test_create_streamed_response(sdk: OpenAI) -> None:
    events = list(sdk.responses.create(model=MODEL, input="text", stream=True))
    assert (events[0].type, events[-1].type) == ("response.created", "response.completed")
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == TEXT


def test_responses_stream_helper(sdk: OpenAI) -> None:
    with sdk.responses.stream(model=MODEL, input="one tool", tools=RESPONSE_TOOLS) as stream:
        for _ in stream:
            pass
        final = stream.get_final_response()
    message, call = final.output
    assert final.output_text == "I look."
    assert (message.type, call.type) == ("message", "function_call")
    assert call.type == "function_call"
    assert json.loads(call.arguments) == {"city": "Rome"}


def test_parse_response(sdk: OpenAI) -> None:
    assert isinstance(sdk.responses.parse(model=MODEL, input="Rome", text_format=City).output_parsed, City)


def test_previous_response_id_continues_a_conversation(sdk: OpenAI) -> None:
    first = sdk.responses.create(model=MODEL, input="one tool", tools=RESPONSE_TOOLS)
    call = first.output[-1]
    assert call.type == "function_call"
    second = sdk.responses.create(
        model=MODEL,
        previous_response_id=first.id,
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}],
        tools=RESPONSE_TOOLS,
    )
    assert (second.output_text, second.previous_response_id) == ("Take a hat: it is sunny.", first.id)


def test_a_stored_response_is_retrieved_and_deleted(sdk: OpenAI) -> None:
    made = sdk.responses.create(model=MODEL, input="text", metadata={"topic": "greeting"})
    assert sdk.responses.retrieve(made.id).to_dict() == made.to_dict()
    (item,) = sdk.responses.input_items.list(made.id).data
    assert item.to_dict()["content"] == [{"type": "input_text", "text": "text"}]
    sdk.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError, match=made.id):
        sdk.responses.retrieve(made.id)


def test_counted_input_tokens_equal_the_usage(sdk: OpenAI) -> None:
    counted = sdk.responses.input_tokens.count(model=MODEL, input="text", tools=RESPONSE_TOOLS)
    usage = sdk.responses.create(model=MODEL, input="text", tools=RESPONSE_TOOLS).usage
    assert usage is not None
    assert (counted.object, counted.input_tokens) == ("response.input_tokens", usage.input_tokens)


# --- the rest of the surface ----------------------------------------------------------------------------------------


def test_legacy_completions(sdk: OpenAI) -> None:
    reply = sdk.completions.create(model=MODEL, prompt="text", logprobs=1, echo=True)
    assert (reply.choices[0].text, reply.choices[0].finish_reason) == ("text" + TEXT, "stop")
    assert reply.choices[0].logprobs is not None
    assert "".join(reply.choices[0].logprobs.tokens or ()) == "text" + TEXT
    probabilities: list[Any] = list(reply.choices[0].logprobs.token_logprobs or ())
    assert probabilities[0] is None  # nothing precedes the first token
    stream = sdk.completions.create(model=MODEL, prompt=["text", "length"], max_tokens=5, stream=True)
    ends = [(c.index, c.finish_reason) for chunk in stream for c in chunk.choices if c.finish_reason]
    assert sorted(ends) == [(0, "length"), (1, "length")]


def test_embeddings_as_numbers_and_as_base64(sdk: OpenAI) -> None:
    """The SDK requests base64 by default and decodes it."""
    plain = sdk.embeddings.create(model=MODEL, input=["one", "two"], encoding_format="float")
    packed = sdk.embeddings.create(model=MODEL, input=["one", "two"])
    assert [e.index for e in plain.data] == [0, 1]
    for a, b in zip(plain.data, packed.data, strict=True):
        assert a.embedding == pytest.approx(b.embedding, abs=1e-6)
    assert plain.data[0].embedding != plain.data[1].embedding
    assert plain.usage.prompt_tokens == packed.usage.prompt_tokens > 0
    assert len(sdk.embeddings.create(model=MODEL, input="one", dimensions=8).data[0].embedding) == 8


def test_models_are_listed_and_retrieved_even_with_a_slash() -> None:
    settings = config()
    settings["models"]["demo"]["aliases"] = ["team/demo"]
    with live_server(settings) as server, OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as sdk:
        assert {"demo", "team/demo"} <= {model.id for model in sdk.models.list()}
        found = sdk.models.retrieve("team/demo")
        assert (found.id, found.object) == ("team/demo", "model")
        assert found.to_dict()["context_length"] == 4096


# --- errors ---------------------------------------------------------------------------------------------------------


def test_an_overflow_is_a_bad_request_with_its_code(sdk: OpenAI) -> None:
    for ask in (
        lambda: sdk.chat.completions.create(model=MODEL, messages=user("word " * 5000)),
        lambda: sdk.chat.completions.create(model=MODEL, messages=user("word " * 5000), stream=True),
        lambda: sdk.responses.create(model=MODEL, input="word " * 5000),
    ):
        with pytest.raises(openai.BadRequestError, match="maximum context length is 4096 tokens") as caught:
            ask()
        assert caught.value.code == "context_length_exceeded"


def test_an_overflow_of_a_streamed_response_is_response_failed(sdk: OpenAI) -> None:
    last = list(sdk.responses.create(model=MODEL, input="word " * 5000, stream=True))[-1]
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert last.response.error.code == "context_length_exceeded"


def test_a_failure_during_a_stream_is_raised(sdk: OpenAI) -> None:
    stream = sdk.chat.completions.create(model=MODEL, messages=user("error during"), stream=True)
    with pytest.raises(openai.APIError, match="out of memory"):
        list(stream)


def test_a_wrong_key_is_an_authentication_error_and_both_headers_are_accepted() -> None:
    with live_server(config(keys=[{"name": "ada", "key": "sk-right"}])) as server:
        url = server.url + "/v1"
        with OpenAI(base_url=url, api_key="sk-wrong", max_retries=0) as sdk, pytest.raises(openai.AuthenticationError):
            sdk.models.list()
        with OpenAI(base_url=url, api_key="sk-right", max_retries=0) as sdk:
            assert sdk.responses.create(model=MODEL, input="text").output_text == TEXT
        headers = {"x-api-key": "sk-right"}
        with OpenAI(base_url=url, api_key="sk-wrong", default_headers=headers, max_retries=0) as sdk:
            assert sdk.responses.create(model=MODEL, input="text").output_text == TEXT


def test_an_unknown_model_is_a_404_that_lists_the_known_models() -> None:
    settings = config(routes=[{"match": "demo", "cache": "main"}])
    with live_server(settings) as server, OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as sdk:
        with pytest.raises(openai.NotFoundError, match="demo"):
            sdk.chat.completions.create(model="gpt-9", messages=user("text"))
        with pytest.raises(openai.NotFoundError, match="demo"):
            sdk.responses.create(model="gpt-9", input="text")


def test_a_full_queue_is_an_internal_server_error_with_retry_after() -> None:
    chat = CHAT
    with live_server(single_slot_config(scheduler={"max_waiting": 0})) as server:
        with raw_request(server, chat.path, chat.body("endless stream", stream=True)) as holder:
            holder.read_until(b"so far")
            sdk = OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
            with sdk, pytest.raises(openai.InternalServerError) as caught:
                sdk.responses.create(model=MODEL, input="text")
        assert (caught.value.status_code, caught.value.code) == (503, "server_is_overloaded")
        assert int(caught.value.response.headers["retry-after"]) >= 1
        wait_until_idle(server)


# --- async ----------------------------------------------------------------------------------------------------------


async def test_async_completions(async_sdk: AsyncOpenAI) -> None:
    chat = async_sdk.chat.completions
    whole = await chat.create(model=MODEL, messages=user("text"))
    assert whole.choices[0].message.content == TEXT
    stream = await chat.create(model=MODEL, messages=user("text"), stream=True)
    assert "".join([c.choices[0].delta.content or "" async for c in stream]) == TEXT
    async with chat.stream(model=MODEL, messages=user("text")) as helper:
        assert (await helper.get_final_completion()).choices[0].message.content == TEXT
    parsed = await chat.parse(model=MODEL, messages=user("Rome"), response_format=City)
    assert isinstance(parsed.choices[0].message.parsed, City)


async def test_async_responses(async_sdk: AsyncOpenAI) -> None:
    responses = async_sdk.responses
    first = await responses.create(model=MODEL, input="text")
    second = await responses.create(model=MODEL, input="thinking", previous_response_id=first.id, stream=True)
    ends = [event.type async for event in second]
    assert ends[-1] == "response.completed"
    async with responses.stream(model=MODEL, input="text") as helper:
        assert (await helper.get_final_response()).output_text == TEXT
    assert isinstance((await responses.parse(model=MODEL, input="Rome", text_format=City)).output_parsed, City)
    assert (await responses.retrieve(first.id)).output_text == TEXT
    assert (await responses.input_tokens.count(model=MODEL, input="text")).input_tokens > 0
    await responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        await responses.retrieve(first.id)


async def test_async_models_embeddings_and_legacy_completions(async_sdk: AsyncOpenAI) -> None:
    assert "demo" in [model.id async for model in async_sdk.models.list()]
    assert (await async_sdk.models.retrieve("demo")).id == "demo"
    assert len((await async_sdk.embeddings.create(model=MODEL, input="one")).data[0].embedding) == 64
    assert (await async_sdk.completions.create(model=MODEL, prompt="text")).choices[0].text == TEXT


async def test_async_errors(async_sdk: AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await async_sdk.chat.completions.create(model=MODEL, messages=user("word " * 5000))
    assert caught.value.code == "context_length_exceeded"
    stream = await async_sdk.chat.completions.create(model=MODEL, messages=user("error during"), stream=True)
    with pytest.raises(openai.APIError, match="out of memory"):
        async for _ in stream:
            pass


def test_a_compacted_conversation_is_compacted_again_without_its_old_summary(sdk: OpenAI) -> None:
    asked: Any = [{"role": "user", "content": "text"}]
    once: Any = sdk.responses.compact(model=MODEL, input=asked).output
    more: Any = [*(item.to_dict(warnings=False) for item in once), {"role": "user", "content": "thinking"}]
    twice: Any = sdk.responses.compact(model=MODEL, input=more).output
    assert [item.type for item in twice] == ["message", "message", "compaction"]
    assert [item.content[0].text for item in twice[:2]] == ["text", "thinking"]
