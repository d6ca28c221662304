"""From a request to its prompt: tools, media, stages and windows, all checked before the lease."""

from __future__ import annotations

import asyncio
import logging
import time

import msgspec
import pytest

from modelyard.core.engine import Capabilities
from modelyard.core.errors import (
    Cancelled,
    ContextOverflow,
    InvalidRequest,
    ModelyardError,
    Unavailable,
    Unsupported,
)
from modelyard.core.request import (
    Audio,
    Image,
    Infill,
    Message,
    Sampling,
    Text,
    Tool,
    ToolChoice,
    ToolResult,
)
from modelyard.core.tokenizer import FimTokens
from modelyard.gateway.request_work import RequestWork
from tests.gateway.harness import (
    CALLER,
    GatewayHarness,
    ids,
    make_request,
    model,
    refusal,
)

LOOK = Tool("look_at", "Looks.", {"type": "object", "properties": {"at": {"type": "string"}}})


# --- tools ------------------------------------------------------------------------------------------------------------


async def test_tools_are_in_the_prompt() -> None:
    prepared = await GatewayHarness().gateway.prepare(make_request(tools=(LOOK,)), CALLER)
    assert "look_at" in prepared.prompts[0].text


async def test_tool_choice_none_removes_the_tools() -> None:
    harness, none = GatewayHarness(), ToolChoice("none")
    prepared = await harness.gateway.prepare(make_request(tools=(LOOK,), tool_choice=none), CALLER)
    assert prepared.request.tools == ()
    assert prepared.prompts[0].ids == (await harness.gateway.prepare(make_request(), CALLER)).prompts[0].ids


async def test_a_named_tool_must_be_in_the_request() -> None:
    error = await refusal(GatewayHarness(), InvalidRequest, tools=(LOOK,), tool_choice=ToolChoice("named", "other"))
    assert error.param == "tool_choice"
    assert "'other'" in error.message


@pytest.mark.parametrize("choice", [ToolChoice("required"), ToolChoice("named", "look_at")])
async def test_a_required_call_is_a_constraint(choice: ToolChoice) -> None:
    harness = GatewayHarness()
    assert (
        await harness.gateway.prepare(make_request(tools=(LOOK,), tool_choice=choice), CALLER)
    ).constraint is not None
    assert (await harness.gateway.prepare(make_request(tools=(LOOK,)), CALLER)).constraint is None


# --- stages -----------------------------------------------------------------------------------------------------------


async def test_requests_that_arrive_together_run_stage_by_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    async with GatewayHarness() as harness:
        steps: list[str] = []
        renderer = harness.gateway.lookup.models["demo"].pipeline.renderer
        for step in ("quick_text", "tokens"):
            original = getattr(renderer, step)
            monkeypatch.setattr(renderer, step, lambda *a, o=original, s=step: (steps.append(s), o(*a))[1])
        requests = [harness.gateway.prepare(make_request(text), CALLER) for text in ("one", "two", "three")]
        prepared = await asyncio.gather(*requests)
    assert steps == ["quick_text"] * 3 + ["tokens"] * 3
    assert [name in one.prompts[0].text for one, name in zip(prepared, ("one", "two", "three"), strict=True)] == [
        True
    ] * 3


async def test_a_model_with_a_broken_definition_reports_the_reason() -> None:
    error = await refusal(GatewayHarness(model_fault=InvalidRequest("no tokenizer here")), Unavailable)
    assert "no tokenizer here" in error.message


async def test_a_text_only_model_refuses_images() -> None:
    message = Message("user", (Text("see"), Image("data:image/png;base64,AAAA")))
    error = await refusal(GatewayHarness(), Unsupported, messages=(message,))
    assert error.code == "modality_unsupported"


async def test_server_side_tools_are_dropped_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tools = (Tool("now"), Tool("web_search", kind="server", type="web_search_20250305"))
    with caplog.at_level("INFO", "modelyard.gateway"):
        prepared = await GatewayHarness().gateway.prepare(make_request(tools=tools), CALLER)
    assert "web_search" not in prepared.prompts[0].text
    assert "tool_left_out: web_search_20250305 is not run here" in caplog.text


async def test_an_image_in_a_tool_result_becomes_a_placeholder_for_a_text_only_model() -> None:
    """It stays in an agent's history, so a refusal would end the session."""
    message = Message("tool", (ToolResult("c", (Text("here"), Image("data:image/png;base64,AAAA"))),))
    prepared = await GatewayHarness().gateway.prepare(make_request(messages=(message,)), CALLER)
    assert "here\n[image: this model reads text only]" in prepared.prompts[0].text
    assert prepared.request.warnings


async def test_a_sound_in_a_tool_result_becomes_a_placeholder_for_a_model_that_takes_none() -> None:
    message = Message("tool", (ToolResult("c", (Text("here"), Audio("data:audio/wav;base64,AAAA"))),))
    prepared = await GatewayHarness().gateway.prepare(make_request(messages=(message,)), CALLER)
    assert "here\n[audio: this model takes no audio]" in prepared.prompts[0].text
    assert prepared.request.warnings == ("audio_dropped: a tool returned a sound and the model takes no audio",)


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("data:image/png;base64,!!!", "invalid_image"),
        ("data:image/png;base64,", "invalid_image"),
        ("data:text/plain;base64,AAAA", "invalid_image"),
        ("data:image/png,AAAA", "invalid_image"),
        ("https://example.com/cat.png", "image_not_allowed"),
        ("file:///etc/passwd", "image_not_allowed"),
        ("gopher://example.com/", None),
    ],
)
async def test_a_vision_model_refuses_an_invalid_image(url: str, code: str | None) -> None:
    harness = GatewayHarness(modalities=("text", "image"))
    error = await refusal(harness, ModelyardError, messages=(Message("user", (Image(url),)),))
    assert error.kind in ("invalid", "forbidden")
    assert code is None or error.code == code


