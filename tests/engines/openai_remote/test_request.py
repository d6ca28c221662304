"""The request for each kind of upstream API."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec.structs import replace

from modelyard.core.errors import Unsupported
from modelyard.core.request import (
    Constraint,
    Image,
    Message,
    Reasoning,
    Request,
    Sampling,
    Text,
    Thinking,
    Tool,
    ToolCall,
    ToolResult,
)
from modelyard.engines.openai_remote import Options
from modelyard.engines.openai_remote.options import ApiKind
from modelyard.engines.openai_remote.request import APIS, base_url, chat_body, count_body
from modelyard.protocols.common.reasoning_signature import pack_reasoning

PIXEL = "data:image/png;base64,iVBORw0KGgo="
EVERY_KIND: list[ApiKind] = ["chat_completions", "responses", "anthropic_messages"]
REQUEST = Request(
    model="frontier",
    messages=(Message("user", (Text("Hello"),)),),
    sampling=Sampling(temperature=0.5, top_p=0.8, top_k=40, min_p=0.1, seed=7, dry_multiplier=0.8),
    stop=("END",),
    n=3,
    max_tokens=99,
    session="s",
    metadata={"a": "b"},
    priority="background",
    chat_template_kwargs={"x": 1},
    previous="resp_1",
    lora_adapter="mine",
)


def sent(request: Request = REQUEST, kind: ApiKind = "chat_completions", **options: Any) -> dict[str, Any]:
    chosen = Options(
        remote_base_url="https://api.example.com/v1", remote_model="theirs", remote_api_kind=kind, **options
    )
    decoded: dict[str, Any] = json.loads(chat_body(request, chosen, APIS[kind]))
    return decoded


def test_chat_gets_only_official_fields() -> None:
    assert sent() == {
        "model": "theirs",
        "messages": [{"role": "user", "content": "Hello"}],
        "temperature": 0.5,
        "top_p": 0.8,
        "seed": 7,
        "stop": ["END"],
        "max_tokens": 99,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_responses_get_only_official_fields_and_are_not_stored() -> None:
    assert sent(kind="responses") == {
        "model": "theirs",
        "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}]}],
        "temperature": 0.5,
        "top_p": 0.8,
        "max_output_tokens": 99,
        "stream": True,
        "store": False,
        "prompt_cache_key": "s",
    }


def test_messages_get_only_official_fields() -> None:
    assert sent(kind="anthropic_messages") == {
        "model": "theirs",
        "messages": [{"role": "user", "content": "Hello"}],
        "temperature": 0.5,
        "top_p": 0.8,
        "top_k": 40,
        "stop_sequences": ["END"],
        "max_tokens": 99,
        "stream": True,
    }


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_upstream_with_extensions_gets_all_fields(kind: ApiKind) -> None:
    got = sent(kind=kind, remote_extensions=True)
    assert {name: got[name] for name in ("min_p", "dry_multiplier", "priority", "chat_template_kwargs")} == {
        "min_p": 0.1,
        "dry_multiplier": 0.8,
        "priority": "background",
        "chat_template_kwargs": {"x": 1},
    }
    assert "n" not in got
    assert "previous_response_id" not in got


def test_anthropic_upstream_always_gets_max_tokens() -> None:
    unlimited = replace(REQUEST, max_tokens=None)
    assert sent(unlimited, "anthropic_messages")["max_tokens"] == 8192
    assert sent(unlimited, "anthropic_messages", remote_max_tokens=500)["max_tokens"] == 500
    assert "max_tokens" not in sent(unlimited)
    assert sent(unlimited, remote_max_tokens=500)["max_tokens"] == 500


@pytest.mark.parametrize(
    ("setting", "requested", "field"),
    [
        ("default", None, None),
        ("default", True, None),
        ("disabled", None, {"type": "disabled"}),
        ("enabled", None, {"type": "enabled"}),
        ("disabled", True, {"type": "enabled"}),
        ("enabled", False, {"type": "disabled"}),
    ],
)
def test_thinking_field_of_chat(setting: str, requested: bool | None, field: Any) -> None:
    request = replace(REQUEST, reasoning=Reasoning(enabled=requested, effort="low", budget=5))
    got = sent(request, remote_thinking=setting)
    assert got.get("thinking") == field
    assert got["reasoning_effort"] == "low"
    assert "reasoning" not in got
    assert "chat_template_kwargs" not in got


def test_thinking_fields_of_messages_and_responses() -> None:
    assert sent(kind="anthropic_messages", remote_thinking="disabled")["thinking"] == {"type": "disabled"}
    assert sent(kind="anthropic_messages", remote_thinking="enabled")["thinking"] == {"type": "adaptive"}
    assert sent(kind="responses", remote_thinking="disabled")["reasoning"] == {"effort": "none"}


def turns(*thoughts: Thinking) -> Request:
    return replace(
        REQUEST, messages=(*REQUEST.messages, Message("assistant", (*thoughts, Text("Hi"))), *REQUEST.messages)
    )


@pytest.mark.parametrize("kind", ["responses", "anthropic_messages"])
def test_reasoning_is_sent_only_to_the_upstream_that_signed_it(kind: ApiKind) -> None:
    request = turns(Thinking("mine", pack_reasoning("mine")), Thinking("unsigned"), Thinking("theirs", "EqQB-foreign"))
    text = json.dumps(sent(request, kind))
    assert "EqQB-foreign" in text
    assert "mine" not in text
    assert "unsigned" not in text


def test_earlier_reasoning_is_sent_to_a_chat_provider_with_thinking() -> None:
    request = turns(Thinking("hm"))
    assert "reasoning_content" not in sent(request)["messages"][1]
    assert sent(request, remote_thinking="enabled")["messages"][1]["reasoning_content"] == "hm"
    assert sent(request, remote_extensions=True)["messages"][1]["reasoning_content"] == "hm"


def test_turn_with_only_reasoning_stays() -> None:
    request = replace(REQUEST, messages=(Message("assistant", (Thinking("hm"),)), *REQUEST.messages))
    assert [message["role"] for message in sent(request)["messages"]] == ["assistant", "user"]


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_images_tools_and_results_pass(kind: ApiKind) -> None:
    messages = (
        Message("user", (Text("Look"), Image(PIXEL))),
        Message("assistant", (ToolCall("call_1", "look", '{"at": "sky"}'),)),
        Message("tool", (ToolResult("call_1", (Text("blue"),)),)),
    )
    tool = Tool("look", "looks", {"type": "object", "properties": {}})
    got = json.dumps(sent(replace(REQUEST, messages=messages, tools=(tool,)), kind))
    for part in ("iVBORw0KGgo=", "call_1", "blue", '"look"', "looks"):
        assert part in got


def test_grammars_need_an_upstream_with_extensions() -> None:
    schema = replace(REQUEST, constraint=Constraint("json_schema", '{"type":"object"}', "answer"))
    assert sent(schema)["response_format"]["json_schema"]["schema"] == {"type": "object"}
    grammar = replace(REQUEST, constraint=Constraint("gbnf", 'root ::= "a"'))
    with pytest.raises(Unsupported, match="gbnf"):
        sent(grammar)
    assert sent(grammar, remote_extensions=True)["grammar"] == 'root ::= "a"'


def test_bare_prompts_are_refused() -> None:
    with pytest.raises(Unsupported, match="conversations only"):
        sent(Request(model="m", prompts=("Once",)))


def test_count_body_has_only_fields_with_tokens() -> None:
    options = Options(remote_base_url="https://x", remote_model="theirs", remote_api_kind="anthropic_messages")
    got = json.loads(count_body(REQUEST, options, APIS["anthropic_messages"]))
    assert got == {"model": "theirs", "messages": [{"role": "user", "content": "Hello"}]}


@pytest.mark.parametrize(
    ("kind", "url", "base"),
    [
        ("chat_completions", "https://a.b/v1", "https://a.b/v1"),
        ("chat_completions", "https://a.b", "https://a.b"),
        ("responses", "https://a.b/v1", "https://a.b/v1"),
        ("anthropic_messages", "https://a.b", "https://a.b/v1"),
        ("anthropic_messages", "https://a.b/v1", "https://a.b/v1"),
        ("anthropic_messages", "https://a.b/claude", "https://a.b/claude/v1"),
    ],
)
def test_base_url(kind: ApiKind, url: str, base: str) -> None:
    assert base_url(kind, url) == base


@pytest.mark.parametrize("url", ["api.example.com", "ftp://a.b", "https://", "file:///etc"])
def test_invalid_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="http"):
        Options(remote_base_url=url, remote_model="m")
