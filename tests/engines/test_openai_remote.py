"""The remote engine: its life, its requests by API, and its errors."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from modelyard.config.load import load_config
from modelyard.config.settings import engine_options
from modelyard.core.engine import (
    AvailableMemory,
    CacheInfo,
    ChatEngine,
    Embeddings,
    EngineSpec,
    ForwardingEngine,
    MemoryEstimate,
    Ranking,
)
from modelyard.core.errors import (
    Cancelled,
    ContextOverflow,
    Incomplete,
    InvalidRequest,
    ModelyardError,
    RateLimited,
    Unavailable,
    Unsupported,
)
from modelyard.core.events import BlockDelta, Event, Failed, Finished, Usage, collect_reply
from modelyard.core.request import (
    Constraint,
    EmbeddingRequest,
    Image,
    Infill,
    Message,
    Reasoning,
    Request,
    RerankRequest,
    Sampling,
    Text,
    Thinking,
    Tool,
    ToolCall,
    ToolResult,
)
from modelyard.engines import openai_remote
from modelyard.engines.openai_remote import APIS, ApiKind, OpenAiRemoteEngine, Options, base_url, chat_body, count_body
from modelyard.protocols.common.reasoning_signature import pack_reasoning
from tests.engines.fake_upstream import Answer, FakeUpstream, chat_stream, error_answer, fake_upstream, json_answer

REQUEST = Request(model="frontier", messages=(Message("user", (Text("Hello"),)),))
KEY = "MODELYARD_TEST_REMOTE_KEY"


def engine(url: str, **options: Any) -> OpenAiRemoteEngine:
    chosen = openai_remote.Options(**{"remote_base_url": url, "remote_model": "theirs"} | options)
    made = openai_remote.create(EngineSpec("frontier", chosen, {"frontier": CacheInfo(4096, 2)}))
    assert isinstance(made, OpenAiRemoteEngine)
    return made


@asynccontextmanager
async def opened(at: FakeUpstream, **options: Any) -> AsyncIterator[OpenAiRemoteEngine]:
    remote = engine(at.url, **options)
    await remote.open(lambda *_: None)
    try:
        yield remote
    finally:
        await remote.close()


async def read(remote: OpenAiRemoteEngine, request: Request = REQUEST) -> list[Event]:
    return [event async for batch in remote.chat(request) for event in batch]


POOL = {
    "engine": {
        "models": {
            "frontier-large": {
                "backend": "openai_remote",
                "model_path": None,
                "remote_api_kind": "chat_completions",
                "remote_base_url": "https://api.example.com/v1",
                "remote_api_key_env": "EXAMPLE_API_KEY",
                "remote_model": "provider-model",
                "remote_timeout_s": 120,
                "remote_health_check": "config_only",
                "remote_max_retries": 0,
                "remote_thinking": "disabled",
                "target_inflight": 1,
                "enabled": False,
            }
        }
    }
}


def test_complete_definition_becomes_options_and_a_request(tmp_path: Path) -> None:
    (tmp_path / "pool.json").write_text(json.dumps(POOL))
    settings = load_config(tmp_path / "pool.json", env={}).config.models["frontier-large"]
    options = engine_options(settings)
    assert options == openai_remote.Options(
        remote_base_url="https://api.example.com/v1",
        remote_api_key_env="EXAMPLE_API_KEY",
        remote_model="provider-model",
        remote_thinking="disabled",
    )
    assert json.loads(chat_body(REQUEST, options, APIS["chat_completions"])) == {
        "model": "provider-model",
        "messages": [{"role": "user", "content": "Hello"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "thinking": {"type": "disabled"},
    }


async def test_remote_engine_is_a_chat_engine_without_memory() -> None:
    remote = engine("http://127.0.0.1:1")
    assert isinstance(remote, ChatEngine)
    assert openai_remote.ENGINE.remote
    assert remote.info.device == "remote"
    assert "top_k" in remote.info.capabilities.ignored
    assert "temperature" not in remote.info.capabilities.ignored
    spec = EngineSpec("m", None, {})
    assert openai_remote.ENGINE.estimate(spec, AvailableMemory(1)) == MemoryEstimate()
    await remote.close()


async def test_answer_arrives_with_its_usage() -> None:
    async with fake_upstream(Answer(body=chat_stream("Hi", " you"))) as upstream, opened(upstream) as remote:
        reply = collect_reply(await read(remote))
    assert reply.text == "Hi you"
    assert (reply.finished.usage.prompt, reply.finished.usage.output) == (3, 2)


@pytest.mark.parametrize(
    ("kind", "headers"),
    [
        ("chat_completions", {"authorization": "Bearer s3cret"}),
        ("responses", {"authorization": "Bearer s3cret"}),
        ("anthropic_messages", {"x-api-key": "s3cret", "anthropic-version": "2023-06-01"}),
        ("gemini", {"authorization": "Bearer s3cret"}),
        ("ollama", {"authorization": "Bearer s3cret"}),
    ],
)
async def test_key_is_sent_in_the_headers_of_the_api(
    kind: str, headers: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY, "s3cret")
    options = {"remote_api_kind": kind, "remote_api_key_env": KEY, "remote_headers": {"x-team": "a"}}
    async with fake_upstream(error_answer(500)) as upstream, opened(upstream, **options) as remote:
        await read(remote)
    assert upstream.requests[0].headers.items() >= (headers | {"x-team": "a"}).items()


async def test_missing_key_fails_the_load() -> None:
    remote = engine("http://127.0.0.1:1", remote_api_key_env="NO_SUCH_VARIABLE_HERE")
    with pytest.raises(InvalidRequest, match="'NO_SUCH_VARIABLE_HERE', which is not set"):
        await remote.open(lambda *_: None)
    await remote.close()


async def test_load_without_health_check_sends_nothing() -> None:
    async with fake_upstream(error_answer(500)) as upstream, opened(upstream):
        pass
    assert upstream.requests == []


async def test_health_check_reads_the_list_of_models(caplog: pytest.LogCaptureFixture) -> None:
    listed = json_answer('{"data": [{"id": "theirs"}]}')
    async with fake_upstream(listed) as upstream, opened(upstream, remote_health_check="models"):
        pass
    assert [(request.method, request.path) for request in upstream.requests] == [("GET", "/models")]
    assert caplog.records == []
    other = json_answer('{"data": []}')
    with caplog.at_level(logging.WARNING):
        async with fake_upstream(other) as upstream, opened(upstream, remote_health_check="models"):
            pass
    assert "does not list the model 'theirs'" in caplog.text


async def test_failed_health_check_fails_the_load() -> None:
    for status in (401, 403, 500, 404):
        async with fake_upstream(error_answer(status)) as upstream:
            remote = engine(upstream.url, remote_health_check="models")
            with pytest.raises(ModelyardError):
                await remote.open(lambda *_: None)
            await remote.close()


async def test_rejected_key_is_an_error_of_the_gateway() -> None:
    async with (
        fake_upstream(error_answer(401, code="invalid_api_key")) as upstream,
        opened(upstream, remote_max_retries=3) as remote,
    ):
        (last,) = await read(remote)
    assert isinstance(last, Failed)
    assert isinstance(last.error, Unavailable)
    assert last.error.code == "upstream_auth_failed"
    assert len(upstream.requests) == 1


async def test_cancel_closes_the_stream_of_the_upstream() -> None:
    async with fake_upstream(Answer(body=chat_stream("Hi")[:1], hangs=True)) as upstream, opened(upstream) as remote:
        generation = remote.chat(REQUEST)
        got: list[Event] = []
        while not any(isinstance(event, BlockDelta) for event in got):
            got += await anext(generation)
        assert remote.stats().running == 1
        generation.cancel()
        got += [event async for batch in generation for event in batch]
        assert remote.stats().running == 0
        async with asyncio.timeout(60):
            await upstream.client_left.wait()
    last = got[-1]
    assert isinstance(last, Failed)
    assert isinstance(last.error, Cancelled)


async def test_close_fails_running_requests() -> None:
    async with fake_upstream(Answer(body=[], hangs=True)) as upstream:
        remote = engine(upstream.url)
        await remote.open(lambda *_: None)
        running = remote.chat(REQUEST)
        await upstream.hanging.wait()
        await remote.close()
        await remote.close()
        (last,) = [event async for batch in running for event in batch]
        assert isinstance(last, Failed)
        assert isinstance(last.error, Unavailable)


async def test_count_is_none_without_a_count_endpoint() -> None:
    async with fake_upstream(error_answer(404)) as upstream:
        async with opened(upstream) as remote:
            assert await remote.count(REQUEST) is None
        assert upstream.requests == []
        async with opened(upstream, remote_api_kind="responses") as remote:
            assert await remote.count(REQUEST) is None


@pytest.mark.parametrize(
    ("kind", "path"), [("responses", "/responses/input_tokens"), ("anthropic_messages", "/v1/messages/count_tokens")]
)
async def test_count_uses_the_count_endpoint(kind: str, path: str) -> None:
    counted = json_answer('{"input_tokens": 42}')
    async with fake_upstream(counted) as upstream, opened(upstream, remote_api_kind=kind) as remote:
        assert await remote.count(REQUEST) == 42
    assert upstream.requests[0].path == path


async def test_failed_count_is_an_error() -> None:
    async with fake_upstream(error_answer(500)) as upstream, opened(upstream, remote_api_kind="responses") as remote:
        with pytest.raises(Unavailable, match="cannot count"):
            await remote.count(REQUEST)


async def test_unreachable_upstream_does_not_lose_the_engine() -> None:
    async with fake_upstream() as upstream:
        pass
    remote = engine(upstream.url)
    await remote.open(lambda *_: None)
    (last,) = await read(remote)
    assert isinstance(last, Failed)
    assert not isinstance(last, Finished)
    assert not remote.lost.done()
    await remote.close()


# The request for each kind of upstream API.

PIXEL = "data:image/png;base64,iVBORw0KGgo="
EVERY_KIND: list[ApiKind] = ["chat_completions", "responses", "anthropic_messages", "gemini", "ollama"]
TOOL_REQUEST = Request(
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


def sent(request: Request = TOOL_REQUEST, kind: ApiKind = "chat_completions", **options: Any) -> dict[str, Any]:
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


def test_google_and_ollama_get_only_what_their_chat_completions_take() -> None:
    tools = (Tool("look", "looks", {"type": "object"}, strict=True),)
    request = replace(
        TOOL_REQUEST, tools=tools, parallel_tool_calls=False, user="ann", logprobs=2, reasoning=Reasoning(enabled=False)
    )
    google = sent(request, "gemini")
    function = {"name": "look", "description": "looks", "parameters": {"type": "object"}}
    assert google == {
        "model": "theirs",
        "messages": [{"role": "user", "content": "Hello"}],
        "tools": [{"type": "function", "function": function}],
        "temperature": 0.5,
        "top_p": 0.8,
        "reasoning_effort": "none",
        "stop": ["END"],
        "max_tokens": 99,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    ollama = sent(request, "ollama")
    assert ollama["seed"] == 7
    assert ollama["reasoning_effort"] == "none"
    assert "top_k" not in ollama
    assert sent(replace(request, reasoning=Reasoning(effort="low")), "ollama")["reasoning_effort"] == "low"


async def test_google_gets_the_signature_of_a_call_back() -> None:
    signature = {"extra_content": {"google": {"thought_signature": "c2ln"}}}
    calls = [{"id": "c1", "function": {"name": "look", "arguments": "{}"}} | signature]
    calls += [{"id": "c2", "function": {"name": "look", "arguments": "{}"}}]  # without an index, as Google sends them
    chunks = [
        {"id": "1", "choices": [{"index": 0, "delta": {"tool_calls": calls}}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": {"prompt_tokens": 3}},
    ]
    stream = [f"data: {json.dumps(chunk)}\n\n".encode() for chunk in chunks]
    async with fake_upstream(Answer(body=stream)) as at, opened(at, remote_api_kind="gemini") as remote:
        reply = collect_reply(await read(remote))
        assert at.requests[0].path == "/v1beta/openai/chat/completions"
    assert [block.part for block in reply.blocks] == [
        Thinking("", "c2ln"),
        ToolCall("c1", "look", "{}"),
        ToolCall("c2", "look", "{}"),
    ]
    assert reply.finished.reason == "tool_calls"
    parts = tuple(block.part for block in reply.blocks)
    (written,) = sent(Request(model="m", messages=(Message("assistant", parts),)), "gemini")["messages"]
    assert [call.get("extra_content") for call in written["tool_calls"]] == [signature["extra_content"], None]
    assert "reasoning_content" not in written


async def test_an_error_of_google_is_in_a_list() -> None:
    def answer(status: int, message: str, **more: Any) -> Answer:
        body = [{"error": {"code": status, "message": message, "status": "NO", **more}}]
        return Answer(status, [json.dumps(body).encode()], {"content-type": "application/json"})

    too_long = "The input token count (12) exceeds the maximum number of tokens allowed (8)."
    delay = {"details": [{"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "36s"}]}
    answers = [answer(400, too_long), answer(429, "quota", **delay)]
    async with fake_upstream(*answers) as at, opened(at, remote_api_kind="gemini") as remote:
        (overflow,) = await read(remote)
        (limited,) = await read(remote)
    assert overflow == Failed(ContextOverflow(12, 8))
    assert limited == Failed(RateLimited("quota", retry_after=36.0))


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
    unlimited = replace(TOOL_REQUEST, max_tokens=None)
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
    request = replace(TOOL_REQUEST, reasoning=Reasoning(enabled=requested, effort="low", budget=5))
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
        TOOL_REQUEST,
        messages=(*TOOL_REQUEST.messages, Message("assistant", (*thoughts, Text("Hi"))), *TOOL_REQUEST.messages),
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
    request = replace(TOOL_REQUEST, messages=(Message("assistant", (Thinking("hm"),)), *TOOL_REQUEST.messages))
    assert [message["role"] for message in sent(request)["messages"]] == ["assistant", "user"]


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_images_tools_and_results_pass(kind: ApiKind) -> None:
    messages = (
        Message("user", (Text("Look"), Image(PIXEL))),
        Message("assistant", (ToolCall("call_1", "look", '{"at": "sky"}'),)),
        Message("tool", (ToolResult("call_1", (Text("blue"),)),)),
    )
    tool = Tool("look", "looks", {"type": "object", "properties": {}})
    got = json.dumps(sent(replace(TOOL_REQUEST, messages=messages, tools=(tool,)), kind))
    for part in ("iVBORw0KGgo=", "call_1", "blue", '"look"', "looks"):
        assert part in got


def test_grammars_need_an_upstream_with_extensions() -> None:
    schema = replace(TOOL_REQUEST, constraint=Constraint("json_schema", '{"type":"object"}', "answer"))
    assert sent(schema)["response_format"]["json_schema"]["schema"] == {"type": "object"}
    grammar = replace(TOOL_REQUEST, constraint=Constraint("gbnf", 'root ::= "a"'))
    with pytest.raises(Unsupported, match="gbnf"):
        sent(grammar)
    assert sent(grammar, remote_extensions=True)["grammar"] == 'root ::= "a"'


def test_bare_prompts_go_to_completions_of_an_openai_upstream_only() -> None:
    bare = Request(model="m", prompts=("Once",), infill=Infill(" end", " upon"), logprobs=1, session="s")
    expected = {"model": "theirs", "prompt": "Once upon", "suffix": " end", "logprobs": 1, "stream": True}
    assert sent(bare) == expected | {"stream_options": {"include_usage": True}}
    with pytest.raises(Unsupported, match="conversations only"):
        sent(bare, "anthropic_messages")
    with pytest.raises(Unsupported) as caught:
        sent(replace(bare, infill=Infill("", files=(("a", "b"),))))
    assert caught.value.param == "input_extra"
    with pytest.raises(Unsupported, match="schema"):
        sent(replace(bare, constraint=Constraint("json_schema", "{}")))


async def test_a_completion_of_the_upstream_is_read_as_events() -> None:
    chunks = [{"id": "cmpl-1", "choices": [{"index": 0, "text": text}]} for text in ("a", "b")]
    chunks += [{"choices": [{"index": 0, "text": "", "finish_reason": "length"}]}]
    chunks += [{"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}]
    stream = [f"data: {json.dumps(chunk)}\n\n".encode() for chunk in chunks] + [b"data: [DONE]\n\n"]
    async with fake_upstream(Answer(body=stream)) as at, opened(at) as remote:
        reply = collect_reply(await read(remote, Request(model="m", prompts=("Once",))))
        assert at.requests[0].path.endswith("/completions")
        assert "/chat/" not in at.requests[0].path
    assert (reply.text, reply.finished.reason, reply.finished.usage) == ("ab", "max_tokens", Usage(3, 0, 2))


async def test_embeddings_and_rankings_are_forwarded() -> None:
    vectors = {"data": [{"index": 1, "embedding": [0.0, 1.0]}, {"index": 0, "embedding": [1.0, 0.0]}]}
    ranking = {"results": [{"index": 1, "relevance_score": 0.5}, {"index": 0, "relevance_score": 0.25}]}
    usage = {"usage": {"prompt_tokens": 7, "total_tokens": 7}}
    answers = [json_answer(json.dumps(body | usage)) for body in (vectors, ranking)]
    async with fake_upstream(*answers) as at, opened(at) as remote:
        assert isinstance(remote, ForwardingEngine)
        made = await remote.embed_inputs(EmbeddingRequest(model="m", inputs=("a", (1, 2)), dimensions=2))
        assert made == Embeddings([[1.0, 0.0], [0.0, 1.0]], 7)
        found = await remote.rerank(RerankRequest(model="m", query="q", documents=("a", "b"), top_n=1))
        assert found == Ranking([(1, 0.5), (0, 0.25)], 7)
        first, second = at.requests
    assert (first.path.rpartition("/")[2], second.path.rpartition("/")[2]) == ("embeddings", "rerank")
    assert first.body == {"model": "theirs", "input": ["a", [1, 2]], "encoding_format": "float"}
    assert second.body == {"model": "theirs", "query": "q", "documents": ["a", "b"]}


@pytest.mark.parametrize(
    ("answer", "error", "code"),
    [
        (error_answer(404), Unsupported, "embeddings_unsupported"),
        (error_answer(401), Unavailable, "upstream_auth_failed"),
        (error_answer(400, code="odd"), InvalidRequest, "odd"),
        (json_answer('{"data": []}'), Incomplete, "incomplete_stream"),
        (json_answer("no"), Incomplete, "incomplete_stream"),
    ],
)
async def test_an_upstream_that_cannot_embed_is_explained(answer: Answer, error: type[Exception], code: str) -> None:
    async with fake_upstream(answer) as at, opened(at) as remote:
        with pytest.raises(error) as caught:
            await remote.embed_inputs(EmbeddingRequest(model="m", inputs=("a",)))
    assert isinstance(caught.value, ModelyardError)
    assert caught.value.code == code


def test_count_body_has_only_fields_with_tokens() -> None:
    options = Options(remote_base_url="https://x", remote_model="theirs", remote_api_kind="anthropic_messages")
    got = json.loads(count_body(TOOL_REQUEST, options, APIS["anthropic_messages"]))
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
        ("gemini", "https://a.b", "https://a.b/v1beta/openai"),
        ("gemini", "https://a.b/v1beta", "https://a.b/v1beta/openai"),
        ("gemini", "https://a.b/v1beta/openai", "https://a.b/v1beta/openai"),
        ("ollama", "http://a.b:11434", "http://a.b:11434/v1"),
        ("ollama", "http://a.b:11434/v1", "http://a.b:11434/v1"),
    ],
)
def test_base_url(kind: ApiKind, url: str, base: str) -> None:
    assert base_url(kind, url) == base


@pytest.mark.parametrize("url", ["api.example.com", "ftp://a.b", "https://", "file:///etc"])
def test_invalid_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="http"):
        Options(remote_base_url=url, remote_model="m")
