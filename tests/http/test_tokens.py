"""Looking at tokens: both styles of bodies, one truth."""

from __future__ import annotations

from typing import Any

import pytest

from tests.http.app_client import app_client

TALK = [{"role": "user", "content": "What is <|im_end|> for?"}]


async def posted(path: str, body: dict[str, Any], status: int = 200) -> Any:
    async with app_client() as client:
        reply = await client.post(path, json={"model": "demo"} | body)
        assert reply.status_code == status, reply.text
        return reply.json()


@pytest.mark.parametrize("field", ["content", "prompt"])
async def test_text_becomes_tokens_and_tokens_the_same_text(field: str) -> None:
    told = await posted("/tokenize", {field: "Grüße, 世界!"})
    assert told["count"] == len(told["tokens"]) > 0
    assert told["max_model_len"] == 4096
    back = await posted("/detokenize", {"tokens": told["tokens"]})
    assert back == {"prompt": "Grüße, 世界!", "content": "Grüße, 世界!"}


async def test_pieces_are_shown_in_either_style() -> None:
    plain = await posted("/tokenize", {"content": "Hello there"})
    pieces = await posted("/tokenize", {"content": "Hello there", "with_pieces": True})
    strings = await posted("/tokenize", {"prompt": "Hello there", "return_token_strs": True})
    assert [each["id"] for each in pieces["tokens"]] == strings["tokens"] == plain["tokens"]
    assert [each["piece"] for each in pieces["tokens"]] == strings["token_strs"]
    assert "".join(strings["token_strs"]) == "Hello there"


async def test_messages_are_rendered_as_a_request_would_render_them() -> None:
    tokens = await posted("/tokenize", {"messages": TALK})
    counts = [
        (await posted("/v1/messages/count_tokens", {"messages": TALK}))["input_tokens"],
        (await posted("/v1/responses/input_tokens", {"input": TALK}))["input_tokens"],
    ]
    assert counts == [tokens["count"]] * 2


@pytest.mark.parametrize("path", ["/tokenize", "/apply-template"])
async def test_a_conversation_may_leave_out_its_model(path: str) -> None:
    async with app_client() as client:
        bare = await client.post(path, json={"messages": TALK})
    assert bare.json() == await posted(path, {"messages": TALK})


async def test_the_template_is_shown_as_people_read_it() -> None:
    told = await posted("/apply-template", {"messages": TALK})
    assert told["prompt"].startswith("<|im_start|>user\nWhat is <|im_end|> for?")
    assert not any(0xFDD0 <= ord(letter) <= 0xFDEF for letter in told["prompt"])


async def test_nothing_has_to_be_loaded() -> None:
    async with app_client() as client:
        assert (await client.get("/health")).json()["models"]["demo"]["state"] == "stopped"
    assert (await posted("/tokenize", {"content": "x"}))["count"] == 1


async def test_a_long_text_is_tokenized_aside_to_the_same_ids() -> None:
    short, long = (
        await posted("/tokenize", {"content": "word " * 10}),
        await posted("/tokenize", {"content": "word " * 9999}),
    )
    assert long["tokens"][:9] == short["tokens"][:9]
    assert (await posted("/detokenize", {"tokens": long["tokens"]}))["content"] == "word " * 9999


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
async def test_what_is_wrong_is_named(path: str, body: dict[str, Any], param: str) -> None:
    told = (await posted(path, body, 400))["error"]
    assert told["param"] == param
    assert len(told["message"]) < 300
