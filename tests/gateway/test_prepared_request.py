"""A prepared request fits its window, is scoped to its key, and has one prompt per choice."""

from __future__ import annotations

import base64
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from modelyard.config.load import load_config
from modelyard.core.engine import Media
from modelyard.core.errors import ContextOverflow, OutputOverflow
from modelyard.core.request import (
    Caller,
    Constraint,
    Image,
    Message,
    Request,
    Sampling,
    Text,
    Tool,
    ToolCall,
    ToolResult,
)
from modelyard.gateway.prepared_request import (
    OutputBudget,
    PreparedRequest,
    RenderedPrompt,
    background_task_id,
    output_budget,
    priority,
)
from modelyard.protocols import anthropic_messages, openai_chat, openai_responses
from modelyard.router.router import Target
from modelyard.server.model_definition import define_model
from tests.gateway.harness import CALLER, GatewayHarness, make_request, model
from tests.live_server import demo_config


def prepare(request: Request, key: str = "", prompts: int = 1) -> PreparedRequest:
    return PreparedRequest(
        request=request,
        caller=Caller(trace="t", endpoint="/v1/completions", key=key),
        target=Target("demo", "main", 4096),
        model=model(),
        prompts=tuple(RenderedPrompt([number] * 3, "", OutputBudget(5, "max_tokens")) for number in range(prompts)),
        sampling=request.sampling,
        constraint=None,
        created=0,
        tokenize_s=0.0,
        priority=request.priority or "main",
    )


@pytest.mark.parametrize(("key", "shared", "scope"), [("", False, ""), ("ann", False, "ann"), ("ann", True, "")])
def test_kv_is_scoped_by_api_key_unless_the_cache_is_shared(key: str, shared: bool, scope: str) -> None:
    prepared = replace(prepare(make_request(), key), target=Target("demo", "main", 4096, share_across_keys=shared))
    assert (prepared.engine_prompt(0).scope, prepared.engine_request(0).kv_scope) == (scope, scope)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "strict", "budget"),
    [
        (10, None, False, OutputBudget(90, "window")),
        (10, 5, False, OutputBudget(5, "max_tokens")),
        (10, 90, False, OutputBudget(90, "max_tokens")),
        (10, 91, False, OutputBudget(90, "window")),
        (10, 90, True, OutputBudget(90, "max_tokens")),
        (10, None, True, OutputBudget(90, "window")),
        (99, 32_000, False, OutputBudget(1, "window")),
    ],
)
def test_max_tokens_is_clamped_to_the_window(
    prompt: int, max_tokens: int | None, strict: bool, budget: OutputBudget
) -> None:
    assert output_budget(prompt, max_tokens, 100, strict) == budget


@pytest.mark.parametrize("prompt", [100, 101, 10**9])
@pytest.mark.parametrize("strict", [False, True])
def test_a_prompt_without_room_for_output_overflows_with_exact_numbers(prompt: int, strict: bool) -> None:
    with pytest.raises(ContextOverflow) as caught:
        output_budget(prompt, 1, 100, strict)
    assert (caught.value.prompt_tokens, caught.value.window) == (prompt, 100)


def test_a_strict_window_refuses_instead_of_clamping() -> None:
    with pytest.raises(OutputOverflow) as caught:
        output_budget(10, 91, 100, strict=True)
    assert (caught.value.prompt_tokens, caught.value.max_tokens, caught.value.window) == (10, 91, 100)


@given(st.integers(0, 200), st.none() | st.integers(1, 200), st.integers(1, 200))
def test_the_output_budget_exceeds_neither_the_window_nor_max_tokens(
    prompt: int, max_tokens: int | None, window: int
) -> None:
    try:
        budget = output_budget(prompt, max_tokens, window, strict=False)
    except ContextOverflow:
        assert prompt >= window
        return
    assert 1 <= budget.max_tokens <= window - prompt
    assert max_tokens is None or budget.max_tokens <= max_tokens
    assert (budget.limit == "max_tokens") == (budget.max_tokens == max_tokens)


