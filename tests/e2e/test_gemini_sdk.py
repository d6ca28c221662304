"""Google's SDK, sync and async, against a live server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from google import genai
from google.genai import errors, types
from pydantic import BaseModel

from tests.clients.agent_bench import red_png
from tests.e2e.helpers import config
from tests.live_server import LiveServer, live_server

TEXT = "Hello there, friend."
_TEXTS: Any = ["a b", "c"]
WEATHER = types.FunctionDeclaration(
    name="get_weather",
    description="The weather",
    parameters=types.Schema(
        type=types.Type.OBJECT, properties={"city": types.Schema(type=types.Type.STRING)}, required=["city"]
    ),
)


class City(BaseModel):
    name: str
    people: int


def connect(server: LiveServer) -> genai.Client:
    once = types.HttpRetryOptions(attempts=1)
    return genai.Client(api_key="any", http_options=types.HttpOptions(base_url=server.url, retry_options=once))


@pytest.fixture(scope="module")
def sdk(server: LiveServer) -> Iterator[genai.Client]:
    client = connect(server)
    yield client
    client.close()


def settings(**fields: Any) -> types.GenerateContentConfig:
    return types.GenerateContentConfig(**fields)


def test_generate_content(sdk: genai.Client) -> None:
    reply = sdk.models.generate_content(model="demo", contents="text")
    assert reply.text == TEXT
    assert reply.candidates
    assert reply.candidates[0].finish_reason == types.FinishReason.STOP
    assert reply.usage_metadata
    assert reply.usage_metadata.total_token_count == 18


def test_streamed_content(sdk: genai.Client) -> None:
    chunks = [*sdk.models.generate_content_stream(model="demo", contents="text")]
    assert "".join(chunk.text or "" for chunk in chunks) == TEXT
    assert chunks[-1].candidates
    assert chunks[-1].candidates[0].finish_reason == types.FinishReason.STOP


def test_thoughts_are_shown_if_the_client_wants_them(sdk: genai.Client) -> None:
    def parts(**thinking: Any) -> list[tuple[Any, Any, bool]]:
        wanted = settings(thinking_config=types.ThinkingConfig(**thinking))
        reply = sdk.models.generate_content(model="demo", contents="thinking", config=wanted)
        assert reply.parts
        return [(part.text, part.thought, bool(part.thought_signature)) for part in reply.parts]

    assert parts(include_thoughts=True) == [("Let me see.", True, False), ("Forty-two.", None, True)]
    assert parts() == [("Forty-two.", None, True)]


def test_reasoning_returns_with_the_conversation(sdk: genai.Client) -> None:
    chat = sdk.chats.create(model="demo")
    assert chat.send_message("thinking").text == "Forty-two."
    assert chat.send_message("text").text == TEXT


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_is_called_and_its_result_used(sdk: genai.Client, stream: bool) -> None:
    tools = settings(
        tools=[types.Tool(function_declarations=[WEATHER])],
        automatic_function_calling=types.AutomaticFunctionCallingConfig(disable=True),
    )
    contents: list[Any] = [types.Content(role="user", parts=[types.Part(text="one tool")])]
    if stream:
        chunks = [*sdk.models.generate_content_stream(model="demo", contents=contents, config=tools)]
        (reply,) = [chunk for chunk in chunks if chunk.function_calls]
    else:
        reply = sdk.models.generate_content(model="demo", contents=contents, config=tools)
    (called,) = reply.function_calls or [types.FunctionCall()]
    assert (called.name, called.args) == ("get_weather", {"city": "Rome"})
    assert reply.candidates
    result = types.Part.from_function_response(name="get_weather", response={"output": "sunny"})
    contents += [reply.candidates[0].content, types.Content(role="user", parts=[result])]
    answer = sdk.models.generate_content(model="demo", contents=contents, config=tools)
    assert answer.text == "Take a hat: it is sunny."


def test_a_call_can_be_required(sdk: genai.Client) -> None:
    calling = types.FunctionCallingConfig(
        mode=types.FunctionCallingConfigMode.ANY, allowed_function_names=["get_weather"]
    )
    wanted = settings(
        tools=[types.Tool(function_declarations=[WEATHER])],
        tool_config=types.ToolConfig(function_calling_config=calling),
    )
    reply = sdk.models.generate_content(model="demo", contents="just talking", config=wanted)
    assert [called.name for called in reply.function_calls or ()] == ["get_weather"]


def test_a_schema_is_kept(sdk: genai.Client) -> None:
    for field in ({"response_schema": City}, {"response_json_schema": City.model_json_schema()}):
        wanted = settings(response_mime_type="application/json", **field)
        reply = sdk.models.generate_content(model="demo", contents="Rome, please", config=wanted)
        assert City.model_validate_json(reply.text or "")


def test_system_instruction_limit_stop_strings_and_candidates(sdk: genai.Client) -> None:
    wanted = settings(system_instruction="Be brief.", max_output_tokens=5, candidate_count=2, temperature=0.5, top_k=5)
    reply = sdk.models.generate_content(model="demo", contents="length", config=wanted)
    assert [one.finish_reason for one in reply.candidates or ()] == [types.FinishReason.MAX_TOKENS] * 2
    stopped = sdk.models.generate_content(
        model="demo", contents="stop string", config=settings(stop_sequences=["STOP"])
    )
    assert stopped.text == "one two "


def test_tokens_models_and_embeddings(sdk: genai.Client) -> None:
    assert sdk.models.count_tokens(model="demo", contents="text").total_tokens == 10
    assert [model.name for model in sdk.models.list()] == ["models/demo"]
    assert sdk.models.get(model="demo").input_token_limit == 4096
    found = sdk.models.embed_content(
        model="demo", contents=_TEXTS, config=types.EmbedContentConfig(output_dimensionality=8)
    )
    assert [len(one.values or ()) for one in found.embeddings or ()] == [8, 8]


def test_images_reach_a_model_that_sees() -> None:
    seeing = config()
    seeing["models"]["demo"]["modalities"] = ["text", "image"]
    with live_server(seeing) as server:
        image: list[Any] = ["text", types.Part.from_bytes(data=red_png(), mime_type="image/png")]
        client = connect(server)
        assert client.models.generate_content(model="demo", contents=image).text == TEXT
        client.close()


def test_errors_have_googles_names(sdk: genai.Client) -> None:
    for text, code, status in (("error before", 500, "INTERNAL"), ("busy before", 503, "UNAVAILABLE")):
        with pytest.raises(errors.ServerError) as raised:
            sdk.models.generate_content(model="demo", contents=text)
        assert (raised.value.code, raised.value.status) == (code, status)
    image: list[Any] = ["text", types.Part.from_bytes(data=red_png(), mime_type="image/png")]
    with pytest.raises(errors.ClientError) as refused:
        sdk.models.generate_content(model="demo", contents=image)
    assert (refused.value.code, refused.value.status) == (400, "INVALID_ARGUMENT")


def test_an_error_within_a_stream_is_raised(sdk: genai.Client) -> None:
    with pytest.raises(errors.ServerError, match="out of memory"):
        list(sdk.models.generate_content_stream(model="demo", contents="error during"))


@pytest.mark.filterwarnings("ignore:Inheritance class:DeprecationWarning")
async def test_the_async_client(server: LiveServer) -> None:
    sdk = connect(server)
    assert (await sdk.aio.models.generate_content(model="demo", contents="text")).text == TEXT
    stream = await sdk.aio.models.generate_content_stream(model="demo", contents="text")
    assert "".join([chunk.text or "" async for chunk in stream]) == TEXT
    await sdk.aio.aclose()
    sdk.close()
