"""What happens before a lease: names, consent, tools, images, windows; and the side roads that need none."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from modelyard.core.errors import (
    ContextOverflow,
    Forbidden,
    InvalidRequest,
    ModelyardError,
    NotFound,
    Unavailable,
    Unimplemented,
    Unsupported,
)
from modelyard.core.request import (
    Caller,
    EmbeddingRequest,
    Image,
    Message,
    Sampling,
    Text,
    Tool,
    ToolChoice,
    ToolResult,
)
from tests.gateway.stage import CALLER, Stage, asked, ids, model

LOOK = Tool("look_at", "Looks.", {"type": "object", "properties": {"at": {"type": "string"}}})


async def refused(stage: Stage, kind: type[ModelyardError], caller: Caller = CALLER, **request: Any) -> Any:
    with pytest.raises(kind) as caught:
        await stage.gateway.prepare(asked(**request), caller)
    with pytest.raises(kind):
        await stage.gateway.count(asked(**request), caller)
    assert (stage.running, stage.waiting) == (0, 0)
    return caught.value


# --- tools ------------------------------------------------------------------------------------------------------------


async def test_tools_are_offered() -> None:
    job = await Stage().gateway.prepare(asked(tools=(LOOK,)), CALLER)
    assert "look_at" in job.prompts[0].text


async def test_tool_choice_none_hides_them() -> None:
    stage, none = Stage(), ToolChoice("none")
    job = await stage.gateway.prepare(asked(tools=(LOOK,), tool_choice=none), CALLER)
    assert job.request.tools == ()
    assert job.prompts[0].ids == (await stage.gateway.prepare(asked(), CALLER)).prompts[0].ids


async def test_a_named_tool_must_be_on_offer() -> None:
    error = await refused(Stage(), InvalidRequest, tools=(LOOK,), tool_choice=ToolChoice("named", "other"))
    assert error.param == "tool_choice"
    assert "'other'" in error.message


@pytest.mark.parametrize("choice", [ToolChoice("required"), ToolChoice("named", "look_at")])
async def test_a_call_that_must_come_is_a_constraint(choice: ToolChoice) -> None:
    stage = Stage()
    assert (await stage.gateway.prepare(asked(tools=(LOOK,), tool_choice=choice), CALLER)).constraint is not None
    assert (await stage.gateway.prepare(asked(tools=(LOOK,)), CALLER)).constraint is None


# --- consent, names, models that cannot -------------------------------------------------------------------------------


async def test_a_remote_model_needs_consent() -> None:
    stage = Stage(remote=True)
    error = await refused(stage, Forbidden)
    assert error.code == "remote_not_allowed"
    assert "x-modelyard-allow-remote" in error.message
    willing = msgspec.structs.replace(CALLER, allow_remote=True)
    assert await stage.gateway.prepare(asked(), willing)
    assert await stage.gateway.prepare(asked(allow_remote=True), CALLER)


async def test_a_route_may_consent_for_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(remote=True)
    target = stage.gateway.router.resolve("demo", CALLER.endpoint)
    consenting = msgspec.structs.replace(target, allow_remote=True)
    monkeypatch.setattr(stage.gateway.router, "resolve", lambda *_: consenting)
    assert await stage.gateway.prepare(asked(), CALLER)


async def test_an_unknown_model_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage()
    monkeypatch.setattr(stage.gateway.router, "_routes", ())
    error = await refused(stage, NotFound, model="nobody")
    assert "demo" in error.message


async def test_a_model_that_could_not_be_defined_says_why() -> None:
    error = await refused(Stage(broken=InvalidRequest("no tokenizer here")), Unavailable)
    assert "no tokenizer here" in error.message


async def test_images_go_to_no_model_that_reads_only_text() -> None:
    message = Message("user", (Text("see"), Image("data:image/png;base64,AAAA")))
    error = await refused(Stage(), Unsupported, messages=(message,))
    assert error.code == "modality_unsupported"


async def test_a_tool_that_runs_on_its_makers_servers_is_left_out_and_the_log_says_which(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tools = (Tool("now"), Tool("web_search", kind="server", type="web_search_20250305"))
    with caplog.at_level("INFO", "modelyard.gateway"):
        job = await Stage().gateway.prepare(asked(tools=tools), CALLER)
    assert "web_search" not in job.prompts[0].text
    assert "tool_left_out: web_search_20250305 is not run here" in caplog.text


async def test_a_picture_that_a_tool_returned_is_a_word_to_a_model_that_reads_only_text() -> None:
    """It stays in an agent's history: a refusal would be the end of the session."""
    message = Message("tool", (ToolResult("c", (Text("here"), Image("data:image/png;base64,AAAA"))),))
    job = await Stage().gateway.prepare(asked(messages=(message,)), CALLER)
    assert "here\n[image: this model reads text only]" in job.prompts[0].text
    assert job.request.warnings


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
async def test_an_unfit_image_is_refused_by_a_model_that_sees(url: str, code: str | None) -> None:
    stage = Stage(modalities=("text", "image"))
    error = await refused(stage, ModelyardError, messages=(Message("user", (Image(url),)),))
    assert error.kind in ("invalid", "forbidden")
    assert code is None or error.code == code