def test_a_lease_request_has_the_weight_of_its_choices_and_its_tokens() -> None:
    lease_request = prepare(make_request(n=3), key="ann", prompts=2).lease_request()
    assert (
        lease_request.model,
        lease_request.cache,
        lease_request.weight,
        lease_request.tokens,
        lease_request.key,
    ) == ("demo", "main", 6, 6, "ann")
    assert (lease_request.priority, lease_request.trace) == ("main", "t")


def test_equal_session_names_of_two_keys_are_different_sessions() -> None:
    ann, bob = (prepare(make_request(session="s"), key=key) for key in ("ann", "bob"))
    assert ann.lease_request().session != bob.lease_request().session
    assert ann.engine_prompt(0).session == ann.lease_request().session
    assert prepare(make_request(), key="ann").lease_request().session is None


def test_background_requests_of_a_session_have_a_different_session_key() -> None:
    main, side = (prepare(make_request(session="s", priority=how), key="ann") for how in ("main", "background"))
    assert main.session_key() == "ann/s"
    assert side.session_key() != main.session_key()
    assert side.lease_request().session == side.engine_prompt(0).session == side.session_key()
    assert (side.lease_request().priority, side.engine_prompt(0).priority) == ("background", "background")


def test_choices_are_numbered_prompt_by_prompt() -> None:
    two = prepare(make_request(n=2), prompts=2)
    assert two.choices == 4
    assert [two.engine_prompt(choice).ids[0] for choice in range(4)] == [0, 0, 1, 1]


def test_seeds_of_choices_differ_and_repeat_per_prompt() -> None:
    seeded = prepare(make_request(n=3, sampling=Sampling(seed=7, temperature=0.5)), prompts=2)
    assert [seeded.engine_prompt(choice).sampling.seed for choice in range(6)] == [7, 8, 9, 7, 8, 9]
    assert {seeded.engine_prompt(choice).sampling.temperature for choice in range(6)} == {0.5}
    assert prepare(make_request(n=2)).engine_prompt(1).sampling.seed is None


@pytest.mark.parametrize(
    ("request_fields", "prompt_field", "value"),
    [
        ({"priority": "background"}, "priority", "background"),
        ({"lora_adapter": "pirate"}, "adapters", (("pirate", 1.0),)),
        ({"logprobs": 2}, "logprobs", 2),
    ],
)
def test_request_fields_reach_the_engine_prompt(request_fields: Any, prompt_field: str, value: object) -> None:
    prompt = prepare(make_request(**request_fields)).engine_prompt(0)
    assert getattr(prompt, prompt_field) == value
    assert (prompt.max_tokens, prompt.cache, prompt.stop_ids) == (5, "main", model().pipeline.stop_ids)


def test_a_chat_engine_gets_the_request_of_one_choice_with_the_defaults_of_the_model() -> None:
    request = make_request(n=3, stop=("END",), sampling=Sampling(seed=7))
    settled = replace(
        prepare(request),
        model=replace(model(), entry=replace(model().entry, stop=("STOP",), max_tokens=11)),
        sampling=Sampling(seed=7),
    )
    first, second = settled.engine_request(0), settled.engine_request(1)
    assert (first.n, first.stop, first.max_tokens) == (1, ("STOP", "END"), 11)
    assert (first.sampling.seed, second.sampling.seed) == (7, 8)
    assert prepare(make_request(max_tokens=5)).engine_request(0).max_tokens == 5


SEEING = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)
PICTURE = "data:image/png;base64," + base64.b64encode(b"a picture").decode()


def test_images_are_sent_after_the_tokens_if_the_template_writes_a_placeholder() -> None:
    loaded = load_config(env={}, overrides=demo_config(modalities=["text", "image"], chat_template=SEEING)).config
    seeing = define_model(loaded.router().catalog.models["demo"])
    request = make_request(messages=(Message("user", (Text("look"), Image(PICTURE))),))
    prepared = replace(prepare(request), model=seeing).engine_prompt(0)
    assert [each.data for each in prepared.parts if isinstance(each, Media)] == [b"a picture"]
    assert prepared.ids == [0, 0, 0]


