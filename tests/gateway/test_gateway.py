"""The life of a request in the gateway: checks before the lease, cancellation, retries, and engine output as events."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.core.engine import Accepted, Capabilities, Chunk, Embeddings, End, Progress, Tokens
from modelyard.core.errors import (
    ENGINE_DIED,
    Cancelled,
    ContextOverflow,
    Forbidden,
    Incomplete,
    Internal,
    InvalidRequest,
    ModelyardError,
    NotFound,
    Overloaded,
    Unavailable,
    Unimplemented,
    Unsupported,
)
from modelyard.core.events import (
    BlockDelta,
    BlockEnd,
    BlockStart,
    Event,
    Failed,
    Finished,
    Measured,
    PromptRead,
    Started,
    Timings,
    Usage,
    collect_reply,
)
from modelyard.core.request import (
    Audio,
    Caller,
    EmbeddingRequest,
    Image,
    Infill,
    Message,
    Reasoning,
    Request,
    RerankRequest,
    Sampling,
    Text,
    Tool,
    ToolChoice,
    ToolResult,
)
from modelyard.core.tokenizer import FimTokens, IdLogprob
from modelyard.gateway.output import ChatOutput, TextOutput
from modelyard.gateway.prepared_request import OutputBudget, PreparedRequest, RenderedPrompt
from modelyard.gateway.request_work import RequestWork
from modelyard.gateway.stream import gateway_timings
from modelyard.router.router import Target
from tests.gateway.harness import (
    CALLER,
    GatewayHarness,
    ManualEngine,
    ids,
    make_request,
    model,
    read_events,
    wait_until,
)

LOOK = Tool("look_at", "Looks.", {"type": "object", "properties": {"at": {"type": "string"}}})


async def refusal(harness: GatewayHarness, kind: type[ModelyardError], caller: Caller = CALLER, **request: Any) -> Any:
    with pytest.raises(kind) as caught:
        await harness.gateway.prepare(make_request(**request), caller)
    with pytest.raises(kind):
        await harness.gateway.inputs.count(make_request(**request), caller)
    assert (harness.running, harness.waiting) == (0, 0)
    return caught.value


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


async def test_a_request_that_a_reload_overtakes_is_prepared_for_the_new_model() -> None:
    async with GatewayHarness() as harness:
        gateway, old = harness.gateway, harness.gateway.lookup.models["demo"]
        new = msgspec.structs.replace(old, text=msgspec.structs.replace(old.pipeline), system_prompt="Be brief.")
        preparing = asyncio.ensure_future(gateway.prepare(make_request("Hello"), CALLER))
        await asyncio.sleep(0)  # it is rendered
        assert not preparing.done()
        gateway.lookup.models = {**gateway.lookup.models, "demo": new}
        prepared = await preparing
    assert prepared.model is new
    assert "Be brief." in prepared.prompts[0].text


# --- consent, names, broken models ------------------------------------------------------------------------------------


async def test_a_remote_model_needs_consent() -> None:
    harness = GatewayHarness(remote=True)
    error = await refusal(harness, Forbidden)
    assert error.code == "remote_not_allowed"
    assert "x-modelyard-allow-remote" in error.message
    willing = msgspec.structs.replace(CALLER, allow_remote=True)
    assert await harness.gateway.prepare(make_request(), willing)
    assert await harness.gateway.prepare(make_request(allow_remote=True), CALLER)


async def test_a_route_can_give_consent_for_all_clients_whose_key_does_not_forbid_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harness = GatewayHarness(remote=True)
    target = harness.gateway.lookup.router.resolve("demo", CALLER.endpoint)
    consenting = msgspec.structs.replace(target, allow_remote=True)
    monkeypatch.setattr(harness.gateway.lookup.router, "resolve", lambda *_: consenting)
    assert await harness.gateway.prepare(make_request(), CALLER)
    assert await harness.gateway.prepare(make_request(), msgspec.structs.replace(CALLER, key="ann"))
    forbidden = msgspec.structs.replace(CALLER, key="ann", forbid_remote=True)
    with pytest.raises(Forbidden, match="the key 'ann' may not use it"):
        await harness.gateway.prepare(make_request(allow_remote=True), forbidden)


async def test_a_request_with_a_key_cannot_give_its_own_consent() -> None:
    harness = GatewayHarness(remote=True)
    with pytest.raises(Forbidden, match="set allow_remote = true on its route or your key"):
        await harness.gateway.prepare(make_request(allow_remote=True), msgspec.structs.replace(CALLER, key="ann"))


async def test_an_unknown_model_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = GatewayHarness()
    monkeypatch.setattr(harness.gateway.lookup.router, "routes", ())
    error = await refusal(harness, NotFound, model="unknown")
    assert "demo" in error.message


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


@pytest.mark.parametrize("id", [model().pipeline.tokenizer.size, 10**9])
async def test_a_token_id_outside_the_vocabulary_is_refused(id: int) -> None:
    harness = GatewayHarness()
    error = await refusal(harness, InvalidRequest, messages=(), prompts=((1, id),))
    assert (error.param, str(id) in error.message) == ("prompt", True)
    with pytest.raises(InvalidRequest) as caught:
        await harness.gateway.inputs.embed(EmbeddingRequest(model="demo", inputs=((id,),)), CALLER)
    assert caught.value.param == "input"


async def test_counting_needs_no_engine_and_matches_the_prompt() -> None:
    harness = GatewayHarness()
    assert harness.scheduler.status()["demo"].state == "stopped"
    prepared = await harness.gateway.prepare(make_request("one two three"), CALLER)
    assert await harness.gateway.inputs.count(make_request("one two three"), CALLER) == len(prepared.prompts[0].ids)


async def test_a_chat_engine_that_is_not_loaded_cannot_count() -> None:
    with pytest.raises(Unimplemented):
        await GatewayHarness(kind="chat", text=None).gateway.inputs.count(make_request(), CALLER)


async def test_an_engine_without_embeddings_refuses_and_releases_its_slot() -> None:
    async with GatewayHarness() as harness:
        with pytest.raises(Unsupported) as caught:
            await harness.gateway.inputs.embed(EmbeddingRequest(model="demo", inputs=("hi", tuple(ids("ho")))), CALLER)
        assert caught.value.code == "embeddings_unsupported"
        assert harness.running == 0


async def test_sampling_defaults_come_from_the_model() -> None:
    harness = GatewayHarness(sampling=Sampling(temperature=0.1, top_k=5))
    prepared = await harness.gateway.prepare(make_request(sampling=Sampling(top_k=9)), CALLER)
    assert (prepared.sampling.temperature, prepared.sampling.top_k) == (0.1, 9)


async def test_stop_fails_running_and_queued_requests_with_its_reason() -> None:
    error = Unavailable("the server is shutting down")
    async with GatewayHarness(slots=1) as harness:
        holder, waiter = await harness.start(), await harness.start()
        harness.gateway.running.end(error)
        for stream in (waiter, holder):
            _, events = await anext(stream)
            assert [event.error for event in events if hasattr(event, "error")] == [error]
            stream.close()
        assert (harness.running, harness.waiting) == (0, 0)


# --- one choice: cancellation, retries, release of the lease ----------------------------------------------------------


async def read_until_cancelled(stream: Any, generation: Any) -> list[Event]:
    """The remaining events; the engine ends its generation after the cancel."""
    reading = asyncio.create_task(read_events(stream))
    await wait_until(lambda: generation.is_cancelled)
    generation.end("cancelled")
    return await reading


def failures(events: list[Event]) -> list[Any]:
    return [event.error for event in events if isinstance(event, Failed)]


async def test_a_complete_reply_releases_its_slot_when_closed() -> None:
    async with GatewayHarness() as harness:
        stream = await harness.start()
        reading = asyncio.create_task(read_events(stream))
        (await harness.generation()).finish("Hello.")
        assert collect_reply(await reading).text == "Hello."
        assert harness.running == 1
        stream.close()
        assert harness.running == 0


# --- cancelled --------------------------------------------------------------------------------------------------------


async def test_a_request_cancelled_in_the_queue_never_reaches_the_engine() -> None:
    async with GatewayHarness(slots=1) as harness:
        holder, waiter = await harness.start(), await harness.start()
        reading = asyncio.create_task(read_events(waiter))
        await wait_until(lambda: harness.waiting == 1)
        waiter.cancel()
        assert failures(await reading) == [Cancelled("the request was cancelled while it waited")]
        waiter.close()
        assert (harness.waiting, harness.running, harness.engine.generations) == (0, 1, [])
        holder.close()
        assert harness.running == 0


async def test_a_request_cancelled_before_it_is_read_never_reaches_the_engine() -> None:
    async with GatewayHarness() as harness:
        stream = await harness.start()
        stream.cancel()
        events = await read_events(stream)
        assert [type(event) for event in events] == [Failed]
        stream.close()
        assert (harness.running, harness.engine.generations) == (0, [])


async def test_a_request_cancelled_in_prefill_keeps_its_slot_until_the_engine_ends() -> None:
    async with GatewayHarness() as harness:
        stream = await harness.start()
        reading = asyncio.create_task(anext(stream))
        generation = await harness.generation()
        generation.accept()
        _, events = await reading
        assert [type(event) for event in events] == [Started]
        stream.cancel()
        assert harness.running == 1
        assert [type(error) for error in failures(await read_until_cancelled(stream, generation))] == [Cancelled]
        stream.close()
        assert harness.running == 0


async def test_a_request_cancelled_twice_in_the_stream_ends_with_one_failure() -> None:
    async with GatewayHarness() as harness:
        stream = await harness.start()
        reading = asyncio.create_task(anext(stream))
        generation = await harness.generation()
        generation.accept()
        generation.write("Hello")
        await reading
        stream.cancel()
        stream.cancel()
        assert [type(error) for error in failures(await read_until_cancelled(stream, generation))] == [Cancelled]
        stream.close()
        assert harness.running == 0


async def test_cancel_accepts_a_reason() -> None:
    error = Unavailable("the server is shutting down")
    async with GatewayHarness() as harness:
        stream = await harness.start()
        reading = asyncio.create_task(read_events(stream))
        generation = await harness.generation()
        stream.cancel(error)
        generation.end("cancelled")
        assert failures(await reading) == [error]
        stream.close()


async def test_a_cancel_after_the_end_adds_no_event() -> None:
    async with GatewayHarness() as harness:
        stream = await harness.start()
        reading = asyncio.create_task(read_events(stream))
        (await harness.generation()).finish()
        assert isinstance((await reading)[-1], Finished)
        stream.cancel()
        assert await read_events(stream) == []
        stream.close()
        assert harness.running == 0


# --- closed before its end --------------------------------------------------------------------------------------------


async def test_closing_a_stream_frees_the_slot_when_the_engine_ends() -> None:
    async with GatewayHarness() as harness:
        stream = await harness.start()
        reading = asyncio.create_task(anext(stream))
        generation = await harness.generation()
        generation.accept()
        await reading
        stream.close()
        stream.close()
        await wait_until(lambda: generation.is_cancelled)
        assert harness.running == 1
        generation.end("cancelled")
        await wait_until(lambda: harness.running == 0)


async def test_after_a_stop_string_the_slot_is_free_when_the_engine_ends() -> None:
    async with GatewayHarness() as harness:
        stream = await harness.start(stop=("STOP",))
        reading = asyncio.create_task(read_events(stream))
        generation = await harness.generation()
        generation.accept()
        generation.write("one STOP two")
        assert collect_reply(await reading).text == "one "
        stream.close()
        assert generation.is_cancelled
        assert harness.running == 1
        generation.write("three")
        generation.end("length")
        await wait_until(lambda: harness.running == 0)


# --- retries ----------------------------------------------------------------------------------------------------------

DIED = Unavailable("the process was killed by SIGSEGV", code=ENGINE_DIED)


async def test_a_request_is_retried_once_if_the_engine_is_lost_before_content() -> None:
    async with GatewayHarness() as harness:
        stream = await harness.start()
        reading = asyncio.create_task(read_events(stream))
        first = await harness.generation()
        first.accept()
        first.end("error", Unavailable("lost"))
        (await harness.generation(1)).finish("Here.")
        events = await reading
        assert collect_reply(events).text == "Here."
        assert sum(isinstance(event, Started) for event in events) == 1
        assert harness.running == 1
        stream.close()
        assert harness.running == 0


async def test_a_request_is_not_retried_twice() -> None:
    async with GatewayHarness() as harness:
        stream = await harness.start()
        reading = asyncio.create_task(read_events(stream))
        for number in range(2):
            (await harness.generation(number)).end("error", Unavailable(f"lost {number}"))
        assert failures(await reading) == [Unavailable("lost 1")]
        stream.close()
        assert (len(harness.engine.generations), harness.running) == (2, 0)


@pytest.mark.parametrize("is_accepted", [True, False])
async def test_a_request_that_may_have_killed_the_engine_is_not_retried(is_accepted: bool) -> None:
    async with GatewayHarness() as harness:
        stream = await harness.start()
        reading = asyncio.create_task(read_events(stream))
        generation = await harness.generation()
        if is_accepted:
            generation.accept()
        generation.end("error", DIED)
        assert failures(await reading) == [DIED]
        stream.close()
        assert (len(harness.engine.generations), harness.running) == (1, 0)


async def test_a_request_that_ran_before_the_one_that_killed_the_engine_is_retried() -> None:
    async with GatewayHarness() as harness:
        earlier, later = await harness.start(), await harness.start()
        reading = [asyncio.create_task(read_events(stream)) for stream in (earlier, later)]
        first, second = await harness.generation(), await harness.generation(1)
        first.accept()
        second.accept()
        for generation in (second, first):
            generation.end("error", DIED)
        (await harness.generation(2)).finish("Here.")
        assert collect_reply(await reading[0]).text == "Here."
        assert failures(await reading[1]) == [DIED]
        earlier.close()
        later.close()


async def test_a_request_for_an_engine_that_was_dead_already_is_retried() -> None:
    async with GatewayHarness() as harness:
        stream = await harness.start()
        lost, harness.engine.lost = harness.engine.lost, asyncio.get_running_loop().create_future()
        harness.engine.lost.set_result(DIED)  # after the lease was granted; the scheduler watches the other one
        reading = asyncio.create_task(read_events(stream))
        generation = await harness.generation()
        harness.engine.lost = lost  # as the engine of the second attempt is
        generation.end("error", DIED)
        (await harness.generation(1)).finish("Here.")
        assert collect_reply(await reading).text == "Here."
        stream.close()


async def test_a_request_with_content_is_not_retried() -> None:
    async with GatewayHarness() as harness:
        stream = await harness.start()
        reading = asyncio.create_task(read_events(stream))
        generation = await harness.generation()
        generation.accept()
        generation.write("Half")
        generation.end("error", Unavailable("lost"))
        assert failures(await reading) == [Unavailable("lost")]
        stream.close()
        assert (len(harness.engine.generations), harness.running) == (1, 0)


@pytest.mark.parametrize("error", [Internal("out of memory", id="x"), Overloaded("busy")])
async def test_other_errors_are_not_retried(error: Any) -> None:
    async with GatewayHarness() as harness:
        stream = await harness.start()
        reading = asyncio.create_task(read_events(stream))
        (await harness.generation()).end("error", error)
        assert failures(await reading) == [error]
        stream.close()
        assert (len(harness.engine.generations), harness.running) == (1, 0)


async def test_a_cancelled_request_is_not_retried() -> None:
    async with GatewayHarness() as harness:
        stream = await harness.start()
        reading = asyncio.create_task(read_events(stream))
        generation = await harness.generation()
        stream.cancel()
        generation.end("error", Unavailable("lost"))
        assert failures(await reading) == [Unavailable("lost")]
        stream.close()
        assert (len(harness.engine.generations), harness.running) == (1, 0)


# --- engines that violate the contract --------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [False, True])
async def test_a_stream_without_an_end_is_one_failure(content: bool) -> None:
    async with GatewayHarness() as harness:
        stream = await harness.start()
        reading = asyncio.create_task(read_events(stream))
        generation = await harness.generation()
        generation.accept()
        if content:
            generation.write("Half")
        generation.close()
        assert [type(error) for error in failures(await reading)] == [Incomplete]
        stream.close()
        await wait_until(lambda: harness.running == 0)


async def test_an_engine_that_raises_is_one_failure_and_leaks_no_slot(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    async with GatewayHarness(start_error=ZeroDivisionError("secret")) as harness:
        stream = await harness.start()
        (error,) = failures(await read_events(stream))
        assert isinstance(error, Internal)
        assert "secret" not in error.message
        stream.close()
        assert harness.running == 0


async def test_a_stream_that_raises_is_one_failure_and_leaks_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    async with GatewayHarness() as harness:
        stream = await harness.start()
        reading = asyncio.create_task(read_events(stream))
        generation = await harness.generation()
        monkeypatch.setattr(type(generation), "__anext__", _breaks)
        generation.accept()
        (error,) = failures(await reading)
        assert isinstance(error, Internal)
        stream.close()
        await wait_until(lambda: harness.running == 0)


async def _breaks(_: object) -> None:
    raise ZeroDivisionError("secret")


async def test_the_last_event_has_the_timings() -> None:
    async with GatewayHarness() as harness:
        stream = await harness.start()
        reading = asyncio.create_task(read_events(stream))
        (await harness.generation()).finish()
        last = (await reading)[-1]
        stream.close()
        assert isinstance(last, Finished)
        times = last.timings
        assert None not in (times.queue, times.tokenize, times.first_token, times.decode)
        assert times.backend is not None
        assert times.engine is not None
        assert 0 <= times.backend <= times.engine
        assert times.total == times.engine, "the arrival time is unknown"


# --- engine output as events: one start, one end, nothing after the end -----------------------------------------------

CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "sky"}}\n</tool_call>'


def prepared(request: Request, limit: Any = "max_tokens") -> PreparedRequest:
    rendered = model().pipeline.renderer
    text = rendered.text(request)
    return PreparedRequest(
        request=request,
        caller=Caller(trace="our-id", endpoint="/v1/chat/completions"),
        target=Target("demo", "main", 4096),
        model=model(),
        prompts=(RenderedPrompt(rendered.tokens(text), text, OutputBudget(50, limit)),),
        sampling=request.sampling,
        constraint=None,
        created=7,
        tokenize_s=0.0,
    )


def text_output(limit: Any = "max_tokens", on_text: Any = None, **request: Any) -> TextOutput:
    return TextOutput(prepared(make_request(**request), limit), 0, lambda: "call_1", on_text)


def chunks(*parts: str | Chunk) -> list[Chunk]:
    return [Accepted(), *(Tokens(ids(part)) if isinstance(part, str) else part for part in parts)]


def final_events(events: Iterable[Event]) -> list[Event]:
    return [event for event in events if isinstance(event, Finished | Failed)]


@pytest.mark.parametrize(
    ("generated", "end", "limit", "reason"),
    [
        ("Hello.", "stop", "max_tokens", "end"),
        ("Hello.", "stop", "window", "end"),
        ("Hello.", "length", "max_tokens", "max_tokens"),
        ("Hello.", "length", "window", "window"),
        ("Hello.", "window", "max_tokens", "window"),
        (CALL, "stop", "max_tokens", "tool_calls"),
        (CALL, "length", "max_tokens", "max_tokens"),
        ("", "stop", "max_tokens", "end"),
    ],
)
def test_finish_reasons(generated: str, end: Any, limit: str, reason: str) -> None:
    output = text_output(limit, tools=(Tool("look"),))
    events = output.feed([*chunks(generated), End(end, timings=Timings(total=1.5))])
    assert [last.reason for last in final_events(events) if isinstance(last, Finished)] == [reason]
    assert events[-1] is final_events(events)[0]
    assert isinstance(events[-1], Finished)
    assert events[-1].timings == Timings(total=1.5)
    assert (output.over, output.slot_free) == (True, True)


@pytest.mark.parametrize(
    ("end", "error"),
    [
        (End("error", error=Unavailable("lost")), Unavailable("lost")),
        (End("cancelled"), Cancelled("the request was cancelled")),
    ],
)
def test_an_error_end_is_one_failure(end: End, error: ModelyardError) -> None:
    output = text_output()
    events = output.feed([*chunks("Hel"), end])
    assert final_events(events) == [Failed(error)]
    assert (output.over, output.slot_free, output.has_output) == (True, True, True)


def test_started_is_sent_once_with_our_id_and_the_cached_tokens() -> None:
    output = text_output()
    first, again = output.feed([Accepted(cached_tokens=3)]), output.feed([Accepted(cached_tokens=9)])
    prompt = output.usage.prompt
    assert first == [Started("our-id", "demo", 7, Usage(prompt, 3))]
    assert prompt > 3
    assert again == []


def test_progress_is_not_content() -> None:
    output = text_output()
    assert output.feed([Progress(1, 2)]) == []
    assert output.has_output is False


def test_a_stop_string_ends_the_reply_while_the_engine_still_runs() -> None:
    output = text_output(stop=("STOP",))
    events = output.feed(chunks("one STOP two", " three"))
    assert collect_reply(events).text == "one "
    last = events[-1]
    assert isinstance(last, Finished)
    assert (last.reason, last.stop_string) == ("stop_string", "STOP")
    assert (output.over, output.slot_free) == (True, False)
    assert output.feed([Tokens(ids(" four"))]) == []
    assert output.feed([End("length")]) == []
    assert output.slot_free is True


@pytest.mark.parametrize("cut", range(1, 8))
def test_a_stop_string_counts_from_the_token_on_that_may_end_the_output(cut: int) -> None:
    generated = ids("STOP a STOP b")
    first = len(ids("STOP a"))
    output = text_output(stop=("STOP",), sampling=Sampling(min_tokens=first))
    events = output.feed([Accepted(), Tokens(generated[:cut]), Tokens(generated[cut:]), End("stop")])
    reply = collect_reply(events)
    assert (reply.text.strip(), reply.finished.stop_string) == ("STOP a", "STOP")


def test_times_and_progress_are_events_only_on_request() -> None:
    read = [Accepted(2), Progress(5, 9), *chunks("Hello", " there")[1:], End("stop")]
    assert not any(isinstance(event, PromptRead | Measured) for event in text_output().feed(read))
    output = text_output(stream=True, progress=True, timings="all")
    events = output.feed(read)
    total = output.usage.prompt
    progress = [(event.total, event.cached, event.done) for event in events if isinstance(event, PromptRead)]
    assert progress == [(total, 2, 2), (total, 2, 5), (total, 2, total)]
    measured = [event.usage.output for event in events if isinstance(event, Measured)]
    assert measured == [len(ids("Hello")), output.usage.output]
    assert isinstance(events[0], Started)
    assert collect_reply(events).text == "Hello there"


def test_a_prompts_log_probabilities_come_with_ids_and_ranks() -> None:
    output = text_output(prompt_logprobs=1)
    prompt = output._rendered.ids
    scored = [IdLogprob(id, -1.0, ((7, -0.5),), 3) for id in prompt[1:]]
    events = output.feed([Accepted(), Progress(len(prompt), len(prompt), scored), Tokens(ids("Hi")), End("stop")])
    found = collect_reply(events).started.prompt_logprobs
    assert [token.id for token in found] == prompt
    assert math.isnan(found[0].logprob)
    assert (found[1].rank, found[1].top[0].id) == (3, 7)


def test_tokens_after_a_stop_string_are_not_counted() -> None:
    output = text_output(stop=("STOP",))
    output.feed(chunks("one STOP"))
    counted = output.usage.output
    output.feed([Tokens(ids(" and so on"))])
    assert output.usage.output == counted == len(ids("one STOP"))


def test_reasoning_is_counted_separately_and_can_be_hidden() -> None:
    thought = "<think>\nso\n</think>\n\nYes."
    shown, hidden = text_output(), text_output(reasoning=Reasoning(visible=False))
    replies = [collect_reply(output.feed([*chunks(thought), End("stop")])) for output in (shown, hidden)]
    assert [reply.text.strip() for reply in replies] == ["Yes.", "Yes."]
    assert ["so" in reply.thinking for reply in replies] == [True, False]
    assert replies[0].finished.usage == replies[1].finished.usage
    assert replies[0].finished.usage.reasoning > 0


def test_logprobs_match_their_text() -> None:
    tokens = ids("Hello there.")
    logprobs = [IdLogprob(token, -0.5, ((token, -0.5), (tokens[0], -3.0))) for token in tokens]
    output = text_output(logprobs=2)
    reply = collect_reply(output.feed([Accepted(), Tokens(tokens, logprobs), End("stop")]))
    block = reply.blocks[0]
    assert "".join(each.token for each in block.logprobs) == reply.text == "Hello there."
    assert {each.logprob for each in block.logprobs} == {-0.5}
    assert [top.logprob for top in block.logprobs[0].top] == [-0.5, -3.0]


def test_on_text_receives_the_raw_text() -> None:
    kept: list[str] = []
    output = text_output(on_text=kept.append, tools=(Tool("look"),))
    output.feed([*chunks(CALL), End("stop")])
    assert "".join(kept) == CALL


@pytest.mark.parametrize(("reason", "end"), [("length", ""), ("window", ""), ("stop", "\ufffd")])
def test_a_character_that_a_limit_cuts_is_dropped(reason: Any, end: str) -> None:
    smile = ids("😀")
    assert len(smile) > 1
    reply = collect_reply(text_output().feed([Accepted(), Tokens([*ids("Hi "), *smile[:-1]]), End(reason)]))
    assert reply.text == "Hi " + end


WORDS = ["Hello", " there", ".", "\n", " ", "<", CALL, "<think>\nso\n</think>\n\n", "STOP", "é😀", "{", "<|im_end|>"]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    words=st.lists(st.sampled_from(WORDS), max_size=5),
    end=st.sampled_from(["stop", "length", "window", "cancelled"]),
    limit=st.sampled_from(["max_tokens", "window"]),
    more=st.fixed_dictionaries(
        {"tools": st.sampled_from([(), (Tool("look"),)]), "stop": st.sampled_from([(), ("STOP",)])}
    ),
    half=st.booleans(),
)
def test_chunking_does_not_change_the_events(
    words: list[str], end: Any, limit: str, more: dict[str, Any], half: bool
) -> None:
    kept: tuple[list[str], list[str]] = ([], [])
    at_once, piecewise = (text_output(limit, on_text=each.append, **more) for each in kept)
    generated = ids("".join(words))[: -1 if half else None]
    first, rest, last = Accepted(cached_tokens=2), Tokens(generated), End(end, Usage(9999), Timings(total=1.5))
    assert at_once.feed([first, rest, last]) == [*piecewise.feed([first]), *piecewise.feed([rest, last])]
    states = [
        (one.usage, one.over, one.slot_free, one.has_output, one.ids, list(one.warnings))
        for one in (at_once, piecewise)
    ]
    assert states[0] == states[1]
    assert "".join(kept[0]) == "".join(kept[1])


# --- engines that produce events --------------------------------------------------------------------------------------

CHAT_EVENTS: list[Event] = [
    Started("upstream-id", "gpt-x", 1, Usage(5)),
    BlockStart(0, "text"),
    BlockDelta(0, "Hi"),
    BlockEnd(0),
    Finished("end", Usage(5, 0, 1)),
]


def test_events_of_a_chat_engine_get_our_id_and_model_name() -> None:
    output = ChatOutput(prepared(make_request()))
    events = output.feed(CHAT_EVENTS)
    assert events == [Started("our-id", "demo", 7, Usage(5)), *CHAT_EVENTS[1:]]
    assert (output.over, output.slot_free, output.has_output, output.usage) == (True, True, True, Usage(5, 0, 1))


def test_a_chat_engines_deltas_count_as_the_tokens_that_arrive_not_the_usage_at_the_end() -> None:
    output = ChatOutput(prepared(make_request()))
    output.feed([CHAT_EVENTS[0], BlockStart(0, "text"), BlockDelta(0, "a"), BlockDelta(0, "b")])
    assert output.tokens == 2
    output.feed([BlockEnd(0), Finished("end", Usage(5, 0, 40))])
    assert (output.tokens, output.usage.output) == (2, 40)


def test_started_has_the_prompt_tokens_if_the_prompt_is_tokenized_here() -> None:
    events = ChatOutput(counted := prepared(make_request())).feed([Started("x", "y", 1)])
    assert events == [Started("our-id", "demo", 7, Usage(len(counted.prompts[0].ids)))]


@pytest.mark.parametrize(("limit", "reason"), [("window", "window"), ("max_tokens", "max_tokens")])
def test_the_output_budget_decides_between_window_and_max_tokens(limit: str, reason: str) -> None:
    (last,) = ChatOutput(prepared(make_request(), limit)).feed([Finished("max_tokens", Usage())])
    assert last == Finished(reason, Usage())  # type: ignore[arg-type]


REASONING_EVENTS: list[Event] = [
    CHAT_EVENTS[0],
    *(BlockStart(0, "thinking"), BlockDelta(0, "hm"), BlockEnd(0)),
    *(BlockStart(1, "text"), BlockDelta(1, "Hi"), BlockEnd(1)),
    *(BlockStart(2, "thinking"), BlockEnd(2)),
    *(BlockStart(3, "tool_call", "c", "look"), BlockDelta(3, "{}"), BlockEnd(3)),
    Finished("tool_calls", Usage(5, 0, 4, 1)),
]


@pytest.mark.parametrize(("visible", "shown"), [(None, True), (True, True), (False, False)])
def test_hidden_reasoning_is_dropped_but_counted(visible: bool | None, shown: bool) -> None:
    output = ChatOutput(prepared(make_request(reasoning=Reasoning(visible=visible))))
    events = output.feed(REASONING_EVENTS)
    if shown:
        assert events[1:] == REASONING_EVENTS[1:]
    else:
        assert [event.index for event in events if isinstance(event, BlockStart)] == [0, 1]
        assert collect_reply(events).text == "Hi"
        assert collect_reply(events).thinking == ""
        assert output.usage.reasoning == 1


def test_a_second_started_event_is_dropped() -> None:
    events = ChatOutput(prepared(make_request())).feed([CHAT_EVENTS[0], *CHAT_EVENTS])
    assert sum(isinstance(event, Started) for event in events) == 1


@pytest.mark.parametrize("last", [Finished("end", Usage()), Failed(Internal("x", id="y"))])
def test_nothing_follows_the_last_event(last: Event) -> None:
    output = ChatOutput(prepared(make_request()))
    events = output.feed([CHAT_EVENTS[0], last, BlockStart(0, "text"), Finished("end", Usage())])
    assert final_events(events) == [last]
    assert events[-1] == last
    assert output.feed([BlockDelta(0, "late")]) == []


def test_the_engine_reports_the_prompt_tokens_of_images() -> None:
    output = text_output()
    own = output.usage.prompt
    (last,) = final_events(output.feed([*chunks("Hello."), End("stop", Usage(prompt=own + 64))]))
    assert isinstance(last, Finished)
    assert last.usage.prompt == own + 64


def test_the_engine_cannot_lower_the_prompt_tokens() -> None:
    output = text_output()
    own = output.usage.prompt
    (last,) = final_events(output.feed([*chunks("Hello."), End("stop", Usage(prompt=0))]))
    assert isinstance(last, Finished)
    assert last.usage.prompt == own > 0


# --- embeddings, rankings, gaps ---------------------------------------------------------------------------------------


class VectorEngine(ManualEngine):
    """Its vector of an input is its number of tokens and the first token."""

    async def embed(self, batch: Sequence[Sequence[int]]) -> Embeddings:
        return Embeddings([[float(len(ids)), float(ids[0])] for ids in batch], sum(map(len, batch)))


def reading_harness(**changes: Any) -> GatewayHarness:
    harness = GatewayHarness(**changes)
    engine = VectorEngine(dict(harness.engine.info.caches), None)
    can = Capabilities(generates=False, embeddings=True, rerank=True)
    engine.info = msgspec.structs.replace(engine.info, capabilities=can)
    harness.engine = engine
    return harness


async def test_texts_get_the_tokens_that_belong_around_them_and_ids_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model().pipeline.tokenizer, "wrapping", ([1], [2]))
    async with reading_harness() as harness:
        made = await harness.gateway.inputs.embed(
            EmbeddingRequest(model="demo", inputs=("hi", tuple(ids("hi")))), CALLER
        )
        assert [vector[0] for vector in made.vectors] == [len(ids("hi")) + 2, len(ids("hi"))]
        assert made.vectors[0][1] == 1
        assert harness.running == 0


async def test_the_best_documents_come_first_and_the_request_is_recorded() -> None:
    async with reading_harness() as harness:
        request = RerankRequest(model="demo", query="q", documents=("a", "a b c d", "a b"), top_n=2)
        found = await harness.gateway.inputs.rerank(request, CALLER)
        assert [index for index, _ in found.scores] == [1, 2]
        (record,) = harness.gateway.history.recent(5)
        assert (record.model, record.status, record.usage.prompt) == ("demo", "end", found.prompt_tokens)
        with pytest.raises(ContextOverflow) as caught:
            await harness.gateway.inputs.rerank(msgspec.structs.replace(request, documents=("word " * 5000,)), CALLER)
        assert caught.value.window == 4096


async def test_an_input_as_long_as_the_window_fits() -> None:
    async with reading_harness() as harness:
        token = ids("hi")[0]
        made = await harness.gateway.inputs.embed(EmbeddingRequest(model="demo", inputs=((token,) * 4096,)), CALLER)
        assert made.prompt_tokens == 4096
        with pytest.raises(ContextOverflow) as caught:
            await harness.gateway.inputs.embed(EmbeddingRequest(model="demo", inputs=((token,) * 4097,)), CALLER)
        assert (caught.value.prompt_tokens, caught.value.window) == (4097, 4096)


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


# --- the prompt in the reply ----------------------------------------------------------------------------------------


async def test_echo_of_token_ids_is_their_text_with_log_probabilities() -> None:
    async with GatewayHarness() as gateway:
        prompt, stop = ids("one two"), IdLogprob(7, -0.5)
        gateway.engine.info = msgspec.structs.replace(
            gateway.engine.info, capabilities=Capabilities(logprobs=True, prompt_logprobs=True)
        )
        asked = {"messages": (), "echo": True, "logprobs": 0, "prompt_logprobs": 0}
        reading = asyncio.create_task(read_events(await gateway.start(prompts=(tuple(prompt),), **asked)))
        generation = await gateway.generation()
        assert generation.prompt.prompt_logprobs == 0
        generation.accept()
        generation.put(Progress(len(prompt), len(prompt), [IdLogprob(token, -1.0) for token in prompt[1:]]))
        generation.put(Tokens([], [stop]))
        generation.end()
        reply = collect_reply(await reading)
        assert reply.started.prompt == "one two"
        tokens = reply.started.prompt_logprobs
        assert "".join(token.token for token in tokens) == "one two"
        assert math.isnan(tokens[0].logprob)
        assert {token.logprob for token in tokens[1:]} == {-1.0}
        assert [token.logprob for block in reply.blocks for token in block.logprobs] == [-0.5]
        assert reply.text == ""


# --- timings ----------------------------------------------------------------------------------------------------------

MEASURED: dict[str, Any] = {
    "now": 15.0,
    "arrived": 9.5,
    "started": 10.0,
    "engine_started": 12.0,
    "first_output": 13.0,
    "queue_s": 1.75,
    "tokenize_s": 0.25,
    "remote": False,
}


def test_timings_of_the_engine_are_kept_and_completed() -> None:
    engine = Timings(prefill=0.5, first_token=0.6, decode=2.0, backend=2.6, total=2.6)
    assert gateway_timings(engine, **MEASURED) == Timings(
        queue=1.75, tokenize=0.25, prefill=0.5, first_token=0.6, decode=2.0, backend=3.0, engine=5.25, total=5.5
    )


def test_an_engine_without_timings_is_timed_by_the_gateway() -> None:
    timings = gateway_timings(Timings(), **MEASURED)
    assert (timings.prefill, timings.first_token, timings.decode) == (None, 1.0, 2.0)


@pytest.mark.parametrize("change", [{"remote": True}, {"first_output": None}], ids=["remote", "no output"])
def test_an_unknown_first_token_time_is_not_guessed(change: dict[str, Any]) -> None:
    timings = gateway_timings(Timings(), **MEASURED | change)
    assert (timings.first_token, timings.decode, timings.backend) == (None, None, 3.0)


def test_without_an_arrival_time_the_total_starts_in_the_gateway() -> None:
    assert gateway_timings(Timings(), now=15.0, started=10.0, tokenize_s=0.25, remote=False) == Timings(
        queue=0.0, tokenize=0.25, engine=5.25, total=5.25
    )
