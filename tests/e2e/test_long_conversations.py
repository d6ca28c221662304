"""Threads, compaction, context management and fallbacks with the vendors' SDKs. The model is scripted: its answer shows
what it read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from anthropic import Anthropic
from openai import OpenAI

from tests.live_server import LiveServer, live_server

SUMMARY = "Ada hid the key under the mat."
SCRIPT: list[dict[str, Any]] = [
    {"when": "^Summarize this conversation|^Sum it up", "steps": [{"text": SUMMARY}]},
    {"when": f"(?s)Summary of the conversation.*{SUMMARY}", "steps": [{"text": "I read the summary."}]},
    {"when": "^mute", "steps": [{"call": {"name": "look", "arguments": {}}}]},
    {"when": "^silent", "steps": [{"think": "Hm."}]},
    {"steps": [{"text": "Noted."}]},
]
TALK: list[Any] = [
    {"role": "user", "content": "The key is under the mat. " * 20},
    {"role": "assistant", "content": "Noted."},
    {"role": "user", "content": "And who hid it?"},
]
LOOK: Any = {"name": "look", "description": "Look.", "input_schema": {"type": "object", "properties": {}}}
COMPACT: Any = {"type": "compact_20260112", "trigger": {"type": "input_tokens", "value": 50}}


def fake(**more: Any) -> dict[str, Any]:
    return {"backend": "fake", "token_delay": 0, "script": SCRIPT, **more}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    models = {
        "demo": fake(n_ctx=4096),
        "small": fake(n_ctx=256),
        "broken": fake(script=[{"steps": [{"fail": "out of order", "kind": "unavailable"}]}]),
    }
    keys = [
        {"name": "ada", "key": "sk-ada"},
        {"name": "bob", "key": "sk-bob", "models": ["demo"]},
        {"name": "poor", "key": "sk-poor", "token_budget": 750},
    ]
    routes = [{"match": "patient", "model": "small", "auto_compact": True}]
    with live_server({"models": models, "keys": keys, "routes": routes}) as running:
        yield running


@pytest.fixture
def claude(server: LiveServer) -> Iterator[Anthropic]:
    with Anthropic(base_url=server.url, api_key="sk-ada", max_retries=0) as client:
        yield client


@pytest.fixture
def gpt(server: LiveServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=server.url + "/v1", api_key="sk-ada", max_retries=0) as client:
        yield client


def messages(client: Anthropic, sent: list[Any], **more: Any) -> Any:
    return client.beta.messages.create(model="demo", max_tokens=100, messages=sent, **more)


# --- threads ----------------------------------------------------------------------------------------------------------


def test_a_thread_holds_the_conversation_with_its_system_prompt_and_tools(claude: Anthropic) -> None:
    thread = claude.beta.messages.thread(model="demo", max_tokens=100, system="Be brief. " * 30, tools=[LOOK])
    first = thread.send({"role": "user", "content": "The key is under the mat."})
    second = thread.send({"role": "user", "content": "Thanks."})
    assert thread.previous_message_id == second.id
    read = [reply.usage.input_tokens + (reply.usage.cache_read_input_tokens or 0) for reply in (first, second)]
    assert read[1] > read[0] + 5
    with thread.stream({"role": "user", "content": "mute"}) as stream:
        assert stream.get_final_message().stop_reason == "tool_use"
    assert thread.previous_message_id != second.id


def test_a_thread_that_does_not_exist_or_is_another_keys_is_a_404(server: LiveServer, claude: Anthropic) -> None:
    known = messages(claude, TALK, thread={"type": "create"}).id
    bob = Anthropic(base_url=server.url, api_key="sk-bob", max_retries=0)
    for client, id in ((claude, "msg_nobody"), (bob, known)):
        with pytest.raises(anthropic.NotFoundError) as raised:
            messages(client, TALK[2:], thread={"type": "continue", "previous_message_id": id})
        body: Any = raised.value.body
        assert body["error"]["details"] == {"error_code": "thread_not_found"}
        assert id in body["error"]["message"]
    answered = messages(claude, TALK[2:], thread={"type": "continue", "previous_message_id": known})
    assert answered.stop_reason == "end_turn"
    with httpx.Client(base_url=server.url, headers={"authorization": "Bearer sk-ada"}) as client:
        assert client.get(f"/v1/responses/{known}").status_code == 404
    with pytest.raises(anthropic.BadRequestError, match="system prompt and the tools"):
        messages(claude, TALK, system="x", thread={"type": "continue", "previous_message_id": known})


def test_a_reply_without_a_thread_is_not_kept(claude: Anthropic) -> None:
    reply = messages(claude, TALK)
    with pytest.raises(anthropic.NotFoundError):
        messages(claude, TALK, thread={"type": "continue", "previous_message_id": reply.id})


# --- compaction -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [{}, {"instructions": "Sum it up in a line."}])
def test_a_compaction_request_gets_a_block_that_stands_for_the_conversation(claude: Anthropic, more: Any) -> None:
    reply = messages(claude, TALK, tools=[LOOK], compaction={"type": "summarize", **more})
    (block,) = reply.content
    assert (reply.stop_reason, block.type, block.content) == ("compaction", "compaction", SUMMARY)
    after = messages(claude, [*TALK, {"role": "assistant", "content": [block]}, {"role": "user", "content": "Go on"}])
    plain = messages(claude, [{"role": "user", "content": "Go on"}])
    assert after.usage.input_tokens < plain.usage.input_tokens + 40  # nothing before the block was read
    only = messages(claude, [{"role": "user", "content": [block.to_dict()]}])
    assert only.content[0].text == "I read the summary."


def test_a_long_conversation_is_compacted_within_the_answer(claude: Anthropic) -> None:
    edits = {"edits": [COMPACT]}
    with claude.beta.messages.stream(model="demo", max_tokens=100, messages=TALK, context_management=edits) as stream:  # type: ignore[arg-type]
        reply: Any = stream.get_final_message()
    assert [block.type for block in reply.content] == ["compaction", "text"]
    assert (reply.content[0].content, reply.stop_reason) == (SUMMARY, "end_turn")
    assert [iteration.type for iteration in reply.usage.iterations] == ["compaction", "message"]
    paused = messages(claude, TALK, context_management={"edits": [COMPACT | {"pause_after_compaction": True}]})
    assert (len(paused.content), paused.stop_reason) == (1, "compaction")
    short = messages(claude, TALK[2:], context_management=edits)
    assert [block.type for block in short.content] == ["text"]
    with pytest.raises(anthropic.BadRequestError, match="not both"):
        messages(claude, TALK, context_management=edits, compaction={"type": "summarize"})


def test_codexs_trigger_and_a_threshold_give_a_compaction_item(gpt: OpenAI) -> None:
    trigger: list[Any] = [*TALK, {"type": "compaction_trigger"}]
    reply: Any = gpt.responses.create(model="demo", input=trigger)
    (item,) = reply.output
    assert (item.type, reply.status) == ("compaction", "completed")
    with gpt.responses.stream(model="demo", input=trigger) as stream:
        names = [event.type for event in stream]
        assert stream.get_final_response().output[0].type == "compaction"
    assert "response.compaction.compacting" in names
    after = gpt.responses.create(model="demo", input=[*trigger, item.to_dict()])
    assert after.output_text == "I read the summary."
    edits: Any = [{"type": "compaction", "compact_threshold": 50}]
    first: Any = gpt.responses.create(model="demo", input=TALK, context_management=edits)
    assert [item.type for item in first.output] == ["compaction", "message"]
    second = gpt.responses.create(model="demo", input="Go on", previous_response_id=first.id)
    assert second.usage is not None
    assert second.usage.input_tokens < 100  # the summary and the answer, not the conversation


def test_a_conversation_longer_than_the_window_is_summarised_piece_by_piece(gpt: OpenAI) -> None:
    talk: list[Any] = [{"role": "user", "content": f"The key number {n} is under the mat. " * 8} for n in range(12)]
    compacted: Any = gpt.responses.compact(model="small", input=talk)
    assert compacted.output[-1].type == "compaction"
    assert compacted.usage.output_tokens > 20  # several summaries


def test_old_results_and_reasoning_are_cleared_and_the_reply_says_so(claude: Anthropic) -> None:
    talk: list[Any] = [{"role": "user", "content": "Look around."}]
    for n in range(4):
        call = {"type": "tool_use", "id": f"toolu_{n}", "name": "look", "input": {}}
        thought = {"type": "thinking", "thinking": "Hm. " * 20, "signature": ""}
        result = {"type": "tool_result", "tool_use_id": f"toolu_{n}", "content": "A mat. " * 40}
        talk += [{"role": "assistant", "content": [thought, call]}, {"role": "user", "content": [result]}]
    uses = {"type": "clear_tool_uses_20250919", "trigger": {"type": "tool_uses", "value": 2}}
    keep = {"keep": {"type": "tool_uses", "value": 1}}
    thinking = {"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 1}}
    whole = messages(claude, talk, tools=[LOOK])
    reply = messages(claude, talk, tools=[LOOK], context_management={"edits": [thinking, uses | keep]})
    by_thinking, by_uses = reply.context_management.applied_edits
    assert (by_thinking.cleared_thinking_turns, by_uses.cleared_tool_uses) == (3, 3)
    assert reply.usage.input_tokens < whole.usage.input_tokens - by_uses.cleared_input_tokens // 2
    assert messages(claude, TALK, context_management={"edits": [uses]}).context_management.applied_edits == []


# --- auto_compact of a route ------------------------------------------------------------------------------------------


def test_a_route_summarises_the_oldest_turns_once_in_place_of_an_overflow(server: LiveServer) -> None:
    talk: list[Any] = []
    for n in range(8):
        talk += [
            {"role": "user", "content": f"Key {n} is under the mat. " * 5},
            {"role": "assistant", "content": "So."},
        ]
    talk.append({"role": "user", "content": "Go on"})
    body = {"model": "patient", "messages": talk, "max_tokens": 20}
    with httpx.Client(base_url=server.url, headers={"authorization": "Bearer sk-ada"}) as client:
        refused = client.post("/v1/chat/completions", json=body | {"model": "small"})
        assert refused.json()["error"]["code"] == "context_length_exceeded"
        used = spent(client)
        reply = client.post("/v1/chat/completions", json=body)
        assert reply.status_code == 200, reply.text
        assert reply.json()["choices"][0]["message"]["content"] == "Noted."
        assert reply.headers["x-modelyard-compacted"].startswith("messages=")
        first = spent(client) - used
        longer = [*talk, {"role": "assistant", "content": "Noted."}, {"role": "user", "content": "And now?"}]
        used = spent(client)
        again = client.post("/v1/chat/completions", json=body | {"messages": longer, "stream": True})
        assert (
            again.headers["x-modelyard-compacted"].split(";")[0] == reply.headers["x-modelyard-compacted"].split(";")[0]
        )
        assert spent(client) - used < first  # the summary is kept
        single = client.post(
            "/v1/chat/completions", json=body | {"messages": [{"role": "user", "content": "x " * 900}]}
        )
        assert single.json()["error"]["code"] == "context_length_exceeded"


def spent(client: httpx.Client) -> int:
    """Tokens that were evaluated so far."""
    lines = client.get("/metrics").text.splitlines()
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith("modelyard_prompt_tokens_total"))


def test_a_summary_counts_against_the_budget_of_its_key(server: LiveServer) -> None:
    poor = Anthropic(base_url=server.url, api_key="sk-poor", max_retries=0)

    def compact(more: str) -> Any:
        return messages(poor, [*TALK, {"role": "user", "content": more}], compaction={"type": "summarize"})

    assert compact("1").stop_reason == compact("2").stop_reason == "compaction"
    with pytest.raises(anthropic.APIStatusError, match="budget"):
        compact("3")


def test_a_model_that_writes_no_summary_is_an_error(claude: Anthropic) -> None:
    for tools in ([], [LOOK]):
        with pytest.raises(anthropic.BadRequestError, match="wrote no summary"):
            messages(claude, TALK, tools=tools, compaction={"type": "summarize", "instructions": "silent"})


# --- tools that come and go -------------------------------------------------------------------------------------------


def test_tools_that_items_bring_are_offered_from_there_on(gpt: OpenAI) -> None:
    look = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}
    found: Any = {"type": "tool_search_output", "call_id": "s1", "execution": "client", "tools": [look]}
    search: Any = {"type": "tool_search_call", "call_id": "s1", "execution": "client", "arguments": {"q": "look"}}
    more: Any = {"type": "additional_tools", "role": "developer", "tools": [look]}
    effort: Any = {"type": "configuration_update", "reasoning": {"effort": "low"}}
    ask: Any = {"role": "user", "content": "mute"}
    for brought in ([search, found], [more], [effort, more]):
        raw = gpt.responses.with_raw_response.create(model="demo", input=[TALK[2], *brought, ask])
        assert "x-modelyard-ignored" not in raw.headers
        (call,) = raw.parse().output
        assert (call.type, getattr(call, "name", "")) == ("function_call", "look")


def test_a_tool_that_was_added_can_be_called_until_it_is_removed(claude: Anthropic) -> None:
    added: Any = {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": LOOK}}
    removed: Any = {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "look"}}
    talk = [*TALK, {"role": "system", "content": [added]}]
    ask = {"role": "user", "content": "mute"}
    assert messages(claude, [*talk, ask]).stop_reason == "tool_use"
    assert messages(claude, [*talk, {"role": "system", "content": [removed]}, ask]).stop_reason == "end_turn"
    once = {"role": "system", "content": "Only now. " * 50, "clear_at": "next_user_message"}
    shown, cleared = messages(claude, [*TALK, once]).usage, messages(claude, [once, *TALK]).usage
    assert shown.input_tokens + shown.cache_read_input_tokens > cleared.input_tokens + 50


# --- fallbacks --------------------------------------------------------------------------------------------------------


def test_the_models_that_a_client_names_answer_where_the_first_cannot(server: LiveServer, claude: Anthropic) -> None:
    given: Any = {"model": "broken", "max_tokens": 9, "messages": TALK[2:], "fallbacks": [{"model": "demo"}]}
    raw = claude.beta.messages.with_raw_response.create(**given)
    assert raw.parse().model == "demo"
    assert raw.headers["x-modelyard-fallback"].startswith("from=broken")
    bob = Anthropic(base_url=server.url, api_key="sk-bob", max_retries=0)
    with pytest.raises(anthropic.APIStatusError):
        bob.beta.messages.create(**given | {"model": "demo2", "fallbacks": [{"model": "small"}]})
    with pytest.raises(anthropic.PermissionDeniedError):
        bob.beta.messages.create(**given | {"fallbacks": [{"model": "small"}]})


def test_an_unknown_model_among_the_fallbacks_is_named(claude: Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="nobody"):
        messages(claude, TALK, fallbacks=[{"model": "nobody"}])


def test_openais_errors_of_a_compaction_are_its_own(gpt: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="nothing to summarize"):
        gpt.responses.create(
            model="demo", instructions="x", input=[{"role": "system", "content": "y"}, {"type": "compaction_trigger"}]
        )  # type: ignore[list-item, misc]