def test_images_are_not_sent_to_a_text_only_model() -> None:
    prepared = prepare(make_request(messages=(Message("user", (Text("look"), Image(PICTURE))),))).engine_prompt(0)
    assert len(prepared.parts) == 1


@pytest.mark.parametrize(
    ("sampling", "caller", "name"),
    [
        ({"temperature": 0}, {}, "('ann', 1, None)"),
        ({"temperature": 0}, {"idempotency": "x"}, "('ann', 1, None)"),
        ({"temperature": 0.8, "seed": 3}, {}, "('ann', 1, None)"),
        ({"temperature": 0.8}, {"idempotency": "x"}, "('ann', 1, 'x')"),
        ({"temperature": 0.8}, {}, None),
        ({"temperature": 0}, {"deadline": 4e9}, None),
    ],
)
def test_only_deterministic_requests_have_a_dedup_key(sampling: Any, caller: Any, name: str | None) -> None:
    prepared = prepare(make_request(n=2, sampling=Sampling(**sampling)), key="ann")
    assert replace(prepared, caller=replace(prepared.caller, **caller)).engine_prompt(1).dedup_key == name


SCHEMA = Constraint("json_schema", '{"type": "object"}')
BASH, SEARCH = Tool("Bash"), Tool("web_search", kind="server", type="web_search_20250305")


def messages(*turns: tuple[Any, str]) -> tuple[Message, ...]:
    return tuple(Message(role, (Text(text),)) for role, text in turns)


def messages_with_tool_call() -> tuple[Message, ...]:
    called = Message("assistant", (ToolCall("c1", "Bash", "{}"),))
    return (
        *messages(("user", "list")),
        called,
        Message("tool", (ToolResult("c1", (Text("a"),)),)),
        *messages(("user", "now")),
    )


def request(**fields: Any) -> Request:
    return Request(**{"model": "local", "session": "s", "messages": messages(("user", "hi"))} | fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": (BASH,)},
        {"tools": (BASH,), "model": "claude-haiku-4-5"},
        {"tools": (BASH,), "constraint": SCHEMA},
        {"tools": (BASH, SEARCH)},
        {"tools": (BASH,), "messages": messages_with_tool_call()},
        {},
        {"stop": ("END",), "max_tokens": 64, "stream": True},
        {"stop": ("END",), "max_tokens": 32000},
        {"constraint": SCHEMA, "session": None},
        {"constraint": SCHEMA, "messages": messages(("user", "a"), ("assistant", "{}"), ("user", "b"))},
        {"messages": messages(("system", "You are an expert coder. " * 20 + "Write titles."), ("user", "hi"))},
        {"messages": messages(("user", "Write a title for my novel."))},
        {"model": "haikus-by-me"},
        {"model": "claude-haiku-4-5", "priority": "main"},
        {"model": ""},
        {"messages": ()},
    ],
)
def test_conversations_have_main_priority(fields: dict[str, Any]) -> None:
    assert priority(request(**fields)) == "main"


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": (BASH,), "priority": "background"},
        {"model": "claude-haiku-4-5"},
        {"model": "local-haiku", "session": None},
        {"messages": messages_with_tool_call()},
        {"tools": (SEARCH,), "messages": messages(("user", "Perform a web search for: x"))},
        {"constraint": SCHEMA},
        {"constraint": SCHEMA, "messages": messages(("system", "Name it."), ("user", "hi"), ("system", "env"))},
        {"stop": ("</block>",), "max_tokens": 64, "messages": messages(("system", "x" * 99_999), ("user", "rm -rf /"))},
        {"stop": ("</block>",), "max_tokens": 2112, "messages": messages(("user", "rm"), ("assistant", "<block>"))},
        {"messages": messages(("system", "You are a title generator. Output ONLY a title."), ("user", "hi"))},
        {"messages": messages(("developer", "Summarize the conversation."), ("user", "hi"))},
    ],
)
def test_side_requests_have_background_priority(fields: dict[str, Any]) -> None:
    assert priority(request(**fields)) == "background"