# --- windows and raw prompts ------------------------------------------------------------------------------------------


async def test_a_long_prompt_overflows_before_a_lease_is_taken() -> None:
    harness = GatewayHarness()
    with pytest.raises(ContextOverflow) as caught:
        await harness.gateway.prepare(make_request("word " * 30_000), CALLER)
    assert caught.value.prompt_tokens == await harness.gateway.inputs.count(make_request("word " * 30_000), CALLER)
    assert harness.running == 0


@pytest.mark.parametrize("text", ["word after word " * 300_000, "x" * 5_000_000])
async def test_a_huge_prompt_is_refused_without_tokenizing_all_of_it(text: str) -> None:
    harness = GatewayHarness()
    began = time.process_time()
    with pytest.raises(ContextOverflow) as caught:
        await harness.gateway.prepare(make_request(text), CALLER, RequestWork(len(text)))
    assert caught.value.prompt_tokens > 100_000  # an estimate
    assert time.process_time() - began < 2  # all of it takes many seconds


async def test_a_client_that_leaves_while_its_prompt_is_tokenized_is_not_served() -> None:
    harness = GatewayHarness()
    work = RequestWork(3_000_000)
    counting = asyncio.create_task(
        harness.gateway.inputs.count(make_request("word after word " * 200_000), CALLER, work)
    )
    await asyncio.sleep(0)
    work.cancel()
    with pytest.raises(Cancelled):
        await counting


async def test_a_request_causes_a_limited_number_of_log_lines(caplog: pytest.LogCaptureFixture) -> None:
    harness = GatewayHarness()
    warnings = tuple(f"input[{i}]: ignored {'x' * 1000}" for i in range(1000))
    with caplog.at_level(logging.INFO, "modelyard.gateway"):
        await harness.gateway.prepare(msgspec.structs.replace(make_request("hi"), warnings=warnings), CALLER)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 21
    assert lines[-1] == "request: 980 more warnings"
    assert max(map(len, lines)) < 600


async def test_prompts_rendered_in_a_thread_have_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    harness, long = (
        GatewayHarness(),
        make_request(messages=tuple(Message("user", (Text(f"word {i}"),)) for i in range(100))),
    )
    counted = await harness.gateway.inputs.count(long, CALLER)
    raw = await harness.gateway.inputs.count(make_request(messages=(), prompts=("one two", "three")), CALLER)
    monkeypatch.setattr("modelyard.gateway.prepare._INLINE_MESSAGES", 0)
    monkeypatch.setattr("modelyard.gateway.prepare._INLINE_CHARS", 0)
    assert await harness.gateway.inputs.count(long, CALLER) == counted
    assert await harness.gateway.inputs.count(make_request(messages=(), prompts=("one two", "three")), CALLER) == raw


async def test_sampling_defaults_come_from_the_model() -> None:
    harness = GatewayHarness(sampling=Sampling(temperature=0.1, top_k=5))
    prepared = await harness.gateway.prepare(make_request(sampling=Sampling(top_k=9)), CALLER)
    assert (prepared.sampling.temperature, prepared.sampling.top_k) == (0.1, 9)


async def test_a_model_that_does_not_generate_refuses_chat_before_it_is_loaded() -> None:
    harness = GatewayHarness(capabilities=Capabilities(generates=False, embeddings=True))
    error = await refusal(harness, Unsupported)
    assert (error.code, "/v1/embeddings" in error.message) == ("model_has_no_chat", True)
    error = await refusal(GatewayHarness(capabilities=Capabilities(generates=False, rerank=True)), Unsupported)
    assert "/v1/rerank" in error.message


async def test_a_server_without_suffixes_gets_the_gap_as_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model().pipeline.tokenizer, "fim", FimTokens(7, 8, 9))
    gap = {"messages": (), "prompts": ("a",), "infill": Infill("b")}
    prepared = await GatewayHarness(kind="chat").gateway.prepare(make_request(**gap), CALLER)
    assert prepared.engine_request(0).infill is None
    assert prepared.engine_request(0).prompts == ((7, *ids("a"), 8, *ids("b"), 9),)
    able = GatewayHarness(kind="chat", capabilities=Capabilities(infill=True))
    prepared = await able.gateway.prepare(make_request(**gap), CALLER)
    assert prepared.engine_request(0).infill == Infill("b")


async def test_a_chat_engine_gets_one_of_several_bare_prompts_at_a_time() -> None:
    request = make_request(messages=(), prompts=("a", "b"), n=2)
    prepared = await GatewayHarness(kind="chat").gateway.prepare(request, CALLER)
    assert [prepared.engine_request(choice).prompts for choice in range(prepared.choices)] == [("a",)] * 2 + [
        ("b",)
    ] * 2
