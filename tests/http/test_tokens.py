"""Tokenize, detokenize and apply-template, with both styles of bodies."""

from __future__ import annotations

from typing import Any

import pytest

from tests.http.app_client import app_client

MESSAGES = [{"role": "user", "content": "What is <|im_end|> for?"}]


async def post(path: str, body: dict[str, Any], status: int = 200) -> Any:
    async with app_client() as client:
        reply = await client.post(path, json={"model": "demo"} | body)
        assert reply.status_code == status, reply.text
        return reply.json()


@pytest.mark.parametrize("field", ["content", "prompt"])
async def test_tokenize_and_detokenize_round_trip(field: str) -> None:
    body = await post("/tokenize", {field: "Grüße, 世界!"})
    assert body["count"] == len(body["tokens"]) > 0
    assert body["max_model_len"] == 4096
    back = await post("/detokenize", {"tokens": body["tokens"]})
    assert back == {"prompt": "Grüße, 世界!", "content": "Grüße, 世界!"}


async def test_pieces_are_returned_in_both_styles() -> None:
    plain = await post("/tokenize", {"content": "Hello there"})
    pieces = await post("/tokenize", {"content": "Hello there", "with_pieces": True})
    strings = await post("/tokenize", {"prompt": "Hello there", "return_token_strs": True})
    assert [each["id"] for each in pieces["tokens"]] == strings["tokens"] == plain["tokens"]
    assert [each["piece"] for each in pieces["tokens"]] == strings["token_strs"]
    assert "".join(strings["token_strs"]) == "Hello there"


async def test_messages_are_rendered_as_a_request_would_render_them() -> None:
    tokens = await post("/tokenize", {"messages": MESSAGES})
    counts = [
        (await post("/v1/messages/count_tokens", {"messages": MESSAGES}))["input_tokens"],
        (await post("/v1/responses/input_tokens", {"input": MESSAGES}))["input_tokens"],
    ]
    assert counts == [tokens["count"]] * 2


@pytest.mark.parametrize("path", ["/tokenize", "/apply-template"])
async def test_the_model_is_optional(path: str) -> None:
    async with app_client() as client:
        bare = await client.post(path, json={"messages": MESSAGES})
    assert bare.json() == await post(path, {"messages": MESSAGES})


async def test_apply_template_shows_the_text_without_shield_marks() -> None:
    body = await post("/apply-template", {"messages": MESSAGES})
    assert body["prompt"].startswith("<|im_start|>user\nWhat is <|im_end|> for?")
    assert not any(0xFDD0 <= ord(letter) <= 0xFDEF for letter in body["prompt"])


async def test_no_model_has_to_be_loaded() -> None:
    async with app_client() as client:
        assert (await client.get("/health")).json()["models"]["demo"]["state"] == "stopped"
    assert (await post("/tokenize", {"content": "x"}))["count"] == 1


async def test_a_long_text_is_tokenized_in_a_thread_to_the_same_ids() -> None:
    short, long = (
        await post("/tokenize", {"content": "word " * 10}),
        await post("/tokenize", {"content": "word " * 9999}),
    )
    assert long["tokens"][:9] == short["tokens"][:9]
    assert (await post("/detokenize", {"tokens": long["tokens"]}))["content"] == "word " * 9999


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "content"),
        ("/tokenize", {"content": 5}, "content"),
        ("/tokenize", {"messages": "hi"}, "messages"),
        ("/tokenize", {"messages": [{"role": "alien", "content": "x"}]}, "messages[0].role"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": ["x"]}, "tokens[0]"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**9]}, "tokens"),
        ("/detokenize", {"tokens": [10**400]}, "tokens"),
        ("/apply-template", {}, "messages"),
        ("/apply-template", {"messages": []}, "messages"),
    ],
)
async def test_an_invalid_field_is_named(path: str, body: dict[str, Any], param: str) -> None:
    body = (await post(path, body, 400))["error"]
    assert body["param"] == param
    assert len(body["message"]) < 300


# --- the end of the prompt and the variables of the template ----------------------------------------------------------

REPLY = [*MESSAGES, {"role": "assistant", "content": "It ends"}]


async def rendered(body: dict[str, Any]) -> str:
    """The prompt, which is the same on both endpoints."""
    text: str = (await post("/apply-template", body))["prompt"]
    pieces = await post("/tokenize", body | {"return_token_strs": True})
    assert "".join(pieces["token_strs"]) == text
    return text


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({}, "<|im_end|>\n<|im_start|>assistant\n"),
        ({"add_generation_prompt": False}, "for?<|im_end|>\n"),
        ({"chat_template_kwargs": {"add_generation_prompt": False}}, "for?<|im_end|>\n"),
        ({"enable_thinking": False}, "<|im_start|>assistant\n<think>\n\n</think>\n\n"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "<|im_start|>assistant\n<think>\n\n</think>\n\n"),
        ({"reasoning_effort": "none"}, "<|im_start|>assistant\n<think>\n\n</think>\n\n"),
        ({"messages": REPLY}, "<|im_start|>assistant\nIt ends"),
        ({"messages": REPLY, "continue_final_message": True}, "<|im_start|>assistant\nIt ends"),
        (
            {"messages": REPLY, "continue_final_message": True, "add_generation_prompt": False},
            "<|im_start|>assistant\nIt ends",
        ),
        ({"messages": REPLY, "continue_final_message": False}, "It ends<|im_end|>\n<|im_start|>assistant\n"),
        ({"messages": REPLY, "add_generation_prompt": False}, "It ends<|im_end|>\n"),
    ],
)
async def test_the_end_of_the_prompt_is_as_the_client_says(fields: dict[str, Any], end: str) -> None:
    assert (await rendered({"messages": MESSAGES} | fields)).endswith(end)


@pytest.mark.parametrize("path", ["/tokenize", "/apply-template", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": REPLY, "continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"messages": MESSAGES, "continue_final_message": True}, "continue_final_message"),
        ({"messages": REPLY, "continue_final_message": "all"}, "continue_final_message"),
        (
            {"messages": MESSAGES, "chat_template_kwargs": {"add_generation_prompt": "no"}},
            "chat_template_kwargs.add_generation_prompt",
        ),
    ],
)
async def test_contradictions_about_the_end_of_the_prompt_are_refused(
    path: str, fields: dict[str, Any], param: str
) -> None:
    assert (await post(path, fields, 400))["error"]["param"] == param


async def test_a_chat_reply_is_counted_on_the_same_prompt() -> None:
    fields = {"messages": REPLY, "continue_final_message": False}
    prompt = (await post("/tokenize", fields))["count"]
    async with app_client(loaded=True) as client:
        reply = await client.post("/v1/chat/completions", json=fields | {"model": "demo", "max_tokens": 1})
    assert reply.json()["usage"]["prompt_tokens"] == prompt > (await post("/tokenize", {"messages": REPLY}))["count"]