def test_background_tasks_of_one_kind_share_an_id() -> None:
    title, again, verdict = (
        request(messages=messages(("system", system), ("user", user)))
        for system, user in (("Title.", "a"), ("Title.", "b"), ("Block or not?", "a"))
    )
    assert background_task_id(title) == background_task_id(again) != background_task_id(verdict)
    assert background_task_id(request(messages=messages(("user", "\udc80")))) == background_task_id(
        request(messages=())
    )
    assert background_task_id(request(messages=messages(("system", "\udc80")))) != background_task_id(request())


# --- bodies of real agents --------------------------------------------------------------------------------------------

_TURN = [{"role": "user", "content": "fix the tests"}]
_FORMAT = {"type": "json_schema", "name": "title", "schema": {"type": "object"}, "strict": True}
_HEADERS = {"x-claude-code-session-id": "s1"}
_FUNCTION = {"type": "function", "name": "shell", "parameters": {"type": "object"}}

CASES: dict[str, tuple[Any, dict[str, str], dict[str, Any], str]] = {
    "Claude Code's title": (
        anthropic_messages,
        _HEADERS,
        {"messages": _TURN, "stream": True, "output_config": {"format": {"type": "json_schema", "schema": {}}}},
        "background",
    ),
    "Claude Code's classifier": (
        anthropic_messages,
        _HEADERS,
        {
            "model": "claude-sonnet-5",
            "system": "x" * 5000,
            "messages": _TURN,
            "max_tokens": 64,
            "stop_sequences": ["</block>"],
            "thinking": {"type": "disabled"},
        },
        "background",
    ),
    "Claude Code's web search": (
        anthropic_messages,
        _HEADERS,
        {"messages": _TURN, "stream": True, "tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        "background",
    ),
    "Claude Code's conversation": (
        anthropic_messages,
        _HEADERS,
        {"messages": _TURN, "stream": True, "tools": [{"name": "Bash", "input_schema": {"type": "object"}}]},
        "main",
    ),
    "Codex's title": (
        openai_responses,
        {"session-id": "t1", "thread-id": "t1"},
        {"input": "fix the tests", "stream": True, "tools": [], "text": {"format": _FORMAT}},
        "background",
    ),
    "Codex's summary": (
        openai_responses,
        {"session-id": "s1", "thread-id": "s1"},
        {
            "input": [
                {"type": "message", "role": "user", "content": "fix"},
                {"type": "function_call", "call_id": "c", "name": "shell", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "ok"},
                {"type": "message", "role": "user", "content": "You are performing a CONTEXT CHECKPOINT COMPACTION"},
            ],
            "stream": True,
            "tools": [],
        },
        "background",
    ),
    "Codex's conversation": (
        openai_responses,
        {"session-id": "s1", "thread-id": "s1"},
        {"input": "fix the tests", "stream": True, "tools": [_FUNCTION]},
        "main",
    ),
    "opencode's title": (
        openai_chat,
        {"x-session-id": "s1"},
        {"messages": [{"role": "system", "content": "You are a title generator."}, *_TURN], "stream": True},
        "background",
    ),
    "opencode's conversation": (
        openai_chat,
        {"x-session-id": "s1"},
        {"messages": _TURN, "stream": True, "tools": [{"type": "function", "function": {"name": "bash"}}]},
        "main",
    ),
    "aider's conversation": (
        openai_chat,
        {},
        {"messages": [{"role": "system", "content": "Act as an expert software developer."}, *_TURN], "stream": True},
        "main",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_priority_of_requests_of_real_agents(name: str) -> None:
    protocol, headers, body, wanted = CASES[name]
    parsed = protocol.read_request(msgspec.json.encode({"model": "local", "max_tokens": 100} | body), headers)
    assert priority(parsed) == wanted


@pytest.mark.parametrize(("name", "wanted"), [("demo", "main"), ("demo-haiku", "background")])
async def test_priority_reaches_the_queue_and_the_engine(name: str, wanted: str) -> None:
    async with GatewayHarness() as harness:
        prepared = await harness.gateway.prepare(make_request(model=name, session="s"), CALLER)
    assert (prepared.lease_request().priority, prepared.engine_prompt(0).priority) == (wanted, wanted)