# --- windows and raw prompts ------------------------------------------------------------------------------------------


async def test_a_long_prompt_overflows_before_anything_is_leased() -> None:
    stage = Stage()
    with pytest.raises(ContextOverflow) as caught:
        await stage.gateway.prepare(asked("word " * 30_000), CALLER)
    assert caught.value.prompt_tokens == await stage.gateway.count(asked("word " * 30_000), CALLER)
    assert stage.running == 0


async def test_long_and_many_are_rendered_aside_to_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    stage, long = Stage(), asked(messages=tuple(Message("user", (Text(f"word {i}"),)) for i in range(100)))
    counted = await stage.gateway.count(long, CALLER)
    raw = await stage.gateway.count(asked(messages=(), prompts=("one two", "three")), CALLER)
    monkeypatch.setattr("modelyard.gateway.gateway._INLINE_MESSAGES", 0)
    monkeypatch.setattr("modelyard.gateway.gateway._INLINE_CHARS", 0)
    assert await stage.gateway.count(long, CALLER) == counted
    assert await stage.gateway.count(asked(messages=(), prompts=("one two", "three")), CALLER) == raw


@pytest.mark.parametrize("id", [model().pipeline.tokenizer.size, 10**9])
async def test_a_token_that_the_model_does_not_have_is_refused(id: int) -> None:
    stage = Stage()
    error = await refused(stage, InvalidRequest, messages=(), prompts=((1, id),))
    assert (error.param, str(id) in error.message) == ("prompt", True)
    with pytest.raises(InvalidRequest) as caught:
        await stage.gateway.embed(EmbeddingRequest(model="demo", inputs=((id,),)), CALLER)
    assert caught.value.param == "input"


async def test_counting_needs_no_engine_and_agrees_with_what_is_sent() -> None:
    stage = Stage()
    assert stage.scheduler.status()["demo"].state == "stopped"
    job = await stage.gateway.prepare(asked("one two three"), CALLER)
    assert await stage.gateway.count(asked("one two three"), CALLER) == len(job.prompts[0].ids)


async def test_an_engine_elsewhere_that_is_not_up_cannot_count() -> None:
    with pytest.raises(Unimplemented):
        await Stage(kind="chat", text=None).gateway.count(asked(), CALLER)


async def test_an_engine_without_embeddings_says_so_and_keeps_no_place() -> None:
    async with Stage() as stage:
        with pytest.raises(Unsupported) as caught:
            await stage.gateway.embed(EmbeddingRequest(model="demo", inputs=("hi", tuple(ids("ho")))), CALLER)
        assert caught.value.code == "embeddings_unsupported"
        assert stage.running == 0


async def test_sampling_that_was_not_asked_for_is_the_models() -> None:
    stage = Stage(sampling=Sampling(temperature=0.1, top_k=5))
    job = await stage.gateway.prepare(asked(sampling=Sampling(top_k=9)), CALLER)
    assert (job.sampling.temperature, job.sampling.top_k) == (0.1, 9)


async def test_stopping_tells_everybody_why() -> None:
    why = Unavailable("the server is shutting down")
    async with Stage(places=1) as stage:
        holder, waiter = await stage.start(), await stage.start()
        stage.gateway.stop(why)
        for answer in (waiter, holder):
            _, events = await anext(answer)
            assert [event.error for event in events if hasattr(event, "error")] == [why]
            answer.close()
        assert (stage.running, stage.waiting) == (0, 0)
