"""Characters that end a line for `str.splitlines`, in every part of a reply. The SDKs of Ollama and Google split
streams with it: an unescaped one cuts a line of JSON in two, and the SDK raises."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import httpx
import ollama
import pytest
from anthropic import Anthropic
from google import genai
from google.genai import errors, types
from openai import OpenAI

from modelyard.protocols.common.json import encode
from tests.e2e.protocols import TOOLS
from tests.e2e.test_remote import CONSENT, KINDS, remote_config
from tests.live_server import LiveServer, demo_config, live_server

BREAKS = "\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029\r\n"
MARKED = f"a{BREAKS}b\x7f–ü \u2028"
ARGUMENTS = {"city": MARKED, "z\u2028": ["\u2029"]}
MODEL = "dé\u2028mo"
SCRIPT: list[dict[str, Any]] = [
    {"when": "^call", "steps": [{"think": MARKED}, {"call": {"name": "get_weather", "arguments": ARGUMENTS}}]},
    {"when": "^fail", "steps": [{"text": MARKED}, {"fail": f"broken {MARKED}", "kind": "unavailable"}]},
    {
        "when": "^break",
        "steps": [{"text": MARKED}, {"delay": 0.05}, {"fail": f"broken {MARKED}", "kind": "unavailable"}],
    },
    {"when": "^refuse", "steps": [{"fail": f"broken {MARKED}", "kind": "invalid"}]},
    {"steps": [{"think": MARKED}, {"text": MARKED}]},
]


class Answer(NamedTuple):
    text: str
    thinking: str
    arguments: Any


Ask = Callable[[str, str, bool], Answer]  # the server's address, the prompt, whether to stream


def ask_ollama(url: str, prompt: str, stream: bool) -> Answer:
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": TOOLS["get_weather"]}}]
    with ollama.Client(host=url, headers=CONSENT) as client:
        chat: Any = client.chat
        reply = chat(MODEL, [{"role": "user", "content": prompt}], stream=stream, think=True, tools=tools)
        messages = [part.message for part in (reply if stream else [reply])]
    calls = [call.function.arguments for message in messages for call in message.tool_calls or ()]
    text, thinking = ("".join(getattr(one, field) or "" for one in messages) for field in ("content", "thinking"))
    return Answer(text, thinking, calls[0] if calls else None)


def ask_gemini(url: str, prompt: str, stream: bool) -> Answer:
    options = types.HttpOptions(base_url=url, headers=CONSENT, retry_options=types.HttpRetryOptions(attempts=1))
    declared = types.FunctionDeclaration(name="get_weather", parameters_json_schema=TOOLS["get_weather"])
    settings = types.GenerateContentConfig(
        tools=[types.Tool(function_declarations=[declared])],
        thinking_config=types.ThinkingConfig(include_thoughts=True),
    )
    with genai.Client(api_key="any", http_options=options) as client:
        models: Any = client.models
        generate = models.generate_content_stream if stream else models.generate_content
        reply = generate(model=MODEL, contents=prompt, config=settings)
        parts = [part for chunk in (reply if stream else [reply]) for part in chunk.parts or ()]
    calls = [part.function_call.args for part in parts if part.function_call]
    text, thinking = ("".join(p.text or "" for p in parts if bool(p.thought) is thought) for thought in (False, True))
    return Answer(text, thinking, calls[0] if calls else None)


def ask_messages(url: str, prompt: str, stream: bool) -> Answer:
    fields: Any = {
        "model": MODEL,
        "max_tokens": 500,
        "messages": [{"role": "user", "content": prompt}],
        "tools": [{"name": "get_weather", "input_schema": TOOLS["get_weather"]}],
    }
    with Anthropic(base_url=url, api_key="none", max_retries=0, default_headers=CONSENT) as client:
        if stream:
            with client.messages.stream(**fields) as events:
                message: Any = events.get_final_message()
        else:
            message = client.messages.create(**fields)
    found = {block.type: block for block in message.content}
    return Answer(
        found["text"].text if "text" in found else "",
        found["thinking"].thinking,
        found["tool_use"].input if "tool_use" in found else None,
    )


def ask_chat(url: str, prompt: str, stream: bool) -> Answer:
    fields: Any = {
        "model": MODEL,
        "messages": [{"role": "user", "content": prompt}],
        "tools": [{"type": "function", "function": {"name": "get_weather", "parameters": TOOLS["get_weather"]}}],
    }
    with OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, default_headers=CONSENT) as client:
        reply: Any = client.chat.completions.create(**fields, stream=stream)
        if stream:
            parts: list[Any] = [chunk.choices[0].delta for chunk in reply if chunk.choices]
        else:
            parts = [reply.choices[0].message]
    text, thinking = ("".join(getattr(p, f, None) or "" for p in parts) for f in ("content", "reasoning_content"))
    arguments = "".join(call.function.arguments or "" for part in parts for call in part.tool_calls or ())
    return Answer(text, thinking, json.loads(arguments) if arguments else None)


def ask_responses(url: str, prompt: str, stream: bool) -> Answer:
    fields: Any = {
        "model": MODEL,
        "input": prompt,
        "tools": [{"type": "function", "name": "get_weather", "parameters": TOOLS["get_weather"]}],
    }
    with OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, default_headers=CONSENT) as client:
        reply: Any = client.responses.create(**fields, stream=stream)
        if stream:
            reply = next(event for event in reply if event.type == "response.completed").response
    found = {item.type: item for item in reply.output}
    called = found.get("function_call")
    thinking = found["reasoning"].content[0].text
    return Answer(reply.output_text, thinking, None if called is None else json.loads(called.arguments))


SDKS: dict[str, Ask] = {
    "ollama": ask_ollama,
    "gemini": ask_gemini,
    "messages": ask_messages,
    "chat": ask_chat,
    "responses": ask_responses,
}
EVERY_SDK = pytest.mark.parametrize("ask", SDKS.values(), ids=SDKS)


@pytest.fixture(scope="module")
def direct() -> Iterator[LiveServer]:
    with live_server(demo_config(SCRIPT, format="hermes")) as running:
        yield running


@pytest.fixture(scope="module", params=KINDS)
def proxy(direct: LiveServer, request: pytest.FixtureRequest) -> Iterator[LiveServer]:
    settings = remote_config(direct.url + "/v1", request.param)
    with live_server(settings | {"routes": [{"match": "*", "model": "demo"}]}) as running:
        yield running


@EVERY_SDK
def test_every_sdk_reads_them_in_text_reasoning_and_arguments(direct: LiveServer, ask: Ask, stream: bool) -> None:
    assert ask(direct.url, "text", stream) == (MARKED, MARKED, None)
    assert ask(direct.url, "call", stream) == ("", MARKED, ARGUMENTS)


@EVERY_SDK
def test_every_sdk_reads_those_of_an_upstream(proxy: LiveServer, ask: Ask, stream: bool) -> None:
    assert ask(proxy.url, "text", stream)[0] == MARKED
    assert ask(proxy.url, "call", stream).arguments == ARGUMENTS


def test_they_do_not_hide_an_error_from_the_sdks(direct: LiveServer, stream: bool) -> None:
    for prompt in ("refuse", "fail"):
        with pytest.raises(ollama.ResponseError, match="broken a"):
            ask_ollama(direct.url, prompt, stream)
        with pytest.raises(errors.APIError, match="broken a"):
            ask_gemini(direct.url, prompt, stream)


BODIES: dict[str, dict[str, Any]] = {
    "/v1/messages": {"max_tokens": 500, "messages": []},
    "/v1/chat/completions": {"messages": []},
    "/v1/responses": {"input": ""},
    "/v1/responses?pool": {"messages": []},
    "/v1/completions": {"prompt": ""},
    "/completion": {"prompt": ""},
    "/api/chat": {"messages": []},
    "/api/generate": {"prompt": ""},
    "/v1beta/models/demo:generateContent": {"contents": []},
    "/v1beta/models/demo:streamGenerateContent": {"contents": []},
    "/v1beta/models/demo:streamGenerateContent?alt=sse": {"contents": []},
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("prompt", ["text", "call", "refuse", "fail", "break"])
def test_a_line_of_a_reply_is_one_line_for_every_reader(
    direct: LiveServer, path: str, prompt: str, stream: bool
) -> None:
    filled: dict[str, Any] = {
        "messages": [{"role": "user", "content": prompt}],
        "contents": [{"role": "user", "parts": [{"text": prompt}]}],
    }
    body = {name: value or filled.get(name, prompt) for name, value in BODIES[path].items()}
    reply = httpx.post(direct.url + path, json=body | {"model": MODEL, "stream": stream}, timeout=180)
    assert reply.text.splitlines() == reply.text.removesuffix("\n").split("\n")
    assert "\\u2028" in reply.text
    if prompt == "break" and stream and not path.endswith((":generateContent", "?pool")):
        assert reply.status_code == 200  # the stream had begun: the error is an event of it
        assert "broken a\\u000b" in reply.text


@pytest.mark.parametrize("path", ["/v1/models/{}", "/api/show"])
def test_a_name_with_one_is_echoed_on_one_line(path: str, direct: LiveServer) -> None:
    if path == "/api/show":
        reply = httpx.post(direct.url + path, json={"model": MODEL})
    else:
        reply = httpx.get(direct.url + path.format(MODEL))
    assert len(reply.text.splitlines()) == 1


def test_only_line_breaks_are_escaped() -> None:
    text = "–“ü中\u2027\u202a\x84\x86\xa0\x7f"
    assert encode(text) == f'"{text}"'.encode()
    assert encode(BREAKS) == b'"\\u000b\\f\\u001c\\u001d\\u001e\\u0085\\u2028\\u2029\\r\\n"'
