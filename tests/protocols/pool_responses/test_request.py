from __future__ import annotations

from typing import Any

import msgspec
import pytest

from modelyard.core.errors import InvalidRequest
from modelyard.core.request import Image, Message, Reasoning, Request, Sampling, Text
from modelyard.protocols import pool_responses

IMAGE_URL = "data:image/png;base64,AAAA"


def read(headers: dict[str, str] | None = None, **body: Any) -> Request:
    return pool_responses.read_request(msgspec.json.encode({"model": "m", **body}), headers or {})


def refusal(**body: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        read(**body)
    return caught.value


def user(*parts: Text | Image) -> Message:
    return Message("user", parts)


# --- messages -----------------------------------------------------------------------------------------------------


def test_a_text_and_its_instructions() -> None:
    request = read(input="Hello", instructions="Be brief.")
    assert request.messages == (Message("system", (Text("Be brief."),)), user(Text("Hello")))
    assert request.instructions
    assert (request.model, request.dialect, request.stream, request.store) == ("m", "pool_responses", False, False)


def test_null_means_not_set() -> None:
    names = ("messages", "instructions", "source_lang_code", "target_lang_code", "thinking", "decoding", "stream")
    assert read(input="Hello", **dict.fromkeys(names)) == read(input="Hello")


def test_a_list_of_texts_is_one_text() -> None:
    items = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    assert read(input=items).messages == (user(Text("one two")),)


def test_images_keep_their_position() -> None:
    items = [
        {"type": "text", "text": "What is it?"},
        {"type": "image_url", "image_url": {"url": IMAGE_URL, "detail": "low"}},
        {"type": "image_url", "image_url": IMAGE_URL},
    ]
    assert read(input=items).messages == (user(Text("What is it?"), Image(IMAGE_URL, "low"), Image(IMAGE_URL)),)


def test_turns_with_texts_and_lists() -> None:
    request = read(
        messages=[
            {"role": "user", "content": "My colour is teal."},
            {"role": "assistant", "content": "Noted."},
            {"role": "user", "content": [{"type": "text", "text": "Which is it?"}]},
        ]
    )
    assert request.messages == (
        user(Text("My colour is teal.")),
        Message("assistant", (Text("Noted."),)),
        user(Text("Which is it?")),
    )


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({"model": None, "input": "x"}, "missing_required_parameter", "model"),
        ({}, "input_required", "input"),
        ({"input": ""}, "input_required", "input"),
        ({"input": []}, "input_required", "input"),
        ({"input": "x", "messages": [{"role": "user", "content": "x"}]}, "input_and_messages", "messages"),
        ({"messages": []}, "no_messages", "messages"),
        ({"messages": [{"role": "system", "content": "x"}]}, "role_unsupported", "messages[0].role"),
        ({"messages": [{"content": "x"}]}, "role_unsupported", "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]},
            "last_message_not_user",
            "messages[1].role",
        ),
        ({"messages": [{"role": "user"}]}, "input_required", "messages[0].content"),
        ({"input": [{"type": "text"}]}, "text_required", "input[0].text"),
        ({"input": [{"type": "image_url", "image_url": {}}]}, "image_required", "input[0].image_url"),
        ({"input": [{"type": "audio"}]}, "modality_unsupported", "input[0].type"),
        ({"input": "x", "thinking": "often"}, "invalid_thinking", "thinking"),
        ({"input": "x", "decoding": {"temperature": -1}}, "invalid_decoding", "decoding.temperature"),
        ({"input": "x", "decoding": {"max_tokens": 0}}, "invalid_decoding", "decoding.max_tokens"),
        ({"input": "x", "decoding": {"beam_size": 0}}, "invalid_decoding", "decoding.beam_size"),
        ({"input": "x", "decoding": {"top_k": "many"}}, "invalid_type", "decoding.top_k"),
    ],
)
def test_an_invalid_field_has_a_code_and_a_path(body: dict[str, Any], code: str, param: str) -> None:
    error = refusal(**body)
    assert (error.code, error.param) == (code, param)


# --- settings -----------------------------------------------------------------------------------------


def test_all_seven_fields_of_decoding() -> None:
    request = read(
        input="x",
        decoding={
            "beam_size": 2,
            "top_k": 1,
            "top_p": 1.0,
            "temperature": 0.1,
            "repetition_penalty": 1.05,
            "max_tokens": 256,
            "stop": ["END", ""],
        },
    )
    assert request.sampling == Sampling(beam_size=2, top_k=1, top_p=1.0, temperature=0.1, repetition_penalty=1.05)
    assert (request.max_tokens, request.stop) == (256, ("END",))


def test_missing_decoding_fields_are_not_set() -> None:
    request = read(input="x", decoding={})
    assert (request.sampling, request.max_tokens, request.stop) == (Sampling(), None, ())


def test_decoding_takes_precedence_over_extension_fields() -> None:
    request = read(input="x", min_p=0.1, top_k=40, decoding={"top_k": 1, "seed": 7}, lora_adapter="law", regex="a+")
    assert request.sampling == Sampling(min_p=0.1, top_k=1, seed=7)
    assert request.lora_adapter == "law"
    assert request.constraint is not None


@pytest.mark.parametrize(
    ("mode", "reasoning"),
    [
        (None, Reasoning(visible=False)),
        ("default", Reasoning(visible=False)),
        ("enabled", Reasoning(enabled=True, visible=False, strict=True)),
        ("disabled", Reasoning(enabled=False, visible=False, strict=True)),
    ],
)
def test_an_explicit_thinking_mode_is_strict(mode: str | None, reasoning: Reasoning) -> None:
    assert read(input="x", thinking=mode).reasoning == reasoning


def test_language_codes_become_template_arguments() -> None:
    request = read(input="x", source_lang_code="nl", target_lang_code="en")
    assert request.chat_template_kwargs == {"source_lang_code": "nl", "target_lang_code": "en"}
    assert read(input="x", target_lang_code="en").chat_template_kwargs == {"target_lang_code": "en"}


def test_remote_consent_stream_and_session_are_read() -> None:
    request = read({"x-session-id": "s1"}, input="x", allow_remote=True, stream=True)
    assert (request.allow_remote, request.stream, request.session) == (True, True, "s1")
    assert not read(input="x").allow_remote


def test_tools_are_ignored_with_a_warning() -> None:
    request = read(input="x", tools=[{"type": "function", "name": "f"}])
    assert request.tools == ()
    assert "tools" in request.warnings[0]
